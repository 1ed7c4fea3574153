"""Plans against reality: kept bytes exact, peaks as allocated, budgets kept, nothing disturbed."""

import dataclasses
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from planned_models import (
    CASES,
    WITHIN,
    Mixed,
    X,
    assert_holds,
    budgets,
    example_of,
    given,
    planned,
    squared,
)
from processes import printed
from report_models import Model, TracedLayer, encoder, traced
from torch import nn

from fused_remat import (
    BudgetError,
    FusedRematLayer,
    Plan,
    Policy,
    convert,
    explain,
    memory_report,
    plan,
)
from fused_remat.layers import FusedLayer
from fused_remat.planner import calibrate
from fused_remat.planner.measure import predict_optimizer
from fused_remat.report.allocations import AllocationTrace

pytestmark = pytest.mark.usefixtures("one_machine")


@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_are_exact_and_peaks_hold(case):
    model, args, kwargs, loss = given(case)
    found = [planned(case).within(budget) for budget in budgets(planned(case))]
    for made, budget in zip(found, budgets(planned(case)), strict=True):
        assert made.peak_bytes <= budget
        assert_holds(made, model, args, kwargs, loss)
    if case == "detached":
        assert list(found[0].policies) == ["layers.2", "layers.3"]


@pytest.mark.parametrize("accumulates", [False, True])
def test_gradients_of_a_loss_are_planned_in_either_pass(accumulates):
    """Both hold, the faster one that fits is chosen, and `apply` sets it."""
    model, args, kwargs, loss = given("llama with a fused loss")
    found = plan(model, loss=loss, costs="analytic", accumulates=accumulates, **kwargs)
    late, early = sorted(found._chains, key=lambda chain: chain.grad_in_forward)
    assert early.kept != late.kept and found.other is not None
    for chains in ((late, early), (early, late)):
        fast, slow = (dataclasses.replace(c, seconds=n) for n, c in enumerate(chains, 5))
        best = dataclasses.replace(found, chain=slow, other=fast).within(None)
        assert best.chain == fast and best.other == slow
        assert Plan.from_json(best.to_json()) == best
        if not accumulates:
            assert_holds(best, model, args, kwargs, loss)
        assert best.apply(model).loss_grad_in_forward == fast.grad_in_forward
        where = "forward" if fast.grad_in_forward else "backward"
        assert f"loss: its gradients are computed in {where}" in best.table()
        least = min(best.frontier, key=lambda point: point.peak_bytes)
        assert best.within(least.peak_bytes).peak_bytes <= least.peak_bytes
        with pytest.raises(ValueError, match=f"is .* \\({least.peak_bytes} bytes\\)"):
            best.within(least.peak_bytes - 1)


@pytest.mark.parametrize("method", ["optimal", "greedy", "uniform", "sqrt"])
def test_a_plan_of_any_method_gives_the_gradients_of_every_other(method):
    model, args, _, loss = given("mixed")
    fastest = planned("mixed")
    convert(model)

    def grads():
        torch.manual_seed(3)
        model.zero_grad()
        loss(model(*args)).backward()
        return [p.grad.clone() for p in model.parameters()]

    expected = grads()
    budget = None if method == "sqrt" else fastest.frontier[len(fastest.frontier) // 2].peak_bytes
    fastest.within(budget, method).apply(model)
    assert {layer.policy for layer in model.modules() if isinstance(layer, FusedLayer)} != {"full"}
    assert all(map(torch.equal, grads(), expected))


def test_segments_are_planned_where_memory_is_least_and_hold():
    model, args = encoder(6), (torch.randn(16, 64, 32),)
    fastest = plan(model, *args, loss=squared, costs="analytic")
    least = fastest.within(fastest.frontier[0].peak_bytes)
    assert least.choice.segments
    without = plan(model, *args, loss=squared, costs="analytic", segments=False)
    assert not any(call.linked for call in without.chain.calls)
    assert least.peak_bytes < without.frontier[0].peak_bytes
    assert_holds(least, model, args, {}, squared)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_peak_of_whole_steps_with_an_optimizer(name, accumulates):
    """All of a training loop's allocations, from the second step on, in one trace."""
    torch.manual_seed(0)
    model, x = encoder(3, width=64), torch.randn(4, 32, 64)
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-3)
    options = {"optimizer": optimizer, "loss": squared, "costs": "analytic"}
    fastest = plan(model, x, accumulates=accumulates, **options)
    for budget in (fastest.frontier[0].peak_bytes, fastest.peak_bytes):
        found = fastest.within(budget)
        found.apply(model)
        for _ in range(2):
            optimizer.zero_grad()
            squared(model(x)).backward()
            optimizer.step()
        if not accumulates:
            optimizer.zero_grad()
        with AllocationTrace() as trace:
            squared(model(x)).backward()
            optimizer.step()
        (span,) = trace.spans
        peak = span.peak + found.chain.rests
        assert found.peak_bytes == pytest.approx(peak, rel=WITHIN)
        assert {"parameters", "gradients"} < set(found.parts)
    assert ("optimizer state" in found.chain.resting) == (name == "AdamW")


