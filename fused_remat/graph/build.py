"""From the description of a block to its graph: `block_graph(spec)`.

Every activation gets a name and, where presets ask for it, a role: "attention" for attention's
result, "heads" for what attention reads, "stream" for sums inside the residual stream, "normed" for
what a norm after a branch reads, "hidden" for what the MLP's activation reads.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from fused_remat import random
from fused_remat.blocks.attention import Attention, CrossAttention, HeadsAttention
from fused_remat.blocks.lora import Adapted, LowRank, Term
from fused_remat.blocks.nodes import KeepScale, Linear, Node, Norm
from fused_remat.blocks.parallel import (
    SITES_OF_A_RANK,
    Gathered,
    GatheredSequences,
    Reduced,
    ReducedSequences,
)
from fused_remat.blocks.pointwise import Add, Custom, Gated, Pointwise
from fused_remat.blocks.program import Graph
from fused_remat.blocks.projections import Projections
from fused_remat.blocks.recipe import builder
from fused_remat.blocks.rotary import Rotary
from fused_remat.spec import (
    USER_FUNCTION,
    AttentionSpec,
    BlockSpec,
    LoraSpec,
    MLPSpec,
    NormSpec,
    ParallelSpec,
    linear_params,
)


class _End(NamedTuple):
    """How a branch ends: its last linear layer, and the dropout of what it adds."""

    layer: str  # of the weights
    name: str  # of what the layer makes where the branch does not end with the sum
    mask: str
    site: int


_ATTENTION = _End("proj", "proj", "keep1", random.RESIDUAL1)
_CROSS = _End("cross_proj", "cross_proj", "keep_cross", random.CROSS_RESIDUAL)
_MLP = _End("fc2", "down", "keep2", random.RESIDUAL2)


def captured_params(count: int) -> tuple[str, ...]:
    """Names of the tensors that a caller's own activation function captures."""
    return tuple([f"activation.{i}" for i in range(count)])


