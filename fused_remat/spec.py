"""What a transformer block computes, as plain data: the one description that every block has.

    BlockSpec
    ├── branches: what is added to the residual stream, one after the other
    │   └── BranchSpec: AttentionSpec (RotarySpec, head norms) or MLPSpec; its NormSpec and dropout
    ├── loras: LoraSpec, low-rank updates of linear layers
    └── parallel: ParallelSpec, a rank's place in a tensor-parallel group

`graph.build.block_graph` makes the block's graph of it. All specs are immutable and hashable: equal
specs share one graph. They hold plain values only, so that a compiled program can name a block
(`blocks.recipe`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from typing import Literal, ParamSpec, TypeVar

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
        scale: of the scores; None for head_dim ** -0.5.
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
        set_ = [row.name for row in rows if getattr(self, row.name) != row.default]
        return tuple([name for name in set_ if name not in _NOT_OF_SCORES])


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


@dataclass(frozen=True, kw_only=True)
class BranchSpec:
    """What is added to the residual stream: attention or an MLP, with its norm.

    Attributes:
        op: what the branch computes.
        norm: None for none.
        placement: of the norm: before the branch ("pre"), after the sum ("post"), or before the
            branch and before the sum ("sandwich").
        dropout: of what is added.
        parallel: reads what the branch before it read, instead of the sum after that one.
    """

    op: AttentionSpec | MLPSpec
    norm: NormSpec | None = None
    placement: Literal["pre", "post", "sandwich"] = "pre"
    dropout: float = 0.0
    parallel: bool = False


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
        kind: names the block in operators, messages and `policies.RUNGS`.
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


def cached(build: Callable[P, Spec]) -> Callable[P, Spec]:
    """`build`, which makes a spec of plain numbers, with a cache; the compiler traces through it.

    A layer describes its block anew at every call, and its description is seldom new.
    """
    known = functools.lru_cache(maxsize=1024)(build)

    @functools.wraps(build)
    def built(*args: P.args, **kwargs: P.kwargs) -> Spec:
        if torch.compiler.is_compiling():
            return build(*args, **kwargs)
        return known(*args, **kwargs)

    return built
