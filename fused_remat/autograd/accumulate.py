"""Weight gradients added to a buffer of each parameter in float32, instead of by autograd.

Autograd rounds a gradient to its parameter's dtype, then adds it. With `accumulate_into`, backward
adds float32 partial sums to `param.main_grad` or `param.grad` and returns no gradient for those
parameters. Autograd then runs no hooks, no communication of data parallelism, and returns nothing
to `torch.autograd.grad`; such cases raise, or autograd takes the gradient as usual.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from fused_remat.autograd.engine import runs_now

TARGETS = ("grad", "main_grad")
_PLAIN = (Tensor, nn.Parameter)
_UNDER_DDP = "_fused_remat_under_ddp"


def check_target(target: str | None) -> str | None:
    """Return `target`; raise ValueError unless it is None, "grad" or "main_grad"."""
    if target is not None and target not in TARGETS:
        valid = ", ".join(map(repr, (None, *TARGETS)))
        raise ValueError(f"accumulate_into must be one of {valid}, got {target!r}")
    return target


def unsupported_param_reason(param: Tensor, target: str) -> str | None:
    """Return why gradients cannot go into `param.grad` or `param.main_grad`, or None."""
    if type(param) not in _PLAIN:
        return f"is a {type(param).__name__}, not a plain parameter"
    if not param.is_leaf:  # functional_call, a parametrization, a view of a flat parameter
        return "is not a leaf"
    if param._backward_hooks:
        return "has tensor hooks, which would not be called"
    if param._post_accumulate_grad_hooks:
        return "has post-accumulate-grad hooks, which would not be called"
    wide = torch.promote_types(param.dtype, torch.float32)
    buffer = getattr(param, target, None)
    if buffer is not None:
        reason = _unsupported_buffer_reason(param, buffer, wide)
        return None if reason is None else f"has a {target} that is {reason}"
    if target == "main_grad":
        return f"has no main_grad; set it to zeros of its shape in {wide}"
    allowed = param.grad_dtype
    if allowed not in (None, wide):
        return f"has grad_dtype {allowed}; set grad_dtype to {wide}"
    return None


def _unsupported_buffer_reason(param: Tensor, buffer: Any, wide: torch.dtype) -> str | None:
    shape, found = param.shape, type(buffer).__name__
    if type(buffer) in _PLAIN and buffer.layout is torch.strided:
        dense = all(step or size < 2 for step, size in zip(buffer.stride(), buffer.shape))  # noqa: B905
        fits = (buffer.dtype, buffer.shape, buffer.device) == (wide, shape, param.device)
        if dense and fits and not (buffer.requires_grad or buffer.is_inference()):
            return None
        found = f"{buffer.dtype} of shape {tuple(buffer.shape)} on {buffer.device}"
        found += ", expanded" * (not dense) + ", an inference tensor" * buffer.is_inference()
        found += ", with requires_grad" * buffer.requires_grad
    return (
        f"{found}; expected {wide} of shape {tuple(shape)} on {param.device}, dense, not expanded, "
        "without requires_grad and not made in inference mode"
    )


def unsupported_engine_reason(layer: nn.Module) -> str | None:
    """Return why data parallelism would miss gradients of `layer` outside autograd, or None."""
    # Marked, since a reentrant checkpoint calls the layer again in backward, outside of DDP.
    if DistributedDataParallel._active_ddp_module is not None:
        layer.__dict__[_UNDER_DDP] = True
    if layer.__dict__.get(_UNDER_DDP, False):
        return (
            "the layer is called by DistributedDataParallel, which waits for autograd's gradients"
        )
    who = sharded_by(layer)
    if who is not None:
        return f"{who} manages the layer's parameters, and reduces gradients from autograd"
    return None


def sharded_by(layer: nn.Module) -> str | None:
    """Return what manages parameters of `layer` only around its forward and backward, or None."""
    # Both FSDPs mark, for Dynamo, every module whose parameters they manage.
    if any(getattr(module, "_is_fsdp_managed_module", False) for module in layer.modules()):
        return "FSDP"
    # DeepSpeed numbers the parameters that it partitions.
    return "ZeRO-3" if any(hasattr(p, "ds_id") for p in layer.parameters()) else None


def refusal(target: str, reason: str) -> RuntimeError:
    """Return the error to raise where gradients cannot go into `target`."""
    return RuntimeError(f"fused_remat: accumulate_into={target!r} is not possible: {reason}")


@dataclass(frozen=True)
class Accumulation:
    """Gradients of the block's tensors `names` go into the attribute `target` of each."""

    target: str
    names: frozenset[str]

    def check(self, tensors: Mapping[str, Tensor | None], needs_grad: Iterable[str]) -> None:
        """Raise RuntimeError if one of `needs_grad` has no buffer, or one that would be wrong."""
        for name in needs_grad:
            param = tensors.get(name) if name in self.names else None
            reason = None if param is None else unsupported_param_reason(param, self.target)
            if reason is not None:
                raise refusal(self.target, f"{name} {reason}")

    def buffers(self, edges: Iterable[tuple[str, Any]], creates_graph: bool) -> dict[str, Tensor]:
        """Return the buffers that this backward has to add to, by name.

        `edges`: names of the block's tensors, and the nodes that their gradients go to. Parameters
        that this pass does not accumulate are omitted: `torch.autograd.grad`, `backward(inputs=)`.

        Raises: RuntimeError as `check`, and where autograd would do more than add.
        """
        params: dict[str, Tensor] = {}
        for name, node in edges:
            if name not in self.names or not runs_now(node):
                continue
            param: Tensor = node.variable
            if not param.requires_grad:  # frozen since forward: autograd drops the gradient
                continue
            reason = unsupported_param_reason(param, self.target)
            if reason is None and _has_hooks(node):
                reason = "has hooks on its AccumulateGrad node, which would not be called"
            if reason is None and creates_graph:
                reason = "would get a gradient that create_graph=True cannot differentiate"
            if reason is not None:
                raise refusal(self.target, f"{name} {reason}")
            params[name] = param
        for param in params.values():  # none was refused
            if getattr(param, self.target) is None:
                wide = torch.promote_types(param.dtype, torch.float32)
                param.grad = torch.zeros_like(param, dtype=wide)
        return {name: getattr(param, self.target) for name, param in params.items()}


def _has_hooks(node: Any) -> bool:
    """Return whether an AccumulateGrad node has Python hooks, such as Horovod's.

    No API lists them, but a handle refers to the table of hooks.
    """
    for register in (node.register_prehook, node.register_hook):
        handle = register(lambda *_: None)
        count = len(handle.hooks_dict_ref())
        handle.remove()
        if count > 1:
            return True
    return False
