"""Convert the layers of a model in place, convert them back, and report what they ran as."""

from __future__ import annotations

import fnmatch
import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

from torch import nn

from fused_remat.execution.choose import check_name
from fused_remat.huggingface.call import check_convertible
from fused_remat.huggingface.head import (
    HuggingFaceHead,
    head_class,
    language_models,
    warn_if_bypassed,
)
from fused_remat.huggingface.rows import architecture_of, fused_class
from fused_remat.layers import FusedLayer, FusedRematDecoderLayer, FusedRematLayer
from fused_remat.layers.converted import ConvertedLayer, Replaced, around_layers
from fused_remat.layers.eligibility import Unsupported, qualified
from fused_remat.layers.record import NOTES, STATES, Ran, State, record_of
from fused_remat.policies import Policy
from fused_remat.report.units import run_name
from fused_remat.steps.operations import warn
from fused_remat.tracing.call import Trace
from fused_remat.tracing.discovery import first_batch_norm, repeated_layers
from fused_remat.tracing.layer import ROWS, TracedLayer, converted_class
from fused_remat.tracing.program import ReplayedSubmodule

Model = TypeVar("Model", bound=nn.Module)

#: Layer classes of torch.nn and the fused ones; those of transformers are in `huggingface.rows`.
LAYERS: dict[type[nn.Module], type[FusedLayer]] = {
    nn.TransformerEncoderLayer: FusedRematLayer,
    nn.TransformerDecoderLayer: FusedRematDecoderLayer,
}
_FUSED = frozenset(LAYERS.values())


def convert(
    model: Model,
    policy: str | Policy = "full",
    every: int = 1,
    backend: str = "auto",
    accumulate_into: str | None = None,
    loss: bool | Literal["grad_in_forward"] = False,
) -> Model:
    """Convert every eligible layer of `model` to a fused layer, in place, and return `model`.

    The layer objects stay the same (only their class changes), and with them parameters,
    optimizer state, train/eval mode, hooks and references held elsewhere. Eligible are
    `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, as in `nn.Transformer`, the
    classes of transformers in docs/huggingface.md, and any other layer in a list of modules (or
    `model` itself) that has a norm and two matrices. Those others are traced in their first
    training call: their operations are recorded on small tensors and joined to a block, which is
    compared with the layer in float64 before it runs. A layer that cannot be traced runs its own
    forward, with a `FusedRematWarning`; `conversion(model)` reports what each layer ran as.

    Args:
        model: changed in place.
        policy, backend, accumulate_into: of every layer, as in `FusedRematLayer`.
        every: convert every k-th eligible layer, starting with the first.
        loss: a language model of transformers computes its loss by `ops.linear_cross_entropy`,
            without the full logits, in training calls with labels; the `logits` of the output are
            then None, with one warning. "grad_in_forward": its gradients are computed with it, as
            the option of `ops.linear_cross_entropy` describes.

    Raises: ValueError if there is no eligible layer (the message lists the layers of `model`, and
        what is supported), or with `loss` no such model; for an unknown policy, backend or
        accumulate_into, or if `every` is not a positive int; TypeError for another `loss`.

    >>> import torch
    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> model = convert(nn.TransformerEncoder(layer, num_layers=3), policy="lean")
    >>> [type(m).__name__ for m in model.layers]
    ['FusedRematLayer', 'FusedRematLayer', 'FusedRematLayer']
    """
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise ValueError(f"every must be a positive int, got {every!r}")
    check_loss(loss)
    check_name(backend)
    layers = _eligible_layers(model)
    heads = _heads(model) if loss else {}
    if not (layers or heads):
        raise ValueError(_no_layers_message(model))
    paths, warned = {module: path for path, module in model.named_modules()}, set[str]()
    converted: list[FusedLayer] = []
    try:
        for module in filter(_check_unpatched, layers[::every]):
            own = vars(module).pop("forward", None)
            module.__class__ = LAYERS.get(type(module)) or converted_class(module)
            assert isinstance(module, FusedLayer)
            converted.append(module)
            is_own = getattr(own, "__self__", None) is module
            if own is not None and not (is_own and own.__func__ is module.stock.forward):
                vars(module)["_replaced_forward"] = own
            module._set_options(policy, backend, accumulate_into)
            record = record_of(module)
            record.path, record.warned = paths[module], warned
            if isinstance(module, ConvertedLayer):
                module._warn_of_options()
    except Exception:
        for module in converted:
            _revert_one(module)
        raise
    for head, path in heads.items():
        head.__class__ = head_class(type(head))
        own = {"loss_backend": backend, "loss_grad_in_forward": loss == "grad_in_forward"}
        head.__dict__.update(own, loss_head=path)
        record_of(head).path = paths[head]
    _watch(model)
    around_layers(model, True)
    return model


