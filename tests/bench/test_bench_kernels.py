"""`python -m bench kernels` at tiny sizes on this CPU."""

import importlib.util
import json
import re

import pytest
import torch

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
    """The rows after `python -m bench kernels`."""
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


def test_what_is_compiled_is_measured_too(tmp_path):
    rows = bench(tmp_path, "--op", "norm", "--models", "gpt2", "--providers", "compile")
    for row in rows[2:]:
        assert list(row["ways"]) == ["aten", "compile"]  # the baseline is always there
        assert {"us", "check"} <= set(row["ways"]["compile"])


def test_absent_peers_are_listed_with_the_reason(rows):
    row = next(row for row in rows if row["case"]["op"] == "norm")
    missing = importlib.util.find_spec("quack") is None
    why = "quack is not installed" if missing else "needs a CUDA device"
    assert row["ways"]["quack"] == {"absent": why}
    assert row["ways"]["fused_remat triton"] == {"absent": "needs a CUDA device"}
    assert re.search(f"^quack +absent: {why}$", report.block(row), re.M)


def test_a_run_is_taken_up_where_it_ended(tmp_path, monkeypatch, capsys):
    """A direction that cannot be measured costs no other, and is tried again."""
    one, measured, measure = ("--op", "norm", "--models", "gpt2"), [], command.measure

    def too_large(contest, rig):
        measured.append(contest)
        if len(measured) == 2:
            raise MemoryError("the backward is too large")
        return measure(contest, rig)

    monkeypatch.setattr(command, "measure", too_large)
    *_, fwd, bwd = bench(tmp_path, *one)
    assert "us" in fwd["ways"]["aten"] and fwd["case"]["direction"] == "fwd"
    assert bwd["error"] == "MemoryError: the backward is too large"
    assert "FAIL: MemoryError" in report.block(bwd)
    *_, fwd, bwd = rows = bench(tmp_path, *one)
    assert "us" in fwd["ways"]["aten"] and "us" in bwd["ways"]["aten"] and "error" not in bwd
    tried = len(measured)
    capsys.readouterr()
    assert bench(tmp_path, *one) == rows and len(rows) == 4  # with the ceilings
    known = capsys.readouterr().out
    assert len(measured) == tried and "2 of 2 known before" in known and report.block(bwd) in known
    bench(tmp_path, *one, "--fresh")
    assert len(measured) == tried + 2


def test_a_dry_run_leaves_measured_results_alone():
    """By default; and rows of two dtypes are two cases."""
    assert command.parse(TINY).out.parts[-2:] == ("build", "dry-run")
    assert command.parse(["--device", "cpu"]).out.parts[-2:] == ("bench", "results")
    args = [command.parse([*TINY, "--dtype", name]) for name in ("float32", "bfloat16")]
    first, second = (next(command.items(command.rig_of(a), a)).case("fwd") for a in args)
    assert first != second and first | {"dtype": "bfloat16"} == second


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param(
            ["--device", "cuda"],
            "no CUDA device",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is one"),
        ),
        (["--device", "tpu"], "must be cpu or cuda, not tpu"),
        (["--op", "nonsense"], "invalid choice: 'nonsense'"),
        (["--tokens", "0"], "at least 1, not 0"),
        (["--threads", "0"], "at least 1, not 0"),
        (["--sweep", "128", "-1"], "at least 1, not -1"),
    ],
)
def test_bad_options_are_usage_errors(options, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.parse(options)
    assert message in capsys.readouterr().err


def test_sizes_are_the_models_then_the_sweep_each_once():
    options = ["--device", "cpu", "--models", "gpt2", "smollm-135m", "--tokens", "512"]
    sizes = command.sizes_of(command.parse([*options, "--sweep", "256", "512"]))
    found = [(s.model.name, s.batch, s.seq_len) for s in sizes]
    assert found == [("gpt2", 1, 512), ("smollm-135m", 1, 512), ("smollm-135m", 1, 256)]
    assert at_tokens(MODELS["bert-base"], 4096).batch == 8


def test_models_are_those_of_their_cards():
    """Parameters of a block, counted from the shapes, as the models' cards have them in all."""
    millions = {}
    for m in MODELS.values():
        attention = m.d_model * m.head_dim * (2 * m.nhead + 2 * m.kv_heads)
        millions[m.name] = (attention + (3 if m.gated else 2) * m.d_model * m.d_ff) / 1e6
    layers = {"bert-base": 12, "gpt2": 12, "vit-l": 24, "smollm-135m": 30,
              "qwen2-1.5b": 28, "llama3-8b": 32}  # fmt: skip
    total = {name: round(layers[name] * count) for name, count in millions.items()}
    assert total == {"bert-base": 85, "gpt2": 85, "vit-l": 302, "smollm-135m": 106,
                     "qwen2-1.5b": 1310, "llama3-8b": 6979}  # fmt: skip


def test_a_wrong_result_is_said_in_its_line_and_among_the_failures():
    case = {"op": "it", "name": "doubled", "direction": "bwd", "model": "m", "sizes": {}}
    ways = {"aten": {"absent": "no"}, "mine": {"error": "WrongResultError: off"}}
    assert "mine  FAIL: WrongResultError" in report.block({"case": case, "ways": ways})
    assert len(report.failures([{"case": case, "ways": ways}])) == 1
