"""Cases, as a result file names them, and the subjects that are measured."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

#: A module's inputs -> what has a `backward`.
Forward = Callable[[Any], Any]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Case:
    """A point of a benchmark's grid: its fields are those of a result file's row.

    Subclasses have the fields and `subject(device)`: random parameters and data that depend on
    nothing but the case. What cannot be raises ValueError.
    """

    def seed(self) -> None:
        """Seed torch by the case: random numbers are the same in every run."""
        torch.manual_seed(zlib.crc32(repr(self).encode()))

    def sizes_fit(self, width: int, heads: int, dropout: float, *sizes: int) -> None:
        """Check sizes. Raises: ValueError for one below 1, a width that heads do not divide."""
        if min(width, heads, *sizes) < 1 or width % heads:
            raise ValueError(f"sizes must be positive, and the width a multiple of heads: {self}")
        if not 0.0 <= dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {dropout}")


@dataclass
class Subject:
    """A module, the inputs of its training step, and how forwards of such a module are built.

    `stock` gives the module's own; `fused`, of a policy and a backend, ours on the same parameters.
    """

    module: nn.Module
    x: Any  # a tensor, or a model's by name; it gets a gradient if it can have one
    dy: Tensor | None = None  # the gradient of the output; None where that is a loss
    dropout: float = 0.0  # the module's
    stock: Callable[[nn.Module], Forward] = lambda module: module
    fused: Callable[[nn.Module, str, str], Forward] | None = None
    masks: tuple[Tensor, ...] = ()  # the caller's own tensors, which count for no way
    fresh: bool = False  # no gradients are there when a step begins, as after `zero_grad()`
    backend: str = "auto"  # what a preset runs on by default
    compiler: str = "inductor"  # `torch.compile`'s backend

    def __post_init__(self) -> None:
        if isinstance(self.x, Tensor) and self.x.is_floating_point():
            self.x.requires_grad_()
        self.zero()

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.module.parameters()).dtype

    def leaves(self) -> dict[str, Tensor]:
        x = {"x": self.x} if isinstance(self.x, Tensor) and self.x.requires_grad else {}
        return x | {name: p for name, p in self.module.named_parameters() if p.requires_grad}

    def zero(self) -> None:
        """Set all gradients to 0: a step adds to them."""
        for leaf in self.leaves().values():
            leaf.grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.zero_()

    def clear(self) -> None:
        for leaf in self.leaves().values():
            leaf.grad = None

    def double(self) -> Subject:
        def exact(t: Tensor) -> Tensor:
            return t.detach().double() if t.is_floating_point() else t

        return dataclasses.replace(
            self,
            module=copy.deepcopy(self.module).double(),
            x=exact(self.x) if isinstance(self.x, Tensor) else
              {name: exact(t) for name, t in self.x.items()},
            dy=None if self.dy is None else self.dy.double(),
        )  # fmt: skip


def perturb(module: nn.Module) -> None:
    """Randomize biases and norms, which are constants at first."""
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))


def graph_of(y: Tensor) -> Any:
    """Return a node that keeps the autograd graph of `y` alive, but not its data."""
    return y.view_as(y).grad_fn
