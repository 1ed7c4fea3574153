"""What a transformer block computes, as plain data: the one description that every block has.

    BlockSpec
    ├── branches: what is added to the residual stream, one after the other
    │   └── BranchSpec: AttentionSpec (RotarySpec, head norms) or MLPSpec; its NormSpec and dropout
    ├── loras: LoraSpec, low-rank updates of linear layers
    └── parallel: ParallelSpec, a rank's place in a tensor-parallel group

`graph.build.block_graph` makes the block's graph of it. All specs are immutable and hashable: equal
specs share one graph. They hold plain values only, so that a compiled program can name a block
(`graph.text`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, Literal, ParamSpec, TypedDict, TypeVar

import torch

#: The activation of a branch whose activation is the caller's own function.
USER_FUNCTION = "custom"

P = ParamSpec("P")
Spec = TypeVar("Spec")


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over the width.

    Attributes:
        kind: a row of `steps.norm.NORMS`: "layer_norm" or "rms_norm".
        eps: added to the variance.
        offset: added to the weight in float32 (1 for Gemma, whose weights are around 0).
    """

    kind: str = "layer_norm"
    eps: float = 1e-5
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary position embedding of query and key heads.

    Attributes:
        interleaved: pairs are elements 2i and 2i + 1 of a head; else i and i + R/2.
    """

    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention with its projections: proj(softmax(scores + masks) @ v).

    scores = scale * q @ k.T, or softcap * tanh(scale * q @ k.T / softcap) where `softcap` is not 0.

    Attributes:
        num_heads, num_kv_heads, head_dim: query heads share key and value heads in groups of
            num_heads / num_kv_heads.
        scale: of the scores, usually head_dim ** -0.5.
        window: how many keys before and after its own position a query sees; -1 for no limit.
            Causal is (-1, 0).
        align: which query and key are at one position: the last ones ("end") or the first ones
            ("start"), where their numbers differ.
        softcap: limit of the scores, 0 for none.
        dropout: of the probabilities.
        masks: those of `MASKS` that a call passes.
        true_means: whether a key takes part where a bool "mask" is True ("attend", as in
            `scaled_dot_product_attention`) or is excluded ("exclude", as in `nn.Transformer`).
        rotary: rotation of query and key heads; None for none.
        head_norm: norm of query and key heads before they are rotated; None for none.
        projection: whether q, k and v have one weight ("packed") or three ("split").
        keys: the block's input that keys and values are made of: "input", or another one, to which
            the attention is then called "cross".
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: tuple[int, int] = (-1, -1)
    align: Literal["start", "end"] = "end"
    softcap: float = 0.0
    dropout: float = 0.0
    masks: tuple[str, ...] = ()
    true_means: Literal["attend", "exclude"] = "attend"
    rotary: RotarySpec | None = None
    head_norm: NormSpec | None = None
    projection: Literal["packed", "split"] = "packed"
    keys: str = "input"

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """Names of the options of the scores and the probabilities that are not the default."""
        rows = [row for row in fields(self) if row.default is not MISSING]
        given = [row.name for row in rows if getattr(self, row.name) != row.default]
        return tuple([name for name in given if name not in _NOT_OF_SCORES])

    def __post_init__(self) -> None:
        for name, value, valid in (
            ("align", self.align, ("start", "end")),
            ("true_means", self.true_means, ("attend", "exclude")),
            ("projection", self.projection, ("packed", "split")),
        ):
            if value not in valid:
                raise ValueError(f"{name} must be {' or '.join(map(repr, valid))}, got {value!r}")
        for mask in self.masks:
            if mask not in MASKS:
                raise ValueError(f"masks takes some of {', '.join(MASKS)}, got {mask!r}")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}"
            )
        if self.head_norm is not None and self.head_norm.kind != "rms_norm":
            raise ValueError(f"heads are normed by rms_norm, got {self.head_norm.kind!r}")
        if self.keys != "input" and (self.rotary is not None or self.head_norm is not None):
            raise ValueError("attention to another input neither norms nor rotates its heads")
        if min(self.window) < -1:
            raise ValueError(f"window takes counts of keys, or -1 for no limit, got {self.window}")
        if self.softcap < 0.0:
            raise ValueError(f"softcap must be positive, or 0 for none, got {self.softcap}")
        if self.align == "start" and self.window not in ((-1, -1), (-1, 0)):
            raise ValueError(
                f"with align='start', window is (-1, -1) or (-1, 0), got {self.window}"
            )

    @property
    def columns(self) -> dict[str, tuple[int, int]]:
        """The columns, first and end, of q, k and v in the packed projection, by their layers."""
        prefix = "" if self.keys == "input" else "cross_"
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ends = (0, heads, heads + kv_heads, heads + 2 * kv_heads)
        return {f"{prefix}{name}": ends[i : i + 2] for i, name in enumerate("qkv")}  # type: ignore[misc]

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        packed, proj = ("qkv", "proj") if self.keys == "input" else ("cross", "cross_proj")
        return (*(self.columns if self.projection == "split" else (packed,)), proj)

    @property
    def heads_kind(self) -> str:
        """What the kind of a block says of its heads: they are rotated, or normed first."""
        return "qk_norm_" if self.head_norm else "rotary_" if self.rotary else ""

    def linear_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer of a block of `width`."""
        *layers, proj = self.linears
        sizes = {name: stop - start for name, (start, stop) in self.columns.items()}
        rows = [sizes.get(name, sum(sizes.values())) for name in layers]
        shapes = {name: (n, width) for name, n in zip(layers, rows, strict=True)}
        return {**shapes, proj: (width, self.num_heads * self.head_dim)}


