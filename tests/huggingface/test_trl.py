"""`integrations.trl`: TRL's trainers log and learn the same with its head and with ours."""

import functools
import importlib.metadata
import warnings

import pytest
import torch

pytest.importorskip("trl")
peft = pytest.importorskip("peft")

import transformers  # noqa: E402
from hf_models import VOCAB, build, inputs_of  # noqa: E402
from tiers import exhaustive  # noqa: E402
from trl.trainer import utils  # noqa: E402
from trl_runs import KINDS, run  # noqa: E402

from fused_remat import FusedRematWarning, conversion, convert  # noqa: E402
from fused_remat.integrations.trl import fused_lm_head  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
#: What each head computes in addition to log-probabilities, with gradients for GRPO's entropy.
OPTIONS = {
    "DPO": {"use_weighting": True},
    "GRPO": {"temperature": 0.8, "entropy_coef": 0.3, "beta": 0.1},
    "RLOO": {"temperature": 1.2},
}
LORA = functools.partial(peft.LoraConfig, r=4, target_modules=["q_proj", "up_proj"])


def compare_runs(kind, folder, ours=None, **options):
    """Two steps with TRL's head, and with ours, which may not call TRL's."""
    _, logged, parameters = run(kind, folder / "a", **options)
    with fused_lm_head():
        utils._ChunkedLogProbFunction.stock = None
        made, other, found = run(kind, folder / "b", prepare=ours, **options)
    assert utils._ChunkedLogProbFunction.__module__ == "trl.kernels.chunked_logprob"
    assert len(logged) == len(other) == 2
    for theirs, mine in zip(logged, other, strict=True):
        timed = {name for name in theirs if "time" in name or "duration" in name}
        # Of float32; rewards are differences of sums of a few log-probabilities of 4.
        for name in theirs.keys() - timed:
            assert mine[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
    torch.testing.assert_close(found, parameters, rtol=1e-4, atol=1e-5)
    assert any(entry["grad_norm"] > 1e-3 for entry in logged)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_trainers(kind, tmp_path):
    compare_runs(kind, tmp_path, **OPTIONS.get(kind, {}))


@pytest.mark.composes("TRL's trainers, `integrations.trl`", "converted layers, with LoRA")
@pytest.mark.parametrize("kind", ["GRPO", *map(exhaustive, ("SFT", "DPO", "KTO", "RLOO"))])
def test_converted_layers_with_lora(kind, tmp_path):
    given = {**OPTIONS.get(kind, {}), "peft_config": LORA()}
    made = compare_runs(kind, tmp_path, lambda model: convert(model, policy="lean"), **given)
    assert "LlamaDecoderLayer: 4 fused training calls" in str(conversion(made.model))


def granite(dtype=torch.float32):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    config = transformers.GraniteConfig(
        vocab_size=VOCAB, num_attention_heads=4, num_key_value_heads=2, logits_scaling=6.0, **sizes
    )
    torch.manual_seed(0)
    return transformers.GraniteForCausalLM(config).to(dtype).train()


#: Gemma 2's soft-cap, Granite's divisor, and a head in 16 bits.
HEADS = {
    "gemma2": lambda: build("gemma2", torch.float32, final_logit_softcapping=2.0),
    "granite": granite,
    "bfloat16": lambda: build("llama", torch.bfloat16),
}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", list(HEADS))
def test_heads(name, autocast):
    """All outputs, and gradients of the loss and of the entropy together."""
    model, ids = HEADS[name](), inputs_of("gemma2")["input_ids"]
    outputs = "log_probs", "entropy", "is_top1", "mean_logits", "log_sum_sq_probs"
    utils.add_fused_lm_head(model, temperature=0.7, outputs=outputs)
    labels = ids.clone()
    labels[0, :4] = -100
    # The coarsest rounding of logits of a few units, which TRL rounds to 16 bits, and of gradients.
    low = autocast or name == "bfloat16"
    close = {"rtol": 3e-2, "atol": 6e-2} if low else {"rtol": 1e-4, "atol": 1e-5}
    found = []
    for context in (fused_lm_head(), fused_lm_head("eager"), torch.enable_grad()):
        model.zero_grad()
        with context, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            made = model(input_ids=ids, labels=labels, fused_lm_head=True)
        (made.loss + 0.3 * made.entropy.sum()).backward()
        grads = {n: p.grad.float() for n, p in model.named_parameters()}
        found.append([getattr(made, field) for field in ("loss", *outputs)])
        found[-1].append(torch.cat([grad.flatten() for grad in grads.values()]))
    for ours in found[:2]:
        for mine, theirs in zip(ours[:-1], found[2][:-1], strict=True):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape
            if mine.dtype == torch.bool:
                assert low or torch.equal(mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs, **close)
        error = (ours[-1] - found[2][-1]).norm() / found[2][-1].norm()
        assert error < (3e-2 if low else 1e-5)
    assert not made.log_sum_sq_probs.requires_grad


def test_no_label_counts():
    model = build("llama", torch.float32)
    utils.add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
    ids = inputs_of("llama")["input_ids"]
    with fused_lm_head():
        made = model(input_ids=ids, labels=torch.full_like(ids, -100), fused_lm_head=True)
    made.loss.backward()
    assert made.loss == 0 and not any(p.grad.any() for p in model.parameters())


def test_a_head_that_is_not_supported_is_trls_with_one_warning():
    hidden, weight = torch.randn(3, 4, requires_grad=True), torch.randn(7, 4)
    given = hidden, weight, None, torch.arange(3), 1.0, 5, None, 0.0, ("entropy",)
    exact = utils._ChunkedLogProbFunction.apply(*given)
    with fused_lm_head(), warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        found = [utils._ChunkedLogProbFunction.apply(*given) for _ in range(2)]
        mixed = *given[:1], weight.bfloat16(), *given[2:7], 1.0, ("entropy",)
        utils._ChunkedLogProbFunction.apply(*mixed)
    assert all(torch.equal(a, b) for a, b in zip(exact[:2], found[1][:2], strict=True))
    (warning,) = shown
    assert issubclass(warning.category, FusedRematWarning)
    assert "the model's logit scale is 0.0" in str(warning.message)


@pytest.mark.parametrize("version", ["1.15.2", "2.0.0"])
def test_another_version_is_refused(version, monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(ImportError, match=rf'TRL is {version}: install "trl==1\.16\.\*", or train'):
        fused_lm_head().__enter__()
    assert utils._ChunkedLogProbFunction.__module__ == "trl.kernels.chunked_logprob"


def test_an_error_inside_restores_trls_function():
    stock = utils._ChunkedLogProbFunction
    with pytest.raises(RuntimeError), fused_lm_head():
        assert utils._ChunkedLogProbFunction is not stock
        with fused_lm_head():
            pass
        assert utils._ChunkedLogProbFunction is not stock
        raise RuntimeError
    assert utils._ChunkedLogProbFunction is stock