def test_an_impossible_budget_says_what_the_least_is_and_what_it_is_made_of():
    fastest = planned("pre-norm")
    with pytest.raises(BudgetError, match="no 'optimal' plan has a peak within") as info:
        fastest.within(10 * 1024)
    error = info.value
    assert isinstance(error, ValueError) and error.budget == 10 * 1024
    assert sum(error.parts.values()) == error.least == fastest.within(error.least).peak_bytes
    assert f"({error.least} bytes)" in str(error) and next(iter(error.parts)) in str(error)
    needs = fastest.within(None, "sqrt").peak_bytes
    assert error.least < needs
    with pytest.raises(BudgetError, match="the peak of its segments is") as info:
        fastest.within(needs - 1, "sqrt")
    assert info.value.least == needs


@pytest.mark.parametrize("target", [None, "grad", "main_grad"])
def test_planning_leaves_everything_as_it_was(target):
    """With gradients that blocks accumulate, and without."""
    model, x = Mixed(), torch.randn(2, 16, 32)
    if target:
        convert(model, policy="lean", accumulate_into=target)
    for p in model.parameters():
        p.grad, p.main_grad = torch.ones_like(p), torch.ones_like(p)
    model.head.bias.grad = None
    grads = [(p.grad, p.main_grad) for p in model.parameters()]
    classes, state = [type(m) for m in model.modules()], torch.get_rng_state()
    plan(model, x, costs="analytic", accumulates=True)
    assert [type(m) for m in model.modules()] == classes
    assert {m.policy for m in model.modules() if isinstance(m, FusedLayer)} <= {"lean"}
    for p, (grad, main_grad) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad and p.main_grad is main_grad
        assert (grad is None or (grad == 1).all()) and (main_grad == 1).all()
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_plans_before_and_after_the_first_step_are_equal():
    """Traced layers have their options before they were traced, converted or not."""
    frontiers = []
    for when in ("stock", "converted", "trained"):
        model = traced([1]) if when == "stock" else convert(traced([1]), Policy({"norm1"}))
        if when == "trained":
            model(X).sum().backward()
        found = plan(model, X, loss=squared, costs="analytic")
        frontiers.append([(p.peak_bytes, p.kept_bytes) for p in found.frontier])
        policies = {m.policy for m in model.modules() if isinstance(m, FusedLayer)}
        assert policies == (set() if when == "stock" else {Policy({"norm1"})})
    assert frontiers[0] == frontiers[1] == frontiers[2] and len(frontiers[0]) > 3


@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("method", ["optimal", "greedy", "uniform", "sqrt"])
def test_a_layer_that_runs_under_checkpointing_has_one_option(method):
    found = planned("traced, one checkpointed").within(None, method)
    first, other, last = found.layers
    assert first.label == last.label != other.label == "checkpointed"
    assert other.kept_bytes == X.nbytes and other.reason == "up has hooks"
    assert not (first.reason or other.rebuild_seconds)
    assert "1 checkpointed: up has hooks" in found.table()
    assert Plan.from_json(found.to_json()).table() == found.table()
    assert_holds(found, *given("traced, one checkpointed"))


