"""The tables of presets, read from the graphs of the encoder, decoder and transformer blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bench.tables import Cell, markdown
from fused_remat.formats import FORMATS, NATIVE, split_name
from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import schedule
from fused_remat.policies import ALL_PRESETS, kept_names
from fused_remat.spec import nn_layer_spec, transformer_spec
from fused_remat.steps.node import Node

# Large enough for D**2 to stand for a GEMM and F = 4 D; sizes cancel out of the tables.
D, H, S = 1024, 8, 1
Shapes = Mapping[str, tuple[int, ...]]
SHAPES: Shapes = {
    "input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D), "memory": (D,),
    "cross.weight": (3 * D, D), "cross_proj.weight": (D, D),
    "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D),
}  # fmt: skip
#: Llama-3-8B's proportions: a quarter as many key heads, an MLP 3.5 times as wide.
_KEYS, _HIDDEN = D // 4, 7 * D // 2
TRANSFORMER_SHAPES: Shapes = {
    "input": (D,), "q.weight": (D, D), "k.weight": (_KEYS, D), "v.weight": (_KEYS, D),
    "proj.weight": (D, D), "gate.weight": (_HIDDEN, D), "fc1.weight": (_HIDDEN, D),
    "fc2.weight": (D, _HIDDEN),
}  # fmt: skip
_TRANSFORMERS = {
    "pre-norm, rotary (Llama)": ("pre", False),
    "pre-norm, heads normed (Qwen3)": ("pre", True),
    "post-norm, rotary": ("post", False),
    "before and after, heads normed (Gemma-3)": ("sandwich", True),
}


def block(norm_first: bool, *norms: float) -> Graph:
    """The encoder block's graph without dropout; with three norms' eps, the decoder block's."""
    return block_graph(nn_layer_spec(norm_first, H, D // H, "gelu", *([norms] if norms else [])))


def transformer(placement: str, qk_norm: bool) -> Graph:
    """A rotary, gated transformer block's graph without dropout."""
    spec = transformer_spec(
        "rms_norm", 1e-6, "silu", placement=placement, gated=True, num_heads=H,
        num_kv_heads=H // 4, head_dim=D // H, scale=1.0, window=(-1, 0), projection="split",
        rotary=True, qk_norm_eps=1e-6 if qk_norm else None,
    )  # fmt: skip
    return block_graph(spec)


def trained(graph: Graph) -> frozenset[str]:
    """All that a gradient is wanted of: inputs and weights."""
    weights = {n for n in graph.params if n.endswith((".weight", ".bias"))}
    return frozenset({*graph.inputs, *weights})


def rebuilt_nodes(
    graph: Graph, save: frozenset[str], needs_grad: frozenset[str] | None = None
) -> list[Node]:
    """What backward rebuilds where `save` is kept, unpacked or computed again."""
    wanted = trained(graph) if needs_grad is None else needs_grad
    plan = schedule(in_formats(graph, save), save, wanted, tiled=False)
    return [s.node for s in plan.backward if s.kind == "compute" and s.node is not None]


def products(graph: Graph, nodes: Iterable[Node], shapes: Shapes = SHAPES) -> int:
    """FLOPs of a token in the nodes' products, attention apart."""
    widths = graph.widths(shapes)
    return sum(n.flops(widths, shapes, S) for n in nodes if not n.per_sequence)


def row_bytes(name: str, widths: Mapping[str, int]) -> int:
    """Bytes of a token's kept name at 16 bits, or in its format with the scales."""
    base, stored = split_name(name)
    width = widths[base]
    return 2 * width if stored == NATIVE else FORMATS[stored].nbytes(1, width)


def in_widths(nbytes: float) -> str:
    """Bytes of a token in D."""
    return f"{nbytes / D:.3f}".rstrip("0").rstrip(".")


def in_order(graph: Graph, save: Iterable[str]) -> list[str]:
    """Names in the graph's order."""
    return sorted(save, key=lambda name: graph.names.index(split_name(name)[0]))


def kept_of(graph: Graph, preset: str) -> list[str]:
    """The input and the names that a preset keeps."""
    return ["input", *in_order(graph, kept_names(preset, graph))]


def _by_source(graph: Graph, amounts: Iterable[tuple[str, float]], unit: str) -> list[str]:
    """The sum over names, in D, for each input's tokens; "·M/S": of the memory's."""
    total = dict.fromkeys(graph.inputs, 0.0)
    for name, amount in amounts:
        total[graph.source[name]] += amount
    sums = zip(total.values(), ("", "·M/S"), strict=False)
    return [f"{in_widths(amount)}{unit}{of}" for amount, of in sums if amount]


def rebuilt(graph: Graph, preset: str, shapes: Shapes = SHAPES) -> str:
    """What backward rebuilds, as "16D² + attention"; D²·M/S is a product of the memory's tokens."""
    nodes = rebuilt_nodes(graph, kept_names(preset, graph))
    amounts = ((node.name, products(graph, [node], shapes) / D) for node in nodes)
    parts = _by_source(graph, amounts, "D²")
    parts += ["attention"] * any(node.per_sequence for node in nodes)
    return " + ".join(parts) or "pointwise only"


def cells(graph: Graph, preset: str, shapes: Shapes = SHAPES) -> list[Cell]:
    """What a preset keeps of a block, the bytes of that at 16 bits, and what backward rebuilds."""
    kept, widths = kept_of(graph, preset), graph.widths(shapes)
    amounts = ((split_name(name)[0], row_bytes(name, widths)) for name in kept)
    size = " + ".join(_by_source(graph, amounts, "D"))
    return [", ".join(kept), size, rebuilt(graph, preset, shapes)]


def quoted(preset: str) -> str:
    """A preset as its user writes it, and whether it is the default."""
    return f'`"{preset}"`' + " (default)" * (preset == "full")


def encoder_table() -> str:
    """The presets of the encoder block: what each keeps and rebuilds."""
    return _table()


def decoder_table() -> str:
    """The presets of the decoder block, besides the memory."""
    return _table(1e-5, 1e-5, 1e-5)


def _table(*norms: float) -> str:
    graphs = {name: block(name == "pre-norm", *norms) for name in ("pre-norm", "post-norm")}
    head = ["preset", *(h for name in graphs for h in (f"{name} keeps", "bytes", "rebuilds"))]
    rows = [
        [quoted(preset), *(cell for graph in graphs.values() for cell in cells(graph, preset))]
        for preset in ALL_PRESETS
    ]
    return markdown(head, rows)


def transformer_table() -> str:
    """The presets of the transformer block, kinds one below the other."""
    rows = [
        [name, f'`"{preset}"`', *cells(transformer(*of), preset, TRANSFORMER_SHAPES)]
        for name, of in _TRANSFORMERS.items()
        for preset in ALL_PRESETS
    ]
    return markdown(("norms and heads", "preset", "keeps", "bytes", "rebuilds"), rows)
