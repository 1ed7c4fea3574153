"""Changes of a layer as people make them: submodules, parameters, methods, hooks, subclasses.

Each is a row: what it does to a layer of torch.nn, or to a base class; why the fused path cannot
serve such a layer ("" if it can); and what is special about it.
"""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from reference import randomize
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from fused_remat import FusedRematLayer

DOUBLE = torch.float64
NN = "; the fused path supports torch.nn."
STOCK = nn.TransformerEncoderLayer


@dataclass(frozen=True)
class Change:
    """How a layer differs from a new one, and what follows from it."""

    reason: str
    #: Changes a layer in place.
    surgery: Callable[[nn.Module], Any] = lambda layer: None
    #: Makes a subclass of a base.
    subclass: Callable[[type], type] = lambda base: base
    #: Buffers are updated by forward: under checkpoint again in backward.
    updates: bool = False
    #: In evaluation without gradients PyTorch's own kernel is wrong, or raises (torch 2.13).
    breaks_eval: bool = False

    def layers(self, policy="full", **options) -> list[nn.Module]:
        """The stock layer and the fused one with this change, with the same parameters."""
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


class Squashed(nn.Module):
    def forward(self, weight):
        return weight.tanh()


class Wrapped(nn.Module):
    """As adapters, loggers and wrappers do: attributes of the inner module show through."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *args, **kwargs):
        out = self.inner(*args, **kwargs)
        return (out[0] * 1.5, out[1]) if isinstance(out, tuple) else out * 1.5


class LoRA(nn.Module):
    """As PEFT wraps a linear layer: its `weight` and `bias` show, and are not the whole story."""

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


class LoudAttention(nn.MultiheadAttention):
    def forward(self, *args, **kwargs):
        out, weights = super().forward(*args, **kwargs)
        return 2 * out, weights


# --- surgery


def replace(name, new):
    return lambda layer: setattr(layer, name, new(layer.get_submodule(name)))


def old_weight_norm(layer):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer.linear1)


def pruned_for_good(layer):
    prune.l1_unstructured(layer.linear1, "weight", 0.5)
    prune.remove(layer.linear1, "weight")


def hidden_attention(layer):
    attention = layer.self_attn
    del layer.self_attn
    layer.__dict__["self_attn"] = attention


def own_attention(layer):
    original = layer.self_attn.forward

    def forward(query, key, value, **kwargs):
        out, weights = original(query, key, value, **kwargs)
        return out.sin(), weights

    layer.self_attn.forward = forward


def own_linear(layer):
    inner = layer.linear1.forward
    layer.linear1.forward = lambda x: inner(x).sin()


def own_sa_block(layer):
    inner = layer._sa_block

    def sa_block(x, attn_mask, key_padding_mask, is_causal=False):
        return inner(x, attn_mask, key_padding_mask, is_causal=is_causal).sin()

    layer._sa_block = sa_block


def own_ff_block(layer):
    inner = layer._ff_block
    layer._ff_block = lambda x: inner(x).sin()


def tied_in_the_layer(layer):
    layer.norm2.weight = layer.norm1.weight
    layer.linear2.bias = layer.norm1.bias


def own(module, name):
    """The same method, as an attribute of the module."""
    setattr(module, name, getattr(module, name))


def activation(new):
    return lambda layer: setattr(layer, "activation", new)


def norm(name, *args, **options):
    return replace(name, lambda _: nn.LayerNorm(*args, **options, dtype=DOUBLE))


def parametrized(module, name):
    return lambda layer: parametrize.register_parametrization(
        layer.get_submodule(module), name, Squashed()
    )


PARAMETRIZED = " is torch.nn.utils.parametrize.Parametrized"
LINEAR, LAYER_NORM, ATTENTION = NN + "Linear", NN + "LayerNorm", NN + "MultiheadAttention"
OUT_PROJ = "NonDynamicallyQuantizableLinear"
SURGERY = {
    "weight_norm": Change(
        "linear1" + PARAMETRIZED + "Linear" + LINEAR,
        lambda m: parametrizations.weight_norm(m.linear1),
    ),
    "weight_norm, old": Change("linear1 has hooks", old_weight_norm),
    "spectral_norm": Change(
        "linear2" + PARAMETRIZED + "Linear" + LINEAR,
        lambda m: parametrizations.spectral_norm(m.linear2), updates=True,
    ),
    "spectral_norm, old": Change(
        "linear2 has hooks", lambda m: nn.utils.spectral_norm(m.linear2), updates=True
    ),
    "orthogonal": Change(
        f"self_attn.out_proj{PARAMETRIZED}{OUT_PROJ}{NN}modules.linear.{OUT_PROJ}",
        lambda m: parametrizations.orthogonal(m.self_attn.out_proj),
    ),
    "pruned": Change(
        "linear1 has hooks", lambda m: prune.l1_unstructured(m.linear1, "weight", 0.5)
    ),
    "pruned rows": Change(
        "linear2 has hooks", lambda m: prune.ln_structured(m.linear2, "weight", 0.5, n=2, dim=0)
    ),
    "pruned for good": Change("", pruned_for_good),
    "parametrized in_proj_weight": Change(
        "self_attn" + PARAMETRIZED + "MultiheadAttention" + ATTENTION,
        parametrized("self_attn", "in_proj_weight"),
    ),
    "parametrized norm": Change(
        "norm1" + PARAMETRIZED + "LayerNorm" + LAYER_NORM, parametrized("norm1", "weight")
    ),
    "linear in a Sequential": Change(
        "linear1 is torch.nn.Sequential" + LINEAR,
        replace("linear1", lambda m: nn.Sequential(m, nn.Tanh())), breaks_eval=True,
    ),
    "norm in a Sequential": Change(
        "norm1 is torch.nn.Sequential" + LAYER_NORM,
        replace("norm1", lambda m: nn.Sequential(m, nn.Tanh())),
    ),
    "RMSNorm": Change(
        "norm1 is torch.nn.RMSNorm" + LAYER_NORM,
        replace("norm1", lambda _: nn.RMSNorm(8, 1e-5, dtype=DOUBLE)), breaks_eval=True,
    ),
    "Identity for the first norm": Change(
        "norm1 is torch.nn.Identity" + LAYER_NORM,
        replace("norm1", lambda _: nn.Identity()), breaks_eval=True,
    ),
    "Identity for the last norm": Change(
        "norm2 is torch.nn.Identity" + LAYER_NORM, replace("norm2", lambda _: nn.Identity())
    ),
    "norm without weights": Change(
        "", norm("norm1", 8, elementwise_affine=False), breaks_eval=True
    ),
    "norm of whole sequences": Change(
        "norm1 is over (5, 2, 8); the fused path supports (8,)", norm("norm1", (5, 2, 8))
    ),
    "norm of two dimensions": Change(
        "norm2 is over (2, 8); the fused path supports (8,)", norm("norm2", (2, 8))
    ),
    "another linear": Change(
        "", replace("linear1", lambda _: nn.Linear(8, 12, dtype=DOUBLE))
    ),
    "linear without a bias": Change(
        "", lambda m: setattr(m.linear1, "bias", None), breaks_eval=True
    ),
    "Identity for a dropout": Change("", replace("dropout2", lambda _: nn.Identity())),
    "wrapped linear": Change("linear2 is changes.Wrapped" + LINEAR, replace("linear2", Wrapped)),
    "wrapped attention": Change(
        "self_attn is changes.Wrapped" + ATTENTION, replace("self_attn", Wrapped)
    ),
    "LoRA on linear1": Change(
        "linear1 is changes.LoRA" + LINEAR, replace("linear1", LoRA), breaks_eval=True
    ),
    "LoRA on linear2": Change(
        "linear2 is changes.LoRA" + LINEAR, replace("linear2", LoRA), breaks_eval=True
    ),
    "attention of a subclass": Change(
        "self_attn is changes.LoudAttention" + ATTENTION,
        lambda m: setattr(m.self_attn, "__class__", LoudAttention), breaks_eval=True,
    ),
    "attention that is no submodule": Change("self_attn is missing", hidden_attention),
    "self_attn.forward": Change(
        "self_attn.forward was replaced", own_attention, breaks_eval=True
    ),
    "the same self_attn.forward": Change(
        "self_attn.forward was replaced", lambda m: own(m.self_attn, "forward")
    ),
    "linear1.forward": Change("linear1.forward was replaced", own_linear, breaks_eval=True),
    "_sa_block": Change(
        "FusedRematLayer._sa_block is overridden", own_sa_block, breaks_eval=True
    ),
    "_ff_block": Change(
        "FusedRematLayer._ff_block is overridden", own_ff_block, breaks_eval=True
    ),
    "the same _ff_block": Change(
        "FusedRematLayer._ff_block is overridden", lambda m: own(m, "_ff_block")
    ),
    "activation set later": Change("", activation(F.gelu), breaks_eval=True),
    "an activation that draws": Change(
        "the activation function draws random numbers: it calls aten.rrelu_with_noise.default",
        activation(nn.RReLU()),
    ),
    "tied": Change("", tied_in_the_layer),
}  # fmt: skip


# --- hooks that change the function


def replaced_output(layer):
    layer.linear1.register_forward_hook(lambda m, args, y: y * y)


def replaced_attention(layer):
    layer.self_attn.register_forward_hook(lambda m, args, y: (y[0].sin(), y[1]))


def replaced_input(layer):
    layer.linear1.register_forward_pre_hook(lambda m, args: args[0].exp())


def output_in_place(layer):
    def hook(module, args, y):
        y.mul_(0.5).add_(0.3)

    layer.linear1.register_forward_hook(hook)


def input_in_place(layer):
    def hook(module, args):
        args[0].mul_(0.5).add_(0.3)

    layer.linear2.register_forward_pre_hook(hook)


def need_weights(layer):
    def hook(module, args, kwargs):
        return args, {**kwargs, "need_weights": True}

    layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def kwargs_in_place(layer):
    def hook(module, args, kwargs):
        kwargs["need_weights"] = True  # other kernels, which keep other tensors

    layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True)


def attribute(layer):
    def hook(module, args):
        layer.dropout2.scale = args[0].mean()

    layer.linear1.register_forward_pre_hook(hook)
    layer.dropout2.register_forward_hook(lambda m, args, y: y * m.scale)


def activation_in_an_attribute(layer):
    """A hook hands a tensor to the module's forward."""

    def hook(module, args):
        module.scale = args[0].mean()

    linear = layer.linear1
    linear.register_forward_pre_hook(hook)
    linear.forward = lambda x: nn.Linear.forward(linear, x) * linear.scale


