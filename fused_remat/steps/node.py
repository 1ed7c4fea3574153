"""`Node`: one step of a block's graph. It computes one activation, and has a backward.

A node declares which activations and which tensors of the block it reads, in forward and in
backward. What is kept, rebuilt and freed is decided in `graph.schedule`; what runs on a device, in
the operations that nodes call.

Every activation is a matrix (tokens, width); only a block's inputs may also be heads (sequences,
heads, tokens of a sequence, width of a head). All nodes are immutable and hold plain values.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from fused_remat.steps.chunk import Chunk

Shapes = Mapping[str, "tuple[int, ...]"]

# A field's type describes what the field names; "" and () are for nothing.
#: Activations that the node is differentiable in.
Input = Annotated[str, "input"]
Inputs = Annotated[tuple[str, ...], "input"]
#: Tensors of the block (weights, masks) that its forward reads.
Param = Annotated[str, "param"]
Params = Annotated[tuple[str, ...], "param"]
#: A dropout multiplier: also an activation, but not differentiable.
Mask = Annotated[str, "mask"]
_KINDS = {"Input": "input", "Inputs": "input", "Param": "param", "Params": "param", "Mask": "mask"}


def _kind(declared: Any) -> str:
    """Return "input", "param", "mask", or "" for a field of a declared type."""
    if isinstance(declared, str):  # where annotations are not evaluated
        return _KINDS.get(declared.rpartition(".")[2], "")
    return str(getattr(declared, "__metadata__", ("",))[0])


@dataclass(frozen=True, kw_only=True)
class Node:
    """One step: computes the activation `name`."""

    name: str
    role: str = ""  # what it is in a block, by which presets keep it (`policies.PRESETS`)
    # under autocast, the dtype of products outside the residual stream, or of a norm's result;
    # None for that of what the node reads
    compute: torch.dtype | None = None
    keepable: ClassVar[bool] = True  # whether a policy may name it
    widens: ClassVar[bool] = False  # whether it has float32 at least, whatever the input's dtype
    per_sequence: ClassVar[bool] = False  # mixes the tokens of a sequence: cannot run on a tile
    #: Inputs of the block whose tokens, one after the other, are those of the result; () for those
    #: of `follows`.
    tokens: tuple[str, ...] = ()
    per_batch: bool = False  # may mix all tokens: the block must not be cut at all
    # chooses by values (experts): what backward rebuilds for it has to be forward's, bit for bit
    chooses: ClassVar[bool] = False
    # statistics are kept exactly when `name` is kept; else, whenever backward needs them
    stats_follow: ClassVar[bool] = False

    def _named(self, kind: str) -> tuple[str, ...]:
        values = [getattr(self, f.name) for f in fields(self) if _kind(f.type) == kind]
        names = [name for v in values for name in ((v,) if isinstance(v, str) else v)]
        return tuple([name for name in names if name])

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Activations that it is differentiable in."""
        return self._named("input")

    @functools.cached_property
    def params(self) -> tuple[str, ...]:
        """Tensors of the block that its forward reads."""
        return self._named("param")

    @property
    def unsure(self) -> tuple[str, ...]:
        """Those of `params` that may have no gradient in a call."""
        return self.params if self.chooses else ()

    @functools.cached_property
    def masks(self) -> tuple[str, ...]:
        """Dropout multipliers that it reads."""
        return self._named("mask")

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        """Cheap statistics that its forward also yields."""
        return ()

    @property
    def stat_dtype(self) -> torch.dtype | None:
        """Dtype of the statistics; None for float32, or float64 for float64."""
        return None

    @property
    def transients(self) -> tuple[str, ...]:
        """Further results of forward, for a backward that follows the step's rebuild."""
        return ()

    @functools.cached_property
    def makes(self) -> tuple[str, ...]:
        """Names that forward puts into the chunk."""
        return (self.name, *self.stats, *self.transients)

    @property
    def description(self) -> tuple[str, str]:
        """What `explain` prints of forward and backward in addition to the operations."""
        return "", ""

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        """Dtypes to which params are converted before a pass."""
        return {} if self.compute is None else dict.fromkeys(self.params, self.compute)

    @property
    def follows(self) -> str:
        """Input of the block, or activation, that has the same tokens."""
        return self.inputs[0] if self.inputs else "input"

    @property
    def label(self) -> str:
        """Name of its steps."""
        return self.name

    @property
    def reads(self) -> tuple[str, ...]:
        """Activations that forward reads."""
        return self.inputs + self.masks

    def needs(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        """Return the activations that backward reads for gradients of inputs and params."""
        return ()

    def rereads(self, needs_grad: Collection[str]) -> tuple[str, ...]:
        """Return the params whose values backward reads."""
        return ()

    def length(self, lengths: Mapping[str, int]) -> int:
        """Return the tokens of a sequence, from those of inputs and earlier activations."""
        return sum([lengths[name] for name in self.tokens or (self.follows,)])

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        """Return elements per token, from widths of earlier activations and shapes of params."""
        return widths[self.inputs[0]]

    def stat_width(self, width: int) -> int:
        """Return elements per token of each statistic, in float32 (float64 for float64)."""
        return 1

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        """Return floating-point operations per token of a forward; 0 for a pointwise step."""
        return 0

    def in_order(self, names: Collection[str]) -> Sequence[Collection[str]]:
        """Return params whose gradients `backward_in_parts` completes early, in order."""
        return ()

    def forward(self, chunk: Chunk, out: Tensor | None = None) -> None:
        """Put `name`, computed into `out` unless None, and the statistics into the chunk."""
        raise NotImplementedError

    def backward(self, chunk: Chunk, dy: Tensor, owned: bool, needs_grad: Collection[str]) -> None:
        """Add the gradients of `needs_grad` to the chunk, from `dy`, the gradient of `name`.

        `dy` may be overwritten if `owned`.
        """
        raise NotImplementedError

    def backward_in_parts(
        self,
        chunk: Chunk,
        dy: Tensor,
        owned: bool,
        needs_grad: Collection[str],
        parts: Sequence[Collection[str]],
    ) -> Iterator[None]:
        """Run `backward`, but yield when the gradients of each of the `parts` are complete."""
        self.backward(chunk, dy, owned, needs_grad)
        yield from [None] * len(parts)
