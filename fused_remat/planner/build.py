"""`plan`: from a model and a memory budget to a policy for every layer."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fused_remat.autograd.offload import TRANSFERS
from fused_remat.convert import convert, fused_layers, revert
from fused_remat.graph.graph import sizes
from fused_remat.huggingface.head import HuggingFaceHead
from fused_remat.layers import FusedLayer
from fused_remat.layers.fallback import attributes_as
from fused_remat.layers.record import STATES
from fused_remat.planner.calibration import Calibration, Example, calibrate
from fused_remat.planner.chain import Chain, LayerOptions, Option
from fused_remat.planner.measure import MeasuredStep, measure_step, predict_optimizer, state_bytes
from fused_remat.planner.options import (
    Costs,
    costed_options,
    kept_by_name,
    options_for,
    with_offload,
)
from fused_remat.planner.plan import Plan
from fused_remat.planner.solve import METHODS, Policies, choose_chain, policy_for
from fused_remat.policies import Policy, long_attentions
from fused_remat.report.step import arguments_of, device_of
from fused_remat.report.units import Budget, bytes_of

#: Held while a model is measured: its observers and timers would see blocks of other threads.
_MEASURING = threading.RLock()


@dataclass(frozen=True)
class Request:
    """Arguments of `plan` that decide what it measures and may choose from, by their names."""

    costs: str | Calibration = "measured"
    policies: Policies | None = None
    optimizer: Optimizer | None = None
    loss: Callable[[Any], Tensor] | None = None
    accumulates: bool = False
    segments: bool = True
    options: Sequence[str | Policy] | None = None
    offload: bool = False

    def __post_init__(self) -> None:
        """Raise a TypeError or ValueError for a wrong argument: the model may have one so named."""
        costs, options = self.costs, self.options
        if not isinstance(costs, Calibration) and costs not in ("measured", "analytic"):
            raise ValueError(f"costs= is 'measured', 'analytic' or a Calibration, got {costs!r}")
        checks: tuple[tuple[str, object, Any, str], ...] = (
            ("optimizer", self.optimizer, Optimizer | None, "torch Optimizer"),
            ("loss", self.loss, Callable | None, "function of the output"),
            ("policies", self.policies, Mapping | None, "mapping of patterns to policies"),
            ("options", options, list | tuple | None, "list of policies"),
            ("offload", self.offload, bool, "bool"),
        )
        for name, value, valid, what in checks:
            if not isinstance(value, valid):
                raise TypeError(f"{name}= must be a {what}, got {value!r}")
        for policy in (*(options or ()), *(self.policies or {}).values()):
            if isinstance(policy, Policy) and policy.offload:
                raise ValueError(
                    f"{policy!r}: a plan offloads with offload=True, not with policies that do"
                )

    def check(self, method: str, device: torch.device) -> None:
        """Raise a ValueError for an unknown method, or an argument that does not go with it."""
        methods = (*METHODS, "manual")
        if method not in methods:
            raise ValueError(f"unknown method {method!r}; valid: {', '.join(methods)}")
        if (method == "manual") != (self.policies is not None):
            raise ValueError(
                f"method='manual' needs policies=, and no other method takes them; got "
                f"method={method!r}, policies={self.policies!r}"
            )
        if self.offload and device.type not in TRANSFERS:
            raise ValueError(
                f"offload=True on {device}: what is kept is in the host's memory already, so "
                "nothing can be moved; plan without offload"
            )


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
    offload: bool = False,
    **kwargs: Any,
) -> Plan:
    """Choose what every layer keeps, so that a training step is fastest within a memory budget.

    Measures a few forwards and backwards of `model(*inputs, **kwargs)` with every layer keeping
    its input alone, and each kind of layer by itself with every option; computes the rest. The
    layers are the fused ones; a model without any is converted during the call. A layer that does
    not run as a block, but under checkpointing or plainly, has this as its only option; one that is
    called more than once in a step keeps its inputs alone, except with `policies`. Everything else
    in the model is measured as it is, except for the loss of a model that `convert` converted with
    `loss`: steps with its gradients in forward and in backward are measured, and the faster one
    that fits is chosen. Policies, random state, buffers and `.grad` are restored, and
    no training call is counted.

    Args:
        model, inputs, kwargs: those of a training step, in training mode, at the batch size of the
            training; the arguments may be one dict of keyword arguments.
        budget: limit on the peak of the step, including parameters and optimizer: text
            ("6GiB"), bytes (int), or a fraction (float) of the device's memory. None: no limit.
        method: "optimal": the fastest plan there is (exact, over the options below and all
            segments); "greedy": repeats the change that saves most time per byte; "uniform": every
            k-th layer keeps its input alone, the others keep everything useful; "sqrt": segments
            of √n layers (Chen et al. 2016); "manual": `policies`.
        costs: "measured": times each step of a layer's graph; "analytic": FLOPs and bytes over the
            device's ceilings; or a result of `calibrate`.
        policies: for "manual", a mapping of shell patterns of layer names to policies; the first
            pattern that matches counts.
        optimizer: its state and the memory of its step count. None: no optimizer.
        loss: function of the model's output that backward starts from; by default the sum of the
            output's floating-point tensors.
        accumulates: whether gradients are accumulated across steps, so they stay in memory. If
            not, they are None at the start of a step (`zero_grad()`).
        segments: whether a run of layers may keep only the first layer's input ("optimal" and
            "greedy").
        options: policies to choose from; by default all sets of names that no other set beats in
            both bytes and time (of a block with more than ten names: of the ten whose steps have
            most FLOPs, and the presets).
        offload: whether layers may keep their input, or everything, in the host's memory (CUDA
            devices only). A copy costs the time that the neighboring layer does not hide, at the
            measured bandwidth. The peak includes space for the copies of two layers. Segments do
            not offload.

    Shapes, dtypes: the model's own. Units: bytes, seconds.
    Raises: BudgetError (a ValueError) if the method cannot stay within the budget, with the least
        possible peak and its parts; ValueError or TypeError for a wrong argument, a model without
        layers to convert, a model in which no layer keeps anything (no gradients are needed), or
        a model that is divided among ranks; NotImplementedError on devices other than CPU and CUDA.
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
        raise TypeError(f"plan takes a torch.nn.Module, got {type(model).__name__}")
    if "lossy" in kwargs:
        raise TypeError("lossy= was removed; plans choose among exact presets, so leave it out")
    request = Request(costs, policies, optimizer, loss, accumulates, segments, options, offload)
    inputs, kwargs = arguments_of(model, inputs, kwargs)
    device = device_of(model, [inputs, kwargs])
    request.check(method, device)
    limit = None if budget is None else bytes_of(budget, device)
    measured = measure_chains(model, inputs, kwargs, request)
    chain, choice, other = choose_chain(measured, limit, method, policies or {})
    shown = costs if isinstance(costs, str) else "measured"
    return Plan(type(model).__name__, str(device), method, shown, limit, chain, choice, other)


