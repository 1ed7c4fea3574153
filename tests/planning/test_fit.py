"""`fit`: the largest batch, or the longest sequence, of which a step fits."""

import importlib

import pytest
import torch
from planned_models import squared
from report_models import encoder

from fused_remat import BudgetError, fit, plan


def batch(size):
    return torch.randn(size, 16, 32)


def test_fit_finds_the_largest_batch_that_fits():
    model = encoder(3)
    found = fit(model, batch, "1MiB", costs="analytic", loss=squared)
    assert found.plan.peak_bytes <= 2**20 == found.plan.budget
    assert plan(model, batch(found.size), loss=squared, budget="1MiB", costs="analytic")
    with pytest.raises(BudgetError):
        plan(model, batch(found.size + 1), loss=squared, budget="1MiB", costs="analytic")
    few = fit(model, batch, "1MiB", multiple=4, most=9, costs="analytic", loss=squared)
    assert few.size == 8 <= found.size
    with pytest.raises(BudgetError, match="not even a size of 1 fits"):
        fit(model, batch, 100_000, costs="analytic")


def test_fit_takes_less_where_the_device_has_no_room_to_measure_all_options(monkeypatch):
    module, asked = importlib.import_module("fused_remat.planner.fit"), []

    def out_of_memory_once(model, x, **options):
        asked.append(len(x))
        if len(asked) == 1:
            raise torch.OutOfMemoryError("no room")
        return plan(model, x, **options)

    monkeypatch.setattr(module, "plan", out_of_memory_once)
    found = fit(encoder(1), batch, "1GiB", most=2, costs="analytic", loss=squared)
    assert asked == [2, 1] and found.size == 1 and set(found.tried) == {1, 2}
    with pytest.raises(torch.OutOfMemoryError):
        asked.clear()
        fit(encoder(1), batch, "1GiB", most=1, costs="analytic", loss=squared)


@pytest.mark.parametrize(
    ("make", "options", "error", "match"),
    [
        (batch, {"method": "greedy"}, TypeError, "fit has no argument 'method'"),
        (lambda size: batch(8)[:size], {"costs": "analytic"}, ValueError,
         r"is no larger than make_batch\(8\), which fits"),
    ],
)  # fmt: skip
def test_bad_arguments(make, options, error, match):
    """A batch has to grow with its size."""
    with pytest.raises(error, match=match):
        fit(encoder(1), make, "1GiB", **options)
