"""The demo, run as a user runs it, at its smoke-test sizes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from fused_remat.policies import EXACT_PRESETS

ROOT = Path(__file__).parents[2]
FEWEST_BYTES_FIRST = ("full", "lean", "balanced", "fast", "none", "eager")


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The plot's path, the results and the printed text of `--quick`."""
    folder = tmp_path_factory.mktemp("demo")
    plot, results = folder / "demo.png", folder / "demo.json"
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [
            sys.executable, str(ROOT / "examples" / "train_byte_lm.py"),
            "--quick", "--out", str(plot), "--json", str(results),
        ],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return plot, json.loads(results.read_text()), done.stdout


def test_every_way_is_reported(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, results, printed = demo
    assert list(results["ways"]) == ["eager", "checkpoint", *EXACT_PRESETS]
    for way in results["ways"]:
        assert f"\n{way} " in printed


def test_plot_is_written(demo: tuple[Path, dict[str, Any], str]) -> None:
    plot, _, _ = demo
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_losses_are_finite(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = demo
    for row in results["ways"].values():
        assert len(row["losses"]) == results["sizes"]["steps"]
        assert all(map(math.isfinite, (*row["losses"], row["final_loss"], row["validation_loss"])))


def test_rungs_have_the_same_bits(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = demo
    full, *others = (results["ways"][preset] for preset in EXACT_PRESETS)
    for row in others:
        assert row["losses"] == full["losses"]
        assert row["validation_loss"] == full["validation_loss"]
    assert results["rungs_bit_identical"]


def test_rungs_train_like_eager(demo: tuple[Path, dict[str, Any], str]) -> None:
    """Other dropout bits, same weights and data: 0.02 nats is ten times what is seen."""
    _, results, _ = demo
    eager, full = results["ways"]["eager"], results["ways"]["full"]
    assert abs(full["final_loss"] - eager["final_loss"]) < 0.02
    assert abs(full["validation_loss"] - eager["validation_loss"]) < 0.02


def test_each_rung_keeps_less_than_the_next(demo: tuple[Path, dict[str, Any], str]) -> None:
    _, results, _ = demo
    kept = [results["ways"][w]["kept_bytes_per_token_per_layer"] for w in FEWEST_BYTES_FIRST]
    assert all(fewer < more for fewer, more in pairwise(kept)), kept
