"""Descriptions of transformer blocks as plain data.

    BlockSpec
    ├── branches: what is added to the residual stream, one after the other
    │   └── BranchSpec: AttentionSpec (RotarySpec, head norm), MLPSpec, or a mixture of experts
    │       (`moe_spec.MoESpec`); NormSpec; dropout
    ├── loras: LoraSpec, low-rank updates of linear layers
    ├── packed: PackedSpec, frozen quantized weights of linear layers
    └── parallel: ParallelSpec, a rank of a tensor-parallel group

`graph.build.block_graph` builds the graph of a BlockSpec; equal specs share one graph. Specs are
immutable, hashable, and hold plain values only, so that a compiled program can name a block by its
spec (`graph.text`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

if TYPE_CHECKING:
    from fused_remat.moe_spec import MoESpec

#: The name of an activation that is a user's own function.
USER_FUNCTION = "custom"
#: The masks of `AttentionSpec.masks`, in the order in which a spec names them.
MASKS = ("mask", "padding", "lengths", "cu_seqlens")
# Fields of an `AttentionSpec` that describe where q, k, v and the masks come from.
_NOT_OF_SCORES = ("masks", "rotary", "head_norm", "projection", "keys")


def check_one_of(name: str, value: str, *valid: str) -> None:
    """Raise ValueError unless `value` is one of `valid`."""
    if value not in valid:
        raise ValueError(f"{name} must be {' or '.join(map(repr, valid))}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """A norm over the width.

    Attributes:
        kind: a key of `steps.norm.NORMS`, such as "layer_norm" or "rms_norm".
        eps: added to the variance.
        offset: added to the weight in float32 (1 for Gemma, whose weights are close to 0).
    """

    kind: str = "layer_norm"
    eps: float = 1e-5
    offset: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RotarySpec:
    """Rotary position embedding of query and key heads.

    Attributes:
        interleaved: whether a pair is elements 2i and 2i + 1 of a head, not i and i + R/2.
    """

    interleaved: bool = False


@dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Attention with its projections: proj(softmax(scores + masks) @ v).

    scores = scale * q @ k.T, or softcap * tanh(scale * q @ k.T / softcap) if `softcap` is not 0.

    Attributes:
        num_heads, num_kv_heads, head_dim: groups of num_heads / num_kv_heads query heads share a
            key and a value head.
        scale: of the scores, usually head_dim ** -0.5.
        window: how many keys before and after its own position a query sees; -1 for no limit.
            Causal is (-1, 0).
        align: whether the last query and key ("end") or the first ones ("start") have the same
            position, where their numbers differ.
        softcap: limit of the scores; 0 for none.
        dropout: probability, of attention's probabilities.
        sinks: whether each head has a learned score, the param "sinks" (H,), that takes part in
            softmax and has no value (gpt-oss).
        masks: those of `MASKS` that a call passes.
        true_means: whether a query sees a key where a bool "mask" is True ("attend", as in
            `scaled_dot_product_attention`) or does not ("exclude", as in `nn.Transformer`).
        rotary: rotation of query and key heads, or None.
        head_norm: norm of query and key heads before the rotation, or None.
        projection: whether q, k and v have one weight ("packed") or three ("split").
        keys: the block's input from which keys and values are projected. With any but "input" this
            is cross attention.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: tuple[int, int] = (-1, -1)
    align: Literal["start", "end"] = "end"
    softcap: float = 0.0
    dropout: float = 0.0
    sinks: bool = False
    masks: tuple[str, ...] = ()
    true_means: Literal["attend", "exclude"] = "attend"
    rotary: RotarySpec | None = None
    head_norm: NormSpec | None = None
    projection: Literal["packed", "split"] = "packed"
    keys: str = "input"

    @functools.cached_property
    def options(self) -> tuple[str, ...]:
        """Names of the options of scores and probabilities that do not have their defaults."""
        optional = [f for f in fields(self) if f.default is not MISSING]
        chosen = [f.name for f in optional if getattr(self, f.name) != f.default]
        return tuple([name for name in chosen if name not in _NOT_OF_SCORES])

    def __post_init__(self) -> None:
        check_one_of("align", self.align, "start", "end")
        check_one_of("true_means", self.true_means, "attend", "exclude")
        check_one_of("projection", self.projection, "packed", "split")
        for mask in self.masks:
            check_one_of("masks", mask, *MASKS)
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads must divide num_heads, got {self.num_kv_heads} and {self.num_heads}"
            )
        if self.head_norm is not None:
            check_one_of("head_norm", self.head_norm.kind, "rms_norm")
        if self.keys != "input" and (self.rotary is not None or self.head_norm is not None):
            raise ValueError("cross attention supports neither rotary nor head_norm")
        if min(self.window) < -1:
            raise ValueError(
                f"window must be numbers of keys, or -1 for no limit, got {self.window}"
            )
        if self.softcap < 0.0:
            raise ValueError(f"softcap must be positive, or 0 for none, got {self.softcap}")
        if self.align == "start" and self.window not in ((-1, -1), (-1, 0)):
            raise ValueError(
                f"with align='start', window must be (-1, -1) or (-1, 0), got {self.window}"
            )

    @property
    def columns(self) -> dict[str, tuple[int, int]]:
        """Start and stop of the columns of q, k and v in the packed projection, by layer name."""
        prefix = "" if self.keys == "input" else "cross_"
        heads, kv_heads = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        ends = (0, heads, heads + kv_heads, heads + 2 * kv_heads)
        return {f"{prefix}{name}": (ends[i], ends[i + 1]) for i, name in enumerate("qkv")}

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        packed, proj = ("qkv", "proj") if self.keys == "input" else ("cross", "cross_proj")
        return (*(self.columns if self.projection == "split" else (packed,)), proj)

    @property
    def heads_kind(self) -> str:
        """The part of a block's kind that names the norm or the rotation of its heads."""
        return "qk_norm_" if self.head_norm else "rotary_" if self.rotary else ""

    def linear_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every linear layer of a block of `width`."""
        *layers, proj = self.linears
        rows = {name: stop - start for name, (start, stop) in self.columns.items()}
        whole = sum(rows.values())
        shapes = {name: (rows.get(name, whole), width) for name in layers}
        return {**shapes, proj: (width, self.num_heads * self.head_dim)}


@dataclass(frozen=True, kw_only=True)
class MLPSpec:
    """An MLP: fc2(dropout(activation(fc1(x)))), or fc2(dropout(activation(gate(x)) * fc1(x))).

    Attributes:
        activation: a key of `steps.activation.ACTIVATIONS`, or `USER_FUNCTION`.
        gated: whether there is a gate.
        dropout: probability, after the activation.
        captured: how many tensors a user's function captures.
        whole: whether a user's function gets all tokens at once, not tiles of them.
    """

    activation: str
    gated: bool = False
    dropout: float = 0.0
    captured: int = 0
    whole: bool = False

    def __post_init__(self) -> None:
        if self.gated and self.activation == USER_FUNCTION:
            raise ValueError("a gated MLP needs the name of an activation, not a function")

    @property
    def linears(self) -> tuple[str, ...]:
        """Names of the linear layers."""
        return ("gate", "fc1", "fc2") if self.gated else ("fc1", "fc2")

    def linear_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every linear layer of a block of `width`, MLP `hidden` wide."""
        return {
            name: (width, hidden) if name == "fc2" else (hidden, width) for name in self.linears
        }


