"""Proves a reading: the block and the layer it was read from give the same, run on random tensors.

Both run in float64, on random parameters and inputs, at two sizes, and in small pieces: the result
and the gradient of every parameter and of every argument that is differentiable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.recognition.apart import run_with
from fused_remat.recognition.record import without_dropout
from fused_remat.recognition.values import Sample, leaves

#: Relative differences that are allowed: of the result, and of gradients.
OUTPUT, GRADIENT = 1e-6, 5e-6
#: By how much more, where a layer has no float64: what float32 rounds.
FLOAT32 = 20.0
#: Gradients that are smaller than this part of the largest one are rounding errors of zero: those
#: of the keys' bias, say.
SMALL = 1e-9


def difference(
    layer: nn.Module,
    forward: Callable[..., Any],
    fused: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Any],
    sample: Sample,
) -> str | None:
    """Where `fused(named, given)` differs from `forward`, a method of `layer`; None if nowhere."""
    slack = 1.0 if sample.dtype == torch.float64 else FLOAT32
    state = torch.random.get_rng_state()
    with without_dropout(), torch.enable_grad():
        expected = _run(lambda: run_with(layer, forward, sample.named, sample.given), sample)
    torch.random.set_rng_state(state)  # drop path draws before the block
    with torch.enable_grad():
        found = _run(lambda: fused(sample.named, sample.given), sample)
    mine, theirs = found.pop("the output"), expected.pop("the output")
    if mine is None or theirs is None or mine.shape != theirs.shape:
        return "the output has another shape"
    distance = _relative(mine, theirs)
    if not distance <= OUTPUT * slack:
        return f"the output differs by {distance:.1e}"
    largest = max((float(g.norm()) for g in expected.values() if g is not None), default=0.0)
    for name, theirs in expected.items():
        mine = found[name]
        if mine is not None and theirs is None:
            return f"the gradient of {name} is zero, not None"
        sizes = [0.0 if g is None else float(g.norm()) for g in (mine, theirs)]
        if sum(sizes) <= SMALL * largest * slack:
            continue
        distance = math.inf if mine is None or theirs is None else _relative(mine, theirs)
        if not distance <= GRADIENT * slack:
            return f"the gradient of {name} differs by {distance:.1e}"
    return None


def _relative(mine: Tensor, theirs: Tensor) -> float:
    scale = float(theirs.norm())
    return float((mine - theirs).norm()) / scale if scale else float(mine.norm())


def _run(run: Callable[[], Any], sample: Sample) -> dict[str, Tensor | None]:
    """The result of a run, and the gradients of all that is differentiable, by name."""
    result = [t for t in leaves(run()) if isinstance(t, Tensor) and t.requires_grad]
    if not result:
        return {"the output": None}
    out = result[0]
    generator = torch.Generator(out.device).manual_seed(1)
    dy = torch.randn(out.shape, generator=generator, dtype=out.dtype, device=out.device)
    inputs = {f"argument {i}": t for i, t in enumerate(leaves(sample.given))}
    wanted = {
        name: t
        for name, t in {**inputs, **sample.named}.items()
        if isinstance(t, Tensor) and t.requires_grad
    }
    grads = torch.autograd.grad(out, list(wanted.values()), dy, allow_unused=True)
    return {"the output": out.detach(), **dict(zip(wanted, grads, strict=True))}
