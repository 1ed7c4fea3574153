"""Memory and time of a step on a mesh: for each policy, the planner's choice, and what fits.

The steps of a rank's layer are those of its schedule under a policy, so the rebuilds of a preset
count, with their collectives. A step takes its FLOPs over a rate or its bytes over the bandwidth,
whichever is longer, as in `Calibration.analytic`; a collective takes its bytes over the link.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fused_remat.planner import chain as chains
from fused_remat.planner.calibration import Example, Seconds, work_of
from fused_remat.planner.chain import Choice, Option
from fused_remat.planner.options import costed_options, kept_by_name
from fused_remat.planner.solve import optimal
from fused_remat.policies import EXACT_PRESETS, kept_names
from fused_remat.scale.costs import Costs
from fused_remat.scale.layer import kept_by_eager, passes, sizes_of
from fused_remat.scale.layout import Layout, check, gathered
from fused_remat.scale.memory import Setup, chain_of, loss_bytes, parts_at_peak, weight_bytes
from fused_remat.steps.collective import CollectiveStep

#: Rows for plain PyTorch: autograd saves everything, or `torch.utils.checkpoint` wraps each layer.
BASELINES = ("eager", "checkpoint")
#: The row of the planner's choice.
PLANNER = "planner"
#: Bytes that an optimizer's step reads and writes, in units of the parameters' bytes.
_UPDATE = {"adamw": 7, "sgd": 3, "none": 0}
#: Kinds of steps (`Work.kind`).
KINDS = ("products", "attention", "pointwise", "tensor parallel")


@dataclass(frozen=True)
class Work:
    """One step of a layer on one device."""

    which: str  # the pass
    kind: str  # one of `KINDS`
    rebuilt: bool  # whether backward repeats a computation of forward
    flops: float  # of products
    sent: float  # bytes that the device sends within its tensor-parallel group
    collective: str  # "all-gather", "reduce-scatter", "all-reduce", or ""
    seconds: float  # estimated


@dataclass(frozen=True)
class Row:
    """Memory and time of one device with a policy."""

    policy: str  # the policy's name, or the planner's choice
    kept: int  # bytes that all layers keep
    hosted: int  # the part of them that waits in the host's memory
    memory: Mapping[str, int]  # parts of the step's peak in bytes
    seconds: Mapping[str, float]  # parts of the step's time
    collectives: tuple[float, float]  # tensor-parallel ones of a layer, in forward and in backward
    rebuilt: float  # FLOPs of rebuilding, relative to those of a step without it

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Way:
    """One way to run a layer: the planner's option, bytes on the host, and the layer's steps."""

    label: str
    option: Option
    hosted: int
    works: tuple[Work, ...]

    def seconds(self, which: str) -> float:
        return sum(w.seconds for w in self.works if w.which == which)


@dataclass(frozen=True)
class Estimate:
    """A training step on devices of one kind.

    Attributes:
        setup, costs: the step and the rates of the devices.
        memory: bytes of a device.
        rows: the baselines, the requested presets and the planner's choice by name; the planner's
            is missing if nothing fits.
        flops: FLOPs of the model in a step of all devices, without rebuilding.
        batches: the largest batch that fits with every baseline and preset; 0 if none does.
        longest: the preset with the largest batch, and the longest sequence that fits with it.
    """

    setup: Setup
    costs: Costs
    memory: int
    rows: Mapping[str, Row]
    flops: float
    batches: Mapping[str, int]
    longest: tuple[str, int]

    def fits(self, name: str) -> bool:
        return self.rows[name].peak <= self.memory

    def tokens_per_second(self, name: str) -> float:
        """Return the tokens per second of all devices together."""
        return self.setup.tokens * self.setup.layout.mesh.data / self.rows[name].step

    def mfu(self, name: str) -> float:
        """Model FLOPs utilization: FLOPs of the model over those of the devices' peak rate."""
        peak = self.costs.peak.value * self.setup.layout.mesh.devices
        return self.flops / (self.rows[name].step * peak)


