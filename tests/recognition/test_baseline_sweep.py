"""A converted model is never worse than its own checkpointing: `bench architectures` as tests."""

import pytest
from tiers import exhaustive

from bench.commands.architectures import VARIANTS, measured
from bench.subjects.architectures import ARCHITECTURES

TOKENS = 128
#: Forty cases that stand for the others in `make test`: each kind of layer, and each variant.
CHOSEN = {
    "bare": """
        LlamaForCausalLM Qwen3ForCausalLM Gemma2ForCausalLM Gemma4ForCausalLM GPT2LMHeadModel
        GPTNeoXForCausalLM BloomForCausalLM OPTForCausalLM CohereForCausalLM Olmo2ForCausalLM
        MixtralForCausalLM GptOssForCausalLM DeepseekV3ForCausalLM Llama4ForCausalLM
        Qwen3NextForCausalLM JambaForCausalLM Mamba2ForCausalLM RwkvForCausalLM
        BertForMaskedLM DebertaV2ForMaskedLM ModernBertForMaskedLM AlbertForMaskedLM
        XLNetLMHeadModel T5ForConditionalGeneration BartForConditionalGeneration
        vit dinov2 clip_vision swin nanogpt complex_rotary adaln_dit""",
    "cache": "LlamaForCausalLM Qwen3NextForCausalLM",
    "router": "MixtralForCausalLM Qwen3MoeForCausalLM",
    "lora": "LlamaForCausalLM MixtralForCausalLM T5ForConditionalGeneration",
    "dora": "LlamaForCausalLM",
}
#: What is still worse, by name and variant, and how many times as large as with checkpointing it
#: may be: bytes that are kept, and the peaks of a step and of the first one. Remove an entry with
#: its fault. Peaks also depend on the library that computes a product, which each process times.
KNOWN = {
    ("JetMoeForCausalLM", "bare"): {"first_peak": 2.8},
    ("JetMoeForCausalLM", "cache"): {"first_peak": 2.4},
    ("JetMoeForCausalLM", "lora"): {"first_peak": 4.6},
    # The batch is tried as the second dimension, with sizes that the layer pads.
    ("LongT5ForConditionalGeneration", "bare"): {"first_peak": 14.0},
    ("ProphetNetForCausalLM", "bare"): {"first_peak": 13.5},
    ("ProphetNetForCausalLM", "cache"): {"first_peak": 13.5},
    ("ProphetNetForCausalLM", "lora"): {"first_peak": 13.5},
    ("ProphetNetForConditionalGeneration", "bare"): {"first_peak": 13.5},
    # Inputs and outputs of several ReLUs are held at once.
    ("MobileBertForMaskedLM", "bare"): {"peak": 1.3},
    ("MobileBertForMaskedLM", "lora"): {"peak": 1.2},
    # A replayed submodule gives the gradients of all its experts at its end.
    ("PhimoeForCausalLM", "bare"): {"peak": 1.1},
    ("PhimoeForCausalLM", "cache"): {"peak": 1.1},
    # Modulations of labels that are dropped at random are kept.
    ("dit", "bare"): {"kept": 1.1},
    ("dit", "lora"): {"kept": 1.1},
    # transformers checkpoints a stage, which keeps one input for several layers. Swin is traced in
    # its second step, since its first one changes the sizes of its windows.
    ("swin", "bare"): {"kept": 2.3},
    ("swin", "lora"): {"kept": 2.6, "peak": 11.5},
    ("swin", "nf4"): {"kept": 1.3},
    ("swinv2", "bare"): {"kept": 2.3},
    ("swinv2", "lora"): {"kept": 2.6},
    ("swinv2", "nf4"): {"kept": 1.4},
    # Small images: 12 bytes for each parameter of a layer are more than a step takes.
    ("timm_vit", "bare"): {"first_peak": 7.0},
    ("timm_vit", "lora"): {"first_peak": 12.8},
    ("torchvision_vit", "bare"): {"first_peak": 6.7},
    ("torchvision_vit", "lora"): {"peak": 1.1, "first_peak": 14.0},
    ("ApertusForCausalLM", "lora"): {"peak": 1.2},
    ("BeamForCausalLM", "lora"): {"peak": 1.2},
    ("Gemma4ForCausalLM", "lora"): {"peak": 1.2},
    ("Gemma4ForConditionalGeneration", "lora"): {"peak": 1.2},
    ("Gemma4UnifiedForCausalLM", "lora"): {"peak": 1.2},
    ("Gemma4UnifiedForConditionalGeneration", "lora"): {"peak": 1.2},
    ("HYV3ForCausalLM", "lora"): {"peak": 1.2},
    ("clip_vision", "lora"): {"peak": 1.2},
    ("openai_whisper", "lora"): {"peak": 1.2},
    ("openai_whisper", "nf4"): {"peak": 1.2},
    ("transformer_2d", "lora"): {"peak": 1.2},
    # Its states, which a step writes, are no activations.
    ("RecurrentGemmaForCausalLM", "nf4"): {"kept": 1.0, "peak": 1.2},
}
CASES = [
    (pytest.param if name in CHOSEN.get(variant, "").split() else exhaustive)(name, variant)
    for variant in VARIANTS
    for name in ARCHITECTURES
]


@pytest.mark.parametrize(("name", "variant"), CASES)
def test_never_worse_than_checkpointing(name, variant):
    row = measured(name, variant, TOKENS, rounds=0)
    if "absent" in row:
        pytest.skip(row["absent"])
    known = KNOWN.get((name, variant), {})
    assert {check: t for check, t in row["violations"].items() if check not in known} == {}
    for check, text in row["violations"].items():
        assert float(text.partition("×")[0]) <= known[check], text
