"""A kernel of a block, other routes to the same result, and the contests between them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.audit.cases import tile_name
from bench.measure.contest import SETS, Contest, Entry, Results, Rig, Way, Work
from fused_remat.triton.launch import Launch
from fused_remat.triton.tables import Tile

_WORDS = ("tokens", "width", "hidden")


@dataclass(frozen=True)
class Form:
    """The computation of a kernel on operands `t`: an attribute for each, and `t.target`.

    Attributes:
        operands: name -> sizes: T tokens, D width, F hidden width. Those of tokens are in sets.
        aten: the results in PyTorch's operators, in any dtype.
        kernel: (t, results by name) -> the launch that writes them; of tiled kernels, with a tile.
        bare: its products alone: the time of a kernel that does the rest for nothing.
        others: routes of several kernels, which run at once.
        products: how many it computes.
        outputs, shape, dtype: of the results.
        derive: operands that follow from the others, untimed.
        name: of the kernel among the routes.
    """

    operands: Mapping[str, str]
    aten: Callable[[Any], Results]
    kernel: Callable[..., Launch]
    bare: Callable[[Any], Results]
    others: Mapping[str, Callable[[Any, Results], object]] = field(default_factory=dict)
    products: int = 1
    outputs: Sequence[str] = ("y",)
    shape: str = "TF"
    dtype: torch.dtype | None = None
    derive: Callable[[Any], dict[str, Any]] = lambda t: {}
    name: str = "kernel"

    def draw(self, rig: Rig, sizes: Mapping[str, int]) -> list[Any]:
        """Return sets of random operands."""

        def drawn(of_tokens: bool) -> dict[str, Tensor]:
            operands = {}
            for name, letters in self.operands.items():
                if letters.startswith("T") is of_tokens:
                    shape = [sizes[letter] for letter in letters]
                    scale = shape[-1] ** -0.5 if len(shape) == 2 and not of_tokens else 1.0
                    operands[name] = rig.normal(*shape, scale=scale)
            return operands

        weights = drawn(False) | {"target": rig.target, "sizes": sizes}
        sets = [SimpleNamespace(**weights, **drawn(True)) for _ in range(SETS)]
        for t in sets:
            vars(t).update(self.derive(t))
        return sets

    def entry(self, name: str, sizes: Mapping[str, int], tiles: Sequence[Tile] = ()) -> Entry:
        """Return the case and its contest at these sizes."""
        case = {"name": name, **dict(zip(_WORDS, sizes.values(), strict=True))}
        return case, lambda rig: contest(self, self.draw(rig, sizes), rig, tiles)


def contest(form: Form, sets: Sequence[Any], rig: Rig, tiles: Iterable[Tile] = ()) -> Contest:
    """Return the kernel and its other routes, or the kernel in each of `tiles`."""
    sizes = sets[0].sizes
    shape = [sizes[letter] for letter in form.shape]

    def truth() -> Results:
        t = SimpleNamespace(**vars(sets[0]))
        vars(t).update({name: getattr(t, name).double() for name in form.operands})
        return {**form.aten(t), **form.bare(t)}

    def writing(prepared: Callable[[Any, Results], Callable[[], object]]) -> Way:
        """Return a way that writes the results; each set of operands is prepared before."""
        results = {name: rig.poisoned(*shape, dtype=form.dtype) for name in form.outputs}
        runs = [prepared(t, results) for t in sets]

        def run(index: int) -> Results:
            runs[index]()
            return results

        return Way(run)

    ways = {"bare": Way(lambda index: form.bare(sets[index]))}
    baselines = ("bare",)
    if tiles:
        for tile in tiles:
            ways[tile_name(tile)] = writing(lambda t, out, at=tile: form.kernel(t, out, at).run)
    else:
        ways = {"aten": Way(lambda index: form.aten(sets[index])), **ways}
        baselines = tuple(ways)
        ways[form.name] = writing(lambda t, out: form.kernel(t, out).run)
        for name, other in form.others.items():
            ways[name] = writing(lambda *given, run=other: functools.partial(run, *given))
    work = Work(flops=2.0 * form.products * sizes["T"] * sizes["D"] * sizes["F"])
    return Contest(ways, truth, work, baselines)
