"""docs/presets.md: what a LoRA step keeps and rebuilds, read from the block's graphs."""

from __future__ import annotations

import math

from bench.pages.presets import Kept, products, transformer
from bench.tables import markdown
from fused_remat.graph.schedule import kept_bytes
from fused_remat.policies import EXACT_PRESETS
from fused_remat.spec import LoraSpec, lora_params
from fused_remat.steps.linear import Linear

# Llama-3-8B's block: width and heads; a rank as they are used.
D, H, RANK = 4096, 32, 16
CASES = {
    "All weights trained": (),
    "LoRA on q and v": ("q", "v"),
    "LoRA on all seven": ("q", "k", "v", "proj", "gate", "fc1", "fc2"),
}


def _case(title: str, layers: tuple[str, ...]) -> str:
    """Return a table of the presets with updates of `layers`, or with all weights trained."""
    loras = tuple([LoraSpec(layer=layer, scale=1.0) for layer in layers])
    graph, shapes = transformer(D, H, loras=loras)
    shapes |= {"input": (1, 1, D), "norm1.weight": (D,), "norm2.weight": (D,)}
    wanted = frozenset({"input", *lora_params(len(layers))} if layers else shapes)
    for i, layer in enumerate(layers):
        out, width = shapes[f"{layer}.weight"]
        shapes |= {f"lora.{i}.A": (RANK, width), f"lora.{i}.B": (out, RANK)}
    elements = sum(math.prod(shapes[name]) for name in wanted - {"input"})
    gradients = elements * (4 if layers else 2) / 2**20  # adapters' in float32
    low = [f"{len(layers)} products with A"] if layers else []  # of all updates, for their B
    rows = []
    for preset in EXACT_PRESETS:
        found = Kept(graph, preset, shapes, wanted)
        again = {node.name: node for node in found.nodes}
        kept = kept_bytes(graph, found.save, wanted, shapes, 2)
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


def tables() -> str:
    """Return a table for each of `CASES`."""
    return "\n\n".join(_case(title, layers) for title, layers in CASES.items())
