"""Experts as transformers writes them: one module of stacked weights, with a class attribute each.

Whatever implementation the model's configuration names, the module computes the same function of
tokens, indices and weights; its gate is recognized by what it returns.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fused_remat.layers.eligibility import Unsupported, parameters_of
from fused_remat.layers.expert_stacks import unwrapped
from fused_remat.moe_spec import CLAMPED, ExpertsSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.steps.expert_activation import activation_vjp


class KnownExperts(NamedTuple):
    """A module of experts."""

    spec: ExpertsSpec  # whose `top_k` a call decides
    names: tuple[str, ...]  # of both stacks and their biases, "" for none; A and B of updates
    arguments: tuple[str, ...]  # of its forward: tokens, indices and weights
    updates: tuple[tuple[int, float], ...] = ()  # the stack, 0 or 1, and scale of each

    def given(self, args: Any, kwargs: Any) -> tuple[Any, ...]:
        """Return the three arguments of a call in order."""
        named = {**dict(zip(self.arguments, args, strict=False)), **kwargs}
        return tuple([named[name] for name in self.arguments])

    def run(self, *_: Any) -> Tensor:
        """Raise RuntimeError: experts are a step, or their module is replayed."""
        raise RuntimeError("its experts do not take all tokens of the layer")

    def with_updates(self, tensors: Sequence[Any]) -> Iterator[tuple[tuple[int, float], Any, Any]]:
        """Yield each update, with those of the tensors of `names` that are its A and B."""
        return zip(self.updates, tensors[4::2], tensors[5::2], strict=True)

    def with_top_k(self, top_k: int) -> ExpertsSpec:
        """Return the spec of a call."""
        return dataclasses.replace(self.spec, top_k=top_k)


def known_experts(module: Any) -> KnownExperts | None:
    """Return what a module of experts computes, or None if that is not known."""
    try:
        module, prefix, updates = unwrapped(module)
    except Unsupported:
        return None
    flags = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")
    own: list[Any] = [getattr(module, name, None) for name in flags]
    if None in own or getattr(module, "has_post_expert_norm", False):
        return None
    if getattr(module, "_is_expert_parallel", False) or "forward" in vars(module):
        return None
    if not hasattr(type(module).forward, "__wrapped__"):  # not that of transformers' decorator
        return None
    gated, biased, transposed, _, experts = own
    stacks = ("gate_up_proj" if gated else "up_proj", "down_proj")
    names = [n for stack in stacks for n in (stack, f"{stack}_bias" if biased else "")]
    params, arguments = parameters_of(module, recurse=False), _arguments(module)
    if {*params} != {*filter(None, names)} or len(arguments) != 3:
        return None
    dims = [params[name].dim() for name in names if name]
    if dims != ([3, 2, 3, 2] if biased else [3, 3]):
        return None
    if not {u.parameter for u in updates} <= {*stacks}:
        return None
    own = [stacks.index(u.parameter) for u in updates]
    names = [prefix + name if name else "" for name in names]
    names += [name for u in updates for name in (u.a, u.b)]
    low = tuple([(i, u.scale) for i, u in zip(own, updates, strict=True)])
    for spec in _specs(module, int(experts), bool(gated), bool(transposed)):
        if _computes(module._apply_gate if gated else getattr(module, "act_fn", None), spec):
            return KnownExperts(spec, tuple(names), arguments, low)
    return None


# Llama 4 computes every expert on every token, whose inputs are 0 for experts that are not chosen.


def dense_experts(module: Any) -> KnownExperts | None:
    """Return `known_experts` of a module that `dense_run` calls with indices and weights."""
    if type(module).__name__ != "Llama4TextExperts":
        return None

    def gate(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, -1)
        act: Tensor = module.act_fn(gate)
        return up * act

    for spec in _specs(module, len(module.down_proj), True, True):
        if _computes(gate, spec):
            weighs = dataclasses.replace(spec, weighs_input=True)
            names = ("gate_up_proj", "", "down_proj", "")
            return KnownExperts(weighs, names, ("x", "chosen", "weights"))
    return None


def dense_run(module: Any, given: int) -> Callable[..., Any] | None:
    """Return what runs in place of Llama 4's mixture, or of its experts if three are `given`."""

    def mixture(x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.reshape(-1, module.hidden_dim)
        _, logits = module.router(x)
        _, chosen = torch.topk(logits, module.top_k, dim=1)
        weights = torch.sigmoid(logits.gather(1, chosen).float()).to(logits.dtype)
        return module.shared_expert(x) + module.experts(x, chosen, weights), logits

    def experts(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        scores = torch.zeros(len(x), len(module.down_proj)).to(weights).scatter(1, chosen, weights)
        y: Tensor = module.forward((x * scores.t().unsqueeze(-1)).reshape(-1, x.shape[1]))
        return y.view(-1, *x.shape).sum(0)

    name = type(module).__name__
    if name == "Llama4TextExperts" and given == 3:
        return experts
    return mixture if name == "Llama4TextMoe" and given == 1 else None


def _arguments(module: nn.Module) -> tuple[str, ...]:
    forward = inspect.unwrap(type(module).forward)
    return tuple(inspect.signature(forward).parameters)[1:]


def _specs(module: Any, experts: int, gated: bool, transposed: bool) -> Iterator[ExpertsSpec]:
    """Yield specs that the module's gate may compute."""
    given: Any = {"experts": experts, "top_k": 1, "gated": gated, "transposed": transposed}
    orders = ({"interleaved": False}, {"interleaved": True}) if gated else ({},)
    for order in orders:
        for name in ACTIVATIONS:
            yield ExpertsSpec(activation=name, **given, **order)
    numbers = [v for v in vars(module).values() if isinstance(v, float) and v > 0.0]
    for order in orders if gated else ():
        for limit in numbers:
            for alpha in numbers:
                yield ExpertsSpec(activation=CLAMPED, limit=limit, alpha=alpha, **given, **order)


def _computes(run: Any, spec: ExpertsSpec) -> bool:
    """Return whether a spec's activation, and its slope, are those of a module's gate."""
    generator = torch.Generator().manual_seed(0)
    scales = torch.tensor([1e-3, 0.3, 1.0, 30.0, 1e5], dtype=torch.float64).repeat_interleave(40)
    x = torch.randn(200, 16, generator=generator, dtype=torch.float64) * scales.unsqueeze(1)
    x.requires_grad_()
    try:
        with torch.enable_grad():
            y = run(x)
            dy = torch.randn(y.shape, generator=generator, dtype=y.dtype)
            (slope,) = torch.autograd.grad(y, x, dy)
        found, vjp = activation_vjp(spec, x.detach())
        same = found.shape == y.shape and torch.allclose(found, y, 1e-9, 1e-9)
        return same and torch.allclose(vjp(dy), slope, 1e-7, 1e-7)
    except Exception:  # a gate would not raise
        return False
