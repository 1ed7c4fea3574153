"""Where the layers of each architecture have what a block needs. A new architecture is a new row.

Classes are known by name, so that nothing of transformers is imported; the numbers of a layer are
read from its modules at every call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A layer class, and the places of its parts: paths from the layer, by the block's names.

    Attributes:
        name: of the architecture.
        package, layer: the module and the name of the layer's class.
        containers: modules whose forward the block stands in for, and their classes' names.
        attention: the one of these that attends; it has `scaling`, `is_causal`, `config`.
        linears, norms, head_norms: of "q", "fc1", "norm1", "q_norm", ... by the block's names.
        norm, norm_class: "layer_norm" is `nn.LayerNorm`; else the class's name in `package`.
        offset: added to the norms' weights.
        placement, rotary: of the norms; whether heads are rotated.
        activation: the path of the MLP's.
        head_dim: the attribute of attention that has it.
        p_attention: the attribute of attention that is a probability, or a dropout module.
        dropouts: "p_residual1", "p_residual2": paths of dropout modules.
        softcap, window: attributes of attention (the window's may be its config's), "" for none.
        excluded: (path, attribute, what it means): a true one is not served.
    """

    name: str
    package: str
    layer: str
    containers: Mapping[str, str]
    attention: str
    linears: Mapping[str, str]
    norms: Mapping[str, str]
    activation: str
    norm: str = "rms_norm"
    norm_class: str = ""
    head_norms: Mapping[str, str] = field(default_factory=dict)
    offset: float = 0.0
    placement: str = "pre"
    rotary: bool = False
    head_dim: str = "head_dim"
    p_attention: str = "attention_dropout"
    dropouts: Mapping[str, str] = field(default_factory=dict)
    softcap: str = ""
    window: str = ""
    excluded: tuple[tuple[str, str, str], ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        """The module and the name of the layer's class."""
        return self.package, self.layer

    @property
    def gated(self) -> bool:
        return "gate" in self.linears


def at(layer: nn.Module, path: str) -> Any:
    """The submodule at `path`, None if there is none; the layer itself at "".

    >>> at(nn.Sequential(nn.ReLU()), "0"), at(nn.ReLU(), "mlp.up") is None
    (ReLU(), True)
    """
    module: Any = layer
    for step in path.split(".") if path else ():
        module = None if module is None else module._modules.get(step)
    return module


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


def _llama(name: str, prefix: str = "", **differences: Any) -> Architecture:
    """Llama's layer, or one like it whose classes' names begin with `prefix`."""
    prefix = prefix or name
    row: dict[str, Any] = {
        "name": name,
        "package": _package(prefix.lower()),
        "layer": f"{prefix}DecoderLayer",
        "containers": {"self_attn": f"{prefix}Attention", "mlp": f"{prefix}MLP"},
        "attention": "self_attn",
        "linears": _LLAMA_LINEARS,
        "norms": _PRE,
        "norm_class": f"{prefix}RMSNorm",
        "activation": "mlp.act_fn",
        "rotary": True,
    }
    return Architecture(**(row | differences))


def _bert(prefix: str) -> Architecture:
    return Architecture(
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
        head_dim="attention_head_size",
        p_attention="dropout",
        dropouts={"p_residual1": "attention.output.dropout", "p_residual2": "output.dropout"},
        excluded=(("", "add_cross_attention", "cross-attention"),),
    )


_SLIDING = {"window": "sliding_window"}
_GEMMA: dict[str, Any] = {"norms": _SANDWICH, "placement": "sandwich", "offset": 1.0, **_SLIDING}

#: By the module and the name of the layer's class.
ARCHITECTURES: dict[tuple[str, str], Architecture] = {
    row.key: row
    for row in (
        _llama("Llama"),
        _llama("Mistral", **_SLIDING),
        _llama("Qwen2", **_SLIDING),
        _llama("Qwen3", head_norms=_HEAD_NORMS, **_SLIDING),
        _llama("SmolLM3", **_SLIDING),
        _llama("Gemma-2", "Gemma2", softcap="attn_logit_softcapping", **_GEMMA),
        _llama("Gemma-3", "Gemma3", head_norms=_HEAD_NORMS, **_GEMMA),
        Architecture(
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
            p_attention="attn_dropout",
            dropouts={"p_residual1": "attn.resid_dropout", "p_residual2": "mlp.dropout"},
            excluded=(
                ("", "crossattention", "cross-attention"),
                ("attn", "reorder_and_upcast_attn", "reorder_and_upcast_attn"),
            ),
        ),
        _bert("Bert"),
        _bert("Roberta"),
        Architecture(
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
            dropouts={"p_residual1": "dropout", "p_residual2": "dropout"},
        ),
    )
}


def architecture_of(cls: type) -> Architecture | None:
    """The row of a layer class; None if it has none.

    >>> architecture_of(nn.Linear) is None
    True
    """
    return ARCHITECTURES.get((cls.__module__, cls.__qualname__))


def supported() -> str:
    """The architectures that there are, as messages list them.

    >>> supported()
    'Llama, Mistral, Qwen2, Qwen3, SmolLM3, Gemma-2, Gemma-3, GPT-2, BERT, RoBERTa, ViT'
    """
    return ", ".join(row.name for row in ARCHITECTURES.values())


#: Activation classes of transformers by the names of `steps.activation`.
ACTIVATIONS = {
    "GELUActivation": "gelu",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "SiLUActivation": "silu",
}
