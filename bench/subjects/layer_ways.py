"""The ways to train a layer that are compared: decorated builders in a registry.

A way takes a subject and returns a function of its input. All of them work on the same parameters
and gradients, the very tensors: no way can gain from where its own happen to lie.

A preset's name alone is ours on the device's own backend: eager on a CPU, Triton on a GPU. With
"_eager" or "_triton" it is on that one where it is not the device's own; with "_compiled" it is the
first under `torch.compile`. So no two rows of a device are the same thing. The presets that keep 8
bits are a group of their own, "lossy".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.measure.admission import Absent
from bench.measure.case import Forward, Subject
from bench.measure.registry import Registry
from bench.subjects.compiled import Compiled
from fused_remat.execution.choose import BACKENDS, DEFAULTS
from fused_remat.policies import EXACT_PRESETS, LOSSY_PRESETS

Build = Callable[[Subject], Forward]

#: In the order of the tables. Traits: `draws`, whose dropout it has at the same seed ("stock",
#: "ours", or "own": nobody else's); `group`, by which ways are asked for; `backend`, that it names;
#: `kept_by`, who sees what it keeps: "autograd", or only the "allocator"; `lossy`, whether its
#: gradients are those of rounded values; `compiled`, whether `torch.compile` made it.
WAYS: Registry[Build] = Registry("layer ways")
BASELINE = "eager"
#: What is measured unless asked otherwise.
DEFAULT = ("stock", "compiled", "ours")
BUDGETS = (0.0, 0.25, 0.5, 0.75)


def _way(name: str, group: str = "stock", draws: str = "stock", **rest: Any) -> Any:
    compiled = group == "compiled"
    traits = {"kept_by": "autograd", "backend": None, "lossy": False, "compiled": compiled} | rest
    return WAYS.provider(name, group=group, draws=draws, **traits)


def select(names: Sequence[str], device: torch.device | str) -> list[str]:
    """Ways by name or group, in the order of the tables; the baseline is always among them.

    A group has no preset that only another device runs, or that is the same as another one here.

    Raises: ValueError for an unknown name.
    """
    own = _own_backend("auto", torch.device(device))
    here = {None, "eager"} - {own}
    return WAYS.select(names, lambda way: way.traits["backend"] in here)


def _own_backend(name: str, device: torch.device) -> str:
    return DEFAULTS.get(device.type, "eager") if name == "auto" else name


# --- PyTorch's own


@_way(BASELINE, baseline=True)
def eager(subject: Subject) -> Forward:
    """The stock layer."""
    return subject.stock(subject.module)


@_way("checkpoint", baseline=True)
def checkpointed(subject: Subject) -> Forward:
    """`torch.utils.checkpoint` as recommended: stops replaying once it has what it needs.

    In a capture without the generator's state, which cannot be read there.
    """
    options = {"use_reentrant": False, "preserve_rng_state": not subject.captured}
    return functools.partial(checkpoint, subject.stock(subject.module), **options)


@_way("checkpoint_reentrant")
def checkpointed_reentrant(subject: Subject) -> Forward:
    """The older `torch.utils.checkpoint`: replays the whole layer."""
    return functools.partial(checkpoint, subject.stock(subject.module), use_reentrant=True)


def _products() -> list[Any]:
    """Every matrix product of ATen's, and attention's kernels, as far as this PyTorch has them."""
    names = (
        "mm", "addmm", "bmm", "baddbmm",
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )  # fmt: skip
    found = (getattr(torch.ops.aten, name, None) for name in names)
    return [packet.default for packet in found if packet is not None]


@_way("selective_matmuls", kept_by="allocator")
def selective_matmuls(subject: Subject) -> Forward:
    """Selective checkpointing that keeps the results of all products and replays the rest.

    The policy of PyTorch's documentation and of torchtitan's per-op mode. What it keeps lies in a
    cache of its own, unseen by autograd's hooks.
    """
    contexts = functools.partial(create_selective_checkpoint_contexts, _products())
    forward = subject.stock(subject.module)
    return functools.partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


@_way("selective_attention")
def selective_attention(subject: Subject) -> Forward:
    """Selective recomputation after Korthikanti et al. 2022: only attention's core is replayed.

    That is scores, softmax, dropout and the product with v. Where PyTorch takes a flash kernel, the
    kernel replays scores itself and keeps a number per row: then this only adds a second run of it.
    What is outside of the core is PyTorch's.

    Shapes: x (B, S, D); inside q, k, v (B, H, S, E), views of what the projection gave.
    """
    layer = subject.module
    if not isinstance(layer, nn.TransformerEncoderLayer):
        raise Absent("the module has no attention")
    attention = layer.self_attn

    def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        p = attention.dropout if attention.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, None, p, subject.causal)

    def attend(x: Tensor) -> Tensor:
        x = x.transpose(0, 1)  # as nn.MultiheadAttention does, so that products are the same
        seq_len, batch, width = x.shape
        qkv = F.linear(x, attention.in_proj_weight, attention.in_proj_bias)
        parts = qkv.unflatten(-1, (3, width)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        split = (seq_len, batch * attention.num_heads, attention.head_dim)
        heads = [t.view(split).transpose(0, 1) for t in parts.contiguous()]
        by_head = (batch, attention.num_heads, seq_len, attention.head_dim)
        out = checkpoint(core, *(t.view(by_head) for t in heads), use_reentrant=False)
        out = out.permute(2, 0, 1, 3).contiguous().view(seq_len * batch, width)
        return attention.out_proj(out).view(seq_len, batch, width).transpose(0, 1)

    def mlp(x: Tensor) -> Tensor:
        return layer.dropout2(layer.linear2(layer.dropout(layer.activation(layer.linear1(x)))))

    def forward(x: Tensor) -> Tensor:
        if layer.norm_first:
            x = x + layer.dropout1(attend(layer.norm1(x)))
            return x + mlp(layer.norm2(x))
        x = layer.norm1(x + layer.dropout1(attend(x)))
        return layer.norm2(x + mlp(x))

    return forward


class RandomState:
    """torch's generator for a device, as a `torch_remat.RecomputeStateHook`."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.cuda if device.type == "cuda" else torch

    def snapshot(self) -> Tensor:
        state: Tensor = self._module.get_rng_state()
        return state

    def restore(self, state: Tensor) -> None:
        self._module.set_rng_state(state)


