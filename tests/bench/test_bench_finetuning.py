"""Models with adapters keep at most what their own checkpointing keeps, in every family."""

import dataclasses
import gc

import pytest
import torch

from bench.commands import model
from bench.measure.contest import Rig
from bench.pages.finetuning import KEPT, Entry
from bench.subjects.models import ADAPTERS, WAYS, Case
from fused_remat.execution.observe import OBSERVERS
from fused_remat.steps.replay import Replay

pytest.importorskip("peft")

FAMILIES = ("qwen3-512", "llama-512", "phi3-512", "gemma2-512", "glm4-512", "olmo2-512")
SIZES = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Every measurement of memory collects garbage, which then visits no imported module."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def case_of(name, adapter):
    if adapter in ("nf4", "int8"):
        pytest.importorskip("bitsandbytes")
    return Case(name, 2, 2, 32, "float32", 4, adapter, tiny=True)


def gradients(forward, subject):
    subject.zero()
    forward(subject.x).backward()
    return torch.cat([t.grad.flatten() for t in subject.leaves().values()])


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_and_peak_are_at_most_those_of_own_checkpointing(name, adapter):
    case = case_of(name, adapter)
    values = case.published.values | SIZES
    subject = case.subject("cpu", dataclasses.replace(case.published, values=values))
    found, grads = {}, {}
    for way in ("checkpoint", "full"):
        forward = WAYS[way].build(subject)
        grads[way] = gradients(forward, subject)  # the first call of ours traces the layers
        found[way] = model.memory(forward, subject, split=False)
    own, new = found["checkpoint"], found["full"]
    for key in ("kept_bytes", "step_peak_bytes"):
        assert new[key] <= own[key], (key, new[key] / own[key])
    # Sums in another order: 1e-7 of a gradient, and of those that cancel several times as much.
    error = (grads["full"] - grads["checkpoint"]).norm() / grads["checkpoint"].norm()
    assert error < 1e-5


@pytest.mark.parametrize("adapter", ["nf4", "int8"])
def test_quantized_weights_are_compared_with_float64_and_losses_with_the_stock_models(adapter):
    rig = Rig(torch.device("cpu"), torch.float32, rounds=1)
    row = model.measure(case_of("llama-512", adapter), rig, ["checkpoint", "full"])
    assert all(way["check"]["against"] == "float64" for way in row["ways"].values()), row
    losses = row["ways"]["full"]["losses"]
    assert losses["steps"] == 30 and losses["last"] < losses["first"]
    entry = Entry(row, {"aten": row})
    assert entry.ratio("aten", "full", KEPT) < 1.0
    assert entry.ratio("onednn", "full", KEPT) is None


@pytest.mark.parametrize("adapter", ["lora", "nf4"])
@pytest.mark.parametrize("name", ["phi3-512", "glm4-512"])
def test_a_packed_gate_with_adapters_is_two_products(name, adapter):
    subject, graphs = case_of(name, adapter).subject("cpu"), []
    forward = WAYS["full"].build(subject)
    gradients(forward, subject)
    OBSERVERS.append(lambda run: graphs.append(run.call.graph))
    try:
        gradients(forward, subject)
    finally:
        OBSERVERS.pop()
    assert graphs
    assert not [n.name for graph in graphs for n in graph.nodes if isinstance(n, Replay)]
