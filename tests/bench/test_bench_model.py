"""`python -m bench model` at tiny sizes: what it measures, refuses to measure, and says of it."""

import dataclasses
import gc
import json
from types import ModuleType
from typing import Any

import pytest
import torch
from bench.model.measure import largest_batch

from bench.commands import model as command
from bench.measure.contest import Rig
from bench.measure.registry import Absent
from bench.model import measure
from bench.pages import models as page
from bench.subjects.configs import MODELS
from bench.subjects.model_ways import WAYS, undone
from bench.subjects.models import Case, Forward, affordable_layers, fixed_bytes
from fused_remat import convert

pytest.importorskip("transformers")

TINY = Case("smollm-135m", 2, 2, 9, "float32", tiny=True)
KINDS = [Case(name, 1, 2, 5, "float32", tiny=True) for name in ("qwen2-1.5b", "bert-base", "vit-l")]
STOCK = ["eager", "checkpoint", "checkpoint_reentrant"]
RIG = Rig(torch.device("cpu"), torch.float32, rounds=1)


@pytest.fixture(scope="module", autouse=True)
def _little_to_do():
    """Every memory measurement collects garbage: nor does it walk what a first model loads.

    And on such sizes a second thread only waits, which takes long where others compute.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    dataclasses.replace(TINY, lora=2).subject("cpu")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def row():
    """Every way that runs on a CPU, all that can be measured of it."""
    cap = 1 << 19  # bytes: a handful of sequences
    options = measure.Options(memory=cap, most=8, losses=3)
    return {"case": dataclasses.asdict(TINY)} | measure.measure(TINY, options, RIG)


def test_every_way_is_right_and_measured(row):
    assert list(row["ways"]) == WAYS.select(("stock", "peers", "ours", "loss"))
    for name, found in row["ways"].items():
        assert "failure" not in found, (name, found)
        if "unavailable" in found:
            assert name.startswith("liger") and found["unavailable"] == "needs a CUDA device"
            continue
        assert found["check"]["error"] <= found["check"]["allowed"]
        assert 0 < found["step_seconds"]["p20"] <= found["step_seconds"]["p80"]
        assert list(found["step_ratio"]) == ["eager", "checkpoint"]
        assert found["largest_batch"] >= 1 and found["tokens_per_second"] > 0


def test_bytes_are_those_of_the_whole_model_and_of_its_layers(row):
    ways, width, words = row["ways"], 32, 96
    below = {name: ways[name]["kept_below_head_bytes"] for name in (*STOCK, "full", "fast", "none")}
    assert below["full"] < below["fast"] < below["none"] < below["eager"]
    assert below["checkpoint"] >= 2 * 18 * width * 4  # each layer's input
    logits = 18 * words * 4
    for name in STOCK:
        assert ways[name]["kept_bytes"] >= below[name] + logits
        assert ways[name]["kept_bytes"] <= ways[name]["step_peak_bytes"]
    model = TINY.subject("cpu").module
    assert row["fixed_bytes"] == 4 * sum(p.nbytes for p in model.parameters())
    logits_freed = ways["full"]["kept_bytes"] - ways["full_loss"]["kept_bytes"]
    assert ways["full_loss"]["kept_bytes"] < below["full"] + logits and logits_freed > 0
    full, eager = (row["ways"][name]["largest_batch"] for name in ("full", "eager"))
    assert 1 <= eager < full


def test_what_fits_was_measured_and_one_more_did_not(row):
    for name in ("eager", "full"):
        found = row["ways"][name]
        most, peaks = found["largest_batch"], found["peaks"]
        assert row["fixed_bytes"] < peaks[most] <= row["memory_cap"]
        assert most == 8 or peaks[most + 1] > row["memory_cap"]


def test_losses_are_compared_step_by_step(row):
    losses = row["losses"]
    assert list(losses["differences"]) == ["full", "full_loss"]
    assert all(len(curve) == 3 for curve in losses["curves"].values())
    assert losses["noise"] < losses["allowed"] < 1e-4
    assert max(losses["differences"].values()) <= losses["allowed"]
    assert "| 2 |" in page.losses_table(row)


@pytest.mark.parametrize("case", KINDS, ids=lambda case: case.model)
def test_every_kind_of_model_is_checked(case):
    """With everything trained, and with adapters only."""
    for lora in (0, 2):
        small = measure.checked_subject(dataclasses.replace(case, lora=lora), "cpu")
        found = measure.checks_of(small)
        for name in ("checkpoint_reentrant", "full"):
            assert found.check(WAYS[name].build(small))["error"] < 1e-4
        trained = small.leaves()
        assert all(("lora_" in name) == bool(lora) for name in trained)
        copies = 4 * sum(p.nbytes for p in trained.values())
        assert (fixed_bytes(small.module) == copies) is not bool(lora)


def wrong_gradient(subject):
    """Right but for one norm, whose gradient is a thousandth too large."""
    model = convert(subject.shared(), policy="full")
    norm = model.model.layers[0].input_layernorm
    weight = norm.weight
    del norm.weight
    norm.weight = weight * 1.001 - weight.detach() * 0.001
    return Forward(model)


def test_a_wrong_way_is_a_failure_and_nothing_of_it_is_measured(monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(WAYS, "fast", dataclasses.replace(WAYS["fast"], build=wrong_gradient))
    found = measure.measure(TINY, measure.Options(["fast"]), RIG)
    failed = found["ways"]["fast"]
    assert list(failed) == ["failure"] and "input_layernorm.weight is 0.00" in failed["failure"]
    assert command.answered_for(found) == ["fast"]
    assert "| fast | FAIL: relative error of" in page.case_table(found)


def test_ways_have_modules_of_their_own_on_the_same_parameters():
    subject = TINY.subject("cpu")
    one, two = (WAYS[name].build(subject).model for name in ("checkpoint", "eager"))
    pairs = zip(one.parameters(), two.parameters(), strict=True)
    assert all(a is b and a.grad is not None for a, b in pairs)
    on = [{getattr(m, "gradient_checkpointing", None) for m in way.modules()} for way in (one, two)]
    assert True in on[0] and True not in on[1]


def test_a_patch_of_a_module_lasts_as_long_as_it_is_used():
    """As Liger's of transformers' modules, which it leaves behind."""
    module: Any = ModuleType("theirs")
    module.rotate = "stock"
    names = undone(module, lambda: setattr(module, "rotate", "theirs"))
    assert module.rotate == "stock" and names == {"rotate": "theirs"}


PEAKS = {
    "even": (lambda batch: 100 + 7 * batch, 57),
    "too large at once": (lambda batch: 501, 0),
    "at first no larger": (lambda batch: max(400, 7 * batch), 71),
    "grows faster": (lambda batch: batch**2, 22),
    "in steps": (lambda batch: 64 * -(-batch // 8), 56),
    "out of memory": (lambda batch: None if batch > 13 else batch, 13),
    "no end": (lambda batch: 1, 1000),
}


@pytest.mark.parametrize("name", PEAKS)
def test_the_largest_batch_is_found_in_few_tries(name):
    peak, largest = PEAKS[name]
    found, tried = largest_batch(peak, cap=500, most=1000)
    assert found == largest and len(tried) <= 16
    assert max(tried) <= max(2 * largest, 1)  # never far beyond what is there
    assert {b for b, n in tried.items() if n is not None and n <= 500} <= set(range(largest + 1))


def test_as_many_layers_as_memory_allows():
    one, two, many = (affordable_layers("llama3-8b", "bfloat16", 0, n << 30) for n in (1, 24, 400))
    assert one == 1 and 1 < two < many == MODELS["llama3-8b"].layers
    assert affordable_layers("llama3-8b", "bfloat16", 8, 24 << 30) > two  # adapters only


def test_the_articles_comparison_is_one_option():
    args = command.parse(["--article", "--device", "cpu", "--layers", "2"])
    cases = [(case.model, case.lora) for case in args.cases]
    assert cases == [(m, rank) for m in ("smollm-135m", "qwen2-1.5b") for rank in (0, 16)]
    assert args.losses == 30 and args.memory == 4 << 30
    args = command.parse(["--model", "vit-l", "--device", "cpu", "--layers", "1", "--seq", "9"])
    assert [case.seq_len for case in args.cases] == [197] and args.losses == 0


def test_the_command_writes_results_and_a_page(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(command, "cases", lambda args: [TINY])
    options = ["--device", "cpu", "--out", str(tmp_path), "--ways", "checkpoint", "full"]
    assert command.main([*options, "--steps", "1", "--memory", "none"]) == 0
    results = json.loads((tmp_path / "model-cpu.json").read_text())
    assert [list(row["ways"]) for row in results["results"]] == [["eager", "checkpoint", "full"]]
    text = (tmp_path / "model-cpu.md").read_text()
    assert "<summary>smollm-135m, 2 of 30 layers, full fine-tuning, float32, B = 2, S = 9<" in text
    assert "| smollm-135m: full: bytes kept ≤ 0.10× eager's, up to the head | " in text
    monkeypatch.setattr(command, "measure", lambda *args: pytest.fail("measured again"))
    assert command.main([*options, "--steps", "1", "--memory", "none"]) == 0
    assert "in the file already" in capsys.readouterr().out


def found_of(step, kept):
    times = {"step_ratio": {"checkpoint": {"p50": step}}}
    return {"kept_bytes": kept, "kept_below_head_bytes": kept, **times}


def test_targets_are_met_missed_or_not_measured():
    ways = {"eager": found_of(0.8, 100), "full": found_of(0.9, 9), "lean": found_of(0.91, 20),
            "fast": {"failure": "relative error of loss is 1"}}  # fmt: skip
    losses = {"steps": 30, "differences": {"full": 2e-6}, "allowed": 1e-6}
    row = {"case": dataclasses.asdict(TINY), "ways": ways, "losses": losses, "fixed_bytes": 1}
    machine = {"cpu": "one"}
    data = {"machine": machine, "results": [row | {"machine": machine}]}
    assert [v.met for v in page.verdicts(data)] == [True, None, False, None, True, False, False]


def test_a_target_of_one_length_is_of_that_length_and_of_float32():
    case = dataclasses.asdict(TINY) | {"model": "llama-512", "seq_len": 512}
    rows = [
        {"case": case | more, "ways": {"full": found_of(step, 9)}, "fixed_bytes": 1}
        for step, more in (
            (0.89, {}), (0.94, {"seq_len": 256}), (2.0, {"dtype": "bfloat16"}), (2.0, {"lora": 2}),
        )
    ]  # fmt: skip
    data = {"machine": {"cpu": "one"}, "results": rows}
    assert [v.met for v in page.verdicts(data)] == [True, True, None, None]


def test_what_is_not_installed_is_absent(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(Absent, match="peft is not installed"):
        dataclasses.replace(TINY, lora=2).subject("cpu")
