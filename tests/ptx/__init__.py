"""Compiled kernels executed on a CPU: PTX decoded, run by numpy over all lanes, checked as it runs.

`driver.installed(90)` makes it Triton's driver; kernels are then compiled as for that GPU, and
launched on CPU tensors by the same path as on one. Sections are those of the PTX ISA 9.0 manual;
`opcodes.txt` lists what our kernels use, each of which a test here executes alone.
"""
