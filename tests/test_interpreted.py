"""The tests in `tests/interpreted/`, in processes of their own: Triton decides at import."""

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

FOLDER = Path(__file__).with_name("interpreted")


def run(path: Path) -> "subprocess.CompletedProcess[str]":
    paths = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent.parent)]
    environment = os.environ | {
        "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", str(path)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def runs(request) -> Iterator[dict[Path, "Future[subprocess.CompletedProcess[str]]"]]:
    """All files that are asked for, as many at once as there are cores."""
    pytest.importorskip("triton", reason="Triton is not installed")
    here = [item for item in request.session.items if item.path == Path(__file__)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        yield {path: pool.submit(run, path) for path in (i.callspec.params["path"] for i in here)}


@pytest.mark.parametrize("path", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_kernels_interpreted(path, runs):
    done = runs[path].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
