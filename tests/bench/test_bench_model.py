"""`python -m bench model` at tiny sizes."""

import dataclasses

import pytest
import torch

from bench.commands import model
from bench.measure.contest import Rig
from bench.pages import models as page
from bench.subjects.models import DEFAULT, WAYS, Case, Forward
from fused_remat import convert

pytest.importorskip("transformers")

TINY = Case("smollm-135m", 2, 2, 9, "float32", tiny=True)
RIG = Rig(torch.device("cpu"), torch.float32, rounds=1)


def test_every_way_is_right_and_measured():
    row = model.measure(TINY, RIG, DEFAULT)
    assert list(row["ways"]) == WAYS.select(("stock", "peers", "ours", "loss"))
    for name, found in row["ways"].items():
        assert "error" not in found, (name, found)
        if "absent" in found:
            on_gpu = name.startswith("liger") or name in ("checkpoint_offload", "save_on_cpu")
            missing = name.startswith("trl") and found["absent"] == "trl is not installed"
            assert missing or (on_gpu and found["absent"] == "needs a CUDA device")
            continue
        assert found["check"]["error"] <= found["check"]["allowed"]
        assert 0 < found["step_seconds"]["p20"] <= found["step_seconds"]["p80"]
        assert list(found["step_ratio"]) == ["eager", "checkpoint"]
    ways, logits = row["ways"], 18 * 96 * 4
    below = {name: ways[name]["kept_below_head_bytes"] for name in ("eager", "full", "none")}
    assert below["full"] < below["none"] < below["eager"] <= ways["eager"]["kept_bytes"] - logits
    assert row["fixed_bytes"] == 4 * sum(p.nbytes for p in TINY.subject("cpu").module.parameters())
    assert ways["full_loss"]["kept_bytes"] < below["full"] + logits


def test_every_second_layer_is_checkpointed():
    layers = WAYS["checkpoint_every_2"].build(TINY.subject("cpu")).model.model.layers
    assert [layer.gradient_checkpointing for layer in layers] == [True, False]


def test_what_is_saved_on_the_cpu_comes_back():
    subject = TINY.subject("cpu")
    results = []
    for name in ("eager", "save_on_cpu"):
        subject.zero()
        loss = WAYS[name].build(subject)(subject.x)
        loss.backward()
        results.append([loss.value, *(t.grad.clone() for t in subject.leaves().values())])
    assert all(map(torch.equal, *results))


def wrong_gradient(subject):
    """Right but for one norm, whose gradient is a thousandth too large."""
    converted = convert(subject.shared(), policy="full")
    norm = converted.model.layers[0].input_layernorm
    weight = norm.weight
    del norm.weight
    norm.weight = weight * 1.001 - weight.detach() * 0.001
    return Forward(converted)


def test_a_wrong_way_is_a_failure_and_nothing_of_it_is_measured(monkeypatch):
    monkeypatch.setitem(WAYS, "fast", dataclasses.replace(WAYS["fast"], build=wrong_gradient))
    found = model.measure(TINY, RIG, ["fast"])
    failed = found["ways"]["fast"]
    assert list(failed) == ["error"] and "input_layernorm.weight is 0.00" in failed["error"]
    assert "| fast | FAIL: WrongResultError: relative error of" in page.case_table(found)
