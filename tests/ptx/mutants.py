"""Mutants of compiled kernels: one instruction broken at a time, and the launch executed again.

    python -m tests.ptx.mutants [80 90] [--kernel WORDS] [--kind WORDS] [--jobs 2] [--most 12]

A mutant is caught if the executor reports something, or stops, or results differ by more than
rounding. What survives is named in `equivalent.txt`, with the reason why it changes nothing that a
GPU could show; anything else that survives is an error.
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
import time
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
from .driver import GPUS, installed
from .execute import How, Program, TensorMap, execute

KNOWN = Path(__file__).with_name("equivalent.txt")
Change = Callable[[Instruction], Instruction | None]  # None: it is left out


@dataclass
class Launch:
    """A launch to repeat: tensors as they were before."""

    kernel: str
    program: Program
    grid: tuple[int, ...]
    arguments: list[Any]

    def run(self, program: Program) -> tuple[list[str], list[Tensor]]:
        """Reports, and the storages of all tensors afterwards."""
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

        outcome = execute(program, self.grid, [fresh(x) for x in self.arguments], How(lanes=4096))
        return outcome.reports, list(storages.values())


def launches(arch: int) -> list[Launch]:
    """One launch of each kernel, of layers that launch them all: several tiles, ragged sizes."""
    found: dict[str, Launch] = {}

    def keep(program: Program, grid: Sequence[int], arguments: Sequence[Any]) -> None:
        name = program.code.name.removesuffix("_kernel")
        wanted = [x for x in arguments if isinstance(x, Tensor | TensorMap)]
        if name not in found and wanted:
            found[name] = Launch(name, program, tuple(grid), copy.deepcopy(list(arguments)))

    shared = GPUS[arch][1]
    GPUS[arch] = 3, shared  # so that persistent kernels loop
    with installed(arch) as driver:
        driver.before = keep
        _steps()
    return list(found.values())


def _steps() -> None:
    """Training steps: an encoder, a Llama block, both exact and in 8 bits, and a loss."""
    bf16 = {"dtype": torch.bfloat16, "backend": "triton"}
    torch.manual_seed(0)
    for policy, in_one in itertools.product(("full", "balanced8"), (True, False)):
        families = frozenset(tables.FAMILIES.values())
        tables.MLP_BWD_IN_ONE = families if in_one else frozenset()
        tables.LINEAR_END_IN_KERNEL, tables.ATTENTION_BY_ATEN = families, frozenset()
        encoder = FusedRematLayer(
            320, 5, 456, 0.1, "gelu", batch_first=True, norm_first=True, policy=policy, **bf16
        )
        padding = torch.rand(1, 152) > 0.8
        x = torch.randn(1, 152, 320, dtype=torch.bfloat16, requires_grad=True)
        encoder(x, src_key_padding_mask=padding).float().square().sum().backward()
        llama = FusedRematCausalLayer(320, 5, 456, kv_heads=1, qk_norm=True, policy=policy, **bf16)
        angle = torch.randn(152, 32)
        llama(x, rope=(angle.cos(), angle.sin())).float().square().sum().backward()
    weight = torch.randn(456, 320, dtype=torch.bfloat16).mul_(0.05).requires_grad_()
    labels = torch.randint(0, 456, (152,))
    ops.linear_cross_entropy(x[0], weight, labels, softcap=3.0, backend="triton").backward()


def mutants(code: Code, most: int, seed: str) -> Iterator[tuple[str, int, Code]]:
    """Kind, number of the instruction, and the kernel with it broken; of each kind `most`."""
    places: dict[str, list[tuple[int, Change]]] = defaultdict(list)
    for number, i in enumerate(code.instructions):
        for kind, change in changes(i):
            places[kind].append((number, change))
    chosen = random.Random(seed)
    for kind, some in places.items():
        if len(some) > most and kind in _SAMPLED:
            some = sorted(chosen.sample(some, most), key=lambda one: one[0])
        for number, change in some:
            yield kind, number, _changed(code, number, change)


def _changed(code: Code, number: int, change: Change) -> Code:
    numbers = itertools.count()
    blocks = [
        [made for i in block for made in [change(i) if next(numbers) == number else i] if made]
        for block in code.blocks
    ]
    nothing = Instruction("mov.pred", ("%p0", "%p0"))
    return dataclasses.replace(code, blocks=[block or [nothing] for block in blocks])


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


def outcome(launch: Launch, code: Code, expected: list[Tensor]) -> str:
    """How a mutant is caught, or ""."""
    try:
        reports, found = launch.run(Program(code, launch.program.shared))
    except (PTXError, IndexError, AssertionError) as error:
        return f"stops: {error}"
    if reports:
        return reports[0]
    return "results differ" if any(map(_differ, found, expected)) else ""


def _differ(a: Tensor, b: Tensor) -> bool:
    if not a.is_floating_point():
        return not torch.equal(a, b)
    a, b = a.double(), b.double()
    if not torch.equal(a.isnan(), b.isnan()):
        return True
    far = (a - b).abs().nan_to_num(0.0, torch.inf, torch.inf)
    return bool((far > 2**-6 * b.nan_to_num(0.0, 0.0, 0.0).abs().max()).any())


def key_of(arch: int, launch: Launch, kind: str, number: int) -> str:
    """What names a mutant while its kernel stays: opcode and source, and which one there."""
    all_ = list(launch.program.code.instructions)
    i = all_[number]
    where = re.sub(r":\d+(?= |$)", "", i.source.split(" @")[0])
    same = [
        n for n, other in enumerate(all_) if (other.opcode, other.source) == (i.opcode, i.source)
    ]
    return f"sm_{arch} {launch.kernel} {kind} {where} #{same.index(number) + 1}"


def examine(work: tuple[int, str, str, int]) -> list[tuple[str, str, float]]:
    """Of one kernel: each mutant's key, how it was caught, and the seconds taken."""
    arch, kernel, kinds, most = work
    launch = next(x for x in _launches(arch) if x.kernel == kernel)
    reports, expected = launch.run(launch.program)
    assert not reports, reports
    rows = []
    for kind, number, code in mutants(launch.program.code, most, kernel):
        if re.search(kinds, kind):
            begin = time.perf_counter()
            how = outcome(launch, code, expected)
            key = key_of(arch, launch, kind, number)
            rows.append((key, how, time.perf_counter() - begin))
    return rows


