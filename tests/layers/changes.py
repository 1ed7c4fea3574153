"""Changes of a layer as people make them: submodules, parameters, methods, hooks, subclasses."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reference import randomize
from torch import nn
from torch.nn.utils import parametrizations, prune

from fused_remat import FusedRematLayer

DOUBLE = torch.float64
STOCK = nn.TransformerEncoderLayer


@dataclass(frozen=True)
class Change:
    """How a layer differs from a new one, and what follows from it."""

    #: Why the fused path does not support such a layer; "": it does.
    reason: str
    #: Changes a layer in place.
    surgery: Callable[[nn.Module], Any] = lambda layer: None
    #: Makes a subclass of a base.
    subclass: Callable[[type], type] = lambda base: base
    #: Buffers are updated by forward, which is therefore not checkpointed.
    updates: bool = False
    #: In evaluation without gradients PyTorch's own kernel is wrong, or raises (torch 2.13).
    breaks_eval: bool = False
    #: The warning that is shown instead of the reason.
    told: str = ""

    def layers(self, policy="full", **options) -> list[nn.Module]:
        """Return the stock layer and the fused one with this change, with the same parameters."""
        made = []
        for base in (STOCK, FusedRematLayer):
            given = {"dropout": 0.0, "norm_first": True, "dtype": DOUBLE, **options}
            torch.manual_seed(0)
            layer = randomize(self.subclass(base)(8, 2, 12, **given))
            torch.manual_seed(3)
            self.surgery(layer)
            made.append(layer)
        made[1].policy = policy
        return made


@torch.no_grad()
def error_of(layer, x, expected, **masks):
    """Return the largest error; infinite where PyTorch's kernel misses a part, or has NaN."""
    try:
        found = layer(x, **masks)
    except AttributeError:
        return float("inf")
    return (found - expected).abs().nan_to_num(nan=float("inf")).max().item()


# --- surgery


class LoRA(nn.Module):
    """As PEFT wraps a linear layer: its `weight` and `bias` show, but do more than that."""

    def __init__(self, base):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.base = base.requires_grad_(False)
        shapes = (2, base.in_features), (base.out_features, 2)
        self.a, self.b = (
            nn.Parameter(torch.randn(s, dtype=DOUBLE, generator=generator)) for s in shapes
        )

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


def replace(name, new):
    return lambda layer: setattr(layer, name, new(layer.get_submodule(name)))


def wrapped_method(owner, name):
    """Return a method of the layer, or of the submodule `owner`, whose result is changed."""

    def surgery(layer):
        module = layer.get_submodule(owner)
        inner = getattr(module, name)

        def method(*args, **kwargs):
            out = inner(*args, **kwargs)
            return (out[0].sin(), out[1]) if isinstance(out, tuple) else out.sin()

        setattr(module, name, method)

    return surgery


def tied_in_the_layer(layer):
    layer.norm2.weight = layer.norm1.weight
    layer.linear2.bias = layer.norm1.bias


def attribute(owner, name, value):
    return lambda layer: setattr(layer.get_submodule(owner), name, value)


def norm(name, *args, **options):
    return replace(name, lambda _: nn.LayerNorm(*args, **options, dtype=DOUBLE))


def instead_of(kind):
    return "; the fused path supports torch.nn." + kind


