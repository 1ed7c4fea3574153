"""Scripts of examples/, run as a user runs them, at their smallest sizes; and the losses' page."""

import dataclasses
import json
import math
import shutil
import sys
from itertools import pairwise

import pytest
import torch
from processes import ROOT, printed

from bench.pages import losses as page
from bench.pages import pictures
from fused_remat.policies import EXACT_PRESETS

EXAMPLES = ROOT / "examples"
FEWEST_BYTES_FIRST = ("full", "lean", "balanced", "fast", "none", "eager")


def found_by(folder, script, options):
    """What a script writes in a folder, and what it prints."""
    text = printed(EXAMPLES / script, *options.split(), cwd=folder)
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text()), text


def test_the_demo(tmp_path):
    options = "--quick --out demo.png --json demo.json"
    results, text = found_by(tmp_path, "train_byte_lm.py", options)
    ways, steps = results["ways"], results["sizes"]["steps"]
    assert list(ways) == ["eager", "checkpoint", *EXACT_PRESETS]
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    for way, row in ways.items():
        assert f"\n{way} " in text
        assert len(row["losses"]) == steps
        assert all(map(math.isfinite, (*row["losses"], row["final_loss"], row["validation_loss"])))
    full, eager = ways["full"], ways["eager"]
    for preset in EXACT_PRESETS:
        assert all(ways[preset][what] == full[what] for what in ("losses", "validation_loss"))
    assert results["presets_bit_identical"]
    # Other dropout bits, same weights and data: 0.02 nats is ten times what is seen.
    for loss in ("final_loss", "validation_loss"):
        assert abs(full[loss] - eager[loss]) < 0.02
    kept = [ways[way]["kept_bytes_per_token_per_layer"] for way in FEWEST_BYTES_FIRST]
    assert all(fewer < more for fewer, more in pairwise(kept)), kept


@pytest.mark.composes("Hugging Face", "`Trainer` and a plain loop, full fine-tuning and LoRA")
def test_every_way_of_fine_tuning_has_the_losses_of_the_unconverted_model(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 60)
    sizes = "--layers 1 --seq-len 16 --batch 2 --steps 2 --vocabulary 300 --policies lean"
    options = f"{sizes} --json found.json --text text.txt"
    found, text = found_by(tmp_path, "finetune_hf.py", options)
    loops = [(mode, loop) for mode in ("full", "lora") for loop in ("plain", "trainer")]
    expected = [(*loop, way) for loop in loops for way in ("eager", "checkpoint", "lean")]
    assert [(row["mode"], row["loop"], row["way"]) for row in found["rows"]] == expected
    for row in found["rows"]:
        assert len(row["losses"]) == len(set(row["losses"])) == 2
        assert all(map(math.isfinite, row["losses"]))
        # float32's rounding of a loss near 6, and what two steps make of other roundings.
        assert row["largest_loss_difference"] < 1e-5, row
        assert f"| {row['mode']} | {row['loop']} | {row['way']} |" in text


MODELS, WAYS = ("byte_lm", "smollm"), ("eager", "native", "fast8")
QUICK = "--quick --seeds 0 1"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Of compare_losses.py the results' path, the results, and the printed text."""
    folder = tmp_path_factory.mktemp("losses")
    options = f"{QUICK} --out losses-cpu.json"
    return folder / "losses-cpu.json", *found_by(folder, "compare_losses.py", options)


@pytest.fixture
def example(monkeypatch):
    """compare_losses.py as a module."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    import compare_losses

    return compare_losses


def test_losses_are_of_every_run_and_a_seed_or_8_bits_change_them(run):
    path, results, text = run
    rows = {tuple(row["case"][n] for n in ("model", "seed")): row for row in results["results"]}
    assert rows.keys() == {(model, seed) for model in MODELS for seed in (0, 1)}
    for row in rows.values():
        assert tuple(row["ways"]) == WAYS
        for found in row["ways"].values():
            assert len(found["losses"]) == row["case"]["steps"]
            assert all(map(math.isfinite, (*found["losses"], found["validation_loss"])))
        native, fast8 = (row["ways"][way]["losses"] for way in ("native", "fast8"))
        assert fast8[0] == native[0] and fast8[1:] != native[1:]
    for model in MODELS:
        first, second = (rows[model, seed]["ways"]["eager"]["losses"] for seed in (0, 1))
        assert first != second
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in path.with_suffix(".svg").read_text()
    for title in ("Byte-level LM", "SmolLM-shaped"):
        assert all(f"| {title} | {way} | " in text for way in WAYS)


@pytest.mark.parametrize("model", MODELS)
def test_native_trains_as_eager_does(example, model):
    """Without dropout, whose masks are others. 1e-6: both models' losses are of float32 logits."""
    subject = example.SUBJECTS[model]
    sizes = dataclasses.replace(subject.quick, dropout=0.0)
    runs = example.build(subject, sizes, 0, "cpu", torch.float64)
    example.train(runs, example.Text(sizes, "cpu"), "cpu")
    eager, native, fast8 = (run.losses for run in runs)
    assert eager == pytest.approx(native, abs=1e-6)
    assert fast8[0] == native[0]


def test_a_run_is_taken_up(run, example, monkeypatch):
    path, results, _ = run
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("it is in the file already"))
    monkeypatch.setattr(sys, "argv", ["compare_losses.py", *QUICK.split()])
    file = example.ResultsFile(path, results["machine"], results["config"])
    example.compare(file, example.parse())


def test_the_page(run, tmp_path):
    shutil.copy(run[0], tmp_path)
    assert len(pictures.stale(tmp_path)) == 2
    pictures.rewrite(tmp_path)
    assert pictures.stale(tmp_path) == []
    assert (tmp_path / "losses-cpu.svg").read_bytes() == run[0].with_suffix(".svg").read_bytes()
    text = page.section(tmp_path)
    assert f"(bench/results/{tmp_path.name}/losses-cpu.png)" in text
    assert "SmolLM-shaped, 0.44 M parameters: 1 layers, D = 192, H = 3, F = 512, S = 16" in text
    assert "2 seeds, 4 steps each" in text


@pytest.mark.parametrize(("above", "verdict"), [(0.9, "**within**"), (1.1, "**NOT within**")])
def test_the_verdict_is_of_the_means_and_eagers_spread(above, verdict):
    rows = [
        {"case": {"model": "smollm", "seed": seed},
         "ways": {way: {"losses": [at], "validation_loss": at}
                  for way, at in (("eager", loss), ("native", loss), ("fast8", loss + above))}}
        for seed, loss in enumerate((1.0, 2.0, 3.0))
    ]  # fmt: skip
    lines = page.verdicts({"results": rows}).splitlines()
    assert len(lines) == 2
    assert all(f"over 3 seeds is 1.0000: {verdict}." in line for line in lines)
    assert "one seed says nothing" in page.verdicts({"results": rows[:1]})
