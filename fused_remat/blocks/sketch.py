"""What blocks are put together of: norms, projections, attention and MLP halves, with dropout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from fused_remat import random
from fused_remat.blocks.attention import Attention, CrossAttention
from fused_remat.blocks.lora import Adapted, Lora, LowRank, Term
from fused_remat.blocks.nodes import KeepScale, Linear, Node, Norm
from fused_remat.blocks.parallel import (
    SITES_OF_A_RANK,
    Gathered,
    GatheredSequences,
    Parallel,
    Reduced,
    ReducedSequences,
)
from fused_remat.blocks.pointwise import Add, Custom, Gated, Pointwise
from fused_remat.blocks.projections import Projections
from fused_remat.blocks.rotary import Rotary

#: The activation "name" of the caller's own function (`blocks.pointwise.Custom`).
CUSTOM = "custom"

#: Names of the params that are no weights, in any block of a layer.
NOT_WEIGHTS = (
    "mask", "padding", "memory_mask", "memory_padding", "seed", "cos", "sin", "lengths", "cu_q",
    "cu_k",
)  # fmt: skip


def linear_params(*names: str) -> tuple[str, ...]:
    """The weight and bias of each layer.

    >>> linear_params("fc1")
    ('fc1.weight', 'fc1.bias')
    """
    return tuple(f"{name}.{kind}" for name in names for kind in ("weight", "bias"))


def captured_params(count: int) -> tuple[str, ...]:
    """Names of the tensors that a caller's own activation function captures."""
    return tuple(f"activation.{i}" for i in range(count))


