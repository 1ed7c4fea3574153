"""Graphs of blocks: `block_graph(spec)`, graphs of single operations, and their `BlockBuilder`.

Every activation has a name, and a role if presets (`policies.PRESETS`) refer to it: "attention" for
attention's result, "heads" for what attention reads, "stream" for sums inside the residual stream,
"normed" for what a norm after a branch reads, "hidden" for what the MLP's activation reads; and of
a mixture of experts those of `graph.build_moe`.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

from fused_remat import random
from fused_remat.graph.build_moe import add_moe
from fused_remat.graph.graph import Graph
from fused_remat.graph.text import block, register_dataclass
from fused_remat.moe_spec import MoESpec
from fused_remat.spec import (
    USER_FUNCTION,
    AttentionSpec,
    BlockSpec,
    LoraSpec,
    MLPSpec,
    NormSpec,
    PackedSpec,
    ParallelSpec,
    linear_params,
)
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.attention import Attention
from fused_remat.steps.chunk import Part
from fused_remat.steps.collective import SITES_OF_A_RANK, AllGather, ReduceScatter
from fused_remat.steps.cross_entropy import LinearCrossEntropy
from fused_remat.steps.dora import Dora
from fused_remat.steps.linear import Linear
from fused_remat.steps.low_rank import LowRank
from fused_remat.steps.node import Node
from fused_remat.steps.norm import Norm
from fused_remat.steps.replay import Replay
from fused_remat.steps.residual import Add, DrawMask
from fused_remat.steps.rotary import Rotary


class _End(NamedTuple):
    """The end of a branch: its last linear layer, and the dropout of what it adds."""

    layer: str  # names the layer's weights; "" for a branch that does not end with one
    name: str  # of the layer's result, if that is not added to the stream at once
    mask: str
    site: int


_ATTENTION = _End("proj", "proj", "dropout1", random.RESIDUAL1)
_CROSS = _End("cross_proj", "cross_proj", "dropout_cross", random.CROSS_RESIDUAL)
_MLP = _End("fc2", "down", "dropout2", random.RESIDUAL2)
_MOE = _End("", "", "dropout2", random.RESIDUAL2)


def captured_params(count: int) -> tuple[str, ...]:
    """Return the names of the tensors that a user's activation function captures."""
    return tuple([f"activation.{i}" for i in range(count)])


