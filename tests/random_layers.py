"""Random configurations of the layer against PyTorch's own: `python tests/random_layers.py`.

A configuration is everything a caller can choose, drawn from one seed: sizes, dtype, layout, masks,
activation, policy, mode, what is frozen, in which pieces the block runs. Output and every gradient
must be within 1.5 times PyTorch's own error against float64, plus a few roundings. Where the stock
layer is wrong itself (`docs/behaviour.md`), float64 alone decides. Every failing seed is printed;
`--seed N --count 1` runs it again.
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accuracy import ROUNDINGS
from torch import Tensor, nn

from fused_remat import FusedRematLayer, Policy
from fused_remat.execution import choose
from fused_remat.graph.build import block_graph
from fused_remat.spec import nn_layer_spec
from fused_remat.steps import attention_rows

ACTIVATIONS = {
    "relu": "relu", "gelu": "gelu", "gelu_tanh": nn.GELU(approximate="tanh"), "silu": F.silu,
    "tanh": torch.tanh, "a function": torch.sin, "a module": nn.ELU(),
}  # fmt: skip
EXACT_PRESETS = ("full", "lean", "balanced", "fast", "none")


@dataclass(frozen=True)
class Drawn:
    """One configuration; `asdict` of it is what a failure prints."""

    seed: int
    d_model: int
    nhead: int
    dim_feedforward: int
    activation: str
    eps: float
    batch_first: bool
    norm_first: bool
    bias: bool
    dtype: str
    batch: int
    seq_len: int
    unbatched: bool
    mask: str
    mask_kind: str
    mask_grad: bool
    padding: bool
    mode: str
    frozen: tuple[int, ...]
    x_grad: bool
    layout: str
    policy: tuple[str, ...] | str
    tokens: int
    block: int
    lowest: float


def draw(seed: int) -> Drawn:
    """The configuration of a seed."""
    r = random.Random(seed)
    nhead = r.choice((1, 1, 2, 3, 4))
    # A norm over fewer than 4 elements is nearly constant, its gradient nearly all cancellation.
    d_model = nhead * r.randint(4 if nhead == 1 else 2, 12)
    norm_first = r.random() < 0.5
    names = block_graph(nn_layer_spec(norm_first, 1, 1, "relu")).names
    some = tuple(n for n in names if r.random() < 0.4)
    dtype = r.choice(("float64", "float64", "float32", "float32", "bfloat16", "float16"))
    smooth = [a for a in ACTIVATIONS if a not in ("relu", "a module")]
    return Drawn(
        seed=seed,
        d_model=d_model,
        nhead=nhead,
        dim_feedforward=r.randint(1, 70),
        # In 16 bits whether a value falls on the other side of a kink is chance.
        activation=r.choice(list(ACTIVATIONS) if dtype in ("float64", "float32") else smooth),
        eps=r.choice((1e-5, 1e-3)),
        batch_first=r.random() < 0.5,
        norm_first=norm_first,
        bias=r.random() < 0.8,
        dtype=dtype,
        batch=r.randint(1, 5),
        seq_len=r.randint(1, 40),
        unbatched=r.random() < 0.1,
        mask=r.choice(("none", "none", "square", "per_head", "causal", "causal hint")),
        mask_kind=r.choice(("bool", "float")),
        mask_grad=r.random() < 0.3,
        padding=r.random() < 0.4,
        mode=r.choice(("train", "train", "train", "eval", "eval without gradients")),
        frozen=tuple(i for i in range(12) if r.random() < r.choice((0.0, 0.0, 0.3, 1.0))),
        x_grad=r.random() < 0.8,
        layout=r.choice(("contiguous", "contiguous", "transposed", "sliced")),
        policy=r.choice((*EXACT_PRESETS, some)),
        tokens=r.choice((1, 7, 16, 64, 512)),
        block=r.choice((1, 1 << 10, 1 << 20)),
        lowest=r.choice((-inf, -inf, -3e4)),
    )


def layer_of(cfg: Drawn, dtype: torch.dtype, dropout: float = 0.0) -> nn.TransformerEncoderLayer:
    """The stock layer of a configuration, with random parameters."""
    torch.manual_seed(cfg.seed)
    layer = nn.TransformerEncoderLayer(
        cfg.d_model, cfg.nhead, cfg.dim_feedforward, dropout,
        copy.deepcopy(ACTIVATIONS[cfg.activation]), cfg.eps, cfg.batch_first, cfg.norm_first,
        cfg.bias, dtype=dtype,
    )  # fmt: skip
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(torch.randn(p.shape, dtype=torch.float64).to(dtype), alpha=0.1)
            p.requires_grad_(i not in cfg.frozen)
    return layer.train(cfg.mode == "train")


def inputs(cfg: Drawn, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """src, the output's gradient, and the masks, with values that `dtype` can hold."""
    g = torch.Generator().manual_seed(cfg.seed)
    batch = 1 if cfg.unbatched else cfg.batch
    shape = (batch, cfg.seq_len) if cfg.batch_first else (cfg.seq_len, batch)
    x, dy = torch.randn(2, *shape, cfg.d_model, generator=g).to(dtype)
    if cfg.layout == "transposed":
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif cfg.layout == "sliced":
        x = torch.stack([x, x], -1)[..., 0]
    if cfg.unbatched:
        dim = 0 if cfg.batch_first else 1
        x, dy = x.squeeze(dim), dy.squeeze(dim)

    def mask(*size: int) -> Tensor:
        excluded = torch.rand(size, generator=g) < 0.2
        if cfg.mask_kind == "bool":
            return excluded
        values = torch.randn(size, generator=g).masked_fill(excluded, cfg.lowest)
        return values.to(dtype).requires_grad_(cfg.mask_grad)

    kwargs: dict[str, Any] = {}
    square = (cfg.seq_len, cfg.seq_len)
    if cfg.mask in ("square", "per_head"):
        lead = (batch * cfg.nhead,) if cfg.mask == "per_head" else ()
        kwargs["src_mask"] = mask(*lead, *square)
    elif cfg.mask != "none":
        later = torch.ones(square, dtype=torch.bool).triu(1)
        if cfg.mask_kind == "float":
            later = torch.zeros(square, dtype=dtype).masked_fill_(later, -torch.inf)
        kwargs = {"src_mask": later, "is_causal": cfg.mask == "causal hint"}
    if cfg.padding:
        size = (cfg.seq_len,) if cfg.unbatched else (batch, cfg.seq_len)
        kwargs["src_key_padding_mask"] = mask(*size)
    return x, dy, kwargs