class BlockBuilder:
    """Collects the nodes of a block; methods add steps, and return the name of what they make.

    `loras` are updates of linear layers, added wherever such a layer is; `parallel` divides
    branches among ranks.

    >>> b = BlockBuilder()
    >>> x = b.norm("norm", "input", NormSpec(kind="rms_norm"))
    >>> b.leave("output", b.mlp(MLPSpec(activation="relu"), x), "fc2", residual="input")
    'output'
    >>> b.graph("my_mlp").names
    ('norm', 'up', 'act')
    """

    def __init__(
        self, loras: tuple[LoraSpec, ...] = (), parallel: ParallelSpec | None = None
    ) -> None:
        self.nodes: list[Node] = []
        self.loras, self.parallel = loras, parallel

    def add(self, node: Node) -> str:
        """Add any node.

        Raises: ValueError if there is one of its name.
        """
        if any(node.name == other.name for other in self.nodes):
            raise ValueError(f"two steps of a block make {node.name!r}: names must be unique")
        self.nodes.append(node)
        return node.name

    def graph(self, kind: str, inputs: tuple[str, ...] = ("input",)) -> Graph:
        """The graph of what was added; the last step must make "output"."""
        params = dict.fromkeys(name for node in self.nodes for name in node.params if name)
        return Graph(kind, tuple(self.nodes), tuple(params), inputs)

    def norm(self, name: str, x: str, spec: NormSpec, weights: str = "", role: str = "") -> str:
        """name = norm(x), with the weight and bias of the layer `weights`, or of `name`."""
        weight, bias = linear_params(weights or name)
        return self.add(Norm(name=name, x=x, weight=weight, bias=bias, spec=spec, role=role))

    def linear(
        self,
        name: str,
        x: str,
        weights: str,
        residual: str = "",
        keep: str = "",
        part: tuple[int, int, int] | None = None,
        role: str = "",
    ) -> str:
        """name = residual + keep * (x @ weight.T + bias), and the layer's updates, in steps."""
        weight, bias = linear_params(weights)
        if part is not None or not any(lora.layer == weights for lora in self.loras):
            return self.add(
                Linear(
                    name=name, x=x, weight=weight, bias=bias, residual=residual, keep=keep,
                    part=part, role=role,
                )
            )  # fmt: skip
        assert residual or not keep, "dropout of an updated layer is in the sum with its residual"
        made = weights if residual else name
        base = Linear(name=f"{made}.base", x=x, weight=weight, bias=bias)
        self._adapted(made, base, {weights: (0, 0)}, "" if residual else role)
        return self.sum(name, made, residual, keep, role) if residual else name

    def projections(
        self, name: str, x: str, columns: dict[str, tuple[int, int]], role: str = ""
    ) -> str:
        """name = x @ weight.T + bias of each layer in its own columns, first and end."""
        first = min(start for start, _ in columns.values())
        columns = {name: (start - first, stop - first) for name, (start, stop) in columns.items()}
        updated = any(lora.layer in columns for lora in self.loras)
        node = Projections(
            name=f"{name}.base" if updated else name,
            x=x,
            layers=tuple(columns),
            sizes=tuple([stop - start for start, stop in columns.values()]),
            role="" if updated else role,
        )
        return self._adapted(name, node, columns, role) if updated else self.add(node)

    def _adapted(
        self,
        name: str,
        base: Linear | Projections,
        columns: dict[str, tuple[int, int]],
        role: str = "",
    ) -> str:
        """name = base + every update of the layers in `columns`, which read what base reads.

        The updates come first: backward then adds their gradients to the base's, in the products.
        """
        terms = []
        for i, lora in enumerate(self.loras):
            if lora.layer in columns:
                low = f"lora.{i}"
                keep = self.dropout(f"keep.{low}", random.LORA + i, lora.dropout, base.x)
                self.add(LowRank(name=low, x=base.x, weight=f"{low}.A", keep=keep, to=lora.dtype))
                terms.append(Term(low, f"{low}.B", lora.scale, *columns[lora.layer]))
        self.add(base)
        return self.add(Adapted(name=name, x=base.name, terms=tuple(terms), role=role))

    def sum(self, name: str, x: str, residual: str, keep: str = "", role: str = "") -> str:
        """name = residual + keep * x."""
        return self.add(Add(name=name, x=x, residual=residual, keep=keep, role=role))

    def dropout(
        self, name: str, site: int, p: float, like: str, of: str = "input", divided: bool = False
    ) -> str:
        """The multiplier of a dropout site, as wide as `like`; "" and no node at p = 0.

        `of`: whose tokens it has. `divided`: ranks have elements of their own.
        """
        if p == 0.0:
            return ""
        return self.add(KeepScale(name=name, site=self.site(site, divided), p=p, like=like, of=of))

    def site(self, site: int, divided: bool = True) -> int:
        """A dropout site, or this rank's own where its elements are `divided` among ranks."""
        parallel = self.parallel
        if parallel is None or not (divided or parallel.sequence):
            return site
        return site + parallel.rank * SITES_OF_A_RANK

    def gather(self, x: str, in_order: bool, whole: bool = False) -> str:
        """What a branch reads of x: x itself, or the tokens of all ranks.

        `in_order`: of whole sequences, for attention. `whole`: every rank has all of x anyway.
        """
        if self.parallel is None:
            return x
        name = f"{x}.all"
        for node in self.nodes:  # of a branch that reads the same
            if node.name == name and (node.per_sequence or not in_order):
                return name
            name = f"{x}.ordered" if node.name == name else name
        parallel = replace(self.parallel, sequence=False) if whole else self.parallel
        kind = GatheredSequences if in_order and parallel.sequence else Gathered
        return self.add(kind(name=name, x=x, parallel=parallel))

    def leave(
        self,
        name: str,
        x: str,
        weights: str,
        residual: str = "",
        keep: str = "",
        in_order: bool = False,
        role: str = "",
    ) -> str:
        """`linear` at the end of a branch, where the ranks' parts are summed."""
        if self.parallel is None:
            return self.linear(name, x, weights, residual, keep, role=role)
        weight, bias = linear_params(weights)
        made, partial = weights if residual else name, f"{weights}.partial"
        self.add(Linear(name=partial, x=x, weight=weight, bias=""))
        kind = ReducedSequences if in_order and self.parallel.sequence else Reduced
        own = "" if residual else role
        self.add(kind(name=made, x=partial, bias=bias, parallel=self.parallel, role=own))
        return self.sum(name, made, residual, keep, role) if residual else name

    def attention(self, spec: AttentionSpec, x: str) -> str:
        """The heads that attention makes of x: projected, rotated, attended, side by side."""
        if spec.keys != "input":
            return self._cross_attention(spec, x)
        read = self.gather(x, in_order=True)
        role = "" if spec.rotary and not spec.head_norm else "heads"
        if spec.projection == "split":
            heads = self.projections("qkv", read, spec.columns, role)
        else:
            heads = self.linear("qkv", read, "qkv", role=role)
        if spec.rotary or spec.head_norm:
            role = "" if spec.head_norm else "heads"
            heads = self.add(rotary_node("rotated", heads, spec, role))
        site = self.site(random.ATTENTION)
        node = Attention(
            name="attn", qkv=heads, spec=spec, site=site, role="attention", **mask_names(spec)
        )
        return self.add(node)

    def _cross_attention(self, spec: AttentionSpec, x: str) -> str:
        """Of queries made of x to keys and values made of the input `spec.keys`."""
        x, keys = self.gather(x, in_order=True), self.gather(spec.keys, in_order=True, whole=True)
        q, *kv = spec.columns.items()
        if spec.projection == "split":
            query = self.linear("query", x, q[0], role="heads")
            keys_values = self.projections("kv", keys, dict(kv), role="heads")
        else:
            first, end = q[1][1], kv[-1][1][1]
            query = self.linear("query", x, "cross", part=(0, first, end), role="heads")
            keys_values = self.linear("kv", keys, "cross", part=(first, end, end), role="heads")
        return self.add(
            CrossAttention(
                name="cross", q=query, kv=keys_values, spec=spec, role="attention",
                site=self.site(random.CROSS_ATTENTION), **mask_names(spec, f"{spec.keys}_"),
            )
        )  # fmt: skip

    def mlp(self, spec: MLPSpec, x: str) -> str:
        """The MLP's activation: everything but its last linear layer."""
        x = self.gather(x, in_order=False)
        gate = self.linear("gate", x, "gate", role="hidden") if spec.gated else ""
        up = self.linear("up", x, "fc1", role="hidden")
        keep = self.dropout("keep_mlp", random.MLP, spec.dropout, "fc1.weight", x, divided=True)
        if spec.activation == USER_FUNCTION:
            captured = captured_params(spec.captured)
            return self.add(
                Custom(name="act", x=up, captured=captured, keep=keep, per_batch=spec.whole)
            )
        if gate:
            return self.add(Gated(name="act", gate=gate, up=up, act=spec.activation, keep=keep))
        return self.add(Pointwise(name="act", x=up, act=spec.activation, keep=keep))


