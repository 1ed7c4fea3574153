"""PTX text as data: parameters, registers, and basic blocks of instructions.

Follows the PTX ISA: syntax (chapter 4), state spaces and types (5), operands (6), labels and
directives (11). What is not understood is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property


class PTXError(Exception):
    """PTX that is not understood, or that cannot go on."""


@dataclass(frozen=True)
class Address:
    """[base + offset], and the coordinates of a tensor map's box where it has some."""

    base: str
    offset: int = 0
    coordinates: tuple[str, ...] = ()


Operand = str | tuple[str, ...] | Address


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
        opcode: with its modifiers, such as "add.s32".
        operands: registers, numbers and symbols as written; {a, b} as a tuple; [a+4] as an Address.
        guard: "%p1", "!%p1" or "".
        line: in the PTX text.
        source: where Triton compiled it from, innermost call first: "norms.py:260:26 @[ ... ]".
    """

    opcode: str
    operands: tuple[Operand, ...] = ()
    guard: str = ""
    line: int = 0
    source: str = ""

    @cached_property
    def parts(self) -> list[str]:
        return self.opcode.split(".")

    @cached_property
    def type(self) -> str:
        return self.parts[-1]

    @property
    def names(self) -> Iterator[tuple[int, str]]:
        """Registers (and other words) of the operands, with the operand's number."""
        for number, operand in enumerate(self.operands):
            if isinstance(operand, Address):
                yield from ((-1, word) for word in (operand.base, *operand.coordinates))
            else:
                words = operand if isinstance(operand, tuple) else operand.split("|")
                yield from ((number, word) for word in words)
        if self.guard:
            yield -1, self.guard.lstrip("!")

    def unknown(self, what: str = "") -> PTXError:
        return PTXError(f"unknown opcode {self.opcode} {what} (PTX line {self.line})")

    def __str__(self) -> str:
        where = f", {self.source.split(' @')[0]}" if self.source else ""
        return f"PTX line {self.line}: {self.opcode}{where}"


#: Ends a basic block: what may send lanes to different places, or has them wait.
ENDS = ("bra", "ret", "exit", "bar", "barrier")


@dataclass
class Code:
    """A kernel: its name, parameters, registers and basic blocks."""

    name: str
    parameters: list[str]  # their types: "u32", "f32", "b8[128]"
    threads: int
    widths: dict[str, int] = field(default_factory=dict)  # of registers, bytes; 0: predicate
    symbols: set[str] = field(default_factory=set)
    blocks: list[list[Instruction]] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    @property
    def instructions(self) -> Iterator[Instruction]:
        for block in self.blocks:
            yield from block


_ENTRY = re.compile(r"\.visible \.entry\s+([\w$]+)\s*\((.*?)\)\s*(\.[^{]*)\{", re.S)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+).*?(\[\d+\])?$")
_TOKEN = re.compile(r"//[^\n]*|[\n;{}]|[^;{}\n/]+|/")
_WORD = re.compile(r"(?<![\w$%#.])[A-Za-z_$][\w$]*")


def decode(text: str) -> Code:
    """The kernel of a PTX module, which has one."""
    entry = _ENTRY.search(text)
    threads = entry and re.search(r"\.reqntid\s+(\d+)", entry[3])
    if entry is None or threads is None:
        raise PTXError("a module needs an entry with .reqntid")
    found = [
        _PARAMETER.search(re.sub(r"//.*", "", p).strip()) for p in entry[2].split(",") if p.strip()
    ]
    code = Code(entry[1], [m[1] + (m[2] or "") for m in found if m], int(threads[1]))
    code.symbols = set(
        re.findall(r"\.(?:shared|global)\s.*?([\w$]+)\[\d*\]", text[: entry.start()])
    )
    blocks: list[list[Instruction]] = [[]]
    for label, instruction in _statements(text, entry.end(), code):
        if label:
            if blocks[-1]:
                blocks.append([])
            code.labels[label] = len(blocks) - 1
            continue
        blocks[-1].append(instruction)
        if instruction.parts[0] in ENDS:
            blocks.append([])
    code.blocks = blocks if blocks[-1] else blocks[:-1]
    return code


def _statements(text: str, start: int, code: Code) -> Iterator[tuple[str, Instruction]]:
    """Labels (and no instruction), and instructions (and no label), of an entry's body."""
    line, begun, said, depth, source = text.count("\n", 0, start) + 1, 0, "", 0, ""
    scopes: list[dict[str, str]] = []  # the names that each open block declares
    opened = 0

    def local(match: re.Match[str]) -> str:
        return next((s[match[0]] for s in reversed(scopes) if match[0] in s), match[0])

    for token in _TOKEN.finditer(text, start):
        word = token[0]
        if word == "\n":
            line += 1
            label = re.fullmatch(r"\s*([\w$]+):\s*", said)
            if label or said.lstrip().startswith((".loc", ".file", ".pragma")):
                if label and not label[1].startswith("$L__tmp"):
                    if scopes:
                        scopes[-1][label[1]] = f"{label[1]}#{opened}"
                    yield _WORD.sub(local, label[1]), Instruction("")
                said = ""
        elif word.startswith("//"):
            if said.lstrip().startswith(".loc"):
                source = word[2:].strip()
        elif word == "{" and not said.strip():
            opened += 1
            scopes.append({})
        elif word == "}" and not depth:
            if not scopes:
                return
            scopes.pop()
        elif word == ";" and not depth:
            statement, said = said.strip(), ""
            if statement.startswith(".reg"):
                kind, names = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", statement, re.S).groups()
                width = 0 if kind == "pred" else int(kind[1:]) // 8
                for name in re.split(r"\s*,\s*", names.strip()):
                    many = re.fullmatch(r"(%[\w$]+)<(\d+)>", name)
                    if many:
                        each = (f"{many[1]}{n}" for n in range(int(many[2])))
                        code.widths |= dict.fromkeys(each, width)
                    elif scopes:
                        scopes[-1][name] = f"{name}#{opened}"
                        code.widths[f"{name}#{opened}"] = width
                    else:
                        code.widths[name] = width
            elif statement and not statement.startswith(".pragma"):
                if scopes:
                    statement = _WORD.sub(local, statement)
                yield "", _instruction(statement, begun, source)
        else:
            if not said.strip():
                begun = line
            said += word
            depth += (word == "{") - (word == "}")


def _instruction(statement: str, line: int, source: str) -> Instruction:
    found = re.fullmatch(r"(?:@(!?[%\w#]+)\s+)?([a-z][\w.:]*)\s*(.*)", statement, re.S)
    if found is None:
        raise PTXError(f"cannot read PTX line {line}: {statement[:80]!r}")
    guard, opcode, rest = found.groups()
    texts = re.findall(r"\s*((?:\[[^\]]*\]|\{[^}]*\}|[^,{\[])+)", rest)
    return Instruction(opcode, tuple(map(_operand, texts)), guard or "", line, source)


def _operand(text: str) -> Operand:
    text = text.strip()
    if text.startswith("{"):
        return tuple(re.split(r"\s*,\s*", text[1:-1].strip()))
    if not text.startswith("["):
        return text
    found = re.fullmatch(r"\[\s*([^\s,+]+)\s*(?:\+\s*(-?\w+)\s*)?(?:,\s*\{([^}]*)\}\s*)?\]", text)
    if found is None:
        raise PTXError(f"cannot read the address {text}")
    coordinates = tuple(re.split(r"\s*,\s*", found[3].strip())) if found[3] else ()
    return Address(found[1], int(found[2] or "0", 0), coordinates)
