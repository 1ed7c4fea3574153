"""examples/engines in two processes: 20 steps, and from a checkpoint the same losses again."""

from __future__ import annotations

import copy
import importlib.util
import json
import os
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from distributed_steps import encoder, mine
from hf_models import VOCAB, S, build
from processes import ROOT, Processes, environment, torchrun
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from fused_remat import FusedRematCausalLayer, FusedRematWarning, Policy, conversion, convert
from fused_remat.autograd.function import OBSERVERS
from fused_remat.integrations.transformers import FusedRematCallback

DEEPSPEED = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="no DeepSpeed")
SCRIPTS = ROOT / "examples" / "engines"
LAYERS = 2  # of every script's model


@pytest.fixture(scope="module")
def processes():
    """Of their own: what engines leave behind in a process is nobody else's."""
    two = Processes(2)
    yield two
    two.close()


def of_torchrun() -> AbstractContextManager:
    """The environment that torchrun gives this rank."""
    rank = str(dist.get_rank())
    of_rank = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    return patch.dict(os.environ, environment() | of_rank)


def deepspeed_here() -> Any:
    import deepspeed

    # Its collectives in shared memory, which it would compile: half a minute at the first time.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def start(name: str, out: Path, *arguments: str) -> int:
    """Run a script in this rank: how many blocks ran that kept something.

    It has everything built anew. What leaves the fused path is an error.
    """
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(12345)  # nothing may depend on where random numbers were
    if name == "deepspeed_zero3":
        deepspeed_here()
    if name in ("accelerate_loop", "hf_trainer"):
        from accelerate.state import AcceleratorState

        AcceleratorState._reset_state(reset_partial_state=True)
    blocks: list[int] = []
    OBSERVERS.append(lambda invocation: blocks.append(len(invocation.kept)))
    try:
        with of_torchrun(), warnings.catch_warnings():
            warnings.simplefilter("error", FusedRematWarning)
            script = importlib.import_module(name)
            script.main(["--steps", "20", "--save-at", "10", "--out", str(out), *arguments])
    finally:
        OBSERVERS.pop()
    return len(blocks)


