"""Registers as arrays of lanes, and the table of instructions that work on them.

A register holds an element for each lane, or one for all lanes while they have the same; its bits
are unsigned integers of its width, a predicate's are bool. A handler turns an instruction into a
step, a function of the machine and of the lanes that take part: None for all, else a mask.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from .decode import Address, Code, Instruction, PTXError

if TYPE_CHECKING:
    from .machine import Machine

Array = np.ndarray
Mask = Array | None
Step = Callable[["Machine", Mask], None]
Read = Callable[[list[Array]], Array]
Write = Callable[["Machine", Array, Mask], None]
Handler = Callable[[Instruction, "Registers"], Step]

#: Opcode's first word -> handler. PTX ISA sections are named where a handler is.
INSTRUCTIONS: dict[str, Handler] = {}
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
SIGNED = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
FLOAT = {2: np.float16, 4: np.float32, 8: np.float64}
#: Registers that describe the machine, by the names of PTX (chapter 10).
SPECIAL = {name: 4 for name in ("%tid.x", "%laneid", "%warpid", "%ntid.x")} | {
    f"%{what}.{axis}": 4 for what in ("ctaid", "nctaid") for axis in "xyz"
} | {"%tid.y": 4, "%tid.z": 4}  # fmt: skip
#: Parameter n is at address (PARAMETERS + n) << 40.
PARAMETERS = 0x7000


def instruction(*names: str) -> Callable[[Handler], Handler]:
    """Registers a handler under the first words of opcodes."""

    def register(handler: Handler) -> Handler:
        INSTRUCTIONS.update(dict.fromkeys(names, handler))
        return handler

    return register


def dtype_of(kind: str) -> Any:
    """numpy's type of a PTX type: "s32", "u8", "b64", "f16"; of "pred" bool."""
    if kind == "pred":
        return np.bool_
    found = re.fullmatch(r"([subf])(8|16|32|64)", kind)
    if found is None:
        raise PTXError(f"unknown type {kind}")
    size = int(found[2]) // 8
    return {"s": SIGNED, "f": FLOAT}.get(found[1], UNSIGNED)[size]


class Registers:
    """The register file of a kernel: which registers there are, and how operands are read."""

    def __init__(self, code: Code) -> None:
        self.code = code
        self.widths = SPECIAL | code.widths
        self.index = {name: n for n, name in enumerate(self.widths)}
        self.local = _local(code)

    def read(self, text: Any, dtype: Any) -> Read:
        """An operand as an array of `dtype`: a register, or a constant for all lanes."""
        if dtype is np.bool_ and text[0] == "!":
            given = self.read(text[1:], dtype)
            return lambda R: ~given(R)
        if text not in self.index:
            constant = self.constant(text, np.dtype(dtype))
            return lambda R: constant
        n, width, size = self.index[text], self.widths[text], np.dtype(dtype).itemsize
        if dtype is np.bool_ or width == 0:
            if dtype is not np.bool_ or width:
                raise PTXError(f"{text} is not of type {np.dtype(dtype)}")
            return itemgetter(n)
        unsigned = UNSIGNED[size]
        if width == size:
            return itemgetter(n) if dtype is unsigned else lambda R: R[n].view(dtype)
        if width < size and np.dtype(dtype).kind == "f":
            raise PTXError(f"{text} is narrower than {np.dtype(dtype)}")
        return lambda R: R[n].astype(unsigned).view(dtype)

    def constant(self, text: str, dtype: np.dtype[Any]) -> Array:
        """A number or a symbol's address, one for all lanes."""
        bits, parameter = UNSIGNED[dtype.itemsize], re.search(r"_param_(\d+)$", text)
        if dtype == np.bool_:
            return np.array([bool(int(text, 0))])
        if parameter:
            value = (PARAMETERS + int(parameter[1])) << 40
        elif text in self.code.symbols:
            value = 0 if text == "global_smem" else 0xDEAD << 40
        elif re.fullmatch(r"0[fFdD][0-9a-fA-F]+", text):
            value = int(text[2:], 16)
        elif re.fullmatch(r"-?(0x[0-9a-fA-F]+|\d+)U?", text):
            value = int(text.rstrip("U"), 0)
        else:
            raise PTXError(f"unknown operand {text!r}")
        return np.array([value & ((1 << 8 * dtype.itemsize) - 1)], bits).view(dtype)

    def write(self, text: Any, dtype: Any) -> Write:
        """A register that takes results of `dtype`: as they are, or widened, as signed ones."""
        if text == "_":
            return lambda m, x, mask: None
        n, width, size = self.index[text], self.widths[text], np.dtype(dtype).itemsize
        if (dtype is np.bool_) != (width == 0) or (width and width < size):
            raise PTXError(f"a result of {np.dtype(dtype)} does not fit {text}")
        bits = np.bool_ if not width else UNSIGNED[width]
        grown = (SIGNED if np.dtype(dtype).kind == "i" else UNSIGNED).get(width, np.bool_)
        whole, wider = text in self.local, width > size

        def put(m: Machine, x: Array, mask: Mask) -> None:
            if wider:
                x = x.astype(grown)
            if x.dtype != bits:
                x = x.view(bits)
            if mask is not None and not whole:
                x = np.where(mask, x, m.R[n])
            m.R[n] = x

        return put

    def address(self, operand: Any, dtype: Any) -> Read:
        """base + offset, as int64; shared addresses are of 32 bits."""
        if not isinstance(operand, Address):
            raise PTXError(f"{operand} is no address")
        base, offset = self.read(operand.base, dtype), np.int64(operand.offset)
        return lambda R: base(R).astype(np.int64) + offset

    def all(self, operands: Iterable[str], dtype: Any) -> Callable[[list[Array]], list[Array]]:
        """Several operands."""
        reads = [self.read(text, dtype) for text in operands]
        return lambda R: [read(R) for read in reads]

    def step(self, i: Instruction) -> Step:
        """What an instruction does, under its guard."""
        handler = INSTRUCTIONS.get(i.parts[0])
        if handler is None:
            raise i.unknown()
        try:
            step = handler(i, self)
        except (PTXError, KeyError, IndexError, TypeError, ValueError) as error:
            raise PTXError(f"{i}: {error or type(error).__name__}") from error
        return step if not i.guard else _guarded(step, self.read(i.guard, np.bool_))


