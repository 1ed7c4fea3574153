"""Configurations of Hugging Face models, published but for one: nothing is downloaded."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """A model's configuration as its card gives it."""

    config: str  # the class of transformers that the values are given to
    task: str  # the model that is made of it, a class of transformers with a loss of its own
    values: dict[str, Any]  # of config.json, without what is the class's default anyway

    @property
    def layers(self) -> int:
        return self.values["num_hidden_layers"]

    @property
    def longest(self) -> int:
        return self.values["max_position_embeddings"]


def _rope(theta: float) -> dict[str, Any]:
    return {"rope_theta": theta, "rope_type": "default"}


# huggingface.co/HuggingFaceTB/SmolLM-135M/blob/main/config.json, and so on
_SMOLLM = {
    "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152,
    "max_position_embeddings": 2048, "rope_parameters": _rope(1e4), "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "initializer_range": 0.041666666666666664, "tie_word_embeddings": True,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
# Qwen/Qwen2-1.5B
_QWEN2 = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28,
    "num_attention_heads": 12, "num_key_value_heads": 2, "vocab_size": 151936,
    "max_position_embeddings": 131072, "rope_parameters": _rope(1e6), "rms_norm_eps": 1e-6,
    "hidden_act": "silu", "use_sliding_window": False, "tie_word_embeddings": True,
    "bos_token_id": 151643, "eos_token_id": 151643,
}  # fmt: skip
# meta-llama/Meta-Llama-3-8B
_LLAMA3 = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 8192, "rope_parameters": _rope(5e5), "rms_norm_eps": 1e-5,
    "hidden_act": "silu", "tie_word_embeddings": False,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
# google-bert/bert-base-uncased
_BERT = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512,
    "type_vocab_size": 2, "hidden_act": "gelu", "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
# No published model, but a small Llama for a CPU: four query heads to a key head.
_LLAMA_512 = _LLAMA3 | {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096,
    "rope_parameters": _rope(1e4), "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

#: By name.
MODELS: dict[str, Published] = {
    "smollm-135m": Published("LlamaConfig", "LlamaForCausalLM", _SMOLLM),
    "qwen2-1.5b": Published("Qwen2Config", "Qwen2ForCausalLM", _QWEN2),
    "llama3-8b": Published("LlamaConfig", "LlamaForCausalLM", _LLAMA3),
    "llama-512": Published("LlamaConfig", "LlamaForCausalLM", _LLAMA_512),
    "bert-base": Published("BertConfig", "BertForMaskedLM", _BERT),
}


def tiny(model: Published) -> Published:
    """Return the same kind of model in sizes that show only whether it runs."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "bos_token_id": 0,
        "eos_token_id": 0, "max_position_embeddings": 64,
    }  # fmt: skip
    small = {key: value for key, value in sizes.items() if key in model.values}
    return dataclasses.replace(model, values=model.values | small)


def dropout_free(model: Published) -> Published:
    zeros = {key: 0.0 for key in model.values if "dropout" in key}
    return dataclasses.replace(model, values=model.values | zeros)
