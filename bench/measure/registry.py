"""Who is compared: decorated functions in a registry, one of them the declared baseline."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import torch

from bench.measure.admission import Absent

Build = TypeVar("Build", bound=Callable[..., Any])


@dataclass(frozen=True)
class Provider(Generic[Build]):
    """A row of a registry.

    Attributes:
        build: raises Absent where it cannot serve what it is given.
        is_baseline: whether everyone's time is also given as a ratio to this one's.
        module: the package that it comes from, if that may be missing.
        needs: "cuda", a CUDA device; "triton", that or Triton's interpreter; None, neither.
        traits: what else its registry wants to know of it.
    """

    name: str
    build: Build
    is_baseline: bool
    module: str | None
    needs: str | None
    traits: dict[str, Any] = field(default_factory=dict)

    def why_not(self, device: torch.device) -> str | None:
        """Why it cannot run on `device`, or None if it can."""
        if self.module and importlib.util.find_spec(self.module) is None:
            return f"{self.module} is not installed"
        if device.type == "cuda" or self.needs is None:
            return None
        interpreted = self.needs == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        return None if interpreted else "needs a CUDA device"

    def make(self, device: torch.device, *given: Any) -> Any:
        """What it builds. Raises: Absent with the reason, or what building raises."""
        reason = self.why_not(device)
        if reason is not None:
            raise Absent(reason)
        return self.build(*given)


class Registry(dict[str, Provider[Build]]):
    """Providers of one thing by name, in the order of the tables.

    >>> REVERSED = Registry("reversed")
    >>> @REVERSED.provider("slices", baseline=True)
    ... def slices(values):
    ...     return values[::-1]
    >>> @REVERSED.provider("theirs", module="no_such_package")
    ... def theirs(values):
    ...     raise NotImplementedError
    >>> REVERSED.baselines
    ('slices',)
    >>> REVERSED["slices"].build([1, 2])
    [2, 1]
    >>> REVERSED["theirs"].why_not(torch.device("cpu"))
    'no_such_package is not installed'
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def provider(
        self,
        name: str,
        *,
        baseline: bool = False,
        module: str | None = None,
        needs: str | None = None,
        **traits: Any,
    ) -> Callable[[Build], Build]:
        """Register a function. Raises: ValueError if the name is taken."""

        def register(build: Build) -> Build:
            if name in self:
                raise ValueError(f"{self.name} has a provider {name!r} already")
            self[name] = Provider(name, build, baseline, module, needs, traits)
            return build

        return register

    @property
    def baselines(self) -> tuple[str, ...]:
        """Names of the declared baselines."""
        return tuple(name for name, row in self.items() if row.is_baseline)

    @property
    def groups(self) -> tuple[str, ...]:
        """What ways are asked for by, besides their names: the trait `group`."""
        found = (row.traits.get("group") for row in self.values())
        return tuple(dict.fromkeys(group for group in found if group is not None))

    def select(
        self,
        names: Iterable[str],
        in_group: Callable[[Provider[Build]], bool] = lambda provider: True,
    ) -> list[str]:
        """Names of those asked for by name or group, in the order of the tables.

        The first baseline is always among them. `in_group`: whom a group stands for.

        Raises: ValueError for an unknown name.
        """
        names = set(names)
        unknown = sorted(names - set(self) - set(self.groups))
        if unknown:
            valid = ", ".join((*self.groups, *self))
            raise ValueError(f"unknown way {unknown[0]!r}; valid: {valid}")
        names |= set(self.baselines[:1])
        return [
            name
            for name, row in self.items()
            if name in names or (row.traits.get("group") in names and in_group(row))
        ]