def mask_names(spec: AttentionSpec, prefix: str = "") -> dict[str, Any]:
    """The tensors that attention reads besides q, k and v, by the node's fields.

    >>> spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_dim=8, scale=1.0, masks=("padding",))
    >>> mask_names(spec, "memory_")
    {'padding': 'memory_padding'}
    """
    names = {name: prefix + name for name in spec.masks if name != "cu_seqlens"}
    return {**names, "cu_q": "cu_q", "cu_k": "cu_k"} if "cu_seqlens" in spec.masks else names


def rotary_node(name: str, x: str, spec: AttentionSpec, role: str = "") -> Rotary:
    """The step that norms and rotates the query and key heads of a packed projection."""
    cos, sin = ("cos", "sin") if spec.rotary else ("", "")
    q_weight, k_weight = ("q_norm.weight", "k_norm.weight") if spec.head_norm else ("", "")
    return Rotary(
        name=name, x=x, spec=spec, cos=cos, sin=sin, q_weight=q_weight, k_weight=k_weight, role=role
    )


@builder
def block_graph(spec: BlockSpec) -> Graph:
    """The graph of a block; the same object for equal specs.

    Raises: ValueError for a low-rank update of a layer that is not there, and for branches that
        would make activations of one name.

    >>> from fused_remat.spec import nn_layer_spec
    >>> block_graph(nn_layer_spec(True, 4, 16, "gelu")).names
    ('norm1', 'qkv', 'attn', 'mid', 'norm2', 'up', 'act')
    """
    valid_layers = [name for name in spec.linears if name != "cross"]  # of which steps have parts
    for lora in spec.loras:
        if lora.layer not in valid_layers:
            valid = ", ".join(valid_layers)
            raise ValueError(f"no layer {lora.layer!r} to update; valid: {valid}")
    b, n = BlockBuilder(spec.loras, spec.parallel), len(spec.branches)
    stream = before = read = spec.inputs[0]  # `before`: the stream that the branch before read
    for i, branch in enumerate(spec.branches, 1):
        number = str(i) if n > 1 else ""
        after = "output" if i == n else "mid" if n == 2 else f"mid{i}"
        before = before if branch.parallel else stream
        if branch.norm is not None and branch.placement != "post":
            read = b.norm(f"norm{number}", before, branch.norm)
        elif not branch.parallel:
            read = stream
        attends = isinstance(branch.op, AttentionSpec)
        if isinstance(branch.op, AttentionSpec):
            made = b.attention(branch.op, read)
            end = _ATTENTION if branch.op.keys == "input" else _CROSS
        else:
            made, end = b.mlp(branch.op, read), _MLP
        keep = b.dropout(end.mask, end.site, branch.dropout, f"{end.layer}.weight")
        if not spec.residual:
            b.leave(after, made, end.layer, keep=keep, in_order=attends)
        elif branch.norm is None or branch.placement == "pre":
            role = "" if i == n else "stream"
            b.leave(after, made, end.layer, stream, keep, in_order=attends, role=role)
        elif branch.placement == "post":
            total = b.leave(
                f"sum{number}", made, end.layer, stream, keep, in_order=attends, role="normed"
            )
            b.norm(after, total, branch.norm, weights=f"norm{number}")
        else:
            total = b.leave(end.name, made, end.layer, in_order=attends, role="normed")
            b.sum(after, b.norm(f"post{number}", total, branch.norm), stream, keep)
        stream = after
    return b.graph(spec.kind, spec.inputs)


