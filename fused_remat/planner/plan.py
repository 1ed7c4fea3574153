"""`Plan`: a policy for each layer and the predicted memory and time; `build.py` makes it."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from torch import nn

from fused_remat.convert import convert, fused_layers
from fused_remat.huggingface.head import HuggingFaceHead
from fused_remat.planner import chain as chains
from fused_remat.planner.chain import Chain, Choice, Event, Option
from fused_remat.planner.solve import METHODS, choose_chain, frontier, parts_at
from fused_remat.policies import ADVICE, Policy
from fused_remat.report import files
from fused_remat.report.units import (
    Budget,
    aligned,
    bytes_of,
    human,
    milliseconds,
    reason_lines,
    run_name,
)

Model = TypeVar("Model", bound=nn.Module)


@dataclass(frozen=True)
class LayerPlan:
    """The plan of one layer.

    Attributes:
        name, kind: qualified name of the layer, and the kind of its block, or its class.
        policy: the policy to set.
        label: the policy as text: a preset's name where it is one. "checkpointed" or "plain" for a
            layer that does not run as a block.
        kept_bytes: bytes kept from forward to backward, over all calls.
        rebuild_seconds: time of backward above that of keeping everything useful, including the
            replay of a segment.
        reason: why the layer does not run as a block; "" if it does.
    """

    name: str
    kind: str
    policy: Policy
    label: str
    kept_bytes: int
    rebuild_seconds: float
    reason: str = ""


@dataclass(frozen=True)
class Point:
    """A point of the frontier: the fastest step within a peak."""

    peak_bytes: int
    kept_bytes: int
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A policy for every fused layer of a model, and the memory and time of a step; see `plan`.

    Bytes and seconds are predictions for the inputs and the device passed to `plan`. Prints as
    `table()`.

    Attributes:
        model, device: the model's class and the device's name.
        method, costs: the method that chose the policies, and the costs that it used.
        budget: limit on the peak in bytes; None for no limit.
        chain, choice: the measured step, and the choice within it (`fused_remat.planner.chain`).
        other: the step in which a fused loss computes its gradients in the other pass; None without
            such a loss.
    """

    model: str
    device: str
    method: str
    costs: str
    budget: int | None
    chain: Chain
    choice: Choice
    other: Chain | None = None

    @property
    def _chains(self) -> list[Chain]:
        return [self.chain] if self.other is None else [self.chain, self.other]

    @property
    def peak_bytes(self) -> int:
        """Most bytes during a step, including parameters, inputs, gradients and optimizer state."""
        return chains.peak(self.chain, self.choice)

    @property
    def kept_bytes(self) -> int:
        """Bytes kept from forward to backward in the entire model, as `memory_report` counts."""
        return chains.kept_in_all(self.chain, self.choice)

    @property
    def seconds(self) -> float:
        """Time of forward and backward."""
        return chains.seconds(self.chain, self.choice)

    @functools.cached_property
    def layers(self) -> tuple[LayerPlan, ...]:
        """The plans of the layers in order of their first calls."""
        return tuple(_layers(self.chain, self.choice))

    @property
    def policies(self) -> dict[str, Policy]:
        """The policies by the layers' qualified names."""
        return {layer.name: layer.policy for layer in self.layers}

    @property
    def parts(self) -> dict[str, int]:
        """Parts of the peak, in bytes: "kept" by the layers, "at work" for everything temporary."""
        return parts_at(self.chain, max(self.timeline(), key=lambda event: event.peak))

    @property
    def advice(self) -> str:
        """Advice on long sequences whose attention runs again in backward, or ""."""
        policies = self.policies
        again = (set(call.long) - policies[call.layer].save for call in self.chain.calls)
        return ADVICE if any(again) else ""

    def timeline(self) -> list[Event]:
        """Return the predicted step, span by span."""
        return list(chains.timeline(self.chain, self.choice))

    @functools.cached_property
    def frontier(self) -> tuple[Point, ...]:
        """The fastest steps for every budget, from the least possible peak to no limit."""
        points: list[Point] = []
        pairs = [(chain, choice) for chain in self._chains for choice in frontier(chain)]
        for of in sorted(pairs, key=lambda pair: (chains.peak(*pair), chains.seconds(*pair))):
            point = Point(chains.peak(*of), chains.kept_in_all(*of), chains.seconds(*of))
            if not points or point.seconds < points[-1].seconds:
                points.append(point)
        return tuple(points)

    def within(self, budget: Budget | None, method: str = "optimal") -> Plan:
        """Another plan from the same measurements, for another budget or with another method.

        Raises: as `plan`; ValueError for "manual", whose options were not measured.
        """
        if method not in METHODS:
            raise ValueError(f"unknown method {method!r}; valid here: {', '.join(METHODS)}")
        limit = None if budget is None else bytes_of(budget, self.device)
        chain, choice, other = choose_chain(self._chains, limit, method, {})
        plan = dataclasses.replace(self, chain=chain, choice=choice, other=other)
        return dataclasses.replace(plan, method=method, budget=limit)

    def apply(self, model: Model) -> Model:
        """Set the policies in `model`, which is converted if it has no fused layer; returns it.

        Also set in which pass a fused loss computes its gradients, if the plan chose that.

        Raises: ValueError if it lacks layers that the plan is for, or its fused loss, or a layer
            rejects its policy; then no policy changes.
        """
        if not fused_layers(model):
            convert(model)
        layers = fused_layers(model)
        missing = [name for name in self.policies if name not in layers]
        if missing:
            raise ValueError(
                f"the plan is for layers that {type(model).__name__} does not have: "
                f"{', '.join(map(repr, missing))}; fused layers: {', '.join(map(repr, layers))}"
            )
        heads = [m for m in model.modules() if isinstance(m, HuggingFaceHead)]
        if self.other is not None and not heads:
            raise ValueError(
                f"the plan is for a fused loss, and that of {type(model).__name__} is not: "
                "convert(model, loss=True) first"
            )
        before = {name: layers[name].policy for name in self.policies}
        try:
            for name, policy in self.policies.items():
                layers[name].policy = policy
        except ValueError:
            for name, old in before.items():
                layers[name].policy = old
            raise
        for head in heads if self.other is not None else ():
            head.loss_grad_in_forward = self.chain.grad_in_forward
        return model

    def table(self) -> str:
        """Return the plan as text; consecutive equal layers share one row."""
        rows = [["", "policy", "kept", "rebuild"]]
        without_name = functools.partial(dataclasses.replace, name="")
        for layer, equal in itertools.groupby(self.layers, key=without_name):
            name = f"{run_name([one.name for one in equal])} {layer.kind}"
            time = milliseconds(layer.rebuild_seconds, 2)
            rows.append([name, layer.label, human(layer.kept_bytes), time])
        within = "any" if self.budget is None else human(self.budget)
        parts = ", ".join(f"{name} {human(n)}" for name, n in self.parts.items())
        lines = [
            f"{self.model} on {self.device}: {self.method}, costs {self.costs}, budget {within}",
            *aligned(rows),
            f"kept: {human(self.kept_bytes)} in the entire model",
            f"peak: {human(self.peak_bytes)} ({parts})",
            f"step: {milliseconds(self.seconds)} (every layer keeping its input alone: "
            f"{milliseconds(self.chain.seconds)})",
        ]
        if self.other is not None:
            where = "forward" if self.chain.grad_in_forward else "backward"
            lines.append(f"loss: its gradients are computed in {where}")
        lines += reason_lines([(r.name, r.label, r.reason) for r in self.layers])
        return "\n".join([*lines, *filter(None, [self.advice])])

    __str__ = table

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the plan as JSON, written to `path` if there is one; `from_json` reads it."""
        return files.to_json(self, path)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Return the plan that `to_json` wrote.

        Raises: ValueError if the text is not a plan of this version.
        """
        return files.from_json(cls, text)

    def plot(self, path: str | Path) -> None:
        """Draw memory over the step, and this plan on the frontier, to `path` (.png, .svg, .pdf).

        No window opens, and matplotlib's settings stay as they are.

        Raises: ImportError without matplotlib (`pip install "fused-remat[bench]"`).
        """
        from fused_remat.report.plot import plot_plan

        title = f"{self.model} on {self.device}: {self.method}, costs {self.costs}"
        columns = [(event.what, parts_at(self.chain, event)) for event in self.timeline()]
        frontier = [(point.peak_bytes, point.seconds) for point in self.frontier]
        chosen = self.peak_bytes, self.seconds
        plot_plan(title, columns, frontier, chosen, self.budget, path)


