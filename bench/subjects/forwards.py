"""A way's forward: a model from its inputs to the loss, or as far as the head."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from bench.subjects.models import Inputs

Around = Callable[[], AbstractContextManager[None]]


@dataclass(frozen=True)
class Loss:
    """A loss whose backward runs in what its forward ran in: a checkpoint's replay reads it too."""

    value: Tensor
    around: Around

    def backward(self, dy: None = None) -> None:
        with self.around():
            self.value.backward(dy)


@dataclass(frozen=True)
class Forward:
    """A model that computes its own loss.

    Attributes:
        model: of the way's own, on the subject's parameters.
        around: what forward and backward run in.
    """

    model: nn.Module
    around: Around = contextlib.nullcontext

    def __call__(self, x: Inputs) -> Loss:
        with self.around():
            return Loss(self.model(**x).loss, self.around)

    def below_head(self, x: Inputs) -> Any:
        """The autograd node of what the head is given: whatever is kept up to there hangs on it."""
        adapted = getattr(self.model, "get_base_model", None)
        model: Any = self.model if adapted is None else adapted()
        with self.around():
            given = {name: t for name, t in x.items() if name != "labels"}
            return model.base_model(**given).last_hidden_state.grad_fn


@contextlib.contextmanager
def unchanged(module: ModuleType) -> Iterator[dict[str, Any]]:
    """Undo what is done to a module's names within; gives what was done, when it has ended."""
    before, done = dict(vars(module)), {}
    try:
        yield done
    finally:
        done |= {k: v for k, v in vars(module).items() if before.get(k) is not v}
        _set(module, {name: before[name] for name in done})


@contextlib.contextmanager
def patched(module: ModuleType, names: dict[str, Any]) -> Iterator[None]:
    """A module's names are these within."""
    before = {name: getattr(module, name) for name in names}
    _set(module, names)
    try:
        yield
    finally:
        _set(module, before)


def _set(module: ModuleType, names: dict[str, Any]) -> None:
    for name, value in names.items():
        setattr(module, name, value)