class AttentionOptions(TypedDict, total=False):
    """What functions take by keyword of `AttentionSpec`; a `scale` of None is head_dim ** -0.5."""

    window: tuple[int, int]
    scale: float | None
    softcap: float


def score_fields(head_dim: int, is_causal: bool, options: AttentionOptions) -> dict[str, Any]:
    """The fields of an `AttentionSpec` for heads `head_dim` wide, from a function's arguments.

    Raises: TypeError for an unknown option, or a window that is none.

    >>> score_fields(16, True, {"softcap": 30.0})
    {'softcap': 30.0, 'scale': 0.25, 'window': (-1, 0)}
    """
    valid = AttentionOptions.__annotations__
    for name in options:
        if name not in valid:
            raise TypeError(
                f"got an unexpected keyword argument {name!r}; the options of attention are "
                f"{', '.join(valid)}"
            )
    window, scale = options.get("window", (-1, -1)), options.get("scale")
    if not isinstance(window, tuple) or [type(w) for w in window] != [int, int]:
        raise TypeError(f"window takes two ints, (left, right), got {window!r}")
    return {
        **{name: float(n) if isinstance(n, int) else n for name, n in options.items()},
        "scale": float(max(head_dim, 1)) ** -0.5 if scale is None else float(scale),
        "window": (window[0], 0 if is_causal else window[1]),
    }


