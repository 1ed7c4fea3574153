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

from fused_remat.tracing.apart import run_with
from fused_remat.tracing.record import without_dropout
from fused_remat.tracing.values import Sample, leaves, map_tree

#: Relative differences that are allowed: of the result, and of gradients.
OUTPUT, GRADIENT = 1e-6, 5e-6
#: By how much more, where a layer has no float64: what float32 rounds.
FLOAT32 = 20.0
#: Gradients that are smaller than this part of the largest one are rounding errors of zero: those
#: of the keys' bias, say.
SMALL = 1e-9
#: How many times the effect of one rounding to float32 a layer's own ones may have: at most 2.4
#: times were measured, of the linear attention of Qwen3.5 at ten widths.
ROUNDINGS = 8.0
#: Gradients with more elements are compared by as many sums of them.
_SKETCHED = 4099
_OUTPUT = "the output"


def difference(
    layer: nn.Module,
    forward: Callable[..., Any],
    fused: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Any],
    sample: Sample,
    narrow: bool = False,
) -> str | None:
    """Return where `fused(named, given)` differs from `forward`, a method of `layer`, or None.

    `narrow`: the layer computes in float32 whatever its input's dtype. Its own rounding is then
    allowed: `ROUNDINGS` times what a rounding of its input to float32 changes, at most `FLOAT32`
    times the limits.
    """

    def stock(given: Mapping[str, Any]) -> dict[str, Tensor | None]:
        torch.random.set_rng_state(state)  # drop path draws before the block
        with without_dropout(), torch.enable_grad():
            return _run(lambda: run_with(layer, forward, sample.named, given), sample.named, given)

    slack = 1.0 if sample.dtype == torch.float64 else FLOAT32
    state = torch.random.get_rng_state()
    expected = stock(sample.given)
    torch.random.set_rng_state(state)
    with torch.enable_grad():
        found = _run(lambda: fused(sample.named, sample.given), sample.named, sample.given)
    grads = [g for name, g in expected.items() if name != _OUTPUT]
    largest = max((float(g.norm()) for g in grads if g is not None), default=0.0)
    rounded: dict[str, Tensor | None] = {}
    for name, theirs in expected.items():
        mine, what = found[name], name if name == _OUTPUT else f"the gradient of {name}"
        if name == _OUTPUT and (mine is None or theirs is None or mine.shape != theirs.shape):
            return "the output has another shape"
        if mine is not None and theirs is None:
            return f"{what} is zero, not None"
        sizes = [0.0 if g is None else float(g.norm()) for g in (mine, theirs)]
        if name != _OUTPUT and sum(sizes) <= SMALL * largest * slack:
            continue
        distance = math.inf if mine is None or theirs is None else _relative(mine, theirs)
        limit = (OUTPUT if name == _OUTPUT else GRADIENT) * slack
        if narrow and slack == 1.0 and limit < distance <= limit * FLOAT32:
            rounded = rounded or stock(_rounded(sample))
            limit = max(limit, ROUNDINGS * _relative(rounded[name], theirs))  # type: ignore[arg-type]
        if not distance <= limit:
            return f"{what} differs by {distance:.1e}"
    return None


def _rounded(sample: Sample) -> dict[str, Any]:
    """Return the arguments, with activations that differ by as much as float32 rounds."""
    active, generator = iter(sample.active), torch.Generator().manual_seed(2)
    step = torch.finfo(torch.float32).eps / 2

    def leaf(t: Any) -> Any:
        is_active = next(active)
        if not (is_active and isinstance(t, Tensor)):
            return t
        noise = torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)
        return (t.detach() * (1.0 + step * noise)).requires_grad_(t.requires_grad)

    made: dict[str, Any] = map_tree(dict(sample.given), leaf)
    return made


def _relative(mine: Tensor, theirs: Tensor) -> float:
    scale = float(theirs.norm())
    return float((mine - theirs).norm()) / scale if scale else float(mine.norm())


def _run(
    run: Callable[[], Any], named: Mapping[str, Tensor], given: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    """Return the result of a run, and sketches of the gradients of all that is differentiable.

    Each gradient is freed once it is known: together they are as large as the parameters.
    """
    result = [t for t in leaves(run()) if isinstance(t, Tensor) and t.requires_grad]
    if not result:
        return {_OUTPUT: None}
    out = result[0]
    generator = torch.Generator(out.device).manual_seed(1)
    dy = torch.randn(out.shape, generator=generator, dtype=out.dtype, device=out.device)
    inputs = {f"argument {i}": t for i, t in enumerate(leaves(given))}
    wanted = {
        name: t
        for name, t in {**inputs, **named}.items()
        if isinstance(t, Tensor) and t.requires_grad
    }
    found: dict[int, Tensor] = {}

    def note(t: Tensor) -> None:
        if t.grad is not None:
            found[id(t)], t.grad = _sketch(t.grad), None

    handles = [t.register_post_accumulate_grad_hook(note) for t in {*wanted.values()}]
    try:
        torch.autograd.backward(out, dy, inputs=[*wanted.values()])
    finally:
        for handle in handles:
            handle.remove()
    return {_OUTPUT: out.detach(), **{name: found.get(id(t)) for name, t in wanted.items()}}


def _sketch(grad: Tensor) -> Tensor:
    """Return a small tensor whose distance to that of another gradient is that of the two, within
    a tenth: sums of columns with random signs (Charikar et al. 2002, a count sketch)."""
    if grad.numel() <= _SKETCHED:
        return grad.clone()
    generator = torch.Generator().manual_seed(3)
    signs = torch.randint(0, 2, (_SKETCHED,), generator=generator).to(grad) * 2 - 1
    sums, flat = grad.new_zeros(_SKETCHED), grad.reshape(-1)
    for i in range(0, len(flat), _SKETCHED):
        part = flat[i : i + _SKETCHED]
        # Shifted, so that parts do not meet with the same signs.
        sums[: len(part)] += part * signs.roll(i // _SKETCHED)[: len(part)]
    return sums
