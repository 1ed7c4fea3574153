"""Layers under DeepSpeed's ZeRO-3, which partitions parameters, in two processes: as in one."""

from __future__ import annotations

import copy
import os
import warnings

import pytest
import torch
import torch.distributed as dist
from distributed_steps import encoder, mine
from hf_models import VOCAB, S, build
from processes import in_two_processes
from torch import nn

from fused_remat import FusedRematCausalLayer, FusedRematLayer, FusedRematWarning, Policy, convert

pytest.importorskip("deepspeed")

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


def engine_of(model: nn.Module, leaf: bool):
    os.environ.update(
        RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), DS_ACCELERATOR="cpu",
        WORLD_SIZE=str(dist.get_world_size()),
    )  # fmt: skip
    import deepspeed

    # Its collectives in shared memory, which it would compile: half a minute at the first time.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo")
    if leaf:
        deepspeed.utils.set_z3_leaf_modules(model, list({type(layer) for layer in layers(model)}))
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=sgd, config=CONFIG)[0]


def layers(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if hasattr(m, "why_not_fused")]


def model_of(kind: str, policy: str | Policy = "lean") -> nn.Module:
    torch.manual_seed(0)
    if kind == "causal":
        made = (FusedRematCausalLayer(8, 2, 12, kv_heads=1, policy=policy) for _ in range(2))
        return nn.Sequential(*made)
    if kind == "encoder":
        return encoder("lean", cls=FusedRematLayer, dtype=torch.float32)
    return convert(build(kind, torch.float32), policy=policy)


def loss_of(model: nn.Module, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    if kind in ("causal", "encoder"):
        # Wants a gradient, as after an embedding: DeepSpeed fails on a leaf module, any module,
        # with inputs that want none.
        x = torch.randn(4, 5, 8, generator=generator).requires_grad_()
        return model(part(x, model)).square().mean()
    x = torch.randint(3, VOCAB, (4, S), generator=generator)
    return model(input_ids=part(x, model), use_cache=False).logits.square().mean()


def part(x: torch.Tensor, model: nn.Module) -> torch.Tensor:
    """This rank's half for an engine; all of it for a model that is alone."""
    return mine(x) if hasattr(model, "module") else x


def gradients(kind: str, leaf: bool, policy: str | Policy = "lean") -> list[str]:
    """Raise unless gradients are those of one process; the warnings of fallbacks."""
    from deepspeed.utils import safe_get_full_grad

    model = model_of(kind, policy)
    alone = copy.deepcopy(model)
    engine = engine_of(model, leaf)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FusedRematWarning)
        engine.backward(loss_of(engine, kind))
    loss_of(alone, kind).backward()
    found = {name: safe_get_full_grad(p) for name, p in engine.module.named_parameters()}
    expected = {name: p.grad for name, p in alone.named_parameters()}
    # Two halves of a batch summed in float32, through two layers.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    engine.destroy()
    return [str(w.message) for w in caught if w.category is FusedRematWarning]


@pytest.mark.composes(
    "Engines",
    "DeepSpeed ZeRO-3, gradients as one process: encoder and causal layers, converted Llama and "
    "GPT-2",
    limits="each layer a leaf module; of such modules, any, DeepSpeed needs that an input wants a "
    "gradient, as after an embedding",
)
@pytest.mark.parametrize("kind", ["encoder", "causal", "llama", "gpt2"])
def test_gradients(two_processes, kind):
    assert two_processes.run(gradients, kind, True) == [[], []]


@pytest.mark.parametrize("kind", ["encoder", "causal", "llama"])
def test_without_leaf_modules_the_warning_says_what_to_do(two_processes, kind):
    for warned in two_processes.run(gradients, kind, False):
        assert len(warned) == 2
        for text in warned:
            assert "under torch.utils.checkpoint" in text and "set_z3_leaf_modules" in text


@pytest.mark.composes(
    "Engines", "DeepSpeed ZeRO-3, segments", limits="each layer keeps its input, with a warning"
)
def test_segments(two_processes):
    segments = Policy(save={"attn"}, segment="inner")
    for warned in two_processes.run(gradients, "causal", True, segments):
        assert any("ZeRO-3 manages its parameters, and frees them" in text for text in warned)


@pytest.mark.composes(
    "Engines", "DeepSpeed ZeRO-3, accumulate_into", limits="refused with RuntimeError"
)
@in_two_processes
def test_accumulation_is_refused():
    model = model_of("causal")
    for layer in model:
        layer.accumulate_into = "grad"
    engine = engine_of(model, True)
    with pytest.raises(RuntimeError, match="ZeRO-3 manages the layer's parameters"):
        loss_of(engine, "causal")
