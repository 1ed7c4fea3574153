"""What an optimizer keeps, and what its step takes, without running it: on fake tensors."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class _Live(TorchDispatchMode):
    """Bytes of the storages that operators return, while they are alive, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if _is(t)}
        for t in tree_iter(result):
            if _is(t):
                self._add(t.untyped_storage(), given)
        return result

    def _add(self, storage: Any, given: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or id(storage) in given:
            return
        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _is(t: Any) -> bool:
    return isinstance(t, Tensor)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state, as it is now."""
    storages = [t.untyped_storage() for t in tree_iter(dict(optimizer.state)) if _is(t)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def predict(optimizer: Optimizer) -> tuple[int, int]:
    """(state, update): bytes of an optimizer's state once it has stepped, and the most that a step
    takes besides parameters, gradients and state.

    The optimizer is not touched: one like it steps on fake tensors of the same sizes.

    Raises: ValueError if one like it cannot be made from its groups and has no state yet.

    >>> layer = torch.nn.Linear(64, 64, bias=False)
    >>> predict(torch.optim.AdamW(layer.parameters()))[0] == 2 * 64 * 64 * 4 + 4  # and a step count
    True
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = type(optimizer)(_fake_groups(optimizer))  # type: ignore[call-arg]
            for group in fake.param_groups:
                for p in group["params"]:
                    p.grad = torch.empty_like(p)
            fake.step()
            with _Live() as live:
                fake.step()
        return max(state_bytes(optimizer), state_bytes(fake)), live.most
    except Exception as error:
        have = state_bytes(optimizer)
        if have:
            return have, 0
        raise ValueError(
            f"the state of {type(optimizer).__name__} is not known before its first step "
            f"({type(error).__name__}: {error}): call step() once before plan"
        ) from error


def _fake_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in group.items() if k != "params"},
         "params": [torch.nn.Parameter(torch.empty_like(p)) for p in group["params"]]}
        for group in optimizer.param_groups
    ]  # fmt: skip
