"""The rule for errors: as exact as PyTorch, compared with float64, up to a few roundings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

#: Relative L2 errors that PyTorch may be spared by chance, by the dtype that was computed in. Of
#: 150,000 float32 gradients two of few elements were 11 and 8 epsilons off where PyTorch's were 3
#: and 2; without AVX one was 18 off, PyTorch's 5: 10.4 more than 1.5 times as many. In 16 bits a
#: result itself is rounded, at most two times. In float64 PyTorch is its own truth: what remains is
#: the order of sums, of gradients that cancel.
ROUNDINGS = {
    torch.float64: 1e-12,
    torch.float32: 12 * torch.finfo(torch.float32).eps,
    torch.bfloat16: 4 * torch.finfo(torch.bfloat16).eps,
    torch.float16: 4 * torch.finfo(torch.float16).eps,
}
#: A gradient smaller than this, relative to the largest, is what remains of terms that cancel. That
#: of the bias of keys is 0: softmax does not see a shift. It has no relative error of its own.
CANCELLED = 1e-3


def scales(exact: Sequence[Tensor]) -> list[float]:
    """Return what the errors of an output, which comes first, and of gradients are relative to."""
    norms = [t.norm().item() for t in exact]
    biggest = max([*norms[1:], 1e-3])
    return [norm if norm > CANCELLED * biggest else biggest for norm in norms]


def check_error(
    ours: Sequence[Tensor],
    peer: Sequence[Tensor],
    exact: Sequence[Tensor],
    names: Sequence[str] | None = None,
    computed: torch.dtype | None = None,
    floor: float | None = None,
) -> None:
    """Errors of an output and gradients against float64: at most 1.5 times PyTorch's own.

    Args:
        computed: the dtype that was computed in, where results have a wider one: one rounding to it
            may be spared by chance.
        floor: what may be spared, where it is not a few roundings.
    """
    names = list(map(str, range(len(exact)))) if names is None else names
    for name, a, b, truth, scale in zip(names, ours, peer, exact, scales(exact), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        error, allowed = ((t.double() - truth).norm().item() / scale for t in (a, b))
        spared = ROUNDINGS[a.dtype] if floor is None else floor
        if computed is not None:
            spared = max(spared, torch.finfo(computed).eps / 2)
        assert error <= 1.5 * allowed + spared, f"{name}: {error:.3g}, PyTorch's {allowed:.3g}"


def assert_close(found: Iterable[Tensor], expected: Iterable[Tensor]) -> None:
    """Of float64 results, which differ by the order of sums."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def assert_bits(found: Iterable[Any], expected: Iterable[Any], what: str = "") -> None:
    """Check that tensors are equal bit for bit, or None where None is expected."""
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), f"{what} {i}"
