"""One small training step on a device: its backend, its attention, and whether it is correct."""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.execution import choose
from fused_remat.layers import FusedRematLayer, FusedRematWarning
from fused_remat.report.explain import explain

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SIZES: dict[str, Any] = {
    "d_model": 128, "nhead": 2, "dim_feedforward": 256, "batch_first": True, "norm_first": True
}  # fmt: skip


def examine(device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Run a `FusedRematLayer` on a device; returns its backend, attention and gradient errors.

    "why_not" has the reason for every backend that cannot run. "error" says why the step raised or
    did not take the fused path, or is None. "difference" is the relative error of the gradients
    against the stock layer in float64, "stock" that of the stock layer in `dtype`. "ok" means that
    the first is at most twice the second plus the dtype's eps.

    >>> found = examine("cpu", torch.float32)
    >>> found["backend"], found["error"], found["ok"]
    ('eager', None, True)
    """
    row: dict[str, Any] = {"device": device, "dtype": str(dtype).removeprefix("torch.")}
    row |= dict.fromkeys(("attention", "attention_dropout", "difference", "stock", "error"))
    row["ok"] = False
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)  # the result has the reasons
        row |= _backends(device, dtype)
        try:
            row["attention"] = attention(device, dtype, 0.0)
            row["attention_dropout"] = attention(device, dtype, 0.1)
            row["difference"], row["stock"] = differences(device, dtype)
            # A comparison with NaN is False.
            row["ok"] = row["difference"] <= 2 * row["stock"] + torch.finfo(dtype).eps
        except Exception as error:  # any error is a finding
            row["error"] = f"{type(error).__name__}: {error}"
    return row


def _backends(device: str, dtype: torch.dtype) -> dict[str, Any]:
    x = torch.empty(1, device=device, dtype=dtype)
    chosen = choose.ops_for("auto", x).name
    others = [name for name in choose.BACKENDS if name != chosen]
    reasons = {name: choose.unsupported_reason(name, x.device, dtype) for name in others}
    return {"backend": chosen, "why_not": {name: why for name, why in reasons.items() if why}}


def attention(device: str, dtype: torch.dtype, dropout: float) -> str:
    """The implementation that attention uses, with heads of width 64 and no masks.

    Raises: RuntimeError if the layer does not take the fused path.
    """
    layer = FusedRematLayer(**_SIZES, dropout=dropout, device=device, dtype=dtype)
    (block,) = explain(layer, _input(device, dtype))
    if block.reason:
        raise RuntimeError(f"not fused: {block.reason}")
    return dict(block.forward)["attn"]


def _input(device: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)  # leaves the global random state alone
    return torch.randn(2, 64, _SIZES["d_model"], generator=generator).to(device, dtype)


def differences(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """Relative errors |g − g'| / |g'| of the gradients of input and parameters: of the fused layer,
    and of the stock layer in `dtype`. g' are those of the stock layer in float64."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        stock = nn.TransformerEncoderLayer(**_SIZES, dropout=0.0).to(device, dtype)
    fused = FusedRematLayer(**_SIZES, dropout=0.0, device=device, dtype=dtype)
    fused.load_state_dict(stock.state_dict())
    x = _input(device, dtype)
    ours, theirs = _gradients(fused, x), _gradients(stock, x)
    exact = _gradients(stock.double(), x.double())  # with the rounded weights
    return _apart(ours, exact), _apart(theirs, exact)


def _gradients(layer: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    loss = (layer(x) * x.detach().flip(1)).sum()  # a plain sum has almost no gradient behind a norm
    return list(torch.autograd.grad(loss, [x, *layer.parameters()]))


def _apart(found: list[Tensor], exact: list[Tensor]) -> float:
    pairs = [(g.double(), h) for g, h in zip(found, exact, strict=True)]
    apart = math.fsum(float((g - h).square().sum()) for g, h in pairs)
    return math.sqrt(apart / math.fsum(float(h.square().sum()) for _, h in pairs))
