"""Operations: the arithmetic of a block's steps, on matrices (tokens, width).

An operation is a plain function. Its docstring is the contract; its body runs ATen operations and
works on every device and in every dtype. `faster` registers another implementation for a backend.
`execution.choose` decides which implementation runs.

    @operation(key=lambda x, weight: (x.dtype, x.device, x.shape[1]), description="ATen's addmm")
    def linear_fwd(x, weight): ...

    @faster(linear_fwd, "triton", description="kernel linear_fwd", unsupported_reason=too_wide)
    def linear_fwd_triton(x, weight): ...

Contract of all operations: T is the number of tokens, D and F are widths. Results have the dtype
of `x`, and equal inputs give equal bits. `out` is None, or a contiguous matrix that receives the
result. A weight or bias is None where the block has none. A `mask` describes the dropout multiplier
of one site: an implementation makes a tensor of it, or draws the same bits where it needs them.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])
Function = Callable[..., Any]
#: What `explain` prints: a phrase, or a function of the key that also accepts the arguments.
Description = str | Callable[..., str]


class FusedRematWarning(UserWarning):
    """Warns that a slower implementation was used than requested, and why."""


class Fault(RuntimeError):
    """A kernel cannot be compiled or loaded, and nothing was written yet."""


#: Why an implementation is not chosen again: by operation, backend and key, what it raised when it
#: could not be compiled or loaded. The operation itself runs instead, on the same contract.
FAULTS: dict[tuple[Callable[..., Any], str, Any], str] = {}


#: By thread, what records the calls of a pass (`execution.calls.Recorder`).
RECORDERS: dict[int, Any] = {}


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Hide calls inside from a recorder: those of a choice, which follows from dtypes and sizes."""
    recorder = RECORDERS.get(threading.get_ident())
    before = recorder is None or recorder.is_paused
    if recorder is not None:
        recorder.is_paused = True
    try:
        yield
    finally:
        if recorder is not None:
            recorder.is_paused = before


def warn(message: str) -> None:
    """Warn at the user's line."""
    warnings.warn(f"fused_remat: {message}", FusedRematWarning, stacklevel=user_stacklevel())


def user_stacklevel() -> int:
    """Return the `stacklevel` of the nearest line outside of this package and of torch."""
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        if package not in ("fused_remat", "torch"):
            return level
        frame, level = frame.f_back, level + 1
    return level


def always(key: Any) -> str | None:
    """Return None: the `unsupported_reason` of an implementation without limits."""
    return None


@dataclass(frozen=True, eq=False)
class Faster:
    """An implementation of an operation for one backend."""

    # the function. Its parameters have the operation's names; annotations are optional.
    run: Function
    # given a key, the reason why it cannot run: None if it can, "" for a reason that
    # `explain` does not print
    unsupported_reason: Callable[[Any], str | None]
    description: Description  # what it runs, for `explain`
    name: str = ""  # of the implementation, for `explain`; by default the backend's
    # whether this process may use it at all; called once, when a table of operations first
    # has the operation
    available: Callable[[], bool] = lambda: True


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation and its implementations."""

    run: Function  # the operation itself
    # a function of the arguments that returns all that the choice of an implementation may
    # depend on, hashable: dtypes, widths, options, device, layout, global switches. It must
    # not depend on values or on the policy, so that forward and the rebuild in backward
    # choose the same implementation.
    key: Callable[..., Any]
    description: Description  # what the body runs, for `explain`
    faster: dict[str, Faster] = field(default_factory=dict)  # the other implementations, by backend


#: Every operation, by its function.
OPERATIONS: dict[Function, Operation] = {}


def operation(*, key: Callable[..., Any], description: Description) -> Callable[[F], F]:
    """Register a function as an operation (see `Operation`), and return it unchanged."""

    def register(run: F) -> F:
        OPERATIONS[run] = Operation(run, key, description)
        return run

    return register


def faster(
    function: F,
    backend: str,
    description: Description,
    unsupported_reason: Callable[[Any], str | None] = always,
    name: str = "",
    available: Callable[[], bool] = lambda: True,
) -> Callable[[Function], F]:
    """Register an implementation of the operation `function` for a backend (see `Faster`).

    Call this before the backend first runs the operation.

    Raises: TypeError if the parameters or their defaults differ from the operation's.
    """
    expected = _parameters(function)

    def register(run: Function) -> F:
        if _parameters(run) != expected:
            raise TypeError(
                f"{run.__name__}({_parameters(run)}) cannot implement {function.__name__}: its "
                f"parameters must be ({expected})"
            )
        OPERATIONS[function].faster[backend] = Faster(
            run, unsupported_reason, description, name, available
        )
        return cast(F, run)

    return register


def _parameters(function: Function) -> str:
    named = inspect.signature(function).parameters.values()
    return ", ".join([p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in named])


class Operations(dict[Function, Function]):
    """The implementations of one backend: `ops[norm_fwd]` is called like `norm_fwd`.

    `serve` returns the implementation of an operation on its first use.
    """

    def __init__(self, name: str, serve: Callable[[Function], Function]) -> None:
        super().__init__()
        self.name, self.serve = name, serve

    def __missing__(self, function: Function) -> Function:
        self[function] = served = self.serve(function)
        return served

    __eq__ = object.__eq__  # there is one table per backend
    __hash__ = object.__hash__  # type: ignore[assignment]

    if TYPE_CHECKING:

        def __getitem__(self, function: F) -> F: ...
