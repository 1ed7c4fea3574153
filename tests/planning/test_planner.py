"""Plans against reality: kept bytes exact, peaks as allocated, budgets kept, nothing disturbed."""

import dataclasses
import functools
import importlib
import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fused_remat
from fused_remat import BudgetError, FusedRematLayer, Plan, Policy, convert, fit, plan, revert
from fused_remat.layers import FusedLayer
from fused_remat.planner import calibrate
from fused_remat.planner import chain as chains
from fused_remat.planner.measure import predict_optimizer
from fused_remat.report.allocations import AllocationTrace
from fused_remat.report.step import run_step

WITHIN = 0.03  # of the peak; what the planner promises


class Mixed(nn.Module):
    """Two kinds of layers of two widths, with what cannot be converted in between."""

    def __init__(self, dropout=0.1):
        super().__init__()
        post = {"dropout": dropout, "batch_first": True}
        self.first = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 128, **post) for _ in range(3))
        self.between = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64))
        pre = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.second = nn.ModuleList(nn.TransformerEncoderLayer(64, 4, 200, **pre) for _ in range(3))
        self.head = nn.Linear(64, 50)

    def forward(self, x):
        for layer in self.first:
            x = layer(x)
        x = self.between(x)
        for i, layer in enumerate(self.second):
            x = layer(x) * 1.5 if i == 1 else layer(x)
        return self.head(x)


class Shared(nn.Module):
    """A layer called three times, another twice with something in between."""

    def __init__(self):
        super().__init__()
        options = {"dropout": 0.0, "batch_first": True}
        self.often = FusedRematLayer(32, 4, 128, **options)
        self.twice = FusedRematLayer(32, 4, 128, norm_first=True, **options)

    def forward(self, x):
        for _ in range(3):
            x = self.often(x)
        return self.twice(self.twice(x).relu())


class PartlyCheckpointed(nn.Module):
    """One layer under a checkpoint of the user's own, which no plan may touch."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            FusedRematLayer(32, 4, 128, 0.0, batch_first=True) for _ in range(4)
        )

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = checkpoint(layer, x, use_reentrant=False) if i == 1 else layer(x)
        return x


def encoder(layers=6, norm_first=True, width=32, dropout=0.0):
    layer = nn.TransformerEncoderLayer(
        width, 4, 4 * width, dropout, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def llama():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return transformers.LlamaForCausalLM(config).train()


def squared(output):
    return output.square().mean()


def hf_loss(output):
    return output.loss


def tokens():
    return torch.randint(64, (4, 64))


CASES = {
    "pre-norm": (encoder, lambda: (torch.randn(4, 64, 32),), squared),
    "post-norm dropout": (
        lambda: encoder(norm_first=False, dropout=0.1),
        lambda: (torch.randn(4, 64, 32),),
        squared,
    ),
    "mixed": (Mixed, lambda: (torch.randn(4, 64, 32),), squared),
    "encoder-decoder": (
        lambda: nn.Transformer(32, 4, 2, 2, 128, 0.0, batch_first=True),
        lambda: (torch.randn(4, 64, 32), torch.randn(4, 48, 32)),
        squared,
    ),
    "shared": (Shared, lambda: (torch.randn(4, 64, 32),), squared),
    "checkpointed": (PartlyCheckpointed, lambda: (torch.randn(4, 64, 32),), squared),
    "llama": (llama, lambda: {"input_ids": (t := tokens()), "labels": t}, hf_loss),
}


def given(case):
    torch.manual_seed(0)
    build, inputs, loss = CASES[case]
    made = inputs()
    args, kwargs = ((), made) if isinstance(made, dict) else (made, {})
    return build(), args, kwargs, loss


@functools.cache
def planned(case):
    """The fastest plan, of a model and inputs like those that are given."""
    model, args, kwargs, loss = given(case)
    return plan(model, *args, loss=loss, costs="analytic", **kwargs)


def budgets(fastest):
    least, most = fastest.frontier[0].peak_bytes, fastest.peak_bytes
    return [least + (most - least) * i // 3 for i in range(4)]


def measured(model, args, kwargs, loss, accumulates=False):
    """(peak, kept) of a step, above what rests."""
    step = run_step(model, [], args, kwargs, loss, accumulates)
    return step.peak, sum(saved.nbytes for saved in step.saved)


@pytest.mark.parametrize("case", CASES)
def test_kept_bytes_are_exact_and_peaks_hold(case):
    model, args, kwargs, loss = given(case)
    fastest = planned(case)
    for budget in budgets(fastest):
        found = fastest.within(budget)
        assert found.peak_bytes <= budget
        found.apply(model)
        peak, kept = measured(model, args, kwargs, loss)
        assert found.kept_bytes == kept
        peak += found.chain.rests
        if found.timeline()[-1].peak < found.peak_bytes:  # not the optimizer's step
            assert abs(found.peak_bytes - peak) <= WITHIN * peak


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
    for got, want in zip(grads(), expected, strict=True):
        assert torch.equal(got, want)


def test_segments_are_planned_where_memory_is_least_and_hold():
    torch.manual_seed(0)
    model, args, loss = encoder(), (torch.randn(16, 64, 32),), squared
    fastest = plan(model, *args, loss=loss, costs="analytic")
    least = fastest.within(fastest.frontier[0].peak_bytes)
    assert least.choice.segments
    without = plan(model, *args, loss=loss, costs="analytic", segments=False)
    assert not any(call.linked for call in without.chain.calls)
    assert least.peak_bytes < without.frontier[0].peak_bytes
    least.apply(model)
    peak, _ = measured(model, args, {}, loss)
    assert least.peak_bytes == pytest.approx(peak + least.chain.rests, rel=WITHIN)


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_the_peak_of_whole_steps_with_an_optimizer(name, accumulates):
    """All of a training loop's allocations, from the second step on, in one trace."""
    torch.manual_seed(0)
    model, x = encoder(layers=3, width=64), torch.randn(4, 32, 64)
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


