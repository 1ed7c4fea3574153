"""Generic small configurations for transformers, by the names of a configuration's attributes.

No architecture has an entry of its own: each size goes to whichever attributes bear one of its
names, also in configurations within configurations. Width 256, two layers or one of each type, no
dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

WIDTH, LAYERS, HEADS, EXPERTS, VOCAB, POSITIONS = 256, 2, 4, 4, 96, 256
#: Ids from here to VOCAB are plain tokens: none marks padding, an image or a sound.
FIRST = 24
_HEAD = WIDTH // HEADS
_MAMBA_HEADS = 16
#: Sizes, each with the names of the attributes that get it.
_NAMES: list[tuple[int, str]] = [
    (WIDTH, """hidden_size d_model n_embd dim embed_dim embedding_size true_hidden_size
        intra_bottleneck_size word_embed_proj_dim lru_width d_latents prediction_head_size
        ple_embed_dim backbone_hidden_size entity_emb_size embedding_rank emb_dim
        mamba_d_ssm"""),
    (2 * WIDTH, """intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim n_inner dim_ff dff
        hidden_dim ffn_hidden_size intermediate_size_mlp dense_intermediate_size"""),
    (WIDTH // 2, """moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
        shared_intermediate_size shared_experts_intermediate_size kv_lora_rank q_lora_rank
        moe_shared_expert_intermediate_size o_lora_rank router_hidden_size ffn_size"""),
    (LAYERS, """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers depth
        num_decoder_layers num_encoder_layers num_layers_per_stack num_self_attends_per_block
        num_key_value_heads num_kv_heads n_groups mamba_n_groups mamba_ngroups n_group
        expert_layer_period attn_layer_period o_groups num_global_key_value_heads
        swa_num_key_value_heads t2u_encoder_layers t2u_decoder_layers speech_encoder_layers"""),
    (HEADS, """num_attention_heads n_head n_heads num_heads encoder_attention_heads attention_heads
        decoder_attention_heads linear_num_key_heads linear_num_value_heads index_n_heads
        num_self_attention_heads num_cross_attention_heads swa_num_attention_heads
        num_query_groups num_landmarks"""),
    (EXPERTS, "num_experts num_local_experts n_routed_experts moe_num_experts zero_expert_num"),
    (2, "num_experts_per_tok top_k_experts moe_topk moe_k index_topk_blocks"),
    (1, """topk_group num_shared_experts n_shared_experts moe_num_shared_experts
        first_k_dense_replace attn_layer_offset expert_layer_offset mamba_expand expand"""),
    (_HEAD, """head_dim d_kv v_head_dim global_head_dim linear_key_head_dim linear_value_head_dim
        qk_nope_head_dim dim_head index_head_dim swa_head_dim swa_v_head_dim attention_head_dim
        attention_hidden_size"""),
    (_HEAD // 2, "qk_rope_head_dim rotary_dim laurel_rank hidden_size_per_layer_input"),
    (_MAMBA_HEADS, "mamba_n_heads mamba_num_heads n_mamba_heads"),
    (WIDTH // _MAMBA_HEADS, "mamba_d_head mamba_head_dim mamba_headdim"),
    (16, """mamba_d_state state_size ssm_state_size sliding_window attention_chunk_size chunk_size
        attention_window_size window_size mamba_chunk_size index_topk block_size
        index_block_size attention_window"""),
    (VOCAB, """vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input
        entity_vocab_size unpadded_vocab_size ngram_vocab_size_base t2u_vocab_size
        char_vocab_size unit_hifi_gan_vocab_size encoder_hash_byte_group_vocab"""),
    (POSITIONS, """max_position_embeddings n_positions n_ctx max_seq_len max_source_positions
        max_target_positions context_length max_encoder_position_embeddings
        max_decoder_position_embeddings original_max_position_embeddings"""),
    (0, "num_kv_shared_layers zero_expert_num"),
]  # fmt: skip
_SIZES = {name: size for size, names in _NAMES for name in names.split()}
#: Of latent attention, whose heads share no keys, and are described by their rotary part.
_LATENT = {"num_key_value_heads": HEADS, "head_dim": _HEAD // 2}
_MARKS = ("_token_id", "_token_index")
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}


def arguments(config: type, **given: Any) -> dict[str, Any]:
    """Return arguments of a configuration class: generic sizes, but for those given."""
    sample: Any = config()
    usuals, found = sample.to_dict(), dict[str, Any]()
    sizes = _SIZES | (_LATENT if "kv_lora_rank" in usuals else {})
    types = _types(usuals.get("layer_types") or usuals.get("layers_block_type") or ())
    if usuals.get("num_kv_shared_layers"):
        found["num_kv_shared_layers"], types = len(types), types * 2
    for name, usual in usuals.items():
        inner = getattr(sample, name, None) if isinstance(usual, dict) else None
        if hasattr(inner, "model_type"):
            found[name] = {"model_type": inner.model_type, **arguments(type(inner))}
        elif name in ("layer_types", "layers_block_type") and types:
            found[name] = types
        elif isinstance(usual, list) and len(usual) == usuals.get("num_hidden_layers", 0) > 2:
            count = len(types) or LAYERS
            found[name] = [sizes[name]] * count if name in sizes else usual[:count]
        elif name in sizes and isinstance(usual, int | None) and not isinstance(usual, bool):
            found.setdefault(name, sizes[name])
        elif name.endswith(_MARKS) and isinstance(usual, int | None):
            mark = 3 + sum(other.endswith(_MARKS) for other in found)
            found[name] = _SPECIAL.get(name, mark % FIRST)
        elif isinstance(usual, float) and any(part in name for part in ("drop", "mask_")):
            found[name] = 0.0
        elif name == "attention_types":
            found[name] = [[kinds, LAYERS // len(kinds)] for kinds, _ in usual]
    if types:
        found["num_hidden_layers"] = len(types)
    return found | {name: value for name, value in given.items() if name in usuals}


def _types(usual: Sequence[str]) -> list[str]:
    """Return types in their usual order up to the first of the last type, two in a row at most."""
    found = list[str]()
    for kind in usual:
        if found[-2:] != [kind, kind]:
            found.append(kind)
        if set(found) == set(usual) and len(found) >= LAYERS:
            break
    return found
