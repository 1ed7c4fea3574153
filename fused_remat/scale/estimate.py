"""A step on a mesh: its memory and time for every policy, the planner's choice, and what fits."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fused_remat.formats import split_name
from fused_remat.planner import chain as chains
from fused_remat.planner.chain import Choice, Option
from fused_remat.planner.options import costed_options, kept_by_name
from fused_remat.planner.solve import optimal
from fused_remat.policies import ALL_PRESETS, EXACT_PRESETS, is_offloaded, kept_names
from fused_remat.scale.costs import Costs, kept_by_eager
from fused_remat.scale.layout import (
    Layout,
    Mesh,
    check,
    divides_head,
    gathered,
    padded,
    sharded,
)
from fused_remat.scale.memory import (
    Setup,
    chain_of,
    loss_bytes,
    parts_at_peak,
    passes,
)
from fused_remat.scale.time import KINDS, Work, link_of, pricer, sizes_of, works

#: PyTorch without us: everything that autograd saves, or `torch.utils.checkpoint` of each layer.
BASELINES = ("eager", "checkpoint")
#: Names of what is estimated besides presets.
PLANNER = "planner"
#: Bytes of an optimizer's step read and written, in units of the parameters' bytes.
_UPDATE = {"adamw": 7, "sgd": 3, "none": 0}


@dataclass(frozen=True)
class Row:
    """What a policy comes to on one device.

    Attributes:
        policy: its name; of the planner's, what it chose.
        kept: bytes that all layers keep; `hosted`, of them, those that wait in the host's memory.
        memory: bytes at the step's peak by part; their sum is the peak.
        seconds: of a step by part; their sum is the step's.
        collectives: a layer's calls to its tensor-parallel group: forward, backward, and of the
            latter those that rebuild.
        rebuilt: FLOPs rebuilt, of those of a step without rebuilding.
    """

    policy: str
    kept: int
    hosted: int
    memory: Mapping[str, int]
    seconds: Mapping[str, float]
    collectives: tuple[float, float, float]
    rebuilt: float

    @property
    def peak(self) -> int:
        return sum(self.memory.values())

    @property
    def step(self) -> float:
        return sum(self.seconds.values())


@dataclass(frozen=True)
class Way:
    """What a layer may do: what it keeps as the planner's option, and its steps."""

    label: str
    option: Option
    hosted: int
    works: tuple[Work, ...]

    def seconds(self, which: str) -> float:
        return sum(w.seconds for w in self.works if w.which == which)


@dataclass(frozen=True)
class Estimate:
    """A setup on a kind of device.

    Attributes:
        rows: by name: the baselines, the presets that were asked for, and the planner's choice,
            which is missing where nothing fits.
        flops: of the model in a step of all devices, nothing rebuilt.
    """

    setup: Setup
    costs: Costs
    memory: int
    rows: Mapping[str, Row]
    flops: float

    def fits(self, name: str) -> bool:
        return self.rows[name].peak <= self.memory

    def tokens_per_second(self, name: str) -> float:
        """Of all devices."""
        return self.setup.tokens * self.setup.layout.mesh.data / self.rows[name].step

    def mfu(self, name: str) -> float:
        """Model FLOPs of a step over what the devices' peak would do in its time."""
        peak = self.costs.peak.value * self.setup.layout.mesh.devices
        return self.flops / (self.rows[name].step * peak)


