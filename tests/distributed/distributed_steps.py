"""What several tests train in every rank: layers of width 8, a loss, a rank's part of a batch."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from reference import randomize
from torch import Tensor, nn

from fused_remat import FusedRematLayer

#: Halves of a batch are summed in another order than the whole: float64 sums of about a thousand
#: terms, and three SGD steps on them, stay far within this; a lost or doubled term does not.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def encoder(
    policy: str = "full", norm_first: bool = True, dropout: float = 0.0, layers: int = 2,
    cls: type[nn.TransformerEncoderLayer] = FusedRematLayer, dtype: torch.dtype = torch.float64,
) -> nn.Sequential:  # fmt: skip
    """Return layers with the same values in every rank; `policy` only where `cls` has one."""
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {"policy": policy} if cls is FusedRematLayer else {}
    kwargs |= {"norm_first": norm_first, "batch_first": True, "dtype": dtype}
    return randomize(nn.Sequential(*(cls(8, 2, 12, dropout, **kwargs) for _ in range(layers))))


def mine(batch: Tensor) -> Tensor:
    """Return this rank's part of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(y: Tensor) -> Tensor:
    return (y.square() * torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype)).mean()
