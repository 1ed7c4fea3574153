"""A launch: a program over a grid, with arguments as a GPU's driver would get them."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .decode import PTXError
from .lanes import Array
from .machine import How, Machine
from .program import Program
from .reports import Reports
from .spaces import Global
from .tensor_maps import TensorMap

__all__ = ["How", "Outcome", "Program", "TensorMap", "execute"]


@dataclass
class Outcome:
    """What a launch did.

    Attributes:
        reports: what was wrong: races, accesses outside of tensors, reads before a wait.
        opcodes: instructions of warps.
        counts: "multiply-adds" of matrix instructions; by `How.count` also 32-byte "load sectors"
            and "store sectors" of all warps, "touched load sectors" and "touched store sectors" of
            the launch, "shared passes" and "shared passes least".
        reached: how many warps ran each basic block.
    """

    reports: list[str] = field(default_factory=list)
    opcodes: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    reached: Counter[int] = field(default_factory=Counter)

    def check(self) -> None:
        """Raises an AssertionError if anything was wrong."""
        if self.reports:
            raise AssertionError("\n".join(self.reports))


def execute(
    program: Program, grid: Sequence[int], arguments: Sequence[Any], how: How | None = None
) -> Outcome:
    """Runs a launch on tensors, numbers, tensor maps and None, which are changed in place."""
    how, reports, outcome = how or How(), Reports(), Outcome()
    memory = Global(reports)
    parameters = [
        _parameter(memory, n, kind, value)
        for n, (kind, value) in enumerate(
            zip(program.code.parameters, [*arguments, None, None], strict=True)
        )
    ]
    grid = (*grid, 1, 1)[:3]
    blocks = np.arange(int(np.prod(grid)))
    if how.order < 0:
        blocks = blocks[::-1]
    together = max(1, how.lanes // program.code.threads)
    with np.errstate(all="ignore"), _one_thread():
        for first in range(0, len(blocks), together):
            some = blocks[first : first + together]
            m = Machine(program, some, grid, parameters, memory, how, reports, outcome.counts)
            m.run()
            outcome.reached.update(m.reached)
    for number, warps in outcome.reached.items():
        for opcode, times in program.opcodes[number].items():
            outcome.opcodes[opcode] += times * warps
    for region in memory.regions:
        region.back()
    for what, sectors in memory.touched.items():
        if sectors:
            outcome.counts[f"touched {what} sectors"] = np.unique(np.concatenate(sectors)).size
    outcome.reports = reports.lines()
    return outcome


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Matrices are small: threads would only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _parameter(memory: Global, number: int, kind: str, value: Any) -> Array:
    """The bits of a parameter, one for all lanes; scratch memory that is not requested is 0."""
    if isinstance(value, TensorMap):
        memory.maps[number] = replace(value, address=memory.place(value.base))
        return np.zeros(8, np.uint8)
    if kind in ("f16", "f64") or (kind == "f32") != isinstance(value, float):
        raise PTXError(f"parameter {number} is {kind}, got {value!r}")
    if kind == "f32":
        return np.array([value], np.float32)
    if isinstance(value, Tensor):
        value = memory.place(value)
    return np.array([int(value or 0) & (2**64 - 1)], np.uint64)
