"""The fused layers as rows: how each is built, its stock twin, its inputs, masks and results."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from accuracy import check_error, scales
from block_inputs import tables
from reference import causal_block as plain
from reference import masked_layer, randomize
from torch import Tensor, nn

from fused_remat import FusedRematCausalLayer, FusedRematDecoderLayer, FusedRematLayer
from fused_remat.layers.causal import CausalLayer

D, H, F, B, S, M = 12, 3, 20, 4, 7, 5
#: Mask, padding and causal hint of an attention, as each layer's forward names them.
SRC = ("src_mask", "src_key_padding_mask", "is_causal")
TGT = ("tgt_mask", "tgt_key_padding_mask", "tgt_is_causal")
MEMORY = ("memory_mask", "memory_key_padding_mask", "memory_is_causal")
CAUSAL = ("attn_mask", "key_padding_mask", "")


@dataclass(frozen=True)
class Kind:
    """One layer: its classes, its options, and what its forward takes."""

    fused: type[nn.Module]
    stock: type[nn.Module]
    options: Mapping[str, Any]
    masks: tuple[tuple[str, str, str], ...]
    #: "whole" or "partial": of how much of a head is rotated.
    rope: str = ""
    #: Activations that policies of one's own may keep.
    saves: tuple[set[str], ...] = ()
    sizes: Mapping[str, int] = field(
        default_factory=lambda: {"d_model": D, "nhead": H, "dim_feedforward": F}
    )

    @property
    def has_memory(self) -> bool:
        return len(self.masks) == 2

    @property
    def is_causal(self) -> bool:
        return self.fused is FusedRematCausalLayer

    def size(self, name: str) -> int:
        return {**self.sizes, **self.options}[name]

    def pair(self, policy="full", seed=0, **options):
        """Return a stock layer with random parameters, and a fused one with the same values."""
        options = {**self.sizes, "dropout": 0.0, **self.options, **options}
        torch.manual_seed(seed)
        stock = randomize(self.stock(**options), seed)
        fused = self.fused(**options, policy=policy)
        fused.load_state_dict(stock.state_dict())
        return stock, fused

    def data(self, dtype=torch.float64, seq=S, memory=M, batch=B) -> list[Tensor]:
        """Return the input (B, S, D), the decoder's memory (B, M, D), and the output's gradient."""
        generator = torch.Generator().manual_seed(seq)
        lengths = (seq, memory, seq) if self.has_memory else (seq, seq)
        width = self.size("d_model")
        return [torch.randn(batch, n, width, generator=generator).to(dtype) for n in lengths]

    def given(self, form: str, dtype=torch.float64, seq=S, memory=M, batch=B) -> dict[str, Any]:
        """Keyword arguments of forward: masks of a form, and tables where heads are rotated."""
        if form == "nothing":
            return {}
        made: dict[str, Any] = {}
        if self.rope:
            wide = torch.promote_types(dtype, torch.float32)
            half = self.size("head_dim") // 2
            made["rope"] = tables(seq, half if self.rope == "whole" else half - 1, dtype=wide)
        generator = torch.Generator().manual_seed(1)
        groups = list(zip(self.masks, (seq, memory), strict=False))
        # That one is of the memory's keys alone where there is a memory.
        for names, keys in groups[-1:] if form == "a sequence without keys" else groups:
            mask, padding, hint = FORMS[form]
            if mask:
                made[names[0]] = self._mask(mask, (batch, seq, keys), dtype, generator)
            if padding:
                made[names[1]] = _values(padding, (batch, keys), dtype, generator)
            if hint and names[2]:
                made[names[2]] = True
        return made

    def _mask(self, how: str, size: tuple[int, int, int], dtype, generator) -> Tensor:
        (batch, *size), nhead = size, self.size("nhead")
        if how == "unread":  # a hint stands for the mask, which is not looked at then
            how = "later" if self.is_causal else how
        if how.endswith(" per head"):
            size = (batch * nhead, *size)
        mask = _values(how.removesuffix(" per head"), size, dtype, generator)
        if self.is_causal and mask.dim() == 3:
            mask = mask.detach().unflatten(0, (batch, nhead)).requires_grad_(mask.requires_grad)
        # Of a bool mask True is excluded in torch.nn, and takes part in a causal layer.
        return ~mask if self.is_causal and mask.dtype == torch.bool else mask

    def masked(self, layer: nn.Module, inputs: Sequence[Tensor], seed: Tensor) -> Tensor:
        """Return the layer in plain autograd, dropout masks from the generator's definition."""
        if self.is_causal:
            return plain(*inputs, by_block(layer), layer.nhead, seed=int(seed), **as_op(layer))
        return masked_layer(layer, seed, *inputs)


def _values(how: str, size: tuple[int, ...], dtype, generator) -> Tensor:
    excluded = torch.rand(size, generator=generator) < 0.2
    if how == "unread":
        return torch.zeros(1, 1)
    if how == "later":
        return torch.ones(size, dtype=torch.bool).triu(1)
    if how in ("one row", "float row"):  # of queries, or the keys of one sequence
        excluded = (torch.arange(size[0]) == 1)[:, None].expand(size)
        values = torch.zeros(size, dtype=dtype).masked_fill(excluded, -torch.inf)
        return excluded if how == "one row" else values
    if how == "bool":
        return excluded
    values = torch.randn(size, generator=generator).masked_fill(excluded, -torch.inf).to(dtype)
    return values.requires_grad_(how == "grad")


