"""`python -m bench plan` at tiny sizes: plans beside their peers, and what is said of them."""

import dataclasses
import json
import re

import pytest
import torch

from bench.commands import plan as command
from bench.measure.contest import Rig
from bench.pages import pictures
from bench.pages import plans as report
from bench.subjects.stacks import PEERS, Case
from bench.tables import RESULTS, load

TINY = Case(3, "float32", "pre", 0.0, 2, 8, 16, 2)
#: Of the command line: the same.
OPTIONS = ["--device", "cpu", "--layers", "3", "--batch", "2", "--seq", "8", "--d-model", "16",
           "--nhead", "2", "--rounds", "2", "--no-compile"]  # fmt: skip
PEER_NAMES = command.peers(compiled=False)


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """On such sizes a second one only waits, which takes long where others compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Of the results of a run of the command, without whose pictures it fails."""
    pytest.importorskip("matplotlib")
    found = tmp_path_factory.mktemp("plan")
    assert command.main([*OPTIONS, "--out", str(found)]) == 0
    return found / "plan-cpu.json"


@pytest.fixture(scope="module")
def row(path):
    (found,) = load(path)["results"]
    return dict(found)


def test_every_peer_is_measured_and_ours_within_its_peak(row):
    assert row["case"] == dataclasses.asdict(TINY)
    measured = report.right(row)
    absent = [name for name in PEER_NAMES if name not in measured]
    assert absent == [] and row["rounds"] == 2
    rivals = {rival.peer: rival for rival in report.rivals(row)}
    assert list(rivals) == PEER_NAMES
    for rival in rivals.values():
        peer = measured[rival.peer]
        assert set(peer["step_ratio"]) == set(PEER_NAMES)
        if rival.way is None:
            assert rival.least is not None and rival.least > peer["peak_bytes"]
        else:
            assert measured[rival.way]["peak_bytes"] <= peer["peak_bytes"]
    assert any(rival.way for rival in rivals.values())


def test_predictions_of_bytes_are_what_is_measured(row):
    found = report.errors(row)
    ours = [name for name, way in report.right(row).items() if report.is_ours(way)]
    assert {"optimal", "uniform", "sqrt", "greedy"} == {name.split("_")[0] for name in ours}
    assert any(row["ways"][name]["segments"] for name in ours)
    for what in ("peak", "kept"):
        assert set(found[what]) == set(ours)
        assert max(map(abs, found[what].values())) == 0, found[what]
    assert set(found["time, costs measured"]) == set(found["time, costs analytic"]) == set(ours)
    parameters = row["resting"]["parameters"]  # peaks count them and their gradients
    assert row["resting"]["inputs"] == 2 * 9 * 8
    for way in report.right(row).values():
        assert way["peak_bytes"] > 2 * parameters and way["kept_bytes"] < way["peak_bytes"]


def test_the_tables(row):
    for make in command.TABLES.values():
        lines = make(row).splitlines()
        columns = lines[0].count("|")
        assert len(lines) > 2 and all(line.count("|") == columns for line in lines), lines
    assert len(report.step_table(row).splitlines()) > 15  # all steps of both passes
    # nothing to say, and nothing wrong
    nothing = row | {"plans": [], "ways": {"eager": row["ways"]["eager"]}}
    assert report.errors(nothing) == {} and list(report.rivals(nothing)) == []
    assert report.summary(nothing).endswith("no peer was measured.")
    # a plan within a peer's peak may not be there
    tight = {"method": "optimal", "of": "checkpoint", "budget_bytes": 7, "least_bytes": 2**20}
    assert list(report.rivals(row | {"plans": [tight]})) == [("checkpoint", None, 2**20)]
    assert "none: the least possible is 1.0 MiB" in report.rival_table(row | {"plans": [tight]})


def test_the_picture_the_page_and_a_run_that_is_taken_up(path, monkeypatch):
    assert pictures.stale(path.parent) == []
    svg = path.with_suffix(".svg").read_text()
    for text in ("checkpoint sqrt", "eager", "greedy", "ours, optimal", "ours, predicted"):
        assert f"<!-- {text} -->" in svg, text
    text = report.section(path.parent)
    kind = "3 layers, D = 16, H = 2, B = 2, S = 8, float32, pre-norm, dropout 0"
    assert f"**{kind}**, 2 round" in text
    assert f"(bench/results/{path.parent.name}/plan-cpu.png)" in text
    assert text.count("<details>") == text.count("</details>") == 2
    data = load(path)
    data["results"][0]["note"] = "changed"
    path.write_text(json.dumps(data))
    assert len(pictures.stale(path.parent)) == 2
    known = lambda *_: pytest.fail("it is in the file already")  # noqa: E731
    monkeypatch.setattr(command, "measure", known)
    assert command.main([*OPTIONS, "--out", str(path.parent)]) == 0
    assert pictures.stale(path.parent) == []


@pytest.mark.parametrize("case", [
    Case(2, "float32", "post", 0.1, 2, 32, 32, 2),
    Case(1, "float32", "pre", 0.1, 2, 32, 32, 2, causal=True),
], ids=["post-norm", "causal"])  # fmt: skip
def test_other_stacks_are_right(case):
    """With dropout too, masks included: every peer that there is, and every plan."""
    row = command.measure(case, PEER_NAMES, Rig(torch.device("cpu"), torch.float32, rounds=1))
    row["case"] = dataclasses.asdict(case)
    wrong = {name: way["failure"] for name, way in row["ways"].items() if "failure" in way}
    assert wrong == {}
    absent = {name for name, way in row["ways"].items() if "unavailable" in way}
    few = {"checkpoint_every_2", "checkpoint_every_4", "checkpoint_sqrt"}
    assert absent == (few if case.layers == 1 else {"checkpoint_every_4"})
    assert any(report.is_ours(way) for way in report.right(row).values())


#: What the optimal plan within its peak is faster than: of `torch.compile`, what keeps little.
SLOWER = re.compile(r"checkpoint.*|selective_(matmuls|attention)|compile_budget_0(\.25|\.5)?")


def test_the_committed_plans_hold_their_budgets_and_beat_checkpoints():
    for row in load(RESULTS / "plan-cpu.json")["results"]:
        ways, rivals = report.right(row), list(report.rivals(row))
        assert [rival.peer for rival in rivals] == [n for n in ways if n in PEERS]
        for rival in rivals:
            assert rival.way is not None, rival.peer
            mine = ways[rival.way]
            assert mine["peak_bytes"] <= ways[rival.peer]["peak_bytes"], rival
            assert not SLOWER.fullmatch(rival.peer) or mine["step_ratio"][rival.peer]["p50"] < 1, (
                rival
            )
        errors_of = report.errors(row)
        assert max(map(abs, errors_of["peak"].values())) <= 0.03
        assert set(errors_of["kept"].values()) == {0.0}
