"""What the layers of a converted model ran as, and whether its loss was computed without logits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torch import nn

from fused_remat.huggingface.head import HuggingFaceHead, head_class
from fused_remat.layers.converted import ConvertedLayer
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.layers.record import STATES, Ran, State, record_of
from fused_remat.report.units import run_name
from fused_remat.tracing.block import ReplayedSubmodule
from fused_remat.tracing.call import Trace
from fused_remat.tracing.discovery import repeated_layers
from fused_remat.tracing.layer import TracedLayer

HeadState = Literal["fused", "bypassed", "not called", "not requested"]
_RAN = {"block": "fused", "checkpoint": "checkpointed", "plain": "plain"}


class Calls(NamedTuple):
    """How many training calls ran as a block, under checkpointing, or plainly, and why."""

    ran: Ran
    reason: str
    number: int


@dataclass(frozen=True)
class LayerKind:
    """Layers of one class whose last training calls ran in the same way.

    Attributes:
        name, count: of the class, and how many layers of it there are.
        state: what the last training call ran as: "converted" (a block), "checkpointed", or "plain"
            (the layer's own forward, which keeps all its activations). "not called": no training
            call yet. "stock": `convert` did not take the layers.
        pieces: submodules that are replayed in backward, and why they are no steps of a block.
        reason: why the last training call was not a block's.
        layers: qualified names of the layers.
        calls: the numbers of training calls, by what they ran as and why.
    """

    name: str
    count: int
    state: State
    pieces: tuple[ReplayedSubmodule, ...] = ()
    reason: str = ""
    layers: tuple[str, ...] = ()
    calls: tuple[Calls, ...] = ()

    def __str__(self) -> str:
        layers = f"{self.count} × {self.name}"
        if self.state == "stock":
            return f"{layers}: not converted"
        if self.state == "not called":
            return f"{layers}: not called in training yet"
        if self.pieces:
            named = "; ".join(f"{name} ({why})" for name, why in self.pieces)
            many = "submodule" if len(self.pieces) == 1 else "submodules"
            layers += (
                f" with {len(self.pieces)} replayed {many}, which backward runs again: {named}"
            )
        elif self.state != "converted":
            layers += f" ({run_name(self.layers)})"
        return f"{self.state} {layers}: {_listed(self.calls)}"


@dataclass(frozen=True)
class LossHead:
    """A language model whose loss can be computed without logits.

    Attributes:
        name: of its class.
        state: what the last training step computed the loss by: "fused" (without logits), or
            "bypassed" (from logits). "not called": no training call yet. "not requested":
            `convert` was called without loss=True.
        reason: why the loss was computed from logits.
        calls: the numbers of training calls that computed the fused loss ("block"), and logits
            ("plain").
    """

    name: str
    state: HeadState
    reason: str = ""
    calls: tuple[Calls, ...] = ()

    def __str__(self) -> str:
        if self.state == "not requested":
            why = "computed from logits, since convert was called without loss=True"
        elif self.state == "not called":
            why = "not computed in training yet"
        elif self.state == "fused":
            fused = [call for call in self.calls if call.ran == "block"]
            why = f"computed without logits in {_number(fused)}"
        else:
            why = f"computed from logits, although loss=True: {self.reason}"
        return f"loss of {self.name}: {why}"


class Conversion(list[LayerKind]):
    """All kinds of layers of a model; prints as text.

    Attributes:
        losses: the state of each loss that can be computed without logits.
    """

    def __init__(self, kinds: Iterable[LayerKind], losses: Iterable[LossHead]) -> None:
        super().__init__(kinds)
        self.losses = tuple(losses)

    def __str__(self) -> str:
        return "\n".join(map(str, (*self, *self.losses)))

    __repr__ = __str__


def conversion(model: nn.Module) -> Conversion:
    """Return what the training calls of the layers of `model`, and of its loss, ran as.

    Calls in training are counted as they run, not those of `explain`, `memory_report` and `plan`,
    and not those of a compiled model.

    >>> import torch
    >>> from fused_remat import convert
    >>> stack = [nn.TransformerEncoderLayer(32, 4, batch_first=True) for _ in range(4)]
    >>> model = convert(nn.Sequential(*stack), every=2)
    >>> model(torch.randn(2, 8, 32)).sum().backward()
    >>> conversion(model)
    converted 2 × FusedRematLayer: 2 fused training calls
    2 × TransformerEncoderLayer: not converted
    """
    groups: dict[tuple[str, State, tuple[ReplayedSubmodule, ...], str], dict[str, FusedLayer]] = {}
    stock = {*repeated_layers(model)}
    others = Counter[str]()
    for path, module in model.named_modules():
        if isinstance(module, FusedLayer):
            groups.setdefault(_key(module), {})[path or type(module).__name__] = module
        elif module in stock or type(module) in (
            nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
        ):  # fmt: skip
            others[type(module).__name__] += 1
    kinds = [
        LayerKind(name, len(found), state, pieces, reason, tuple(found), _calls_of(found.values()))
        for (name, state, pieces, reason), found in groups.items()
    ]
    kinds += [LayerKind(name, count, "stock") for name, count in others.items()]
    return Conversion(kinds, _losses(model))


def _key(layer: FusedLayer) -> tuple[str, State, tuple[ReplayedSubmodule, ...], str]:
    record = record_of(layer)
    pieces: tuple[ReplayedSubmodule, ...] = ()
    stock = layer.stock if isinstance(layer, ConvertedLayer) else type(layer)
    if record.last == "block" and isinstance(layer, TracedLayer):
        last = layer.last_trace
        pieces = last.block.replayed if isinstance(last, Trace) else ()
    return stock.__name__, STATES[record.last], pieces, record.reason


def _losses(model: nn.Module) -> list[LossHead]:
    """Return the states of the language models in `model`."""
    found = []
    for module in model.modules():
        name, reason = type(module).__name__, ""
        if not isinstance(module, HuggingFaceHead):
            if head_class(type(module)) is not None:
                found.append(LossHead(name, "not requested"))
            continue
        record = record_of(module)
        state: HeadState = "not called"
        layers = [record_of(m) for m in module.modules() if isinstance(m, FusedLayer)]
        latest = max(layers, key=lambda layer: layer.order, default=record)
        if latest.order > record.order or (record.last is None and latest.last is not None):
            state, body = "bypassed", f"{name}.{module.row.body}"
            reason = f"the last training step called {body} without {name}"
        elif record.last is not None:
            state, reason = "fused" if record.last == "block" else "bypassed", record.reason
        found.append(LossHead(name, state, reason, _calls_of([module])))
    return found


def _calls_of(layers: Iterable[nn.Module]) -> tuple[Calls, ...]:
    found = Counter[tuple[Ran, str]]()
    for layer in layers:
        found.update(record_of(layer).calls)
    return tuple([Calls(*key, count) for key, count in found.items()])


def _listed(calls: Sequence[Calls]) -> str:
    """Return the numbers of training calls, with reasons, as text.

    >>> _listed([Calls("block", "", 4), Calls("plain", "a cache", 1), Calls("plain", "a hook", 2)])
    '4 fused training calls, 3 plain (a cache; a hook)'
    """
    found: list[str] = []
    for ran, text in _RAN.items():
        mine = [call for call in calls if call.ran == ran]
        if mine:
            reasons = "; ".join(call.reason for call in mine if call.reason)
            number = f"{sum(call.number for call in mine)} {text}" if found else _number(mine, text)
            found.append(f"{number} ({reasons})" if reasons else number)
    return ", ".join(found)


def _number(calls: Sequence[Calls], what: str = "") -> str:
    number = sum(call.number for call in calls)
    return f"{number} {what} training call{'s' * (number != 1)}".replace("  ", " ")