def test_a_plan_is_read_back_from_its_json(tmp_path):
    fastest = planned("mixed")
    found = fastest.within(budgets(fastest)[1])
    path = tmp_path / "plan.json"
    text = found.to_json(path)
    again = Plan.from_json(path.read_text(encoding="utf-8"))
    assert again == found and again.table() == found.table() and again.to_json() == text
    assert again.within(found.peak_bytes).choice == found.choice
    model = again.apply(given("mixed")[0])
    assert {n: m.policy for n, m in model.named_modules() if n in found.policies} == found.policies
    for text in ("{}", "plan.json"):  # a path is no text
        with pytest.raises(ValueError, match=f"'{text}' is not the JSON text of a Plan"):
            Plan.from_json(text)


def test_applying_to_another_model_raises_and_changes_nothing():
    found = planned("mixed")
    other = convert(encoder(2), policy="lean")
    with pytest.raises(ValueError, match=r"does not have: 'first\.0'"):
        found.apply(other)
    assert [layer.policy for layer in other.layers] == ["lean", "lean"]


def test_manual_takes_patterns_and_segments():
    model, args, kwargs, loss = given("pre-norm")
    policies = {
        "layers.0": "none",
        "layers.1": Policy({"attn"}, segment="first"),
        "layers.[23]": Policy({"attn"}, segment="inner"),
        "*": "full",
    }
    found = plan(model, *args, loss=loss, method="manual", policies=policies, costs="analytic")
    assert found.choice.segments == ((1, 4),)
    assert found.layers[0].label == "none" and found.layers[5].label == "full"
    assert_holds(found, model, args, kwargs, loss)
    with pytest.raises(ValueError, match=r"no pattern of policies= matches 'layers\.1'"):
        plan(model, *args, method="manual", policies={"layers.0": "full"}, costs="analytic")
    how = {"method": "manual", "policies": {"*": "none"}, "costs": "analytic"}
    with pytest.raises(BudgetError, match="the peak of the policies is"):
        plan(model, *args, budget=1000, **how)


def test_measured_and_analytic_costs():
    calibration = calibrate("cpu")
    assert calibration.bandwidth > 0 and calibration.overhead > 0
    found = plan(encoder(1), X, loss=squared, costs=calibration, options=["full", "fast"])
    assert found.costs == "measured" and planned("pre-norm").costs == "analytic"
    base, fast = found.chain.calls[0].options
    assert "qkv" in fast.save and 0 < fast.seconds < base.seconds
    example = example_of(convert(encoder(1).layers[0]), X)
    for seconds in (calibration.measured, calibration.analytic):
        assert min(seconds(example)) > 0 and seconds(example, {"up"})[1] < seconds(example)[1]


class Sine(TracedLayer):
    """A layer whose activation function is replayed."""

    def forward(self, x):
        return x + self.down(self.up(self.norm1(x)).sin())


def test_equal_traced_layers_are_timed_once():
    """They replay by functions of their own, of one program."""
    x = X.clone().requires_grad_()
    found = plan(nn.Sequential(Sine(), Sine(), Sine()), x, loss=squared)
    assert [call.reason for call in found.chain.calls] == [""] * 3
    assert len({call.options for call in found.chain.calls}) == 1


def test_an_activation_function_with_a_parameter_is_planned_and_not_held():
    model = encoder(2, activation=nn.PReLU())
    found = plan(model, X, loss=squared)
    assert [call.reason for call in found.chain.calls] == [""] * 2
    weight = weakref.ref(model.layers[0].activation.weight)
    del model
    gc.collect()
    assert weight() is None


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (torch.optim.AdamW, {}),
        (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.RMSprop, {}),
    ],
)
def test_predicted_optimizer_state_is_what_it_comes_to(make, options):
    model = encoder(1)
    optimizer = make(model.parameters(), **options)
    state, update = predict_optimizer(optimizer)
    assert not optimizer.state
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with AllocationTrace() as trace:
        optimizer.step()
        trace.mark("second")
        optimizer.step()
    first, second = trace.spans
    assert state == first.end
    assert update == pytest.approx(second.peak - second.start, abs=256)


