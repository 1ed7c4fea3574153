"""Layers of every kind, and what they are called with."""

import copy

import torch
from reference import randomize
from torch import nn

from fused_remat import FusedRematCausalLayer, FusedRematDecoderLayer, FusedRematLayer

B, S, D, H, F = 3, 6, 8, 2, 12


def nothing(dtype):
    return {}


def masks(dtype):
    padding = torch.zeros(B, S, dtype=torch.bool)
    padding[1, 4:] = True
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    return {"src_mask": later, "src_key_padding_mask": padding}


def memory(dtype):
    return {"memory": draw(B, 5, D, seed=3, dtype=dtype)}


def rope(dtype):
    angles = torch.outer(torch.arange(S), torch.tensor([1.0, 0.1])).to(dtype)
    return {"rope": (angles.cos(), angles.sin())}


FIRST = {"batch_first": True}
#: The class, its options by turns, and what a call has besides its input.
KINDS = {
    "pre-norm": (FusedRematLayer, [{"norm_first": True, **FIRST}], nothing),
    "post-norm, sequence first, masks": (FusedRematLayer, [{"activation": "gelu"}], masks),
    "own activation": (FusedRematLayer, [{"activation": nn.PReLU(init=0.2), **FIRST}], nothing),
    "decoder": (FusedRematDecoderLayer, [{"norm_first": True, **FIRST}, FIRST], memory),
    "causal": (FusedRematCausalLayer, [{"kv_heads": 1, "qk_norm": True}], rope),
}


def draw(*shape, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def layers_of(kind, count=1, dtype=torch.float32, dropout=0.1, **options):
    """Layers in a row, the input of the first, the arguments of each call, leaves among these."""
    cls, more, arguments = copy.deepcopy(KINDS[kind])  # an activation may have parameters
    torch.manual_seed(0)
    made = nn.ModuleList(
        cls(D, H, F, dropout, **{**more[i % len(more)], **options}) for i in range(count)
    )
    given = arguments(dtype)
    x = draw(*((S, B, D) if "src_mask" in given else (B, S, D)), dtype=dtype)
    return randomize(made).to(dtype), x, given, [given["memory"]] if "memory" in given else []
