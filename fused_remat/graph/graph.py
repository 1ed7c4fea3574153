"""A block as data: named activations, the steps that compute them, and what they are made of."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fused_remat.steps.linear import Linear
from fused_remat.steps.node import Node, Shapes
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import Replay
from fused_remat.steps.streams import Take


@dataclass(frozen=True, eq=False)
class Graph:
    """A block: its nodes in order of computation. Compared by identity, so build it once."""

    kind: str  # the block's name in `policies.EXACT_PRESETS`
    nodes: tuple[Node, ...]  # the last defines "output"
    params: tuple[str, ...]  # names of the other tensors, in the order in which they are passed
    inputs: tuple[str, ...] = ("input",)  # others may be of another length (`source`)
    text: str = ""  # the call of a `@block` that built it (`graph.text`)
    compute: torch.dtype | None = None  # of what is not in the stream; None for the input's
    side_outputs: tuple[str, ...] = ()  # names of activations that a call returns, too

    def __post_init__(self) -> None:
        if lost := {*self.side_outputs} - {node.name for node in self.nodes[:-1]}:
            raise ValueError(
                f"side output {min(lost)!r} of {self.kind!r} is no activation before the output; "
                f"choose from {', '.join(node.name for node in self.nodes[:-1])}"
            )

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything that is computed: graphs that differ have different digests."""
        what = (self.kind, self.nodes, self.params, self.inputs, self.compute, self.side_outputs)
        return hashlib.sha256(repr(what).encode()).hexdigest()[:16]

    @functools.cached_property
    def packed(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of quantized weights by name, whose tensors have others."""
        nodes = [node for node in self.nodes if isinstance(node, Linear) and node.packed]
        pairs = [pair for n in nodes for pair in zip(n.weights, n.packed, strict=True)]
        return {name: spec.shape for name, spec in pairs if spec is not None}

    @functools.cached_property
    def unsure(self) -> frozenset[str]:
        """Names of the tensors that may have no gradient: what chooses by values has them."""
        return frozenset(name for node in self.nodes for name in node.unsure)

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """Names of all tensors that a call passes, in order."""
        return self.inputs + self.params

    @functools.cached_property
    def producer(self) -> dict[str, Node]:
        return {name: node for node in self.nodes for name in (node.name, *node.stats)}

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """The activations that a policy may keep; the output, if its own backward reads it."""
        *inner, last = self.nodes
        names = tuple(node.name for node in inner if node.keepable)
        return names + ((last.name,) if last.name in last.needs(last.inputs) else ())

    @functools.cached_property
    def roles(self) -> Mapping[str, tuple[str, ...]]:
        """The names of each role in order, for presets; "last normed" is the last of "normed"."""
        roles: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            if node.role:
                roles[node.role] = (*roles.get(node.role, ()), node.name)
        roles["last normed"] = roles.get("normed", ())[-1:]
        return roles

    @functools.cached_property
    def uses_seed(self) -> bool:
        return any("seed" in node.params for node in self.nodes)

    @functools.cached_property
    def stream(self) -> frozenset[str]:
        """The residual stream: inputs, output, sums of a residual, and residuals."""
        sums = {n.name: residual for n in self.nodes if (residual := getattr(n, "residual", ""))}
        norms_read = {n.x for n in self.nodes if isinstance(n, Norm)}
        # A sum within a branch, such as that of experts and a shared expert, is none of it.
        ends = {"output", *self.side_outputs, *sums.values(), *norms_read}
        parts = {n.name: n.x for n in self.nodes if isinstance(n, Take) and n.name in ends}
        ends.update(parts.values())
        sums = {name: residual for name, residual in sums.items() if name in ends}
        stream = {*self.inputs, "output", *parts, *sums, *sums.values()}
        read = {x for n in self.nodes if isinstance(n, Replay) for x in n.xs}
        norms = {n.name for n in self.nodes if isinstance(n, Norm) and n.x in stream}
        return frozenset(stream | (read & norms))

    @functools.cached_property
    def source(self) -> Mapping[str, str]:
        """The input, or inputs, of whose tokens each input, activation and statistic is made."""
        source = {name: name for name in self.inputs}
        for node in self.nodes:
            of = "+".join(sorted(node.tokens)) or source[node.follows]
            source.update(dict.fromkeys((node.name, *node.stats), of))
        return source

    def lengths(self, shapes: Shapes) -> dict[str, int]:
        """Return the tokens of a sequence of every input, activation and statistic."""
        lengths = {name: sizes(shapes[name])[1] for name in self.inputs}
        for node in self.nodes:
            lengths.update(dict.fromkeys(node.makes, node.length(lengths)))
        return lengths

    @functools.cached_property
    def casts(self) -> Mapping[str, torch.dtype]:
        """The dtypes that params are converted to before a pass, where that is not their own."""
        return {name: dtype for node in self.nodes for name, dtype in node.casts.items()}

    def dtypes(self, dtype: torch.dtype) -> dict[str, torch.dtype]:
        """Return the dtypes of inputs, activations and statistics for an input of `dtype`."""
        low, wide = self.compute or dtype, torch.promote_types(dtype, torch.float32)
        dtypes = dict.fromkeys(self.inputs, dtype)
        for node in self.nodes:
            narrow = dtype if node.name in self.stream else low
            dtypes[node.name] = wide if node.widens else narrow
            dtypes.update(dict.fromkeys(node.stats, node.stat_dtype or wide))
        return dtypes

    def widths(self, shapes: Shapes) -> dict[str, int]:
        """Return the elements per token of every activation and statistic, given shapes by name."""
        given = {name: shapes[name] for name in self.inputs}
        widths = {n: s[1] * s[3] if len(s) == 4 else s[-1] for n, s in given.items()}
        for node in self.nodes:
            widths[node.name] = node.width(widths, shapes)
            widths.update(dict.fromkeys(node.stats, node.stat_width(widths[node.name])))
        return widths


def sizes(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return batch and sequence length of an input, (B, S, D) or heads (B, H, S, E)."""
    return shape[0], shape[2 if len(shape) == 4 else 1]
