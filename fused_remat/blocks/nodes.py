"""The steps a block's graph is made of: each names one activation and knows how to undo itself.

Here are what a node is, dropout multipliers, norms and linear layers; `pointwise.py` and
`attention.py` hold the rest.

A node declares what its activation is computed from (`reads`), which tensors it needs
(`params`), and what its backward asks for (`asks`), given what a gradient is wanted for. Nothing
here decides what is kept, when a thing is rebuilt or freed: that is the program's business
(`program.py`); nothing here knows a device: the arithmetic
is that of the operations (`steps`), of which `f.ops` holds what serves them.

Every activation is a matrix (tokens, width); only a block's inputs may also be heads (sequences,
heads, tokens of a sequence, width of a head). All nodes are immutable and hold plain numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.blocks.frame import Frame, Part, rows_of
from fused_remat.spec import NormSpec
from fused_remat.steps.fused import Affine
from fused_remat.steps.linear import bias_grad, linear_dx, linear_fwd
from fused_remat.steps.norm import NORMS, norm_bwd, norm_fwd
from fused_remat.steps.residual import dropout

Shapes = Mapping[str, "tuple[int, ...]"]


@dataclass(frozen=True, kw_only=True)
class Node:
    """One step: computes the activation `name`.

    Attributes:
        name: the activation it defines.
        role: what the activation is in a block, by which presets keep it (`policies.PRESETS`).
        inputs: activations that it is differentiable in.
        params: tensors of the block (weights, masks) that its forward reads.
        masks: dropout multipliers that it reads; activations too, but not differentiable.
        says: what it runs in forward and in backward, where that is no operation.
        stats: cheap statistics that its forward yields besides `name`.
        stats_follow: True if the statistics are kept exactly when `name` is kept; False if they
            are kept whenever backward needs them.
        keepable: whether a policy may name it.
        widens: whether it is float32 (float64 in a float64 block) whatever the input's dtype.
        per_sequence: True if it mixes the tokens of a sequence, so that it cannot run on a tile.
        per_batch: True if it may mix all tokens, so that the block must not be cut at all.
    """

    name: str
    role: str = ""
    says: ClassVar[tuple[str, str]] = ("", "")
    keepable: ClassVar[bool] = True
    widens: ClassVar[bool] = False
    per_sequence: ClassVar[bool] = False
    per_batch: bool = False
    stats_follow: ClassVar[bool] = False

    @property
    def inputs(self) -> tuple[str, ...]:
        return ()

    @property
    def params(self) -> tuple[str, ...]:
        return ()

    @property
    def masks(self) -> tuple[str, ...]:
        return ()

    @property
    def packs(self) -> str:
        """Of a step that packs (`blocks.packing`): what."""
        return ""

    @property
    def unpacks(self) -> tuple[str, ...]:
        """What it reads packed; of `Graph.again`, it is used where all of that is kept."""
        return ()

    @property
    def rebuilds(self) -> bool:
        """Of `Graph.again`: whether it computes its activation."""
        return True

    @property
    def undoes(self) -> bool:
        """Of `Graph.again`: whether it has a backward."""
        return True

    @property
    def inexact(self) -> bool:
        """Whether what it computes may differ from what forward computed."""
        return False

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return ()

    @property
    def casts(self) -> Mapping[str, torch.dtype]:
        """The dtypes that params are converted to before a pass, where not as they are given."""
        return {}

    @property
    def reads(self) -> tuple[str, ...]:
        return self.inputs + self.masks

    @property
    def follows(self) -> str:
        """Whose tokens it has: an input of the block or an activation."""
        return self.inputs[0] if self.inputs else "input"

    @functools.cached_property
    def makes(self) -> tuple[str, ...]:
        """What a step that computes it puts into the frame."""
        return (self.name, *self.stats)

    @property
    def dtype(self) -> torch.dtype | None:
        """Of the activation, where it is not what the graph says."""
        return None

    @property
    def label(self) -> str:
        """What its steps are called."""
        return self.name

    def length(self, lengths: Mapping[str, int]) -> int:
        """Tokens of a sequence, given those of inputs and earlier activations."""
        return lengths[self.follows]

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        """Elements per token, given the widths of earlier activations and the shapes of params."""
        return widths[self.inputs[0]]

    def stat_width(self, width: int) -> int:
        """Elements per token, of which the activation has `width`, of each statistic.

        They are float32, or float64 in a float64 block.
        """
        return 1

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        """Floating-point operations per token of one forward; 0 for a pointwise step."""
        return 0

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        """What backward asks for when gradients of `wants` (inputs, params) are wanted."""
        return ()

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        """The params whose values backward reads."""
        return ()

    def overwriting(self, spare: Collection[str]) -> Node:
        """The node to compute with where nobody reads the activations in `spare` after it.

        It may write over them: they were made in the same pass, and are neither kept nor given.
        """
        return self

    def backward_choice(self, f: Frame) -> tuple[Callable[..., Any], Any] | None:
        """The operation of backward, and its key, of which `explain` says who serves it."""
        return None

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        """Compute `name` and the statistics into the frame (into `out`, if given)."""
        raise NotImplementedError

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        """Add the gradients of `wants` to the frame, from `dy`, the gradient of `name`.

        `owned` says that `dy` belongs to the frame and may be overwritten.
        """
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class KeepScale(Node):
    """A dropout site's multiplier: 0 or 1/(1-p) for each element, a function of the seed alone.

    `like` has its width: a param, by its first dimension, or an activation. `of`: whose tokens.
    """

    site: int
    p: float
    like: str
    of: str = "input"
    says: ClassVar[tuple[str, str]] = ("the counter-based generator, from the seed", "")
    keepable: ClassVar[bool] = False

    @property
    def follows(self) -> str:
        return self.of

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return widths[self.like] if self.like in widths else shapes[self.like][0]

    @property
    def params(self) -> tuple[str, ...]:
        return ("seed",)

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        run, width = f.run, f.run.widths[self.name]
        dtype = torch.promote_types(run.dtype, torch.float32)
        key = run.site_key(self.site)
        row0, rows = f.first_row(self.name), f.rows_of(self.name)
        f.keeps[self.name] = random.Keep(key, row0, rows, width, self.p, dtype)


@dataclass(frozen=True, kw_only=True)
class Norm(Node):
    """A norm over the width: (x - mean) * rstd * weight + bias, or x * rstd * weight."""

    x: str
    weight: str
    bias: str
    spec: NormSpec

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x,)

    @property
    def params(self) -> tuple[str, ...]:
        return (self.weight, self.bias)

    @functools.cached_property
    def stats(self) -> tuple[str, ...]:
        return tuple(f"{self.name}.{stat}" for stat in NORMS[self.spec.kind].stats)

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.x, *self.stats) if self.x in wants or self.weight in wants else ()

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.weight,) if self.asks(wants) else ()

    def target(self, like: Tensor, out: Tensor | None) -> Tensor | None:
        """Where the norm of a tensor `like` goes: `out`, or None for a new one of its dtype."""
        return out

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        stats = None
        if self.stats[0] in f:  # a rebuild, and they were kept
            stats = tuple([f[stat] for stat in self.stats])
        weight, bias = f.param(self.weight), f.param(self.bias)
        made = f.ops[norm_fwd](self.spec, f[self.x], weight, bias, out, stats)
        if stats is not None:
            f.put(self.name, made[0])
            return
        for name, value in zip(self.makes, made, strict=True):
            f.put(name, value)

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        grad_of = (self.x in wants, self.weight in wants, self.bias in wants)
        if not (grad_of[0] or grad_of[1]):
            f.add_param_grad(self.bias, f.ops[bias_grad](dy))
            return
        prior, _ = f.take_grad(self.x)  # the residual's gradient, added in the same pass
        stats = tuple([f[stat] for stat in self.stats])
        weight = f.param(self.weight)
        dx, dweight, dbias = f.ops[norm_bwd](
            self.spec, dy, f[self.x], stats, weight, grad_of, add=prior
        )
        if dx is not None:
            f.add_grad(self.x, dx, owned=True)
        if dweight is not None:
            f.add_param_grad(self.weight, dweight)
        if dbias is not None:
            f.add_param_grad(self.bias, dbias)


@dataclass(frozen=True, kw_only=True)
class Linear(Node):
    """name = residual + keep * (x @ weight.T + bias); `residual` and `keep` may be absent ("").

    `part`, if any, is (first, last, rows): the layer has the rows from first to last of a weight
    and a bias of `rows`, which it shares with others.
    """

    x: str
    weight: str
    bias: str
    residual: str = ""
    keep: str = ""
    part: Part | None = None

    @property
    def inputs(self) -> tuple[str, ...]:
        return (self.x, self.residual) if self.residual else (self.x,)

    @property
    def params(self) -> tuple[str, ...]:
        return (self.weight, self.bias)

    @property
    def masks(self) -> tuple[str, ...]:
        return (self.keep,) if self.keep else ()

    def width(self, widths: Mapping[str, int], shapes: Shapes) -> int:
        return shapes[self.weight][0] if self.part is None else self.part[1] - self.part[0]

    def flops(self, widths: Mapping[str, int], shapes: Shapes, seq_len: int) -> int:
        return 2 * self.width(widths, shapes) * shapes[self.weight][1]

    def asks(self, wants: Collection[str]) -> tuple[str, ...]:
        product = self.x in wants or self.weight in wants or self.bias in wants
        asked = (self.x,) if self.weight in wants else ()
        return asked + (self.masks if product else ())

    def rereads(self, wants: Collection[str]) -> tuple[str, ...]:
        return (self.weight,) if self.x in wants else ()

    def affine(self, f: Frame) -> Affine:
        weight, bias = f.param(self.weight), f.param(self.bias)
        if self.part is None:
            return weight, bias
        return rows_of(weight, self.part), rows_of(bias, self.part)

    def operand(self, f: Frame) -> Tensor:
        """x as the product takes it."""
        return f[self.x]

    def product_grad(self, f: Frame, dy: Tensor) -> Tensor:
        """The gradient of the product, from that of `name`."""
        keep = f.keep(self.keep)
        return dy if keep is None else f.ops[dropout](dy, keep)

    def forward(self, f: Frame, out: Tensor | None = None) -> None:
        residual = f[self.residual] if self.residual else None
        keep = f.keep(self.keep) if self.keep else None
        weight, bias = self.affine(f)
        f.put(self.name, f.ops[linear_fwd](f[self.x], weight, bias, residual, keep, out))

    def backward(self, f: Frame, dy: Tensor, owned: bool, wants: Collection[str]) -> None:
        if self.x in wants or self.weight in wants or self.bias in wants:
            keep = f.keep(self.keep) if self.keep else None
            dz = dy if keep is None else f.ops[dropout](dy, keep)
            if self.weight in wants:
                f.add_weight_grad(self.weight, dz, f.last(self.x), self.part)
            if self.bias in wants:
                f.add_param_grad(self.bias, f.ops[bias_grad](dz), self.part)
            if self.x in wants:
                f.add_grad(self.x, f.ops[linear_dx](dz, self.affine(f)[0]), owned=True)
            del dz
        if self.residual in wants:
            f.add_grad(self.residual, dy, owned)
