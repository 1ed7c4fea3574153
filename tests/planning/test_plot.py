"""A plan's picture, of steps that are made of numbers."""

import sys

import pytest

from fused_remat.planner import BudgetError, Plan, plot
from fused_remat.planner.chain import Call, Chain, Choice, Moment, Option

OPTIONS = (
    Option((), 100, 300, 500, 0.5),
    Option(("a",), 200, 300, 450, 0.3),
    Option(("a", "b"), 400, 300, 400, 0.1),
)


def step(calls, linked=True, **resting):
    """Alike calls in a row: forwards, then backwards, each of which makes a gradient of 50."""
    found = [Call(f"layers.{i}", "kind", OPTIONS, 0.2, 100, linked and i > 0) for i in range(calls)]
    moments = [Moment(-1, False, 0, 10, 0)]
    moments += [Moment(i, False, 100 * i, 100 * i + 300, i) for i in range(calls)]
    moments.append(Moment(-1, True, 100 * calls, 100 * calls + 20, calls))
    for done, i in enumerate(reversed(range(calls)), start=1):
        level = 100 * (i + 1) + 50 * (done - 1)
        moments.append(Moment(i, True, level, level + 500, i + 1, 50 * done))
    rest = {"parameters": 1000, "inputs": 8} | resting
    return Chain(tuple(found), tuple(moments), rest, 1.0 * calls, 50 * calls, 100 * calls)


def made(chain, budget=None, method="optimal"):
    """A plan of a step."""
    choice = Choice((0,) * len(chain.calls))
    return Plan("Stack", "cpu", "optimal", "measured", None, chain, choice).within(budget, method)


TIGHT = step(6)
PLANS = {
    "no budget": made(TIGHT),
    "a budget": made(TIGHT, 2900),
    "segments": made(TIGHT, made(TIGHT).frontier[0].peak_bytes),
    "no segments": made(step(6, linked=False), 3000),
    "optimizer": made(step(3, **{"optimizer state": 2000, "others": 5})),
    "gradients rest": made(step(3, gradients=150)),
    "one layer": made(step(1), 2600),
    "megabytes": made(step(2, parameters=3 * 2**20)),
    "another method": made(TIGHT, 3000, "greedy"),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_is_drawn(name, tmp_path):
    """Its columns are the peaks; no setting of matplotlib is changed."""
    plan = PLANS[name]
    for event in plan.timeline():
        parts = plot._parts(plan, event)
        assert sum(parts.values()) == event.peak and set(parts) <= set(plot.PARTS)
    settings = dict(pytest.importorskip("matplotlib").rcParams)
    plan.plot(tmp_path / "plan.svg")
    svg = (tmp_path / "plan.svg").read_text()
    texts = {"kept by layers", "at work", "parameters", "forward", "backward", "update"}
    texts |= {event.what for event in plan.timeline()}
    assert {text for text in texts if f"<!-- {text} -->" not in svg} == set()
    assert ("<!-- budget " in svg) == (plan.budget is not None)
    assert ("replay" in texts) == bool(plan.choice.segments)
    assert "replay" in texts or name != "segments"
    Plan.from_json(plan.to_json()).plot(tmp_path / "again.png")
    assert (tmp_path / "again.png").stat().st_size > 10_000
    assert dict(sys.modules["matplotlib"].rcParams) == settings


def test_methods_that_do_not_fit_are_left_out():
    plan = PLANS["segments"]
    with pytest.raises(BudgetError):
        plan.within(plan.budget, "uniform")
    points = plot._points(plan)
    assert points[plan.peak_bytes, plan.seconds][0] == "optimal"
    assert "uniform" not in {method for methods in points.values() for method in methods}
    everywhere = [m for methods in plot._points(PLANS["no budget"]).values() for m in methods]
    assert sorted(everywhere) == ["greedy", "optimal", "sqrt", "uniform"]


def test_a_picture_needs_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"Plan\.plot needs matplotlib: pip install"):
        PLANS["one layer"].plot(tmp_path / "plan.png")