def _layers(chain: Chain, choice: Choice) -> Iterator[LayerPlan]:
    kept = chains.kept(chain, choice)
    firsts = {i: first for first, last in choice.segments for i in range(first, last)}
    ends = {last - 1 for _, last in choice.segments}
    layers: dict[str, LayerPlan] = {}
    for i, call in enumerate(chain.calls):
        option = call.base if i in ends else call.options[choice.options[i]]
        segment = None if i not in firsts else "first" if firsts[i] == i else "inner"
        replay = call.forward_seconds if i in firsts and i not in ends else 0.0
        seconds = option.seconds - min(o.seconds for o in call.options) + replay
        nbytes, policy = kept[i], Policy(option.save, segment=segment, offload=option.offload)
        if call.layer in layers:
            nbytes += layers[call.layer].kept_bytes
            seconds += layers[call.layer].rebuild_seconds
        label = _label(option, segment)
        layers[call.layer] = LayerPlan(
            call.layer, call.kind, policy, label, nbytes, seconds, call.reason
        )
    yield from layers.values()


def _label(option: Option, segment: str | None) -> str:
    """Return a preset's name, or the names kept."""
    shown = option.preset or ", ".join(option.save)
    if option.offload:
        shown = f"{shown}, offload {', '.join(option.offload)}"
    return shown if segment is None else f"{shown} ({segment} of segment)"
