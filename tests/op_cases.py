"""Every operation of `fused_remat.ops`: how to call it, its inputs, the same in plain PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import block_inputs
import torch
from block_inputs import normal
from plain_moe import plain_moe
from reference import (
    Tensors,
    attention,
    causal_block,
    dropout,
    linear_cross_entropy,
    norm,
    plain_block,
    rotate,
)
from torch import Tensor

from fused_remat import ops, random
from fused_remat.moe_spec import MoESpec, RouterSpec
from fused_remat.spec import (
    USER_FUNCTION,
    AttentionSpec,
    BlockSpec,
    BranchSpec,
    MLPSpec,
    NormSpec,
    RotarySpec,
)

Shapes = Mapping[str, tuple[int | str, ...]]


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
    shapes: Shapes
    full: tuple[int, int]
    dropout: bool = True

    def tensors(
        self, batch: int = 2, seq: int = 5, dtype: torch.dtype = torch.float64
    ) -> dict[str, Tensor]:
        """Leaves with random values; weight matrices scaled to keep the size of what they meet."""
        sizes = {"B": batch, "S": seq, "T": batch * seq}
        made = {}
        for i, (name, letters) in enumerate(self.shapes.items()):
            shape = tuple(sizes.get(n, n) for n in letters)
            is_matrix = name.endswith("weight") and len(shape) == 2
            scale = shape[1] ** -0.5 if is_matrix else 1.0
            made[name] = normal(*shape, dtype=dtype, seed=i, scale=scale)
        return made

    def seed(self, seed: int = 7) -> dict[str, int]:
        """`seed` as an option, for an op that has it."""
        return {"seed": seed} if self.dropout else {}

    @staticmethod
    def own(tensors: Tensors) -> list[Tensor]:
        """Return what the caller owns, which does not count as kept: weights, masks, tables."""
        ends = ("weight", "bias", "slope", "mask", "padding")
        x = next(iter(tensors.values()))
        given = [t for name, t in tensors.items() if name.endswith(ends)]
        tables = [t for heads in HEADS.values() for t in heads.tables(x) or ()]
        made = [*bounds(x.shape), key_lengths(x.shape), *rope(x.shape[1], x.dtype), *tables]
        return [*given, *made, targets(x.shape[:-1])]


# Made once, so that what a call saves of them is known by its storage.


@functools.cache
def bounds(shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Of three packed sequences of queries and of keys, one empty, with a token of none."""
    tokens = shape[-2]
    third, half = tokens // 3, tokens // 2
    sides = [0, third, third, tokens - 1], [1, half, half, tokens]
    of_queries, of_keys = torch.tensor(sides, dtype=torch.int32).clamp(0, tokens)
    return of_queries, of_keys


@functools.cache
def key_lengths(shape: torch.Size) -> Tensor:
    """Of sequences that are all shorter than (B, ..., S, E), one without a key among many."""
    return (shape[-2] - 1 - 2 * torch.arange(shape[0])).clamp(min=0)


@functools.cache
def rope(tokens: int, dtype: torch.dtype) -> Tables:
    angle = torch.arange(tokens, dtype=torch.float64)[:, None]  # which the compiler can trace
    return angle.cos().to(dtype), angle.sin().to(dtype)


@functools.cache
def targets(shape: torch.Size) -> Tensor:
    """Classes of the loss; some tokens are ignored."""
    number = torch.arange(shape.numel()).view(shape)
    return torch.where(number % 4 == 3, -100, 5 * number % VOCAB)


Tables = tuple[Tensor, Tensor]
tables = functools.cache(block_inputs.tables)

#: Bounds of queries and of keys (None: the same), and how many tokens there are of each.
PACKS = {
    "self": ([0, 3, 20, 57], None, 57, 57),
    "one sequence": ([0, 19], None, 19, 19),
    "one token each": ([0, 1, 2, 3], None, 3, 3),
    "one token in all": ([0, 0, 1], None, 1, 1),
    "fewer queries, and more": ([0, 4, 27, 30], [0, 9, 17, 51], 30, 51),
    "without queries, keys, both": ([0, 0, 5, 5, 9], [0, 3, 3, 3, 8], 9, 8),
    "tokens of none": ([2, 7, 9], [1, 4, 10], 12, 13),
    "no sequence": ([4], [3], 9, 7),
    "one query": ([0, 0, 1], [0, 4, 9], 1, 9),
    "one key": ([0, 4, 9], [0, 1, 1], 9, 1),
}


