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
from fused_remat.report.step import batch_arguments, device_of, tensors_in
from fused_remat.report.units import Budget, bytes_of, human


@dataclass(frozen=True)
class Fit:
    """The result of `fit`.

    Attributes:
        size: the largest argument of `make_batch` that fits.
        plan: the fastest plan for that size within the memory.
        tried: peak in bytes of each size that was tried: with every layer keeping its input alone
            or, where that does not fit, the least possible one. None where the device ran out of
            memory.
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
    Units: bytes. Each size is tried with a step on the device, every layer keeping its input
        alone; where that does not fit, with all options. Sizes grow until one does not fit.
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
    request, device = Request("analytic", **options), device_of(model)
    request.check("optimal", device)
    limit = bytes_of(memory, device)
    update = None if request.optimizer is None else predict_optimizer(request.optimizer)

    def peak_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int | None:
        peak = None
        for options in ((), request.options):  # all of them take longer
            tried = dataclasses.replace(request, options=options)
            try:
                chain = measure_chain(model, args, kwargs, tried, False, update)
            except torch.OutOfMemoryError:
                torch.cuda.empty_cache()
                continue
            peak = chains.peak(chain, least_peak(chain))
            if peak <= limit:
                break
        return peak

    tried = _search(make_batch, peak_of, limit, multiple, most)
    fitting = [size for size, peak in tried.items() if peak is not None and peak <= limit]
    if not fitting:
        peak = tried[multiple]
        least = "more than the device has" if peak is None else f"{human(peak)} ({peak} bytes)"
        message = (
            f"not even a size of {multiple} fits into {human(limit)} ({limit} bytes): the least "
            f"possible peak is {least}"
        )
        raise BudgetError(message, limit, peak or limit + 1, {})
    args, kwargs = batch_arguments(make_batch(max(fitting)))
    fastest = plan(model, *args, budget=limit, costs=costs, **options, **kwargs)
    return Fit(max(fitting), fastest, tried)


def _search(
    make_batch: Callable[[int], Any],
    peak_of: Callable[[tuple[Any, ...], dict[str, Any]], int | None],
    limit: int,
    multiple: int,
    most: int | None,
) -> dict[int, int | None]:
    """Return the peaks by size, up to the largest size that fits and the next one."""
    peaks: dict[int, int | None] = {}  # by multiples
    fits, fails, elements = 0, None if most is None else most // multiple + 1, 0
    while fails is None or fails - fits > 1:
        count = _next(fits, fails, limit, peaks)
        args, kwargs = batch_arguments(make_batch(count * multiple))
        peak = peaks[count] = peak_of(args, kwargs)
        more = sum(t.numel() for t in tensors_in([args, kwargs]))
        if peak is None or peak > limit:
            fails = count
        elif fails is None and fits and more <= elements:
            raise ValueError(
                f"make_batch({count * multiple}) is no larger than make_batch({fits * multiple}), "
                "which fits; give most= to end the search"
            )
        else:
            fits, elements = count, more
    return {count * multiple: peak for count, peak in peaks.items()}


def _next(fits: int, fails: int | None, limit: int, peaks: Mapping[int, int | None]) -> int:
    """Return the next size to try: above `fits`, and below `fails` if that is known.

    It is extrapolated from the last two peaks, but at most fourfold.
    """
    measured = sorted((size, peak) for size, peak in peaks.items() if peak is not None)
    size = 4 * fits if fails is None else (fits + fails) // 2
    if len(measured) < 2:
        size = fits + 1
    elif (growth := measured[-1][1] - measured[-2][1]) > 0:
        (size0, peak0), (size1, _) = measured[-2:]
        size = size0 + (limit - peak0) * (size1 - size0) // growth
    size = max(fits + 1, min(size, 4 * max(fits, 1)))
    return size if fails is None else min(size, fails - 1)
