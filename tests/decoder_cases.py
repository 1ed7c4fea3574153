"""A decoder layer of each kind with the same parameters, its inputs and masks, and its results."""

import reference
import torch

D, H, F, B, S, M = 12, 3, 20, 4, 7, 5
SIZES = {"d_model": D, "nhead": H, "dim_feedforward": F}


def pair(policy="full", seed=0, **kwargs):
    """A stock layer with random parameters, and a fused one with the same values."""
    options = {**SIZES, "dropout": 0.0, "batch_first": True, "activation": "gelu", **kwargs}
    return reference.pair(policy=policy, seed=seed, decoder=True, **options)


def data(dtype=torch.float64, seq_len=S, memory_len=M, batch=B, width=D):
    """tgt (B, S, D), memory (B, M, D) and the output's gradient."""
    g = torch.Generator().manual_seed(seq_len)
    lengths = (seq_len, memory_len, seq_len)
    return [torch.randn(batch, n, width, generator=g).to(dtype) for n in lengths]


def run(layer, tgt, memory, dy=None, **kwargs):
    """Output, and gradients of both inputs, every parameter and masks that require one."""
    return reference.run(layer, tgt, dy, memory=memory, **kwargs)


def masks(name, dtype, seq_len=S, memory_len=M):
    """Keyword arguments of forward by name: of every kind that the stock layer takes."""
    g = torch.Generator().manual_seed(1)

    def excluded(*size):
        return torch.rand(size, generator=g) < 0.2

    def added(*size):
        values = torch.randn(size, generator=g).masked_fill(excluded(*size), -torch.inf)
        return values.to(dtype)

    square, grid = (seq_len, seq_len), (seq_len, memory_len)
    later = torch.ones(square, dtype=torch.bool).triu(1)
    return {
        "none": dict,
        "bool": lambda: {"tgt_mask": excluded(*square), "memory_mask": excluded(*grid)},
        "per head": lambda: {
            "tgt_mask": added(B * H, *square), "memory_mask": added(B * H, *grid),
        },
        "float with gradient": lambda: {
            "tgt_mask": added(*square).requires_grad_(),
            "memory_mask": added(*grid).requires_grad_(),
            "memory_key_padding_mask": added(B, memory_len).requires_grad_(),
        },
        "padding": lambda: {
            "tgt_key_padding_mask": excluded(B, seq_len),
            "memory_key_padding_mask": excluded(B, memory_len),
        },
        "both": lambda: {
            "tgt_mask": later, "tgt_key_padding_mask": excluded(B, seq_len), "tgt_is_causal": True,
            "memory_mask": excluded(*grid), "memory_key_padding_mask": excluded(B, memory_len),
            "memory_is_causal": True,
        },
        "a fully masked row": lambda: {
            "memory_key_padding_mask": torch.arange(B)[:, None].expand(B, memory_len) == 1,
        },
        # A hint stands for its mask, which is not looked at then.
        "hints": lambda: {
            "tgt_mask": torch.zeros(1, 1), "tgt_is_causal": True,
            "memory_mask": torch.zeros(1, 1), "memory_is_causal": True,
        },
    }[name]()  # fmt: skip


MASKS = (
    "none", "bool", "per head", "float with gradient", "padding", "both", "a fully masked row",
    "hints",
)  # fmt: skip