def _guarded(step: Step, guard: Read) -> Step:
    def run(m: Machine, mask: Mask) -> None:
        mask = m.where(guard(m.R), mask)
        if mask is None or mask.any():
            step(m, mask)

    return run


def _local(code: Code) -> set[str]:
    """Registers of one block that are written there, without a guard, before they are read.

    Lanes that are elsewhere have no use for their old value.
    """
    homes: dict[str, set[int]] = {}
    early, guarded = set(), set()
    for number, block in enumerate(code.blocks):
        written: set[str] = set()
        for i in block:
            stored = i.parts[0] in ("st", "stmatrix", "bra", "cp", "mbarrier")
            names = [(-1 if stored else n, name) for n, name in i.names]
            for n, name in names:
                homes.setdefault(name, set()).add(number)
                if n != 0 and name not in written:
                    early.add(name)
            targets = {name for n, name in names if n == 0}
            written |= targets
            if i.parts[0] == "wgmma":  # which reads its registers when it is waited for
                guarded |= {name for _, name in names}
            elif i.guard:
                guarded |= targets
    return {name for name, at in homes.items() if len(at) == 1} - early - guarded


def only(i: Instruction, *known: str) -> None:
    """The modifiers between an opcode's first word and its type are among those known."""
    for modifier in i.parts[1:-1]:
        if modifier not in known:
            raise i.unknown(f"with .{modifier}")


def pure(i: Instruction, k: Registers, function: Callable[..., Array], into: Any, *of: Any) -> Step:
    """A result for each lane: `function` of the operands read as `of`, written as `into`."""
    assert isinstance(i.operands[0], str)
    write = k.write(i.operands[0], into)
    reads = [k.read(text, dtype) for text, dtype in zip(i.operands[1:], of, strict=True)]
    if len(reads) == 1:
        (a,) = reads
        return lambda m, mask: write(m, function(a(m.R)), mask)
    if len(reads) == 2:
        a, b = reads
        return lambda m, mask: write(m, function(a(m.R), b(m.R)), mask)
    return lambda m, mask: write(m, function(*[read(m.R) for read in reads]), mask)
