"""Tests of a GPU in `python -m bench gpu`: outcomes outlive a kill, and the next run continues."""

import json
import time

import pytest
import torch

from bench.gpu import outcomes
from bench.measure.contest import Rig

CASES = """
import os, signal, pathlib, pytest
log = pathlib.Path(__file__).with_name("log")

@pytest.fixture(autouse=True)
def note(request):
    with log.open("a") as file:
        file.write(request.node.name + " ")

@pytest.mark.parametrize("n", [1, 2])
def test_right(n): pass

def test_wrong(): assert not log.exists()

def test_left_out(): pytest.skip("not here")

def test_broken():
    first = log.read_text().split().count("test_broken") == 1
    END

def test_last(): pass
"""


@pytest.fixture
def run(tmp_path):
    """Run the cases, of which one ends in `end`; return a row, outcomes and what has run."""

    def run(end, *names):
        path = tmp_path / "test_it.py"
        path.write_text(CASES.replace("END", end))
        (tmp_path / "pytest.ini").write_text("[pytest]")  # its folder is the root
        rig = Rig(torch.device("cpu"), torch.float32, ends=time.perf_counter() + 600, out=tmp_path)
        row = outcomes.run(rig, [str(path)], 600.0, names, marks="")
        found = json.loads((tmp_path / "tests.json").read_text())
        tests = {name.split("::")[1]: outcome for name, outcome in found["tests"].items()}
        return row, tests, (tmp_path / "log").read_text().split()

    return run


BEFORE = ["test_right[1]", "test_right[2]", "test_wrong", "test_left_out", "test_broken"]


def test_a_killed_run_keeps_its_outcomes_and_is_continued(run):
    """The case in which it ended comes last, and is tried again once."""
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    row, tests, log = run(f"if first: {kill}")
    assert tests == {"test_right": "passed", "test_wrong": "failed", "test_broken": "passed",
                     "test_last": "passed"}  # fmt: skip
    assert log == [*BEFORE, "test_last", "test_broken"]
    assert row["found"] == {"passed": 4, "failed": 1, "skipped": 1} and "error" in row
    assert run(kill) == (row, tests, log)  # all is known


def test_a_case_that_always_ends_its_process_fails(run):
    row, tests, log = run("os.kill(os.getpid(), signal.SIGKILL)")
    assert tests["test_broken"] == "failed" and log == [*BEFORE, "test_last", "test_broken"]
    assert row["found"]["unfinished again"] == 1 and "error" in row


def test_a_broken_device_ends_a_run_and_the_next_one_has_another(run):
    row, tests, log = run('raise RuntimeError("CUDA error: an illegal memory access")')
    assert (tests["test_broken"], tests["test_last"]) == ("failed", "passed")
    assert log == [*BEFORE, "test_last"] and row["found"]["failed"] == 2


def test_named_tests_run_alone_and_in_their_order(run):
    names = ("test_last", "test_gone", "test_right")
    _, tests, log = run("pass", *(f"test_it.py::{name}" for name in names))
    assert list(tests) == ["test_last", "test_right"]
    assert log == ["test_last", "test_right[1]", "test_right[2]"]


def test_a_run_ends_with_its_time(tmp_path):
    path = tmp_path / "test_it.py"
    path.write_text("import time\ndef test_long(): time.sleep(600)\n")
    rig = Rig(torch.device("cpu"), torch.float32, out=tmp_path)
    assert "skipped" in outcomes.run(rig, [str(path)], 1.0, marks="")


def test_what_failed_or_did_not_run_is_lacking(tmp_path):
    names = outcomes.functions()
    assert "tests/gpu/test_gpu_layers.py::test_inductor" in names and len(names) > 100

    def write(folder, gpu, date, **tests):
        (tmp_path / folder).mkdir()
        tests = {names[int(index[1:])]: outcome for index, outcome in tests.items()}
        found = {"machine": {"gpu": gpu, "date": date}, "tests": tests}
        (tmp_path / folder / "tests.json").write_text(json.dumps(found))

    write("old", "an H100", "2026-01", _0="failed", _1="passed", _2="failed", _5="failed")
    write("new", "an H100", "2026-02", _0="passed", _1="failed", _3="passed")
    write("other", "another", "2026-03", _1="passed", _4="passed")
    found = outcomes.lacking("an H100", tmp_path)
    assert found == [*(names[i] for i in (1, 2, 5)), names[4], *names[6:]]