class Sketch:
    """Collects the nodes of a block; every method adds one step or one half, by name.

    `loras` are updates of linear layers, added wherever a layer of theirs is; `parallel` divides
    the halves among ranks.
    """

    def __init__(self, loras: tuple[Lora, ...] = (), parallel: Parallel | None = None) -> None:
        self.nodes: list[Node] = []
        self.loras, self.parallel = loras, parallel

    def keep(
        self, name: str, site: int, p: float, like: str, of: str = "input", divided: bool = False
    ) -> str:
        """The multiplier of a dropout site, as wide as `like`; "" and no node at p = 0.

        `of`: whose tokens it has. `divided`: ranks have elements of their own.
        """
        if p == 0.0:
            return ""
        site = self.site(site, divided)
        self.nodes.append(KeepScale(name=name, site=site, p=p, like=like, of=of))
        return name

    def site(self, site: int, divided: bool = True) -> int:
        """A dropout site, or this rank's own where its elements are `divided` among ranks."""
        parallel = self.parallel
        if parallel is None or not (divided or parallel.sequence):
            return site
        return site + parallel.rank * SITES_OF_A_RANK

    def enter(self, x: str, sequences: bool, whole: bool = False) -> str:
        """What a half reads of x: x, or that of all ranks.

        `sequences`: in order. `whole`: every rank has all of it in any case.
        """
        if self.parallel is None:
            return x
        parallel = replace(self.parallel, sequence=False) if whole else self.parallel
        kind = GatheredSequences if sequences and parallel.sequence else Gathered
        name = f"{x}.all"
        self.nodes.append(kind(name=name, x=x, parallel=parallel))
        return name

    def leave(
        self,
        name: str,
        x: str,
        weights: str,
        residual: str = "",
        keep: str = "",
        sequences: bool = False,
    ) -> None:
        """`linear` at the end of a half, where the ranks are joined again."""
        if self.parallel is None:
            self.linear(name, x, weights, residual, keep)
            return
        weight, bias = linear_params(weights)
        made, partial = weights if residual else name, f"{weights}.partial"
        self.nodes.append(Linear(name=partial, x=x, weight=weight, bias=""))
        kind = ReducedSequences if sequences and self.parallel.sequence else Reduced
        self.nodes.append(kind(name=made, x=partial, bias=bias, parallel=self.parallel))
        if residual:
            self.add(name, made, residual, keep)

    def norm(
        self,
        name: str,
        x: str,
        weights: str,
        eps: float,
        kind: str = "layer_norm",
        offset: float = 0.0,
    ) -> None:
        weight, bias = linear_params(weights)
        self.nodes.append(
            Norm(name=name, x=x, weight=weight, bias=bias, eps=eps, kind=kind, offset=offset)
        )

    def linear(
        self,
        name: str,
        x: str,
        weights: str,
        residual: str = "",
        keep: str = "",
        part: tuple[int, int, int] | None = None,
    ) -> None:
        """name = residual + keep * (x @ weight.T + bias); what is updated, in steps of its own."""
        weight, bias = linear_params(weights)
        if not any(lora.layer == weights for lora in self.loras):
            self.nodes.append(
                Linear(
                    name=name, x=x, weight=weight, bias=bias, residual=residual, keep=keep,
                    part=part,
                )
            )  # fmt: skip
            return
        assert residual or not keep, "dropout of an updated layer is in the sum with its residual"
        made = weights if residual else name
        base = Linear(name=f"{made}.base", x=x, weight=weight, bias=bias)
        self._adapted(made, base, {weights: (0, 0)})
        if residual:
            self.add(name, made, residual, keep)

    def projections(self, name: str, x: str, columns: Mapping[str, tuple[int, int]]) -> None:
        """name = x @ weight.T + bias of each layer in its own columns, first and end."""
        updated = any(lora.layer in columns for lora in self.loras)
        sizes = tuple([stop - start for start, stop in columns.values()])
        base = f"{name}.base" if updated else name
        node = Projections(name=base, x=x, layers=tuple(columns), sizes=sizes)
        if updated:
            self._adapted(name, node, columns)
        else:
            self.nodes.append(node)

    def _adapted(
        self, name: str, base: Linear | Projections, columns: Mapping[str, tuple[int, int]]
    ) -> None:
        """name = base + every update of the layers in `columns`, which read what base reads.

        The updates come first: backward then adds their gradients to the base's, in the products.
        """
        terms = []
        for i, lora in enumerate(self.loras):
            if lora.layer in columns:
                low = f"lora.{i}"
                keep = self.keep(f"keep.{low}", random.LORA + i, lora.p, base.x)
                self.nodes.append(
                    LowRank(name=low, x=base.x, weight=f"{low}.A", keep=keep, to=lora.dtype)
                )
                terms.append(Term(low, f"{low}.B", lora.scale, *columns[lora.layer]))
        self.nodes.append(base)
        self.nodes.append(Adapted(name=name, x=base.name, terms=tuple(terms)))

    def add(self, name: str, x: str, residual: str, keep: str = "") -> None:
        """name = residual + keep * x."""
        self.nodes.append(Add(name=name, x=x, residual=residual, keep=keep))

    def attention_half(
        self,
        x: str,
        residual: str,
        name: str,
        attention: Attention,
        p_residual: float,
        rotary: Rotary | None = None,
        columns: Mapping[str, tuple[int, int]] | None = None,
    ) -> None:
        """name = residual + dropout(proj(attention(qkv(x)))); `rotary`, if any, works on qkv(x).

        `columns` of q, k and v, if they have weights of their own (`projections`).
        """
        x = self.enter(x, sequences=True)
        if columns is None:
            self.linear("qkv", x, "qkv")
        else:
            self.projections("qkv", x, columns)
        if rotary is not None:
            self.nodes.append(rotary)
        self.nodes.append(attention)
        keep = self.keep("keep1", random.RESIDUAL1, p_residual, "proj.weight")
        self.leave(name, "attn", "proj", residual, keep, sequences=True)

    def cross_half(
        self,
        x: str,
        memory: str,
        residual: str,
        name: str,
        attention: CrossAttention,
        width: int,
        p_residual: float,
        split: bool = False,
    ) -> None:
        """name = residual + dropout(cross_proj(attention(query(x), kv(memory)))).

        The projections of query, key and value, each of `width`, share one weight, "cross", or are
        `split` into "cross_q", "cross_k" and "cross_v".
        """
        x, memory = self.enter(x, sequences=True), self.enter(memory, sequences=True, whole=True)
        if split:
            self.linear(attention.q, x, "cross_q")
            columns = {"cross_k": (0, width), "cross_v": (width, 2 * width)}
            self.projections(attention.kv, memory, columns)
        else:
            self.linear(attention.q, x, "cross", part=(0, width, 3 * width))
            self.linear(attention.kv, memory, "cross", part=(width, 3 * width, 3 * width))
        self.nodes.append(attention)
        keep = self.keep("keep_cross", random.CROSS_RESIDUAL, p_residual, "cross_proj.weight")
        self.leave(name, attention.name, "cross_proj", residual, keep, sequences=True)

    def mlp_half(
        self,
        x: str,
        residual: str,
        name: str,
        activation: str,
        p_mlp: float,
        p_residual: float,
        captured: int = 0,
        per_batch: bool = False,
    ) -> None:
        """name = residual + dropout(fc2(dropout(activation(fc1(x)))))."""
        x = self.enter(x, sequences=False)
        self.linear("up", x, "fc1")
        keep = self.keep("keep_mlp", random.MLP, p_mlp, "fc1.weight", x, divided=True)
        act: Node = Pointwise(name="act", x="up", act=activation, keep=keep)
        if activation == CUSTOM:
            names = captured_params(captured)
            act = Custom(name="act", x="up", captured=names, keep=keep, per_batch=per_batch)
        self.nodes.append(act)
        self._down(name, residual, p_residual)

    def gated_half(
        self, x: str, residual: str, name: str, activation: str, p_mlp: float, p_residual: float
    ) -> None:
        """name = residual + dropout(fc2(dropout(activation(gate(x)) * fc1(x))))."""
        self.up_half(x, activation, True, p_mlp)
        self._down(name, residual, p_residual)

    def up_half(self, x: str, activation: str, gated: bool, p_mlp: float) -> None:
        """act = dropout(activation(fc1(x))), or dropout(activation(gate(x)) * fc1(x))."""
        x = self.enter(x, sequences=False)
        if gated:
            self.linear("gate", x, "gate")
        self.linear("up", x, "fc1")
        keep = self.keep("keep_mlp", random.MLP, p_mlp, "fc1.weight", x, divided=True)
        if gated:
            self.nodes.append(Gated(name="act", gate="gate", up="up", act=activation, keep=keep))
        else:
            self.nodes.append(Pointwise(name="act", x="up", act=activation, keep=keep))

    def _down(self, name: str, residual: str, p_residual: float) -> None:
        keep = self.keep("keep2", random.RESIDUAL2, p_residual, "fc2.weight")
        self.leave(name, "act", "fc2", residual, keep)
