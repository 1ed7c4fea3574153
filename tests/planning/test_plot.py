"""A plan's picture."""

import sys

import pytest
import torch
from planned_models import X, planned, squared
from report_models import encoder

from fused_remat import Plan, plan
from fused_remat.planner import BudgetError, plot


def fastest():
    return planned("pre-norm")


def least():
    return fastest().within(fastest().frontier[0].peak_bytes)


def with_optimizer():
    """And gradients that rest."""
    model = encoder(1)
    optimizer = torch.optim.AdamW(model.parameters())
    return plan(model, X, loss=squared, optimizer=optimizer, accumulates=True, costs="analytic")


PLANS = {
    "no budget": fastest,
    "segments": lambda: fastest().within(None, "sqrt"),
    "a budget": least,
    "another method": lambda: fastest().within(fastest().frontier[-2].peak_bytes, "greedy"),
    "one layer": with_optimizer,
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_drawn(name, tmp_path, one_machine):
    """Its columns are the peaks; no setting of matplotlib is changed."""
    drawn = PLANS[name]()
    for event in drawn.timeline():
        parts = plot._parts(drawn, event)
        assert sum(parts.values()) == event.peak and set(parts) <= set(plot.PARTS)
    settings = dict(pytest.importorskip("matplotlib").rcParams)
    drawn.plot(tmp_path / "plan.svg")
    svg = (tmp_path / "plan.svg").read_text()
    texts = {"kept by layers", "at work", "parameters", "forward", "backward"}
    texts |= {event.what for event in drawn.timeline()}
    assert {text for text in texts if f"<!-- {text} -->" not in svg} == set()
    assert ("<!-- budget " in svg) == (drawn.budget is not None)
    assert ("replay" in texts) == bool(drawn.choice.segments)
    assert "replay" in texts or name != "segments"
    assert "update" in texts or name != "one layer"
    Plan.from_json(drawn.to_json()).plot(tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size > 10_000
    assert dict(sys.modules["matplotlib"].rcParams) == settings


def test_methods_that_do_not_fit_are_left_out(one_machine):
    with pytest.raises(BudgetError):
        least().within(least().budget, "sqrt")
    points = plot._points(least())
    assert points[least().peak_bytes, least().seconds][0] == "optimal"
    assert "sqrt" not in {method for methods in points.values() for method in methods}
    everywhere = [m for methods in plot._points(fastest()).values() for m in methods]
    assert sorted(everywhere) == ["greedy", "optimal", "sqrt", "uniform"]


def test_a_picture_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"Plan\.plot needs matplotlib: pip install"):
        fastest().plot(tmp_path / "plan.png")
