"""Registers of wgmma by a kernel's text: PTX ISA 9.7.15.7.

Which of them may be pending, and where others may use them before a wgmma without wgmma.fence.
"""

from __future__ import annotations

from .decode import Code, Instruction


def accumulators(code: Code) -> set[str]:
    """Registers that may hold a pending accumulator: of wgmma, and what mov copies them to."""
    found: set[str] = set()
    moves: list[tuple[str, str]] = []
    for i in code.instructions:
        if i.opcode.startswith("wgmma.mma_async"):
            found |= set(i.operands[0])
        elif i.parts[0] == "mov" and all(isinstance(x, str) for x in i.operands):
            moves.append(i.operands)  # type: ignore[arg-type]
    before = -1
    while before != len(found):
        before = len(found)
        found |= {into for into, given in moves if given in found}
    return found


def unfenced(code: Code) -> set[int]:
    """Lines of wgmma whose registers others may have used since wgmma.fence: 9.7.15.7.1.

    On some path through the blocks; at the kernel's start all of them are in use.
    """
    used: set[str] = set()
    for i in code.instructions:
        if i.parts[1:2] == ["mma_async"]:
            used |= _registers(i)
    entering, found, left = {0: set(used)}, set(), [0] if used else []
    while left:
        number = left.pop()
        block, open_ = code.blocks[number], set(entering[number])
        for i in block:
            if i.parts[1:2] == ["mma_async"]:
                found |= {i.line} if open_ & _registers(i) else set()
            elif i.opcode == "wgmma.fence.sync.aligned":
                open_ = set()
            else:
                open_ |= used.intersection(name for _, name in i.names)
        last, then = block[-1], [number + 1]
        if last.parts[0] in ("bra", "ret", "exit") and not last.guard:
            then = []
        if last.parts[0] == "bra":
            then.append(code.labels[last.operands[0]])
        for after in then:
            known = entering.get(after)
            if after < len(code.blocks) and (known is None or not open_ <= known):
                entering[after] = open_ | (known or set())
                left.append(after)
    return found


def _registers(i: Instruction) -> set[str]:
    """Of a wgmma: the accumulators, and A if it is there."""
    return {name for group in i.operands[:2] if isinstance(group, tuple) for name in group}