def revert(model: Model) -> Model:
    """Undo `convert` in place: give every fused layer its stock class back, and return `model`.

    Layers of a subclass of a fused class stay unchanged.

    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4), 2))
    >>> type(revert(model).layers[0]).__name__
    'TransformerEncoderLayer'
    """
    for module in list(model.modules()):
        if _stock_of(module) is not None:
            _revert_one(module)
    around_layers(model, len(fused_layers(model)) > 0)
    return model


def set_policy(model: Model, pattern: str, policy: str | Policy) -> Model:
    """Set the policy of the fused layers whose qualified name matches `pattern`, a shell pattern.

    Raises: ValueError if no fused layer matches (the message lists their names), or for an
        unknown policy.

    >>> model = convert(nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4), 2))
    >>> _ = set_policy(model, "layers.0", "fast")
    >>> [layer.policy for layer in model.layers]
    ['fast', 'full']
    """
    layers = fused_layers(model)
    matching = [layer for name, layer in layers.items() if fnmatch.fnmatchcase(name, pattern)]
    if not matching:
        names = ", ".join(map(repr, layers)) or "none"
        raise ValueError(f"no fused layer matches {pattern!r}; fused layers: {names}")
    for layer in matching:
        layer.policy = policy
    return model


def fused_layers(model: nn.Module) -> dict[str, FusedLayer]:
    """Return the fused layers of `model` by qualified name."""
    return {name: m for name, m in model.named_modules() if isinstance(m, FusedLayer)}


def check_loss(loss: object) -> None:
    """Raise TypeError unless `loss` is a value of `convert`'s argument."""
    if not isinstance(loss, bool) and loss != "grad_in_forward":
        raise TypeError(f"loss must be True, False or 'grad_in_forward', got {loss!r}")


