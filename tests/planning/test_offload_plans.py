"""Plans that offload: what copies cost, the best choice, and what a plan does."""

import dataclasses

import pytest
import torch
from offload_mover import moving
from planned_models import example_of
from report_models import encoder

from fused_remat import Plan, convert, memory_report, plan
from fused_remat.planner.calibration import Calibration, Seconds
from fused_remat.planner.options import kept_by_name, options_for, with_offload

FREE, SLOW = (1e15, 1e15), (1e4, 1e4)


def data():
    return torch.randn(2, 64, 32)


def with_link(link):
    """A CPU's calibration, as if the host were elsewhere."""
    return Calibration(torch.device("cpu"), 1e10, 1e-6, {torch.float32: 1e10}, link)


def planned(link=FREE, **options):
    torch.manual_seed(0)
    options = {"options": ["full"], "segments": False, "accumulates": True, **options}
    with moving():
        return plan(encoder(6), data(), offload=True, costs=with_link(link), **options)


@pytest.fixture(scope="module")
def free():
    return planned()


def test_options_cost_what_nothing_hides():
    example = example_of(convert(encoder(1).layers[0]), data())
    base, up = options_for(example, lambda *_: Seconds(1.5, 2.0), [(), ("up",)])
    up = dataclasses.replace(up, seconds=0.5)
    sizes = kept_by_name(example, ("up",))
    link = sizes["input"] / 4.0, sizes["input"] / 3.0  # 4 s out and 3 s back
    found = with_offload(example, (base, up), link, forward=1.5)
    assert found[:2] == (base, up)
    moved, all_of_it = sizes["input"], sizes["input"] + sizes["up"]
    found = {(o.save, o.offload): o for o in found[2:]}
    one = found[(), ("input",)]
    assert (one.moved, one.kept) == (moved, base.kept - moved)
    assert one.seconds == 2.0 + (4.0 - 1.5) + (3.0 - 2.0)
    both, ratio = found[("up",), ("input", "up")], all_of_it / moved
    assert (both.moved, both.kept) == (all_of_it, up.kept - all_of_it)
    assert both.seconds == pytest.approx(0.5 + (4.0 * ratio - 1.5) + (3.0 * ratio - 0.5))


def test_a_plan_offloads_where_it_pays(free):
    slow = planned(SLOW)
    assert all(p.offload == {"input"} for p in free.policies.values())  # no slower, and less
    assert not any(p.offload for p in slow.policies.values())
    assert slow.frontier[-1].seconds < slow.frontier[0].seconds - 1
    tight = free.within(free.frontier[0].peak_bytes)
    assert any(p.offload for p in tight.policies.values()) and tight.parts["in transit"] > 0
    assert "offload input" in tight.table() and tight.peak_bytes <= free.frontier[0].peak_bytes
    assert Plan.from_json(tight.to_json()) == tight


def test_a_plan_applied_keeps_what_it_says(free):
    model, x = encoder(6), data()
    tight = free.within(free.frontier[0].peak_bytes)
    tight.apply(model)
    with moving() as mover:
        report = memory_report(model, x)
    assert mover.events and report.kept_bytes == report.predicted_bytes == tight.kept_bytes
