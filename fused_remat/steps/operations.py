"""Operations: the arithmetic of a block's steps, on matrices (tokens, width).

An operation is a plain function. Its docstring is the contract and its body is ATen's, for every
device and dtype. `faster` registers another implementation of it for a backend; which one serves
is decided in `execution.choose` alone.

    @operation(key=lambda x, weight: (x.dtype, x.device, x.shape[1]), says="ATen's addmm")
    def linear_fwd(x, weight): ...

    @faster(linear_fwd, "triton", says="kernel linear_fwd", why_not=too_wide)
    def linear_fwd_triton(x, weight): ...

Contract of all: T tokens, D and F widths; results in the dtype of `x`; the same bits for the same
shapes and values, every time. `out`, where given, is a contiguous matrix for the result. Weights
and biases are None where the block has none. A `mask` is dropout's multiplier at one site,
described: an implementation makes a tensor of it, or draws the same bits where it needs them.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]
#: A phrase for `explain`, or a function of the key, and of the arguments where there are any.
Says = str | Callable[..., str]


class FusedRematWarning(UserWarning):
    """A slower implementation serves than was asked for; the message says which, and why."""


def warn(message: str, category: type[Warning] = FusedRematWarning) -> None:
    """Warn at the line of the user's code that called: the first outside of this package and
    PyTorch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _room(frame) in ("fused_remat", "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(f"fused_remat: {message}", category, stacklevel=level)


def _room(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


@dataclass(frozen=True, eq=False)
class Faster:
    """An implementation for one backend.

    Attributes:
        run: with the operation's parameters, by name; their types need not be said again.
        why_not: given a key, why it cannot serve, "" for a reason not worth telling; None if it
            can.
        says: what it runs.
    """

    run: Function
    why_not: Callable[[Any], str | None]
    says: Says


@dataclass(frozen=True, eq=False)
class Operation:
    """What there is of an operation.

    Attributes:
        run: the operation itself.
        key: given its arguments, all that a choice may depend on, hashable: dtypes, widths,
            options, device, layout, formats, global switches. Never values, nor what is kept:
            forward and what rebuilds it choose alike.
        says: what its body runs.
        faster: other implementations, by backend.
    """

    run: Function
    key: Callable[..., Any]
    says: Says
    faster: dict[str, Faster] = field(default_factory=dict)


#: Every operation, by its function.
OPERATIONS: dict[Function, Operation] = {}


def operation(*, key: Callable[..., Any], says: Says) -> Callable[[F], F]:
    """Registers a function as an operation, and returns it as it is; see `Operation`."""

    def register(run: F) -> F:
        OPERATIONS[run] = Operation(run, key, says)
        return run

    return register


def faster(
    function: F,
    backend: str,
    *,
    says: Says,
    why_not: Callable[[Any], str | None] = lambda key: None,
) -> Callable[[Function], F]:
    """Registers an implementation of the operation `function` for a backend; see `Faster`.

    Before the backend is first asked for that operation. Raises: TypeError if its parameters are
    not the operation's.
    """
    expected = _parameters(function)

    def register(run: Function) -> F:
        if _parameters(run) != expected:
            raise TypeError(f"{run.__name__} takes {_parameters(run)}, not {expected}")
        OPERATIONS[function].faster[backend] = Faster(run, why_not, says)
        return cast(F, run)

    return register


def _parameters(function: Function) -> dict[str, Any]:
    return {p.name: p.default for p in inspect.signature(function).parameters.values()}


class Operations(dict[Function, Function]):
    """What serves each operation on one backend: `ops[norm_fwd]` is called as `norm_fwd` is.

    Attributes:
        name: the backend's.
        chunk_tokens: about how many tokens it works on at a time on a device.
        serve: gives what serves an operation that is asked for the first time.
    """

    def __init__(
        self,
        name: str,
        chunk_tokens: Callable[[torch.device], int],
        serve: Callable[[Function], Function],
    ) -> None:
        super().__init__()
        self.name, self.chunk_tokens, self.serve = name, chunk_tokens, serve

    def __missing__(self, function: Function) -> Function:
        self[function] = served = self.serve(function)
        return served

    __eq__ = object.__eq__  # one table a backend
    __hash__ = object.__hash__  # type: ignore[assignment]

    if TYPE_CHECKING:

        def __getitem__(self, function: F) -> F: ...
