"""examples/finetune_hf.py, run as a user runs it, at the smallest sizes."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--layers 1 --seq-len 16 --batch 2 --steps 2 --vocabulary 300 --policies lean --json found.json"
)


@pytest.mark.composes("Hugging Face", "`Trainer` and a plain loop, full fine-tuning and LoRA")
def test_every_way_has_the_losses_of_the_unconverted_model(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog, and over the hill. " * 40)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    script = str(ROOT / "examples" / "finetune_hf.py")
    done = subprocess.run(
        [sys.executable, script, *OPTIONS.split(), "--text", str(text)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    shown = [(row["mode"], row["loop"], row["way"]) for row in rows]
    ways = ("eager", "checkpoint", "lean")
    assert shown == [
        (m, o, w) for m in ("full", "lora") for o in ("plain", "trainer") for w in ways
    ]
    for row in rows:
        assert len(row["losses"]) == len(set(row["losses"])) == 2
        assert all(map(math.isfinite, row["losses"]))
        # float32's rounding of a loss near 6, and what two steps make of other roundings.
        assert row["largest_loss_difference"] < 1e-5, row
        assert f"| {row['mode']} | {row['loop']} | {row['way']} |" in done.stdout