@_way("torch_remat", module="torch_remat")
def torch_remat(subject: Subject) -> Forward:
    """`torch_remat` around the whole layer, as in its quick start; replays the whole layer.

    It leaves torch's generator alone unless given a hook, so a layer with dropout needs one.
    """
    from torch_remat import checkpoint as remat

    forward = subject.stock(subject.module)
    hooks = (RandomState(subject.device),) if subject.dropout else ()
    return lambda x: remat(region_name="layer", recompute_state_hooks=hooks)(forward)(x)


# --- compiled


def _compiled(subject: Subject, budget: float | None = None) -> Forward:
    """`torch.compile` of the stock layer, Inductor, static shapes.

    budget: `activation_memory_budget`, how much of what it would keep it may keep; it is 1 else.
    """
    return Compiled(eager(subject), subject, budget)


_way("compile", "compiled", "own")(_compiled)
for _budget in BUDGETS:
    _build = functools.partial(_compiled, budget=_budget)
    _way(f"compile_budget_{_budget:g}", "compiled", "own")(_build)


# --- ours


def _preset(subject: Subject, preset: str) -> Forward:
    return subject.fused(subject.module, preset, subject.backend)


def _preset_on(subject: Subject, preset: str, backend: str) -> Forward:
    if _own_backend(subject.backend, subject.device) == backend:
        raise Absent(f"on this device the same as {preset}")
    found = BACKENDS[backend]()
    if isinstance(found, str):
        raise Absent(found)
    return subject.fused(subject.module, preset, backend)


def _preset_compiled(subject: Subject, preset: str) -> Forward:
    return Compiled(_preset(subject, preset), subject)


for _name in EXACT_PRESETS:
    _way(_name, "ours", "ours")(functools.partial(_preset, preset=_name))
for _name in LOSSY_PRESETS:
    _way(_name, "lossy", "ours", lossy=True)(functools.partial(_preset, preset=_name))
for _backend, _needs in (("eager", None), ("triton", "triton")):
    for _name in EXACT_PRESETS:
        _build = functools.partial(_preset_on, preset=_name, backend=_backend)
        _way(f"{_name}_{_backend}", "ours", "ours", backend=_backend, needs=_needs)(_build)
for _name in EXACT_PRESETS:
    _build = functools.partial(_preset_compiled, preset=_name)
    _way(f"{_name}_compiled", "ours", "ours", compiled=True)(_build)
