"""examples/engines in two processes: 20 steps, and from a checkpoint the same losses again."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from distributed_steps import encoder, mine
from hf_models import VOCAB, S, build
from launched import both_ranks, torchrun
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from fused_remat import convert

PROCESS = str(Path(__file__).with_name("engine_process.py"))
LAYERS = 2  # of every script's model


def losses(folder: Path, first: int = 0) -> list[dict]:
    """The lines of a start; each step there, and every layer's forward a block in each."""
    lines = (folder / f"losses-from-{first}.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert [line["step"] for line in found] == list(range(first + 1, 21))
    for rank in range(2):
        assert (folder / f"blocks-{rank}").read_text() == str(LAYERS * (20 - first))
    return found


def trained(found: list[dict]) -> None:
    """The loss fell, in both ranks, whose batches differ."""
    for rank in range(2):
        assert found[-1]["losses"][rank] < found[0]["losses"][rank] - 1
    assert all(len(set(line["losses"])) == 2 for line in found)


def starts(script: str, out: Path, *checkpoints: str) -> list[dict]:
    """The losses of 20 steps, once they were found to be those of each resumed start."""
    folders = {out / saved: out / f"from-{i}" for i, saved in enumerate(checkpoints)}
    resumed = (str(path) for pair in folders.items() for path in pair)
    both_ranks(PROCESS, script, str(out), *resumed)
    found = losses(out)
    trained(found)
    for folder in folders.values():
        assert losses(folder, 10) == found[10:], folder
    return found


@pytest.fixture(scope="module")
def titan(tmp_path_factory):
    """The first start of the loop in plain PyTorch, by torchrun: its folder, with a checkpoint."""
    out = tmp_path_factory.mktemp("titan")
    torchrun(PROCESS, "titan_loop", str(out))
    return out


@pytest.mark.composes(
    "Engines",
    "a loop of torchtitan's kind: `fully_shard` per layer, a `Stateful` train state, DCP; resumed "
    "in new processes, by torchrun",
    limits="without torchtitan itself",
)
def test_titan_loop(titan, tmp_path):
    torchrun(PROCESS, "titan_loop", "-", str(titan / "dcp-10"), str(tmp_path))
    found = losses(titan)
    trained(found)
    assert losses(tmp_path, 10) == found[10:]


@pytest.mark.composes(
    "Engines", "the same loop with tensor and sequence parallel: two ranks have one batch; DCP"
)
def test_titan_loop_divided(titan, tmp_path):
    folder = tmp_path / "resumed"
    both_ranks(
        PROCESS, "titan_loop:--tensor=2", str(tmp_path), str(tmp_path / "dcp-10"), str(folder)
    )
    found = losses(tmp_path)
    assert losses(folder, 10) == found[10:]
    assert found[-1]["losses"][0] < found[0]["losses"][0] - 1
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
def test_accelerate(tmp_path):
    starts("accelerate_loop", tmp_path, "own-10", "dcp-10")


@pytest.mark.composes(
    "Engines",
    "Hugging Face `Trainer` of a converted Llama with dropout: DDP; its checkpoint, and DCP",
    limits="FSDP not tried",
)
def test_hf_trainer(tmp_path):
    starts("hf_trainer", tmp_path, "checkpoint-10", "checkpoint-10/dcp")


@pytest.mark.composes(
    "Engines",
    "Lightning: `ModelParallelStrategy` with `fully_shard` per layer; its checkpoint is DCP's",
    limits="Lightning saves no random state: the module does",
)
def test_lightning(titan, tmp_path):
    found = starts("lightning_module", tmp_path, "own-10")
    assert found == losses(titan)  # the same model, data and dropout


@pytest.mark.composes(
    "Engines",
    "DeepSpeed ZeRO-3, each layer a leaf module; its checkpoint, and DCP",
    limits="`set_z3_leaf_modules` is needed: without it, layers run in ordinary operations under "
    "checkpoint, with a warning",
)
@pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="needs DeepSpeed")
def test_deepspeed(titan, tmp_path):
    found = starts("deepspeed_zero3", tmp_path, "own-10", "dcp-10")
    for line, expected in zip(found, losses(titan), strict=True):
        # Another order in which gradients and their norm are summed, in float32, over 20 steps.
        assert line["losses"] == pytest.approx(expected["losses"], rel=1e-5)


def model_of(kind: str) -> nn.Module:
    return encoder(cls=nn.TransformerEncoderLayer) if kind == "encoder" else build("llama")


def sharded(kind: str) -> nn.Module:
    model = convert(model_of(kind), policy="lean")
    for layer in model if kind == "encoder" else model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def output_of(model: nn.Module, kind: str, part: Callable = lambda x: x) -> torch.Tensor:
    """Of all of a batch, or of this rank's part."""
    generator = torch.Generator().manual_seed(1)
    if kind == "llama":
        return model(part(torch.randint(3, VOCAB, (4, S), generator=generator))).logits.detach()
    return model(part(torch.randn(4, 5, 8, generator=generator, dtype=torch.float64))).detach()


def save_sharded(kind: str, folder: Path) -> torch.Tensor:
    """Weights that a fresh model does not have; this rank's output of them."""
    model = sharded(kind)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.25)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
    return output_of(model, kind, mine)


def load_sharded(kind: str, folder: Path) -> torch.Tensor:
    model = sharded(kind)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    return output_of(model, kind, mine)


@pytest.mark.composes(
    "Engines", "a DCP checkpoint of fused or converted layers into stock ones, and back, resharded"
)
@pytest.mark.parametrize("kind", ["encoder", "llama"])
def test_checkpoints_of_fused_and_stock_models_are_the_same(two_processes, tmp_path, kind):
    fused = two_processes.run(save_sharded, kind, tmp_path / "fused")
    stock = model_of(kind)
    state = {"model": stock.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "fused", no_dist=True)
    stock.load_state_dict(state["model"])
    close = {"rtol": 1e-5, "atol": 1e-6} if kind == "llama" else {"rtol": 1e-10, "atol": 1e-12}
    torch.testing.assert_close(output_of(stock, kind), torch.cat(fused), **close)
    dcp.save({"model": stock.state_dict()}, checkpoint_id=tmp_path / "stock", no_dist=True)
    back = two_processes.run(load_sharded, kind, tmp_path / "stock")
    assert all(map(torch.equal, back, fused))