def test_larger_budgets_are_never_slower_and_smaller_ones_never_take_more():
    fastest = planned("mixed")
    low, high = fastest.frontier[0].peak_bytes, fastest.peak_bytes
    found = [fastest.within(low + (high - low) * i // 40) for i in range(41)]
    for less, more in itertools.pairwise(found):
        assert more.seconds <= less.seconds
        assert more.peak_bytes >= less.peak_bytes
    assert found[-1].seconds == fastest.seconds
    assert [p.peak_bytes for p in fastest.frontier] == sorted(
        p.peak_bytes for p in fastest.frontier
    )


@pytest.mark.parametrize("case", ["pre-norm", "mixed", "llama"])
def test_no_method_is_predicted_faster_at_equal_peak(case):
    fastest = planned(case)
    faster = 0
    for method in ("uniform", "sqrt", "greedy"):
        peaks = budgets(fastest) if method != "sqrt" else [None]
        for budget in peaks:
            try:
                other = fastest.within(budget, method)
            except BudgetError:
                continue
            ours = fastest.within(other.peak_bytes)
            assert ours.seconds <= other.seconds
            faster += ours.seconds < other.seconds
    assert faster


def test_an_impossible_budget_says_what_the_least_is_and_what_it_is_made_of():
    model, args, _, loss = given("pre-norm")
    with pytest.raises(BudgetError, match="no 'optimal' plan has a peak within") as info:
        plan(model, *args, loss=loss, budget="10KiB", costs="analytic")
    error = info.value
    assert isinstance(error, ValueError)
    assert error.budget == 10 * 1024
    assert sum(error.parts.values()) == error.least
    assert f"({error.least} bytes)" in str(error)
    assert next(iter(error.parts)) in str(error)
    least = plan(model, *args, loss=loss, budget=error.least, costs="analytic")
    assert least.peak_bytes == error.least


def test_sqrt_says_what_its_own_segments_need():
    model, args, _, loss = given("pre-norm")
    fastest = plan(model, *args, loss=loss, costs="analytic")
    needs = fastest.within(None, "sqrt").peak_bytes
    assert fastest.frontier[0].peak_bytes < needs
    with pytest.raises(BudgetError, match="the peak of its segments is") as info:
        fastest.within(needs - 1, "sqrt")
    assert info.value.least == needs


def test_planning_leaves_everything_as_it_was():
    torch.manual_seed(0)
    model, x = Mixed(), torch.randn(2, 16, 32)
    classes = [type(m) for m in model.modules()]
    model.head.weight.grad = torch.ones_like(model.head.weight)
    grad, state = model.head.weight.grad, torch.get_rng_state()
    plan(model, x, costs="analytic", accumulates=True)
    assert [type(m) for m in model.modules()] == classes
    assert model.head.weight.grad is grad and (grad == 1).all()
    assert model.head.bias.grad is None
    assert torch.equal(torch.get_rng_state(), state)
    convert(model, policy="lean")
    plan(model, x, costs="analytic")
    assert {m.policy for m in model.modules() if isinstance(m, FusedLayer)} == {"lean"}


def test_a_plan_is_read_back_from_its_json(tmp_path):
    found = planned("mixed")
    found = found.within(found.frontier[1].peak_bytes)
    path = tmp_path / "plan.json"
    text = found.to_json(path)
    again = Plan.from_json(path.read_text(encoding="utf-8"))
    assert again == found and again.table() == found.table() and again.to_json() == text
    assert again.within(found.peak_bytes).choice == found.choice
    model = again.apply(given("mixed")[0])
    assert {n: m.policy for n, m in model.named_modules() if n in found.policies} == found.policies
    with pytest.raises(ValueError, match="is not the JSON of a plan"):
        Plan.from_json("{}")


def test_applying_to_another_model_raises_and_changes_nothing():
    found = planned("mixed")
    other = convert(encoder(layers=2), policy="lean")
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
    found.apply(model)
    peak, kept = measured(model, args, kwargs, loss)
    assert found.kept_bytes == kept
    assert found.peak_bytes == pytest.approx(peak + found.chain.rests, rel=WITHIN)
    with pytest.raises(BudgetError, match="the peak of the policies is"):
        plan(model, *args, method="manual", policies={"*": "none"}, budget=1000, costs="analytic")
    with pytest.raises(ValueError, match=r"no pattern of policies= matches 'layers\.1'"):
        plan(model, *args, method="manual", policies={"layers.0": "full"}, costs="analytic")


def test_options_restrict_the_choice():
    model, args, _, loss = given("pre-norm")
    found = plan(model, *args, loss=loss, options=["full", "lean", "fast"], costs="analytic")
    assert {layer.label for layer in found.layers} <= {"full", "lean", "fast"}
    assert len(found.chain.calls[0].options) == 3


def test_ceilings_are_bytes_and_seconds(monkeypatch):
    """Of 2**24 float32 numbers, read and written, and of 100 operations, which took 2 s each."""
    module = importlib.import_module("fused_remat.planner.calibration")
    monkeypatch.setattr(module, "_CALIBRATIONS", {})
    monkeypatch.setattr(module, "_best", lambda *_: 2.0)
    found = calibrate("cpu")
    assert (found.bandwidth, found.overhead) == (2 * 4 * 2**24 / 2.0, 0.02)


def test_measured_and_analytic_costs_of_every_step():
    model, args, _, loss = given("pre-norm")
    calibration = calibrate("cpu")
    assert calibration.bandwidth > 0 and calibration.overhead > 0
    found = plan(model, *args, loss=loss, costs=calibration)
    assert found.costs == "measured"
    steps = {(cost.which, cost.step) for cost in found.steps}
    assert {
        ("forward", "compute qkv"),
        ("backward", "compute up"),
        ("backward", "backward up"),
    } <= (steps)
    assert all(cost.measured > 0 and cost.analytic > 0 for cost in found.steps)
    untimed = plan(model, *args, loss=loss, costs="analytic")
    assert {cost.measured for cost in untimed.steps} == {None}


def test_fit_finds_the_largest_batch_that_fits():
    torch.manual_seed(0)
    model = encoder(layers=3)

    def batch(size):
        return torch.randn(size, 16, 32)

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

    def batch(size):
        return torch.randn(size, 16, 32)

    monkeypatch.setattr(module, "plan", out_of_memory_once)
    found = fit(encoder(layers=1), batch, "1GiB", most=2, costs="analytic", loss=squared)
    assert asked == [2, 1] and found.size == 1 and set(found.tried) == {1, 2}
    with pytest.raises(torch.OutOfMemoryError):
        asked.clear()
        fit(encoder(layers=1), batch, "1GiB", most=1, costs="analytic", loss=squared)


def test_fit_measures_all_options_of_the_size_that_does_not_fit_alone(monkeypatch):
    module, measured = importlib.import_module("fused_remat.planner.fit"), []
    measure = module.measure_chain

    def seen(model, args, kwargs, request, *rest):
        measured.append((len(args[0]), request.options is None))
        return measure(model, args, kwargs, request, *rest)

    monkeypatch.setattr(module, "measure_chain", seen)
    model = encoder(layers=2)
    found = fit(model, lambda size: torch.randn(size, 16, 32), "600KiB", costs="analytic")
    assert next(size for size, all_options in measured if all_options) > 1
    assert sorted(found.tried) == sorted({size for size, _ in measured})
    assert len(measured) == len(set(measured))


def test_fit_has_no_other_arguments():
    with pytest.raises(TypeError, match="fit has no argument 'method'"):
        fit(encoder(layers=1), lambda size: torch.randn(size, 16, 32), "1GiB", method="greedy")


def test_fit_stops_where_batches_do_not_grow():
    x = torch.randn(8, 16, 32)
    with pytest.raises(ValueError, match=r"is no larger than make_batch\(8\), which fits"):
        fit(encoder(layers=1), lambda size: x[:size], "1GiB", costs="analytic")


def test_fit_finds_the_longest_sequence_that_fits():
    model = encoder(layers=2)
    found = fit(model, lambda s: (torch.randn(1, s, 32),), "600KiB", multiple=8, costs="analytic")
    assert found.size % 8 == 0 and found.size >= 64
    assert all(n % 8 == 0 for n in found.tried)


def test_predicted_optimizer_state_is_what_it_comes_to():
    model = encoder(layers=1)
    for make in (
        lambda p: torch.optim.AdamW(p),
        lambda p: torch.optim.AdamW(p, foreach=True, amsgrad=True),
        lambda p: torch.optim.SGD(p, momentum=0.9),
        lambda p: torch.optim.RMSprop(p),
    ):
        optimizer = make(model.parameters())
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


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"budget": "six"}, ValueError, "cannot read 'six' as an amount of memory"),
        ({"budget": 1.5}, ValueError, r"in \(0, 1\], got 1.5"),
        ({"budget": 0}, ValueError, "at least 1 byte and .* got 0"),
        ({"budget": 10**30}, ValueError, r"less than 2\*\*63 bytes, got 1000"),
        ({"budget": True}, TypeError, "got True"),
        ({"budget": [1]}, TypeError, r"got \[1\]"),
        ({"method": "best"}, ValueError, "unknown method 'best'; valid: optimal"),
        ({"costs": "guess"}, ValueError, "got 'guess'"),
        ({"method": "manual"}, ValueError, "policies="),
        ({"policies": {"*": "full"}}, ValueError, "policies="),
        ({"options": "full"}, TypeError, "list of policies, got 'full'"),
        ({"options": 2.0}, TypeError, "list of policies, got 2.0"),
        ({"loss": torch.ones(1)}, TypeError, "function of the model's output, got Tensor"),
        ({"optimizer": "adamw"}, TypeError, "got str"),
        ({"options": ["fastest"]}, ValueError, "unknown policy 'fastest'"),
    ],
)
def test_bad_arguments(options, error, match):
    with pytest.raises(error, match=match):
        plan(encoder(layers=1), torch.randn(2, 8, 32), **options)


