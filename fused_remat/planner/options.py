"""The options of a call: which sets of names are worth keeping, and the memory and time of each.

The only lossy format that is searched is "int8", for names that only attention and activations read
in backward (`packable`), as in the lossy presets. Nothing that a weight gradient or a norm reads,
and no residual stream, is stored in 8 bits or rebuilt from such values (`_isolated`). The exact
format "sign" is not searched: beside the activation's result it saves a single pointwise pass.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

from fused_remat.formats import NATIVE, split_name
from fused_remat.graph.graph import Graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import Schedule, kept_bytes, schedule
from fused_remat.planner.calibration import Example, HostLink, Seconds
from fused_remat.planner.chain import Option
from fused_remat.policies import (
    ALL_PRESETS,
    EXACT_PRESETS,
    LOSSY_PRESETS,
    Policy,
    is_offloaded,
    kept_names,
)
from fused_remat.report.allocations import AllocationTrace
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.rotary import Rotary

_SEARCHED = 10  # names of which all subsets are searched
_LOSSY = "int8"  # the lossy format that is searched

#: Seconds of every step of a call that keeps these names.
Costs = Callable[[Example, Iterable[str]], Seconds]


def options_of(
    example: Example,
    costs: Costs,
    names: tuple[str, ...],
    policies: Sequence[str | Policy] | None = None,
    lossy: bool = False,
) -> tuple[Option, ...]:
    """The base, which keeps no names, then the sets of names that no other set beats in both bytes
    and time.

    Args:
        names: names that the layer's policy accepts; a call's graph may have more (adapters).
        policies: use exactly these instead, without their segments.
        lossy: include sets with names in 8 bits. The exact sets stay even where a lossy one beats
            them: dequantizing may need more memory in backward.
    """
    return _with_peaks(example, costed_options(example, costs, names, policies, lossy))


def costed_options(
    example: Example,
    costs: Costs,
    names: tuple[str, ...],
    policies: Sequence[str | Policy] | None = None,
    lossy: bool = False,
) -> list[Option]:
    """`options_of` without peaks, which are measured by running the call; "meta" tensors do."""
    graph = example.call.graph
    if policies is None:
        exact = [_costed(example, costs, s) for s in _effective(example, _subsets(example, names))]
        found = _undominated(exact)
        if lossy:
            sets = [s for s in _packed(example, exact, names) if _isolated(example, s)]
            more = [_not_faster(example, costs, save) for save in _effective(example, sets)]
            found = list(dict.fromkeys(found + _undominated(exact + more)))
    else:
        sets = _effective(example, (kept_names(p, graph, names) for p in policies))
        found = [_costed(example, costs, save) for save in sets]
    base = _costed(example, costs, frozenset())
    rest = sorted((o for o in found if o.save), key=lambda o: (o.kept, o.seconds, o.save))
    return [base, *rest]


def options_for(
    example: Example, costs: Costs, saves: Iterable[tuple[str, ...]]
) -> tuple[Option, ...]:
    """One option for each of `saves`: all calls of one layer have the same options."""
    return _with_peaks(example, [_costed(example, costs, frozenset(save)) for save in saves])


def with_offload(
    example: Example, options: Sequence[Option], link: HostLink, forward: float
) -> tuple[Option, ...]:
    """The options, then those that offload the input, or everything kept but statistics.

    Offloading options that another one beats in bytes and time are left out. Their peaks do not
    include copies in flight. `forward`: seconds of one forward.
    """
    found, moving = list(options), []
    for option in options:
        by_name = kept_by_name(example, option.save)
        for names in ({"input"}, {"input", *(split_name(name)[0] for name in option.save)}):
            moved = sum(n for name, n in by_name.items() if is_offloaded(name, names))
            more = dataclasses.replace(
                option,
                offload=tuple(sorted(names)),
                moved=moved,
                kept=option.kept - moved,
                seconds=option.seconds + link.exposed(moved, forward, option.seconds),
            )
            if not any(o.kept <= more.kept and o.seconds <= more.seconds for o in found):
                moving.append(more)
    found += sorted(moving, key=lambda option: (option.moved, option.kept))
    return tuple(found)


def kept_by_name(example: Example, save: Iterable[str]) -> dict[str, int]:
    """Bytes that a call keeps for backward, by name, as its graph predicts."""
    call = example.keeping(save)
    graph = call.graph
    inputs = zip(graph.inputs, example.tensors[: len(graph.inputs)], strict=True)
    given = {name: t.element_size() for name, t in inputs if t is not None}
    itemsize = given[graph.inputs[0]]
    return dict(kept_bytes(graph, call.save, call.needs_grad, example.shapes, itemsize, given))


def forward_seconds(example: Example, costs: Costs) -> float:
    """Seconds of one forward."""
    return sum(t for (which, _), t in costs(example, ()).items() if which == "forward")


def packable(graph: Graph) -> frozenset[str]:
    """Names that only attention, norms of heads and activations read in backward.

    Of a block with a lossy preset, the names that the preset stores in 8 bits.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.spec import nn_layer_spec
    >>> sorted(packable(block_graph(nn_layer_spec(True, 4, 16, "gelu"))))
    ['qkv', 'up']
    """
    found: set[str] = set()
    others: set[str] = set(graph.stream)
    for node in graph.nodes:
        inside = node.per_sequence or isinstance(node, MLPActivation | Rotary)
        (found if inside else others).update(node.backward_reads({*node.inputs, *node.params}))
        others.update({node.name} if node.per_sequence else ())
    preset = kept_names("fast8", graph)
    if preset:
        found &= {split_name(name)[0] for name in preset}
    return frozenset(found - others) & frozenset(graph.names)


def preset_of(graph: Graph, save: Iterable[str]) -> str:
    """The first preset that keeps exactly these names, or ""."""
    wanted = frozenset(save)
    return next((name for name in ALL_PRESETS if kept_names(name, graph) == wanted), "")


def _subsets(example: Example, names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    """All subsets of the names, or of those whose steps have most FLOPs; and the exact presets."""
    graph, searched = example.call.graph, names
    if len(names) > _SEARCHED:
        widths, shapes = graph.widths(example.shapes), example.shapes
        flops = {name: graph.producer[name].flops(widths, shapes, 1) for name in names}
        searched = tuple(sorted(sorted(names, key=lambda name: -flops[name])[:_SEARCHED]))
    for count in range(len(searched) + 1):
        yield from map(frozenset, itertools.combinations(searched, count))
    for preset in EXACT_PRESETS:
        yield kept_names(preset, graph, names)


def _packed(
    example: Example, exact: list[Option], names: tuple[str, ...]
) -> Iterator[frozenset[str]]:
    """Sets with names in 8 bits, and the lossy presets.

    For every choice of such names: the exact sets that none would beat if these names took their
    quantized size. Time of dequantizing is ignored here: it is small beside what a kept name saves.
    """
    graph = example.call.graph
    may = sorted(packable(graph).intersection(names))
    native = {name: sum(kept_by_name(example, {name}).values()) for name in may}
    less = {n: native[n] - sum(kept_by_name(example, {f"{n}:{_LOSSY}"}).values()) for n in may}
    for count in range(1, len(may) + 1):
        for chosen in itertools.combinations(may, count):
            smaller = [
                dataclasses.replace(o, kept=o.kept - sum(less[n] for n in chosen if n in o.save))
                for o in exact
            ]
            for option in _undominated(smaller):
                yield frozenset(f"{n}:{_LOSSY}" if n in chosen else n for n in option.save)
    for preset in LOSSY_PRESETS:
        yield kept_names(preset, graph, names)


def _isolated(example: Example, save: frozenset[str]) -> bool:
    """Whether only activations and attention read what is rebuilt from quantized names."""
    graph = example.call.graph
    pointwise = {n.name for n in graph.nodes if isinstance(n, MLPActivation | Rotary)}
    inexact = _schedule(example, save).inexact
    return inexact <= pointwise | {split_name(name)[0] for name in save}


def _effective(example: Example, sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """The sets without names that backward does not need, and without duplicates."""
    seen: dict[frozenset[str], None] = {}
    for save in sets:
        plan = _schedule(example, save)
        seen.setdefault(save & {*plan.kept, *(("output",) if plan.keeps_output else ())})
    return list(seen)


def _schedule(example: Example, save: frozenset[str]) -> Schedule:
    call = example.call
    return schedule(in_formats(call.graph, save), save, call.needs_grad, tiled=False)


def _costed(example: Example, costs: Costs, save: frozenset[str]) -> Option:
    """The option with its bytes and time, without its peaks."""
    packing = {f"compute {name}" for name in save if split_name(name)[1] != NATIVE}
    steps = costs(example, save).items()
    seconds = sum(t for (which, step), t in steps if which == "backward" or step in packing)
    kept = sum(kept_by_name(example, save).values())
    preset = preset_of(example.call.graph, save)
    return Option(tuple(sorted(save)), kept, 0, 0, seconds, preset=preset)


def _not_faster(example: Example, costs: Costs, save: frozenset[str]) -> Option:
    """The option of a set with quantized names; it takes longer than the same names unquantized.

    A timing that says otherwise is noise, and would quantize where nothing is gained.
    """
    option = _costed(example, costs, save)
    native = _costed(example, costs, frozenset(split_name(name)[0] for name in save))
    return dataclasses.replace(option, seconds=max(option.seconds, native.seconds * (1 + 1e-3)))


def _undominated(options: list[Option]) -> list[Option]:
    """The options that no other one beats in both bytes and time."""
    left: list[Option] = []
    for option in sorted(options, key=lambda o: (o.kept, o.seconds, o.save)):
        if not left or option.seconds < left[-1].seconds:
            left.append(option)
    return left


def _with_peaks(example: Example, options: list[Option]) -> tuple[Option, ...]:
    """The options with the peaks of their passes: each is run once on the device."""
    example.run(options[0].save)
    with AllocationTrace(example.input.device, collect=False) as trace:
        for i, option in enumerate(options):
            trace.mark((i, "forward"))
            example.run(option.save, functools.partial(trace.mark, (i, "backward")))
            trace.mark(None)
    above = {span.label: span.peak - span.start for span in trace.spans}
    return tuple(
        dataclasses.replace(option, forward=above[i, "forward"], backward=above[i, "backward"])
        for i, option in enumerate(options)
    )
