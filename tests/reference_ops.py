"""What the tests of the functional ops share: each op beside the same in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fused_remat import ops, random
from fused_remat.autograd import function

Tensors = Mapping[str, Tensor]


def normal(
    *shape: int, dtype: torch.dtype = torch.float64, seed: int = 0, scale: float = 1.0
) -> Tensor:
    """A leaf that requires grad; its values depend on `seed` and the shape alone."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (scale * values).to(dtype).requires_grad_()


def results(fn: Callable[[], Tensor], leaves: Sequence[Tensor], dy: Tensor | None = None):
    """The output of `fn`, and the gradients of `leaves`."""
    y = fn()
    dy = normal(*y.shape, dtype=y.dtype, seed=99).detach() if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def compare(got: Callable[[], Tensor], expected: Callable[[], Tensor], leaves: Sequence[Tensor]):
    """Output and every gradient, in float64."""
    for a, b in zip(results(got, leaves), results(expected, leaves), strict=True):
        torch.testing.assert_close(a, b)


def calls(fn: Callable[[], object]) -> list[tuple[function.BlockCall, dict[str, tuple[int, ...]]]]:
    """The blocks that `fn` runs with gradients, and the shapes of their tensors by name."""
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
    """Cut the work in groups and tiles of a few tokens, attention in blocks of 16 query rows."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
        patch.setattr("fused_remat.steps.attention_rows._BLOCK", 1)
        patch.setattr("fused_remat.steps.attention_rows._LONG", 1)
        yield


def dropout(t: Tensor, site: int, p: float, seed: int) -> Tensor:
    """Dropout with the mask that the generator's definition gives, rows in order."""
    if p == 0.0:
        return t
    dtype = torch.promote_types(t.dtype, torch.float32)
    index, width = site % random.NUM_SITES, t.shape[-1]
    key = random.site_keys(torch.tensor(seed), site - index)[index]
    keep = random.keep_scale(key, 0, t.numel() // width, width, p, dtype)
    return (t * keep.view(t.shape)).to(t.dtype)


def visible(q_len: int, kv_len: int, window: tuple[int, int], is_causal: bool) -> Tensor:
    """Which keys a query sees: the last query and the last key are at one place."""
    left, right = window[0], 0 if is_causal else window[1]
    place = torch.arange(q_len)[:, None] + kv_len - q_len
    key = torch.arange(kv_len)
    seen = torch.ones(q_len, kv_len, dtype=torch.bool)
    if left >= 0:
        seen &= key >= place - left
    if right >= 0:
        seen &= key <= place + right
    return seen


def visible_packed(
    cu_q: Tensor, cu_k: Tensor, grid: tuple[int, int], window: tuple[int, int], is_causal: bool
) -> Tensor:
    """Which keys a query sees of packed sequences: those of its own, as if that were alone."""
    seen = torch.zeros(grid, dtype=torch.bool)
    for n in range(len(cu_q) - 1):
        rows, keys = slice(*cu_q[n : n + 2].tolist()), slice(*cu_k[n : n + 2].tolist())
        sizes = seen[rows, keys].shape
        seen[rows, keys] = visible(*sizes, window, is_causal)
    return seen


def attention(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, key_padding_mask: Tensor | None = None,
    key_lengths: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, window: tuple[int, int] = (-1, -1),
    scale: float | None = None, softcap: float = 0.0, seed: int = 0,
) -> Tensor:  # fmt: skip
    """`ops.attention` in plain PyTorch."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    grid = (q.shape[2], k.shape[2])
    if cu_seqlens_q is None:
        seen = visible(*grid, window, is_causal)
    else:
        cu_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
        seen = visible_packed(cu_seqlens_q, cu_k, grid, window, is_causal)
    if key_lengths is not None:
        seen = seen & (torch.arange(grid[1]) < key_lengths[:, None, None, None])
    scores = scores.masked_fill(~seen, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    if key_padding_mask is not None and key_padding_mask.dtype == torch.bool:
        scores = scores.masked_fill(key_padding_mask[:, None, None], -torch.inf)
    elif key_padding_mask is not None:
        scores = scores + key_padding_mask[:, None, None]
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    probs = scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
    if probs.numel():
        probs = dropout(probs, random.ATTENTION, dropout_p, seed)
    return (probs @ v).to(q.dtype)


def norm(x: Tensor, kind: str, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if kind == "layer_norm":
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def mlp(t: Tensors, x: Tensor, act: Callable[[Tensor], Tensor], p: float, seed: int) -> Tensor:
    """A plain MLP, or a gated one where there is a "gate_weight"."""
    up = F.linear(x, t["fc1_weight"], t.get("fc1_bias"))
    if "gate_weight" in t:
        up = act(F.linear(x, t["gate_weight"], t.get("gate_bias"))) * up
    else:
        up = act(up)
    return F.linear(dropout(up, random.MLP, p, seed), t["fc2_weight"], t.get("fc2_bias"))


def attention_half(t: Tensors, x: Tensor, nhead: int, kv_heads: int, p: float, seed: int, **kw):
    """Projections and attention: (B, S, D) to (B, S, D)."""
    packed = F.linear(x, t["qkv_weight"], t.get("qkv_bias"))
    heads = packed.unflatten(-1, (nhead + 2 * kv_heads, -1)).transpose(1, 2)
    q, k, v = heads.split((nhead, kv_heads, kv_heads), 1)
    if "q_norm_weight" in t:
        q, k = (F.rms_norm(x, x.shape[-1:], t[f"{name}_norm_weight"], 1e-6)
                for name, x in (("q", q), ("k", k)))  # fmt: skip
    merged = attention(q, k, v, dropout_p=p, seed=seed, **kw).transpose(1, 2).flatten(2)
    return F.linear(merged, t["proj_weight"], t.get("proj_bias"))


@dataclass(frozen=True)
class Case:
    """One op with one set of options, called `op(tensors, p, **options)`.

    Attributes:
        op, plain: ours, and `plain(tensors, p, seed)` in PyTorch.
        shapes: of its tensors; "B", "S" stand for batch and sequence, "T" for all tokens.
        full: elements per token of the inputs, and statistics per token, that "full" keeps.
        dropout: whether it draws random numbers at p > 0.
    """

    op: Callable[..., Tensor]
    plain: Callable[[Tensors, float, int], Tensor]
    shapes: Mapping[str, tuple[int | str, ...]]
    full: tuple[int, int]
    dropout: bool = True

    def tensors(self, batch: int = 2, seq: int = 5, dtype: torch.dtype = torch.float64) -> Tensors:
        """Leaves with random values; weight matrices scaled to keep the size of what they meet."""
        sizes = {"B": batch, "S": seq, "T": batch * seq}
        made = {}
        for i, (name, letters) in enumerate(self.shapes.items()):
            shape = tuple(sizes.get(n, n) for n in letters)
            is_matrix = name.endswith("weight") and len(shape) == 2
            scale = shape[1] ** -0.5 if is_matrix else 1.0
            made[name] = normal(*shape, dtype=dtype, seed=i, scale=scale)
        return made

    @staticmethod
    def own(tensors: Tensors) -> list[Tensor]:
        """What is the caller's and not counted as kept: weights, masks and lengths."""
        ends = ("weight", "bias", "slope", "mask")
        x = next(iter(tensors.values()))
        given = [t for name, t in tensors.items() if name.endswith(ends)]
        return [*given, *bounds(x), key_lengths(x), *rope(x)]


# Made once, so that what a call saves of them is known by its storage.


def bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """Of three packed sequences of queries and of keys, one empty, with a token of none."""
    return _bounds(x.shape[-2] if isinstance(x, Tensor) else 1)


@functools.cache
def _bounds(tokens: int) -> tuple[Tensor, Tensor]:
    third, half = tokens // 3, tokens // 2
    of_queries = torch.tensor([0, third, third, tokens - 1], dtype=torch.int32)
    return of_queries, torch.tensor([1, half, half, tokens], dtype=torch.int32)


def key_lengths(x: Tensor) -> Tensor:
    """Of sequences that are all shorter than `x` (B, ..., S, E), one without a key among many."""
    return _key_lengths(x.shape[0], x.shape[-2]) if isinstance(x, Tensor) else torch.tensor([1])


@functools.cache
def _key_lengths(batch: int, seq: int) -> Tensor:
    return (seq - 1 - 2 * torch.arange(batch)).clamp(min=0)


def rope(x: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for tokens of `x` (B, S, ...) with heads E wide."""
    return _rope(x.shape[1], x.dtype) if isinstance(x, Tensor) else (torch.ones(1, 1),) * 2


@functools.cache
def _rope(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.arange(tokens, dtype=torch.float64)[:, None]
    return angle.cos().to(dtype), angle.sin().to(dtype)


D, FF, H, KV, E = 8, 12, 4, 2, 2
X = {"x": ("B", "S", D)}
FC = {"fc1_weight": (FF, D), "fc1_bias": (FF,), "fc2_weight": (D, FF), "fc2_bias": (D,)}
GATE = {"gate_weight": (FF, D), "gate_bias": (FF,)}
NORM = {"norm_weight": (D,), "norm_bias": (D,)}
QKV = {
    "qkv_weight": ((H + 2 * KV) * E, D), "qkv_bias": ((H + 2 * KV) * E,),
    "proj_weight": (D, H * E), "proj_bias": (D,),
}  # fmt: skip
HEADS = {"query": ("B", H, "S", E), "key": ("B", KV, "S", E), "value": ("B", KV, "S", E + 1)}
ENCODER = {
    f"{name}_{kind}": shape if kind == "weight" else shape[:1]
    for name, shape in {"qkv": (3 * D, D), "proj": (D, D), "fc1": (FF, D), "fc2": (D, FF),
                        "norm1": (D,), "norm2": (D,)}.items()
    for kind in ("weight", "bias")
}  # fmt: skip

LLAMA = {
    f"{name}_weight": shape
    for name, shape in {"norm1": (D,), "q": (H * E, D), "k": (KV * E, D), "v": (KV * E, D),
                        "proj": (D, H * E), "norm2": (D,), "gate": (FF, D), "fc1": (FF, D),
                        "fc2": (D, FF)}.items()
}  # fmt: skip
#: Gemma-3's norms, and an update of the packed projection and of fc2.
GEMMA = {
    **{name: shape for name, shape in LLAMA.items() if name not in ("q_weight", "k_weight",
                                                                    "v_weight")},
    "qkv_weight": QKV["qkv_weight"], "qkv_bias": QKV["qkv_bias"], "post1_weight": (D,),
    "post2_weight": (D,), "q_norm_weight": (E,), "k_norm_weight": (E,),
    "qkv_a_weight": (3, D), "qkv_b_weight": (QKV["qkv_weight"][0], 3),
    "fc2_a_weight": (2, FF), "fc2_b_weight": (D, 2),
}  # fmt: skip


def leaky(slope: Tensor) -> Callable[[Tensor], Tensor]:
    """A smooth activation that captures a tensor."""
    return lambda t: t * torch.sigmoid(t * slope) + slope


def _encoder_op(norm_first: bool) -> Callable[..., Tensor]:
    def call(t: Tensors, p: float, **kw: object) -> Tensor:
        weights = {k.replace("_", "."): v for k, v in t.items() if k != "x"}
        return ops.encoder_block(
            t["x"], weights, H, dropout_p=p, norm_first=norm_first, activation="gelu", **kw
        )

    return call


def _encoder_plain(norm_first: bool) -> Callable[..., Tensor]:
    def plain(t: Tensors, p: float, seed: int) -> Tensor:
        def normed(x: Tensor, name: str) -> Tensor:
            return norm(x, "layer_norm", t[f"{name}_weight"], t[f"{name}_bias"], 1e-5)

        def first(x: Tensor) -> Tensor:
            return dropout(attention_half(t, x, H, H, p, seed), random.RESIDUAL1, p, seed)

        def second(x: Tensor) -> Tensor:
            return dropout(mlp(t, x, F.gelu, p, seed), random.RESIDUAL2, p, seed)

        x = t["x"]
        if norm_first:
            mid = x + first(normed(x, "norm1"))
            return mid + second(normed(mid, "norm2"))
        mid = normed(x + first(x), "norm1")
        return normed(mid + second(mid), "norm2")

    return plain


def _transformer(t: Tensors, p: float, fn: Callable[..., Tensor], **kw: object) -> Tensor:
    """`fn`, which is `ops.causal_block` or the same in plain PyTorch, on a Llama's or a Gemma's."""
    named = {".".join(k.rsplit("_", 1)): v for k, v in t.items() if k != "x"}
    how = {"dropout_p": p, "kv_heads": KV, "rope": rope(t["x"]), "eps": 1e-3, **kw}
    if "post1.weight" in named:
        matrices = {n: [named.pop(f"{n}_{m}.weight") for m in "ab"] for n in ("qkv", "fc2")}
        how |= {
            "placement": "sandwich", "norm_offset": 1.0, "activation": "gelu_tanh", "softcap": 2.0,
            "lora": [(n, *ab, 0.5) for n, ab in matrices.items()], "lora_dropout_p": p,
            "window": (20, 0),
        }  # fmt: skip
    return fn(t["x"], named, H, **how)


def _transformer_plain(t: Tensors, p: float, seed: int) -> Tensor:
    from reference_transformer import plain

    return _transformer(t, p, plain, seed=seed)


def _block(kind: str, act: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def plain(t: Tensors, p: float, seed: int) -> Tensor:
        normed = norm(t["x"], kind, t["norm_weight"], t.get("norm_bias"), 1e-3)
        return t["x"] + dropout(mlp(t, normed, act, p, seed), random.RESIDUAL2, p / 2, seed)

    return plain


def _named(t: Tensors, *names: str) -> list[Tensor]:
    return [t[name] for name in names]


def _packed(x: Tensor) -> dict[str, Tensor]:
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), bounds(x), strict=True))


CASES: dict[str, Case] = {
    "layer_norm": Case(
        lambda t, p, **kw: ops.layer_norm(t["x"], t["weight"], t["bias"], 1e-3, **kw),
        lambda t, p, seed: norm(t["x"], "layer_norm", t["weight"], t["bias"], 1e-3),
        X | {"weight": (D,), "bias": (D,)},
        (D, 2),
        dropout=False,
    ),
    "rms_norm": Case(
        lambda t, p, **kw: ops.rms_norm(t["x"], t["weight"], 1e-3, **kw),
        lambda t, p, seed: norm(t["x"], "rms_norm", t["weight"], None, 1e-3),
        X | {"weight": (D,)},
        (D, 1),
        dropout=False,
    ),
    "dropout_add": Case(
        lambda t, p, **kw: ops.dropout_add(t["x"], t["residual"], p, **kw),
        lambda t, p, seed: t["residual"] + dropout(t["x"], random.RESIDUAL1, p, seed),
        X | {"residual": ("B", "S", D)},
        (0, 0),
    ),
    "mlp": Case(
        lambda t, p, **kw: ops.mlp(*t.values(), "gelu", p, **kw),
        lambda t, p, seed: mlp(t, t["x"], F.gelu, p, seed),
        X | FC,
        (D, 0),
    ),
    "mlp_custom": Case(
        lambda t, p, **kw: ops.mlp(*_named(t, "x", *FC), leaky(t["slope"]), p, **kw),
        lambda t, p, seed: mlp(t, t["x"], leaky(t["slope"]), p, seed),
        X | FC | {"slope": (FF,)},
        (D, 0),
    ),
    "gated_mlp": Case(
        lambda t, p, **kw: ops.gated_mlp(
            *_named(t, "x", "gate_weight", "fc1_weight", "fc2_weight",
                    "gate_bias", "fc1_bias", "fc2_bias"), "silu", p, **kw,
        ),
        lambda t, p, seed: mlp(t, t["x"], F.silu, p, seed),
        X | FC | GATE,
        (D, 0),
    ),
    "mlp_block": Case(
        lambda t, p, **kw: ops.mlp_block(*t.values(), "gelu", p, p / 2, eps=1e-3, **kw),
        _block("layer_norm", F.gelu),
        X | NORM | FC,
        (D, 2),
    ),
    "gated_mlp_block": Case(
        lambda t, p, **kw: ops.mlp_block(
            t["x"], t["norm_weight"], None, *_named(t, *FC), "silu", p, p / 2,
            gate_weight=t["gate_weight"], gate_bias=t["gate_bias"], norm="rms_norm", eps=1e-3, **kw,
        ),
        _block("rms_norm", F.silu),
        X | {"norm_weight": (D,)} | FC | GATE,
        (D, 1),
    ),
    "attention": Case(
        lambda t, p, **kw: ops.attention(
            *_named(t, "query", "key", "value"), t["mask"], p, True, softcap=2.0, **kw
        ),
        lambda t, p, seed: attention(
            *_named(t, "query", "key", "value"), t["mask"], p, True, softcap=2.0, seed=seed
        ),
        HEADS | {"mask": ("B", 1, "S", "S")},
        (H * E + KV * (2 * E + 1), 0),
    ),
    "attention_fast": Case(
        lambda t, p, **kw: ops.attention(*t.values(), None, p, **kw),
        lambda t, p, seed: attention(*t.values(), None, p, seed=seed),
        HEADS | {"value": ("B", KV, "S", E)},
        (H * E + KV * 2 * E, 0),
    ),
    "attention_packed": Case(
        lambda t, p, **kw: ops.attention(
            *_named(t, "query", "key", "value"), t["mask"], p, True, **_packed(t["query"]), **kw
        ),
        lambda t, p, seed: attention(
            *_named(t, "query", "key", "value"), t["mask"], p, True, seed=seed,
            **_packed(t["query"]),
        ),
        {"query": (1, H, "T", E), "key": (1, KV, "T", E), "value": (1, KV, "T", E + 1),
         "mask": (H, 1, "T")},
        (H * E + KV * (2 * E + 1), 0),
    ),
    "attention_lengths": Case(
        lambda t, p, **kw: ops.attention(
            *t.values(), None, p, key_lengths=key_lengths(t["query"]), **kw
        ),
        lambda t, p, seed: attention(
            *t.values(), None, p, key_lengths=key_lengths(t["query"]), seed=seed
        ),
        HEADS | {"value": ("B", KV, "S", E)},
        (H * E + KV * 2 * E, 0),
    ),
    "attention_block": Case(
        lambda t, p, **kw: ops.attention_block(
            *t.values(), H, None, p, p / 2, kv_heads=KV, window=(20, 1), eps=1e-3, **kw
        ),
        lambda t, p, seed: t["x"] + dropout(
            attention_half(
                t, norm(t["x"], "layer_norm", t["norm_weight"], t["norm_bias"], 1e-3),
                H, KV, p, seed, window=(20, 1),
            ), random.RESIDUAL1, p / 2, seed,
        ),
        X | NORM | QKV,
        (D, 2),
    ),
    "attention_block_packed": Case(
        lambda t, p, **kw: ops.attention_block(
            *t.values(), H, None, p, p / 2, True, kv_heads=KV, cu_seqlens=bounds(t["x"])[0], **kw
        ),
        lambda t, p, seed: t["x"] + dropout(
            attention_half(
                t, norm(t["x"], "layer_norm", t["norm_weight"], t["norm_bias"], 1e-5),
                H, KV, p, seed, is_causal=True, cu_seqlens_q=bounds(t["x"])[0],
            ), random.RESIDUAL1, p / 2, seed,
        ),
        {"x": (1, "T", D)} | NORM | QKV,
        (D, 2),
    ),
    "qk_norm_attention_block": Case(
        lambda t, p, **kw: ops.attention_block(
            t["x"], t["norm_weight"], None, *_named(t, *QKV), H, None, p, kv_heads=KV,
            norm="rms_norm", eps=1e-3, q_norm_weight=t["q_norm_weight"],
            k_norm_weight=t["k_norm_weight"], **kw,
        ),
        lambda t, p, seed: t["x"] + attention_half(
            t, norm(t["x"], "rms_norm", t["norm_weight"], None, 1e-3), H, KV, p, seed
        ),
        X | {"norm_weight": (D,)} | QKV | {"q_norm_weight": (E,), "k_norm_weight": (E,)},
        (D, 1),
    ),
    "causal_block": Case(
        lambda t, p, **kw: _transformer(t, p, ops.causal_block, **kw),
        _transformer_plain,
        X | LLAMA,
        (D, 2),
    ),
    "causal_block_sandwich": Case(
        lambda t, p, **kw: _transformer(t, p, ops.causal_block, **kw),
        _transformer_plain,
        X | GEMMA,
        (D, 4),
    ),
    "encoder_prenorm": Case(_encoder_op(True), _encoder_plain(True), X | ENCODER, (D, 4)),
    "encoder_postnorm": Case(_encoder_op(False), _encoder_plain(False), X | ENCODER, (D, 4)),
}  # fmt: skip
