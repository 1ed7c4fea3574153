"""What every benchmark measures with: registry, error rule, turns, clock, ceilings, results."""

import doctest
import importlib
import json

import pytest
import torch

from bench.measure import clock, contest, machine
from bench.measure.clock import interleave, quantiles, ratios, rotated
from bench.measure.contest import Contest, Rig, Way, Work, check, measure
from bench.measure.registry import Absent, Registry, WrongResultError
from bench.tables import ResultsFile

CPU = torch.device("cpu")
ONES = {"y": torch.ones(2, dtype=torch.float64)}


@pytest.fixture
def rig():
    return Rig(CPU, torch.float32, rounds=3)


def returning(y, **more):
    return Way(lambda given: {"y": y}, **more)


def test_ways_are_requested_by_name_or_group(monkeypatch):
    registry = Registry()
    registry.provider("theirs", baseline=True, group="stock")(lambda: "theirs")
    registry.provider("kernel", needs="triton", group="mine")(lambda: "kernel")
    assert registry.select(["mine"]) == registry.select(["kernel"]) == ["theirs", "kernel"]
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(Absent, match="needs a CUDA device"):
        registry["kernel"].make(CPU)
    assert registry["kernel"].make(torch.device("cuda")) == "kernel"


def test_an_error_is_allowed_that_the_baseline_makes_too():
    """1.5 times of it; and without one, the dtype's tolerance, as often as the contest allows."""
    off = {"y": torch.full((2,), 1.0 + 3e-5)}
    with pytest.raises(WrongResultError, match="relative error of y is 3e-05, allowed 1e-05"):
        check(off, ONES)
    assert check(off, ONES, 3.5)["allowed"] == pytest.approx(3.5e-5)
    assert check(off, ONES, theirs={"y": 2.1e-5})["allowed"] == pytest.approx(3.15e-5)
    with pytest.raises(WrongResultError, match=r"allowed 1\.5e-05"):
        check(off, ONES, theirs={"y": 1e-5})
    with pytest.raises(WrongResultError, match="is nan"):
        check({"y": torch.tensor([1.0, torch.nan])}, ONES, theirs={"y": 1.0})


def test_the_baseline_is_judged_too_but_by_a_wider_margin(rig):
    """It is first in judgement, wherever it stands, and what is grossly wrong is no yardstick."""
    for error, found in ((8e-5, ["check", "check"]), (2e-4, ["error", "error"])):
        ways = dict.fromkeys(("mine", "theirs"), returning(torch.full((2,), 1.0 + error)))
        rows = contest.admit(Contest(ways, lambda: ONES, Work(bytes=1.0), ("theirs",)))
        assert [next(iter(row)) for row in rows.values()] == found


def test_no_time_of_what_is_wrong_and_the_absent_are_listed(rig):
    def raising(error):
        def run(given):
            raise error

        return run

    wrong = torch.full((2,), 1.001)
    ways = {
        "right": returning(torch.ones(2)),
        "off": returning(wrong),
        "off, optional": returning(wrong, optional=True),
        "unwritten": returning(torch.tensor([1.0, torch.nan])),
        "absent": Way(raising(Absent("not on Tuesdays"))),
        "broken": Way(raising(ValueError("broken"))),
        "may be absent": Way(raising(ValueError("broken")), optional=True),
    }
    work = Work(flops=2e9, bytes=4e6)
    rig.ceilings |= {"TFLOP/s": 0.1, "GB/s": 10.0}
    theirs = {"theirs": {"absent": "gone"}}
    row = measure(Contest(ways, lambda: ONES, work, ("right",), refused=theirs), rig)
    found = row["ways"]
    assert set(found["right"]) == {"check", "us", "ratio", "TFLOP/s", "GB/s", "of_ceiling"}
    for name in ("off", "off, optional"):
        assert found[name]["error"].startswith("WrongResultError: relative error of y is 0.001")
    assert list(found["unwritten"]) == ["error"]
    assert found["broken"] == {"error": "ValueError: broken"}
    assert found["may be absent"] == {"absent": "ValueError: broken"}
    assert found["absent"] == {"absent": "not on Tuesdays"}
    assert found["theirs"] == {"absent": "gone"}
    assert row["rounds"] == 3 and row["work"] == {"flops": 2e9, "bytes": 4e6}
    assert row["floor_us"] == pytest.approx(2e9 / 1e11 * 1e6)  # the products take longer
    assert work.floor({"TFLOP/s": 0.1}) is None
    seconds = 1e-6 * found["right"]["us"]["p50"]
    assert found["right"]["of_ceiling"] == pytest.approx(0.02 / seconds)
    assert found["right"]["GB/s"] == pytest.approx(4e-3 / seconds)


def test_percentiles_are_of_times_and_of_ratios_round_by_round():
    assert quantiles([5.0, 1.0, 2.0, 4.0, 3.0, 0.0]) == {"p20": 1.0, "p50": 2.5, "p80": 4.0}
    times = {"mine": [2.0, 40.0, 6.0], "theirs": [1.0, 20.0, 3.0]}
    beside = ratios(times, ["theirs", "nobody"])
    assert beside["mine"] == {"theirs": {"p20": 2.0, "p50": 2.0, "p80": 2.0}}


def test_rounds_take_turns():
    """Every name once a round, in every place equally often, behind either of two others."""
    names = ["a", "b", "c", "d"]
    orders = [rotated(names, index) for index in range(8)]
    assert all(sorted(order) == names for order in orders)
    for place in range(4):
        assert sorted(order[place] for order in orders) == sorted(2 * names)
    before_a = {order[order.index("a") - 1] for order in orders if order[0] != "a"}
    assert before_a == {"b", "d"}
    ran = []
    found = interleave({n: lambda n=n: ran.append(n) or len(ran) for n in names}, 4, 60.0)
    rounds = (0, 1, 0, 1, 2, 3)  # the first two are the warm-up
    assert ran == [name for index in rounds for name in rotated(names, index)]
    assert found["a"] == [i + 1 for i, n in enumerate(ran) if n == "a"][2:]


def test_time_ends_the_rounds_but_not_the_first_few():
    assert len(interleave({"a": lambda: 0}, 100, 0.0)["a"]) == clock.FEWEST_ROUNDS
    assert len(interleave({"a": lambda: 0}, 3, 0.0)["a"]) == 3


def test_a_run_that_was_cut_short_is_taken_up(tmp_path):
    """Rows of the same machine, code and config are found again, of another commit are not."""
    path, here, case = tmp_path / "it.json", {"commit": "a", "date": "now"}, {"op": "norm"}

    def file(config=3, **machine):
        return ResultsFile(path, here | machine, {"rounds": config})

    file().put({"case": case, "ways": {"aten": {}}})
    later = file(date="later")
    assert later.find(case, ["aten"]) and not later.find(case, ["aten", "liger"])
    assert not file(commit="b").find(case, []) and not file(4).find(case, [])
    assert json.loads(path.read_text())["machine"]["commit"] == "a"
    later.put({"case": case, "error": "OutOfMemoryError"})  # which is no result
    assert later.find(case, ["aten"]) is later.find(case, []) is None


DOCUMENTED = [path for path in sorted((machine.ROOT / "bench").rglob("*.py"))
              if ">>> " in path.read_text()]  # fmt: skip


@pytest.mark.parametrize("path", DOCUMENTED, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_examples_in_docstrings(path):
    """Pytest collects those of tests and fused_remat only."""
    name = ".".join(path.relative_to(machine.ROOT).with_suffix("").parts)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    found = doctest.testmod(importlib.import_module(name), optionflags=options)
    assert found.attempted > 0 and found.failed == 0
