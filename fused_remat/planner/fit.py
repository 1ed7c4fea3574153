"""`fit`: the largest batch, or sequence, that a memory budget holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fused_remat.planner import chain as chains
from fused_remat.planner.build import measure_chain, plan
from fused_remat.planner.calibration import Calibration
from fused_remat.planner.measure import device_of
from fused_remat.planner.options import Budget, BudgetError, bytes_of, predict_optimizer
from fused_remat.planner.plan import Plan
from fused_remat.planner.solve import least_peak
from fused_remat.report.report import human
from fused_remat.report.step import tensors_in

_GROWTH = 4  # at most so many times what is known to fit


@dataclass(frozen=True)
class Fit:
    """What `fit` found.

    Attributes:
        size: the largest argument of `make_batch` that fits.
        plan: the fastest plan for it within the memory.
        tried: by size, the peak in bytes of a step with every layer keeping its input alone; the
            least possible one of sizes for which that is too much. None where the device ran out
            of memory.
    """

    size: int
    plan: Plan
    tried: dict[int, int | None]


def fit(
    model: nn.Module,
    make_batch: Callable[[int], Any],
    memory: Budget,
    *,
    multiple: int = 1,
    most: int | None = None,
    costs: str | Calibration = "measured",
    **options: Any,
) -> Fit:
    """Find the largest batch (or sequence) whose step fits into a memory budget, and its plan.

    Args:
        model: as of `plan`.
        make_batch: size -> the model's inputs: a tensor, a tuple of arguments, or a mapping of
            keyword arguments. The size is whatever it makes of it: sequences, or tokens of one.
        memory: as `plan`'s budget.
        multiple: sizes are multiples of this.
        most: no larger size.
        costs: as of `plan`, for the plan that is returned.
        options: as of `plan`: optimizer, loss, accumulates, segments, options, lossy, offload.
    Units: bytes. Sizes are tried on the device, each a step with every layer keeping its input
        alone; larger and larger ones until one does not fit. Whatever else layers can keep is
        measured of the next size only, and of those after it while it makes them fit.
    Raises: BudgetError if the smallest size does not fit; ValueError if `multiple` or `most` is not
        positive, or batches do not grow with their size and there is no `most`; TypeError for an
        argument that `plan` does not have.

    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    >>> found = fit(model, lambda size: torch.randn(size, 16, 32), memory="1MiB")
    >>> found.size > 2 and found.plan.peak_bytes <= 2**20
    True
    """
    for name, value in (("multiple", multiple), ("most", most)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name} is a positive int, got {value!r}")
    if most is not None and most < multiple:
        raise ValueError(f"most ({most}) is below multiple ({multiple})")
    limit = bytes_of(memory, device_of(model, []))
    search = _Search(model, make_batch, multiple, options)
    most = None if most is None else most // multiple
    while True:
        count = search.largest(limit, most)
        args, kwargs = _arguments(make_batch(count * multiple))
        try:
            found = plan(model, *args, budget=limit, costs=costs, **options, **kwargs)
        except torch.OutOfMemoryError:  # what a layer can keep, a call of its own for each
            if count == 1:
                raise
            torch.cuda.empty_cache()
            most = count - 1
        else:
            return Fit(count * multiple, found, search.tried())


class _Search:
    """Peaks by size, in multiples: of keeping inputs alone, and the least of all options."""

    def __init__(
        self,
        model: nn.Module,
        make_batch: Callable[[int], Any],
        multiple: int,
        options: Mapping[str, Any],
    ) -> None:
        self._model, self._make_batch, self._multiple = model, make_batch, multiple
        optimizer = options.get("optimizer")
        update = None if optimizer is None else predict_optimizer(optimizer)
        every = {**options, "update": update}
        self._measured: list[tuple[dict[str, Any], dict[int, int | None]]] = [
            ({**every, "options": ()}, {}), (every, {})
        ]  # fmt: skip
        self._elements: dict[int, int] = {}  # of the batches

    def tried(self) -> dict[int, int | None]:
        """What is known of each size."""
        (_, base), (_, least) = self._measured
        return {n * self._multiple: p for n, p in (base | least).items()}

    def largest(self, limit: int, most: int | None) -> int:
        """With inputs alone, then what more can be with all options: they take long to measure."""
        fits = 0
        for given, peaks in self._measured:
            fits = self._grown(fits, limit, most, given, peaks)
        if not fits:
            raise self._too_small(limit, self._measured[-1][1][1])
        return fits

    def _grown(
        self,
        fits: int,
        limit: int,
        most: int | None,
        options: Mapping[str, Any],
        peaks: dict[int, int | None],
    ) -> int:
        """Grow by what the last two peaks say, at most fourfold; then close in."""
        fails = None if most is None else most + 1
        size = fits + 1
        while fails is None or fails - fits > 1:
            peak = peaks[size] if size in peaks else self._peak(size, options)
            peaks[size] = peak
            if peak is not None and peak <= limit:
                if fails is None and fits and self._elements[size] <= self._elements[fits]:
                    raise ValueError(
                        f"make_batch({size * self._multiple}) is no larger than "
                        f"make_batch({fits * self._multiple}), which fits: give most="
                    )
                fits = size
            else:
                fails = size
            size = self._next(fits, fails, limit, peaks)
        return fits

    def _next(
        self, fits: int, fails: int | None, limit: int, peaks: Mapping[int, int | None]
    ) -> int:
        known = sorted((n, p) for n, p in peaks.items() if p is not None)
        guess = _GROWTH * fits if fails is None else (fits + fails) // 2
        if len(known) > 1:
            (n0, p0), (n1, p1) = known[-2:]
            if p1 > p0:
                guess = n0 + (limit - p0) * (n1 - n0) // (p1 - p0)
        else:
            guess = fits + 1
        if fails is not None and guess >= fails:  # the guess was tried, or beyond what fails
            guess = fails - 1
        return max(fits + 1, min(guess, _GROWTH * fits))

    def _peak(self, size: int, options: Mapping[str, Any]) -> int | None:
        args, kwargs = _arguments(self._make_batch(size * self._multiple))
        self._elements[size] = sum(t.numel() for t in tensors_in([args, kwargs]))
        try:
            chain, _ = measure_chain(self._model, args, kwargs, "analytic", timed=False, **options)
            return chains.peak(chain, least_peak(chain))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None

    def _too_small(self, limit: int, peak: int | None) -> BudgetError:
        what = "more than the device has" if peak is None else f"{human(peak)} ({peak} bytes)"
        return BudgetError(
            f"not even a size of {self._multiple} fits into {human(limit)} ({limit} bytes): the "
            f"least possible peak is {what}",
            limit,
            peak or limit + 1,
            {},
        )


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch as arguments of the model.

    >>> _arguments({"x": 1}), _arguments((1, 2)), _arguments(1)
    (((), {'x': 1}), ((1, 2), {}), ((1,), {}))
    """
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})