def measure_chains(
    model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any], request: Request
) -> list[Chain]:
    """Measure the chain with the gradients of a fused loss in backward, and in forward.

    There is one chain where the model has no such loss, or its step does not compute it.
    """
    heads = [module for module in model.modules() if isinstance(module, HuggingFaceHead)]
    chains = []
    for early in (False, True) if heads else (False,):
        with attributes_as([(head, "loss_grad_in_forward", early) for head in heads]):
            chain = measure_chain(model, inputs, kwargs, request)
        chains.append(dataclasses.replace(chain, grad_in_forward=early))
    same = len(chains) > 1 and chains[0].moments == chains[1].moments
    return chains[:1] if same else chains


def measure_chain(
    model: nn.Module,
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: Request,
    timed: bool = True,
    update: tuple[int, int] | None = None,
) -> Chain:
    """Measure the chain that the methods choose from. Raises: as `plan`.

    Args:
        timed: whether to time the step.
        update: the result of `predict_optimizer`, if it is known already.
    """
    device, costs = device_of(model, [inputs, kwargs]), request.costs
    accumulates, optimizer = request.accumulates, request.optimizer
    cuda = [device] if device.type == "cuda" else []
    with contextlib.ExitStack() as stack:
        stack.enter_context(_MEASURING)
        layers = stack.enter_context(_converted(model))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.random.fork_rng(cuda))
        if any(layer._tensor_parallel is not None for layer in layers.values()):
            raise ValueError(
                f"{type(model).__name__} is divided among ranks, and steps are timed on one rank, "
                "which would wait for the others; use `python -m fused_remat scale` instead"
            )
        step = measure_step(model, layers, inputs, kwargs, request.loss, accumulates, timed)
        if not step.calls:
            raise ValueError(
                f"no fused layer of {type(model).__name__} keeps anything for backward: check that "
                "its parameters require gradients, that the loss depends on them, that the model "
                "is not compiled (compile it after planning), and that no checkpoint wraps the "
                "layers"
            )
        calibration = costs if isinstance(costs, Calibration) else calibrate(device)
        by = calibration.analytic if costs == "analytic" else calibration.measured
        link = calibration.host_link() if request.offload else None
        calls = tuple(_calls(step, by, request, link))
    if update is None:
        update = (0, 0) if optimizer is None else predict_optimizer(optimizer)
    state, temporary = update
    gradients = 0 if accumulates else max((m.gradients for m in step.moments), default=0)
    resting = step.resting | ({"optimizer state": state} if state else {})
    if optimizer is not None and "others" in resting:  # the existing state was measured in it
        resting["others"] = max(0, resting["others"] - state_bytes(optimizer))
    return Chain(calls, step.moments, resting, step.seconds, gradients + temporary, step.kept)


