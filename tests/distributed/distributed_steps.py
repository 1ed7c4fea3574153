"""What the tests of wrappers train in every rank, and the one process that they compare with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from reference import randomize
from tensor_parallel_steps import whole
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from fused_remat import FusedRematLayer, FusedRematWarning

BATCH, STEPS = 4, 3
#: Halves of a batch are summed in another order than the whole: float64 sums of about a thousand
#: terms, and three SGD steps on them, stay far within this; a lost or doubled term does not.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}


def encoder(
    policy: str = "full", norm_first: bool = True, dropout: float = 0.0, layers: int = 2,
    cls: type[nn.TransformerEncoderLayer] = FusedRematLayer, dtype: torch.dtype = torch.float64,
) -> nn.Sequential:  # fmt: skip
    """Layers of width 8, the same values in every rank; `policy` only where `cls` has one."""
    torch.manual_seed(0)
    kwargs: dict[str, Any] = {"policy": policy} if cls is FusedRematLayer else {}
    kwargs |= {"norm_first": norm_first, "batch_first": True, "dtype": dtype}
    return randomize(nn.Sequential(*(cls(8, 2, 12, dropout, **kwargs) for _ in range(layers))))


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = (
        torch.randn(BATCH, 5, 8, generator=generator, dtype=torch.float64) for _ in range(STEPS)
    )
    return list(made)


def mine(batch: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def loss_of(y: Tensor) -> Tensor:
    return (y.square() * torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype)).mean()


def train(model: nn.Module, steps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Losses of SGD steps, and the gradients of the last one, gathered."""
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for x in steps:
        sgd.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        losses.append(loss.detach())
        sgd.step()
    return losses, [whole(p.grad) for p in model.parameters()]


def train_in_ranks(wrapped: nn.Module) -> tuple[Tensor, list[Tensor | None]]:
    """`train` on this rank's parts of `batches`; the losses are means over the ranks."""
    losses, grads = train(wrapped, [mine(x) for x in batches()])
    total = torch.stack(losses)
    dist.all_reduce(total)
    return total / dist.get_world_size(), grads


def compare(
    model: nn.Module, wrap: Callable[[nn.Module], nn.Module], gradients: bool = True
) -> list[str]:
    """Train `wrap(model)` on this rank's halves as well as `model` on the whole, and compare.

    `gradients`: those of the wrapper's parameters, too, which are then the model's. Returns the
    warnings of layers that left the fused path.
    """
    alone = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FusedRematWarning)
        losses, grads = train_in_ranks(wrap(model))
    expected_losses, expected = train(alone, batches())
    torch.testing.assert_close(losses, torch.stack(expected_losses), **CLOSE)
    if gradients:
        torch.testing.assert_close(grads, expected, **CLOSE)
    return [str(w.message) for w in caught if w.category is FusedRematWarning]


def per_layer(model: Any, **kwargs: Any) -> Any:
    """FSDP2 of every layer, then of the whole."""
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)