class BlockBuilder:
    """Builds the graph of a block: each method adds steps, and returns the name of the result.

    Args:
        loras: low-rank updates; each is added with the linear layer that it updates.
        parallel: the ranks among which branches are divided, or None.
        packed: the formats of linear layers with a quantized weight, by name.

    >>> b = BlockBuilder()
    >>> x = b.norm("norm", "input", NormSpec(kind="rms_norm"))
    >>> b.leave("output", b.mlp(MLPSpec(activation="relu"), x), "fc2", residual="input")
    'output'
    >>> b.graph("my_mlp").names
    ('norm', 'up', 'act')
    """

    def __init__(
        self,
        loras: tuple[LoraSpec, ...] = (),
        parallel: ParallelSpec | None = None,
        packed: tuple[tuple[str, PackedSpec], ...] = (),
    ) -> None:
        self.nodes: list[Node] = []
        self.loras, self.parallel, self.packed = loras, parallel, dict(packed)

    def add(self, node: Node) -> str:
        """Add a node. Raises: ValueError if another node has its name."""
        if any(node.name == other.name for other in self.nodes):
            raise ValueError(f"two steps of a block make {node.name!r}: their names must differ")
        self.nodes.append(node)
        return node.name

    def graph(self, kind: str, inputs: tuple[str, ...] = ("input",)) -> Graph:
        """Return the graph of the steps so far, the last of which must make "output"."""
        params = dict.fromkeys(name for node in self.nodes for name in node.params if name)
        return Graph(kind, tuple(self.nodes), tuple(params), inputs)

    def norm(self, name: str, x: str, spec: NormSpec, weights: str = "", role: str = "") -> str:
        """Add name = norm(x), with the parameters of the layer `weights` (by default `name`)."""
        weight, bias = linear_params(weights or name)
        return self.add(Norm(name=name, x=x, weight=weight, bias=bias, spec=spec, role=role))

    def linear(
        self,
        name: str,
        x: str,
        *layers: str,
        residual: str = "",
        mask: str = "",
        sizes: tuple[int, ...] = (),
        part: Part | None = None,
        role: str = "",
    ) -> str:
        """Add name = residual + mask * (x @ weight.T + bias), of one layer or several side by side.

        `sizes`: output columns of each of several layers. The step includes low-rank updates of the
        layers. After several layers, updates or a quantized weight, dropout and the sum with the
        residual are a step of their own.
        """
        updated = part is None and any(lora.layer in layers for lora in self.loras)
        packed = tuple([self.packed.get(layer) for layer in layers])
        packed = packed if any(packed) else ()
        if (updated or sizes or packed) and (residual or mask):
            made = self.linear(layers[0], x, *layers, sizes=sizes)
            return self.sum(name, made, residual, mask, role)
        weights, biases = zip(*map(linear_params, layers), strict=True)
        node = Linear(
            name=name, x=x, residual=residual, weights=weights, biases=biases, mask=mask,
            sizes=sizes, part=part, role=role,
            updates=self._updates(x, layers, sizes) if updated else (), packed=packed,
        )  # fmt: skip
        return self.add(node)

    def _updates(
        self, x: str, layers: tuple[str, ...], sizes: tuple[int, ...]
    ) -> tuple[LowRank, ...]:
        """Return the updates of the layers, whose masks are added."""
        ends = itertools.pairwise((0, *itertools.accumulate(sizes)))
        columns, updates = dict(zip(layers, ends, strict=False)), []
        for i, lora in enumerate(self.loras):
            if lora.layer in layers:
                low = f"lora.{i}"
                mask = self.dropout(f"dropout.{low}", random.LORA + i, lora.dropout, x)
                kind, names = LowRank, dict[str, Any]()
                if lora.dora:
                    affine = zip(("weight", "bias"), linear_params(lora.layer), strict=True)
                    kind, names = Dora, dict(affine, magnitude=f"{low}.M")
                update = kind(
                    a=f"{low}.A", b=f"{low}.B", low=low, scale=lora.scale, mask=mask,
                    columns=columns.get(lora.layer), dtype=lora.dtype, **names,
                )  # fmt: skip
                updates.append(update)
        return tuple(updates)

    def projections(self, name: str, x: str, spec: AttentionSpec, names: str, role: str) -> str:
        """Add the projections of those of q, k and v in `names`, which have separate weights."""
        columns = {layer: c for layer, c in spec.columns.items() if layer[-1] in names}
        sizes = tuple([stop - start for start, stop in columns.values()])
        return self.linear(name, x, *columns, sizes=sizes if len(sizes) > 1 else (), role=role)

    def sum(self, name: str, x: str, residual: str, mask: str = "", role: str = "") -> str:
        """Add name = residual + mask * x."""
        return self.add(Add(name=name, x=x, residual=residual, mask=mask, role=role))

    def dropout(
        self, name: str, site: int, p: float, like: str, of: str = "input", divided: bool = False
    ) -> str:
        """Add the mask of a dropout site, as wide as `like` and with the tokens of `of`.

        At p = 0 it is "", and there is no step. `divided`: each rank has its own elements.
        """
        if p == 0.0:
            return ""
        return self.add(DrawMask(name=name, site=self.site(site, divided), p=p, like=like, of=of))

    def site(self, site: int, divided: bool = True) -> int:
        """Return a dropout site, or this rank's own if its elements are `divided` among ranks."""
        parallel = self.parallel
        if parallel is None or not (divided or parallel.sequence):
            return site
        return site + parallel.rank * SITES_OF_A_RANK

    def gather(self, x: str, in_order: bool, whole: bool = False) -> str:
        """Return what a branch reads of x: x itself, or the tokens of all ranks.

        `in_order`: the tokens of sequences stay in order. `whole`: every rank has all of x already.
        """
        if self.parallel is None:
            return x
        name = f"{x}.all"
        for node in self.nodes:  # another branch may have gathered the same
            ordered = node.per_sequence or not (in_order and self.parallel.sequence)
            if node.name == name and ordered:
                return name
            name = f"{x}.ordered" if node.name == name else name
        parallel = replace(self.parallel, sequence=False) if whole else self.parallel
        ordered = in_order and parallel.sequence
        return self.add(AllGather(name=name, x=x, parallel=parallel, per_sequence=ordered))

    def leave(
        self, name: str, x: str, weights: str, residual: str = "", mask: str = "", role: str = ""
    ) -> str:
        """Add the linear layer at the end of a branch, if it has one, with the sum over ranks.

        It divides the tokens among ranks in the order in which the branch gathered them.
        """
        if not weights:
            return self.sum(name, x, residual, mask, role) if residual or mask else x
        if self.parallel is None:
            return self.linear(name, x, weights, residual=residual, mask=mask, role=role)
        weight, bias = linear_params(weights)
        separate = bool(residual or mask)
        made, partial = weights if separate else name, f"{weights}.partial"
        self.add(Linear(name=partial, x=x, weights=(weight,), biases=("",)))
        self.add(
            ReduceScatter(
                name=made, x=partial, bias=bias, parallel=self.parallel,
                role="" if separate else role, per_sequence=self._is_in_order(x),
            )
        )  # fmt: skip
        return self.sum(name, made, residual, mask, role) if separate else name

    def _is_in_order(self, x: str) -> bool:
        """Return whether all ranks' tokens of x were gathered in the order of sequences."""
        nodes = {node.name: node for node in self.nodes}
        while x in nodes and not isinstance(nodes[x], AllGather):
            x = nodes[x].follows
        return x in nodes and bool(nodes[x].per_sequence)

    def attention(self, spec: AttentionSpec, x: str) -> str:
        """Add attention to x with its projections of q, k and v, and rotation."""
        if spec.keys != "input":
            return self._cross_attention(spec, x)
        read = self.gather(x, in_order=True)
        role = "" if spec.rotary and not spec.head_norm else "heads"
        if spec.projection == "split":
            heads = self.projections("qkv", read, spec, "qkv", role)
        else:
            heads = self.linear("qkv", read, "qkv", role=role)
        if spec.rotary or spec.head_norm:
            role = "" if spec.head_norm else "heads"
            heads = self.add(rotary_node("rotated", heads, spec, role))
        site = self.site(random.ATTENTION)
        return self.add(attention_node("attn", heads, heads, heads, spec, site))

    def _cross_attention(self, spec: AttentionSpec, x: str) -> str:
        """Add attention whose queries are projected from x, keys and values from `spec.keys`."""
        x, keys = self.gather(x, in_order=True), self.gather(spec.keys, in_order=True, whole=True)
        if spec.projection == "split":
            query = self.projections("query", x, spec, "q", "heads")
            keys_values = self.projections("kv", keys, spec, "kv", "heads")
        else:
            (_, first), _, (_, end) = spec.columns.values()
            query = self.linear("query", x, "cross", part=(0, first, end), role="heads")
            keys_values = self.linear("kv", keys, "cross", part=(first, end, end), role="heads")
        site, masks = self.site(random.CROSS_ATTENTION), f"{spec.keys}_"
        return self.add(attention_node("cross", query, keys_values, keys_values, spec, site, masks))

    def mlp(self, spec: MLPSpec, x: str, prefix: str = "") -> str:
        """Add the MLP up to its activation: everything but the last linear layer.

        `prefix`: of the names of its layers and steps, where it is no branch of its own.
        """
        x, p = self.gather(x, in_order=False), prefix
        gate = self.linear(f"{p}gate", x, f"{p}gate", role="hidden") if spec.gated else ""
        up = self.linear(f"{p}up", x, f"{p}fc1", role="hidden")
        mask = self.dropout("dropout_mlp", random.MLP, spec.dropout, "fc1.weight", x, divided=True)
        if spec.activation != USER_FUNCTION:
            act = MLPActivation(name=f"{p}act", gate=gate, up=up, act=spec.activation, mask=mask)
            return self.add(act)
        captured = captured_params(spec.captured)
        return self.add(
            Replay(
                name="act", xs=(up,), tensors=captured, mask=mask, function="activation",
                captures=True, what="the caller's function", needed_for=((up, *captured),),
                tokenwise=True, per_batch=spec.whole,
            )
        )  # fmt: skip


