"""STAND-IN over the first trial (../shared/ptx), to be replaced by the decoder and machine of this folder.

The interface stays: Program, TensorMap, How, Outcome, execute.
"""
from __future__ import annotations
import sys
from dataclasses import dataclass, field
from typing import Any
sys.path.insert(0, "/work/shared/ptx")
import torch
from torch import Tensor
import ptx_exec, ptx_machine
from ptx_machine import Machine, Region, Report


class Program(ptx_exec.Program):
    def __init__(self, ptx: str, shared: int):
        super().__init__(ptx)
        self.shared = shared
        self.ptx = ptx


@dataclass(frozen=True)
class TensorMap:
    base: Tensor
    shape: tuple
    strides: tuple
    box: tuple
    swizzle: int
    element: int


@dataclass(frozen=True)
class How:
    races: bool = True
    count: bool = False
    order: int = 0
    strict: bool = True


@dataclass
class Outcome:
    reports: list = field(default_factory=list)
    counts: dict = field(default_factory=dict)
    strict: bool = True

    def check(self):
        if self.reports and self.strict:
            raise AssertionError("; ".join(self.reports))


class _View:
    def __init__(self, m):
        self.shape, self.strides = m.shape, m.strides


def execute(program: Program, grid, arguments, how: How) -> Outcome:
    if 0 in grid:
        return Outcome()
    regions, known = [], {}
    def place(x):
        key = x.untyped_storage()._cdata
        if key not in known:
            known[key] = len(regions)
            regions.append(Region(x.untyped_storage(), how.races))
        k = known[key]
        regions[k].allow(x)
        return ((k + 1) << 40) + regions[k].shift + x.storage_offset() * x.element_size()
    params, descs = [], {}
    for v in arguments:
        if isinstance(v, Tensor):
            params.append(("i", place(v)))
        elif isinstance(v, TensorMap):
            descs[len(params)] = (_View(v), place(v.base), {"block_size": v.box, "swizzle": v.swizzle, "elem_size": v.element})
            params.append(("desc", 0))
        elif isinstance(v, float):
            params.append(("f", v))
        elif v is None:
            params.append(("i", 0))
        else:
            params.append(("i", v))
    params += [("i", 0)] * 2
    assert len(params) == len(program.params), (len(params), len(program.params))
    for r in regions:
        r.whole = bool(r.valid[r.shift:r.size].all())
    report = Report()
    m = Machine(program, params, regions, grid, program.shared, report, how.races, 8192, descs)
    m.run()
    for r in regions:
        r.back()
    return Outcome([str(report)] if report else [], {"lane instructions": sum(program.sizes[b] * n for b, n in m.executed.items())}, how.strict)
