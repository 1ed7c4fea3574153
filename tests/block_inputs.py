"""What tests put into operations and blocks, and how they compare what comes out."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from accuracy import check_error
from reference import Tensors, Update, matrices
from torch import Tensor

from fused_remat.autograd import function
from fused_remat.layer_specs import transformer_spec
from fused_remat.spec import BlockSpec


def normal(
    *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """Return a leaf that requires grad; its values depend on `seed` and the shape alone."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (scale * values).to(dtype).requires_grad_()


def tables(*shape: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """cos and sin (..., S, R/2) of angles that no two places, pairs or sequences share."""
    angle = normal(*shape, seed=7, scale=3.0).detach()
    return angle.cos().to(dtype), angle.sin().to(dtype)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Sizes of a `causal_block`, and which weights it has."""

    d: int = 12
    nhead: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    hidden: int = 20
    split: bool = True
    gated: bool = True
    placement: str = "pre"
    norm: str = "rms_norm"
    qk_norm: bool = False
    bias: bool = False
    qkv_bias: bool = False

    @property
    def spec(self) -> BlockSpec:
        return transformer_spec(
            self.norm, 1e-6, "silu", placement=self.placement, gated=self.gated,
            num_heads=self.nhead, num_kv_heads=self.kv_heads, head_dim=self.head_dim, scale=1.0,
            projection="split" if self.split else "packed",
        )  # fmt: skip

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer."""
        return self.spec.linear_shapes(self.d, self.hidden)

    def weights(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> dict[str, Tensor]:
        """Leaves; matrices scaled to keep the size of what they meet, norms around 1."""
        made: dict[str, Tensor] = {}

        def add(name: str, *shape: int, scale: float = 0.2, around: float = 0.0) -> None:
            t = normal(*shape, seed=seed + len(made), scale=scale).detach() + around
            made[name] = t.to(dtype).requires_grad_()

        for name, (out, width) in self.linears.items():
            add(f"{name}.weight", out, width, scale=width**-0.5)
            if self.bias or (self.qkv_bias and name in ("qkv", "q", "k", "v")):
                add(f"{name}.bias", out)
        for name in self.spec.norms:
            add(f"{name}.weight", self.d, around=1.0)
            if self.norm == "layer_norm":
                add(f"{name}.bias", self.d)
        for name in ("q_norm", "k_norm") if self.qk_norm else ():
            add(f"{name}.weight", self.head_dim, around=1.0)
        return made

    def updates(
        self,
        layers: Sequence[str] = (),
        rank: int = 3,
        dtype: torch.dtype = torch.float64,
        dora: bool = False,
    ) -> list[Update]:
        """Low-rank updates of `layers`, all linear ones if none are named; leaves."""
        made = []
        for i, name in enumerate(layers or self.linears):
            out, width = self.linears[name]
            a = normal(rank, width, seed=100 + i, scale=width**-0.5, dtype=dtype)
            update = (name, a, normal(out, rank, seed=200 + i, dtype=dtype), 0.5 + 0.25 * i)
            magnitudes = normal(out, seed=300 + i, dtype=dtype).detach().abs() + 0.5
            made.append((*update, magnitudes.requires_grad_()) if dora else update)
        return made

    def rope(self, seq: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
        return tables(seq, self.head_dim // 2, dtype=dtype)


def leaves(x: Tensor, weights: Tensors, lora: Sequence[Update] = ()) -> dict[str, Tensor]:
    named = {"x": x, **weights, **matrices(lora)}
    return {name: t for name, t in named.items() if t.requires_grad}


def heads(
    batch: int = 2, nhead: int = 4, kv_heads: int = 2, q_len: int = 5, kv_len: int = 7,
    width: int = 4, v_width: int | None = None, dtype: torch.dtype = torch.float64,
) -> list[Tensor]:  # fmt: skip
    """query, key and value of (B, heads, S, E), leaves."""
    v_width = width if v_width is None else v_width
    shapes = ((nhead, q_len, width), (kv_heads, kv_len, width), (kv_heads, kv_len, v_width))
    return [normal(batch, *shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def mask_of(kind: str, shape: Sequence[int], seed: int = 4) -> Tensor:
    """Return a mask, "bool", "float", "float32", or a float64 leaf; "-inf" excludes some keys."""
    values = normal(*shape, seed=seed)
    if kind == "bool":
        return (values > -0.5).detach()
    if kind == "float32":
        return values.detach().float()
    if kind == "-inf":
        return values.detach().masked_fill(values < -0.5, -torch.inf).requires_grad_()
    return values if kind == "wants a gradient" else values.detach()


def swapped(a: int, b: int) -> Callable[[Tensor], Tensor]:
    """Two dimensions the other way round in memory, where there are both."""

    def lay(t: Tensor) -> Tensor:
        few = t.dim() < max(-a, -b, a + 1, b + 1)
        return t if few else t.transpose(a, b).contiguous().transpose(a, b)

    return lay


#: Ways to lie in memory; "heads inside": (B, H, S, E) as projections make it, of (B, S, H, E).
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "as it is": lambda t: t,
    "first last": swapped(0, -1),
    "heads inside": swapped(-3, -2),
    "turned": swapped(-2, -1),
    "strided": lambda t: torch.stack((t, t), -1)[..., 0],
    "expanded": lambda t: t[:1].expand_as(t) if t.dim() and t.shape[0] else t,
}


def covering(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> list[dict[str, Any]]:
    """Return combinations in which every two values of different factors meet.

    >>> len(covering({"a": (0, 1), "b": (0, 1), "c": (0, 1)}))
    4
    """
    draw, indices = random.Random(seed), {n: range(len(vs)) for n, vs in factors.items()}

    def pairs(chosen: Mapping[str, int]) -> set[tuple[tuple[str, int], ...]]:
        return set(itertools.combinations(chosen.items(), 2))

    left = {
        pair
        for two in itertools.combinations(indices, 2)
        for pair in itertools.product(*([(name, i) for i in indices[name]] for name in two))
    }
    found = []
    while left:
        must = dict(min(left))
        tries = [{n: draw.choice(i) for n, i in indices.items()} | must for _ in range(50)]
        best = max(tries, key=lambda chosen: len(left & pairs(chosen)))
        left -= pairs(best)
        found.append({name: factors[name][i] for name, i in best.items()})
    return found


# --- calls and their results


def results(
    fn: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor | None = None
) -> list[Tensor]:
    y = fn()
    dy = normal(*y.shape, dtype=y.dtype, seed=99).detach() if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def compare(
    got: Callable[[], Tensor], expected: Callable[[], Tensor], leaves: Sequence[Tensor]
) -> None:
    for a, b in zip(results(got, leaves), results(expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


def check_beside(
    ours: Callable[[dict[str, Tensor]], Tensor], peer: Callable[[dict[str, Tensor]], Tensor],
    tensors: Tensors, dy: Tensor | None = None, tokens: int = 512,
    computed: torch.dtype | None = None,
) -> None:  # fmt: skip
    """Errors of output and gradients of named tensors against float64 are at most the peer's."""
    given = {name: t for name, t in tensors.items() if t is not None}
    exact = {
        name: (t.detach().double() if t.is_floating_point() else t).requires_grad_(t.requires_grad)
        for name, t in given.items()
    }

    def run(fn: Callable[[dict[str, Tensor]], Tensor], given: dict[str, Tensor]) -> list[Tensor]:
        direction = None if dy is None else dy.double() if given is exact else dy
        return results(lambda: fn(given), [t for t in given.values() if t.requires_grad], direction)

    with in_pieces(tokens):
        found = run(ours, given)
    dy = normal(*found[0].shape, dtype=found[0].dtype, seed=99).detach() if dy is None else dy
    names = ["output", *(name for name, t in given.items() if t.requires_grad)]
    check_error(found, run(peer, given), run(peer, exact), names, computed)


def same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal bit for bit, but for the sign of zeros."""
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def calls(
    fn: Callable[[], object],
) -> list[tuple[function.BlockConfig, dict[str, tuple[int, ...]]]]:
    """Return the blocks that `fn` runs with gradients, and the shapes of their tensors by name."""
    seen = []

    def observe(invocation):
        named = zip(invocation.call.graph.tensors, invocation.tensors, strict=True)
        seen.append((invocation.call, {n: tuple(t.shape) for n, t in named if t is not None}))

    function.OBSERVERS.append(observe)
    try:
        fn()
    finally:
        function.OBSERVERS.remove(observe)
    return seen


@contextmanager
def in_pieces(tokens: int = 4) -> Iterator[None]:
    """Divide work of any dtype into groups and tiles of a few tokens, attention into blocks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_remat.execution.choose.chunk_tokens", lambda device, dtype: tokens)
        patch.setattr("fused_remat.execution.choose.CPU_ELEMENTS", (1, 1))
        patch.setattr("fused_remat.steps.attention_blocked._BLOCK", 1)
        patch.setattr("fused_remat.steps.attention_blocked._LONG", 1)
        yield
