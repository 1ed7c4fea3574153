"""`plan`: from a model and a budget to a policy for every layer."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fused_remat.autograd.offload import transfer_for
from fused_remat.convert import convert, revert
from fused_remat.layers import FusedLayer
from fused_remat.planner.calibration import Calibration, Example, HostLink, StepCost, calibrate
from fused_remat.planner.chain import Call, Chain, Option
from fused_remat.planner.measure import MeasuredStep, device_of, measure_step
from fused_remat.planner.options import (
    Budget,
    Costs,
    bytes_of,
    forward_seconds,
    kept_by_name,
    options_for,
    options_of,
    predict_optimizer,
    state_bytes,
    with_offload,
)
from fused_remat.planner.plan import Plan
from fused_remat.planner.solve import METHODS, Policies, choose, policy_for
from fused_remat.policies import Policy

#: Held while a model is measured: who observes blocks, and times them, does so for all threads.
_MEASURING = threading.RLock()


def plan(
    model: nn.Module,
    *inputs: Any,
    budget: Budget | None = None,
    method: str = "optimal",
    costs: str | Calibration = "measured",
    policies: Policies | None = None,
    optimizer: Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    accumulates: bool = False,
    segments: bool = True,
    options: Sequence[str | Policy] | None = None,
    lossy: bool = False,
    offload: bool = False,
    **kwargs: Any,
) -> Plan:
    """Choose what every layer keeps, so that a training step is fastest within a memory budget.

    Runs `model(*inputs, **kwargs)` and its backward a few times, every layer keeping its input
    alone, and each kind of layer by itself, once for every option; the rest is computed. Layers are
    the fused ones; a model without any is converted for the time of the call. Everything else in it
    is measured as it is. Policies, random state, buffers and `.grad` are afterwards as before.

    Args:
        model, inputs, kwargs: a training step's, in training mode; at the batch to be trained with.
        budget: what all of the step may take at its peak, parameters and optimizer included: text
            ("6GiB"), bytes (int), or a fraction (float) of the device's memory. None: no limit.
        method: "optimal": the fastest there is (exact, over the options below and all segments);
            "greedy": the change that saves most time per byte, again and again; "uniform": every
            k-th layer keeps its input alone, the others all; "sqrt": segments of √n layers (Chen
            et al. 2016); "manual": `policies`.
        costs: "measured": each step of a layer's graph is timed; "analytic": FLOPs and bytes over
            the device's ceilings; or what `calibrate` returned.
        policies: for "manual", shell patterns of layer names to policies; the first that matches.
        optimizer: counts with its state, and what its step takes. None: none.
        loss: of the model's output, for backward; by default the sum of the output's floats.
        accumulates: gradients are there from the start (gradient accumulation); else they are None
            at the start (`zero_grad()`).
        segments: whether runs of layers may keep only the first's input ("optimal" and "greedy").
        options: the policies to choose from; by default all sets of names that no other beats in
            both bytes and time (of a block with more than ten names: of the ten whose steps have
            most FLOPs, and the presets). Those given may have lossy formats.
        lossy: whether the default options have sets with names in 8 bits besides: what only
            attention and activations read, as in the presets "fast8" and "balanced8". Gradients are
            then those of rounded values.
        offload: whether layers may keep their input, or all they keep, in the host's memory; on
            CUDA devices alone. Copies cost what the layer beside them does not hide, at the
            bandwidth measured. Where a layer offloads, room is set aside for the copies of two;
            segments do not.

    Shapes, dtypes: the model's own. Units: bytes, seconds.
    Raises: BudgetError (a ValueError) if the method cannot stay within the budget, with the least
        possible peak and what it is made of; ValueError or TypeError for an argument that is none
        of the above, a model without layers to convert, in which no layer keeps anything (no
        gradients are wanted), or that is divided among ranks; NotImplementedError on devices other
        than CPU and CUDA.
    Source: Chen et al. 2016 (segments); the optimum is dynamic programming over the layers, after
        Herrmann et al. 2019 (Rotor) and Jain et al. 2020 (Checkmate).

    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, num_layers=4, enable_nested_tensor=False)
    >>> x = torch.randn(2, 16, 32)
    >>> fastest = plan(model, x)
    >>> tight = fastest.within(fastest.peak_bytes - 40_000)
    >>> tight.peak_bytes <= fastest.peak_bytes - 40_000 and tight.seconds >= fastest.seconds
    True
    >>> _ = tight.apply(model)  # converts it, too
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"plan takes an nn.Module, got {type(model).__name__}")
    _check(method, costs, policies)
    _check_types(optimizer, loss, options, lossy)
    device = device_of(model, [inputs, kwargs])
    _check_offload(offload, device, options, policies)
    limit = None if budget is None else bytes_of(budget, device)
    chain, steps = measure_chain(
        model, inputs, kwargs, costs, optimizer, loss, accumulates, segments, options, policies,
        lossy=lossy, offload=offload,
    )  # fmt: skip
    choice = choose(chain, limit, method, policies or {})
    shown = costs if isinstance(costs, str) else "measured"
    return Plan(type(model).__name__, str(device), method, shown, limit, chain, choice, steps)


