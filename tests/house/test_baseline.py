"""A step calls, compiles and keeps no more than when `make baseline` last recorded it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from baseline import versions

HERE = Path(__file__).parent
BASELINE = json.loads((HERE / "baseline.json").read_text())
VERSIONS = BASELINE.pop("versions")


@pytest.fixture(scope="module")
def now():
    """In a process of its own: Triton decides at import to interpret."""
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("transformers")
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(HERE / "baseline.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("row", BASELINE)
def test_no_row_grows(row, now):
    before, found = BASELINE[row], now[row]
    if row.startswith("kept"):
        assert found == before
    comparable = "" if versions() == VERSIONS else ("operation", "launch")  # by all, or by depths
    grown = {what: n for what, n in found.items() if n > before.get(what, 0)}
    assert not {what: n for what, n in grown.items() if what.endswith(comparable)}, before
