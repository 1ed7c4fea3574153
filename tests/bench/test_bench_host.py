"""`bench host`: a layer's step over a driver that launches nothing."""

import json
import os
import subprocess
import sys

import pytest

from bench.measure.machine import ROOT

pytest.importorskip("triton", reason="Triton is not installed")


def test_launches_and_calls_are_counted(tmp_path):
    given = ["--layers", "llama", "--ways", "stock", "full", "--rounds", "1", "--out", tmp_path]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "bench", "host", *given]  # it replaces kernels of its process
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    results = json.loads((tmp_path / "host.json").read_text())["results"]
    for case, one in results.items():
        assert one["above"] == one["step"] - one["aten"] and one["calls"] > 50
        assert (one["launches"] > 10) == (case == "llama full")
