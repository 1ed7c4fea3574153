"""Plans with lossy formats: never unless asked for, kept bytes exact, peaks as allocated."""

import dataclasses
import functools
import itertools

import pytest
import torch
from torch import nn

from fused_remat import (
    BudgetError,
    FusedRematCausalLayer,
    FusedRematDecoderLayer,
    FusedRematLayer,
    Plan,
    Policy,
    convert,
    fit,
    plan,
)
from fused_remat.autograd.function import OBSERVERS
from fused_remat.graph.build import block_graph
from fused_remat.layers import FusedLayer
from fused_remat.planner.calibration import Example
from fused_remat.planner.options import options_for, packable
from fused_remat.policies import LOSSY_PRESETS, kept_names
from fused_remat.report.allocations import SavedBytes
from fused_remat.report.step import run_step
from fused_remat.spec import nn_layer_spec

WITHIN = 0.03  # of the peak; what the planner promises


pytestmark = pytest.mark.usefixtures("one_machine")


def squared(output):
    return output.square().mean()


def encoder(norm_first=True, dropout=0.0, width=32):
    # A width whose feed-forward rows are not whole blocks: their last scales are counted.
    layer = nn.TransformerEncoderLayer(
        width, 4, 5 * width, dropout, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


CASES = {
    "pre-norm": (encoder, lambda: (torch.randn(4, 64, 32),)),
    "post-norm dropout": (lambda: encoder(False, 0.1), lambda: (torch.randn(4, 64, 32),)),
    "encoder-decoder": (
        lambda: nn.Transformer(32, 4, 1, 1, 128, 0.0, batch_first=True),
        lambda: (torch.randn(4, 64, 32), torch.randn(4, 48, 32)),
    ),
}


@functools.cache
def planned(case, lossy=True):
    """The fastest plan, of a model and inputs like those of `CASES`."""
    torch.manual_seed(0)
    build, inputs = CASES[case]
    return plan(build(), *inputs(), loss=squared, costs="analytic", lossy=lossy)


def is_lossy(found):
    return any(":" in name for policy in found.policies.values() for name in policy.save)


def between(found, parts=3):
    """Budgets from the least possible peak to the fastest plan's."""
    least, most = found.frontier[0].peak_bytes, found.peak_bytes
    return [least + (most - least) * i // parts for i in range(parts + 1)]


@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_are_exact_with_scales_and_peaks_hold(case):
    torch.manual_seed(0)
    build, inputs = CASES[case]
    model, args, fastest = build(), inputs(), planned(case)
    packed = 0
    for budget in between(fastest):
        found = fastest.within(budget)
        assert found.peak_bytes <= budget
        found.apply(model)
        step = run_step(model, [], args, {}, squared)
        assert found.kept_bytes == sum(saved.nbytes for saved in step.saved)
        peak = step.peak + found.chain.rests
        assert abs(found.peak_bytes - peak) <= WITHIN * peak
        packed += is_lossy(found)
    assert packed


def test_kept_bytes_are_what_autograd_saves():
    found = planned("pre-norm").within(between(planned("pre-norm"))[2])
    assert is_lossy(found)
    torch.manual_seed(0)
    model, x = found.apply(encoder()), torch.randn(4, 64, 32)
    with SavedBytes(exclude=model.parameters()) as saved:
        loss = squared(model(x))
    assert saved.total == found.kept_bytes
    loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("case", CASES)
def test_nothing_lossy_without_being_asked_for(case):
    exact = planned(case, lossy=False)
    saves = {option.save for call in exact.chain.calls for option in call.options}
    assert not any(":" in name for save in saves for name in save)


@pytest.mark.parametrize("case", CASES)
def test_lossy_plans_are_never_slower_at_a_budget_and_reach_no_less(case):
    """As predicted; the options without formats are all there still."""
    lossy, exact = planned(case), planned(case, lossy=False)
    measured = {"seconds": lossy.chain.seconds, "moments": lossy.chain.moments}
    exact = dataclasses.replace(exact, chain=dataclasses.replace(exact.chain, **measured))
    faster = 0
    for budget in between(exact, 12):
        ours, theirs = lossy.within(budget), exact.within(budget)
        assert ours.seconds <= theirs.seconds
        faster += ours.seconds < theirs.seconds
    assert faster
    assert lossy.frontier[0].peak_bytes <= exact.frontier[0].peak_bytes


def test_larger_budgets_are_never_slower():
    fastest = planned("pre-norm")
    found = [fastest.within(budget) for budget in between(fastest, 20)]
    for less, more in itertools.pairwise(found):
        assert more.seconds <= less.seconds
        assert more.peak_bytes >= less.peak_bytes


def test_only_what_the_lossy_rungs_pack_is_packed():
    """A weight gradient, a norm and the residual stream read the other names."""
    graphs = [block_graph(nn_layer_spec(norm_first, 4, 8, "gelu")) for norm_first in (True, False)]
    for placement in ("pre", "post", "sandwich"):
        for qk_norm in (False, True):
            layer = FusedRematCausalLayer(32, 4, 64, placement=placement, qk_norm=qk_norm)
            graphs.append(layer._example())
    graphs += [
        FusedRematDecoderLayer(32, 4, norm_first=first)._example() for first in (True, False)
    ]
    for graph in graphs:
        names = {f"{name}:int8" for name in packable(graph)}
        assert names == {n for n in kept_names("fast8", graph) if ":" in n}


def test_what_fits_as_it_is_is_not_packed():
    plain, lossy = planned("pre-norm", lossy=False), planned("pre-norm")
    roomy = 2 * plain.peak_bytes
    assert not is_lossy(lossy.within(roomy))
    assert lossy.within(roomy).policies == plain.within(roomy).policies


def test_formats_are_shown_kept_in_json_and_set(tmp_path):
    fastest = planned("pre-norm")
    found = next(made for b in between(fastest, 20) if is_lossy(made := fastest.within(b)))
    again = Plan.from_json(found.to_json(tmp_path / "plan.json"))
    assert again == found and again.table() == found.table()
    assert any(name in found.table() for name in (":int8", *LOSSY_PRESETS))
    model = again.apply(encoder())
    policies = {n: m.policy for n, m in model.named_modules() if isinstance(m, FusedLayer)}
    assert policies == found.policies
    assert "int8" in {stored for p in policies.values() for stored in p.formats.values()}


def test_lossy_policies_that_are_named_need_no_flag():
    x = torch.randn(4, 64, 32)
    options = ["full", "fast8", "balanced8", Policy({"attn": "native", "up": "int8"})]
    found = plan(encoder(), x, loss=squared, costs="analytic", options=options)
    shown = {found.within(budget).layers[1].label for budget in between(found)}
    assert "fast8" in shown <= {"full", "fast8", "balanced8", "attn, up:int8"}
    policies = {"layers.0": "fast8", "*": Policy({"attn", "qkv:int8"})}
    found = plan(encoder(), x, loss=squared, method="manual", policies=policies, costs="analytic")
    assert [layer.label for layer in found.layers] == ["fast8", *["attn, qkv:int8"] * 2]
    assert "fast8" in found.table() and "attn, qkv:int8" in found.table()


def test_seconds_are_of_backward_and_of_packing():
    given = []
    OBSERVERS.append(given.append)
    try:
        FusedRematLayer(32, 4, 160, 0.0, batch_first=True)(torch.randn(2, 8, 32))
    finally:
        OBSERVERS.remove(given.append)
    call, tensors, functions = given[0].call, given[0].tensors, given[0].functions
    example = Example(call, tuple(None if t is None else t.detach() for t in tensors), functions)
    taken = {("forward", "compute up"): 1.0, ("forward", "compute up:int8"): 10.0}
    taken |= {("backward", "compute act from up:int8"): 100.0, ("backward", "backward act"): 1e3}
    options = options_for(example, lambda *_: taken, [("up",), ("up:int8",)])
    assert [option.seconds for option in options] == [1100.0, 1110.0]


def test_steps_that_pack_and_unpack_are_timed():
    found = plan(encoder(), torch.randn(4, 64, 32), loss=squared, options=["full", "fast8"])
    base, fast8 = found.chain.calls[0].options
    assert set(fast8.save) == {"attn", "mid", "qkv:int8", "up:int8"}
    assert base.seconds > 0 and fast8.seconds > 0


def test_fit_takes_it():
    def batch(size):
        return torch.randn(size, 16, 32)

    found = fit(encoder(), batch, "2MiB", most=2, costs="analytic", loss=squared, lossy=True)
    saves = {option.save for option in found.plan.chain.calls[0].options}
    assert found.size == 2 and any(":" in name for save in saves for name in save)


def test_bad_arguments():
    with pytest.raises(TypeError, match="lossy= is True or False, got 'int8'"):
        plan(encoder(), torch.randn(2, 8, 32), lossy="int8")
    with pytest.raises(ValueError, match="unknown format 'int9'"):
        plan(encoder(), torch.randn(2, 8, 32), options=[Policy({"up": "int9"})])
    with pytest.raises(BudgetError, match="the peak of the policies is"):
        convert(model := encoder())
        plan(model, torch.randn(2, 8, 32), budget=1000, method="manual", policies={"*": "fast8"})