def losses(folder: Path, first: int = 0) -> list[dict]:
    """The lines of a start; each step there."""
    lines = (folder / f"losses-from-{first}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["step"] for line in found] == list(range(first + 1, 21))
    return found


def starts(
    processes: Processes, script: str, out: Path, *checkpoints: str, flags: tuple[str, ...] = ()
) -> list[dict]:
    """The losses of 20 steps, once they were found to be those of each resumed start."""
    assert processes.run(start, script, out, *flags) == [20 * LAYERS] * 2  # each forward a block
    found = losses(out)
    for rank in range(2):
        assert found[-1]["losses"][rank] < found[0]["losses"][rank] - 1
    for saved in checkpoints:
        folder, resume = out / f"from-{saved}", ("--resume", str(out / saved))
        assert processes.run(start, script, folder, *resume, *flags) == [10 * LAYERS] * 2
        assert losses(folder, 10) == found[10:], saved
    return found


@pytest.fixture(scope="module")
def titan(processes, tmp_path_factory):
    """The first start of the loop in plain PyTorch: its folder, with a checkpoint."""
    out = tmp_path_factory.mktemp("titan")
    found = starts(processes, "titan_loop", out)
    assert all(len(set(line["losses"])) == 2 for line in found)  # of the ranks' own batches
    return out


@pytest.mark.composes(
    "Engines",
    "a loop of torchtitan's kind: `fully_shard` per layer, a `Stateful` train state, DCP; resumed "
    "in new processes, by torchrun",
    limits="without torchtitan itself",
)
def test_titan_loop(titan, tmp_path):
    resume = ("--resume", str(titan / "dcp-10"), "--out", str(tmp_path))
    torchrun(str(SCRIPTS / "titan_loop.py"), *resume)
    assert losses(tmp_path, 10) == losses(titan)[10:]


@pytest.mark.composes(
    "Engines",
    "the same loop with layers of torchtitan's Llama 3; DCP",
    limits="with PyTorch's attention in place of its own; run where torchtitan is installed",
)
def test_titan_loop_of_titans_llama(processes, tmp_path):
    pytest.importorskip("torchtitan.models.llama3")
    starts(processes, "titan_loop", tmp_path, "dcp-10", flags=("--model=llama3",))


@pytest.mark.composes(
    "Engines", "the same loop with tensor and sequence parallel: two ranks have one batch; DCP"
)
def test_titan_loop_divided(processes, titan, tmp_path):
    found = starts(processes, "titan_loop", tmp_path, "dcp-10", flags=("--tensor=2",))
    for line in found:  # of one batch
        assert line["losses"][0] == pytest.approx(line["losses"][1], rel=1e-5)
    # Before anything was learned, and up to dropout's own draws.
    first = losses(titan)[0]["losses"][0]
    assert found[0]["losses"][0] == pytest.approx(first, rel=0.1)


@pytest.mark.composes(
    "Engines",
    "Accelerate: FSDP2 by its plugin; `save_state`, and DCP",
    limits="on CPUs by setting its state, since it takes the plugin to GPUs only",
)
def test_accelerate(processes, tmp_path):
    starts(processes, "accelerate_loop", tmp_path, "own-10", "dcp-10")


@pytest.mark.composes(
    "Engines",
    "Hugging Face `Trainer` of a Llama with dropout, converted by a callback: DDP; its checkpoint, "
    "and DCP",
)
def test_hf_trainer(processes, tmp_path):
    starts(processes, "hf_trainer", tmp_path, "checkpoint-10", "checkpoint-10/dcp")


@pytest.mark.composes(
    "Engines",
    "Hugging Face `Trainer` of a Llama, converted by a callback: FSDP2, whose own checkpointing "
    "the callback switches off; its checkpoint",
    limits="on CPUs by setting Accelerate's state, since it takes the plugin to GPUs only",
)
def test_hf_trainer_with_fsdp2(processes, tmp_path):
    starts(processes, "hf_trainer", tmp_path, "checkpoint-10", flags=("--fsdp",))


@pytest.mark.composes(
    "Engines",
    "Lightning: `ModelParallelStrategy` with `fully_shard` per layer; its checkpoint is DCP's",
    limits="Lightning saves no random state: the module does",
)
def test_lightning(processes, titan, tmp_path):
    found = starts(processes, "lightning_module", tmp_path, "own-10")
    assert found == losses(titan)  # the same model, data and dropout


@pytest.mark.composes(
    "Engines",
    "DeepSpeed ZeRO-3, each layer a leaf module; its checkpoint, and DCP",
    limits="`set_z3_leaf_modules` is needed: without it, layers run in ordinary operations under "
    "checkpoint, with a warning",
)
@DEEPSPEED
def test_deepspeed(processes, titan, tmp_path):
    found = starts(processes, "deepspeed_zero3", tmp_path, "own-10", "dcp-10")
    for line, expected in zip(found, losses(titan), strict=True):
        # Another order in which gradients and their norm are summed, in float32, over 20 steps.
        assert line["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def train_under_zero3(folder: Path) -> tuple[str, list[float]]:
    """Train a Llama by Trainer with the callback; return its conversion and the losses."""
    if str(SCRIPTS) not in sys.path:
        sys.path.insert(0, str(SCRIPTS))
    import hf_trainer
    from accelerate.state import AcceleratorState
    from transformers import PrinterCallback, Trainer, TrainingArguments
    from transformers.integrations.deepspeed import unset_hf_deepspeed_config

    deepspeed_here()
    AcceleratorState._reset_state(reset_partial_state=True)
    config = {**ZERO3, "zero_force_ds_cpu_optimizer": False}
    with of_torchrun(), warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        settings = TrainingArguments(
            output_dir=str(folder), max_steps=3, per_device_train_batch_size=2, optim="sgd",
            learning_rate=0.1, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=1,
            dataloader_pin_memory=False, deepspeed=config, save_strategy="no",
        )  # fmt: skip
        trainer = Trainer(
            hf_trainer.llama(), settings, train_dataset=hf_trainer.Windows(),
            data_collator=hf_trainer.collate, callbacks=[FusedRematCallback("lean")],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = trainer.state.log_history
    found = str(conversion(trainer.model)), [log["loss"] for log in logs if "loss" in log]
    trainer.model_wrapped.destroy()
    unset_hf_deepspeed_config()  # models that other tests build would be divided, too
    return found


@pytest.mark.composes(
    "Engines", "DeepSpeed ZeRO-3 by Hugging Face `Trainer`: the callback makes layers leaf modules"
)
@DEEPSPEED
def test_the_callback_under_zero3(processes, tmp_path):
    found = processes.run(train_under_zero3, tmp_path)
    for text, losses in found:
        assert text.startswith("converted 2 × LlamaDecoderLayer: 6 fused training calls\n")
        assert losses[2] < losses[0]


# --- models of other kinds: DCP checkpoints, and what ZeRO-3 does to their layers


def stock_of(kind: str, dtype: torch.dtype = torch.float64) -> nn.Module:
    if kind == "encoder":
        return encoder(cls=nn.TransformerEncoderLayer, dtype=dtype)
    return build(kind, dtype)


def output_of(model: nn.Module, kind: str, part: Callable = lambda x: x) -> torch.Tensor:
    """Of all of a batch, or of this rank's part."""
    generator = torch.Generator().manual_seed(1)
    if kind not in ("causal", "encoder"):
        ids = torch.randint(3, VOCAB, (4, S), generator=generator)
        return model(input_ids=part(ids), use_cache=False).logits
    # Wants a gradient, as after an embedding: DeepSpeed fails on a leaf module, any module, with
    # inputs that want none.
    x = torch.randn(4, 5, 8, generator=generator, dtype=next(model.parameters()).dtype)
    return model(part(x.requires_grad_()))


def sharded(kind: str, folder: Path, saves: bool) -> torch.Tensor:
    """This rank's output of a converted, sharded model: with weights that a fresh one does not
    have, which it saves in a folder; or with those that are there."""
    model = convert(stock_of(kind), policy="lean")
    for layer in model if kind == "encoder" else model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if saves:
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 1.25)
    state = {"model": get_model_state_dict(model)}
    (dcp.save if saves else dcp.load)(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    return output_of(model, kind, mine).detach()


@pytest.mark.composes(
    "Engines", "a DCP checkpoint of fused or converted layers into stock ones, and back, resharded"
)
@pytest.mark.parametrize("kind", ["encoder", "llama"])
def test_checkpoints_of_fused_and_stock_models_are_the_same(processes, tmp_path, kind):
    fused = processes.run(sharded, kind, tmp_path / "fused", True)
    stock = stock_of(kind)
    state = {"model": stock.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "fused", no_dist=True)
    stock.load_state_dict(state["model"])
    # transformers' RMSNorm is float32.
    close = {"rtol": 1e-5, "atol": 1e-6} if kind == "llama" else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(output_of(stock, kind).detach(), torch.cat(fused), **close)
    dcp.save({"model": stock.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    back = processes.run(sharded, kind, tmp_path / "stock", False)
    assert all(map(torch.equal, back, fused))


ZERO3 = {
    "train_micro_batch_size_per_gpu": 2,
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,
}


def under_zero3(
    kind: str, leaf: bool = True, policy: str | Policy = "lean", **options: Any
) -> list:
    """Raise unless gradients are those of one process; the warnings of fallbacks."""
    torch.manual_seed(0)
    if kind == "causal":
        made = (
            FusedRematCausalLayer(8, 2, 12, kv_heads=1, policy=policy, **options) for _ in range(2)
        )
        model: nn.Module = nn.Sequential(*made)
    else:
        model = convert(stock_of(kind, torch.float32), policy=policy)
    alone, deepspeed = copy.deepcopy(model), deepspeed_here()
    with of_torchrun(), warnings.catch_warnings(record=True) as caught:
        deepspeed.init_distributed("gloo")
        if leaf:
            layers = {type(m) for m in model.modules() if hasattr(m, "why_not_fused")}
            deepspeed.utils.set_z3_leaf_modules(model, list(layers))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = deepspeed.initialize(model=model, optimizer=sgd, config=ZERO3)[0]
        warnings.simplefilter("always", FusedRematWarning)
        engine.backward(output_of(engine, kind, mine).square().mean())
    output_of(alone, kind).square().mean().backward()
    found = {n: deepspeed.utils.safe_get_full_grad(p) for n, p in model.named_parameters()}
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
@DEEPSPEED
@pytest.mark.parametrize("kind", ["encoder", "causal", "llama", "gpt2"])
def test_gradients(processes, kind):
    assert processes.run(under_zero3, kind) == [[], []]


@pytest.mark.composes(
    "Engines", "DeepSpeed ZeRO-3, segments", limits="each layer keeps its input, with a warning"
)
@DEEPSPEED
def test_segments(processes):
    segments = Policy(save={"attn"}, segment="inner")
    for warned in processes.run(under_zero3, "causal", policy=segments):
        assert any("ZeRO-3 manages its parameters, and frees them" in text for text in warned)


def refuses_to_accumulate() -> None:
    with pytest.raises(RuntimeError, match="ZeRO-3 manages the layer's parameters"):
        under_zero3("causal", accumulate_into="grad")


@pytest.mark.composes(
    "Engines", "DeepSpeed ZeRO-3, accumulate_into", limits="refused with RuntimeError"
)
@DEEPSPEED
def test_accumulation_is_refused(processes):
    processes.run(refuses_to_accumulate)