def estimate(
    setup: Setup, costs: Costs, memory: int, policies: Sequence[str] = tuple(EXACT_PRESETS)
) -> Estimate:
    """Memory and time of a step for every policy of `policies`, the baselines and the planner's.

    Raises: ValueError for a mesh that does not divide the model, or a name to offload that none
        of `policies` keeps.

    >>> from fused_remat.scale.shapes import LARGE
    >>> from fused_remat.scale.costs import HARDWARE
    >>> setup = Setup(LARGE["llama3-70b"], Layout(Mesh(8, 8)), batch=1, seq=8192)
    >>> found = estimate(setup, HARDWARE["h100"], 80 * 2**30, ["full", "none"])
    >>> found.rows["none"].kept > 8 * found.rows["full"].kept
    True
    """
    check(setup.model, setup.layout, setup.seq)
    divides_head(setup.parameters, setup.layout)
    _check_names(setup, policies)
    ways = {name: way_of(setup, costs, name) for name in (*BASELINES, *policies)}
    rows = {
        name: row_of(setup, costs, [way], Choice((0,) * setup.model.layers))
        for name, way in ways.items()
    }
    chosen = planned(setup, costs, memory)
    if chosen is not None:
        rows[PLANNER] = row_of(setup, costs, *chosen)
    return Estimate(setup, costs, memory, rows, model_flops(setup, costs))


def _check_names(setup: Setup, policies: Sequence[str]) -> None:
    graph = setup.example.call.graph
    saves = [kept_names(policy, graph) for policy in policies]
    kept = {split_name(name)[0] for save in saves for name in save}
    valid = [name for name in (*graph.inputs, *graph.names) if name in kept.union(graph.inputs)]
    unknown = [name for name in setup.offload if name not in valid]
    if unknown:
        raise ValueError(
            f"no activation {', '.join(map(repr, unknown))} to offload is kept by "
            f"{', '.join(map(repr, policies))}; kept: {', '.join(valid)}"
        )


def way_of(setup: Setup, costs: Costs, name: str) -> Way:
    """A layer's way of a preset or a baseline."""
    graph, layout = setup.example.call.graph, setup.layout
    preset = {"eager": "none", "checkpoint": "full"}.get(name, name)
    save = kept_names(preset, graph)
    made = way(setup, costs, save, name)
    if name not in BASELINES:
        return made
    stream = sizes_of(setup.example)["input"]
    eager = setup.batch * kept_by_eager(setup.model, layout, setup.seq, setup.dtype)
    backward = passes(setup.example, kept_names("none", graph)).backward
    again = eager - stream if name == "checkpoint" else 0
    option = dataclasses.replace(
        made.option, kept=stream if name == "checkpoint" else eager, forward=eager + stream,
        backward=again + backward,
    )  # fmt: skip
    if name == "eager":  # what it reads in backward is there
        found = tuple(w for w in made.works if not w.rebuilt)
        made = dataclasses.replace(made, works=found)
    return dataclasses.replace(made, option=option, hosted=0)


def way(setup: Setup, costs: Costs, save: Iterable[str], label: str) -> Way:
    """A layer's way of keeping `save`, of which `setup.offload` waits in the host's memory."""
    example, names = setup.example, frozenset(save)
    kept = kept_by_name(example, names)
    found, most = tuple(works(example, names, costs, setup.layout)), passes(example, names)
    away = {name for name in kept if is_offloaded(name, frozenset(setup.offload))}
    hosted = sum(kept[name] for name in away)
    backward = sum(w.seconds for w in found if w.which == "backward")
    option = Option(
        tuple(sorted(names)), sum(kept.values()) - hosted, most.forward + hosted,
        most.backward + 2 * hosted, backward,
    )  # fmt: skip
    return Way(label, option, hosted, found)


def planned(setup: Setup, costs: Costs, memory: int) -> tuple[list[Way], Choice] | None:
    """What the planner's exact search chooses within `memory`: ways, and one for every layer.

    Its options are the planner's: all sets of names that no other beats in bytes and time.
    """
    graph, layout = setup.example.call.graph, setup.layout
    found = costed_options(setup.example, pricer(costs, layout), graph.names)
    ways = [way(setup, costs, option.save, _label(setup, option.save)) for option in found]
    options = [_exposed(setup, costs, w) for w in ways]
    chain = chain_of(setup, options, ways[0].seconds("forward"))
    choice = optimal(chain, memory)
    return None if choice is None else (ways, choice)


def _exposed(setup: Setup, costs: Costs, way: Way) -> Option:
    """The option with the time of its backward as it is seen: what is not hidden by computing."""
    seconds = way.option.seconds
    hidden = max(seconds, communication(setup, costs)[1], way.hosted / costs.host.value)
    return dataclasses.replace(way.option, seconds=hidden)