def estimate(
    setup: Setup, costs: Costs, memory: int, policies: Sequence[str] = tuple(EXACT_PRESETS)
) -> Estimate:
    """Estimate memory and time of a step for the baselines, `policies` and the planner's choice.

    The vocabulary is padded so that tensor-parallel ranks divide it.

    Args:
        memory: bytes of a device.
    Raises: ValueError if the mesh does not divide the model, or none of `policies` keeps a name
        that is to be offloaded.

    >>> from fused_remat.scale.shapes import LARGE
    >>> from fused_remat.scale.costs import HARDWARE
    >>> from fused_remat.scale.layout import Layout, Mesh
    >>> setup = Setup(LARGE["llama3-70b"], Layout(Mesh(8, 8)), batch=1, seq=8192)
    >>> found = estimate(setup, HARDWARE["h100"], 80 * 2**30, ["full", "none"])
    >>> found.rows["none"].kept > 8 * found.rows["full"].kept
    True
    """
    check(setup.model, setup.layout, setup.seq)
    tensor = setup.layout.mesh.tensor
    padded = -(-setup.model.vocab // tensor) * tensor
    setup = dataclasses.replace(setup, model=dataclasses.replace(setup.model, vocab=padded))
    _check_names(setup, policies)
    ways = {name: way_of(setup, costs, name) for name in (*BASELINES, *policies)}
    rows = {
        name: row_of(setup, costs, [way], Choice((0,) * setup.model.layers))
        for name, way in ways.items()
    }
    batches = {name: largest_batch(setup, costs, memory, name) for name in rows}
    best = max(policies, key=lambda name: (batches[name], -rows[name].step))
    longest = best, largest_seq(setup, costs, memory, best)
    chosen = planned(setup, costs, memory)
    if chosen is not None:
        rows[PLANNER] = row_of(setup, costs, *chosen)
    return Estimate(setup, costs, memory, rows, model_flops(setup, costs), batches, longest)


def _check_names(setup: Setup, policies: Sequence[str]) -> None:
    graph = setup.example.call.graph
    saves = [kept_names(policy, graph) for policy in policies]
    kept = frozenset[str]().union(*saves)
    valid = [name for name in (*graph.inputs, *graph.names) if name in kept.union(graph.inputs)]
    unknown = [name for name in setup.offload if name not in valid]
    if unknown:
        raise ValueError(
            f"cannot offload {', '.join(map(repr, unknown))}: not kept by "
            f"{', '.join(map(repr, policies))}; kept names: {', '.join(valid)}"
        )


def way_of(setup: Setup, costs: Costs, name: str) -> Way:
    """Return the way of a preset or a baseline to run a layer."""
    graph, layout = setup.example.call.graph, setup.layout
    preset = {"eager": "none", "checkpoint": "full"}.get(name, name)
    save = kept_names(preset, graph)
    made = way(setup, costs, save, name)
    if name not in BASELINES:
        return made
    stream = sizes_of(setup.example)["input"]
    eager = setup.batch * kept_by_eager(setup.model, layout, setup.seq, setup.dtype)
    backward = passes(setup.example, kept_names("none", graph))[1]
    again = eager - stream if name == "checkpoint" else 0
    option = dataclasses.replace(
        made.option, kept=stream if name == "checkpoint" else eager, forward=eager + stream,
        backward=again + backward,
    )  # fmt: skip
    if name == "eager":  # keeps all that backward reads
        found = tuple(w for w in made.works if not w.rebuilt)
        made = dataclasses.replace(made, works=found)
    return dataclasses.replace(made, option=option, hosted=0)


def way(setup: Setup, costs: Costs, save: Iterable[str], label: str) -> Way:
    """Return the way that keeps `save`, with `setup.offload` of it in the host's memory."""
    example, names = setup.example, frozenset(save)
    kept = kept_by_name(example, names)
    found = tuple(works(example, names, costs, setup.layout))
    in_forward, in_backward = passes(example, names)
    away = kept.keys() & setup.offload
    hosted = sum(kept[name] for name in away)
    backward = sum(w.seconds for w in found if w.which == "backward")
    option = Option(
        tuple(sorted(names)), sum(kept.values()) - hosted, in_forward + hosted,
        in_backward + 2 * hosted, backward,
    )  # fmt: skip
    return Way(label, option, hosted, found)


def planned(setup: Setup, costs: Costs, memory: int) -> tuple[list[Way], Choice] | None:
    """Return the ways that the planner may choose, and its exact choice; None if nothing fits.

    The ways are the planner's options: all sets of names that no other beats in bytes and time.
    """
    graph, layout = setup.example.call.graph, setup.layout
    found = costed_options(setup.example, pricer(costs, layout), graph.names)
    ways, options = [], []
    for o in found:
        made = way(setup, costs, o.save, o.preset or f"names:{','.join(o.save)}")
        # Backward lasts as long as the longest of what runs side by side.
        copies = made.hosted / costs.host.value
        seconds = max(made.option.seconds, communication(setup, costs)[1], copies)
        ways.append(made)
        options.append(dataclasses.replace(made.option, seconds=seconds))
    chain = chain_of(setup, options, ways[0].seconds("forward"))
    choice = optimal(chain, memory)
    return None if choice is None else (ways, choice)


def communication(setup: Setup, costs: Costs) -> tuple[float, float]:
    """Return the seconds of FSDP2's collectives of a layer, in forward and in backward.

    Weights are gathered in `setup.dtype`, gradients are reduced in `setup.param_dtype`.
    """
    data, count = setup.layout.mesh.data, gathered(setup.parameters.layer, setup.layout)
    share = (data - 1) / data / link_of(costs, setup.layout, "data")
    gather = count * setup.dtype.itemsize * share
    return gather, gather + count * setup.param_dtype.itemsize * share


def row_of(setup: Setup, costs: Costs, ways: Sequence[Way], choice: Choice) -> Row:
    """Return the row of a choice among `ways` for the layers."""
    options = [way.option for way in ways]
    chain = chain_of(setup, options)
    count = Counter(choice.options)
    layers = setup.model.layers
    chosen = [(ways[index], n) for index, n in sorted(count.items())]
    labels = [w.label if n == layers else f"{n} × {w.label}" for w, n in chosen]
    forward = sum(w.flops for w in ways[0].works if w.which == "forward")
    rebuilt = sum(n * w.flops for way, n in chosen for w in way.works if w.rebuilt)
    sent = [(w.which, n) for way, n in chosen for w in way.works if w.collective]
    forth, back = (sum(n for of, n in sent if of == which) for which in ("forward", "backward"))
    return Row(
        ", ".join(labels),
        chains.kept_in_all(chain, choice) + sum(n * w.hosted for w, n in chosen),
        sum(n * way.hosted for way, n in chosen),
        parts_at_peak(setup, chain, choice),
        step_seconds(setup, costs, chosen),
        (forth / layers, back / layers),
        rebuilt / (3 * forward * layers),
    )


def step_seconds(setup: Setup, costs: Costs, chosen: list[tuple[Way, int]]) -> dict[str, float]:
    """Return the parts of a step's time.

    Tensor-parallel collectives are waited for. FSDP2's collectives and copies to the host overlap
    a layer's steps; only what takes longer than these counts.
    """
    parts = dict.fromkeys((*KINDS[:3], "rebuilding", KINDS[3]), 0.0)
    gather = communication(setup, costs)
    seen = hosted = 0.0
    for way, n in chosen:
        for w in way.works:
            rebuilds = w.rebuilt and w.kind != KINDS[3]
            parts["rebuilding" if rebuilds else w.kind] += n * w.seconds
        for which, comm in zip(("forward", "backward"), gather, strict=True):
            computes = way.seconds(which)
            seen += n * max(0.0, comm - computes)
            hosted += n * max(0.0, way.hosted / costs.host.value - max(computes, comm))
    parts |= {"FSDP, seen": seen, "host, seen": hosted}
    parts["embedding and loss"] = _ends(setup, costs)
    parts["optimizer"] = _UPDATE[setup.optimizer] * weight_bytes(setup) / costs.bandwidth.value
    return {name: seconds for name, seconds in parts.items() if seconds}


def _head_flops(setup: Setup) -> float:
    """Return the FLOPs of one product of the head, over all tensor-parallel ranks."""
    return 2.0 * setup.tokens * setup.model.vocab * setup.model.d_model


def _ends(setup: Setup, costs: Costs) -> float:
    """Return the seconds of embedding, last norm and loss.

    They are the head's products (one more in backward if logits are not kept), pointwise work, the
    root's collectives, gathering and scattering a divided stream, and sums over a divided
    vocabulary: of the gradient of the head's input, and of the rows of a tied embedding.
    """
    tensor, mesh = setup.layout.mesh.tensor, setup.layout.mesh
    products = 3 + setup.fused_loss
    seconds = products * _head_flops(setup) / tensor / costs.products.value
    stream = setup.tokens * setup.model.d_model * setup.dtype.itemsize
    logits = 0 if setup.fused_loss else 5 * loss_bytes(setup)[0]
    seconds += (10 * stream + logits) / costs.bandwidth.value
    root = gathered(setup.parameters.root, setup.layout)
    moved = root * (setup.dtype.itemsize + setup.param_dtype.itemsize)
    seconds += moved * (mesh.data - 1) / mesh.data / link_of(costs, setup.layout, "data")
    if tensor > 1:
        times = 2 * (setup.layout.stream > 1) + 2 * (1 + setup.model.tied)
        seconds += times * stream * (tensor - 1) / tensor / link_of(costs, setup.layout, "tensor")
    return seconds


def model_flops(setup: Setup, costs: Costs) -> float:
    """Return the FLOPs of a step of all devices; backward has double those of forward."""
    forward = sum(
        w.flops for w in works(setup.example, (), costs, setup.layout) if w.which == "forward"
    )
    mesh = setup.layout.mesh
    layers = setup.model.layers * forward * mesh.tensor
    return 3 * mesh.data * (layers + _head_flops(setup))


def peak_of(setup: Setup, costs: Costs, policy: str, **sizes: int) -> int:
    """Return the peak in bytes of a step of `sizes` with this policy or baseline everywhere."""
    setup = dataclasses.replace(setup, **sizes)  # type: ignore[arg-type]
    option = way_of(setup, costs, policy).option
    return chains.peak(chain_of(setup, [option]), Choice((0,) * setup.model.layers))


def largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest n up to `most` that fits, if all smaller ones do; 0 if 1 does not."""
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(setup: Setup, costs: Costs, memory: int, policy: str) -> int:
    """Return the most sequences of `setup.seq` tokens per rank that fit; 0 if none do."""
    return largest(lambda n: peak_of(setup, costs, policy, batch=n) <= memory, 1 << 12)


def largest_seq(setup: Setup, costs: Costs, memory: int, policy: str) -> int:
    """Return the most tokens per sequence that fit at `setup.batch`, in multiples; 0 if none do."""
    stream = setup.layout.stream
    multiple = stream if 1024 % stream else 1024
    most = largest(lambda n: peak_of(setup, costs, policy, seq=n * multiple) <= memory, 1 << 12)
    return most * multiple


def link_of(costs: Costs, layout: Layout, group: str) -> float:
    """Return the bytes per second that a device sends in a ring of a group.

    Tensor-parallel ranks are neighbors. In a data group that spans nodes, the ranks of one node
    share what the node sends, each over its own network device.
    """
    mesh = layout.mesh
    if group == "tensor":
        spans = mesh.tensor > costs.node
        beside = 1
    else:
        spans = mesh.devices > costs.node
        beside = max(1, costs.node // mesh.tensor)
    link = costs.link.value
    return min(link, costs.network.value * beside) if spans else link


def works(example: Example, save: Iterable[str], costs: Costs, layout: Layout) -> Iterator[Work]:
    """Yield all steps of both passes of a rank's layer that keeps `save`."""
    bytes_of = sizes_of(example, save)
    link, ranks = link_of(costs, layout, "tensor"), layout.mesh.tensor
    for which, step, flops, moved in work_of(example, save):
        node, backward = step.node, step.kind == "backward"
        collective, sent = "", 0.0
        if isinstance(node, CollectiveStep):
            collective = node.communication[backward]
            # In a ring, for a matrix of so many bytes when gathered.
            times, matrix = {"": 0, "all-reduce": 2}, max(bytes_of[node.name], bytes_of[node.x])
            sent = times.get(collective, 1) * matrix * (ranks - 1) / ranks
            kind, seconds = KINDS[3], sent / link
        else:
            kind, rate = "products" if flops else "pointwise", costs.products
            if flops and node is not None and node.per_sequence:
                kind = "attention"
                rate = costs.attention_backward if backward else costs.attention_forward
            seconds = max(flops / rate.value, moved / costs.bandwidth.value)
        rebuilt = which == "backward" and not backward
        seconds += costs.overhead.value if collective or kind != KINDS[3] else 0.0
        yield Work(which, kind, rebuilt, flops, sent, collective, seconds)


def pricer(costs: Costs, layout: Layout) -> Callable[[Example, Iterable[str]], Seconds]:
    """Return the costs that the planner takes: the seconds of `works` by pass."""

    def seconds(example: Example, save: Iterable[str]) -> Seconds:
        totals = dict.fromkeys(Seconds._fields, 0.0)
        for w in works(example, save, costs, layout):
            totals[w.which] += w.seconds
        return Seconds(**totals)

    return seconds
