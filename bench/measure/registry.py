"""What is compared: decorated functions in a registry, one of them the baseline.

An absent way has a reason, and a wrong one gets no speed.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch

Build = TypeVar("Build", bound=Callable[..., Any])


class Absent(Exception):
    """A provider does not apply here; the message is the reason."""


class WrongResultError(Exception):
    """A result is wrong."""


def described(error: Exception) -> str:
    """Return an error's type and message in a line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:600]}"


def refusal(error: Exception, optional: bool = False) -> dict[str, str]:
    """Return the row of a way that raised: {"absent": reason} or {"error": text}.

    optional: the way may not apply here, which is no failure; its results have to be right.
    """
    if isinstance(error, Absent):
        return {"absent": str(error)}
    absent = optional and not isinstance(error, WrongResultError)
    return {"absent" if absent else "error": described(error)}


@dataclass(frozen=True)
class Provider(Generic[Build]):
    """An entry of a registry."""

    name: str
    build: Build  # raises Absent where it does not apply
    is_baseline: bool  # all times are also ratios to this one's
    module: str | None  # the package that it comes from, if that may be missing
    needs: str | None  # "cuda", a CUDA device; "triton", that or Triton's interpreter
    traits: dict[str, Any]

    def unsupported_reason(self, device: torch.device) -> str | None:
        """Return why it does not apply on a device, or None."""
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if device.type == "cuda" or self.needs is None:
            return None
        interpreted = self.needs == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "needs a CUDA device"

    def make(self, device: torch.device, *arguments: Any) -> Any:
        """Build it. Raises: Absent with the reason, or what building raises."""
        reason = self.unsupported_reason(device)
        if reason is not None:
            raise Absent(reason)
        return self.build(*arguments)


class Registry(dict[str, Provider[Build]]):
    """Providers by name, in the order of the tables; `usual` are default traits.

    >>> REVERSED = Registry()
    >>> @REVERSED.provider("slices", baseline=True)
    ... def slices(values):
    ...     return values[::-1]
    >>> REVERSED.baselines, REVERSED["slices"].build([1, 2])
    (('slices',), [2, 1])
    """

    def __init__(self, **usual: Any) -> None:
        super().__init__()
        self.usual = usual

    def provider(
        self, name: str, *, baseline: bool = False, module: str | None = None,
        needs: str | None = None, **traits: Any,
    ) -> Callable[[Build], Build]:  # fmt: skip
        """Register a function."""

        def register(build: Build) -> Build:
            self[name] = Provider(name, build, baseline, module, needs, self.usual | traits)
            return build

        return register

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(name for name, row in self.items() if row.is_baseline)

    @property
    def groups(self) -> tuple[str, ...]:
        """Groups of ways, which may be requested in place of their names."""
        found = (row.traits.get("group") for row in self.values())
        return tuple(dict.fromkeys(group for group in found if group is not None))

    def select(self, names: Iterable[str]) -> list[str]:
        """Return the ways requested by name or group, and the first baseline, in their order.

        Raises: ValueError for an unknown name.
        """
        names = set(names)
        unknown = sorted(names - set(self) - set(self.groups))
        if unknown:
            valid = ", ".join((*self.groups, *self))
            raise ValueError(f"unknown way {unknown[0]!r}; valid: {valid}")
        names |= set(self.baselines[:1])
        return [
            name for name, row in self.items() if name in names or row.traits.get("group") in names
        ]