@dataclass(frozen=True, kw_only=True)
class BranchSpec:
    """A term of the residual stream: attention, an MLP or a mixture of experts, with its norm.

    Attributes:
        op: what the branch computes.
        norm: the norm, or None.
        placement: of the norm: before the branch ("pre"), after the sum ("post"), or both before
            the branch and before the sum ("sandwich").
        dropout: probability, of what is added.
        parallel: whether the branch reads what the branch before it read, instead of the sum after
            that branch. Without a norm of its own, it reads the result of that branch's norm.
    """

    op: AttentionSpec | MLPSpec | MoESpec
    norm: NormSpec | None = None
    placement: str = "pre"
    dropout: float = 0.0
    parallel: bool = False

    def __post_init__(self) -> None:
        check_one_of("placement", self.placement, "pre", "post", "sandwich")
        if self.placement != "pre" and self.norm is None:
            raise ValueError(f"placement {self.placement!r} needs a norm")
        if self.placement == "post" and self.parallel:
            raise ValueError("a parallel branch must have placement 'pre' or 'sandwich'")


@dataclass(frozen=True, kw_only=True)
class LoraSpec:
    """A low-rank update of a linear layer: + scale * B(A(dropout(x))).

    Attributes:
        layer: the layer's name: "qkv", "q", "proj", "gate", "fc1", "fc2", ...
        scale, dropout: the factor of the update; the dropout probability of its input.
        dtype: of A, B and the product between them; None for the block's. (PEFT keeps adapters in
            float32 in a model of 16 bits.)
        dora: whether the layer's output columns are then scaled (`steps.dora`). It is the only
            update of its layer.
    """

    layer: str
    scale: float
    dropout: float = 0.0
    dtype: torch.dtype | None = None
    dora: bool = False


