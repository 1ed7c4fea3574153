"""Memory of one device of a mesh over a training step, part by part.

The result is the planner's chain (`planner.chain`), computed instead of measured, so the planner's
own functions predict peaks and choose. Kept bytes come from the graph, parameters from the shards.
Transients are an upper bound: the graph's activations and their gradients, all tokens at once.

FSDP2 shards each layer and the model: layers are gathered for their forward and again for their
backward, one ahead; the root (embedding, head, last norm) stays gathered, and its gradients are
reduced at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fused_remat.graph.build import linear_cross_entropy_graph
from fused_remat.graph.schedule import kept_bytes
from fused_remat.planner import chain as chains
from fused_remat.planner.calibration import Example
from fused_remat.planner.chain import Chain, Choice, LayerOptions, Moment, Option
from fused_remat.planner.measure import predict_optimizer
from fused_remat.scale.layer import example_of, sizes_of
from fused_remat.scale.layout import (
    Layout,
    Parameter,
    Parameters,
    gathered,
    on_meta,
    parameters_of,
    sharded,
)
from fused_remat.scale.shapes import Model
from fused_remat.steps.cross_entropy import LinearCrossEntropy
from fused_remat.steps.logit_blocks import DEVICE_BYTES, block_shape

OPTIMIZERS = ("adamw", "sgd", "none")


@dataclass(frozen=True)
class Setup:
    """A training step on a mesh.

    Attributes:
        batch: sequences per data-parallel rank and step.
        seq: tokens per sequence.
        dtype: dtype of activations, gathered weights and their gradients.
        param_dtype: dtype of sharded weights, gradients and optimizer states.
        optimizer: one of `OPTIMIZERS`.
        fused_loss: whether the loss is `ops.linear_cross_entropy`; if not, `F.cross_entropy` of
            all logits.
        offload: kept names that wait in the host's memory.
        accumulates: whether gradients are accumulated across steps, so they stay in memory.
    """

    model: Model
    layout: Layout
    batch: int
    seq: int
    dtype: torch.dtype = torch.bfloat16
    param_dtype: torch.dtype = torch.float32
    optimizer: str = "adamw"
    fused_loss: bool = True
    offload: tuple[str, ...] = ()
    accumulates: bool = False

    @property
    def parameters(self) -> Parameters:
        return parameters_of(self.model, self.seq)

    @property
    def example(self) -> Example:
        """A rank's call of a layer."""
        return example_of(self.model, self.layout, self.batch, self.seq, self.dtype)

    @property
    def fsdp(self) -> bool:
        """Whether FSDP2 is needed: weights are sharded, or their dtype differs from `dtype`."""
        return self.layout.mesh.data > 1 or self.dtype != self.param_dtype

    @property
    def tokens(self) -> int:
        """Tokens per data-parallel rank and step."""
        return self.batch * self.seq


def weight_bytes(setup: Setup) -> int:
    """Return the bytes of a device's shards of the weights."""
    p, layout = setup.parameters, setup.layout
    count = p.layers * sharded(p.layer, layout) + sharded(p.root, layout)
    return count * setup.param_dtype.itemsize


def state_bytes(setup: Setup) -> int:
    """Return the bytes of the optimizer states of those shards, from fake tensors."""
    p, how = setup.parameters, (setup.layout, setup.param_dtype, setup.optimizer)
    return p.layers * _state_of(p.layer, *how) + _state_of(p.root, *how)


@functools.lru_cache(maxsize=256)
def _state_of(
    parameters: tuple[Parameter, ...], layout: Layout, dtype: torch.dtype, optimizer: str
) -> int:
    if optimizer == "none":
        return 0
    shards = [
        nn.Parameter(torch.empty(p.shard(layout), device="meta", dtype=dtype)) for p in parameters
    ]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    return predict_optimizer(kind(shards))[0]


