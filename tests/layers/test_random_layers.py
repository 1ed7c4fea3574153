"""Random configurations of the encoder layer against PyTorch's own.

A configuration is everything a caller can choose, drawn from one seed: sizes, dtype, layout, masks,
activation, policy, mode, what is frozen, in which pieces the block runs. Output and every gradient
must be within 1.5 times PyTorch's own error against float64, plus a few roundings. Where the stock
layer is wrong itself (`docs/behaviour.md`), float64 alone decides. A failure shows what was drawn.
Ten thousand: `FUSED_REMAT_MORE_EXAMPLES=50`.
"""

import copy
import random
from math import inf
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accuracy import ROUNDINGS, scales
from layer_kinds import in_double
from reference import EXACT_PRESETS, randomize
from tiers import MORE
from torch import nn

from fused_remat import FusedRematLayer, Policy
from fused_remat.graph.build import block_graph
from fused_remat.spec import nn_layer_spec

FIRST, COUNT, AT_ONCE = 100_000, 220 * MORE, 22
ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_tanh": nn.GELU(approximate="tanh"), "silu": F.silu,
    "tanh": torch.tanh, "a function": torch.sin, "a module": nn.ELU(),
}  # fmt: skip

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched")


def draw(seed):
    """The configuration of a seed."""
    r = random.Random(seed)
    nhead = r.choice((1, 1, 2, 3, 4))
    # A norm over fewer than 4 elements is nearly constant, its gradient nearly all cancellation.
    d_model = nhead * r.randint(4 if nhead == 1 else 2, 12)
    norm_first = r.random() < 0.5
    names = block_graph(nn_layer_spec(norm_first, 1, 1, "relu")).names
    some = tuple(n for n in names if r.random() < 0.4)
    dtype = r.choice(("float64", "float64", "float32", "float32", "bfloat16", "float16"))
    # In 16 bits whether a value falls on the other side of a kink is chance.
    smooth = [a for a in ACTIVATIONS if a not in ("relu", "a module")]
    return SimpleNamespace(
        seed=seed, d_model=d_model, nhead=nhead, dim_feedforward=r.randint(1, 70),
        activation=r.choice(list(ACTIVATIONS) if dtype in ("float64", "float32") else smooth),
        eps=r.choice((1e-5, 1e-3)), batch_first=r.random() < 0.5, norm_first=norm_first,
        bias=r.random() < 0.8, dtype=getattr(torch, dtype), batch=r.randint(1, 5),
        seq_len=r.randint(1, 40), unbatched=r.random() < 0.1,
        mask=r.choice(("none", "none", "square", "per_head", "causal", "causal hint")),
        mask_kind=r.choice(("bool", "float")), mask_grad=r.random() < 0.3,
        padding=r.random() < 0.4,
        mode=r.choice(("train", "train", "train", "eval", "eval without gradients")),
        frozen=[i for i in range(12) if r.random() < r.choice((0.0, 0.0, 0.3, 1.0))],
        x_grad=r.random() < 0.8,
        layout=r.choice(("contiguous", "contiguous", "transposed", "sliced")),
        policy=r.choice((*EXACT_PRESETS, Policy(save=some))), tokens=r.choice((1, 7, 16, 64, 512)),
        block=r.choice((1, 1 << 10, 1 << 20)), lowest=r.choice((-inf, -inf, -3e4)),
    )  # fmt: skip


def layer_of(cfg):
    """The stock layer of a configuration, with random parameters."""
    torch.manual_seed(cfg.seed)
    layer = nn.TransformerEncoderLayer(
        cfg.d_model, cfg.nhead, cfg.dim_feedforward, 0.0,
        copy.deepcopy(ACTIVATIONS[cfg.activation]), cfg.eps, cfg.batch_first, cfg.norm_first,
        cfg.bias, dtype=cfg.dtype,
    )  # fmt: skip
    for i, p in enumerate(randomize(layer, cfg.seed).parameters()):
        p.requires_grad_(i not in cfg.frozen)
    return layer.train(cfg.mode == "train")


