"""The ops of `bench.kernels` at a GPU's most important sizes: contests, a direction each.

What compiles or tunes itself at its first call takes long to start: it has sections of its own.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from bench.kernels.attention import ATTENTION, FORMS, Attention
from bench.kernels.experts import EXPERTS, GROUPED
from bench.kernels.ops import NORM, Norm
from bench.kernels.problem import DIRECTIONS, Op, Problem, Size, at_tokens, contests, tiny
from bench.measure.contest import Entry, Rig

TOKENS, D_MODEL = 16384, 2048  # of attention, at least the former
GROUP = 4  # query heads to a key head, where they share one
ELEMENTS = 1 << 26  # of a matrix: 128 MiB in bfloat16, twice as large as an H200's cache
WIDTHS = (1024, 2048, 4096, 8192, 16384, 65536)
#: Providers that `torch.compile` makes, which take long to start.
COMPILED = ("compile",)


def entries_of(
    op: Op, problem: Callable[[], Problem], directions: Any = DIRECTIONS
) -> Iterator[Entry]:
    """Yield an op's problem, built again for each direction, since one may wait for long."""
    made = problem()
    names = [name for name in op if name not in COMPILED]
    for direction in directions:
        build = lambda rig, d=direction: dict(contests(op, problem(), names))[d]  # noqa: E731
        yield {"name": f"{op.name}_{direction} {made.name}", **made.sizes}, build


# --- attention


def _attention(rig: Rig, form: str, seq_len: int, width: int, group: int = 1) -> Iterator[Entry]:
    packed = FORMS[form].packed
    seq_len = rig.size(TOKENS if packed else seq_len, 48 if packed else 32)
    batch = rig.size(max(1, TOKENS // seq_len), 1)
    nhead = rig.size(D_MODEL // width, max(2, group))
    sizes = batch, nhead, nhead // group, seq_len, rig.size(width, 16)
    yield from entries_of(ATTENTION, functools.partial(Attention, rig, form, *sizes))


def attention_entries(rig: Rig) -> Iterator[Entry]:
    sizes = ((64, 16),) if rig.dry else ((2048, 128), (8192, 128), (2048, 64), (8192, 64))
    for seq_len, width in sizes:
        for form in ("causal", "full"):
            yield from _attention(rig, form, seq_len, width)


def special_entries(rig: Rig) -> Iterator[Entry]:
    """Yield every other form, shared heads; then short and long sequences and wide heads."""
    for seq_len in (64,) if rig.dry else (2048, 8192):
        yield from _attention(rig, "causal", seq_len, 128, GROUP)
        for form in FORMS:
            once = FORMS[form].packed and seq_len > 2048
            if form not in ("causal", "full") and not once:
                yield from _attention(rig, form, seq_len, 128)
    if rig.dry:
        return
    for seq_len, width in ((2048, 256), (32768, 128), (512, 128), (8192, 256), (32768, 64),
                           (512, 64)):  # fmt: skip
        for form in ("causal", "full"):
            yield from _attention(rig, form, seq_len, width)


# --- what is bound by memory


def norm_entries(rig: Rig) -> Iterator[Entry]:
    """Yield every width; backward, which is a target, before forward."""
    for width in (96,) if rig.dry else WIDTHS:
        tokens = rig.size(ELEMENTS // width, 64)
        for kind in ("layer_norm", "rms_norm"):
            make = functools.partial(Norm, rig, kind, tokens, width)
            yield from entries_of(NORM, make, directions=("bwd", "fwd"))


# --- experts


def experts_entries(rig: Rig) -> Iterator[Entry]:
    """Yield experts, then their grouped products, of every mixture."""
    for op in (EXPERTS, GROUPED):
        for mixture in op.models.values():
            size = at_tokens(tiny(mixture) if rig.dry else mixture, rig.size(TOKENS, 16))
            yield from entries_of(op, functools.partial(_first, op, rig, size))


def _first(op: Op, rig: Rig, size: Size) -> Problem:
    return next(iter(op.of_model(rig, size)))