def handed_on(layer):
    stash = {}

    def keep(module, args, y):
        stash["h"] = y

    layer.norm1.register_forward_hook(keep)
    layer.dropout2.register_forward_hook(lambda m, args, y: y * stash["h"])


HOOKS = {
    f"hook: {hook.__name__}": Change(f"{module} has hooks", hook)
    for module, hooks in {
        "linear1": (replaced_output, replaced_input, output_in_place, attribute,
                    activation_in_an_attribute),
        "linear2": (input_in_place,),
        "self_attn": (replaced_attention, need_weights, kwargs_in_place),
        "norm1": (handed_on,),
    }.items()
    for hook in hooks
}  # fmt: skip


# --- subclasses


def keeps_weights(base):
    class KeepsWeights(base):
        """Attention maps for plotting."""

        weights = None

        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            x, self.weights = self.self_attn(
                x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding_mask, need_weights=True
            )
            return self.dropout1(x)

    return KeepsWeights


class DropPath(nn.Module):
    """Stochastic depth: whole samples skip the branch."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training or self.p == 0.0:
            return x
        keep = torch.rand(1, x.shape[1], 1, dtype=x.dtype) >= self.p
        return x * keep / (1 - self.p)


def drop_path_blocks(base):
    class DropPathBlocks(base):
        """DropPath and LayerScale on both branches, by the blocks."""

        def __init__(self, d_model, nhead, dim_feedforward, drop_path=0.3, **kwargs):
            super().__init__(d_model, nhead, dim_feedforward, **kwargs)
            self.drop_path = DropPath(drop_path)
            self.gamma = nn.Parameter(torch.full((2, d_model), 0.1, dtype=DOUBLE))

        def _sa_block(self, *args, **kwargs):
            return self.drop_path(self.gamma[0] * super()._sa_block(*args, **kwargs))

        def _ff_block(self, x):
            return self.drop_path(self.gamma[1] * super()._ff_block(x))

    return DropPathBlocks


def drop_path_forward(base):
    class DropPathForward(base):
        """The same on the residual of the whole layer, by forward."""

        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.drop_path = DropPath(0.3)

        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            out = super().forward(src, src_mask, src_key_padding_mask, is_causal)
            return src + self.drop_path(out - src)

    return DropPathForward


def own_forward(base):
    class OwnForward(base):
        """Calls the blocks itself, with a scale between."""

        def forward(self, src, src_mask=None, src_key_padding_mask=None, is_causal=False):
            x = src
            x = x + 0.5 * self._sa_block(self.norm1(x), src_mask, src_key_padding_mask)
            return x + 0.5 * self._ff_block(self.norm2(x))

    return OwnForward


def rotate(x):
    """Rotary embedding, x (B, H, S, E)."""
    seq_len, dim = x.shape[-2:]
    freqs = torch.exp(torch.arange(0, dim, 2, dtype=x.dtype) * (-math.log(1e4) / dim))
    angles = torch.arange(seq_len, dtype=x.dtype)[:, None] * freqs
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos(), angles.sin()
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


def rotary(base):
    class Rotary(base):
        """Own attention on the stock module's weights."""

        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            attn = self.self_attn
            seq_len, batch, width = x.shape
            packed = F.linear(x, attn.in_proj_weight, attn.in_proj_bias)
            q, k, v = packed.view(seq_len, batch, 3, attn.num_heads, -1).permute(2, 1, 3, 0, 4)
            p = attn.dropout if self.training else 0.0
            out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask, p)
            out = out.permute(2, 0, 1, 3).reshape(seq_len, batch, width)
            return self.dropout1(attn.out_proj(out))

    return Rotary


