"""What the tests of wrappers train in every rank, and the one process that they compare with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from reference import randomize
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
    made = (
        cls(
            8, 2, 12, dropout=dropout, norm_first=norm_first, batch_first=True, dtype=dtype,
            **kwargs,
        )
        for _ in range(layers)
    )  # fmt: skip
    model = nn.Sequential(*made)
    randomize(model)
    return model


def batches(dtype: torch.dtype = torch.float64, count: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (BATCH, 5, 8)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for _ in range(count)
    ]


def mine(batch: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def whole(t: Tensor | None) -> Tensor | None:
    """A sharded tensor gathered; others as they are."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def loss_of(y: Tensor) -> Tensor:
    return (y.square() * torch.linspace(0.5, 1.5, y.shape[-1], dtype=y.dtype)).mean()


def train(model: nn.Module, steps: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Losses of SGD steps, and the gradients of the last one, gathered."""
    trained = [p for p in model.parameters() if p.requires_grad]
    sgd = torch.optim.SGD(trained, lr=0.1)
    losses = []
    for x in steps:
        sgd.zero_grad()
        loss = loss_of(model(x))
        loss.backward()
        losses.append(loss.detach())
        sgd.step()
    return losses, [whole(p.grad) for p in model.parameters()]


def mean_over_ranks(losses: Sequence[Tensor]) -> Tensor:
    total = torch.stack([*losses])
    dist.all_reduce(total)
    return total / dist.get_world_size()


def compare(
    model: nn.Module, wrap: Callable[[nn.Module], nn.Module], fused: bool = True
) -> list[str]:
    """Train `wrap(model)` on this rank's halves as well as `model` on the whole, and compare.

    `fused`: no layer may leave the fused path. Returns the warnings of those that did.
    """
    alone = copy.deepcopy(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FusedRematWarning)
        wrapped = wrap(model)
        losses, grads = train(wrapped, [mine(x) for x in batches()])
    fallbacks = [str(w.message) for w in caught if w.category is FusedRematWarning]
    assert not (fused and fallbacks), fallbacks
    expected_losses, expected = train(alone, batches())
    torch.testing.assert_close(mean_over_ranks(losses), torch.stack(expected_losses), **CLOSE)
    assert len(grads) == len(expected)
    for (name, _), a, b in zip(alone.named_parameters(), grads, expected, strict=True):
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")
    return fallbacks


def freeze(model: nn.Module, part: str) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(part not in name)
    return model


def per_layer(model: Any, **kwargs: Any) -> Any:
    """FSDP2 of every layer, then of the whole."""
    for layer in model:
        fully_shard(layer, **kwargs)
    return fully_shard(model, **kwargs)


def root_only(model: Any, **kwargs: Any) -> Any:
    """FSDP2 of the whole."""
    return fully_shard(model, **kwargs)
