"""Tiny models of the architectures that people train: what they compute and keep, converted."""

import copy
import gc
import warnings

import models
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematWarning, conversion, convert, revert
from fused_remat.convert import fused_layers
from fused_remat.execution import prepare
from fused_remat.execution.observe import OBSERVERS
from fused_remat.graph.schedule import kept_bytes
from fused_remat.report.allocations import AllocationTrace, SavedBytes
from fused_remat.tracing import call
from fused_remat.tracing.layer import KNOWN

#: What is replayed in the layers of an architecture; all others are blocks without one.
PIECES = {
    "qwen3_next": {"linear_attn", "linear_attn.torch_chunk_gated_delta_rule"},
    "jamba": {"mamba", "mamba.mamba_selective_scan"},
    "mamba2": {"mixer"},
    "deberta_v2": {"attention.self"},
}
#: What is left as it is, and a part of the reason.
LEFT = {
    "gemma3n": ("Gemma3nTextDecoderLayer", "cannot run at another batch size"),
    "qwen3_vl": ("Qwen3VLVisionPatchMerger", "cannot run at another batch size"),  # it is no layer
}
#: Without a block in any layer.
NO_BLOCK = {"gemma3n"}
#: Mixtures, whose grouped products ATen does not run in float64; there, one expert at a time runs.
GROUPED = {
    "gemma4_moe", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3", "jamba",
}  # fmt: skip
#: Layers that ATen does not run in float64, by the issue's tolerance for their reason: grouped
#: products next to linear attention in float32, and norms that convert their input next to float64
#: weights.
FLOAT32 = {"qwen3_next", "openai_whisper"}
#: Architectures whose own code computes in float32 inside of a float64 model: norms, tables, state.
WIDE = 5e-6