def _label(setup: Setup, save: tuple[str, ...]) -> str:
    graph = setup.example.call.graph
    presets = {kept_names(preset, graph): preset for preset in reversed(ALL_PRESETS)}
    return presets.get(frozenset(save), f"names:{','.join(save)}")


def communication(setup: Setup, costs: Costs) -> tuple[float, float]:
    """Seconds of FSDP2's collectives of a layer, in forward and in backward.

    Gathered in the dtype that is computed in, gradients reduced in the parameters'.
    """
    data, count = setup.layout.mesh.data, gathered(setup.parameters.layer, setup.layout)
    share = (data - 1) / data / link_of(costs, setup.layout, "data")
    gather = count * setup.dtype.itemsize * share
    return gather, gather + count * setup.param_dtype.itemsize * share


def row_of(setup: Setup, costs: Costs, ways: Sequence[Way], choice: Choice) -> Row:
    """Memory and time when the layers have these of the ways."""
    options = [way.option for way in ways]
    chain = chain_of(setup, options)
    count = Counter(choice.options)
    layers = setup.model.layers
    chosen = [(ways[index], n) for index, n in sorted(count.items())]
    labels = [w.label if n == layers else f"{n} × {w.label}" for w, n in chosen]
    forward = sum(w.flops for w in ways[0].works if w.which == "forward")
    rebuilt = sum(n * w.flops for way, n in chosen for w in way.works if w.rebuilt)
    return Row(
        ", ".join(labels),
        chains.kept_in_all(chain, choice) + sum(n * w.hosted for w, n in chosen),
        sum(n * way.hosted for way, n in chosen),
        parts_at_peak(setup, chain, choice),
        step_seconds(setup, costs, chosen),
        _collectives(chosen, layers),
        rebuilt / (3 * forward * layers),
    )


def _collectives(chosen: list[tuple[Way, int]], layers: int) -> tuple[float, float, float]:
    def mean(counts: Callable[[Work], bool]) -> float:
        found = sum(n * sum(map(counts, way.works)) for way, n in chosen)
        return found / layers

    return (
        mean(lambda w: bool(w.collective) and w.which == "forward"),
        mean(lambda w: bool(w.collective) and w.which == "backward"),
        mean(lambda w: bool(w.collective) and w.rebuilt),
    )


def step_seconds(setup: Setup, costs: Costs, chosen: list[tuple[Way, int]]) -> dict[str, float]:
    """A step's time by part. Collectives of tensor-parallel groups are waited for; FSDP2's, and
    what goes to the host, run beside a layer's steps, and what is longer than these is seen."""
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
    parts["optimizer"] = _update(setup, costs)
    return {name: seconds for name, seconds in parts.items() if seconds}


def _head_flops(setup: Setup) -> float:
    """Of one product of the head, all tensor-parallel ranks' together."""
    return 2.0 * setup.tokens * setup.model.vocab * setup.model.d_model


def _ends(setup: Setup, costs: Costs) -> float:
    """The head's products (one more in backward if its logits are not kept), the embedding, the
    last norm, the root's collectives, the ends of a divided stream, and the sums over a divided
    vocabulary: of the gradient of what the head reads, and of the rows of a tied embedding."""
    tensor, mesh = setup.layout.mesh.tensor, setup.layout.mesh
    ranks = tensor if divides_head(setup.parameters, setup.layout) else 1
    products = 3 + setup.fused_loss
    seconds = products * _head_flops(setup) / ranks / costs.products.value
    stream = setup.tokens * setup.model.d_model * setup.dtype.itemsize
    logits = 0 if setup.fused_loss else 5 * loss_bytes(setup)[0]
    seconds += (10 * stream + logits) / costs.bandwidth.value
    root = gathered(setup.parameters.root, setup.layout)
    moved = root * (setup.dtype.itemsize + setup.param_dtype.itemsize)
    seconds += moved * (mesh.data - 1) / mesh.data / link_of(costs, setup.layout, "data")
    if tensor > 1:
        times = 2 * (setup.layout.stream > 1) + 2 * (ranks > 1) * (1 + setup.model.tied)
        seconds += times * stream * (tensor - 1) / tensor / link_of(costs, setup.layout, "tensor")
    return seconds