def _eligible_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that `convert` can convert, in the order of the model."""
    stock = [module for module in model.modules() if not isinstance(module, FusedLayer)]
    known = [m for m in stock if type(m) in LAYERS or architecture_of(type(m)) is not None]
    within = {part for module in known for part in module.modules()}
    eligible = {*known, *(layer for layer in repeated_layers(model) if layer not in within)}
    return [module for module in model.modules() if module in eligible]


def _heads(model: nn.Module) -> dict[nn.Module, str]:
    """Return the unconverted language models in `model`, with the paths of their heads."""
    heads = language_models(model)
    if not heads:
        raise ValueError(
            f"loss=True: {type(model).__name__} contains no model of transformers that takes "
            "labels and has a head (get_output_embeddings()); for other models use "
            "ops.linear_cross_entropy"
        )
    return {head: path for head, path in heads.items() if not isinstance(head, HuggingFaceHead)}


def _watch(model: nn.Module) -> None:
    """Let the last fused layer of each converted language model check that it calls the layer.

    A step may call an encoder, whose layers come first, by itself.
    """
    for head in language_models(model):
        layers = [*fused_layers(head).values()]
        if isinstance(head, HuggingFaceHead) and layers:
            record_of(layers[-1]).watch = functools.partial(warn_if_bypassed, head)


def _no_layers_message(model: nn.Module) -> str:
    name, count = f"{type(model).__name__} has no layer to convert", len(fused_layers(model))
    blocking = None if count else first_batch_norm(model)
    if blocking is not None:
        path, norm = blocking
        return (
            f"{name}: {path} is {qualified(type(norm))}, whose running statistics recomputation "
            "would update twice in a step; use a norm without running statistics, such as "
            "nn.LayerNorm or nn.GroupNorm"
        )
    already = (
        f"; {count} are fused already: change them with set_policy, or revert(model) first"
        if count
        else ""
    )
    kinds = [type(m) for m in model.modules() if m is not model and not already]
    counts = Counter(k.__name__ for k in kinds if not k.__module__.startswith("torch.nn."))
    listed = ", ".join(f"{n} x {name}" for name, n in counts.most_common(8))
    return (
        f"{name}{already}{listed and f'; it has {listed}'}; a layer is torch.nn's or transformers',"
        " or an element of a ModuleList or Sequential that has a norm and two matrices"
    )


def _check_unpatched(layer: nn.Module) -> bool:
    """Return whether a layer has no attribute that a fused layer would hide; warn if it has."""
    own, name = {**vars(layer), **layer._modules, **layer._parameters}, type(layer).__name__
    hidden = ("policy", "backend", "accumulate_into", "last_trace")
    patched = [n for n in hidden if n in own]
    if patched:
        warn(f"convert did not convert a layer of class {name}: {name}.{patched[0]} was replaced")
    return not patched


def _row_class(layer: nn.Module) -> type[ConvertedLayer] | None:
    """Return the fused class of a layer of transformers whose entry applies; None for others."""
    row = architecture_of(type(layer))
    if row is None:
        return None
    try:
        check_convertible(layer, row)
    except Unsupported:
        return None
    return fused_class(type(layer))


ROWS.append(_row_class)


def _stock_of(layer: nn.Module) -> type[nn.Module] | None:
    """Return the class that `convert` replaced; None for a layer that it did not convert."""
    kind = type(layer)
    return vars(kind).get("stock") if issubclass(kind, Replaced) or kind in _FUSED else None


def _revert_one(layer: nn.Module) -> None:
    layer.__class__ = _stock_of(layer)  # type: ignore[assignment]
    own = ("_policy", "_backend", "_accumulate_into")
    for name in (*own, "loss_head", "loss_backend", "loss_grad_in_forward", *NOTES):
        layer.__dict__.pop(name, None)
    if "_replaced_forward" in vars(layer):
        layer.forward = vars(layer).pop("_replaced_forward")


HeadState = Literal["fused", "bypassed", "not called", "not requested"]
_RAN = {"block": "fused", "checkpoint": "checkpointed", "plain": "plain"}


class Calls(NamedTuple):
    """The number of training calls that ran as a block, under checkpointing, or plainly."""

    ran: Ran
    reason: str
    number: int


@dataclass(frozen=True)
class LayerKind:
    """Layers of one class whose last training calls ran in the same way.

    Attributes:
        name, count: name of the class, and number of layers.
        state: what the last training call ran as: "converted" (a block), "checkpointed", or "plain"
            (the layer's own forward, which keeps all its activations). "not called": no training
            call yet. "stock": `convert` did not convert the layers.
        pieces: submodules that are replayed in backward, and why they are no steps of a block.
        reason: why the last training call did not run as a block.
        layers: qualified names of the layers.
        calls: numbers of training calls, by what they ran as and why.
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
            count = len(self.pieces)
            parts = f"{count} replayed submodule{'s' * (count != 1)}"
            layers += f" with {parts}, which backward runs again: {named}"
        elif self.state != "converted":
            layers += f" ({run_name(self.layers)})"
        return f"{self.state} {layers}: {_listed(self.calls)}"


@dataclass(frozen=True)
class LossHead:
    """A language model whose loss can be computed without logits.

    Attributes:
        name: name of its class.
        state: how the last training step computed the loss: "fused" (without logits), or
            "bypassed" (from logits, or by the trainer). "not called": no training call yet. "not
            requested": `convert` was called without loss=True.
        reason: why the loss was bypassed.
        calls: numbers of training calls that computed the fused loss ("block"), and logits
            ("plain").
    """

    name: str
    state: HeadState
    reason: str = ""
    calls: tuple[Calls, ...] = ()

    def __str__(self) -> str:
        if self.state == "not requested":
            why = "not converted; convert(model, loss=True) computes it in blocks of logits"
        elif self.state == "not called":
            why = "not computed in training yet"
        elif self.state == "fused":
            fused = [call for call in self.calls if call.ran == "block"]
            why = f"computed without logits in {_number(fused)}"
        else:
            why = f"bypassed, although loss=True: {self.reason}"
        return f"loss of {self.name}: {why}"


class Conversion(list[LayerKind]):
    """The kinds of layers of a model; prints as text.

    Attributes:
        losses: state of each loss that can be computed without logits.
        advice: on the policy, for the last training calls; or "".
    """

    def __init__(
        self, kinds: Iterable[LayerKind], losses: Iterable[LossHead], advice: str = ""
    ) -> None:
        super().__init__(kinds)
        self.losses, self.advice = tuple(losses), advice

    def __str__(self) -> str:
        return "\n".join(filter(None, map(str, (*self, *self.losses, self.advice))))

    __repr__ = __str__


def conversion(model: nn.Module) -> Conversion:
    """Return what the training calls of the layers of `model`, and of its loss, ran as.

    Training calls are counted as they run, except for those of `explain`, `memory_report` and
    `plan`, and those of a compiled model.

    >>> import torch
    >>> stack = [nn.TransformerEncoderLayer(32, 4, batch_first=True) for _ in range(4)]
    >>> model = convert(nn.Sequential(*stack), every=2)
    >>> model(torch.randn(2, 8, 32)).sum().backward()
    >>> conversion(model)
    converted 2 × FusedRematLayer: 2 fused training calls
    2 × TransformerEncoderLayer: not converted
    """
    groups: dict[tuple[str, State, tuple[ReplayedSubmodule, ...], str], dict[str, FusedLayer]] = {}
    for path, layer in fused_layers(model).items():
        groups.setdefault(_key(layer), {})[path or type(layer).__name__] = layer
    stock = {*repeated_layers(model), *(m for m in model.modules() if type(m) in LAYERS)}
    others = Counter(
        type(m).__name__ for m in model.modules() if m in stock and not isinstance(m, FusedLayer)
    )
    kinds = [
        LayerKind(name, len(group), state, pieces, reason, tuple(group), _calls_of(group.values()))
        for (name, state, pieces, reason), group in groups.items()
    ]
    kinds += [LayerKind(name, count, "stock") for name, count in others.items()]
    advice = max((record_of(layer).advice for layer in fused_layers(model).values()), default="")
    return Conversion(kinds, _losses(model), advice)


def _key(layer: FusedLayer) -> tuple[str, State, tuple[ReplayedSubmodule, ...], str]:
    """Return the name, state, replayed submodules and reason of a layer."""
    record = record_of(layer)
    pieces: tuple[ReplayedSubmodule, ...] = ()
    stock = layer.stock if isinstance(layer, ConvertedLayer) else type(layer)
    if record.last == "block" and isinstance(layer, TracedLayer):
        last = layer.last_trace
        pieces = last.block.replayed if isinstance(last, Trace) else ()
    return stock.__name__, STATES[record.last], pieces, record.reason


def _losses(model: nn.Module) -> Iterator[LossHead]:
    """Yield the states of the language models in `model`."""
    for module in language_models(model):
        name, reason = type(module).__name__, ""
        if not isinstance(module, HuggingFaceHead):
            yield LossHead(name, "not requested")
            continue
        record = record_of(module)
        state: HeadState = "not called"
        layers = map(record_of, fused_layers(module).values())
        latest = max(layers, key=lambda layer: layer.order, default=record)
        if latest.order > record.order or (record.last is None and latest.last is not None):
            state = "bypassed"
            reason = f"the last training step called layers of {name} without it"
        elif record.last is not None:
            state, reason = "fused" if record.last == "block" else "bypassed", record.reason
        yield LossHead(name, state, reason, _calls_of([module]))


def _calls_of(layers: Iterable[nn.Module]) -> tuple[Calls, ...]:
    counts = Counter[tuple[Ran, str]]()
    for layer in layers:
        counts.update(record_of(layer).calls)
    return tuple([Calls(*key, count) for key, count in counts.items()])


def _listed(calls: Sequence[Calls]) -> str:
    """Return the numbers of training calls, with reasons, as text."""
    shown: list[str] = []
    for ran, text in _RAN.items():
        of_kind = [call for call in calls if call.ran == ran]
        if of_kind:
            reasons = "; ".join(call.reason for call in of_kind if call.reason)
            total = sum(call.number for call in of_kind)
            number = f"{total} {text}" if shown else _number(of_kind, f"{text} ")
            shown.append(f"{number} ({reasons})" if reasons else number)
    return ", ".join(shown)


def _number(calls: Sequence[Calls], what: str = "") -> str:
    number = sum(call.number for call in calls)
    return f"{number} {what}training call{'s' * (number != 1)}"
