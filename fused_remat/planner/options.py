"""The options of a call: which sets of names are worth keeping, and what each takes and costs.

Of lossy formats, only "int8", and only of names that nobody but attention and activations reads in
backward (`packable`): those that the lossy presets pack. What a weight gradient or a norm reads,
and the residual stream, are neither packed nor rebuilt from what is (`_isolated`): heads are packed
only beside attention's result. `sign`, which is exact, is not searched: beside the activation
itself it saves a pointwise pass, and is the larger choice for it.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fused_remat.formats import NATIVE, split_name
from fused_remat.graph.graph import Graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import kept_bytes, schedule
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
from fused_remat.steps.node import Node
from fused_remat.steps.rotary import Rotary

#: How many names are searched in all subsets; of longer graphs, the steps that cost most.
_SEARCHED = 10

#: The lossy format that is searched.
_LOSSY = "int8"

#: Seconds of every step, when these names are kept.
Costs = Callable[[Example, Iterable[str]], Seconds]


def kept_by_name(example: Example, save: Iterable[str]) -> dict[str, int]:
    """Bytes that a call keeps, by name; the graph's prediction."""
    call = example.keeping(save)
    graph = call.graph
    inputs = zip(graph.inputs, example.tensors[: len(graph.inputs)], strict=True)
    given = {name: t.element_size() for name, t in inputs if t is not None}
    itemsize = given[graph.inputs[0]]
    return dict(kept_bytes(graph, call.save, call.needs_grad, example.shapes, itemsize, given))


def options_of(
    example: Example,
    costs: Costs,
    names: tuple[str, ...],
    policies: Sequence[str | Policy] | None = None,
    lossy: bool = False,
) -> tuple[Option, ...]:
    """Those of all sets of names that no other beats in both bytes and time; first the base.

    Args:
        names: that the layer's policy takes; a call's graph may have more (adapters').
        policies: only these, all of them; none of them in a segment.
        lossy: besides, those of all sets with names in 8 bits. The exact ones stay, whatever beats
            them: what unpacks may need more room in backward.
    """
    return _with_peaks(example, costed_options(example, costs, names, policies, lossy))


def costed_options(
    example: Example,
    costs: Costs,
    names: tuple[str, ...],
    policies: Sequence[str | Policy] | None = None,
    lossy: bool = False,
) -> list[Option]:
    """`options_of` without the peaks, for which a call has to be run; tensors may be on meta."""
    graph = example.call.graph
    if policies is None:
        sets = _effective(example, _subsets(graph, names, example))
        exact = [_costed(example, costs, save) for save in sets]
        found = _undominated(exact)
        if lossy:
            packed = [s for s in _packed(example, exact, names) if _isolated(example, s)]
            more = [_not_faster(example, costs, save) for save in _effective(example, packed)]
            found = list(dict.fromkeys(found + _undominated(exact + more)))
    else:
        named = [kept_names(p, graph, names) for p in policies]
        sets = _effective(example, named)
        found = [_costed(example, costs, save) for save in sets]
    base = _costed(example, costs, frozenset())
    rest = sorted((o for o in found if o.save), key=lambda o: (o.kept, o.seconds, o.save))
    return [base, *rest]


def options_for(
    example: Example, costs: Costs, saves: Iterable[tuple[str, ...]]
) -> tuple[Option, ...]:
    """One for each of `saves`: for calls of one layer, which all have the same."""
    return _with_peaks(example, [_costed(example, costs, frozenset(save)) for save in saves])


def with_offload(
    example: Example, options: Sequence[Option], link: HostLink, forward: float
) -> tuple[Option, ...]:
    """The options, then those of them that offload the input, or all they keep but statistics.

    Not those that another beats in bytes and time. `forward`: seconds of one. What is in flight,
    or back on the device already, is not in their peaks.
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


def _subsets(graph: Graph, names: tuple[str, ...], example: Example) -> Iterable[frozenset[str]]:
    searched = names
    if len(names) > _SEARCHED:
        widths = graph.widths(example.shapes)

        def flops(node: Node) -> int:
            return node.flops(widths, example.shapes, 1)

        ranked = sorted(names, key=lambda name: -flops(graph.producer[name]))
        searched = tuple(sorted(ranked[:_SEARCHED]))
    for count in range(len(searched) + 1):
        yield from map(frozenset, itertools.combinations(searched, count))
    for preset in EXACT_PRESETS:
        yield kept_names(preset, graph, names)


def packable(graph: Graph) -> frozenset[str]:
    """The names that only attention, heads' norms and activations read in backward.

    Of a block with a lossy preset, those that the preset packs.

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


