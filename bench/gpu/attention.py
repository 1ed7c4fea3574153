"""Contests of attention, forward and backward apart: our kernels, SDPA's, varlen, FlexAttention.

"kernel" is ours whatever the library would route the call to. What of the others cannot serve a
call is absent.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpu.attention_calls import DIRECTIONS, SDPA, SETTINGS, Subject
from bench.gpu.kernels import Entry
from bench.measure.contest import SETS, Contest, P, Results, Rig, Way, Work
from fused_remat.backends.triton import attention
from fused_remat.backends.triton.launch import Launch
from fused_remat.backends.triton.tables import AttentionTile

#: Of what is allowed of other results: probabilities, their gradients and the output, which the
#: backward reads, are rounded besides, some of them alike along a whole row.
FACTOR = 2.5
# Of a kernel that is timed alone.
_RESULTS = {"fwd": ("out",), "dkdv": ("dk", "dv"), "dq": ("dq",)}

#: Computes attention of q, k and v (B, H, S, E), as autograd sees it.
Attend = Callable[[Subject, Tensor, Tensor, Tensor], Tensor]


# --- ways


def _sdpa(backend: SDPBackend, p: float = 0.0) -> Attend:
    def attend(s: Subject, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        shared = s.nhead != s.kv_heads
        with sdpa_kernel([backend]):
            return F.scaled_dot_product_attention(
                q, k, v, s.call.mask, p, s.call.right == 0, enable_gqa=shared
            )

    return attend


def _varlen(s: Subject, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    rows = [t[0].transpose(0, 1) for t in (q, k, v)]
    out = varlen_attn(*rows, s.cu, s.cu, s.longest, s.longest, window_size=(-1, 0))
    assert isinstance(out, Tensor)
    return out.transpose(0, 1)[None]


@functools.cache
def _compiled_flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _flex(s: Subject, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    if s.rig.dry:  # as a CPU computes it: without a gradient
        q, k, v = (t.detach() for t in (q, k, v))
    flex = flex_attention if s.rig.dry else _compiled_flex()
    out = flex(q, k, v, block_mask=s.block_mask, enable_gqa=s.nhead != s.kv_heads)
    assert isinstance(out, Tensor)
    return out


#: PyTorch's own, by name.
RIVALS: dict[str, Attend] = {
    "flash": _sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "efficient": _sdpa(SDPBackend.EFFICIENT_ATTENTION),
    "math": _sdpa(SDPBackend.MATH),
    "flash dropout": _sdpa(SDPBackend.FLASH_ATTENTION, P),
    "varlen": _varlen,
    "flex": _flex,
}


def _own_dropout(s: Subject, direction: str) -> Callable[[Results], Results]:
    """What results with a mask that nobody knows should be: they are right on average.

    So they are compared with themselves, divided by their projection on what is exact without
    dropout, which is 1 but for the mean of many decisions: all results are linear in the mask.
    """

    @functools.cache
    def exact() -> Results:
        return s.exact(direction, dataclasses.replace(s.call, p=0.0))

    def truth(found: Results) -> Results:
        true = exact()
        return {
            name: t.double() * true[name].square().sum() / (t.double() * true[name]).sum()
            for name, t in found.items()
        }

    return truth


def rival(s: Subject, name: str, direction: str) -> Way:
    """A way through autograd; of the backward, the forward's graph is made once a set."""
    attend = RIVALS[name]
    truth = _own_dropout(s, direction) if name.endswith("dropout") else None
    leaves = [s.leaves(index) for index in range(SETS)]

    def forward(index: int) -> Results:
        return {"out": attend(s, *leaves[index]).detach()}

    def graph(index: int) -> tuple[int, Tensor]:
        return index, attend(s, *leaves[index])

    def backward(given: tuple[int, Tensor]) -> Results:
        index, out = given
        made = torch.autograd.grad(out, leaves[index], s.as_heads(s.douts[index]))
        return dict(zip(DIRECTIONS["bwd"], made, strict=True))

    if direction == "bwd":
        return Way(backward, truth, optional=True, prepare=graph)
    return Way(forward, truth, optional=True)