def packed(
    cu_q: Sequence[int], cu_k: Sequence[int] | None = None, dtype: torch.dtype = torch.int64
) -> dict[str, Tensor | None]:
    of_keys = None if cu_k is None else torch.tensor(cu_k, dtype=dtype)
    return {"cu_seqlens_q": torch.tensor(cu_q, dtype=dtype), "cu_seqlens_k": of_keys}


@dataclass(frozen=True)
class Heads:
    """What is rotated: heads, their width, R of it, and how."""

    nhead: int
    kv_heads: int
    width: int
    rotated: int
    interleaved: bool = False
    batched: bool = False
    norm: bool = False

    @property
    def packed(self) -> int:
        return (self.nhead + 2 * self.kv_heads) * self.width

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the weights of the norms of heads."""
        return dict.fromkeys(("q_norm.weight", "k_norm.weight") if self.norm else (), (self.width,))

    def tables(self, x: Tensor) -> Tables | None:
        """For tokens of x (B, S, ...)."""
        if not self.rotated or x.dim() != 3:
            return None
        lead = tuple(x.shape[:2]) if self.batched else (x.shape[1],)
        return tables(*lead, self.rotated // 2, dtype=x.dtype)

    def spec(self, window: tuple[int, int] = (-1, -1)) -> AttentionSpec:
        return AttentionSpec(
            num_heads=self.nhead, num_kv_heads=self.kv_heads, head_dim=self.width,
            scale=self.width**-0.5, window=window,
            rotary=RotarySpec(interleaved=self.interleaved) if self.rotated else None,
            head_norm=NormSpec(kind="rms_norm", eps=1e-6) if self.norm else None,
        )  # fmt: skip


HEADS = {
    "half": Heads(4, 2, 6, 6),
    "interleaved": Heads(4, 4, 6, 6, interleaved=True),
    "partial": Heads(3, 1, 8, 4, batched=True),
    "interleaved partial": Heads(4, 2, 7, 2, interleaved=True, batched=True),
    "norm half": Heads(4, 2, 6, 6, norm=True),
    "norm interleaved": Heads(2, 2, 4, 4, interleaved=True, batched=True, norm=True),
    "norm partial": Heads(4, 1, 5, 2, norm=True),
    "norm alone": Heads(4, 2, 6, 0, norm=True),
}

D, FF, H, KV, E, VOCAB = 8, 12, 4, 2, 2, 11
X = {"x": ("B", "S", D)}
FC = {"fc1.weight": (FF, D), "fc1.bias": (FF,), "fc2.weight": (D, FF), "fc2.bias": (D,)}
GATE = {"gate.weight": (FF, D), "gate.bias": (FF,)}
NORM = {"norm.weight": (D,), "norm.bias": (D,)}
QKV = {
    "qkv.weight": ((H + 2 * KV) * E, D), "qkv.bias": ((H + 2 * KV) * E,),
    "proj.weight": (D, H * E), "proj.bias": (D,),
}  # fmt: skip
QKV_HEADS = {"query": ("B", H, "S", E), "key": ("B", KV, "S", E), "value": ("B", KV, "S", E)}
WIDE_VALUES = QKV_HEADS | {"value": ("B", KV, "S", E + 1)}


def block_shapes(**how: object) -> Shapes:
    made = block_inputs.Block(d=D, nhead=H, head_dim=E, hidden=FF, **how).weights()
    return {name: tuple(t.shape) for name, t in made.items()}


ENCODER = block_shapes(kv_heads=H, split=False, gated=False, norm="layer_norm", bias=True)
LLAMA = block_shapes()
#: Gemma-3's norms, and an update of the packed projection and of fc2.
GEMMA = block_shapes(split=False, placement="sandwich", qk_norm=True, qkv_bias=True) | {
    "qkv.A.weight": (3, D), "qkv.B.weight": (QKV["qkv.weight"][0], 3),
    "fc2.A.weight": (2, FF), "fc2.B.weight": (D, 2),
}  # fmt: skip


def leaky(slope: Tensor) -> Callable[[Tensor], Tensor]:
    """Return a smooth activation that captures a tensor."""
    return lambda t: t * torch.sigmoid(t * slope) + slope


#: What ops call what has another name in a block.
ARGUMENTS = {
    "mask": "attn_mask", "padding": "key_padding_mask", "lengths": "key_lengths",
    "cu_q": "cu_seqlens",
}  # fmt: skip


def named(t: Tensors) -> dict[str, Tensor | None]:
    return {ARGUMENTS.get(name, name.replace(".", "_")): tensor for name, tensor in t.items()}


def one_branch(
    op: AttentionSpec | MLPSpec, kind: str = "", p: float = 0.0, eps: float = 1e-3
) -> BlockSpec:
    """Return a block of one branch, with a norm of `kind` and a residual, or with neither."""
    norm = NormSpec(kind=kind, eps=eps) if kind else None
    branch = BranchSpec(op=op, norm=norm, dropout=p if kind else 0.0)
    return BlockSpec(kind="plain", branches=(branch,), residual=bool(kind))


def plain(spec: BlockSpec, t: Tensors, seed: int, **more: object) -> Tensor:
    """`spec` in plain PyTorch on the tensors of a case."""
    return plain_block(spec, {**t, "input": t["x"], "seed": seed}, **more)


Options = dict[str, object]


def block_case(
    op: Callable[..., Tensor], shapes: Shapes, statistics: int, how: Options, plain: Options
) -> Case:
    """Return the block of an encoder, a Llama or a Gemma; options of ours, and of PyTorch's."""

    def call(fn: Callable[..., Tensor], t: Tensors, p: float, **how: object) -> Tensor:
        weights = {name: tensor for name, tensor in t.items() if name != "x"}
        if "gate.weight" in weights:
            how["rope"] = rope(t["x"].shape[1], t["x"].dtype)
        if "post1.weight" in weights:
            pairs = {n: [weights.pop(f"{n}.{m}.weight") for m in "AB"] for n in ("qkv", "fc2")}
            how |= {"lora": [(n, *two, 0.5) for n, two in pairs.items()], "lora_dropout_p": p}
        return fn(t["x"], weights, H, dropout_p=p, **how)

    return Case(
        lambda t, p, **kw: call(op, t, p, **how, **kw),
        lambda t, p, seed: call(causal_block, t, p, **plain, seed=seed),
        X | shapes,
        (D, statistics),
    )


