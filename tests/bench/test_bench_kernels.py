"""`python -m bench kernels` at tiny sizes on this CPU."""

import json

import pytest

from bench.kernels import command
from bench.kernels.shapes import MODELS, at_tokens
from bench.kernels.table import OPS
from bench.pages import kernels as report

TINY = ["--device", "cpu", "--dry-run", "--models", "gpt2", "qwen2-1.5b"]
#: Compiled once, below: each shape takes seconds.
COMPILED = ("compile", "flex")
UNCOMPILED = [n for n in dict.fromkeys(n for op in OPS.values() for n in op)
              if n not in COMPILED]  # fmt: skip


def bench(folder, *arguments):
    given = arguments if "--providers" in arguments else ("--providers", *UNCOMPILED, *arguments)
    command.main(["--out", str(folder), *TINY, *given])
    return json.loads((folder / "kernels-cpu.json").read_text())["results"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("kernels"))


def test_every_op_is_measured_both_ways_beside_its_peers(rows):
    found = {(row["case"]["op"], row["case"].get("direction")) for row in rows}
    assert found == {(op, way) for op in OPS for way in ("fwd", "bwd")} | {("ceilings", None)}
    assert report.failures(rows) == []
    for row in rows:
        if row["case"]["op"] == "ceilings":
            continue
        ways = row["ways"]
        assert set(ways) <= set(OPS[row["case"]["op"]])
        assert {"us", "ratio", "check", "of_ceiling"} <= set(ways["aten"]), row["case"]
        assert ways["aten"]["ratio"]["aten"]["p50"] == 1.0
        assert any(name.startswith("fused_remat") for name, way in ways.items() if "us" in way) or (
            row["case"]["op"] == "linear"  # whose kernels need a GPU
        )
        assert row["floor_us"] > 0 and any(row["work"].values())
    norm = next(row for row in rows if row["case"]["op"] == "norm")
    why = {name: way["absent"] for name, way in norm["ways"].items() if "absent" in way}
    assert why["fused_remat triton"] == "needs a CUDA device"
    assert f"absent: {', '.join(f'{name} ({said})' for name, said in why.items())}" in (
        report.block(norm)
    )


def test_a_run_is_taken_up_where_it_ended(tmp_path, monkeypatch, capsys):
    """A direction that cannot be measured costs no other, and is tried again."""
    one, left = ("--op", "norm", "--models", "gpt2"), [None, MemoryError("too large"), None, None]

    def measure(contest, rig):
        if error := left.pop(0):
            raise error
        return {"ways": {n: {"absent": "today"} for n in (*contest.ways, *contest.absent)}}

    monkeypatch.setattr(command, "measure", measure)
    *_, fwd, bwd = bench(tmp_path, *one)
    assert "ways" in fwd and fwd["case"]["direction"] == "fwd"
    assert bwd["error"] == "MemoryError: too large" and "FAIL: Mem" in report.block(bwd)
    *_, fwd, bwd = rows = bench(tmp_path, *one)  # both, on the same inputs
    assert "ways" in fwd and "ways" in bwd and "error" not in bwd and not left
    capsys.readouterr()
    assert bench(tmp_path, *one) == rows and len(rows) == 4  # with the ceilings
    assert "2 of 2 known before" in capsys.readouterr().out
    left += [None, None]
    bench(tmp_path, *one, "--fresh")
    assert not left


def test_a_dry_run_leaves_measured_results_alone():
    """By default; and rows of two dtypes are two cases."""
    assert command.parse(TINY).out.parts[-2:] == ("build", "dry-run")
    assert command.parse(["--device", "cpu"]).out.parts[-2:] == ("bench", "results")
    args = [command.parse([*TINY, "--dtype", name]) for name in ("float32", "bfloat16")]
    (first, _), (second, _) = (next(command.problems(command.rig_of(a), a)) for a in args)
    assert first != second and first | {"dtype": "bfloat16"} == second


def test_sizes_are_the_models_then_the_sweep_each_once():
    options = ["--device", "cpu", "--models", "gpt2", "smollm-135m", "--tokens", "512"]
    sizes = command.sizes_of(command.parse([*options, "--sweep", "256", "512"]))
    found = [(s.model.name, s.batch, s.seq_len) for s in sizes]
    assert found == [("gpt2", 1, 512), ("smollm-135m", 1, 512), ("smollm-135m", 1, 256)]
    assert at_tokens(MODELS["bert-base"], 4096).batch == 8


def test_a_wrong_result_is_said_in_its_line_and_among_the_failures():
    case = {"op": "it", "name": "doubled", "direction": "bwd", "model": "m", "sizes": {}}
    ways = {"aten": {"absent": "no"}, "mine": {"error": "WrongResultError: off"}}
    assert "  mine  FAIL: WrongResultError" in report.block({"case": case, "ways": ways})
    assert len(report.failures([{"case": case, "ways": ways}])) == 1
