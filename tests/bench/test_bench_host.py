"""`bench host`: a layer's step over a driver that launches nothing."""

import json
import os
import subprocess
import sys

import pytest

from bench.measure.machine import ROOT
from bench.pages.host import chunks, table

pytest.importorskip("triton", reason="Triton is not installed")


def test_launches_and_calls_are_counted(tmp_path):
    given = ["--layers", "llama", "--ways", "stock", "full", "--rounds", "1", "--out", tmp_path]
    given += ["--guards", "ViT"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench", "host", *given]  # it replaces kernels of its process
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    data = json.loads((tmp_path / "host.json").read_text())
    results, guards = data["results"], data["guards"]["ViT"]
    assert guards["calls"] == 2 and 0 < guards["least"] <= guards["median"]
    assert "traced layer" in table(tmp_path / "host.json")
    before, now = data["chunks"].values()
    assert before["chunks"] == 31 > 4 * now["chunks"] and before["launches"] > 4 * now["launches"]
    assert before["bytes"] < now["bytes"] and "MiB" in chunks(tmp_path / "host.json")
    for case, one in results.items():
        assert one["above"] == one["step"] - one["aten"] and one["calls"] > 50
        assert (one["launches"] > 10) == (case == "llama full")
