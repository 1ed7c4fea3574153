"""The state of tracing: recorded values, and the steps of a block that are built from them."""

from __future__ import annotations

import itertools
import re
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fused_remat.layers.eligibility import parameters_of
from fused_remat.spec import PackedSpec
from fused_remat.steps.node import Node
from fused_remat.tracing.program import (
    Context,
    Layout,
    Program,
    ReplayedSubmodule,
    layout_of,
    layout_of_heads,
)
from fused_remat.tracing.samples import Arguments
from fused_remat.tracing.sizes import JOINT, LENGTHS, Size, is_joint
from fused_remat.tracing.values import (
    MATMUL,
    STREAM,
    Op,
    Recording,
    Ref,
    Untraceable,
    ops_for,
    refs,
)

#: A function that adds a step and returns its name.
Build = Callable[[], str]
#: Names that mean something else in a block.
_RESERVED = ("input", "memory", "output", "seed")
#: Names of the streams of a block's inputs in those of its steps, where both attend together.
STREAMS = {"input": "image", "memory": "text"}
#: First site of the dropouts of a traced block.
_SITE = (1 << 12) + 1
CASTS = ("to", "float", "type_as", "type", "contiguous", "double", "clone")


@dataclass(eq=False)
class Builder:
    """The values of one recording of a call of `layer`, and the steps that they became so far."""

    recording: Recording
    layer: nn.Module
    call: Arguments
    drops: bool = True  # whether dropout acts
    mixes_dtypes: bool = True  # whether adapters compute in dtypes of their own; not in a proof
    formats: Mapping[str, PackedSpec] = field(default_factory=dict)  # of weights; none in a proof
    nodes: dict[str, Node] = field(default_factory=dict)
    programs: dict[str, Program] = field(default_factory=dict)  # the functions of replays
    built: dict[int, str] = field(default_factory=dict)  # activations by the number of the value
    widths: dict[str, int] = field(default_factory=dict)  # of activations
    values: dict[str, int] = field(default_factory=dict)  # as in `TracedBlock`, as the next three
    transposed: set[str] = field(default_factory=set)
    replayed: dict[str, ReplayedSubmodule] = field(default_factory=dict)
    fills: dict[int, float] = field(default_factory=dict)
    value_names: dict[int, str] = field(default_factory=dict)  # of no tensor of the layer
    sites: Iterator[int] = field(default_factory=lambda: itertools.count(_SITE))

    def __post_init__(self) -> None:
        ops, inputs, call = self.recording.ops, self.recording.inputs, self.call
        #: The dimensions that count tokens, from the last, of what attention reads or computes.
        self.heads = _heads(self.recording)
        self.uses = [n for op in ops for n in op.reads]
        indices = {"input": call.x, "memory": call.memory}
        self.inputs: dict[str, Any] = {k: inputs[i] for k, i in indices.items() if i is not None}
        #: Bounds of sequences of variable length; the recording has one sequence.
        self.bounds = None if call.bounds is None else inputs[call.bounds]
        self.tokens = self.recording.sizes.get("S", call.tokens)  # of a sequence
        recording, device = self.recording, call.leaves[call.x].device
        modules = self.layer.get_submodule
        #: The router logits that the call returns, too, by the paths of the routers.
        self.records = {path: self._recorded(path, i) for path, i in call.records}
        self.context = Context(modules, recording.sizes, recording.exact, device)

    def _recorded(self, path: str, index: int) -> int:
        """Return the value that a submodule returns as one of its results."""
        outs = self.recording.outs.get(path, [])
        number = outs[index] if index < len(outs) else None
        if number is None or self.layout(number) is None or number not in self.recording.live:
            raise Untraceable(
                f"the call requests a result of {path}, which a block does not compute"
            )
        return number

    @abstractmethod
    def step(self, number: int) -> Build | None:
        """Return a function that adds the step of a value, or None if it belongs to a replay."""

    @abstractmethod
    def build(self, number: int) -> str:
        """Add the steps that compute a value, and return the name of that activation."""

    # Values.

    def layout(self, number: int) -> Layout | None:
        """Return the layout of an activation, or None if it lacks the call's tokens."""
        shape, sizes = self.recording.shapes[number], self.recording.sizes
        if shape and number in self.heads and "S" not in sizes and "B" in sizes:
            heads = layout_of_heads(shape, self.heads[number], self.tokens)
            if heads is not None:
                return heads
        batch = ["B"] if "B" in sizes else []
        names = [name for name in ("S", "M") if name in sizes]
        choices = [[*batch, name] for name in (*names, *[JOINT] * (len(names) == 2))]
        choices += [batch] * ("S" not in sizes)
        layouts = (layout_of(shape, names, self.tokens) for names in choices)
        return next(filter(None, layouts), None)

    def tokens_of(self, layout: Layout) -> tuple[str, ...]:
        """Return the inputs of the block of whose tokens an activation is made."""
        names = {"M": ("memory",), JOINT: ("input", "memory")}
        return names.get((layout.names or ("",))[-1], ("input",))

    def counts(self, size: Any, names: Sequence[str]) -> bool:
        """Return whether a size is the number of tokens of a sequence, by the `names` of both."""
        if not names or names[-1] not in LENGTHS:
            return bool(size == self.tokens)
        return is_joint(size) if names[-1] == JOINT else size == Size(1, (names[-1],))

    def live(self, value: Any) -> bool:
        return isinstance(value, Ref) and value.index in self.recording.live

    def producer(self, number: int) -> Op | None:
        return self.recording.producers.get(number)

    def roots(self, number: int) -> set[int]:
        """Return the values without a producer that a value is computed from."""
        return ops_for([number], self.recording.producers)[1]

    def fix(self, *numbers: int) -> None:
        """Note that the trace depends on the values of buffers and attributes behind these."""
        sources, params = self.recording.sources, {*parameters_of(self.layer)}
        names = {sources[n] for number in numbers for n in self.roots(number) if n in sources}
        self.recording.fixed |= names - params

    def new_value(
        self,
        name: str,
        run: Callable[..., Tensor],
        args: Any,
        like: int,
        result: Tensor | None = None,
        lead: Sequence[Any] = (),
        **kwargs: Any,
    ) -> int:
        """Add an operation before the block; its value is like another, or `result`.

        `lead`: the first sizes of `result`, which follow from those of a call.
        """
        recording, number = self.recording, len(self.recording.values)
        value, shape = recording.values[like], recording.shapes[like]
        if result is not None:
            value, shape = result, (*lead, *result.shape[len(lead) :])
        recording.values.append(value)
        recording.shapes.append(shape)
        recording.dtypes.append(recording.dtypes[like])
        recording.ops.append(Op(name, run, tuple(args), kwargs, [number], ""))
        recording.producers[number] = recording.ops[-1]
        return number

    def param(self, number: int, transposed: bool = False) -> str:
        """Return the block's name of a value that is no activation."""
        own = self.recording.sources.get(number)
        name = own or self.value_names.setdefault(number, self._name_of(number))
        if transposed:
            name = f"{name}T" if own is None else f"{name}.T"
            self.transposed.add(name)
        self.values[name] = number
        return name

    def _name_of(self, number: int) -> str:
        recording, roots = self.recording, sorted(self.roots(number))
        names = dict(zip(recording.inputs, self.call.names, strict=True))
        arguments = [names[n] for n in roots if n in names and n not in recording.live]
        tensors = [recording.sources[n] for n in roots if n in recording.sources]
        name = re.sub(r"\W", "_", [*arguments, *tensors, "value"][0])
        return self.unique(name, *self.values)

    # Steps.

    def unique(self, name: str, *others: str) -> str:
        """Return `name`, with a number if another step or value has it."""
        taken = {*self.nodes, *self.value_names.values(), *_RESERVED, *others}
        name = name.lstrip(".") or "step"
        numbered = (f"{name}_{i}" for i in itertools.count(2))
        return name if name not in taken else next(n for n in numbered if n not in taken)

    def use_counts(self) -> Counter[str]:
        return Counter(n for node in self.nodes.values() for n in (*node.inputs, *node.masks))

    def add(self, node: Node) -> str:
        self.nodes[node.name] = node
        return node.name

    def remove(self, *names: str) -> None:
        """Remove those of these steps that no step reads."""
        for name in dict.fromkeys(names):
            if not any(name in node.inputs for node in self.nodes.values()):
                self.nodes.pop(name, None)
                self.programs.pop(name, None)
                self.replayed.pop(name, None)
                self.built = {n: built for n, built in self.built.items() if built != name}

    def is_of_stream(self, number: int) -> bool:
        """Return whether a value has the stream's dtype, the only one in which steps compute."""
        return self.recording.dtypes[number] is STREAM

    def source(self, number: int) -> int:
        """Return the value that `number` is, behind casts and dropout that is off."""
        op = self.producer(number)
        while op is not None and (
            op.name in CASTS or (op.name == "dropout" and not (op.p and self.drops))
        ):
            number = op.args[0].index
            op = self.producer(number)
        return number


def _heads(recording: Recording) -> dict[int, int]:
    """Return the dimension that counts tokens, from the last, of attention's heads by number."""
    heads, probs, live = dict[int, int](), set[int](), recording.live
    for op in recording.ops:
        if op.name == "scaled_dot_product_attention":
            heads |= dict.fromkeys((*refs(op.args[:3]), *op.writes), -2)
        elif op.kind in MATMUL and len(op.reads) == 2 and live.issuperset(op.reads):
            a, b = op.reads
            heads |= {b: -2, op.writes[0]: -2} if a in probs else {a: -2, b: -1}
        elif op.name == "softmax" or not probs.isdisjoint(op.reads):
            probs.update(op.writes)
    return heads