_MADE: dict[int, list[Launch]] = {}


def _launches(arch: int) -> list[Launch]:
    if arch not in _MADE:
        _MADE[arch] = launches(arch)
    return _MADE[arch]


def known() -> dict[str, str]:
    """Survivors by key, and the reason of each."""
    lines = KNOWN.read_text().splitlines() if KNOWN.exists() else []
    rows = [line.split(": ", 1) for line in lines if line and line[0] != "#"]
    return {key: reason for key, reason in rows}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("arch", type=int, nargs="*", default=[80, 90])
    parser.add_argument("--kernel", default="")
    parser.add_argument("--kind", default="", help="a regular expression")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--most", type=int, default=12, help="of each kind in a kernel")
    given = parser.parse_args()
    work = [
        (arch, launch.kernel, given.kind, given.most)
        for arch in given.arch
        for launch in _launches(arch)
        if given.kernel in launch.kernel
    ]
    reasons, wrong = known(), []
    caught: Counter[tuple[str, str]] = Counter()
    total: Counter[tuple[str, str]] = Counter()
    equivalent: Counter[tuple[str, str]] = Counter()
    with multiprocessing.get_context("fork").Pool(given.jobs) as pool:
        for (arch, kernel, *_), rows in zip(work, pool.imap(examine, work), strict=True):
            for key, how, _seconds in rows:
                kind = f"sm_{arch}", next(k for k in _KINDS if f" {k} " in key)
                total[kind] += 1
                caught[kind] += bool(how)
                if not how:
                    equivalent[kind] += key in reasons
                    wrong += [] if key in reasons else [key]
            seconds = sum(row[2] for row in rows)
            left = sum(not how for _, how, _ in rows)
            print(
                f"sm_{arch} {kernel}: {len(rows)} mutants, {left} survive, {seconds:.0f} s",
                flush=True,
            )
    for kind, count in sorted(total.items()):
        print(f"{' '.join(kind):<28} {caught[kind]:>4} of {count - equivalent[kind]} caught, "
              f"{equivalent[kind]} equivalent")  # fmt: skip
    print(*(f"SURVIVED {key}" for key in wrong), sep="\n")
    return int(bool(wrong))


_KINDS = (
    "barrier", "cp.async wait", "wgmma wait", "bulk wait", "mbarrier wait", "proxy fence",
    "transposition", "guard of a load", "guard of a store", "comparison",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