def encoder_case(norm_first: bool) -> Case:
    plain = {
        "placement": "pre" if norm_first else "post", "norm": "layer_norm", "eps": 1e-5,
        "is_causal": False, "activation": "gelu",
    }  # fmt: skip
    how = {"norm_first": norm_first, "activation": "gelu"}
    return block_case(ops.encoder_block, ENCODER, 4, how, plain)


def causal_case(shapes: Shapes, statistics: int, **how: object) -> Case:
    how |= {"kv_heads": KV, "eps": 1e-3}
    return block_case(ops.causal_block, shapes, statistics, how, how)


def mlp_case(op: Callable[..., Tensor], shapes: Shapes, activation: str, kind: str = "") -> Case:
    """`op` with an activation by name, or with one that captures "slope"; `kind`: of its norm."""
    gated = "gate.weight" in shapes

    def call(t: Tensors, p: float, **kw: object) -> Tensor:
        given = named({name: tensor for name, tensor in t.items() if name != "slope"})
        if op is ops.gated_mlp:
            given = {n.replace("fc1", "up").replace("fc2", "down"): w for n, w in given.items()}
        if kind:
            given = {"norm_bias": None, **given}
            kw |= {"norm": kind, "eps": 1e-3, "residual_dropout_p": p / 2}
        act = leaky(t["slope"]) if "slope" in t else activation
        return op(**given, activation=act, dropout_p=p, **kw)

    def expected(t: Tensors, p: float, seed: int) -> Tensor:
        spec = one_branch(MLPSpec(activation=activation, gated=gated, dropout=p), kind, p / 2)
        return plain(spec, t, seed, function=leaky(t["slope"]) if "slope" in t else None)

    statistics = {"": 0, "layer_norm": 2, "rms_norm": 1}[kind]
    return Case(call, expected, shapes, (D, statistics))


def attention_case(shapes: Shapes, how: Callable[[Tensors], dict[str, object]]) -> Case:

    def call(fn: Callable[..., Tensor], t: Tensors, p: float, **kw: object) -> Tensor:
        return fn(t["query"], t["key"], t["value"], t.get("mask"), p, **how(t), **kw)

    width = H * E + KV * (E + shapes["value"][-1])
    return Case(
        functools.partial(call, ops.attention),
        lambda t, p, seed: call(attention, t, p, seed=seed),
        shapes,
        (width, 0),
    )


