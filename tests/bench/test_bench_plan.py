"""`python -m bench plan` at tiny sizes: plans compared with their peers."""

import dataclasses

import pytest

from bench.commands import plan as command
from bench.pages import plans as report
from bench.subjects.stacks import Case
from bench.tables import load

TINY = Case(3, "float32", "pre", 0.0, 2, 8, 16, 2)
#: Of the command line: the same.
OPTIONS = ["--device", "cpu", "--layers", "3", "--batch", "2", "--seq", "8", "--d-model", "16",
           "--nhead", "2", "--rounds", "2", "--no-compile"]  # fmt: skip
PEER_NAMES = command.peers(compiled=False)


@pytest.fixture(scope="module")
def row(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    assert command.main([*OPTIONS, "--out", str(folder)]) == 0
    (found,) = load(folder / "plan-cpu.json")["results"]
    return found


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


def test_predictions_of_bytes_are_exact(row):
    found = report.errors(row)
    ours = {name for name, way in report.right(row).items() if "predicted" in way}
    for what in ("peak", "kept"):
        assert set(found[what]) == ours
        assert max(map(abs, found[what].values())) == 0, found[what]
    assert all(way["kept_bytes"] < way["peak_bytes"] for way in report.right(row).values())
