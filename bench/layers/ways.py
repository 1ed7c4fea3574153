"""The ways to train one encoder layer that are compared: a table of functions.

A way takes a stock layer and returns a function of its input. All of them work on the same
parameters and gradients, the very tensors: no way can gain from where its own happen to lie.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematLayer
from fused_remat.policies import RUNGS

Layer = nn.TransformerEncoderLayer
Forward = Callable[[Tensor], Tensor]
Build = Callable[[Layer], Forward]


@dataclass
class Sample:
    """What a step works on: a layer, its input x (B, S, D), and dy, the gradient of its output.

    Attributes:
        dropout: the layer's dropout probability.
    """

    layer: Layer
    x: Tensor
    dy: Tensor
    dropout: float

    def __post_init__(self) -> None:
        self.x.requires_grad_()
        for leaf in self.leaves().values():
            leaf.grad = torch.zeros_like(leaf)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that want a gradient."""
        return {"x": self.x, **dict(self.layer.named_parameters())}

    def double(self) -> Sample:
        """A copy in float64."""
        x, dy = self.x.detach().double(), self.dy.double()
        return Sample(copy.deepcopy(self.layer).double(), x, dy, self.dropout)


@dataclass(frozen=True)
class Way:
    """A row of the table.

    Attributes:
        build: raises ImportError where what it needs is not installed.
        is_baseline: whether every way's step time is also given as a ratio to this one's.
        twin: with dropout, the way whose bits this one has at the same seed.
    """

    name: str
    build: Build
    is_baseline: bool
    twin: str


#: name -> way, in the order of the tables. The baseline that is always measured comes first.
WAYS: dict[str, Way] = {}
BASELINE = "eager"


def way(name: str, *, twin: str, is_baseline: bool = False) -> Callable[[Build], Build]:
    """Register a function as a way."""

    def register(build: Build) -> Build:
        WAYS[name] = Way(name, build, is_baseline, twin)
        return build

    return register


@way(BASELINE, twin=BASELINE, is_baseline=True)
def eager(layer: Layer) -> Forward:
    """The stock layer."""
    return layer


@way("checkpoint", twin=BASELINE, is_baseline=True)
def checkpointed(layer: Layer) -> Forward:
    """`torch.utils.checkpoint` as recommended: stops replaying once it has what it needs."""
    return functools.partial(checkpoint, layer, use_reentrant=False)


@way("checkpoint_reentrant", twin=BASELINE)
def checkpointed_reentrant(layer: Layer) -> Forward:
    """The older `torch.utils.checkpoint`: replays the whole layer."""
    return functools.partial(checkpoint, layer, use_reentrant=True)


class RandomState:
    """torch's generator for a device, as a `torch_remat.RecomputeStateHook`."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.cuda if device.type == "cuda" else torch

    def snapshot(self) -> Tensor:
        state: Tensor = self._module.get_rng_state()
        return state

    def restore(self, state: Tensor) -> None:
        self._module.set_rng_state(state)


@way("torch_remat", twin=BASELINE)
def torch_remat(layer: Layer) -> Forward:
    """`torch_remat` around the whole layer, as in its quick start; replays the whole layer.

    It leaves torch's generator alone unless given a hook, so a layer with dropout needs one.
    """
    from torch_remat import checkpoint as remat

    weight = layer.linear1.weight
    hooks = (RandomState(weight.device),) if layer.dropout.p else ()
    return lambda x: remat(region_name="layer", recompute_state_hooks=hooks)(layer)(x)


for _rung in RUNGS:
    way(_rung, twin=next(iter(RUNGS)))(
        functools.partial(FusedRematLayer.from_layer, policy=_rung)  # the layer's own submodules
    )
