"""The layer of a language model, and Hugging Face models, on kernels."""

import copy

import pytest
import torch
from hf_models import build, distance, inputs_of, reasons, step
from places import BF16, DEVICE, ON_GPU, assert_bits, at, deterministic, error_of, normal
from reference import EXACT_PRESETS

from fused_remat import FusedRematCausalLayer, convert, memory_report

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, D, H, HKV = at((4, 512, 1024, 16, 4), (2, 9, 32, 4, 2))
#: Llama's, Qwen3's and Gemma's: what is before the heads, around the halves, and seen.
KINDS = {
    "llama": {},
    "qwen3": {"qk_norm": True, "qkv_bias": True},
    "gemma": {
        "qk_norm": True,
        "placement": "sandwich",
        "activation": "gelu_tanh",
        "window": S // 3,
    },
}
KIND = pytest.mark.parametrize("kind", KINDS)


def layer_of(kind, dropout=0.0, policy="full"):
    torch.manual_seed(0)
    layer = FusedRematCausalLayer(
        D, H, 3 * D, dropout, kv_heads=HKV, policy=policy, backend="triton", **KINDS[kind]
    )
    return layer.to(DEVICE, BF16)


def rope(dtype=torch.float32):
    angles = torch.outer(
        torch.arange(S, device=DEVICE), 10.0 ** -torch.arange(D // H // 2).to(DEVICE)
    )
    return angles.cos().to(dtype), angles.sin().to(dtype)


def run(layer, forward, x, dy, dtype=BF16):
    """Output, and gradients of the input and every parameter."""
    x = x.detach().to(dtype).requires_grad_()
    torch.manual_seed(1)
    y = forward(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy.to(dtype))]


@KIND
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_error_is_at_most_one_and_a_half_times_plain_pytorchs(kind, policy):
    layer = layer_of(kind, policy=policy)
    x, dy = normal(BF16, B, S, D), normal(BF16, B, S, D)
    exact = copy.deepcopy(layer).double()
    exact.backend = "eager"
    truth = run(exact, lambda x: exact(x, rope(torch.float64)), x, dy, torch.float64)
    plain = run(layer, lambda x: layer.stock.forward(layer, x, *rope()), x, dy)
    found = run(layer, lambda x: layer(x, rope()), x, dy)
    biggest = max(g.norm() for g in truth[1:])
    for mine, theirs, true in zip(found, plain, truth, strict=True):
        if true.norm() > 1e-3 * biggest:  # else all cancellation
            # Besides PyTorch's own, a sixth of a rounding.
            assert error_of(mine, true) <= 1.5 * error_of(theirs, true) + 1e-3


@KIND
def test_presets_have_the_same_bits_under_deterministic_algorithms(kind):
    x, dy = normal(BF16, B, S, D), normal(BF16, B, S, D)
    with deterministic():
        found = []
        for policy in at(EXACT_PRESETS, ("full", "fast", "none")):
            layer = layer_of(kind, 0.1, policy)
            found.append(run(layer, lambda x, layer=layer: layer(x, rope()), x, dy))
    for other in found[1:]:
        assert_bits(other, found[0])


@KIND
def test_kept_bytes_are_the_prediction(kind):
    x = normal(BF16, B, S, D).requires_grad_()
    for policy in at(EXACT_PRESETS, ("fast",)):
        (row,) = memory_report(layer_of(kind, 0.1, policy), x, rope()).layers[:1]
        tables = sum(table.nbytes for table in rope())  # the caller's own, which are not predicted
        assert row.kept_bytes == row.predicted_bytes + tables


@pytest.mark.parametrize("padded", [False, True])
def test_a_hugging_face_model_trains_as_it_does_unconverted(padded):
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=D, intermediate_size=3 * D, num_attention_heads=H, num_key_value_heads=HKV,
        num_hidden_layers=2, vocab_size=1000 if ON_GPU else 50, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    stock = transformers.LlamaForCausalLM(config).to(DEVICE, BF16).train()
    fused = convert(copy.deepcopy(stock), policy="lean", backend="triton", loss=True)
    tokens = torch.randint(config.vocab_size, (B, S), device=DEVICE)
    mask = torch.ones_like(tokens)
    mask[0, : S // 2 if padded else 0] = 0
    inputs = {"input_ids": tokens, "attention_mask": mask, "labels": tokens.where(mask > 0, -100)}
    losses = []
    for model in (stock, fused):
        loss = model(**inputs, use_cache=False).loss
        loss.backward()
        losses.append(loss.item())
    assert abs(losses[0] - losses[1]) < 2e-2  # roundings of logits to 16 bits
    for (name, p), q in zip(stock.named_parameters(), fused.parameters(), strict=True):
        difference = (p.grad.double() - q.grad.double()).norm() / p.grad.double().norm()
        assert difference < 5e-2, name  # of two results in 16 bits, each some roundings off


@pytest.mark.skipif(ON_GPU, reason="in float32 products and attention are ATen's there")
@pytest.mark.parametrize("name", ["gemma3", "gpt2"])
def test_transposed_weights_strided_tables_and_masks(name):
    model, given = build(name, torch.float32), inputs_of(name)
    expected = step(model, given)
    convert(model, policy="lean", backend="triton")
    with reasons() as why:
        got = step(model, given)
    assert not why
    # Two float32 computations of one thing.
    assert max(distance(got, expected).values()) < 3e-5
