"""What a device of the mesh holds, part by part, over a training step.

A planner's chain (`planner.chain`) is made here of arithmetic where `plan` measures: so the
planner's own rules say what a choice of policies comes to, and choose. Kept bytes are the graph's
(`kept_by_name`), parameters those of the shards. Transients are an upper bound: the graph's
activations and their gradients as its program makes and frees them, all tokens at once.

FSDP2 as `fully_shard(layer)` for every layer and `fully_shard(model)` have it: layers are gathered
for their forward and again for their backward, one ahead; the root (embedding, head, last norm) is
gathered all along, and its gradients are reduced at the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from fused_remat.graph.schedule import kept_bytes, schedule
from fused_remat.planner import chain as chains
from fused_remat.planner.calibration import Example, steps_of
from fused_remat.planner.chain import Call, Chain, Choice, Event, Moment, Option
from fused_remat.planner.options import predict_optimizer
from fused_remat.scale.costs import example_of, loss_graph
from fused_remat.scale.layout import (
    Layout,
    Parameter,
    Parameters,
    divides_head,
    gathered,
    parameters_of,
    sharded,
    tables_of,
)
from fused_remat.scale.shapes import Model
from fused_remat.scale.time import sizes_of

#: Logits that `ops.cross_entropy` holds at a time on a GPU, of which there are two blocks.
_LOGITS = 1 << 26
OPTIMIZERS = ("adamw", "sgd", "none")


@dataclass(frozen=True)
class Setup:
    """What is trained, and how.

    Attributes:
        batch: sequences that a data-parallel rank has at a time.
        seq: tokens of each.
        dtype: of what is computed: activations, gathered weights and their gradients.
        param_dtype: of sharded weights, gradients and optimizer states.
        optimizer: one of `OPTIMIZERS`.
        fused_loss: `ops.cross_entropy`, else `F.cross_entropy` of whole logits.
        offload: kept names that wait in the host's memory.
        accumulates: gradients are there from the start.
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
        """Whether weights are sharded, or of another dtype than what is computed."""
        return self.layout.mesh.data > 1 or self.dtype != self.param_dtype

    @property
    def tokens(self) -> int:
        """Of a data-parallel rank's sequences."""
        return self.batch * self.seq


def weight_bytes(setup: Setup, data_rank: int = 0) -> int:
    """Of a device's shards."""
    p = setup.parameters
    count = sum(sharded(of, setup.layout, data_rank) * n for of, n in _groups(p))
    return count * setup.param_dtype.itemsize


def state_bytes(setup: Setup, data_rank: int = 0) -> int:
    """Of the optimizer's states for them, found by running one on fake tensors of these shapes."""
    return sum(
        _state_of(of, setup.layout, setup.param_dtype, setup.optimizer, data_rank) * n
        for of, n in _groups(setup.parameters)
    )


def _groups(p: Parameters) -> tuple[tuple[tuple[Parameter, ...], int], ...]:
    return (p.layer, p.layers), (p.root, 1)


@functools.lru_cache(maxsize=256)
def _state_of(
    parameters: tuple[Parameter, ...],
    layout: Layout,
    dtype: torch.dtype,
    optimizer: str,
    data_rank: int,
) -> int:
    if optimizer == "none":
        return 0
    shards = [
        nn.Parameter(torch.empty(p.shard(layout, data_rank), device="meta", dtype=dtype))
        for p in parameters
    ]
    kind = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[optimizer]
    return predict_optimizer(kind(shards))[0]


@dataclass(frozen=True)
class Passes:
    """Most bytes at a time of a layer's activations and their gradients, besides what was there.

    Attributes:
        forward: with what is kept and the output; backward: with the gradient that it is given.
    """

    forward: int
    backward: int


def passes(example: Example, save: Iterable[str]) -> Passes:
    """Of a rank's layer that keeps `save`, all tokens at once: an upper bound."""
    call = example.keeping(save)
    plan = schedule(call.graph, call.save, call.needs_grad, tiled=False)
    nbytes = sizes_of(example, call.save)
    most = {}
    for which in ("forward", "backward"):
        values: set[str] = set()
        grads = {"output"} if which == "backward" else set()
        most[which] = 0
        for step in steps_of(plan, which):
            node = step.node
            assert node is not None
            if step.kind == "compute":
                values.update(node.makes)
            else:
                grads.update(step.needs_grad.intersection(node.inputs))
            now = sum(nbytes[n] for n in values) + sum(nbytes[n] for n in grads)
            most[which] = max(most[which], now)
            grads.discard(node.name if step.kind == "backward" else "")
            values.difference_update(step.free)
    return Passes(most["forward"], most["backward"])