def inputs(cfg):
    """src, the output's gradient, and the masks, with values that the dtype can hold."""
    g = torch.Generator().manual_seed(cfg.seed)
    batch = 1 if cfg.unbatched else cfg.batch
    shape = (batch, cfg.seq_len) if cfg.batch_first else (cfg.seq_len, batch)
    x, dy = torch.randn(2, *shape, cfg.d_model, generator=g).to(cfg.dtype)
    if cfg.layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif cfg.layout == "sliced":
        x = torch.stack([x, x], -1)[..., 0]
    if cfg.unbatched:
        dim = 0 if cfg.batch_first else 1
        x, dy = x.squeeze(dim), dy.squeeze(dim)

    def mask(*size):
        excluded = torch.rand(size, generator=g) < 0.2
        if cfg.mask_kind == "bool":
            return excluded
        values = torch.randn(size, generator=g).masked_fill(excluded, cfg.lowest)
        return values.to(cfg.dtype).requires_grad_(cfg.mask_grad)

    given = {}
    square = (cfg.seq_len, cfg.seq_len)
    if cfg.mask in ("square", "per_head"):
        lead = (batch * cfg.nhead,) if cfg.mask == "per_head" else ()
        given["src_mask"] = mask(*lead, *square)
    elif cfg.mask != "none":
        later = torch.ones(square, dtype=torch.bool).triu(1)
        if cfg.mask_kind == "float":
            later = torch.zeros(square, dtype=cfg.dtype).masked_fill_(later, -torch.inf)
        given = {"src_mask": later, "is_causal": cfg.mask == "causal hint"}
    if cfg.padding:
        given["src_key_padding_mask"] = mask(*[batch] * (not cfg.unbatched), cfg.seq_len)
    return x, dy, given


def results(layer, x, dy, given, mode="train", x_grad=True):
    """The output and every gradient, by name."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(x_grad)
    with torch.set_grad_enabled(mode != "eval without gradients"):
        y = layer(x, **given)
    found = {"output": y.detach()}
    leaves = {"src": x, **dict(layer.named_parameters()), **given}
    leaves = {n: t for n, t in leaves.items() if torch.is_tensor(t) and t.requires_grad}
    if y.requires_grad:
        grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
        found.update(zip(leaves, grads, strict=True))
    return found


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, AT_ONCE))
def test_random_configurations_agree_with_the_stock_layer(first, monkeypatch):
    for cfg in map(draw, range(first, first + AT_ONCE)):
        stock, (x, dy, given) = layer_of(cfg), inputs(cfg)
        fused = FusedRematLayer.from_layer(copy.deepcopy(stock), policy=cfg.policy)
        monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", cfg.tokens)
        monkeypatch.setattr("fused_remat.steps.attention_rows._BLOCK", cfg.block)
        ours = results(fused, x, dy, given, cfg.mode, cfg.x_grad)
        # In eval without gradients the stock layer has defects of its own: float64 trains instead.
        stock.train()
        peer = results(stock, x, dy, given, x_grad=cfg.x_grad)
        exact = results(stock.double(), x.double(), dy.double(), in_double(given))
        if cfg.mode != "eval without gradients":
            assert ours.keys() == peer.keys(), cfg
        exact = {name: truth for name, truth in exact.items() if truth is not None}
        sizes = dict(zip(exact, scales(list(exact.values())), strict=True))
        for name, got in ours.items():
            other = peer[name]
            assert (got is None) == (other is None) == (name not in exact), (name, cfg)
            if got is None:
                continue
            truth = exact[name]
            assert (got.shape, got.dtype) == (other.shape, other.dtype), (name, cfg)
            error, own = ((t.double() - truth).norm().item() / sizes[name] for t in (got, other))
            assert error <= 1.5 * own + ROUNDINGS[cfg.dtype], (name, cfg)