class Own:
    """Our kernels' results on a subject, poisoned, and the launches that fill them."""

    def __init__(self, s: Subject, direction: str) -> None:
        self.s, self.direction = s, direction
        rows, lse = s.douts[0].shape, (s.batch, s.nhead, s.seq_len)
        sets = 1 if direction == "fwd" else SETS  # what a backward reads is of its own set
        self.outs = [s.rig.poisoned(*rows) for _ in range(sets)]
        self.lses = [s.rig.poisoned(*lse, dtype=torch.float32) for _ in range(sets)]
        self.results: Results = {"out": s.as_heads(self.outs[0])}
        if direction == "bwd":
            self.grads = s.heads(s.rig.poisoned(*s.packed[0].shape))
            self.results = dict(zip(DIRECTIONS["bwd"], self.grads, strict=True))

    def forward(self, index: int, tile: AttentionTile | None = None) -> list[Launch]:
        s, saved = self.s, index % len(self.outs)
        given = *s.heads(s.packed[index]), s.call, self.outs[saved], self.lses[saved]
        return list(attention.forward(*given, s.rig.target, tile))

    def launches(self, index: int, tile: AttentionTile | None = None) -> list[Launch]:
        """All of the direction; of a backward, what `forward` has to fill first."""
        if self.direction == "fwd":
            return self.forward(index, tile)
        s, saved = self.s, (self.outs[index], self.lses[index])
        given = s.douts[index], *s.heads(s.packed[index]), *saved, s.call, self.grads
        return list(attention.backward(*given, s.rig.target, tile and (tile, tile)))

    def way(
        self, tile: AttentionTile | None = None, kernel: str = "", optional: bool = False
    ) -> Way:
        """All launches, or with a tile those of one kernel; `optional`: it may not compile."""
        names = _RESULTS.get(kernel, tuple(self.results))
        results = {name: self.results[name] for name in names}

        @functools.cache
        def prepared(index: int) -> list[Launch]:
            for launch in self.forward(index) if self.direction == "bwd" else ():
                launch.run()
            mine = []
            for launch in self.launches(index, tile):
                if launch.kernel.fn.__name__.startswith(f"attention_{kernel}"):
                    mine.append(launch)
                else:
                    launch.run()
            return mine

        def run(index: int) -> Results:
            for launch in prepared(index):
                launch.run()
            return results

        return Way(run, optional=optional)


def contest(s: Subject, direction: str, rivals: Sequence[str]) -> Contest:
    """Ours beside others; all are compared with each of these that can serve."""
    ways = {name: rival(s, name, direction) for name in rivals} | {
        "kernel": Own(s, direction).way()
    }
    baselines = tuple(rivals) or ("kernel",)
    truth = lambda: s.exact(direction)  # noqa: E731
    return Contest(ways, truth, Work(flops=s.flops[direction]), baselines, FACTOR)


# --- what is measured, the most telling first


def _entries(
    rig: Rig, name: str, seq_len: int, width: int, rivals: Sequence[str]
) -> Iterator[Entry]:
    """Both directions of a setting at a size."""
    setting = SETTINGS[name]
    for direction in DIRECTIONS:
        sizes = {"seq_len": rig.size(seq_len, 64), "head_dim": rig.size(width, 16)}
        case = {"name": f"attention_{direction} {name}", **sizes}

        def build(rig: Rig, direction: str = direction) -> Contest:
            return contest(Subject(rig, setting, seq_len, width), direction, rivals)

        yield case, build


def _rivals(rig: Rig, name: str, seq_len: int) -> tuple[str, ...]:
    """In a dry run, PyTorch's explicit attention, which serves any device."""
    known = SETTINGS[name].rivals
    if rig.dry:
        return ("math",) if set(SDPA) & set(known) else ()
    return (*known, "math") if seq_len <= 512 and set(SDPA) <= set(known) else known


def attention_entries(rig: Rig) -> Iterator[Entry]:
    """With and without a causal mask, at the sizes of ordinary training."""
    sizes = ((64, 16),) if rig.dry else ((2048, 128), (8192, 128), (2048, 64), (8192, 64))
    for seq_len, width in sizes:
        for name in ("causal", "full"):
            yield from _entries(rig, name, seq_len, width, _rivals(rig, name, seq_len))


def special_entries(rig: Rig) -> Iterator[Entry]:
    """What else our kernels do, then short and long sequences and wide heads."""
    for seq_len in (64,) if rig.dry else (2048, 8192):
        for name, setting in SETTINGS.items():
            once = setting.packed and seq_len != 2048 and not rig.dry
            if name not in ("causal", "full") and not once:
                yield from _entries(rig, name, seq_len, 128, _rivals(rig, name, seq_len))
    if rig.dry:
        return
    for seq_len, width in ((2048, 256), (32768, 128), (512, 128), (8192, 256), (32768, 64),
                           (512, 64)):  # fmt: skip
        for name in ("causal", "full"):
            yield from _entries(rig, name, seq_len, width, _rivals(rig, name, seq_len))


def flex_entries(rig: Rig) -> Iterator[Entry]:
    """Beside FlexAttention, which has to be compiled for each mask."""
    names = ("causal", "window", "half the blocks", "packed", "shared heads")
    for name in names[3:4] if rig.dry else names:
        for case, build in _entries(rig, name, 8192, 128, ("flex",)):
            yield case | {"beside": "flex"}, build