PARAMETRIZED = " is torch.nn.utils.parametrize.Parametrized"
LINEAR, LAYER_NORM = instead_of("Linear"), instead_of("LayerNorm")
SURGERY = {
    "spectral_norm": Change(
        "linear2" + PARAMETRIZED + "Linear" + LINEAR,
        lambda m: parametrizations.spectral_norm(m.linear2), updates=True,
    ),
    "pruned": Change(
        "linear1 has hooks", lambda m: prune.l1_unstructured(m.linear1, "weight", 0.5)
    ),
    "linear in a Sequential": Change(
        "linear1 is torch.nn.Sequential" + LINEAR,
        replace("linear1", lambda m: nn.Sequential(m, nn.Tanh())), breaks_eval=True,
    ),
    "RMSNorm": Change(
        "norm1 is torch.nn.RMSNorm" + LAYER_NORM,
        replace("norm1", lambda _: nn.RMSNorm(8, 1e-5, dtype=DOUBLE)), breaks_eval=True,
    ),
    "norm without weights": Change(
        "", norm("norm1", 8, elementwise_affine=False), breaks_eval=True
    ),
    "norm of two dimensions": Change(
        "norm2 is over (2, 8); the fused path supports (8,)", norm("norm2", (2, 8))
    ),
    "linear without a bias": Change("", attribute("linear1", "bias", None), breaks_eval=True),
    "LoRA on linear1": Change(
        "linear1 is changes.LoRA" + LINEAR, replace("linear1", LoRA), breaks_eval=True
    ),
    "self_attn.forward": Change(
        "self_attn.forward was replaced", wrapped_method("self_attn", "forward"), breaks_eval=True
    ),
    "_sa_block": Change(
        "FusedRematLayer._sa_block is overridden", wrapped_method("", "_sa_block"), breaks_eval=True
    ),
    "_ff_block": Change(
        "FusedRematLayer._ff_block is overridden", wrapped_method("", "_ff_block"), breaks_eval=True
    ),
    "activation set later": Change("", attribute("", "activation", F.gelu), breaks_eval=True),
    "tied": Change("", tied_in_the_layer),
}  # fmt: skip


# --- hooks that change the function


def replaced_output(layer):
    layer.linear1.register_forward_hook(lambda m, args, y: y * y)


def replaced_attention(layer):
    layer.self_attn.register_forward_hook(lambda m, args, y: (y[0].sin(), y[1]))


def replaced_input(layer):
    layer.linear1.register_forward_pre_hook(lambda m, args: args[0].exp())


def input_in_place(layer):
    layer.linear2.register_forward_pre_hook(lambda m, args: (args[0].mul_(0.5).add_(0.3),))


HOOKS = {
    f"hook: {hook.__name__}": Change(f"{module} has hooks", hook)
    for module, hooks in {
        "linear1": (replaced_output, replaced_input),
        "linear2": (input_in_place,),
        "self_attn": (replaced_attention,),
    }.items()
    for hook in hooks
}


# --- subclasses


def scaled_block(base):
    class ScaledBlock(base):
        """LayerScale on one branch, by its block."""

        def __init__(self, d_model, *args, **kwargs):
            super().__init__(d_model, *args, **kwargs)
            self.gamma = nn.Parameter(torch.full((d_model,), 0.1, dtype=DOUBLE))

        def _sa_block(self, *args, **kwargs):
            return self.gamma * super()._sa_block(*args, **kwargs)

    return ScaledBlock


def own_forward(base):
    class OwnForward(base):
        """Calls the blocks itself, with a scale between."""

        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            x = src
            x = x + 0.5 * self._sa_block(self.norm1(x), src_mask, src_key_padding_mask)
            return x + 0.5 * self._ff_block(self.norm2(x))

    return OwnForward


def own_defaults(base):
    class OwnDefaults(base):
        """Only other defaults: stays on the fused path."""

        def __init__(self, d_model=8, nhead=2, dim_feedforward=12, norm_first=True, **kwargs):
            kwargs = {"dropout": 0.0, "activation": "gelu", **kwargs}
            super().__init__(d_model, nhead, dim_feedforward, norm_first=norm_first, **kwargs)

    return OwnDefaults


SUBCLASSES = {
    "a subclass with LayerScale": Change(
        "ScaledBlock._sa_block is overridden", subclass=scaled_block
    ),
    "a forward of its own": Change(  # which calls the submodules itself
        "",
        told="OwnForward saves no memory: its own forward does not call FusedRematLayer.forward, "
        "so its policy has no effect; call super().forward(...) there, or convert the layer: "
        "convert traces it",
        subclass=own_forward,
    ),
    "other defaults": Change("", subclass=own_defaults),
}
CHANGES = SURGERY | HOOKS | SUBCLASSES
