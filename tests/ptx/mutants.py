"""Mutants of compiled kernels: one instruction broken at a time, and the launch executed again.

    python -m tests.ptx.mutants [80 90] [--kernel REGEX] [--kind REGEX] [--jobs 2]

A mutant is caught if the executor reports something, or stops, or results have other bits. Of the
others some comparisons and guards decide the same in every lane of the launches;
`equivalent.tsv` lists those that change nothing; any other that survives is an error.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import multiprocessing
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fused_remat import FusedRematCausalLayer, FusedRematLayer, ops
from fused_remat.triton import tables

from .decode import Code, Instruction, PTXError
from .driver import installed
from .execute import How, Outcome, Program, TensorMap, execute
from .lanes import Registers, Step, dtype_of, instruction

KNOWN = Path(__file__).with_name("equivalent.tsv")
Change = Callable[[Instruction], Instruction | None]  # None: it is deleted


@dataclass
class Kernel:
    """A kernel, and launches of it to repeat: their grids, and their arguments before.

    Attributes:
        reached: basic blocks that the first launch reaches.
    """

    name: str
    code: Code
    shared: int
    reached: set[int]
    launches: list[tuple[tuple[int, ...], list[Any]]]

    def run(self, n: int, code: Code, order: int = 0) -> tuple[Outcome, list[Tensor]]:
        """What happens in a launch, and the storages of all tensors afterwards."""
        storages: dict[int, Tensor] = {}

        def fresh(x: Any) -> Any:
            if isinstance(x, TensorMap):
                return dataclasses.replace(x, base=fresh(x.base))
            if not isinstance(x, Tensor):
                return x
            whole = x.untyped_storage()
            if whole._cdata not in storages:
                flat = torch.empty(0, dtype=x.dtype).set_(whole)
                storages[whole._cdata] = flat.clone()
            flat = storages[whole._cdata].view(x.dtype)
            return flat.as_strided(x.shape, x.stride(), x.storage_offset())

        grid, given = self.launches[n]
        how = How(order=order, lanes=4096)
        outcome = execute(Program(code, self.shared), grid, [fresh(x) for x in given], how)
        return outcome, list(storages.values())


def kernels(arch: int) -> list[Kernel]:
    """All of them, each as compiled for the launch that reaches most instructions; two sizes."""
    found: dict[Program, Kernel] = {}
    sizes = (344, 5), (152, 6)
    with installed(arch, sms=3) as driver:

        def keep(program: Program, grid: Sequence[int], arguments: Sequence[Any]) -> None:
            name = program.code.name.removesuffix("_kernel")
            given = tuple(grid), copy.deepcopy(list(arguments))
            if program not in found:
                reached = set(execute(program, grid, copy.deepcopy(given[1])).reached)
                found[program] = Kernel(name, program.code, program.shared, reached, [given])
            elif size != sizes[0]:
                found[program].launches[1:] = [given]

        driver.before = keep
        for size in sizes:
            _steps(*size)
    worth = lambda kernel: sum(len(kernel.code.blocks[n]) for n in kernel.reached)  # noqa: E731
    best = {kernel.name: kernel for kernel in sorted(found.values(), key=worth)}
    return list(best.values())


def _steps(tokens: int, heads: int) -> None:
    """Training steps: an encoder, a Llama block, and a loss."""
    bf16, width = {"dtype": torch.bfloat16, "backend": "triton"}, 64 * heads
    torch.manual_seed(0)
    for policy, in_one in itertools.product(("full", "balanced"), (True, False)):
        tables.MLP_IN_KERNELS = frozenset(tables.TILES["mlp_bwd"] if in_one else ())
        tables.ATTENTION_BY_ATEN = frozenset()
        encoder = FusedRematLayer(
            width, heads, 456, 0.1, "gelu", batch_first=True, norm_first=True, policy=policy, **bf16
        )
        llama = FusedRematCausalLayer(
            width, heads, 456, kv_heads=1, qk_norm=True, policy=policy, **bf16
        )
        padding = torch.rand(1, tokens) > 0.8
        x = torch.randn(1, tokens, width, dtype=torch.bfloat16, requires_grad=True)
        encoder(x, src_key_padding_mask=padding).float().square().sum().backward()
        angle = torch.randn(tokens, 32)
        llama(x, rope=(angle.cos(), angle.sin())).float().square().sum().backward()
    weight = torch.randn(456, width, dtype=torch.bfloat16).mul_(0.05).requires_grad_()
    labels = torch.randint(0, 456, (tokens,))
    ops.linear_cross_entropy(x[0], weight, labels, softcap=3.0, backend="triton").backward()


def mutants(kernel: Kernel, most: int) -> Iterator[tuple[str, int, Change]]:
    """Kind, number of an instruction that is reached, and how it is broken."""
    places: dict[str, list[tuple[int, Change]]] = defaultdict(list)
    numbers = itertools.count()
    for block, instructions in enumerate(kernel.code.blocks):
        for i in instructions:
            number = next(numbers)
            for kind, change in changes(i) if block in kernel.reached else ():
                places[kind].append((number, change))
    chosen = random.Random(kernel.name)
    for kind, some in places.items():
        if len(some) > most and kind in _SAMPLED:
            some = sorted(chosen.sample(some, most), key=lambda one: one[0])
        for number, change in some:
            yield kind, number, change


def _changed(code: Code, number: int, change: Change) -> Code:
    numbers = itertools.count()
    blocks = [
        [made for i in block for made in [change(i) if next(numbers) == number else i] if made]
        for block in code.blocks
    ]
    nothing = Instruction("mov.pred", ("%p0", "%p0"))
    return dataclasses.replace(code, blocks=[block or [nothing] for block in blocks])


_DIFFERED: list[bool] = []


@instruction("differ")
def _differ_step(i: Instruction, k: Registers) -> Step:
    """Notes that two operands differ in a lane."""
    dtype = dtype_of(i.type)
    reads = [k.read(text, dtype) for text in i.operands]

    def step(m: Any, mask: Any) -> None:
        a, b = (m.full(read(m.R))[m.taking(mask)] for read in reads)
        if (a != b).any():
            _DIFFERED.append(True)

    return step


def idle(kernel: Kernel, number: int, change: Change) -> bool:
    """Whether what a changed comparison or guard decides is the same in every lane, every time."""
    code = dataclasses.replace(kernel.code, widths=kernel.code.widths | {"%mutant": 0})

    def watched(i: Instruction) -> list[Instruction]:
        changed = change(i)
        assert changed is not None
        if i.parts[0] == "setp":
            mutant = dataclasses.replace(changed, operands=("%mutant", *changed.operands[1:]))
            return [mutant, i, Instruction("differ.pred", ("%mutant", i.operands[0]), i.guard)]
        if i.guard:
            return [Instruction("differ.pred", (i.guard, "-1")), i]
        return [Instruction("differ.u32", (i.operands[3], i.operands[2])), i]

    numbers = itertools.count()
    blocks = [
        [made for i in block for made in (watched(i) if next(numbers) == number else [i])]
        for block in code.blocks
    ]
    _DIFFERED.clear()
    for n in range(len(kernel.launches)):
        kernel.run(n, dataclasses.replace(code, blocks=blocks))
    return not _DIFFERED


def _opcode(before: str, after: str) -> Change:
    return lambda i: dataclasses.replace(i, opcode=i.opcode.replace(before, after))


def _operands(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Change:
    return lambda i: dataclasses.replace(i, operands=change(i.operands))


_COMPARED = {"lt": "le", "le": "lt", "gt": "ge", "ge": "gt", "eq": "ne", "ne": "eq"}
_SAMPLED = {"guard of a load", "guard of a store", "comparison", "transposition"}
_out: Change = lambda i: None  # noqa: E731


def changes(i: Instruction) -> Iterator[tuple[str, Change]]:
    """What may be broken about an instruction."""
    head, opcode = i.parts[0], i.opcode
    later = _operands(lambda given: (str(int(given[0]) + 1),))
    if opcode == "bar.sync":
        yield "barrier", _out
    elif opcode in ("cp.async.wait_group", "wgmma.wait_group.sync.aligned"):
        kind = "cp.async wait" if head == "cp" else "wgmma wait"
        yield kind, later
        yield kind, _out
    elif opcode.startswith("cp.async.bulk.wait_group"):
        yield "bulk wait", later
        yield "bulk wait", _out
    elif opcode.startswith("mbarrier.try_wait"):
        yield "mbarrier wait", lambda i: Instruction("mov.pred", (i.operands[0], "-1"))
    elif opcode.startswith("fence.proxy"):
        yield "proxy fence", _out
    elif opcode == "wgmma.fence.sync.aligned":
        yield "wgmma fence", _out
    elif ".trans" in opcode:
        yield "transposition", _opcode(".trans", "")
    elif head in ("ldmatrix", "stmatrix"):
        yield "transposition", _opcode(".shared", ".trans.shared")
    elif opcode.startswith("wgmma.mma_async"):
        flip = lambda given: (*given[:-1], str(1 - int(given[-1])))  # noqa: E731
        yield "transposition", _operands(flip)
    elif head in ("ld", "st") and i.guard and i.parts[1] == "global":
        kind = "guard of a store" if head == "st" else "guard of a load"
        yield kind, lambda i: dataclasses.replace(i, guard="")
    elif opcode.startswith("cp.async.c") and len(i.operands) > 3:
        yield "guard of a load", _operands(lambda given: given[:3])
    elif head == "setp" and i.parts[1] in _COMPARED:
        yield "comparison", _opcode(f".{i.parts[1]}.", f".{_COMPARED[i.parts[1]]}.")


def outcome(kernel: Kernel, code: Code, expected: list[list[Tensor]]) -> str:
    """How a mutant is caught, or "": warps together, and in the last launch one by one."""
    last = len(kernel.launches) - 1
    for order, n in [*((0, n) for n in range(last + 1)), (1, last), (-1, last)]:
        try:
            done, found = kernel.run(n, code, order)
        except (PTXError, IndexError) as error:
            return f"stops: {error}"
        if done.reports:
            return done.reports[0]
        if not all(map(torch.equal, map(_bits, found), map(_bits, expected[n]))):
            return "results differ"
    return ""


def _bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8)


@dataclass
class Result:
    """A mutant and its end: `how` it was caught, or ""; whether it never decided otherwise."""

    kind: str
    name: str  # "sm_90 linear_fwd: barrier: bar.sync, linear.py:261:30: PTX line 802"
    how: str
    idle: bool


def examine(work: tuple[int, Kernel, str, int]) -> list[Result]:
    """The mutants of one kernel, of some kinds."""
    arch, kernel, kinds, most = work
    done = [kernel.run(n, kernel.code) for n in range(len(kernel.launches))]
    for outcome_, _ in done:
        outcome_.check()
    rows, every, expected = [], list(kernel.code.instructions), [made for _, made in done]
    for kind, number, change in mutants(kernel, most):
        if re.search(kinds, kind):
            i = every[number]
            where = f"{i.opcode}, {i.source.split(' @')[0]}: PTX line {i.line}"
            name = f"sm_{arch} {kernel.name}: {kind}: {where}"
            how = outcome(kernel, _changed(kernel.code, number, change), expected)
            decides = kind.startswith(("comparison", "guard"))
            same = not how and decides and idle(kernel, number, change)
            rows.append(Result(f"sm_{arch} {kind}", name, how, same))
    return rows


def equivalent() -> list[tuple[str, str]]:
    """Regular expressions of mutants' names, and why those change nothing."""
    lines = [line.split("\t") for line in KNOWN.read_text().splitlines() if line[:1] != "#"]
    return [(pattern, reason) for pattern, reason in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch", type=int, nargs="*", default=[80, 90])
    parser.add_argument("--kernel", default="", help="a regular expression")
    parser.add_argument("--kind", default="", help="a regular expression")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most", type=int, default=5, help="of a sampled kind in a kernel")
    given = parser.parse_args()
    reasons, total = equivalent(), defaultdict(Counter)
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        for arch in given.arch:
            chosen = [one for one in kernels(arch) if re.search(given.kernel, one.name)]
            work = [(arch, one, given.kind, given.most) for one in chosen]
            for rows in pool.imap(examine, work):
                for row in rows:
                    why = next((w for p, w in reasons if re.search(p, row.name)), "")
                    end = "equivalent" if why else "survives"
                    end = "caught" if row.how else "idle" if row.idle else end
                    total[row.kind][end] += 1
                    print(f"{end:<11}{row.name}: {row.how or why}", flush=True)
    print()
    for kind, ends in sorted(total.items()):
        named = ends["caught"] + ends["survives"]
        rest = f"{ends['idle']} decide the same in these launches; {ends['equivalent']} equivalent"
        print(f"{kind:<24} {ends['caught']:>4} of {named} caught; {rest}")
    return int(any(ends["survives"] for ends in total.values()))


if __name__ == "__main__":
    sys.exit(main())
