"""The tables of presets, read from the graphs of the encoder, decoder and transformer blocks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from bench.tables import Cell, markdown
from fused_remat import FusedRematLayer, explain
from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.graph.schedule import kept_bytes, schedule
from fused_remat.layer_specs import nn_layer_spec, transformer_spec
from fused_remat.policies import EXACT_PRESETS, kept_names
from fused_remat.spec import LoraSpec, lora_params
from fused_remat.steps.linear import Linear
from fused_remat.steps.node import Node

# Large enough for D**2 to stand for a GEMM and F = 4 D; sizes cancel out of the tables.
D, H, S = 1024, 8, 1
Shapes = Mapping[str, tuple[int, ...]]
SHAPES: Shapes = {
    "input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D), "memory": (D,),
    "cross.weight": (3 * D, D), "cross_proj.weight": (D, D),
    "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D),
}  # fmt: skip
_TRANSFORMERS = {
    "pre-norm, rotary (Llama)": {"placement": "pre"},
    "pre-norm, heads normed (Qwen3)": {"placement": "pre", "qk_norm_eps": 1e-6},
    "post-norm, rotary": {"placement": "post"},
    "before and after, heads normed (Gemma-3)": {"placement": "sandwich", "qk_norm_eps": 1e-6},
}


def block(norm_first: bool, *norms: float) -> Graph:
    """Return the encoder block's graph without dropout; with three eps the decoder block's."""
    return block_graph(nn_layer_spec(norm_first, H, D // H, "gelu", *([norms] if norms else [])))


def transformer(width: int = D, heads: int = H, **options: Any) -> tuple[Graph, dict[str, Any]]:
    """Return a rotary, gated block's graph without dropout, and the shapes of its products."""
    spec = transformer_spec(
        "rms_norm", 1e-6, "silu", gated=True, num_heads=heads, num_kv_heads=heads // 4,
        head_dim=width // heads, scale=1.0, window=(-1, 0), projection="split", rotary=True,
        **options,
    )  # fmt: skip
    linears = spec.linear_shapes(width, 7 * width // 2)
    return block_graph(spec), {"input": (width,), **{f"{n}.weight": s for n, s in linears.items()}}


class Kept:
    """What is kept of a block's call, and what backward then rebuilds.

    Attributes:
        names: the input and what is kept, in the graph's order.
        needs_grad: names that need gradients: by default inputs and weights.
        nodes: what backward computes again, in its order.
        work: "16D² + attention"; D²·M/S is a product of the memory's tokens.
        size: bytes of a token at 16 bits, as "6D + 4D·M/S".
    """

    def __init__(
        self, graph: Graph, save: str | frozenset[str], shapes: Shapes = SHAPES, wanted: Any = None
    ) -> None:
        save = kept_names(save, graph) if isinstance(save, str) else save
        self.graph, self.save, self.shapes = graph, save, shapes
        self.names = ["input", *sorted(save, key=graph.names.index)]
        weights = {n for n in graph.params if n.endswith((".weight", ".bias"))}
        self.needs_grad = frozenset({*graph.inputs, *weights} if wanted is None else wanted)
        plan = schedule(graph, save, self.needs_grad, tiled=False)
        self.nodes = [s.node for s in plan.backward if s.kind == "compute" and s.node is not None]
        self.products = products(graph, self.nodes, shapes)
        self.attentions = sum(node.per_sequence for node in self.nodes)

    @property
    def work(self) -> str:
        amounts = ((n.name, products(self.graph, [n], self.shapes) / D) for n in self.nodes)
        parts = self._by_source(amounts, "D²")
        return " + ".join(parts + ["attention"] * bool(self.attentions)) or "pointwise only"

    @property
    def sizes(self) -> Iterator[tuple[str, int]]:
        """Each kept name, and its bytes of a token at 16 bits."""
        widths = self.graph.widths(self.shapes)
        for name in self.names:
            yield name, 2 * widths[name]

    @property
    def size(self) -> str:
        return " + ".join(self._by_source(self.sizes, "D"))

    def _by_source(self, amounts: Iterable[tuple[str, float]], unit: str) -> list[str]:
        """Return the sums over names, in D, per token of each input; "·M/S": of the memory's."""
        total = dict.fromkeys(self.graph.inputs, 0.0)
        for name, amount in amounts:
            total[self.graph.source[name]] += amount / D
        sums = zip(total.values(), ("", "·M/S"), strict=False)
        return [
            f"{amount:.3f}".rstrip("0").rstrip(".") + unit + of for amount, of in sums if amount
        ]

    @property
    def cells(self) -> list[Cell]:
        """What is kept, the bytes of that, and what backward rebuilds."""
        return [", ".join(self.names), self.size, self.work]


def products(graph: Graph, nodes: Iterable[Node], shapes: Shapes = SHAPES) -> int:
    """Return FLOPs of a token in the nodes' products, attention apart."""
    widths = graph.widths(shapes)
    return sum(n.flops(widths, shapes, S) for n in nodes if not n.per_sequence)


def quoted(preset: str) -> str:
    """Return a preset as its user writes it, and whether it is the default."""
    return f'`"{preset}"`' + " (default)" * (preset == "full")


def encoder_table() -> str:
    """Return the presets of the encoder block: what each keeps and rebuilds."""
    return _table()


def decoder_table() -> str:
    """Return the presets of the decoder block, without the memory."""
    return _table(1e-5, 1e-5, 1e-5)


def _table(*norms: float) -> str:
    graphs = {name: block(name == "pre-norm", *norms) for name in ("pre-norm", "post-norm")}
    head = ["preset", *(h for name in graphs for h in (f"{name} keeps", "bytes", "rebuilds"))]
    rows = [
        [quoted(preset), *(cell for graph in graphs.values() for cell in Kept(graph, preset).cells)]
        for preset in EXACT_PRESETS
    ]
    return markdown(head, rows)


def transformer_table() -> str:
    """Return the presets of the transformer block, kinds one below the other."""
    rows = []
    for name, options in _TRANSFORMERS.items():
        graph, shapes = transformer(**options)
        rows += [[name, f'`"{p}"`', *Kept(graph, p, shapes).cells] for p in EXACT_PRESETS]
    return markdown(("norms and heads", "preset", "keeps", "bytes", "rebuilds"), rows)


# --- LoRA

#: Width and heads of Llama-3-8B's block, and a usual rank.
LLAMA, RANK = (4096, 32), 16
CASES = {
    "All weights trained": (),
    "LoRA on q and v": ("q", "v"),
    "LoRA on all seven": ("q", "k", "v", "proj", "gate", "fc1", "fc2"),
    "DoRA on all seven": ("q", "k", "v", "proj", "gate", "fc1", "fc2"),
}


def _case(title: str, layers: tuple[str, ...]) -> str:
    """Return a table of the presets with updates of `layers`, or with all weights trained."""
    dora = title.startswith("DoRA")
    loras = tuple([LoraSpec(layer=layer, scale=1.0, dora=dora) for layer in layers])
    graph, shapes = transformer(*LLAMA, loras=loras)
    width = LLAMA[0]
    shapes |= {"input": (1, 1, width), "norm1.weight": (width,), "norm2.weight": (width,)}
    wanted = frozenset({"input", *lora_params(loras)} if layers else shapes)
    for i, layer in enumerate(layers):
        out, into = shapes[f"{layer}.weight"]
        shapes |= {f"lora.{i}.A": (RANK, into), f"lora.{i}.B": (out, RANK), f"lora.{i}.M": (out,)}
    elements = sum(math.prod(shapes[name]) for name in wanted - {"input"})
    gradients = elements * (4 if layers else 2) / 2**20  # adapters' in float32
    low = [f"{len(layers)} products with A"] if layers else []  # of all updates, for their B
    rows = []
    for preset in EXACT_PRESETS:
        found = Kept(graph, preset, shapes, wanted)
        again = {node.name: node for node in found.nodes}
        kept = kept_bytes(graph, found.save, wanted, shapes, {"input": torch.bfloat16})
        apart = [n for n in graph.nodes if isinstance(n, Linear) and n.name not in again]
        flops = found.products
        flops += sum(2 * math.prod(shapes[update.a]) for n in apart for update in n.updates)
        shown = [node.name for node in graph.nodes if node.name in again]
        rows.append([
            f'`"{preset}"`', ", ".join(name for name in kept if "." not in name),
            f"{sum(kept.values()) / 1024:.1f}", ", ".join([*shown, *low]) or "nothing",
            f"{flops / products(graph, graph.nodes, shapes):.0%}",
        ])  # fmt: skip
    head = ("preset", "keeps", "KiB a token", "rebuilds", "of forward's products")
    size = f"(weight gradients of a block: {gradients:.1f} MiB)"
    return f"**{title}** {size}\n\n{markdown(head, rows)}"


def lora_tables() -> str:
    """Return a table for each of `CASES`."""
    return "\n\n".join(_case(title, layers) for title, layers in CASES.items())


def programs() -> str:
    """Return the programs of a pre-norm encoder layer under `full`."""
    layer = FusedRematLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
    (block,) = explain(layer, torch.zeros(2, 16, 64, requires_grad=True), code=True)
    return f"```text\n{block.code}```"