def _check(method: str, costs: str | Calibration, policies: Policies | None) -> None:
    methods = (*METHODS, "manual")
    if method not in methods:
        raise ValueError(f"unknown method {method!r}; valid: {', '.join(methods)}")
    if not isinstance(costs, Calibration) and costs not in ("measured", "analytic"):
        raise ValueError(f"costs are 'measured', 'analytic' or a Calibration, got {costs!r}")
    if (method == "manual") != (policies is not None):
        raise ValueError("policies= are for method='manual', which needs them")


def _check_types(optimizer: Any, loss: Any, options: Any, lossy: Any) -> None:
    """These are plan's, also where the model has an argument of the name."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise TypeError(f"optimizer= is a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if loss is not None and not callable(loss):
        raise TypeError(f"loss= is a function of the model's output, got {type(loss).__name__}")
    if options is not None and (isinstance(options, str) or not isinstance(options, Sequence)):
        raise TypeError(f"options= is a list of policies, got {options!r}")
    if not isinstance(lossy, bool):
        raise TypeError(f"lossy= is True or False, got {lossy!r}")


def _check_offload(offload: Any, device: torch.device, options: Any, policies: Any) -> None:
    """It is asked for by the argument alone, where there is something to gain."""
    if not isinstance(offload, bool):
        raise TypeError(f"offload= is True or False, got {offload!r}")
    if offload and transfer_for(device) is None:
        raise ValueError(
            f"offload=True on {device}: nothing moves there, since what is kept is in the host's "
            "memory already; plan without it"
        )
    for policy in (*(options or ()), *(policies or {}).values()):
        if isinstance(policy, Policy) and policy.offload:
            raise ValueError(f"{policy!r}: a plan offloads by offload=True, not by given policies")


def measure_chain(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    costs: str | Calibration = "measured",
    optimizer: Optimizer | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    accumulates: bool = False,
    segments: bool = True,
    options: Sequence[str | Policy] | None = None,
    policies: Policies | None = None,
    timed: bool = True,
    lossy: bool = False,
    offload: bool = False,
    update: tuple[int, int] | None = None,
) -> tuple[Chain, tuple[StepCost, ...]]:
    """The numbers that methods choose from, and what steps cost; arguments as of `plan`.

    Args:
        update: what `predict_optimizer` says of the optimizer, if it was asked before.
    Raises: as `plan`.
    """
    device = device_of(model, [inputs, kwargs])
    cuda = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_MEASURING)
        layers = stack.enter_context(_converted(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.random.fork_rng(cuda))
        if any(layer._tensor_parallel is not None for layer in layers.values()):
            raise ValueError(
                f"{type(model).__name__} is divided among ranks: steps are timed on one, which "
                "would wait for the others; see `python -m fused_remat scale`"
            )
        step = measure_step(model, layers, inputs, kwargs, loss, accumulates, timed)
        if not step.calls:
            raise ValueError(
                f"no fused layer of {type(model).__name__} keeps anything for backward: do its "
                "parameters require gradients, does the loss depend on them, is it not compiled "
                "yet (compile it after planning), and does no checkpoint stand around the layers?"
            )
        calibration = costs if isinstance(costs, Calibration) else calibrate(device)
        by = calibration.analytic if costs == "analytic" else calibration.measured
        calls = tuple(_calls(step, by, segments, options, policies, lossy))
        if offload:
            calls = tuple(_offloading(step, calls, calibration.host_link()))
        firsts = {call.example.key: call for call in reversed(step.calls)}
        steps = [
            cost
            for call in reversed(firsts.values())
            for cost in calibration.compare(call.layer, call.example, timed=costs != "analytic")
        ]
    if update is None:
        update = (0, 0) if optimizer is None else predict_optimizer(optimizer)
    state, temporary = update
    made = 0 if accumulates else max((m.gradients for m in step.moments), default=0)
    resting = step.resting | ({"optimizer state": state} if state else {})
    if optimizer is not None and "others" in resting:  # the state that is there already
        there = state_bytes(optimizer)
        resting["others"] = max(0, resting["others"] - there)
    chain = Chain(calls, step.moments, resting, step.seconds, made + temporary, step.kept)
    return chain, tuple(steps)


@contextlib.contextmanager
def _converted(model: nn.Module) -> Iterator[dict[str, FusedLayer]]:
    """The fused layers of a model, converted if there are none."""
    ours = not any(isinstance(m, FusedLayer) for m in model.modules())
    if ours:
        convert(model)
    try:
        yield {n: m for n, m in model.named_modules() if isinstance(m, FusedLayer)}
    finally:
        if ours:
            revert(model)


def _calls(
    step: MeasuredStep,
    costs: Costs,
    segments: bool,
    options: Sequence[str | Policy] | None,
    policies: Policies | None,
    lossy: bool,
) -> Iterator[Call]:
    tables = _tables(step, costs, options, policies, lossy)
    known: dict[Any, tuple[float, int]] = {}  # of equal calls: seconds, bytes of the input
    for call in step.calls:
        key, example = call.example.key, call.example
        if key not in known:
            kept = kept_by_name(example, ()).get("input", 0)
            known[key] = forward_seconds(example, costs), kept
        seconds, nbytes = known[key]
        linked = call.follows and segments and nbytes > 0
        yield Call(call.layer, call.kind, tables[call.layer, key], seconds, nbytes, linked)


def _offloading(step: MeasuredStep, calls: Sequence[Call], link: HostLink) -> Iterator[Call]:
    """The calls, with options that offload; not of layers that are called in several ways."""
    keys: dict[str, set[Any]] = {}
    for measured in step.calls:
        keys.setdefault(measured.layer, set()).add(measured.example.key)
    known: dict[Any, tuple[Option, ...]] = {}
    for measured, call in zip(step.calls, calls, strict=True):
        if len(keys[call.layer]) > 1:
            yield call
            continue
        key = (measured.example.key, call.options)
        if key not in known:
            given = (measured.example, call.options, link, call.forward_seconds)
            known[key] = with_offload(*given)
        yield dataclasses.replace(call, options=known[key])


def _tables(
    step: MeasuredStep,
    costs: Costs,
    options: Sequence[str | Policy] | None,
    policies: Policies | None,
    lossy: bool,
) -> dict[tuple[str, Any], tuple[Option, ...]]:
    """The options of each layer's calls, worked out once for equal calls."""
    made: dict[Any, tuple[Option, ...]] = {}
    found: dict[tuple[str, Any], tuple[Option, ...]] = {}
    examples: dict[str, dict[Any, Example]] = {}
    names = {call.layer: call.names for call in step.calls}
    for call in step.calls:
        examples.setdefault(call.layer, {})[call.example.key] = call.example
    for layer, mine in examples.items():
        wanted = options
        if policies is not None:
            wanted = [_without_segment(policy_for(layer, policies))]
        for key, example in mine.items():
            of = (key, None if wanted is None else tuple(wanted))
            if of not in made:
                made[of] = options_of(example, costs, names[layer], wanted, lossy)
            found[layer, key] = made[of]
        if len(mine) > 1:  # called in several ways: all have the options of any
            saves = dict.fromkeys(o.save for key in mine for o in found[layer, key])
            for key, example in mine.items():
                found[layer, key] = options_for(example, costs, saves)
    return found


def _without_segment(policy: str | Policy) -> str | Policy:
    return policy if isinstance(policy, str) else Policy(policy.save)