GONE, MOVED = nn.Parameter(torch.ones(())), Policy(offload={"input"})
SCALAR = r"scalar .* of shape \(2, 8, 32\) with requires_grad=True"
HERE = r"offload=\{'input'\}.*with offload=True"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"budget": "six"}, ValueError, "cannot read 'six' as an amount of memory"),
        ({"budget": 1.5}, ValueError, r"in \(0, 1\], got 1.5"),
        ({"method": "best"}, ValueError, "unknown method 'best'; valid: optimal"),
        ({"costs": "guess"}, ValueError, "got 'guess'"),
        ({"method": "manual"}, ValueError, "policies="),
        ({"options": "full"}, TypeError, "list of policies, got 'full'"),
        ({"policies": ["full"]}, TypeError, r"mapping of patterns to policies, got \['full'\]"),
        ({"loss": torch.ones(1)}, TypeError, "loss= must be a function of the output, got tensor"),
        ({"options": ["fastest"]}, ValueError, "unknown policy 'fastest'"),
        ({"lossy": True}, TypeError, "lossy= was removed; plans choose among exact presets"),
        ({"loss": lambda y: y}, ValueError, SCALAR),
        ({"loss": lambda y: GONE * y.detach().sum()}, ValueError, "that the loss depends on them"),
        ({"offload": True}, ValueError, "offload=True on cpu: .* nothing can be moved"),
        ({"options": ["full", MOVED]}, ValueError, HERE),
        ({"method": "manual", "policies": {"*": MOVED}}, ValueError, HERE),
        ({"model": 3}, TypeError, "got int"),
        ({"model": nn.Linear(32, 4)}, ValueError, "no layer to convert"),
        ({"model": encoder(1).requires_grad_(False)}, ValueError, "keeps anything for backward"),
    ],
)
def test_bad_arguments(options, error, match):
    model = options.get("model", encoder(1))
    others = {name: value for name, value in options.items() if name != "model"}
    with pytest.raises(error, match=match):
        plan(model, torch.randn(2, 8, 32), **others)
    if isinstance(model, nn.TransformerEncoder):
        assert type(model.layers[0]) is nn.TransformerEncoderLayer


def test_a_batch_that_is_one_dict():
    """As keyword arguments, unless the model takes a dict."""
    batch, model = {"src": torch.randn(2, 8, 32)}, Model(None, inner=encoder(2))
    for forward in (lambda src: model.inner(src), lambda batch: model.inner(batch["src"])):
        model.forward = forward
        assert plan(model, batch, costs="analytic").peak_bytes > 0
        assert memory_report(model, batch).peak_bytes > 0
    assert explain(convert(model), batch)


def test_nothing_is_logged_of_the_profiler():
    """In a new process: it reads once how much to log."""
    code = """if True:
        import os, sys, torch
        os.dup2(1, 2)
        os.environ.pop("KINETO_LOG_LEVEL", None)
        from fused_remat.report.allocations import measure_allocations
        assert measure_allocations(lambda: torch.zeros(256)).net == 1024
        assert "KINETO_LOG_LEVEL" not in os.environ
    """
    assert printed("-c", code) == ""


def test_plans_in_two_threads_wait_for_each_other():
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(plan, encoder(2), X, costs="analytic") for _ in range(2)]
        peaks = {run.result().peak_bytes for run in runs}
    assert peaks == {plan(encoder(2), X, costs="analytic").peak_bytes}


def test_layers_that_run_now_and_then_raise():
    """LayerDrop: another number of layers in every step."""

    def forward(self, x):
        self.steps += 1
        for _ in range(self.steps):
            x = self.layer(x)
        return x

    model = Model(forward, layer=FusedRematLayer(32, 4, 64, 0.0, batch_first=True), steps=0)
    with pytest.raises(ValueError, match="'layer' was not called as often in one step"):
        plan(model, torch.randn(2, 8, 32), costs="analytic")
