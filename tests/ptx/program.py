"""A compiled kernel, ready to be executed: each instruction of its PTX as a step."""

from __future__ import annotations

import itertools
import re
from collections import Counter

from . import conversions, copies, matrix, mbarriers, memory, numbers, tensor_maps, warps, wgmma
from .accumulators import accumulators, unfenced
from .decode import ENDS, Code, Instruction, decode
from .lanes import Registers, Step
from .machine import End, end_of

FAMILIES = (
    numbers, conversions, memory, matrix, copies, warps, mbarriers, tensor_maps, wgmma,
)  # fmt: skip


class Program:
    """PTX of one kernel.

    Attributes:
        shared: bytes of shared memory that a launch gives it.
        blocks: the steps of each basic block, and where lanes go then.
        opcodes: of each basic block.
        warpgroups: whether it uses the asynchronous proxy: tensor maps, wgmma.
        grain: bytes of shared memory that are distinguished: the smallest element written there.
    """

    def __init__(self, ptx: str | Code, shared: int) -> None:
        self.code = code = decode(ptx) if isinstance(ptx, str) else ptx
        self.shared = shared
        self.registers = Registers(code)
        opcodes = {i.opcode for i in code.instructions}
        self.warpgroups = any(o.startswith(("wgmma", "cp.async.bulk", "mbarrier")) for o in opcodes)
        sizes = [re.search(r"\.[busf](8|16|32|64)$", o) for o in opcodes if ".shared" in o]
        self.grain = min([int(s[1]) // 8 for s in sizes if s and "matrix" not in s.string] + [4])
        self.pending, self.unfenced = accumulators(code), unfenced(code)
        self.blocks: list[tuple[list[Step], End]] = []
        self.opcodes = [Counter(i.opcode for i in block) for block in code.blocks]
        for number, block in enumerate(code.blocks):
            last = block[-1] if block[-1].parts[0] in ENDS else None
            end = end_of(last, self.registers, number, code.labels)
            self.blocks.append((list(self._steps(block[:-1] if last else block)), end))

    def _steps(self, block: list[Instruction]):
        """Matrix products that follow each other are one step."""
        for opcode, run in itertools.groupby(block, lambda i: i.opcode * (i.parts[0] == "mma")):
            if opcode:
                yield from matrix.products(list(run), self.registers)
            else:
                for i in run:
                    step = self.registers.step(i)
                    yield wgmma.checked(step, i, self.registers, self.pending, self.unfenced)
