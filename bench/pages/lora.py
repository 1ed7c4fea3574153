"""docs/presets.md: what a LoRA step keeps and rebuilds, read from the block's graphs."""

from __future__ import annotations

import math

from bench.tables import markdown
from fused_remat.graph.build import block_graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import kept_bytes, schedule
from fused_remat.policies import ALL_PRESETS, kept_names
from fused_remat.spec import BlockSpec, LoraSpec, lora_params, transformer_spec
from fused_remat.steps.linear import Linear

# Llama-3-8B's block: width, heads and their width, the MLP's; a rank as they are used.
D, H, KV, E, F = 4096, 32, 8, 128, 14336
RANK, TOKENS = 16, 1
CASES = {
    "All weights trained": None,
    "LoRA on q and v": ("q", "v"),
    "LoRA on all seven": ("q", "k", "v", "proj", "gate", "fc1", "fc2"),
}


def _spec(layers: tuple[str, ...]) -> BlockSpec:
    """A pre-norm block with updates of `layers`, without dropout."""
    return transformer_spec(
        "rms_norm", 1e-5, "silu", gated=True, num_heads=H, num_kv_heads=KV, head_dim=E,
        scale=E**-0.5, window=(-1, 0), projection="split", rotary=True,
        loras=tuple([LoraSpec(layer=layer, scale=1.0) for layer in layers]),
    )  # fmt: skip


def shapes(layers: tuple[str, ...] | None) -> dict[str, tuple[int, ...]]:
    """Of the input and of every weight."""
    linears = _spec(()).linear_shapes(D, F)
    found: dict[str, tuple[int, ...]] = {"input": (1, TOKENS, D), "norm1.weight": (D,)}
    found |= {"norm2.weight": (D,), **{f"{name}.weight": shape for name, shape in linears.items()}}
    for i, layer in enumerate(layers or ()):
        out, width = linears[layer]
        found |= {f"lora.{i}.A": (RANK, width), f"lora.{i}.B": (out, RANK)}
    return found


def _wants(layers: tuple[str, ...] | None) -> frozenset[str]:
    if layers is not None:
        return frozenset({"input", *lora_params(len(layers))})
    return frozenset(shapes(None))


def _rows(layers: tuple[str, ...] | None) -> list[list[str]]:
    graph, of, needs_grad = block_graph(_spec(layers or ())), shapes(layers), _wants(layers)
    widths = graph.widths(of)
    whole = sum(node.flops(widths, of, 1) for node in graph.nodes if not node.per_sequence)
    updated = [n for n in graph.nodes if isinstance(n, Linear) and n.updates]
    low = [f"{len(layers)} products with A"] if layers else []  # of all updates, for their B
    rows = []
    for preset in ALL_PRESETS:
        save = kept_names(preset, graph)
        packed = in_formats(graph, save)
        plan = schedule(packed, save, needs_grad, tiled=False)
        steps = [s.node for s in plan.backward if s.kind == "compute" and s.node is not None]
        again = {node.name: node for node in steps}
        nodes = [again[node.name] for node in graph.nodes if node.name in again]
        kept = kept_bytes(packed, save, needs_grad, of, 2)
        names = [name for name in kept if "." not in name]
        products = sum(n.flops(widths, of, 1) for n in nodes if not n.per_sequence)
        apart = [update for n in updated if n.name not in again for update in n.updates]
        products += sum(2 * math.prod(of[update.a]) for update in apart)
        shown = [n.label if n.reads_quantized else n.name for n in nodes]
        size = f"{sum(kept.values()) / TOKENS / 1024:.1f}"
        rebuilt = ", ".join([*shown, *low]) or "nothing"
        share = f"{products / whole:.0%}"
        rows.append([f'`"{preset}"`', ", ".join(names), size, rebuilt, share])
    return rows


def _gradients(layers: tuple[str, ...] | None) -> float:
    """MiB of weight gradients of a block: at 16 bits, adapters' in float32."""
    sizes = shapes(layers)
    elements = sum(math.prod(sizes[name]) for name in _wants(layers) - {"input"})
    return elements * (2 if layers is None else 4) / 2**20


def tables() -> str:
    """A table for each of `CASES`."""
    head = ("preset", "keeps", "KiB a token", "rebuilds", "of forward's products")
    parts = []
    for title, layers in CASES.items():
        gradients = f"(weight gradients of a block: {_gradients(layers):.1f} MiB)"
        parts.append(f"**{title}** {gradients}\n\n{markdown(head, _rows(layers))}")
    return "\n\n".join(parts)
