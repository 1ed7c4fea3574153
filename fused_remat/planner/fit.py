"""`fit`: the largest batch or sequence whose training step fits into a memory budget."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fused_remat.planner import chain as chains
from fused_remat.planner.build import Request, measure_chain, plan
from fused_remat.planner.calibration import Calibration
from fused_remat.planner.measure import predict_optimizer
from fused_remat.planner.plan import Plan
from fused_remat.planner.solve import BudgetError, least_peak
from fused_remat.report.step import device_of, tensors_in
from fused_remat.report.units import Budget, bytes_of, human


@dataclass(frozen=True)
class Fit:
    """The result of `fit`.

    Attributes:
        size: the largest argument of `make_batch` that fits.
        plan: the fastest plan for that size within the memory.
        tried: peak in bytes of each size that was tried: of a step with every layer keeping its
            input alone or, where that is too much, the least possible peak. None where the device
            ran out of memory.
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
        model: as in `plan`.
        make_batch: function from a size to the model's inputs: a tensor, a tuple of arguments, or a
            mapping of keyword arguments. It decides what the size counts, such as sequences or
            tokens.
        memory: as the budget of `plan`.
        multiple: sizes are multiples of this.
        most: largest size to try.
        costs: as in `plan`, for the plan that is returned.
        options: further arguments of `plan`: optimizer, loss, accumulates, segments, options,
            offload.
    Units: bytes. Each size is tried with one step on the device, every layer keeping its input
        alone, growing until one does not fit. All options, which take longer to measure, are
        measured for the sizes after that, as long as they make them fit.
    Raises: BudgetError if the smallest size does not fit; ValueError if `multiple` or `most` is not
        positive, or if batches do not grow with the size and there is no `most`; TypeError for an
        unknown option.

    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    >>> largest = fit(model, lambda size: torch.randn(size, 16, 32), memory="1MiB")
    >>> largest.size > 2 and largest.plan.peak_bytes <= 2**20
    True
    """
    for name, value in (("multiple", multiple), ("most", most)):
        if value is not None and (not isinstance(value, int) or value < 1):
            raise ValueError(f"{name}= is a positive int, got {value!r}")
    if most is not None and most < multiple:
        raise ValueError(f"most={most} is less than multiple={multiple}, so no size is allowed")
    unknown = options.keys() - {field.name for field in dataclasses.fields(Request)}
    if unknown:
        raise TypeError(f"fit has no argument {', '.join(map(repr, sorted(unknown)))}")
    limit = bytes_of(memory, device_of(model))
    search = _Search(model, make_batch, multiple, Request("analytic", **options))
    most = None if most is None else most // multiple
    while True:
        count = search.largest(limit, most)
        args, kwargs = _arguments(make_batch(count * multiple))
        try:
            fastest = plan(model, *args, budget=limit, costs=costs, **options, **kwargs)
        except torch.OutOfMemoryError:  # while measuring the options of a layer
            if count == 1:
                raise
            torch.cuda.empty_cache()
            most = count - 1
        else:
            return Fit(count * multiple, fastest, search.tried())


class _Search:
    """Peaks by size, counted in multiples: with inputs kept alone, and the least of all options."""

    def __init__(
        self, model: nn.Module, make_batch: Callable[[int], Any], multiple: int, request: Request
    ) -> None:
        self._model, self._make_batch, self._multiple = model, make_batch, multiple
        optimizer = request.optimizer
        self._update = None if optimizer is None else predict_optimizer(optimizer)
        self._requests = dataclasses.replace(request, options=()), request
        self._peaks: tuple[dict[int, int | None], ...] = ({}, {})  # by request, then by size
        self._elements: dict[int, int] = {}  # number of elements of the batches

    def tried(self) -> dict[int, int | None]:
        """Return the peak of each size that was tried."""
        base, least = self._peaks
        return {size * self._multiple: peak for size, peak in (base | least).items()}

    def largest(self, limit: int, most: int | None) -> int:
        """Return the largest number of multiples that fits, by inputs alone, then by all options.

        Raises: BudgetError if not even one fits.
        """
        fits = 0
        for i in range(len(self._requests)):
            fits = self._grown(fits, limit, most, i)
        if fits:
            return fits
        peak = self._peaks[1][1]
        least = "more than the device has" if peak is None else f"{human(peak)} ({peak} bytes)"
        message = (
            f"not even a size of {self._multiple} fits into {human(limit)} ({limit} bytes): the "
            f"least possible peak is {least}"
        )
        raise BudgetError(message, limit, peak or limit + 1, {})

    def _grown(self, fits: int, limit: int, most: int | None, request: int) -> int:
        """Grow by extrapolation from the last two peaks, at most fourfold, until a size fails."""
        fails, peaks = None if most is None else most + 1, self._peaks[request]
        while fails is None or fails - fits > 1:
            size = self._next(fits, fails, limit, peaks)
            if size not in peaks:
                peaks[size] = self._peak(size, self._requests[request])
            peak = peaks[size]
            if peak is None or peak > limit:
                fails = size
                continue
            if fails is None and fits > 0 and self._elements[size] <= self._elements[fits]:
                raise ValueError(
                    f"make_batch({size * self._multiple}) is no larger than "
                    f"make_batch({fits * self._multiple}), which fits; give most= to end the search"
                )
            fits = size
        return fits

    def _next(
        self, fits: int, fails: int | None, limit: int, peaks: Mapping[int, int | None]
    ) -> int:
        """Return the next size to try: above `fits`, and below `fails` if that is known."""
        measured = sorted((size, peak) for size, peak in peaks.items() if peak is not None)
        size = 4 * fits if fails is None else (fits + fails) // 2
        if len(measured) < 2:
            size = fits + 1
        elif (growth := measured[-1][1] - measured[-2][1]) > 0:
            (size0, peak0), (size1, _) = measured[-2:]
            size = size0 + (limit - peak0) * (size1 - size0) // growth
        size = max(fits + 1, min(size, 4 * max(fits, 1)))
        return size if fails is None else min(size, fails - 1)

    def _peak(self, size: int, request: Request) -> int | None:
        args, kwargs = _arguments(self._make_batch(size * self._multiple))
        self._elements[size] = sum(t.numel() for t in tensors_in([args, kwargs]))
        try:
            chain, _ = measure_chain(self._model, args, kwargs, request, False, self._update)
            return chains.peak(chain, least_peak(chain))
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return None


def _arguments(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return a batch as positional and keyword arguments of the model."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, (tuple, list)) else ((batch,), {})