@dataclass(frozen=True, kw_only=True)
class PackedSpec:
    """A frozen quantized weight, of which each product dequantizes a copy that is then freed.

    Attributes:
        kind: a key of `steps.packed.FORMATS`.
        shape: (out, in) of the weight.
        dtype: of the copy in backward, which is then converted to that of the product; None for
            that of the product.
        compute: of the product; None for that of the layer's input.
        parts: names of the tensors that describe the weight, in addition to its own.
        options: other values that the format needs, such as a block size.
    """

    kind: str
    shape: tuple[int, int]
    dtype: torch.dtype | None = None
    compute: torch.dtype | None = None
    parts: tuple[str, ...] = ()
    options: tuple[Any, ...] = ()

    def names(self, weight: str) -> tuple[str, ...]:
        """Return the names of all tensors of the weight named `weight`."""
        return (weight, *[f"{weight}.{part}" for part in self.parts])


@dataclass(frozen=True, kw_only=True)
class ParallelSpec:
    """A rank of a tensor-parallel group.

    Attributes:
        group: the name of the process group.
        size, rank: the number of ranks in the group, and the rank of this process.
        sequence: whether the ranks divide the residual stream by tokens.
    """

    group: str
    size: int
    rank: int
    sequence: bool = False

    @classmethod
    def of(cls, mesh: Any, sequence: bool = False) -> ParallelSpec:
        """Return the rank of this process in a `DeviceMesh` of one dimension."""
        group, rank = mesh.get_group().group_name, mesh.get_local_rank()
        return cls(group=group, size=mesh.size(), rank=rank, sequence=sequence)


