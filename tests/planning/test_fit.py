"""`fit`: the largest batch, or the longest sequence, of which a step fits."""

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
    assert few.size == 8 <= found.size and set(few.tried) == {4, 8}
    with pytest.raises(BudgetError, match="not even a size of 1 fits"):
        fit(model, batch, 100_000, costs="analytic")


@pytest.mark.parametrize(
    ("make", "options", "error", "match"),
    [
        (batch, {"method": "greedy"}, TypeError, "fit has no argument 'method'"),
        (batch, {"offload": True}, ValueError, "offload=True on cpu: .* nothing can be moved"),
        (lambda size: batch(8)[:size], {"costs": "analytic"}, ValueError,
         r"is no larger than make_batch\(8\), which fits"),
    ],
)  # fmt: skip
def test_bad_arguments(make, options, error, match):
    """A batch has to grow with its size."""
    with pytest.raises(error, match=match):
        fit(encoder(1), make, "1GiB", **options)
