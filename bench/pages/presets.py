"""The tables of presets, read from the graphs of the encoder, decoder and transformer blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from bench.tables import markdown
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


def block(norm_first: bool) -> Graph:
    """The encoder block's graph without dropout."""
    return block_graph(nn_layer_spec(norm_first, H, D // H, "gelu"))


def decoder(norm_first: bool) -> Graph:
    """The decoder block's graph without dropout."""
    return block_graph(nn_layer_spec(norm_first, H, D // H, "gelu", (1e-5,) * 3))


def trained(graph: Graph) -> frozenset[str]:
    """All that a gradient is wanted of: inputs and weights."""
    weights = {n for n in graph.params if n.endswith((".weight", ".bias"))}
    return frozenset({*graph.inputs, *weights})


def rebuilt_nodes(graph: Graph, save: frozenset[str]) -> list[Node]:
    """What backward rebuilds where `save` is kept, unpacked or computed again."""
    plan = schedule(in_formats(graph, save), save, trained(graph), tiled=False)
    return [s.node for s in plan.backward if s.kind == "compute" and s.node is not None]


def row_bytes(name: str, widths: Mapping[str, int]) -> int:
    """Bytes of a token's kept name at 16 bits, or in its format with the scales."""
    base, stored = split_name(name)
    if stored == NATIVE:
        return 2 * widths[base]
    return FORMATS[stored].nbytes(1, widths[base])


def in_widths(nbytes: float) -> str:
    """Bytes of a token in D."""
    return f"{nbytes / D:.3f}".rstrip("0").rstrip(".")


def kept_of(graph: Graph, preset: str) -> list[str]:
    """The input and the names that a preset keeps, in the graph's order."""
    save = kept_names(preset, graph)
    order = {name: i for i, name in enumerate(graph.names)}
    return ["input", *sorted(save, key=lambda name: order[split_name(name)[0]])]


def rebuilt(graph: Graph, preset: str, shapes: Shapes = SHAPES) -> str:
    """What backward rebuilds, as "16D² + attention"; D²·M/S is a product of the memory's tokens."""
    nodes = rebuilt_nodes(graph, kept_names(preset, graph))
    widths = graph.widths(shapes)

    def products(nodes: Iterable[Node]) -> int:
        return sum(n.flops(widths, shapes, S) for n in nodes if not n.per_sequence) // D**2

    parts = []
    for source, unit in zip(graph.inputs, ("D²", "D²·M/S"), strict=False):
        count = products(n for n in nodes if graph.source[n.name] == source)
        parts += [f"{count}{unit}"] if count else []
    parts += ["attention"] * any(n.per_sequence for n in nodes)
    return " + ".join(parts) or "pointwise only"


def kept_bytes(graph: Graph, preset: str, shapes: Shapes = SHAPES) -> str:
    """Bytes of a token at 16 bits, as "6D + 4D·M/S"."""
    widths, kept = graph.widths(shapes), kept_of(graph, preset)
    parts = []
    for source, unit in zip(graph.inputs, ("D", "D·M/S"), strict=False):
        mine = [n for n in kept if graph.source[split_name(n)[0]] == source]
        count = sum(row_bytes(name, widths) for name in mine)
        parts += [f"{in_widths(count)}{unit}"] if count else []
    return " + ".join(parts)


def cells(graph: Graph, preset: str, shapes: Shapes = SHAPES) -> list[str]:
    """What a preset keeps of a block, the bytes of that, and what backward rebuilds."""
    kept = ", ".join(kept_of(graph, preset))
    return [kept, kept_bytes(graph, preset, shapes), rebuilt(graph, preset, shapes)]


def _table(pre: Graph, post: Graph) -> str:
    head = (
        "preset", "pre-norm keeps", "bytes", "rebuilds", "post-norm keeps", "bytes", "rebuilds"
    )  # fmt: skip
    rows = [
        [f'`"{preset}"`' + " (default)" * (preset == "full"), *cells(pre, preset),
         *cells(post, preset)]
        for preset in ALL_PRESETS
    ]  # fmt: skip
    return markdown(head, rows)


def rung_table() -> str:
    """The presets of the encoder block: what each keeps and rebuilds."""
    return _table(block(True), block(False))


def decoder_rung_table() -> str:
    """The presets of the decoder block, besides the memory."""
    return _table(decoder(True), decoder(False))


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


def transformer(placement: str, qk_norm: bool) -> Graph:
    """A rotary, gated transformer block's graph without dropout."""
    spec = transformer_spec(
        "rms_norm", 1e-6, "silu", placement=placement, gated=True, num_heads=H,
        num_kv_heads=H // 4, head_dim=D // H, scale=1.0, window=(-1, 0), projection="split",
        rotary=True, qk_norm_eps=1e-6 if qk_norm else None,
    )  # fmt: skip
    return block_graph(spec)


def transformer_table() -> str:
    """The presets of the transformer block, kinds one below the other."""
    rows = [
        [name, f'`"{preset}"`', *cells(transformer(*kind), preset, TRANSFORMER_SHAPES)]
        for name, kind in _TRANSFORMERS.items()
        for preset in ALL_PRESETS
    ]
    return markdown(("norms and heads", "preset", "keeps", "bytes", "rebuilds"), rows)