@contextlib.contextmanager
def _converted(model: nn.Module) -> Iterator[dict[str, FusedLayer]]:
    """Convert a model that has no fused layers for the time of the context; yield the layers."""
    stock = not fused_layers(model)
    if stock:
        convert(model)
    try:
        yield fused_layers(model)
    finally:
        if stock:
            revert(model)


def _calls(
    step: MeasuredStep, costs: Costs, request: Request, link: tuple[float, float] | None
) -> Iterator[LayerOptions]:
    """Yield the measured calls with their options; equal calls are computed once.

    All calls of a layer have the options of its first call.
    """

    @functools.cache
    def options_of(
        example: Example,
        first: Example,
        names: tuple[str, ...],
        policies: tuple[str | Policy, ...] | None,
        away: bool,
    ) -> tuple[Option, ...]:
        saves = [option.save for option in costed_options(first, costs, names, policies)]
        options = options_for(example, costs, saves)
        forward = costs(example, ()).forward
        return with_offload(example, options, link, forward) if away and link else options

    firsts = {call.layer: call for call in reversed(step.calls)}
    shapes = Counter(layer for layer, _ in {(call.layer, call.example) for call in step.calls})
    for call in step.calls:
        example, first = call.example, firsts[call.layer].example
        if example is None or first is None:
            only = Option((), call.kept, 0, 0, 0.0, preset=STATES[call.ran])
            yield LayerOptions(call.layer, call.kind, (only,), 0.0, 0, False, call.reason)
            continue
        policies = None if request.options is None else tuple(request.options)
        if request.policies is not None:
            policy = policy_for(call.layer, request.policies)
            policies = (Policy(policy.save) if isinstance(policy, Policy) else policy,)
        options = options_of(example, first, call.names, policies, shapes[call.layer] == 1)
        seconds, nbytes = costs(example, ()).forward, kept_by_name(example, ()).get("input", 0)
        linked = call.follows and request.segments and nbytes > 0
        graph, shapes_of = example.call.graph, example.shapes
        long = sorted(long_attentions(graph, sizes(shapes_of[graph.inputs[0]])[1]))
        given = options, seconds, nbytes, linked
        yield LayerOptions(call.layer, call.kind, *given, long=tuple(long))
