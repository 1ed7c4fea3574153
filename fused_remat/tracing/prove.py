"""The proof of a trace: the block and the layer are run on random tensors and compared.

Both run in float64, on random parameters and inputs, at two sizes, and in small chunks. The result
and the gradients of all parameters and differentiable arguments are compared.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.tracing.isolation import run_with
from fused_remat.tracing.no_dropout import WithoutDropout
from fused_remat.tracing.values import Sample, leaves, map_tree

#: Limits of relative differences: of the result, and of gradients.
OUTPUT, GRADIENT = 1e-6, 5e-6
#: Factor of these limits where a layer cannot run in float64, for float32's rounding.
FLOAT32 = 20.0
#: Gradients that are smaller than this part of the largest one are rounding errors of zero, such as
#: those of the keys' bias.
SMALL = 1e-9
#: Limit of a layer's own rounding in float32, as a multiple of the effect of one rounding: at most
#: 2.4 was measured, for the linear attention of Qwen3.5 at ten widths.
ROUNDINGS = 8.0
#: Number of sums by which larger gradients are compared.
_SKETCHED = 4099
_OUTPUT = "the output"


def difference(
    layer: nn.Module,
    forward: Callable[..., Any],
    fused: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Any],
    sample: Sample,
    narrow: bool = False,
) -> str | None:
    """Return where `fused(named, arguments)` differs from `forward`, a method of `layer`, or None.

    `narrow`: whether the layer computes in float32 whatever its input's dtype. Its own rounding is
    then allowed: `ROUNDINGS` times the effect of rounding its input to float32, at most `FLOAT32`
    times the limits.
    """

    def of_layer(arguments: Mapping[str, Any]) -> dict[str, Tensor | None]:
        torch.random.set_rng_state(state)  # drop path draws before the block
        with WithoutDropout():
            return _results(functools.partial(run_with, layer, forward), sample.named, arguments)

    slack = 1.0 if sample.dtype == torch.float64 else FLOAT32
    state = torch.random.get_rng_state()
    expected = of_layer(sample.arguments)
    torch.random.set_rng_state(state)
    actual = _results(fused, sample.named, sample.arguments)
    grads = [g for name, g in expected.items() if name != _OUTPUT]
    largest = max((float(g.norm()) for g in grads if g is not None), default=0.0)
    rounded: dict[str, Tensor | None] = {}
    for name, b in expected.items():
        a, is_output = actual[name], name == _OUTPUT
        text = name if is_output else f"the gradient of {name}"
        if is_output and (a is None or b is None or a.shape != b.shape):
            return "the output has another shape"
        if a is not None and b is None:
            return f"{text} is zero, not None"
        norms = [0.0 if g is None else float(g.norm()) for g in (a, b)]
        if not is_output and sum(norms) <= SMALL * largest * slack:
            continue
        distance = math.inf if a is None or b is None else _relative(a, b)
        limit = (OUTPUT if is_output else GRADIENT) * slack
        if narrow and slack == 1.0 and limit < distance <= limit * FLOAT32:
            rounded = rounded or of_layer(_rounded(sample))
            limit = max(limit, ROUNDINGS * _relative(rounded[name], b))  # type: ignore[arg-type]
        if not distance <= limit:
            return f"{text} differs by {distance:.1e}"
    return None


def _rounded(sample: Sample) -> dict[str, Any]:
    """Return the arguments, with activations that differ by float32's rounding."""
    active, generator = iter(sample.active), torch.Generator().manual_seed(2)
    step = torch.finfo(torch.float32).eps / 2

    def leaf(t: Any) -> Any:
        is_active = next(active)
        if not (is_active and isinstance(t, Tensor)):
            return t
        noise = torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)
        return (t.detach() * (1.0 + step * noise)).requires_grad_(t.requires_grad)

    arguments: dict[str, Any] = map_tree(dict(sample.arguments), leaf)
    return arguments


def _relative(a: Tensor, b: Tensor) -> float:
    scale = float(b.norm())
    return float((a - b).norm()) / scale if scale else float(a.norm())


def _results(
    run: Callable[..., Any], named: Mapping[str, Tensor], arguments: Mapping[str, Any]
) -> dict[str, Tensor | None]:
    """Return the result of `run(named, arguments)`, and sketches of all gradients.

    Each gradient is freed once it is known: together they are as large as the parameters.
    """
    with torch.enable_grad():
        result = [t for t in leaves(run(named, arguments)) if _is_differentiable(t)]
    if not result:
        return {_OUTPUT: None}
    out = result[0]
    generator = torch.Generator(out.device).manual_seed(1)
    dy = torch.randn(out.shape, generator=generator, dtype=out.dtype, device=out.device)
    tensors = {**{f"argument {i}": t for i, t in enumerate(leaves(arguments))}, **named}
    inputs = {name: t for name, t in tensors.items() if _is_differentiable(t)}
    sketches: dict[int, Tensor] = {}

    def note(t: Tensor) -> None:
        if t.grad is not None:
            sketches[id(t)], t.grad = _sketch(t.grad), None

    handles = [t.register_post_accumulate_grad_hook(note) for t in {*inputs.values()}]
    try:
        torch.autograd.backward(out, dy, inputs=[*inputs.values()])
    finally:
        for handle in handles:
            handle.remove()
    return {_OUTPUT: out.detach(), **{name: sketches.get(id(t)) for name, t in inputs.items()}}


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _sketch(grad: Tensor) -> Tensor:
    """Return a small tensor, whose distance to another gradient's is theirs within a tenth.

    It holds sums of columns with random signs (Charikar et al. 2002, a count sketch).
    """
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
