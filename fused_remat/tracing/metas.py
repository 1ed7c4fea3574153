"""Values of a recording at other choices of sizes: tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_remat.tracing.sizes import Size, Sizes, Space
from fused_remat.tracing.values import EXACT, STREAM, Limit, Op, Ref, leaves, map_tree

_META = torch.device("meta")
#: Sizes below which an operation that needs data runs on zeros.
_FEW = 100
#: Most steps of loops that are run at another choice of sizes.
_MOST_STEPS = 64


class Metas:
    """Tensors at the other choices of a space by the numbers of recorded values.

    They are on the device "meta", but for those that follow from the bounds of sequences alone.
    """

    def __init__(self, space: Space, device: torch.device) -> None:
        self.space, self.device = space, device
        self.others: Sequence[Sizes] = space.choices[1:]
        self.known: dict[int, list[Tensor]] = {}

    def shape(self, number: int, value: Tensor) -> tuple[Any, ...] | None:
        """Return the sizes of a value, with a `Size` where one follows from the call's; or None."""
        shapes = [t.shape for t in (value, *self.known.get(number, ()))]
        if len(shapes) == 1 or len({*map(len, shapes)}) > 1:
            return None
        shape = tuple([self.space.size(at) for at in zip(*shapes, strict=True)])
        return None if None in shape else shape

    def read(self, func: Callable[..., Any], number: int, args: Any) -> Any:
        """Return what a function reads of a value, with known formulas: its shape, or numbers."""
        result, metas = func(*args), self.known.get(number, [])
        if not metas or (metas[0].is_meta and func in (Tensor.tolist, Tensor.item)):
            return result
        pairs = zip(*map(leaves, (result, *[func(t, *args[1:]) for t in metas])), strict=True)
        numbers = iter([self.space.number(at) for at in pairs])
        if isinstance(result, tuple):
            return torch.Size(numbers)
        return map_tree(result, lambda _: next(numbers))

    def run(self, op: Op) -> str:
        """Note an operation's results, if all that it reads is known; return what is the matter."""
        if not all(n in self.known for n in op.reads):
            return ""
        found = [self._run(op, i, _META) for i in range(len(self.others))]
        if None in found:  # no kernel for "meta", or sizes that the operation refuses
            if max(self.space.choices[-1].values(), default=0) < _FEW:
                found = [self._run(op, i, self.device) for i in range(len(self.others))]
            if None in found:
                self.space.lost = self.space.lost or op.name
                return ""
        if any(len(results or ()) != len(op.outs) for results in found):
            return f"the size decides how many results {op.name} has"
        metas: list[Tensor]
        for number, *metas in zip(op.outs, *found, strict=True):
            if number is not None:
                self.known[number] = metas
        return ""

    def run_again(self, op: Op, loops: Sequence[Size]) -> None:
        """Note the results of a call whose loops take other numbers of steps at other sizes."""
        for n in {*op.writes}.difference(op.reads):
            self.known.pop(n, None)
        if max(sum(loop.of(sizes) for loop in loops) for sizes in self.space.choices) > _MOST_STEPS:
            self.space.lost = self.space.lost or "range"
        else:
            self.run(op)

    def _run(self, op: Op, choice: int, device: torch.device) -> list[Any] | None:
        """Return an operation's results at another choice of sizes; None if it raises an error."""

        def value(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                t = self.known[leaf.index][choice]
                is_made = t.is_meta and device is not _META
                return torch.zeros_like(t, device=device) if is_made else t
            if isinstance(leaf, torch.device):
                return device
            if isinstance(leaf, Size):
                return leaf.of(self.others[choice])
            return leaf.of(EXACT) if isinstance(leaf, Limit) else EXACT if leaf is STREAM else leaf

        args, kwargs = map_tree((op.args, op.kwargs), value)
        try:
            with device, torch.no_grad():
                results = leaves(op.run(*args, **kwargs))
        except Exception:
            return None
        if device is _META:
            return results
        return [t.to(_META) if isinstance(t, Tensor) else t for t in results]