def results(
    layer: nn.Module, x: Tensor, dy: Tensor, kwargs: dict[str, Any], cfg: Drawn
) -> dict[str, Tensor | None]:
    """The output and every gradient, by name."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_(cfg.x_grad)
    masks = {n: m for n, m in kwargs.items() if isinstance(m, Tensor) and m.requires_grad}
    with torch.set_grad_enabled(cfg.mode != "eval without gradients"):
        y = layer(x, **kwargs)
    found: dict[str, Tensor | None] = {"output": y.detach()}
    leaves = {"src": x, **dict(layer.named_parameters()), **masks}
    leaves = {n: t for n, t in leaves.items() if t.requires_grad}
    if y.requires_grad:
        grads = torch.autograd.grad(y, list(leaves.values()), dy, allow_unused=True)
        found.update(zip(leaves, grads, strict=True))
    return found


def widened(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The same masks in float64."""
    return {
        n: m.detach().double().requires_grad_(m.requires_grad)
        if isinstance(m, Tensor) and m.is_floating_point()
        else m
        for n, m in kwargs.items()
    }


@contextmanager
def in_pieces_of(cfg: Drawn) -> Iterator[None]:
    """Groups and tiles of so many tokens, attention in blocks of so many elements."""
    before = choose._CPU_TOKENS, attention_rows._BLOCK
    choose._CPU_TOKENS, attention_rows._BLOCK = cfg.tokens, cfg.block
    try:
        yield
    finally:
        choose._CPU_TOKENS, attention_rows._BLOCK = before


def check(seed: int) -> str | None:
    """What is wrong with the layer in the configuration of `seed`, or None."""
    cfg = draw(seed)
    dtype = getattr(torch, cfg.dtype)
    stock = layer_of(cfg, dtype)
    policy = cfg.policy if isinstance(cfg.policy, str) else Policy(save=cfg.policy)
    fused = FusedRematLayer.from_layer(copy.deepcopy(stock), policy=policy)
    x, dy, kwargs = inputs(cfg, dtype)
    # In eval without gradients the stock layer has defects of its own: float64 trains instead.
    exact_cfg = replace(cfg, mode="train", x_grad=True)
    exact_layer = copy.deepcopy(stock).double().train()
    exact = results(exact_layer, x.double(), dy.double(), widened(kwargs), exact_cfg)
    peer_cfg = replace(cfg, mode="train")
    peer = results(copy.deepcopy(stock).train(), x, dy, kwargs, peer_cfg)
    with in_pieces_of(cfg):
        ours = results(fused, x, dy, kwargs, cfg)
    return _compare(ours, peer, exact, dtype, gradients=cfg.mode != "eval without gradients")


def _compare(
    ours: dict[str, Tensor | None],
    peer: dict[str, Tensor | None],
    exact: dict[str, Tensor | None],
    dtype: torch.dtype,
    gradients: bool,
) -> str | None:
    if gradients and set(ours) != set(peer):
        return f"gradients of {sorted(ours)}, PyTorch of {sorted(peer)}"
    norms = [t.norm().item() for n, t in exact.items() if n != "output" and t is not None]
    biggest = max([*norms, 1e-3])
    for name, got in ours.items():
        truth, other = exact[name], peer[name]
        if truth is None or other is None or got is None:
            if (got is None) != (other is None):
                return f"{name}: {got} instead of {other}"
            continue
        if got.shape != other.shape or got.dtype != other.dtype:
            return f"{name}: {got.shape} {got.dtype} instead of {other.shape} {other.dtype}"
        # A gradient that is all cancellation (a key's bias, say) has no relative error of its own.
        norm = truth.norm().item()
        scale = norm if norm > 1e-3 * biggest else biggest
        error, allowed = ((t.double() - truth).norm().item() / scale for t in (got, other))
        if not error <= 1.5 * allowed + ROUNDINGS[dtype]:
            return f"{name}: relative error {error:.3g}, PyTorch's own {allowed:.3g}"
    return None


def main() -> int:
    """Check `--count` seeds from `--seed` on; exit status 1 if any fails."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--out", type=Path, help="a JSON file for the result")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, failures = time.perf_counter(), {}
    for seed in range(options.seed, options.seed + options.count):
        wrong = check(seed)
        if wrong is not None:
            failures[seed] = wrong
            print(f"seed {seed}: {wrong}\n  {asdict(draw(seed))}", flush=True)
    seconds = time.perf_counter() - start
    last = options.seed + options.count - 1
    print(f"seeds {options.seed} to {last}: {len(failures)} failing, {seconds:.0f} s")
    if options.out is not None:
        result = {
            "first_seed": options.seed, "count": options.count, "failures": failures,
            "seconds": round(seconds), "torch": torch.__version__, "machine": platform.machine(),
        }  # fmt: skip
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return int(bool(failures))


if __name__ == "__main__":
    raise SystemExit(main())
