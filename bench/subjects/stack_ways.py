"""The peers of plans: decorated builders in a registry, as those of layers, of whole stacks."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.measure.admission import Absent
from bench.measure.case import Forward, Subject
from bench.measure.registry import Registry
from bench.subjects import layer_ways
from bench.subjects.compiled import Compiled

Build = Callable[[Subject], Forward]

#: In the order of the tables. Traits as of `layer_ways.WAYS`; `family`, of the picture.
PEERS: Registry[Build] = Registry("peers of plans")
BASELINE = "eager"
BUDGETS = (1.0, 0.75, 0.5, 0.25, 0.0)
EVERY = (2, 4)


def _peer(name: str, family: str = "checkpointing", draws: str = "stock", **rest: Any) -> Any:
    traits = {"kept_by": "autograd", "lossy": False, "compiled": False} | rest
    return PEERS.provider(name, family=family, draws=draws, **traits)


def _each(subject: Subject, way: str, which: Callable[[int], bool] = lambda i: True) -> Forward:
    """The layers that `which` says as a way of layers has them, the others as they are."""
    stack: Any = subject.module

    def built(layer: nn.Module) -> Forward:
        alone = dataclasses.replace(subject, module=layer, stock=stack.of)
        return layer_ways.WAYS[way].build(alone)

    forwards = [
        built(layer) if which(i) else stack.of(layer) for i, layer in enumerate(stack.layers)
    ]
    return lambda x: stack.through(x, forwards)


@_peer(BASELINE, "stock", baseline=True)
def eager(subject: Subject) -> Forward:
    """The stock layers."""
    return subject.module


@_peer("checkpoint")
def checkpointed(subject: Subject) -> Forward:
    """`torch.utils.checkpoint` around every layer."""
    return _each(subject, "checkpoint")


def _every(subject: Subject, k: int) -> Forward:
    """Around every k-th layer, the first included."""
    if len(subject.module.layers) <= k // 2:
        raise Absent(f"the same as every {k // 2}")
    return _each(subject, "checkpoint", lambda i: i % k == 0)


for _k in EVERY:
    _peer(f"checkpoint_every_{_k}")(functools.partial(_every, k=_k))


@_peer("checkpoint_sqrt")
def segments(subject: Subject) -> Forward:
    """Around every segment of ⌈√n⌉ layers (Chen et al. 2016)."""
    stack: Any = subject.module
    count = len(stack.layers)
    length = math.isqrt(count - 1) + 1
    if length == 1:
        raise Absent("the same as checkpoint")
    parts = [stack.layers[i : i + length] for i in range(0, count, length)]

    def run(part: Sequence[nn.Module], h: Any) -> Any:
        for layer in part:
            h = stack.of(layer)(h)
        return h

    forwards = [
        functools.partial(checkpoint, functools.partial(run, part), use_reentrant=False)
        for part in parts
    ]
    return lambda x: stack.through(x, forwards)


@_peer("selective_matmuls", kept_by="allocator")
def selective_matmuls(subject: Subject) -> Forward:
    """Selective checkpointing in every layer: the results of products are kept."""
    return _each(subject, "selective_matmuls")


@_peer("selective_attention")
def selective_attention(subject: Subject) -> Forward:
    """Selective recomputation in every layer: attention's core is replayed (Megatron's)."""
    return _each(subject, "selective_attention")


def _compiled(subject: Subject, budget: float) -> Forward:
    """`torch.compile` of the whole model with an `activation_memory_budget`."""
    return Compiled(eager(subject), subject, budget)


for _budget in BUDGETS:
    _peer(f"compile_budget_{_budget:g}", "compile", "own", compiled=True)(
        functools.partial(_compiled, budget=_budget)
    )
