"""The tests in `tests/interpreted/`, in a process of their own: Triton decides at import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_kernels_interpreted(path):
    pytest.importorskip("triton", reason="Triton is not installed")
    paths = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent.parent)]
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", str(path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
