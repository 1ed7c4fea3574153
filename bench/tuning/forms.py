"""What one of our kernels computes, and other ways to the same result: a row, and its contests."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from bench.audit.cases import tile_name
from bench.measure.contest import (
    SETS,
    Contest,
    Entry,
    P,
    Results,
    Rig,
    Way,
    Work,
    from_mask,
    multiplier,
)
from fused_remat.triton.launch import Launch
from fused_remat.triton.tables import Tile

#: Means of operands by name; of others 0.
_MEANS = {"weight": 1.0, "residual": 0.5}


@dataclass(frozen=True)
class Form:
    """What a kernel computes of operands `t`: an attribute for each, and `t.keep`, `t.target`.

    Attributes:
        operands: name -> sizes: T tokens, D width, F hidden width. Those of tokens are in sets.
        aten: the results in PyTorch's operators, in any dtype; `t.drop` is dropout, if any.
        kernel: (t, results by name) -> the launch that writes them; of tiled kernels, with a tile.
        bare: its products alone: what a kernel that does the rest for nothing would take.
        others: ways of several kernels, which are run at once.
        products: how many it computes; with none, its work is each matrix once.
        outputs, shape, dtype: of the results.
        derive: what the kernel is given besides, which is not timed.
    """

    operands: Mapping[str, str]
    aten: Callable[[Any], Results]
    kernel: Callable[..., Launch]
    bare: Callable[[Any], Results] | None = None
    others: Mapping[str, Callable[[Any, Results], object]] = field(default_factory=dict)
    products: int = 1
    outputs: Sequence[str] = ("y",)
    shape: str = "TF"
    dtype: torch.dtype | None = None
    dropped: bool = False
    derive: Callable[[Any], dict[str, Any]] = lambda t: {}
    name: str = "kernel"

    def draw(self, rig: Rig, sizes: Mapping[str, int]) -> list[Any]:

        def drawn(of_tokens: bool) -> dict[str, Tensor]:
            found = {}
            for name, letters in self.operands.items():
                shape = [sizes[letter] for letter in letters]
                scale = shape[-1] ** -0.5 if len(shape) == 2 and not of_tokens else 1.0
                if letters.startswith("T") is of_tokens:
                    found[name] = rig.normal(*shape, scale=scale, shift=_MEANS.get(name, 0.0))
            return found

        keep = rig.keep(*(sizes[letter] for letter in self.shape)) if self.dropped else None
        rest = drawn(False) | {"keep": keep, "target": rig.target, "sizes": sizes}
        sets = [SimpleNamespace(**rest, **drawn(True)) for _ in range(SETS)]
        for t in sets:
            vars(t).update(self.derive(t))
        return sets

    def entry(self, name: str, sizes: Mapping[str, int], *words: str, tiles: Any = ()) -> Entry:
        """Its contest at these sizes, which a case calls by `words`."""
        case = {"name": name, **dict(zip(words, sizes.values(), strict=True))}
        return case, lambda rig: contest(self, self.draw(rig, sizes), rig, tiles)


def contest(form: Form, sets: Sequence[Any], rig: Rig, tiles: Iterable[Tile] = ()) -> Contest:
    """The kernel beside the other ways; or with each of `tiles`, beside bare products."""
    sizes, keep = sets[0].sizes, sets[0].keep
    shape = [sizes[letter] for letter in form.shape]

    def poisoned() -> dict[str, Tensor]:
        return {name: rig.poisoned(*shape, dtype=form.dtype) for name in form.outputs}

    def exact(scale: Tensor | None) -> Results:
        t = SimpleNamespace(**vars(sets[0]), drop=lambda x: x if scale is None else x * scale)
        vars(t).update({name: getattr(t, name).double() for name in form.operands})
        return {**form.aten(t), **(form.bare(t) if form.bare else {})}

    def aten(index: int) -> Results:
        masks = {}

        def drop(x: Tensor) -> Tensor:
            if form.dropped:
                x, masks["mask"] = torch.native_dropout(x, P, True)
            return x

        return {**form.aten(SimpleNamespace(**vars(sets[index]), drop=drop)), **masks}

    def writing(made_ready: Callable[[Any, Results], Callable[[], object]]) -> Way:
        """What writes results, of each set of operands made ready before."""
        results = poisoned()
        runs = [made_ready(t, results) for t in sets]

        def run(index: int) -> Results:
            runs[index]()
            return results

        return Way(run)

    ways: dict[str, Way] = {}
    if not tiles:
        of_its_own = lambda found: exact(from_mask(found["mask"]))  # noqa: E731
        ways["aten"] = Way(aten, of_its_own if form.dropped else None)
    if (bare := form.bare) is not None:
        ways["bare"] = Way(lambda index: bare(sets[index]))
    baselines = tuple(ways)
    if tiles:
        for tile in tiles:
            ways[tile_name(tile)] = writing(lambda t, out, at=tile: form.kernel(t, out, at).run)
    else:
        ways[form.name] = writing(lambda t, out: form.kernel(t, out).run)
        for name, other in form.others.items():
            ways[name] = writing(lambda *given, run=other: functools.partial(run, *given))
    if form.products:
        work = Work(flops=2.0 * form.products * sizes["T"] * sizes["D"] * sizes["F"])
    else:
        matrices = len(form.outputs) + sum(name[0] == "T" for name in form.operands.values())
        work = Work(bytes=float(matrices * math.prod(shape) * rig.dtype.itemsize))
    truth = lambda: exact(None if keep is None else multiplier(keep))  # noqa: E731
    return Contest(ways, truth, work, baselines)