def loss_bytes(setup: Setup) -> tuple[int, int]:
    """(kept, at work) of the loss: what it keeps besides its input, and takes at most besides.

    Of whole logits: themselves, in float32 where they are not, and their log-softmax.
    """
    model, tensor = setup.model, setup.layout.mesh.tensor
    divided = divides_head(setup.parameters, setup.layout)
    vocab = model.vocab // tensor if divided else model.vocab
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
    kept = kept_bytes(loss_graph(), frozenset(), needs_grad, shapes, setup.dtype.itemsize)
    wide = setup.tokens * model.d_model * 4  # the gradient of the input is summed in float32
    block = 4 * min(_LOGITS, setup.tokens * vocab)
    return sum(kept.values()) - kept["input"], 2 * block + wide + stream


def resting(setup: Setup) -> dict[str, int]:
    """What is there all the time."""
    p = setup.parameters
    made = tables_of(setup.model, setup.seq, setup.dtype)
    tables = sum(t.nbytes for t in made if t is not None)
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
    """A moment of the step, and what it has besides what rests and what layers keep, by name.

    `own`: the name of what the layer at work takes, which depends on its option.
    """

    moment: Moment
    parts: dict[str, int]
    own: str = ""


def stretches(setup: Setup, base: Option) -> Iterator[Stretch]:
    """The step as if every layer had the option `base`."""
    layers, p, itemsize = setup.model.layers, setup.parameters, setup.dtype.itemsize
    stream = sizes_of(setup.example)["input"]
    layer = gathered(p.layer, setup.layout) * itemsize
    ahead = {"layers, gathered": 2 * layer} if setup.fsdp else {}
    reduced = sharded(p.layer, setup.layout) * setup.param_dtype.itemsize
    head = tuple(q for q in p.root if _comes_first_in_backward(q, setup.model))
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
        # Its own, and those of the layer before on their way to their owners.
        grads = {"layers' gradients, unreduced": layer + _to_reduce(setup)} if setup.fsdp else {}
        parts = {**ahead, **unreduced, **grads}
        # Where nothing is reduced, gradients are made in place: also those of the layer at work.
        made = ready + (layers - 1 - i + (not setup.fsdp)) * reduced
        yield stretch(i, True, i + 1, parts, made, "a layer's backward")
    yield stretch(-1, True, 0, {}, weight_bytes(setup))


def _comes_first_in_backward(parameter: Parameter, model: Model) -> bool:
    """Of the root: all but the embedding, which is the head where they are tied."""
    embeds = parameter.name.startswith(("embed.", "positions."))
    return not embeds or (model.tied and parameter.name == "embed.weight")


def _to_reduce(setup: Setup) -> int:
    """Bytes of a layer's gradients while they are reduced: in the parameters' dtype."""
    return gathered(setup.parameters.layer, setup.layout) * setup.param_dtype.itemsize


def chain_of(
    setup: Setup, options: Sequence[Option], forward_seconds: float = 0.0, seconds: float = 0.0
) -> Chain:
    """The step as the planner's numbers; the first option is the base, and `seconds` its time."""
    stream = sizes_of(setup.example)["input"]
    kind = setup.example.call.graph.kind
    calls = tuple(
        Call(f"layers.{i}", kind, tuple(options), forward_seconds, stream, linked=False)
        for i in range(setup.model.layers)
    )
    moments = tuple(s.moment for s in stretches(setup, options[0]))
    kept = setup.model.layers * options[0].kept
    return Chain(calls, moments, resting(setup), seconds, 0, kept)


def parts_at_peak(setup: Setup, chain: Chain, choice: Choice) -> dict[str, int]:
    """What a device holds at the step's peak, in bytes; the sum is the peak."""
    events = list(chains.timeline(chain, choice))
    top = max(range(len(events)), key=lambda i: events[i].peak)
    event = events[top]
    parts = dict(chain.resting)
    found = list(stretches(setup, chain.calls[0].base))
    if top < len(found):
        for name, nbytes in found[top].parts.items():
            parts[name] = parts.get(name, 0) + nbytes
        parts["kept by layers"] = event.kept
        parts[found[top].own or "others"] = _rest(event, parts)
    return {name: nbytes for name, nbytes in parts.items() if nbytes}


def _rest(event: Event, parts: dict[str, int]) -> int:
    return event.peak - sum(parts.values())