def step(model, batch) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of a training step, and its gradients."""
    model.zero_grad(set_to_none=True)
    loss = models.loss_of(model(**batch))
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def built(name, wide=True):
    """Return a model and its batch; in float64 where it can run, if `wide`."""
    row = models.MODELS[name]
    if row.needs:
        pytest.importorskip(row.needs)
    try:
        model, batch = models.build(name)
    except ImportError as missing:
        pytest.skip(str(missing))
    dtype = torch.float64 if is_wide(name, wide) else torch.float32
    if name in GROUPED and wide:
        for module in model.modules():
            if hasattr(module, "config"):
                module.config._experts_implementation = "eager"
    batch = {
        key: value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    return model.to(dtype), batch


def is_wide(name, wide):
    return name not in FLOAT32 and (wide or name not in GROUPED)


@pytest.fixture
def runs():
    found = []
    OBSERVERS.append(found.append)
    yield found
    OBSERVERS.remove(found.append)


def phimoe():
    mixed = {"num_experts_per_tok": 2, "num_local_experts": 4, "input_jitter_noise": 0.0}
    torch.manual_seed(0)
    row = models._hf("Phimoe", {**models._DECODER, **mixed})
    return row.make().train(), row.batch(models.S)


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("name", models.MODELS)
def test_a_converted_model_gives_the_same_and_keeps_what_is_predicted(name, policy, runs):
    wide = policy == "full"
    model, batch = built(name, wide)
    loss, grads = step(model, batch)
    convert(model, policy=policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if name in LEFT else "error", FusedRematWarning)
        step(model, batch)
        runs.clear()  # of the first call, which reads
        found, mine = step(model, batch)
    slack = WIDE if is_wide(name, wide) else 3e-5
    torch.testing.assert_close(found, loss, rtol=20 * slack, atol=slack * loss.abs().item())
    assert mine.keys() == grads.keys()
    largest = max(g.norm() for g in grads.values())
    for key, grad in grads.items():
        distance = (mine[key] - grad).norm() / (grad.norm() + 1e-6 * largest)
        assert distance <= slack, key

    said = conversion(model)
    kinds = set(models.MODELS[name].layers)
    assert {kind.name for kind in said if kind.state == "converted"} == kinds - {
        LEFT[name][0] if name in LEFT else ""
    }
    assert {piece.name for kind in said for piece in kind.pieces} == PIECES.get(name, set())
    left = [(kind.name, kind.reason) for kind in said if kind.state in ("checkpointed", "plain")]
    assert {n for n, _ in left} == ({LEFT[name][0]} if name in LEFT else set())
    assert all(LEFT[name][1] in reason for _, reason in left)

    assert bool(runs) == (name not in NO_BLOCK)
    for run in runs:
        block, execution = run.call, run.execution
        dtypes = dict.fromkeys(block.graph.inputs, run.tensors[0].dtype)
        shapes = block.named_shapes(execution.given)
        predicted = kept_bytes(block.graph, block.save, block.needs_grad, shapes, dtypes)
        inputs = sum(predicted.get(input, 0) for input in block.graph.inputs)
        output = run.output.nbytes if execution.plan.keeps_output else 0
        seed = predicted.get("seed", 0)
        assert sum(t.nbytes for t in run.kept) + output == sum(predicted.values()) - inputs - seed
        if policy == "full" and name != "swin":  # whose stages run again
            kept = set(predicted) - set(block.graph.inputs)
            stats = (".mean", ".rstd", "routing.experts")
            assert all(name.endswith(stats) for name in kept), f"statistics alone: {kept}"


@pytest.mark.parametrize("name", ["phimoe", "mixtral", "bert"])
def test_where_a_rebuild_chooses_by_values_no_step_is_fused(name, runs, monkeypatch):
    """A fused step may round otherwise than the single ones that rebuild its activations.

    Mixtral's experts are kept, and its weights are smooth. Phimoe's weights are a softmax over the
    logits close to the largest one, which a rebuild compares again.
    """
    everything = frozenset({"linear_norm", "linear_act gelu", "mlp_bwd gelu"})
    monkeypatch.setattr(prepare, "_fusions", lambda *_: everything)
    prepare._prepare.cache_clear()
    model, batch = phimoe() if name == "phimoe" else built(name)
    step(convert(model), batch)
    assert len(runs) == 2
    chooses = [any(node.chooses for node in run.call.graph.nodes) for run in runs]
    assert all(bool(run.execution.fusions) != c for run, c in zip(runs, chooses, strict=True))
    assert any(chooses) == (name == "phimoe")
    prepare._prepare.cache_clear()


@pytest.mark.parametrize("name", ["bloom", "deberta_v2", "t5", "swin", "opt"])
def test_masks_and_indices_that_a_layer_makes_are_made_again(name, monkeypatch):
    model, batch = built(name)
    loss, grads = step(model, batch)
    saved = []
    for large in (1 << 30, 1):
        monkeypatch.setattr(call, "_LARGE", large)
        # Under "full" a stage of Swin keeps its input alone.
        step(convert(model, "lean" if name == "swin" else "full") if large > 1 else model, batch)
        model.zero_grad(set_to_none=True)
        with SavedBytes(exclude=model.parameters()) as kept:
            found = models.loss_of(model(**batch))
        found.backward()
        saved.append(kept.total)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
        for key, p in model.named_parameters():
            if key in grads:
                torch.testing.assert_close(p.grad, grads[key], rtol=1e-4, atol=1e-5)
    assert (saved[1] < saved[0]) == (name != "opt"), saved


def test_a_trace_leaves_no_tensors_behind():
    def count():
        gc.collect()
        return sum(type(t) is Tensor for t in gc.get_objects())

    model, batch = models.build("opt", 16)
    convert(model)
    KNOWN.clear()
    before = count()
    models.loss_of(model(**batch)).backward()
    assert {kind.state for kind in conversion(model)} == {"converted"}
    model.zero_grad()
    assert count() - before < 8  # of a recording there were 80


_MAMBA = {
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 8,
    "mamba_chunk_size": 8,
}  # fmt: skip
_MIXED = {**models._DECODER, "num_experts_per_tok": 2}
#: More language models whose loss is computed without logits.
HEADS = {
    "nemotron": models._hf("Nemotron", models._DECODER),
    "bamba": models._hf("Bamba", {**models._DECODER, **_MAMBA, "attn_layer_indices": [1]}),
    "falcon_h1": models._hf(
        "FalconH1", {**models._DECODER, **_MAMBA, "mamba_d_ssm": 64, "lm_head_multiplier": 0.5}
    ),
    "granite_moe": models._hf(
        "GraniteMoe", {**_MIXED, "num_local_experts": 4, "logits_scaling": 2.0}
    ),
    "olmoe": models._hf("Olmoe", {**_MIXED, "num_experts": 4}),
}
#: Architectures of the sweep that are no language models; Bart's adds a buffer to its logits.
HEADLESS = {
    "bart",
    "wav2vec2", "vit", "dinov2", "dinov3", "siglip", "swin", "timm_vit", "torchvision_vit",
    "openai_whisper", "diffusers", "x_transformers_flash", "x_transformers_rotary", "nanogpt",
    "mingpt", "dit",
}  # fmt: skip
#: What adds the router's auxiliary loss to the loss.
ROUTED = {"mixtral", "qwen3_moe", "gpt_oss", "qwen3_next", "jamba", "granite_moe", "olmoe"}


@pytest.mark.parametrize("adapted", [False, True], ids=["bare", "LoRA"])
@pytest.mark.parametrize("name", [*sorted(models.MODELS.keys() - HEADLESS), *HEADS])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_the_loss_without_logits(name, adapted):
    """Logits that a model scales, caps or slices; a loss to which it adds others."""
    if name in HEADS:
        torch.manual_seed(0)
        model, batch = HEADS[name].make().train(), HEADS[name].batch(models.S)
    else:
        model, batch = models.build(name)
    labels = batch["decoder_input_ids" if "decoder_input_ids" in batch else "input_ids"].clone()
    labels[:, :3] = -100
    batch |= {"labels": labels} | ({"output_router_logits": True} if name in ROUTED else {})
    if adapted:
        peft = pytest.importorskip("peft")
        head, avoided = model.get_output_embeddings(), ("out_proj", "router")  # by PEFT itself
        linear = [
            n for n, m in model.named_modules()
            if m is not head and (isinstance(m, nn.Linear) or type(m).__name__ == "Conv1D")
        ]  # fmt: skip
        targets = [n for n in linear if not n.endswith(avoided)]
        config = peft.LoraConfig(r=2, target_modules=targets, init_lora_weights=False)
        model = peft.get_peft_model(model, config)

    def step():
        model.zero_grad(set_to_none=True)
        out = model(**batch)
        out.loss.backward()
        return out, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    stock, expected = step()
    convert(model, loss=True)
    for layer in fused_layers(model).values():
        revert(layer)  # they have tests of their own
    out, grads = step()
    assert out.logits is None and (stock.get("aux_loss") is not None) == (name in ROUTED)
    torch.testing.assert_close(out.loss, stock.loss, rtol=1e-6, atol=1e-6)
    assert grads.keys() == expected.keys()
    largest = max(grad.norm() for grad in expected.values())
    for key, grad in expected.items():
        # Float32 sums in another order, to which routed layers are sensitive.
        assert (grads[key] - grad).norm() <= 2e-5 * (grad.norm() + 1e-3 * largest), key


def test_a_layer_that_computes_in_float32_is_proved_by_its_own_rounding():
    """The linear attention of Qwen3.5 differs by 5.1e-6 in the float64 proof, at this width."""
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3_5TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, pad_token_id=0,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model = convert(transformers.Qwen3_5ForCausalLM(config).train())
    step(model, {"input_ids": torch.randint(3, 64, (2, 12)), "use_cache": False})
    assert [kind.state for kind in conversion(model)] == ["converted"]


def test_the_first_step_takes_little_more_than_under_a_checkpoint():
    """It traces the layer, and proves the block in float64: 12 bytes for each parameter."""
    torch.manual_seed(0)
    layer, x = models.NanoBlock(384, 4), torch.randn(2, 12, 384, requires_grad=True)
    stock, peaks = copy.deepcopy(layer), []
    model = convert(nn.ModuleList([layer]))
    KNOWN.clear()
    for run in (lambda: checkpoint(stock, x, use_reentrant=False), lambda: model[0](x)):
        x.grad = None
        with AllocationTrace() as trace:
            run().square().sum().backward()
        peaks.append(trace.spans[0].peak - trace.spans[0].start)
    assert [kind.state for kind in conversion(model)] == ["converted"]
    count = sum(p.numel() for p in layer.parameters())
    assert peaks[1] <= peaks[0] + 12 * count, [peak / count for peak in peaks]
