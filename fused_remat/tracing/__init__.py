"""Reads the block of any layer from a recording of its operations, and proves it by running it."""