@builder
def norm_graph(spec: NormSpec) -> Graph:
    """output = norm(input).

    >>> norm_graph(NormSpec(kind="rms_norm")).nodes[0].stats
    ('output.rstd',)
    """
    b = BlockBuilder()
    b.norm("output", "input", spec, "norm")
    return b.graph("norm")


@builder
def dropout_add_graph(p: float) -> Graph:
    """output = residual + dropout(input).

    >>> [node.name for node in dropout_add_graph(0.1).nodes]
    ['keep1', 'output']
    """
    b = BlockBuilder()
    b.sum("output", "input", "residual", b.dropout("keep1", random.RESIDUAL1, p, "input"))
    return b.graph("dropout_add", ("input", "residual"))


@builder
def attention_graph(spec: AttentionSpec) -> Graph:
    """Attention over heads (B, H, S, E): the inputs are the query, "input", "key" and "value".

    >>> spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=0.125)
    >>> attention_graph(spec).inputs
    ('input', 'key', 'value')
    """
    b = BlockBuilder()
    node = HeadsAttention(
        name="output", spec=spec, site=random.ATTENTION, role="attention", **mask_names(spec)
    )
    b.add(node)
    return b.graph("attention", node.inputs)


@builder
def rotary_graph(spec: AttentionSpec) -> Graph:
    """The rotation of a packed projection of heads.

    >>> from fused_remat.spec import RotarySpec
    >>> rotary = RotarySpec()
    >>> spec = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64, scale=1.0, rotary=rotary)
    >>> rotary_graph(spec).names  # backward rotates back, and reads no activation
    ()
    """
    b = BlockBuilder()
    b.add(rotary_node("output", "input", spec))
    return b.graph("rotary")
