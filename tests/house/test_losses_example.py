"""examples/compare_losses.py, run as a user runs it, at its smoke-test sizes; and its page."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.pages import losses as page
from bench.pages import pictures
from bench.pages.losses import verdicts

ROOT = Path(__file__).parents[2]
MODELS, WAYS = ("byte_lm", "smollm"), ("eager", "native", "fast8")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The results' path, the results and the printed text of `--quick` with two seeds."""
    path = tmp_path_factory.mktemp("losses") / "losses-cpu.json"
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    script = str(ROOT / "examples" / "compare_losses.py")
    done = subprocess.run(
        [sys.executable, script, "--quick", "--seeds", "0", "1", "--out", str(path)],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=path.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return path, json.loads(path.read_text()), done.stdout


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module."""
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import compare_losses

    return compare_losses


def losses(results: dict[str, Any], model: str, seed: int) -> dict[str, list[float]]:
    (row,) = (
        row
        for row in results["results"]
        if (row["case"]["model"], row["case"]["seed"]) == (model, seed)
    )
    return {way: found["losses"] for way, found in row["ways"].items()}


def test_files_are_made_of_every_run(run: tuple[Path, dict[str, Any], str]) -> None:
    path, results, printed = run
    assert len(results["results"]) == len(MODELS) * 2
    for row in results["results"]:
        assert tuple(row["ways"]) == WAYS
        for found in row["ways"].values():
            assert len(found["losses"]) == row["case"]["steps"]
            assert all(map(math.isfinite, (*found["losses"], found["validation_loss"])))
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in path.with_suffix(".svg").read_text()
    for title in ("Byte-level LM", "SmolLM-shaped"):
        assert all(f"| {title} | {way} | " in printed for way in WAYS)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("model", MODELS)
def test_storing_in_8_bits_changes_gradients_alone(
    run: tuple[Path, dict[str, Any], str], model: str, seed: int
) -> None:
    found = losses(run[1], model, seed)
    assert found["fast8"][0] == found["native"][0]
    assert found["fast8"][1:] != found["native"][1:]


@pytest.mark.parametrize("model", MODELS)
def test_a_seed_is_of_weights_and_batches(
    run: tuple[Path, dict[str, Any], str], model: str
) -> None:
    first, second = (losses(run[1], model, seed)["eager"] for seed in (0, 1))
    assert first != second


@pytest.mark.parametrize("model", MODELS)
def test_native_trains_as_eager_does(example: Any, model: str) -> None:
    """Without dropout, whose masks are others. 1e-6: both models' losses are of float32 logits."""
    subject = example.SUBJECTS[model]
    sizes = dataclasses.replace(subject.quick, dropout=0.0)
    runs = example.build(subject, sizes, 0, "cpu", torch.float64)
    example.train(runs, example.Text.load(sizes, "cpu"), "cpu")
    eager, native, fast8 = (run.losses for run in runs)
    assert eager == pytest.approx(native, abs=1e-6)
    assert fast8[0] == native[0]


def test_a_run_is_taken_up(
    run: tuple[Path, dict[str, Any], str], example: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, results, _ = run
    monkeypatch.setattr(example, "train", lambda *_: pytest.fail("it is in the file already"))
    monkeypatch.setattr(sys, "argv", ["compare_losses.py", "--quick", "--seeds", "0", "1"])
    file = example.ResultsFile(path, results["machine"], results["config"])
    example.compare(file, example.parse())


def test_the_page(run: tuple[Path, dict[str, Any], str], tmp_path: Path) -> None:
    assert page.section(tmp_path) == page.UNMEASURED
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
def test_the_verdict_is_of_the_means_and_eagers_spread(above: float, verdict: str) -> None:
    rows = [
        {"case": {"model": "smollm", "seed": seed},
         "ways": {way: {"losses": [at], "validation_loss": at}
                  for way, at in (("eager", loss), ("native", loss), ("fast8", loss + above))}}
        for seed, loss in enumerate((1.0, 2.0, 3.0))
    ]  # fmt: skip
    lines = verdicts({"results": rows}).splitlines()
    assert len(lines) == 2
    assert all(f"over 3 seeds is 1.0000: {verdict}." in line for line in lines)
    assert "one seed says nothing" in verdicts({"results": rows[:1]})