def extra_module(base):
    class ExtraModule(base):
        """A gate beside the stock children, used by forward."""

        def __init__(self, d_model, *args, **kwargs):
            super().__init__(d_model, *args, **kwargs)
            self.gate = nn.Linear(d_model, d_model, dtype=DOUBLE)

        def forward(self, src, *args, **kwargs):
            return super().forward(src * self.gate(src).sigmoid(), *args, **kwargs)

    return ExtraModule


class ConditionalNorm(nn.Module):
    """A norm whose shift comes from outside, set before the call."""

    def __init__(self, d_model):
        super().__init__()
        self.norm = nn.LayerNorm(d_model, dtype=DOUBLE)
        self.shift = nn.Linear(3, d_model, dtype=DOUBLE)
        self.condition = torch.zeros(3, dtype=DOUBLE)

    def forward(self, x):
        return self.norm(x) + self.shift(self.condition)


def conditional_norm(base):
    class Conditional(base):
        """As diffusion models have it: both norms take a condition."""

        def __init__(self, d_model, *args, **kwargs):
            super().__init__(d_model, *args, **kwargs)
            self.norm1, self.norm2 = ConditionalNorm(d_model), ConditionalNorm(d_model)

        def forward(self, src, *args, **kwargs):
            for norm in (self.norm1, self.norm2):
                norm.condition = src.mean((0, 1))[:3]
            return super().forward(src, *args, **kwargs)

    return Conditional


def own_defaults(base):
    class OwnDefaults(base):
        """Only other defaults: stays on the fused path."""

        def __init__(self, d_model=8, nhead=2, dim_feedforward=12, norm_first=True, **kwargs):
            kwargs = {"dropout": 0.0, "activation": "gelu", **kwargs}
            super().__init__(d_model, nhead, dim_feedforward, norm_first=norm_first, **kwargs)

    return OwnDefaults


SUBCLASSES = {
    "a subclass that keeps weights": Change(
        "KeepsWeights._sa_block is overridden", subclass=keeps_weights
    ),
    "a subclass with DropPath": Change(
        "DropPathBlocks._sa_block is overridden", subclass=drop_path_blocks
    ),
    "a forward with DropPath": Change("", subclass=drop_path_forward),
    "a forward of its own": Change("", subclass=own_forward),  # which calls the submodules itself
    "rotary attention": Change("Rotary._sa_block is overridden", subclass=rotary),
    "a module more": Change("", subclass=extra_module),
    "conditional norms": Change(
        "norm1 is changes.ConditionalNorm" + LAYER_NORM, subclass=conditional_norm
    ),
    "other defaults": Change("", subclass=own_defaults),
}
CHANGES = SURGERY | HOOKS | SUBCLASSES