#: What a mask, the padding and the hint are, by what they show.
FORMS = {
    "nothing": ("", "", False),
    "tables": ("", "", False),
    "bool": ("bool", "", False),
    "float": ("float", "", False),
    "bool per head": ("bool per head", "", False),
    "float per head": ("float per head", "", False),
    "per head, with a gradient": ("grad per head", "", False),
    "bool padding": ("", "bool", False),
    "float padding": ("", "float", False),
    "padding with a gradient": ("", "grad", False),
    "bool and padding": ("bool", "bool", False),
    "float and padding, with gradients": ("grad", "grad", False),
    "a mask, padding and a hint": ("later", "bool", True),
    "padding and a hint that does not count": ("bool", "bool", True),
    "a hint": ("unread", "", True),
    "a sequence without keys": ("", "one row", False),
    "a query without keys": ("float row", "", False),
}

_CAUSAL = functools.partial(Kind, FusedRematCausalLayer, CausalLayer, masks=(CAUSAL,))
_HEADS = {"nhead": 4, "kv_heads": 2, "head_dim": 6}
#: A causal layer as models have it.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen": {"qkv_bias": True, "qk_norm": True, "window": 3},
    "gemma": {"placement": "sandwich", "activation": "gelu_tanh", "softcap": 2.0, "qk_norm": True},
    "vit": {"norm": "layer_norm", "bias": True, "gated": False, "activation": "gelu",
            "is_causal": False, "kv_heads": 4},
    "bert": {"placement": "post", "norm": "layer_norm", "bias": True, "gated": False,
             "is_causal": False, "window": 2},
}  # fmt: skip
_ROPE = {"llama": "whole", "qwen": "whole", "gemma": "partial", "bert": "partial"}

TORCH_NN = {
    f"{name}, {'pre' if norm_first else 'post'}-norm": Kind(
        fused, stock, {"norm_first": norm_first, "batch_first": True, "activation": "gelu"}, masks,
        saves=saves,
    )
    for name, fused, stock, masks, saves in (
        ("encoder", FusedRematLayer, nn.TransformerEncoderLayer, (SRC,), ({"qkv"}, {"mid", "up"})),
        ("decoder", FusedRematDecoderLayer, nn.TransformerDecoderLayer, (TGT, MEMORY),
         ({"query", "mid1"}, {"kv", "act"})),
    )
    for norm_first in (True, False)
}  # fmt: skip
DECODERS = [name for name, kind in TORCH_NN.items() if kind.has_memory]
KINDS = TORCH_NN | {
    name: _CAUSAL({**_HEADS, **options}, rope=_ROPE.get(name, ""), saves=({"qkv"}, {"mid", "up"}))
    for name, options in MODELS.items()
}


def run(
    layer: nn.Module, *tensors: Tensor, low: torch.dtype | None = None, **given
) -> list[Tensor]:
    """Output, and gradients of the inputs, of every parameter and of masks that require one.

    The last of `tensors` is the output's gradient. low: the dtype of autocast around forward.
    """
    *inputs, dy = tensors
    inputs = [t.detach().requires_grad_() for t in inputs]  # as they lie in memory
    with torch.autocast(dy.device.type, low or torch.bfloat16, enabled=low is not None):
        y = layer(*inputs, **given)
    leaves = [*inputs, *(p for p in layer.parameters() if p.requires_grad)]
    leaves += [m for m in given.values() if isinstance(m, Tensor) and m.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


def in_double(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same masks in float64; tables of cos and sin stay as they are."""
    return {
        name: m.detach().double().requires_grad_(m.requires_grad)
        if isinstance(m, Tensor) and m.is_floating_point()
        else m
        for name, m in given.items()
    }


def check_errors(
    kind: Kind, stock, fused, *tensors: Tensor, low=None, floor=None, **given
) -> list[Tensor]:
    """`check_error` of the fused layer, the stock one and that in float64; its results.

    A causal layer's vectors are taken together: its norms' dozen numbers are no sample.
    """

    def seeded(layer, tensors, given, low=None):
        torch.manual_seed(1)
        return run(layer, *tensors, low=low, **given)

    found = [seeded(layer, tensors, given, low) for layer in (fused, stock)]
    stock = copy.deepcopy(stock).double()
    exact = seeded(stock, [t.double() for t in tensors], in_double(given))
    vectors, norms = [i for i, t in enumerate(exact) if t.dim() == 1], scales(exact)

    def joined(results):
        if not kind.is_causal or not vectors:
            return results
        ends = [results[i].double() / norms[i] for i in vectors]
        others = [t for i, t in enumerate(results) if i not in vectors]
        return [*others, torch.cat(ends).to(results[-1].dtype)]

    check_error(*map(joined, (*found, exact)), computed=low, floor=floor)
    return found[0]


def by_block(layer: nn.Module) -> dict[str, Tensor]:
    """Return a causal layer's parameters by the names of `ops.causal_block`."""
    named, names = {}, {"up": "fc1", "down": "fc2"}
    for name, p in layer.named_parameters():
        module, which = name.split(".")
        named[f"{names.get(module, module)}.{which}"] = p
    return named


def as_op(layer: nn.Module) -> dict[str, Any]:
    """Return what the op takes for what a causal layer was made with."""
    window = -1 if layer.window is None else layer.window
    return {
        "kv_heads": layer.kv_heads, "is_causal": layer.is_causal, "window": (window, window),
        "softcap": layer.softcap, "placement": layer.placement, "activation": layer.activation,
        "norm": "rms_norm" if type(layer.norm1) is nn.RMSNorm else "layer_norm",
        "rope_interleaved": layer.rope_interleaved, "dropout_p": layer.dropout,
        "attention_dropout_p": layer.attention_dropout,
    }  # fmt: skip