def loss_bytes(setup: Setup) -> tuple[int, int]:
    """Return the bytes of the loss: what it keeps in addition to its input, and its transients.

    Complete logits are held in `dtype`, in float32 if that differs, and as their log-softmax.
    """
    model = setup.model
    vocab = model.vocab // setup.layout.mesh.tensor
    stream = setup.tokens * model.d_model * setup.dtype.itemsize
    if not setup.fused_loss:
        low = setup.dtype.itemsize if setup.dtype.itemsize < 4 else 0
        return setup.tokens * vocab * 4, setup.tokens * vocab * (4 + low) + stream
    shapes = {
        "input": (1, setup.tokens, model.d_model),
        "head.weight": (vocab, model.d_model),
        "target": (setup.tokens, 1),
    }
    needs_grad = frozenset({"input", "head.weight"})
    node = LinearCrossEntropy(
        name="output", x="input", weight="head.weight", bias="head.bias", target="target"
    )
    graph = linear_cross_entropy_graph(node)
    kept = kept_bytes(graph, frozenset(), needs_grad, shapes, {"input": setup.dtype})
    wide = setup.tokens * model.d_model * 4  # the input's gradient is summed in float32
    # A block of logits' gradients, and one of the weight's gradient in float32; in float32 two
    # blocks, logits among them.
    itemsize = setup.dtype.itemsize
    rows, columns = block_shape(setup.tokens, vocab, DEVICE_BYTES // itemsize, model.d_model, 0)
    block = rows * columns * itemsize * (1 if itemsize == 2 else 2) + 4 * columns * model.d_model
    return sum(kept.values()) - kept["input"], block + wide + stream


def resting(setup: Setup) -> dict[str, int]:
    """Return the bytes allocated during the entire step, by what they hold."""
    p = setup.parameters
    one = on_meta(setup.model, setup.seq, setup.dtype)
    tables = sum(t.nbytes for t in (one.cos, one.sin) if isinstance(t, torch.Tensor))
    parts = {
        "weights": weight_bytes(setup),
        "optimizer states": state_bytes(setup),
        "gradients": weight_bytes(setup) if setup.accumulates else 0,
        "root, gathered": gathered(p.root, setup.layout) * setup.dtype.itemsize,
        "tokens and tables": 2 * 8 * setup.tokens + tables,
    }
    if not setup.fsdp:
        del parts["root, gathered"]
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


@dataclass(frozen=True)
class Stretch:
    """A moment of the step, with the bytes of its parts other than resting and kept ones."""

    moment: Moment
    parts: dict[str, int]
    own: str = ""  # the transients of the running layer, which depend on its option; "" outside


def stretches(setup: Setup, base: Option) -> Iterator[Stretch]:
    """Yield the step in which every layer has the option `base`."""
    layers, p, itemsize = setup.model.layers, setup.parameters, setup.dtype.itemsize
    stream = sizes_of(setup.example)["input"]
    layer = gathered(p.layer, setup.layout) * itemsize
    ahead = {"layers, gathered": 2 * layer} if setup.fsdp else {}
    reduced = sharded(p.layer, setup.layout) * setup.param_dtype.itemsize
    reducing = gathered(p.layer, setup.layout) * setup.param_dtype.itemsize
    # Backward reaches all of the root before the layers, but for an untied embedding.
    after = ("positions.",) if setup.model.tied else ("embed.", "positions.")
    head = tuple(q for q in p.root if not q.name.startswith(after))
    ready = 0 if setup.fsdp else sharded(head, setup.layout) * setup.param_dtype.itemsize

    def stretch(
        call: int, backward: bool, alive: int, parts: dict[str, int], gradients: int, own: str = ""
    ) -> Stretch:
        parts = {name: nbytes for name, nbytes in parts.items() if nbytes}
        if not setup.accumulates and gradients:
            parts["gradients"] = gradients
        level = alive * base.kept + sum(parts.values())
        of = (base.backward if backward else base.forward) if own else 0
        moment = Moment(call, backward, level, level + of, alive, gradients)
        return Stretch(moment, parts, own)

    for i in range(layers):
        yield stretch(i, False, i, {"residual stream": stream, **ahead}, 0, "a layer's forward")
    kept, at_work = loss_bytes(setup)
    whole = setup.tokens * setup.model.d_model * itemsize
    head_grads = gathered(head, setup.layout) * itemsize if setup.fsdp else 0
    unreduced = {"root's gradients, unreduced": head_grads}
    loss = {"residual stream": 2 * whole, "loss": kept + at_work, **unreduced}
    yield stretch(-1, True, layers, loss, ready)
    for i in reversed(range(layers)):
        # Its own gradients, and those of the previous layer while they are reduced.
        grads = {"layers' gradients, unreduced": layer + reducing} if setup.fsdp else {}
        parts = {**ahead, **unreduced, **grads}
        # Without a reduction gradients are created in place, including the running layer's.
        made = ready + (layers - 1 - i + (not setup.fsdp)) * reduced
        yield stretch(i, True, i + 1, parts, made, "a layer's backward")
    yield stretch(-1, True, 0, {}, weight_bytes(setup))


def chain_of(setup: Setup, options: Sequence[Option], forward_seconds: float = 0.0) -> Chain:
    """Return the step as the planner's chain, with the first option as base; its time is 0."""
    stream = sizes_of(setup.example)["input"]
    kind = setup.example.call.graph.kind
    calls = tuple(
        LayerOptions(f"layers.{i}", kind, tuple(options), forward_seconds, stream, linked=False)
        for i in range(setup.model.layers)
    )
    moments = tuple(s.moment for s in stretches(setup, options[0]))
    kept = setup.model.layers * options[0].kept
    return Chain(calls, moments, resting(setup), 0.0, 0, kept)


def parts_at_peak(setup: Setup, chain: Chain, choice: Choice) -> dict[str, int]:
    """Return the parts of a device's memory at the peak of the step, in bytes."""
    events = list(chains.timeline(chain, choice))
    top = max(range(len(events)), key=lambda i: events[i].peak)
    event = events[top]
    parts = dict(chain.resting)
    found = list(stretches(setup, chain.calls[0].base))
    if top < len(found):
        for name, nbytes in found[top].parts.items():
            parts[name] = parts.get(name, 0) + nbytes
        parts["kept by layers"] = event.kept
        parts[found[top].own or "others"] = event.peak - sum(parts.values())
    return {name: nbytes for name, nbytes in parts.items() if nbytes}