def attention_block_case(
    shapes: Shapes, op: AttentionSpec, kind: str = "layer_norm", residual: float = 0.0,
    eps: float = 1e-3, more: Callable[[Tensors], Tensors] = lambda t: {},
) -> Case:  # fmt: skip
    """`residual`: the probability of dropout of what is added, in parts of p; `more`: tensors that
    are no leaves, by their names in a block."""

    def call(t: Tensors, p: float, **kw: object) -> Tensor:
        given = {"norm_bias": None, **t, **more(t)}
        given.pop("cu_k", None)
        tables = given.pop("cos", None), given.pop("sin", None)
        how = {
            "nhead": op.num_heads, "kv_heads": op.num_kv_heads, "dropout_p": p,
            "residual_dropout_p": p * residual, "window": op.window, "scale": op.scale,
            "softcap": op.softcap, "norm": kind, "eps": eps,
            "rope": None if tables[0] is None else tables,
            "rope_interleaved": op.rotary is not None and op.rotary.interleaved,
        }  # fmt: skip
        return ops.attention_block(**named(given), **(how | kw))

    def expected(t: Tensors, p: float, seed: int) -> Tensor:
        spec = one_branch(replace(op, dropout=p), kind, p * residual, eps)
        return plain(spec, {**t, **more(t)}, seed)

    return Case(call, expected, shapes, (D, 2 if kind == "layer_norm" else 1))


HEADS_OF_BLOCK = AttentionSpec(num_heads=H, num_kv_heads=KV, head_dim=E, scale=E**-0.5)
RMS = NormSpec(kind="rms_norm", eps=1e-6)
EXPERTS = 5


def moe_case(router: Options, bias: bool = False, shared: bool = False, **how: Any) -> Case:
    """A mixture of experts; `how`: options of the experts, `router`: of the router."""
    spec = MoESpec(
        router=RouterSpec(experts=EXPERTS, top_k=2, **router), shared_gate=shared,
        shared=MLPSpec(activation="silu", gated=True) if shared else None, **how,
    )  # fmt: skip
    own = spec.stack_shapes(D, FF)
    shapes = X | {f"{name}.weight": s for name, s in spec.linear_shapes(D, FF).items()}
    shapes |= {name: own[name] for name in spec.weights if bias or "bias" not in name}
    shapes |= {"router.bias": (EXPERTS,)} if bias else {}

    def call(t: Tensors, p: float, **kw: object) -> Tensor:
        given = {
            n.replace("experts_", "").replace("fc1", "up").replace("fc2", "down"): t[n] for n in t
        }
        return ops.moe(**named(given), top_k=2, **router, **how, **kw)

    def expected(t: Tensors, p: float, seed: int) -> Tensor:
        x = t["x"]
        return plain_moe(spec, x.reshape(-1, D), t)[0].view_as(x)

    return Case(call, expected, shapes, (D, 0), dropout=False)


CASES: dict[str, Case] = {
    "layer_norm": Case(
        lambda t, p, **kw: ops.layer_norm(**t, eps=1e-3, **kw),
        lambda t, p, seed: norm(t["x"], NormSpec(eps=1e-3), t["weight"], t["bias"]),
        X | {"weight": (D,), "bias": (D,)},
        (D, 2),
        dropout=False,
    ),
    "rms_norm": Case(
        lambda t, p, **kw: ops.rms_norm(**t, eps=1e-3, **kw),
        lambda t, p, seed: norm(t["x"], replace(RMS, eps=1e-3), t["weight"]),
        X | {"weight": (D,)},
        (D, 1),
        dropout=False,
    ),
    "dropout_add": Case(
        lambda t, p, **kw: ops.dropout_add(**t, p=p, **kw),
        lambda t, p, seed: t["residual"] + dropout(t["x"], random.RESIDUAL1, p, seed),
        X | {"residual": ("B", "S", D)},
        (0, 0),
    ),
    "moe": moe_case({"normalize": True, "scale": 1.5}, shared=True),
    "moe_clamped": moe_case(
        {"scores": "top_k_softmax"}, bias=True, activation="clamped_swish", limit=1.0, alpha=1.7,
        interleaved=True, transposed=True,
    ),
    "mlp": mlp_case(ops.mlp, X | FC, "gelu"),
    "mlp_custom": mlp_case(ops.mlp, X | FC | {"slope": (FF,)}, USER_FUNCTION),
    "gated_mlp": mlp_case(ops.gated_mlp, X | FC | GATE, "silu"),
    "mlp_block": mlp_case(ops.mlp_block, X | NORM | FC, "gelu", "layer_norm"),
    "gated_mlp_block": mlp_case(
        ops.mlp_block, X | {"norm.weight": (D,)} | FC | GATE, "silu", "rms_norm"
    ),
    "attention": attention_case(
        WIDE_VALUES | {"mask": ("B", 1, "S", "S")}, lambda t: {"is_causal": True, "softcap": 2.0}
    ),
    "attention_fast": attention_case(QKV_HEADS, lambda t: {}),
    "attention_packed": attention_case(
        {"query": (1, H, "T", E), "key": (1, KV, "T", E), "value": (1, KV, "T", E + 1),
         "mask": (H, 1, "T")},
        lambda t: {"is_causal": True} | dict(
            zip(("cu_seqlens_q", "cu_seqlens_k"), bounds(t["query"].shape), strict=True)
        ),
    ),
    "attention_lengths": attention_case(
        QKV_HEADS, lambda t: {"key_lengths": key_lengths(t["query"].shape)}
    ),
    "attention_block": attention_block_case(
        X | NORM | QKV | {"mask": ("B", 1, "S", "S"), "padding": ("B", "S")},
        replace(HEADS_OF_BLOCK, window=(20, 1), softcap=3.0, scale=0.4), residual=0.5,
    ),
    "attention_block_packed": attention_block_case(
        {"x": (1, "T", D)} | NORM | QKV, replace(HEADS_OF_BLOCK, window=(-1, 0)), residual=0.5,
        eps=1e-5, more=lambda t: dict.fromkeys(("cu_q", "cu_k"), bounds(t["x"].shape)[0]),
    ),
    "qk_norm_attention_block": attention_block_case(
        X | {"norm.weight": (D,)} | QKV | {"q_norm.weight": (E,), "k_norm.weight": (E,)},
        replace(HEADS_OF_BLOCK, head_norm=RMS), "rms_norm",
        more=lambda t: {"lengths": key_lengths(t["x"].shape)},
    ),
    "causal_block": causal_case(LLAMA, 2),
    "causal_block_sandwich": causal_case(
        GEMMA, 4, placement="sandwich", norm_offset=1.0, activation="gelu_tanh", softcap=2.0,
        window=(20, 0),
    ),
    "encoder_prenorm": encoder_case(True),
    "encoder_postnorm": encoder_case(False),
}  # fmt: skip


