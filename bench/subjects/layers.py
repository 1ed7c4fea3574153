"""An encoder layer, alone or with a causal mask, and the ways to train it that are compared.

A way takes a subject and returns a function of its input; all share parameters and gradients. A
preset's name is a preset on the device's own backend.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch._dynamo
import torch._functorch.config
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bench.measure import case
from bench.measure.case import DTYPES, Forward, Subject, perturb
from bench.measure.registry import Registry
from fused_remat import FusedRematLayer
from fused_remat.policies import EXACT_PRESETS

NORMS = {"pre": True, "post": False}
ACTIVATIONS = ("gelu", "relu")


@dataclass(frozen=True)
class Case(case.Case):
    """An encoder layer and its input; names of `DTYPES`, `NORMS` and `ACTIVATIONS`."""

    dtype: str
    norm: str
    dropout: float
    batch: int
    seq_len: int
    d_model: int
    nhead: int
    activation: str = "gelu"
    causal: bool = False
    attention_dropout: float | None = None  # None: as everywhere else

    def __post_init__(self) -> None:
        self.sizes_fit(self.d_model, self.nhead, self.dropout, self.batch, self.seq_len)

    def subject(self, device: torch.device | str) -> Subject:
        """Return a layer with random parameters, biases and norms included, and random data."""
        self.seed()
        dtype = DTYPES[self.dtype]
        kind = self.d_model, self.nhead, self.dropout, self.norm, self.activation
        with torch.device(device):
            layer = encoder_layer(*kind)
            if self.attention_dropout is not None:
                layer.self_attn.dropout = self.attention_dropout
            perturb(layer)
            x, dy = torch.randn(2, self.batch, self.seq_len, self.d_model).unbind()
            # In the layer's dtype: of a bool mask the stock layer would make such a one every time.
            make = nn.Transformer.generate_square_subsequent_mask
            masks = (make(self.seq_len, dtype=dtype),) if self.causal else ()

        def stock(module: nn.Module) -> Forward:
            if not self.causal:
                return module
            return lambda x: module(x, masks[0].to(x.dtype), is_causal=True)

        return Subject(
            layer.to(dtype),
            # clone: not halves of one storage, which would be counted in full for each
            x.to(dtype).clone(), dy.to(dtype).clone(), self.dropout, stock,
            lambda *ours: stock(fused(*ours)), masks,
        )  # fmt: skip


def encoder_layer(
    width: int, heads: int, dropout: float, norm: str, activation: str = "gelu"
) -> nn.TransformerEncoderLayer:
    """Return a layer whose feed-forward is four times as wide."""
    return nn.TransformerEncoderLayer(
        width, heads, 4 * width, dropout, activation, batch_first=True, norm_first=NORMS[norm]
    )


def fused(module: Any, policy: str, backend: str) -> FusedRematLayer:
    return FusedRematLayer.from_layer(module, policy, backend)


Build = Callable[[Subject], Forward]

#: In the order of the tables. Traits: `draws`, whose dropout it draws at the same seed ("stock",
#: "ours", or "own"); `group`, by which ways may be requested; `kept_by`, the account of what it
#: keeps: "autograd", or the "allocator"; `compiled`, whether `torch.compile` made it.
WAYS: Registry[Build] = Registry(group="stock", draws="stock", kept_by="autograd", compiled=False)
BASELINE = "eager"
#: Measured by default.
DEFAULT = ("stock", "compiled", "ours")
BUDGETS = (0.0, 0.25, 0.5, 0.75)


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
    """Checkpoint selectively: keep the results of all products and replay the rest.

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
    """Wrap the layer in `torch_remat`, as in its quick start; it replays the entire layer."""
    from torch_remat import checkpoint as remat

    forward = eager(subject)
    hooks = (RandomState(subject.device),) if subject.dropout else ()
    return lambda x: remat(region_name="layer", recompute_state_hooks=hooks)(forward)(x)


# --- compiled


class Compiled:
    """A forward compiled in one graph, with its backward, for the subject's input.

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
    """Run `torch.compile` on the stock layer, Inductor, static shapes."""
    return lambda subject: Compiled(eager(subject), subject, budget)


_theirs = functools.partial(WAYS.provider, group="compiled", draws="own", compiled=True)
_theirs("compile")(_compiled())
for _budget in BUDGETS:
    _theirs(f"compile_budget_{_budget:g}")(_compiled(_budget))


# --- ours


def _preset(preset: str) -> Build:
    return lambda subject: subject.fused(subject.module, preset, subject.backend)


def _preset_compiled(preset: str) -> Build:
    return lambda subject: Compiled(_preset(preset)(subject), subject)


_ours = functools.partial(WAYS.provider, group="ours", draws="ours")
for _name in EXACT_PRESETS:
    _ours(_name)(_preset(_name))
for _name in EXACT_PRESETS:
    _ours(f"{_name}_compiled", compiled=True)(_preset_compiled(_name))