def _isolated(example: Example, save: frozenset[str]) -> bool:
    """Whether nothing is rebuilt from packed names but what only activations and attention read."""
    graph = example.call.graph
    plan = schedule(in_formats(graph, save), save, example.call.needs_grad, tiled=False)
    pointwise = {n.name for n in graph.nodes if isinstance(n, MLPActivation | Rotary)}
    return plan.inexact <= pointwise | {split_name(name)[0] for name in save}


def _not_faster(example: Example, costs: Costs, save: frozenset[str]) -> Option:
    """Of a set with packed names: it takes longer than the same names as they are.

    A timing that says otherwise is noise, and would choose to round where there is no need to.
    """
    option = _costed(example, costs, save)
    native = _costed(example, costs, frozenset(split_name(name)[0] for name in save))
    return dataclasses.replace(option, seconds=max(option.seconds, native.seconds * (1 + 1e-3)))


def _packed(
    example: Example, exact: list[Option], names: tuple[str, ...]
) -> Iterable[frozenset[str]]:
    """Sets with names in 8 bits: for any of these names, the exact sets that no other would beat if
    they took their packed bytes; and the lossy presets.

    Unpacking is left out here: it costs little beside what a kept name saves.
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


def _effective(example: Example, sets: Iterable[frozenset[str]]) -> list[frozenset[str]]:
    """Without the names that backward would not ask for, and duplicates."""
    needs_grad = example.call.needs_grad
    seen: dict[frozenset[str], None] = {}
    for save in sets:
        plan = schedule(in_formats(example.call.graph, save), save, needs_grad, tiled=False)
        kept = {*plan.kept, *(("output",) if plan.keeps_output else ())}
        seen.setdefault(save & kept)
    return list(seen)


def _costed(example: Example, costs: Costs, save: frozenset[str]) -> Option:
    """Without the peaks, which are measured of what is left."""
    kept = sum(kept_by_name(example, save).values())
    packing = {f"compute {name}" for name in save if split_name(name)[1] != NATIVE}
    steps = costs(example, save).items()
    seconds = sum(t for (which, step), t in steps if which == "backward" or step in packing)
    return Option(
        tuple(sorted(save)), kept, 0, 0, seconds, preset=preset_of(example.call.graph, save)
    )


def preset_of(graph: Graph, save: Iterable[str]) -> str:
    """The first preset that keeps these names, "" if none does.

    >>> from fused_remat.graph.build import block_graph
    >>> from fused_remat.spec import nn_layer_spec
    >>> preset_of(block_graph(nn_layer_spec(True, 4, 16, "gelu")), {"attn"})
    'lean'
    """
    wanted = frozenset(save)
    return next((name for name in ALL_PRESETS if kept_names(name, graph) == wanted), "")


def _undominated(options: list[Option]) -> list[Option]:
    left: list[Option] = []
    for option in sorted(options, key=lambda o: (o.kept, o.seconds, o.save)):
        if not left or option.seconds < left[-1].seconds:
            left.append(option)
    return left


def _with_peaks(example: Example, options: list[Option]) -> tuple[Option, ...]:
    """Each run once on the device, for the most that its passes take."""
    example.run(options[0].save)
    with AllocationTrace(example.input.device, collect=False) as trace:
        for i, option in enumerate(options):
            trace.mark((i, "forward"))
            example.run(option.save, lambda i=i: trace.mark((i, "backward")))  # type: ignore[misc]
            trace.mark(None)
    above = {span.label: span.peak - span.start for span in trace.spans}
    return tuple(
        dataclasses.replace(option, forward=above[i, "forward"], backward=above[i, "backward"])
        for i, option in enumerate(options)
    )


def forward_seconds(example: Example, costs: Costs) -> float:
    """Seconds of one forward."""
    return sum(t for (which, _), t in costs(example, ()).items() if which == "forward")


_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}  # fmt: skip
_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([kmgt]i?)?b?\s*", re.IGNORECASE)
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?)\s*%\s*")

#: What a budget is given as.
Budget = str | int | float


class BudgetError(ValueError):
    """A budget that no plan of a method meets.

    Attributes:
        budget: in bytes.
        least: the least peak that any method can reach, in bytes; for "sqrt" and "manual", theirs.
        parts: what that peak is made of, in bytes, the largest first.
    """

    def __init__(self, message: str, budget: int, least: int, parts: dict[str, int]) -> None:
        super().__init__(message)
        self.budget, self.least, self.parts = budget, least, parts


def device_memory(device: torch.device | str) -> int:
    """Bytes of memory of a device: all of a CUDA device's, or the machine's.

    Raises: NotImplementedError for another device.
    """
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    raise NotImplementedError(f"the memory of {device} is not known: give a number of bytes")


def bytes_of(budget: Budget, device: torch.device | str = "cpu") -> int:
    """A budget in bytes.

    Args:
        budget: an int of bytes, text ("6GiB", "500 MB", "80%"), or a float in (0, 1], a fraction of
            the device's memory.
    Raises: TypeError or ValueError for anything else, with the value.

    >>> bytes_of("6GiB"), bytes_of("1.5 kB"), bytes_of(4096)
    (6442450944, 1500, 4096)
    >>> bytes_of("50%") == bytes_of(0.5) == device_memory("cpu") // 2
    True
    """
    if isinstance(budget, bool) or not isinstance(budget, (str, int, float)):
        raise TypeError(f"a budget is text, bytes (int) or a fraction (float), got {budget!r}")
    if isinstance(budget, str):
        nbytes = _read(budget, device)
    elif isinstance(budget, float):
        if not 0.0 < budget <= 1.0:
            raise ValueError(
                f"a float is a fraction of the device's memory, in (0, 1], got {budget!r}; give "
                "bytes as an int"
            )
        nbytes = int(device_memory(device) * budget)
    else:
        nbytes = budget
    if not 0 < nbytes < 2**63:
        raise ValueError(
            f"a budget is at least a byte and less than 2**63, got {budget!r}; a fraction as text: "
            "'80%'"
        )
    return nbytes


def _read(text: str, device: torch.device | str) -> int:
    percent, match = _PERCENT.fullmatch(text), _PATTERN.fullmatch(text)
    if percent is not None and 0 < float(percent[1]) <= 100:
        return int(device_memory(device) * float(percent[1]) / 100)
    if match is None:
        raise ValueError(
            f"cannot read the budget {text!r}; examples: '6GiB', '500 MB', '6442450944' (bytes), "
            "'80%' (of the device's memory)"
        )
    return int(float(match[1]) * _UNITS[(match[2] or "").lower()])


class _Live(TorchDispatchMode):
    """Bytes of the storages that operators return, while they are alive, and the most at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_iter((args, kwargs)) if _is(t)}
        for t in tree_iter(result):
            if _is(t):
                self._add(t.untyped_storage(), given)
        return result

    def _add(self, storage: Any, given: set[int]) -> None:
        key, nbytes = storage._cdata, storage.nbytes()
        if key in self._known or id(storage) in given:
            return
        self._known.add(key)
        self.now += nbytes
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, key, nbytes)

    def _free(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def _is(t: Any) -> bool:
    return isinstance(t, Tensor)


def state_bytes(optimizer: Optimizer) -> int:
    """Bytes of the tensors in an optimizer's state, as it is now."""
    storages = [t.untyped_storage() for t in tree_iter(dict(optimizer.state)) if _is(t)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def predict_optimizer(optimizer: Optimizer) -> tuple[int, int]:
    """(state, update): bytes of an optimizer's state once it has stepped, and the most that a step
    takes besides parameters, gradients and state.

    The optimizer is not touched: one like it steps on fake tensors of the same sizes.

    Raises: ValueError if one like it cannot be made from its groups and has no state yet.

    >>> layer = torch.nn.Linear(64, 64, bias=False)
    >>> predict_optimizer(torch.optim.AdamW(layer.parameters()))[0] == 2 * 64 * 64 * 4 + 4
    True
    """
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            fake = type(optimizer)(_fake_groups(optimizer))  # type: ignore[call-arg]
            for group in fake.param_groups:
                for p in group["params"]:
                    p.grad = torch.empty_like(p)
            fake.step()
            with _Live() as live:
                fake.step()
        return max(state_bytes(optimizer), state_bytes(fake)), live.most
    except Exception as error:
        have = state_bytes(optimizer)
        if have:
            return have, 0
        raise ValueError(
            f"the state of {type(optimizer).__name__} is not known before its first step "
            f"({type(error).__name__}: {error}): call step() once before plan"
        ) from error


def _fake_groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [
        {**{k: v for k, v in group.items() if k != "params"},
         "params": [torch.nn.Parameter(torch.empty_like(p)) for p in group["params"]]}
        for group in optimizer.param_groups
    ]  # fmt: skip