@dataclass(frozen=True, kw_only=True)
class BlockSpec:
    """A block: branches that are added to a residual stream, one after the other.

    Attributes:
        kind: names the block in operators, messages and `policies.EXACT_PRESETS`.
        branches: in the order of computation.
        inputs: names of the inputs. The first is the stream; attention reads the others.
        residual: whether branches are added to the stream; else the one branch is the output.
        loras: low-rank updates; the matrices of the i-th are "lora.i.A" and "lora.i.B",
            the magnitudes of DoRA "lora.i.M".
        parallel: the ranks that divide heads and hidden units, or None. The spec's numbers of heads
            are those of one rank.
        packed: the names of linear layers whose weights are quantized, each with its format.
    """

    kind: str
    branches: tuple[BranchSpec, ...]
    inputs: tuple[str, ...] = ("input",)
    residual: bool = True
    loras: tuple[LoraSpec, ...] = ()
    parallel: ParallelSpec | None = None
    packed: tuple[tuple[str, PackedSpec], ...] = ()

    def __post_init__(self) -> None:
        if not self.branches:
            raise ValueError("a block needs at least one branch")
        for branch in self.branches:
            if isinstance(branch.op, AttentionSpec) and branch.op.keys not in self.inputs:
                raise ValueError(
                    f"keys must name an input of the block ({', '.join(self.inputs)}), got "
                    f"{branch.op.keys!r}"
                )
        if not self.residual and (len(self.branches) > 1 or self.branches[0].placement != "pre"):
            raise ValueError("without a residual, a block has one branch, with placement 'pre'")
        layers = [lora.layer for lora in self.loras]
        for layer in [lora.layer for lora in self.loras if lora.dora]:
            if layers.count(layer) > 1:
                raise ValueError(f"DoRA must be the only low-rank update of its layer, {layer!r}")
        if (self.loras or self.packed) and self.parallel is not None:
            what = "low-rank updates" if self.loras else "quantized weights"
            raise ValueError(f"{what} cannot be divided among ranks")
        kinds = (AttentionSpec, MLPSpec)
        if self.parallel is not None and any(not isinstance(b.op, kinds) for b in self.branches):
            raise ValueError("experts cannot be divided among ranks: leave parallel=None")

    def __getstate__(self) -> dict[str, Any]:
        # Hashes of strings differ between processes.
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    def __hash__(self) -> int:
        found: int | None = self.__dict__.get("_hash")
        if found is None:
            parts = self.kind, self.branches, self.inputs, self.loras, self.parallel, self.packed
            found = hash(parts)
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
        """Whether branches end with the sum, not with a norm of the sum."""
        return self.branches[-1].placement != "post"

    @property
    def drops(self) -> bool:
        """Whether there is any dropout."""
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
        """Names of all weights and biases, including those of low-rank updates."""
        names = linear_params(*self.linears, *self.norms)
        ops = [branch.op for branch in self.branches]
        if any(isinstance(op, AttentionSpec) and op.head_norm is not None for op in ops):
            names += ("q_norm.weight", "k_norm.weight")
        for op in ops:
            names += () if isinstance(op, AttentionSpec | MLPSpec) else op.weights
        for layer, packed in self.packed:
            names += packed.names(f"{layer}.weight")[1:]
        return names + lora_params(self.loras)

    def linear_shapes(self, width: int, hidden: int) -> dict[str, tuple[int, int]]:
        """Return (out, in) of every linear layer of a block of `width`, MLP `hidden` wide."""
        shapes = [branch.op.linear_shapes(width, hidden).items() for branch in self.branches]
        return dict(itertools.chain(*shapes))

    def on_rank(self, parallel: ParallelSpec) -> BlockSpec:
        """Return the block of one rank of a tensor-parallel group, with the rank's heads."""
        branches, size = [], parallel.size
        for branch in self.branches:
            op = branch.op
            if isinstance(op, AttentionSpec):
                kv_heads = op.num_kv_heads
                if kv_heads % size:
                    raise ValueError(f"{kv_heads} key heads cannot be divided among {size} ranks")
                op = replace(op, num_heads=op.num_heads // size, num_kv_heads=kv_heads // size)
            branches.append(replace(branch, op=op))
        return replace(self, branches=tuple(branches), parallel=parallel)


_PLACEMENTS = ("prenorm", "postnorm", "sandwich")
_HEADS = ("", "rotary_", "qk_norm_")
#: The kinds of blocks that this library builds. Their operators are registered at import, for
#: programs that another process compiled.
KINDS = (
    *(f"{layer}_{placement}" for layer in ("encoder", "decoder") for placement in _PLACEMENTS[:2]),
    *(f"{heads}transformer_{placement}" for heads in _HEADS for placement in _PLACEMENTS),
    *(f"{heads}moe_transformer_{placement}" for heads in _HEADS for placement in _PLACEMENTS),
    *(f"{heads}attention_block" for heads in _HEADS),
    "mlp", "mlp_block", "gated_mlp", "gated_mlp_block", "moe",
    "attention", "dropout_add", "linear_cross_entropy", "norm", "rotary",
)  # fmt: skip


def linear_params(*names: str) -> tuple[str, ...]:
    """Return the names of the weight and the bias of each layer."""
    return tuple([f"{name}.{kind}" for name in names for kind in ("weight", "bias")])


def lora_params(loras: Sequence[LoraSpec]) -> tuple[str, ...]:
    """Return the names of A (rank, in), B (out, rank) and DoRA's magnitudes (out,) of updates."""
    kinds = ["ABM" if lora.dora else "AB" for lora in loras]
    return tuple([f"lora.{i}.{matrix}" for i, kind in enumerate(kinds) for matrix in kind])