def test_models_that_cannot_be_planned():
    with pytest.raises(TypeError, match="got int"):
        plan(3, torch.randn(2, 8, 32))
    with pytest.raises(ValueError, match="no layer to convert"):
        plan(nn.Linear(4, 4), torch.randn(2, 4))
    frozen = encoder(layers=1).requires_grad_(False)
    with pytest.raises(ValueError, match="keeps anything for backward"):
        plan(frozen, torch.randn(2, 8, 32))
    assert type(frozen.layers[0]) is nn.TransformerEncoderLayer


def test_layers_with_adapters_keep_names_that_their_policies_take():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    kwargs = {"input_ids": (t := tokens()), "labels": t}
    found = plan(model, loss=hf_loss, costs="analytic", **kwargs)
    for choice in (found, found.within(found.frontier[0].peak_bytes)):
        choice.apply(model)
        assert measured(model, (), kwargs, hf_loss)[1] == choice.kept_bytes


def test_layers_that_the_loss_does_not_depend_on_are_not_planned():
    class Stopped(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = encoder(layers=4).layers

        def forward(self, x):
            x = self.layers[1](self.layers[0](x)).detach()
            return self.layers[3](self.layers[2](x))

    model, x = Stopped(), torch.randn(4, 64, 32)
    found = plan(model, x, loss=squared, costs="analytic")
    assert list(found.policies) == ["layers.2", "layers.3"]
    peak, kept = measured(found.apply(model), (x,), {}, squared)
    assert found.kept_bytes == kept
    assert found.peak_bytes == pytest.approx(peak + found.chain.rests, rel=WITHIN)
    gone = nn.Parameter(torch.ones(()))
    with pytest.raises(ValueError, match="that the loss depends on them"):
        plan(encoder(layers=1), x, loss=lambda y: gone * y.detach().sum(), costs="analytic")


@pytest.mark.parametrize("target", ["grad", "main_grad"])
def test_gradients_that_blocks_accumulate_are_as_before(target):
    model, x = convert(encoder(), accumulate_into=target), torch.randn(4, 64, 32)
    for p in model.parameters():
        p.grad, p.main_grad = torch.ones_like(p), torch.ones_like(p)
    grads = [(p.grad, p.main_grad) for p in model.parameters()]
    plan(model, x, loss=squared, accumulates=True, costs="analytic")
    for p, (grad, main_grad) in zip(model.parameters(), grads, strict=True):
        assert p.grad is grad and p.main_grad is main_grad
        assert (grad == 1).all() and (main_grad == 1).all()


def test_plans_in_two_threads_wait_for_each_other():
    x = torch.randn(4, 64, 32)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(plan, encoder(layers=2), x, costs="analytic") for _ in range(2)]
        first, second = (run.result() for run in runs)
    assert first.peak_bytes == second.peak_bytes == plan(encoder(2), x, costs="analytic").peak_bytes