def rotated(t: Tensors, heads: Heads, tables: Tables | None = None) -> Tensor:
    """`ops.rotary` in plain PyTorch."""
    q, k, v = (
        t["x"].unflatten(-1, (-1, heads.width))
        .split((heads.nhead, heads.kv_heads, heads.kv_heads), -2)
    )  # fmt: skip
    if heads.norm:
        q, k = norm(q, RMS, t["q_norm.weight"]), norm(k, RMS, t["k_norm.weight"])
    tables = heads.tables(t["x"]) if tables is None else tables
    if tables is not None:
        q, k = (rotate(x, *tables, heads.interleaved) for x in (q, k))
    return torch.cat((q, k, v), -2).flatten(-2)


def rotary(t: Tensors, heads: Heads, tables: Tables | None = None, **kw: object) -> Tensor:
    x, *weights = t.values()
    tables = tables or heads.tables(x) or (None, None)
    return ops.rotary(x, *tables, heads.nhead, heads.kv_heads, heads.interleaved, *weights, **kw)


def rotary_case(heads: Heads) -> Case:
    return Case(
        lambda t, p, **kw: rotary(t, heads, **kw),
        lambda t, p, seed: rotated(t, heads),
        {"x": ("B", "S", heads.packed)} | heads.weights,
        (heads.packed * heads.norm, 0),
        dropout=False,
    )


def rotary_block_case(heads: Heads) -> Case:
    shapes = {
        "qkv.weight": (heads.packed, D), "qkv.bias": (heads.packed,),
        "proj.weight": (D, heads.nhead * heads.width), "proj.bias": (D,),
    }  # fmt: skip
    return attention_block_case(
        X | NORM | shapes | heads.weights,
        heads.spec(window=(-1, 0)),
        more=lambda t: dict(zip(("cos", "sin"), heads.tables(t["x"]) or (), strict=False)),
    )


def loss(fn: Callable[..., Tensor], t: Tensors, **how: object) -> Tensor:
    given = (t["x"], t["head.weight"], targets(t["x"].shape[:-1]), t["head.bias"])
    options = {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0, "logit_scale": 1.7}
    return fn(*given, **options, reduction="none", **how)


#: Its blocks are of 40 logits: 6 tokens by 6 columns or so.
LOSS = Case(
    lambda t, p, policy="full": loss(ops.linear_cross_entropy, t, chunk=40),
    lambda t, p, seed: loss(linear_cross_entropy, t),
    X | {"head.weight": (VOCAB, D), "head.bias": (VOCAB,)},
    (D, 2),
    dropout=False,
)
#: Some heads alone, of which each calls the step in another way; all of them in their block.
ALONE = ("half", "interleaved partial", "norm half", "norm alone")
ROTARY = {f"rotary {name}": rotary_case(HEADS[name]) for name in ALONE}
ROTARY_BLOCKS = {f"{name} block": rotary_block_case(heads) for name, heads in HEADS.items()}
