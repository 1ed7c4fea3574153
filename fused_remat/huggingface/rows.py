"""The layouts of layers of transformers, by architecture: their blocks need no trace.

A new architecture is a new entry. Classes are known by name, so that nothing of transformers is
imported; the numbers of a layer are read from its modules at every call.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.huggingface.call import describe, rotates
from fused_remat.layer_specs import transformer_spec
from fused_remat.layers.converted import ConvertedLayer, class_of
from fused_remat.layers.read import LayerMap


def _package(name: str) -> str:
    return f"transformers.models.{name}.modeling_{name}"


_LLAMA_LINEARS = {
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "proj": "self_attn.o_proj",
    "gate": "mlp.gate_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
_PRE = {"norm1": "input_layernorm", "norm2": "post_attention_layernorm"}
_SANDWICH = {
    "norm1": "input_layernorm",
    "post1": "post_attention_layernorm",
    "norm2": "pre_feedforward_layernorm",
    "post2": "post_feedforward_layernorm",
}
_HEAD_NORMS = {"q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm"}
_NUMBERS = {"head_dim": "head_dim", "dropout": "attention_dropout"}


def _llama(name: str, prefix: str = "", **differences: Any) -> LayerMap:
    """Return the layout of Llama's layer, or of one whose classes' names begin with `prefix`."""
    prefix = prefix or name
    layer_map: dict[str, Any] = {
        "describe": describe,
        "name": name,
        "package": _package(prefix.lower()),
        "layer": f"{prefix}DecoderLayer",
        "containers": {"self_attn": f"{prefix}Attention", "mlp": f"{prefix}MLP"},
        "attention": "self_attn",
        "linears": _LLAMA_LINEARS,
        "norms": _PRE,
        "norm": "rms_norm",
        "norm_class": f"{prefix}RMSNorm",
        "activation": "mlp.act_fn",
        "rotary": True,
        "numbers": _NUMBERS,
    }
    return LayerMap(**(layer_map | differences))


def _bert(prefix: str) -> LayerMap:
    return LayerMap(
        describe=describe,
        name="BERT" if prefix == "Bert" else "RoBERTa",
        package=_package(prefix.lower()),
        layer=f"{prefix}Layer",
        containers={
            "attention": f"{prefix}Attention",
            "attention.self": f"{prefix}SelfAttention",
            "attention.output": f"{prefix}SelfOutput",
            "intermediate": f"{prefix}Intermediate",
            "output": f"{prefix}Output",
        },
        attention="attention.self",
        linears={
            "q": "attention.self.query",
            "k": "attention.self.key",
            "v": "attention.self.value",
            "proj": "attention.output.dense",
            "fc1": "intermediate.dense",
            "fc2": "output.dense",
        },
        norms={"norm1": "attention.output.LayerNorm", "norm2": "output.LayerNorm"},
        norm="layer_norm",
        placement="post",
        activation="intermediate.intermediate_act_fn",
        numbers={"head_dim": "attention_head_size", "dropout": "dropout"},
        dropouts={"residual1": "attention.output.dropout", "residual2": "output.dropout"},
        excluded=(("", "add_cross_attention", "cross-attention"),),
    )


_SLIDING: dict[str, Any] = {"numbers": {**_NUMBERS, "window": "sliding_window"}}
_CAPPED: dict[str, Any] = {"numbers": {**_SLIDING["numbers"], "softcap": "attn_logit_softcapping"}}
_GEMMA: dict[str, Any] = {"norms": _SANDWICH, "placement": "sandwich", "offset": 1.0, **_SLIDING}

#: By the module and the name of the layer's class.
ARCHITECTURES: dict[tuple[str, str], LayerMap] = {
    (layer_map.package, layer_map.layer): layer_map
    for layer_map in (
        _llama("Llama"),
        _llama("Mistral", **_SLIDING),
        _llama("Qwen2", **_SLIDING),
        _llama("Qwen3", head_norms=_HEAD_NORMS, **_SLIDING),
        _llama("SmolLM3", **_SLIDING),
        _llama("Gemma-2", "Gemma2", **_GEMMA | _CAPPED),
        _llama("Gemma-3", "Gemma3", head_norms=_HEAD_NORMS, **_GEMMA),
        LayerMap(
            describe=describe,
            name="GPT-2",
            package=_package("gpt2"),
            layer="GPT2Block",
            containers={"attn": "GPT2Attention", "mlp": "GPT2MLP"},
            attention="attn",
            linears={
                "qkv": "attn.c_attn",
                "proj": "attn.c_proj",
                "fc1": "mlp.c_fc",
                "fc2": "mlp.c_proj",
            },
            norms={"norm1": "ln_1", "norm2": "ln_2"},
            norm="layer_norm",
            activation="mlp.act",
            numbers={"head_dim": "head_dim", "dropout": "attn_dropout"},
            dropouts={"residual1": "attn.resid_dropout", "residual2": "mlp.dropout"},
            excluded=(
                ("", "crossattention", "cross-attention"),
                ("attn", "reorder_and_upcast_attn", "reorder_and_upcast_attn"),
            ),
        ),
        _bert("Bert"),
        _bert("Roberta"),
        LayerMap(
            describe=describe,
            name="ViT",
            package=_package("vit"),
            layer="ViTLayer",
            containers={"attention": "ViTAttention", "mlp": "ViTMLP"},
            attention="attention",
            linears={
                "q": "attention.q_proj",
                "k": "attention.k_proj",
                "v": "attention.v_proj",
                "proj": "attention.o_proj",
                "fc1": "mlp.fc1",
                "fc2": "mlp.fc2",
            },
            norms={"norm1": "layernorm_before", "norm2": "layernorm_after"},
            norm="layer_norm",
            activation="mlp.activation_fn",
            numbers=_NUMBERS,
            dropouts={"residual1": "dropout", "residual2": "dropout"},
        ),
    )
}


def architecture_of(cls: type) -> LayerMap | None:
    """Return the layout of a layer class; None without an entry."""
    return ARCHITECTURES.get((cls.__module__, cls.__qualname__))


class HuggingFaceLayer(ConvertedLayer):
    """Mixed in before a layer class of transformers by `fused_class`."""

    _owner = "transformers' own"

    def _example(self) -> Graph:
        layer_map, modules = self._map, self._map.modules(self)
        spec = transformer_spec(
            layer_map.norm, 1e-6, "relu", placement=layer_map.placement,
            gated="gate" in layer_map.linears, num_heads=1, num_kv_heads=1, head_dim=1, scale=1.0,
            projection="split" if "q" in layer_map.linears else "packed",
            rotary=rotates(modules[layer_map.attention], layer_map),
            qk_norm_eps=1e-6 if layer_map.head_norms else None,
        )  # fmt: skip
        return block_graph(spec)

    def _heads(self) -> dict[str, int]:
        layer_map = self._map
        modules = layer_map.modules(self)
        width = int(getattr(modules[layer_map.attention], layer_map.numbers["head_dim"]))
        kinds = {"heads": "q", "key and value heads": "k"}
        return {
            what: modules[layer_map.linears[name]].weight.shape[0] // width
            for what, name in kinds.items()
            if name in layer_map.linears
        }


def fused_class(stock: type[nn.Module]) -> type[HuggingFaceLayer] | None:
    """Return the class that replaces a layer class of transformers; None without an entry.

    It has the stock class's name, for wrap lists (`_no_split_modules`), and is a subclass, for
    transformers' recorders.
    """
    layer_map = architecture_of(stock)
    if layer_map is None:
        return None
    own = staticmethod(fused_class)
    return class_of(stock, HuggingFaceLayer, _map=layer_map, _class_for=own)
