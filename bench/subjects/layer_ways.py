"""The ways to train a layer that are compared: decorated builders in a registry.

A way takes a subject and returns a function of its input. All of them work on the same parameters
and gradients, the very tensors: no way can gain from where its own happen to lie.

A preset's name alone is ours on the device's own backend: eager on a CPU, Triton on a GPU. With
"_eager" or "_triton" it is on that one where it is not the device's own; with "_compiled" it is the
first under `torch.compile`. So no two rows of a device are the same thing.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.measure.case import Forward, Subject
from bench.measure.registry import Absent, Registry
from fused_remat.execution.choose import BACKENDS, DEFAULTS
from fused_remat.policies import EXACT_PRESETS

Build = Callable[[Subject], Forward]

#: In the order of the tables. Traits: `draws`, whose dropout it has at the same seed ("stock",
#: "ours", or "own": nobody else's); `group`, by which ways are asked for; `backend`, that it names;
#: `kept_by`, who sees what it keeps: "autograd", or only the "allocator"; `compiled`, whether
#: `torch.compile` made it.
WAYS: Registry[Build] = Registry(
    "layer ways", group="stock", draws="stock", kept_by="autograd", backend=None, compiled=False,
)  # fmt: skip
BASELINE = "eager"
#: What is measured unless asked otherwise.
DEFAULT = ("stock", "compiled", "ours")
BUDGETS = (0.0, 0.25, 0.5, 0.75)


def select(names: Sequence[str], device: torch.device | str) -> list[str]:
    """Ways by name or group, in the order of the tables; the baseline is always among them.

    A group has no preset that only another device runs, or that is the same as another one here.

    Raises: ValueError for an unknown name.
    """
    here = {None, "eager"} - {_own_backend("auto", torch.device(device))}
    return WAYS.select(names, lambda way: way.traits["backend"] in here)


def _own_backend(name: str, device: torch.device) -> str:
    return DEFAULTS.get(device.type, "eager") if name == "auto" else name


# --- PyTorch's own


@WAYS.provider(BASELINE, baseline=True)
def eager(subject: Subject) -> Forward:
    return subject.stock(subject.module)


@WAYS.provider("checkpoint", baseline=True)
def checkpointed(subject: Subject) -> Forward:
    """Run `torch.utils.checkpoint` as recommended: the replay stops once it has what it needs."""
    return functools.partial(checkpoint, eager(subject), use_reentrant=False)


#: Every matrix product of ATen's, and attention's kernels, as far as this PyTorch has them.
PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)  # fmt: skip


@WAYS.provider("selective_matmuls", kept_by="allocator")
def selective_matmuls(subject: Subject) -> Forward:
    """Selective checkpointing that keeps the results of all products and replays the rest.

    The policy of PyTorch's documentation and of torchtitan's per-op mode. What it keeps lies in a
    cache of its own, unseen by autograd's hooks.
    """
    packets = (getattr(torch.ops.aten, name, None) for name in PRODUCTS)
    kept = [packet.default for packet in packets if packet is not None]
    contexts = functools.partial(create_selective_checkpoint_contexts, kept)
    return functools.partial(checkpoint, eager(subject), use_reentrant=False, context_fn=contexts)


class RandomState:
    """torch's generator for a device, as a `torch_remat.RecomputeStateHook`."""

    def __init__(self, device: torch.device) -> None:
        module: Any = torch.cuda if device.type == "cuda" else torch
        self.snapshot, self.restore = module.get_rng_state, module.set_rng_state


@WAYS.provider("torch_remat", module="torch_remat")
def torch_remat(subject: Subject) -> Forward:
    """`torch_remat` around the whole layer, as in its quick start; replays the whole layer.

    It leaves torch's generator alone unless given a hook, so a layer with dropout needs one.
    """
    from torch_remat import checkpoint as remat

    forward = eager(subject)
    hooks = (RandomState(subject.device),) if subject.dropout else ()
    return lambda x: remat(region_name="layer", recompute_state_hooks=hooks)(forward)(x)


# --- compiled


class Compiled:
    """A forward compiled whole, with its backward, for the subject's input.

    Its code object is its own, so that Dynamo's cache of it, and the limit of that cache, are too.
    It compiles in the constructor, under the memory budget; a call that would have to compile
    again, under other settings, raises RuntimeError instead.

    Args:
        budget: `torch._functorch.config.activation_memory_budget`; None leaves it.
    """

    def __init__(self, forward: Forward, subject: Subject, budget: float | None = None) -> None:
        compiler = torch._dynamo.lookup_backend(subject.compiler)
        self._built = False

        def once(graph: Any, inputs: list[Tensor]) -> Any:
            if self._built:
                raise RuntimeError("the call does not fit what was compiled")
            return compiler(graph, inputs)

        def call(x: Tensor) -> Tensor:
            return forward(x)

        own = types.FunctionType(
            call.__code__.replace(), call.__globals__, "call", None, call.__closure__
        )
        self._call = torch.compile(own, backend=once, fullgraph=True, dynamic=False)
        settings: dict[str, Any] = {} if budget is None else {"activation_memory_budget": budget}
        with torch._functorch.config.patch(settings):
            self(subject.x).backward(subject.dy)
        self._built = True

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._call(x)
        return y


def _compiled(budget: float | None = None) -> Build:
    """`torch.compile` of the stock layer, Inductor, static shapes.

    budget: `activation_memory_budget`, how much of what it would keep it may keep; it is 1 else.
    """
    return lambda subject: Compiled(eager(subject), subject, budget)


_theirs = functools.partial(WAYS.provider, group="compiled", draws="own", compiled=True)
_theirs("compile")(_compiled())
for _budget in BUDGETS:
    _theirs(f"compile_budget_{_budget:g}")(_compiled(_budget))


# --- ours


def _preset(preset: str, backend: str | None = None) -> Build:

    def build(subject: Subject) -> Forward:
        if backend is not None:
            if _own_backend(subject.backend, subject.device) == backend:
                raise Absent(f"on this device the same as {preset}")
            found = BACKENDS[backend]()
            if isinstance(found, str):
                raise Absent(found)
        return subject.fused(subject.module, preset, backend or subject.backend)

    return build


def _preset_compiled(preset: str) -> Build:
    return lambda subject: Compiled(_preset(preset)(subject), subject)


_ours = functools.partial(WAYS.provider, group="ours", draws="ours")
for _name in EXACT_PRESETS:
    _ours(_name)(_preset(_name))
for _backend, _needs in (("eager", None), ("triton", "triton")):
    for _name in EXACT_PRESETS:
        _ours(f"{_name}_{_backend}", backend=_backend, needs=_needs)(_preset(_name, _backend))
for _name in EXACT_PRESETS:
    _ours(f"{_name}_compiled", compiled=True)(_preset_compiled(_name))