def attention_node(
    name: str, q: str, k: str, v: str, spec: AttentionSpec, site: int, prefix: str = ""
) -> Attention:
    """Return the step of attention alone; names of its masks begin with `prefix`."""
    masks: dict[str, Any] = {m: prefix + m for m in spec.masks if m != "cu_seqlens"}
    if "cu_seqlens" in spec.masks:
        masks |= {"cu_q": "cu_q", "cu_k": "cu_k"}
    if spec.sinks:
        masks["sinks"] = prefix + "sinks"
    return Attention(name=name, q=q, k=k, v=v, spec=spec, site=site, role="attention", **masks)


def rotary_node(name: str, x: str, spec: AttentionSpec, role: str = "") -> Rotary:
    """Return the step that norms and rotates the query and key heads of the projection x."""
    cos, sin = ("cos", "sin") if spec.rotary else ("", "")
    q_weight, k_weight = ("q_norm.weight", "k_norm.weight") if spec.head_norm else ("", "")
    return Rotary(
        name=name, x=x, spec=spec, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight, role=role
    )


@block
def block_graph(spec: BlockSpec) -> Graph:
    """Return the graph of a block. Equal specs give the same object.

    Raises: ValueError for a low-rank update of a layer that the block does not have, and for
        branches that would give two activations one name.

    >>> from fused_remat.layer_specs import nn_layer_spec
    >>> block_graph(nn_layer_spec(True, 4, 16, "gelu")).names
    ('norm1', 'qkv', 'attn', 'mid', 'norm2', 'up', 'act')
    """
    layers = [name for name in spec.linears if name != "cross"]  # two steps share its weight
    for lora in spec.loras:
        if lora.layer not in layers:
            raise ValueError(
                f"no layer {lora.layer!r} for a low-rank update; valid: {', '.join(layers)}"
            )
    b, n = BlockBuilder(spec.loras, spec.parallel, spec.packed), len(spec.branches)
    stream = before = read = spec.inputs[0]  # `before`: what the last branch read
    for i, branch in enumerate(spec.branches, 1):
        number = str(i) if n > 1 else ""
        after = "output" if i == n else "mid" if n == 2 else f"mid{i}"
        before = before if branch.parallel else stream
        if branch.norm is not None and branch.placement != "post":
            read = b.norm(f"norm{number}", before, branch.norm)
        elif not branch.parallel:
            read = stream
        if isinstance(branch.op, AttentionSpec):
            made = b.attention(branch.op, read)
            end = _ATTENTION if branch.op.keys == "input" else _CROSS
        elif isinstance(branch.op, MoESpec):
            name = "" if spec.residual or branch.dropout else after
            role = "normed" if branch.placement == "sandwich" else ""
            made, end = add_moe(b, branch.op, read, name, role), _MOE
        else:
            made, end = b.mlp(branch.op, read), _MLP
        like = f"{end.layer}.weight" if end.layer else made
        mask = b.dropout(end.mask, end.site, branch.dropout, like)
        if not spec.residual:
            b.leave(after, made, end.layer, mask=mask)
        elif branch.norm is None or branch.placement == "pre":
            role = "" if i == n else "stream"
            b.leave(after, made, end.layer, stream, mask, role)
        elif branch.placement == "post":
            total = b.leave(f"sum{number}", made, end.layer, stream, mask, role="normed")
            b.norm(after, total, branch.norm, weights=f"norm{number}")
        else:
            total = b.leave(end.name, made, end.layer, role="normed")
            b.sum(after, b.norm(f"post{number}", total, branch.norm), stream, mask)
        stream = after
    return b.graph(spec.kind, spec.inputs)