@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [
        (lambda y: y, ValueError, r"scalar .* of shape \(2, 8, 32\) with requires_grad=True"),
        (lambda y: y.detach().sum(), ValueError, "with requires_grad=False"),
        (lambda y: 1.0, TypeError, "got float"),
    ],
)
def test_losses_that_are_none(loss, error, match):
    with pytest.raises(error, match=match):
        plan(encoder(layers=1), torch.randn(2, 8, 32), loss=loss)


class Dropping(nn.Module):
    """LayerDrop: another number of layers in every step."""

    def __init__(self):
        super().__init__()
        self.layer = FusedRematLayer(32, 4, 64, 0.0, batch_first=True)
        self.steps = 0

    def forward(self, x):
        self.steps += 1
        for _ in range(self.steps):
            x = self.layer(x)
        return x


def test_layers_that_run_now_and_then_raise():
    with pytest.raises(ValueError, match="'layer' was not called as often in one step"):
        plan(Dropping(), torch.randn(2, 8, 32), costs="analytic")


def test_public_names():
    for name in ("plan", "Plan", "fit", "calibrate", "BudgetError"):
        assert name in fused_remat.__all__
    assert dataclasses.is_dataclass(Plan)
    assert revert(convert(encoder(layers=1)))
    assert chains.Choice((0,)).segments == ()