# Fields of an `AttentionSpec` that say where q, k, v and the masks come from.
_NOT_OF_SCORES = ("masks", "rotary", "head_norm", "projection", "keys")
#: The masks of `AttentionSpec.masks`, in the order in which a spec names them.
MASKS = ("mask", "padding", "lengths", "cu_seqlens")


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """An MLP: fc2(dropout(activation(fc1(x)))), or fc2(dropout(activation(gate(x)) * fc1(x))).

    Attributes:
        activation: a row of `steps.activation.ACTIVATIONS`, or `USER_FUNCTION`.
        gated: whether there is a gate.
        dropout: of what the activation gives.
        captured: how many tensors the caller's function captures.
        whole: the caller's function is given all tokens at once; else it is applied to tiles.
    """

    activation: str
    gated: bool = False
    dropout: float = 0.0
    captured: int = 0
    whole: bool = False

    def __post_init__(self) -> None:
        if self.gated and self.activation == USER_FUNCTION:
            raise ValueError("a gated MLP takes the name of an activation, not a function")

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        return ("gate", "fc1", "fc2") if self.gated else ("fc1", "fc2")

    def linear_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer of a block of `width`, of an MLP `hidden` wide."""
        return {
            name: (width, hidden) if name == "fc2" else (hidden, width) for name in self.linears
        }


@dataclass(frozen=True, kw_only=True)
class BranchSpec:
    """What is added to the residual stream: attention or an MLP, with its norm.

    Attributes:
        op: what the branch computes.
        norm: None for none.
        placement: of the norm: before the branch ("pre"), after the sum ("post"), or before the
            branch and before the sum ("sandwich").
        dropout: of what is added.
        parallel: reads the stream that the branch before it read, instead of the sum after that
            one; without a norm of its own, what that branch's norm made of it.
    """

    op: AttentionSpec | MLPSpec
    norm: NormSpec | None = None
    placement: str = "pre"
    dropout: float = 0.0
    parallel: bool = False

    def __post_init__(self) -> None:
        if self.placement not in ("pre", "post", "sandwich"):
            raise ValueError(
                f"placement must be 'pre', 'post' or 'sandwich', got {self.placement!r}"
            )
        if self.placement != "pre" and self.norm is None:
            raise ValueError(f"placement {self.placement!r} needs a norm")
        if self.placement == "post" and self.parallel:
            raise ValueError("a parallel branch is normed before it is computed, not after the sum")


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """A low-rank update of a linear layer: + scale * B(A(dropout(x))).

    Attributes:
        layer: the name of the layer's weights: "qkv", "q", "proj", "gate", "fc1", "fc2", ...
        scale, dropout: of the update, and of its input.
        dtype: of A and B and of the product between them, where it is not the block's (PEFT holds
            adapters in float32 beside a model in 16 bits).
    """

    layer: str
    scale: float
    dropout: float = 0.0
    dtype: torch.dtype | None = None


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """A rank's place in a tensor-parallel group.

    Attributes:
        group: the name of the process group.
        size, rank: of the group, and this process's in it.
        sequence: whether the residual stream is divided among the ranks by tokens.
    """

    group: str
    size: int
    rank: int
    sequence: bool


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block: branches that are added to a residual stream, one after the other.

    Attributes:
        kind: names the block in operators, messages and `policies.EXACT_PRESETS`.
        branches: in order of computation.
        inputs: names of the inputs; the first is the stream, others are read by attention.
        residual: False for a branch alone, whose result is the output.
        loras: low-rank updates; the matrices of the i-th are "lora.i.A" and "lora.i.B".
        parallel: None for a block that one rank computes. Else heads and hidden units are the
            rank's own, and so are the numbers of heads.
    """

    kind: str
    branches: tuple[BranchSpec, ...]
    inputs: tuple[str, ...] = ("input",)
    residual: bool = True
    loras: tuple[LoraSpec, ...] = ()
    parallel: ParallelSpec | None = None

    def __post_init__(self) -> None:
        if not self.branches:
            raise ValueError("a block has at least one branch")
        for branch in self.branches:
            if isinstance(branch.op, AttentionSpec) and branch.op.keys not in self.inputs:
                raise ValueError(f"keys are made of {branch.op.keys!r}, no input: {self.inputs}")
        if not self.residual and (len(self.branches) > 1 or self.branches[0].placement != "pre"):
            raise ValueError("without a residual, a block is one branch, normed before it")
        if self.loras and self.parallel is not None:
            raise ValueError("low-rank updates are not divided among ranks")

    def __getstate__(self) -> dict[str, Any]:
        # Strings have another hash in another process.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            found = hash((self.kind, self.branches, self.inputs, self.loras, self.parallel))
            object.__setattr__(self, "_hash", found)
        return found

    @property
    def attention(self) -> AttentionSpec:
        """The first attention."""
        for branch in self.branches:
            if isinstance(branch.op, AttentionSpec):
                return branch.op
        raise ValueError(f"{self.kind} has no attention")

    @property
    def norm_first(self) -> bool:
        """Whether a branch ends with the sum, not with a norm of it."""
        return self.branches[-1].placement != "post"

    @property
    def drops(self) -> bool:
        """Whether any dropout probability is not 0."""
        return any(b.dropout > 0.0 or b.op.dropout > 0.0 for b in self.branches)

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        return tuple([name for branch in self.branches for name in branch.op.linears])

    @property
    def norms(self) -> tuple[str, ...]:
        """Names of the norms over the width of the block."""
        names = []
        for i, branch in enumerate(self.branches, 1):
            number = str(i) if len(self.branches) > 1 else ""
            names += [f"norm{number}"] if branch.norm is not None else []
            names += [f"post{number}"] if branch.placement == "sandwich" else []
        return tuple(names)

    @property
    def weights(self) -> tuple[str, ...]:
        """Names of all weights and biases, those of low-rank updates included."""
        names = linear_params(*self.linears, *self.norms)
        ops = [branch.op for branch in self.branches]
        if any(isinstance(op, AttentionSpec) and op.head_norm is not None for op in ops):
            names += ("q_norm.weight", "k_norm.weight")
        return names + lora_params(len(self.loras))

    def linear_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear layer of a block of `width` whose MLP is `hidden` wide.

        >>> nn_layer_spec(True, 4, 8, "gelu").linear_shapes(32, 64)["qkv"]
        (96, 32)
        """
        shapes: dict[str, tuple[int, int]] = {}
        for branch in self.branches:
            shapes.update(branch.op.linear_shapes(width, hidden))
        return shapes

    def on_rank(self, parallel: ParallelSpec) -> BlockSpec:
        """The block as one rank of a tensor-parallel group has it: with its share of the heads."""

        def own(op: AttentionSpec | MLPSpec) -> AttentionSpec | MLPSpec:
            if isinstance(op, MLPSpec):
                return op
            if op.num_kv_heads % parallel.size:
                raise ValueError(f"{op.num_kv_heads} key heads among {parallel.size} ranks")
            heads, kv_heads = (n // parallel.size for n in (op.num_heads, op.num_kv_heads))
            return replace(op, num_heads=heads, num_kv_heads=kv_heads)

        branches = tuple([replace(branch, op=own(branch.op)) for branch in self.branches])
        return replace(self, branches=branches, parallel=parallel)


_PLACEMENTS = ("prenorm", "postnorm", "sandwich")
_HEADS = ("", "rotary_", "qk_norm_")
#: The kinds of blocks that this library makes. Their operators exist before any graph does, for
#: programs that another process has compiled.
KINDS = (
    *(f"{layer}_{placement}" for layer in ("encoder", "decoder") for placement in _PLACEMENTS[:2]),
    *(f"{heads}transformer_{placement}" for heads in _HEADS for placement in _PLACEMENTS),
    *(f"{heads}attention_block" for heads in _HEADS),
    "mlp", "mlp_block", "gated_mlp", "gated_mlp_block",
    "attention", "dropout_add", "linear_cross_entropy", "norm", "rotary",
)  # fmt: skip


def linear_params(*names: str) -> tuple[str, ...]:
    """The weight and bias of each layer.

    >>> linear_params("fc1")
    ('fc1.weight', 'fc1.bias')
    """
    return tuple([f"{name}.{kind}" for name in names for kind in ("weight", "bias")])


def lora_params(count: int) -> tuple[str, ...]:
    """Names of the matrices of `count` updates: A (rank, in), B (out, rank).

    >>> lora_params(1)
    ('lora.0.A', 'lora.0.B')
    """
    return tuple([f"lora.{i}.{matrix}" for i in range(count) for matrix in "AB"])


def cached(build: Callable[P, Spec]) -> Callable[P, Spec]:
    """`build`, which makes a spec of plain values, with a cache; the compiler traces through it.

    A layer describes its block anew at every call, and its description is seldom new.
    """
    known = functools.lru_cache(maxsize=1024)(build)

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> Spec:
        if torch.compiler.is_compiling():
            return build(*args, **kwargs)
        return known(*args, **kwargs)  # type: ignore[arg-type]

    return built


@cached
def nn_layer_spec(
    norm_first: bool,
    num_heads: int,
    head_dim: int,
    activation: str,
    eps: tuple[float, ...] = (1e-5, 1e-5),
    dropout: float | tuple[float, ...] = 0.0,
    *,
    causal: bool = False,
    masks: tuple[str, ...] = (),
    memory_causal: bool = False,
    memory_masks: tuple[str, ...] = (),
    true_means: Literal["attend", "exclude"] = "exclude",
    projection: Literal["packed", "split"] = "packed",
    captured: int = 0,
    loras: tuple[LoraSpec, ...] = (),
) -> BlockSpec:
    """The block of an `nn.TransformerEncoderLayer`, or of a decoder layer if it has three norms.

    Args:
        norm_first, num_heads, head_dim, activation: the layer's.
        eps: of its norms, two or three.
        dropout: probabilities in the order in which they apply: attention, what it adds, the same
            of the attention to the memory, the MLP, what it adds; or one number for all.
        causal, masks: of the attention to the input; `memory_causal`, `memory_masks`: to "memory".
        captured: as in `MLPSpec`; true_means, projection: as in `AttentionSpec`.

    >>> nn_layer_spec(True, 4, 16, "gelu", (1e-5,) * 3).kind
    'decoder_prenorm'
    """
    decodes = len(eps) == 3
    ps = dropout if isinstance(dropout, tuple) else (dropout,) * (2 * len(eps))
    attention = AttentionSpec(
        num_heads=num_heads, num_kv_heads=num_heads, head_dim=head_dim, scale=head_dim**-0.5,
        window=(-1, 0 if causal else -1), dropout=ps[0], masks=masks, true_means=true_means,
        projection=projection,
    )  # fmt: skip
    ops: list[AttentionSpec | MLPSpec] = [attention]
    if decodes:
        cross = replace(
            attention, window=(-1, 0 if memory_causal else -1), align="start", dropout=ps[2],
            masks=memory_masks, keys="memory",
        )  # fmt: skip
        ops.append(cross)
    ops.append(MLPSpec(activation=activation, dropout=ps[-2], captured=captured, whole=True))
    placement = "pre" if norm_first else "post"
    branches = [
        BranchSpec(op=op, norm=NormSpec(eps=e), placement=placement, dropout=p)
        for op, e, p in zip(ops, eps, ps[1::2], strict=True)
    ]
    return BlockSpec(
        kind=f"{'decoder' if decodes else 'encoder'}_{placement}norm",
        branches=tuple(branches),
        inputs=("input", "memory") if decodes else ("input",),
        loras=loras,
    )


@cached
def transformer_spec(
    norm: str,
    eps: float,
    activation: str,
    *,
    offset: float = 0.0,
    placement: str = "pre",
    gated: bool = False,
    dropout: tuple[float, float, float, float] = (0.0, 0.0, 0.0, 0.0),
    rotary: bool = False,
    interleaved: bool = False,
    qk_norm_eps: float | None = None,
    loras: tuple[LoraSpec, ...] = (),
    **attention: Any,
) -> BlockSpec:
    """The block of a language or vision model: attention and an MLP with norms of one kind.

    Args:
        norm, eps, offset, placement: of the norms of both branches.
        activation, gated: of the MLP.
        dropout: of attention's probabilities, of what attention adds, in the MLP, of what it adds.
        rotary, interleaved: whether query and key heads are rotated, and as `RotarySpec` has it.
        qk_norm_eps: of an RMSNorm of query and key heads before that; None for none.
        attention: other fields of `AttentionSpec`.

    Raises: ValueError for an unknown placement.

    >>> transformer_spec("rms_norm", 1e-6, "silu", gated=True, rotary=True,
    ...     num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=(-1, 0)).kind
    'rotary_transformer_prenorm'
    """
    p_attention, p_first, p_mlp, p_second = dropout
    head_norm = None
    if qk_norm_eps is not None:
        head_norm = NormSpec(kind="rms_norm", eps=qk_norm_eps, offset=offset)
    op = AttentionSpec(
        dropout=p_attention,
        rotary=RotarySpec(interleaved=interleaved) if rotary else None,
        head_norm=head_norm,
        **attention,
    )
    mlp = MLPSpec(activation=activation, gated=gated, dropout=p_mlp)
    spec = NormSpec(kind=norm, eps=eps, offset=offset)
    return BlockSpec(
        kind=f"{op.heads_kind}transformer_{placement}{'' if placement == 'sandwich' else 'norm'}",
        branches=(
            BranchSpec(op=op, norm=spec, placement=placement, dropout=p_first),
            BranchSpec(op=mlp, norm=spec, placement=placement, dropout=p_second),
        ),
        loras=loras,
    )