def _update(setup: Setup, costs: Costs) -> float:
    p = setup.parameters
    count = setup.model.layers * sharded(p.layer, setup.layout) + sharded(p.root, setup.layout)
    nbytes = _UPDATE[setup.optimizer] * count * setup.param_dtype.itemsize
    return nbytes / costs.bandwidth.value


def model_flops(setup: Setup, costs: Costs) -> float:
    """Of a step of all devices, nothing rebuilt: backward is twice a forward."""
    forward = sum(
        w.flops for w in works(setup.example, (), costs, setup.layout) if w.which == "forward"
    )
    mesh = setup.layout.mesh
    layers = setup.model.layers * forward * mesh.tensor
    return 3 * mesh.data * (layers + _head_flops(setup))


def peak_of(setup: Setup, costs: Costs, policy: str) -> int:
    """Bytes at the peak of a step when every layer has this policy, or baseline."""
    option = way_of(setup, costs, policy).option
    return chains.peak(chain_of(setup, [option]), Choice((0,) * setup.model.layers))


def largest(fits: Callable[[int], bool], most: int = 1 << 20) -> int:
    """The largest n up to `most` that fits, where all smaller ones do; 0 if 1 does not.

    >>> largest(lambda n: n * n <= 1000)
    31
    """
    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def largest_batch(setup: Setup, costs: Costs, memory: int, policy: str) -> int:
    """Sequences of a data-parallel rank that fit, of `setup.seq` tokens; 0 if none does."""
    return largest(
        lambda n: peak_of(dataclasses.replace(setup, batch=n), costs, policy) <= memory, 1 << 12
    )


def largest_seq(setup: Setup, costs: Costs, memory: int, policy: str, multiple: int = 1024) -> int:
    """Tokens of a sequence that fit, in multiples, at `setup.batch`; 0 if not one multiple does."""
    found = largest(
        lambda n: peak_of(dataclasses.replace(setup, seq=n * multiple), costs, policy) <= memory,
        1 << 12,
    )
    return found * multiple


def smallest_mesh(
    setup: Setup, costs: Costs, memory: int, policies: Sequence[str], most: int = 1 << 14
) -> tuple[Mesh, str] | None:
    """The fewest devices, in powers of two, on which a policy fits, and the fastest that does.

    Tensor-parallel groups are within a node; `setup.batch` is of each data-parallel rank.
    """
    devices = 1
    while devices <= most:
        best: tuple[float, Mesh, str] | None = None
        for mesh in _meshes(setup, devices, costs.node):
            model, layout = padded(setup.model, mesh), Layout(mesh, setup.layout.sequence)
            there = dataclasses.replace(setup, model=model, layout=layout)
            for policy in policies:
                if peak_of(there, costs, policy) <= memory:
                    chosen = [(way_of(there, costs, policy), there.model.layers)]
                    seconds = sum(step_seconds(there, costs, chosen).values())
                    rate = there.tokens * mesh.data / seconds
                    best = max(best, (rate, mesh, policy), key=_rate) if best else (
                        rate, mesh, policy
                    )  # fmt: skip
        if best is not None:
            return best[1], best[2]
        devices *= 2
    return None


def _rate(found: tuple[float, Mesh, str]) -> float:
    return found[0]


def _meshes(setup: Setup, devices: int, node: int) -> list[Mesh]:
    """Those of so many devices whose tensor-parallel groups divide the model, in a node."""
    found = []
    tensor = 1
    while tensor <= min(devices, node):
        mesh = Mesh(devices // tensor, tensor)
        try:
            layout = Layout(mesh, setup.layout.sequence)
            check(setup.model, layout, setup.seq)
            found.append(mesh)
        except ValueError:
            pass
        tensor *= 2
    return found