@block
def norm_graph(spec: NormSpec) -> Graph:
    """Return the graph of output = norm(input)."""
    b = BlockBuilder()
    b.norm("output", "input", spec, "norm")
    return b.graph("norm")


@block
def dropout_add_graph(p: float) -> Graph:
    """Return the graph of output = residual + dropout(input)."""
    b = BlockBuilder()
    b.sum("output", "input", "residual", b.dropout("dropout1", random.RESIDUAL1, p, "input"))
    return b.graph("dropout_add", ("input", "residual"))


@block
def attention_graph(spec: AttentionSpec) -> Graph:
    """Return the graph of attention: queries "input", "key", "value", all heads (B, H, S, E)."""
    b, inputs = BlockBuilder(), ("input", "key", "value")
    b.add(attention_node("output", *inputs, spec, random.ATTENTION))
    return b.graph("attention", inputs)


@block
def rotary_graph(spec: AttentionSpec) -> Graph:
    """Return the graph that norms and rotates query and key heads of a packed projection."""
    b = BlockBuilder()
    b.add(rotary_node("output", "input", spec))
    return b.graph("rotary")


register_dataclass(LinearCrossEntropy)


@block
def linear_cross_entropy_graph(loss: LinearCrossEntropy) -> Graph:
    """Return the graph of a loss, a single node whose name must be "output"."""
    b = BlockBuilder()
    b.add(loss)
    return b.graph("linear_cross_entropy")


@block
def with_side_outputs(graph: Graph, names: tuple[str, ...]) -> Graph:
    """Return `graph` with the activations `names` as further results of a call."""
    return replace(graph, side_outputs=names)
