"""`python -m bench layers` at tiny sizes: what it measures, refuses to measure, and skips."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.commands import layers
from bench.layers.report import TARGETS, case_table, target_table, title, verdict
from bench.measure import machine as timing
from bench.measure import turns
from bench.measure.turns import interleave, quantiles, rotated
from fused_remat.policies import EXACT_PRESETS

ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--device", "cpu", "--sizes", "2x9x16x2", "--dtype", "float32", "--norm", "pre",
         "--rounds", "2"]  # fmt: skip
STOCK = ["eager", "checkpoint", "checkpoint_reentrant", "selective_matmuls",
         "selective_attention", "torch_remat"]  # fmt: skip
EVERY_WAY = [*STOCK, *EXACT_PRESETS]


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    """The results file after `python -m bench layers`."""
    assert layers.main(["--out", str(folder), *QUICK, *arguments]) == 0
    results: dict[str, Any] = json.loads((folder / "layers-cpu.json").read_text())
    return results


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return bench(tmp_path_factory.mktemp("bench"), "--ways", *EVERY_WAY)


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_anything_but_a_sub_command_is_a_usage_error(arguments: list[str]) -> None:
    command = [sys.executable, "-m", "bench", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m bench {audit") and not done.stdout


BAD = ["--sizes=1x2x3", "--sizes=1x2x9x2", "--ways=fastest", "--d-model=511", "--dropout=1"]


@pytest.mark.parametrize("option", BAD)
def test_bad_options_are_usage_errors(option: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        layers.parse([option])


def test_axes_make_a_grid() -> None:
    """Each point once; heads as wide as those of the sizes they take the place in."""
    options = ["--device", "cpu", "--sizes", "4x512x512x8", "2x64x1024x16", "--causal"]
    options += ["--d-model", "64", "128", "--seq-len", "9", "--norm", "pre", "--dropout", "0"]
    args = layers.parse(options)
    sizes = [(c.batch, c.seq_len, c.d_model, c.nhead) for c in args.cases]
    assert sizes == [(4, 9, 64, 1), (4, 9, 128, 2), (2, 9, 64, 1), (2, 9, 128, 2)]
    assert all(c.causal and c.dtype == "float32" for c in args.cases)
    options = ["--device", "cpu", "--nhead", "2", "4", "--batch", "1", "--norm", "pre"]
    args = layers.parse([*options, "--dropout", "0"])
    assert [(c.d_model, c.nhead) for c in args.cases] == [(512, 2), (512, 4), (1024, 2), (1024, 4)]


def test_ways_are_asked_for_by_name_or_group() -> None:
    on_cpu = ["--device", "cpu"]
    assert layers.parse([*on_cpu, "--ways", "stock"]).ways == STOCK
    named = layers.parse([*on_cpu, "--ways", "full_triton", "lean"]).ways
    assert named == ["eager", "lean", "full_triton"]
    everything = layers.parse(on_cpu).ways
    assert {"compile_budget_0.5", "fast", "fast_compiled"} < set(everything)
    assert not any(name.endswith(("_eager", "_triton")) for name in everything)
    assert "fast8" not in everything
    assert layers.parse([*on_cpu, "--ways", "lossy"]).ways == ["eager", "balanced8", "fast8"]


def test_every_way_is_measured(results: dict[str, Any]) -> None:
    assert [row["case"]["dropout"] for row in results["results"]] == [0.0, 0.1]
    for row in results["results"]:
        assert list(row["ways"]) == EVERY_WAY and row["rounds"] == 2
        for name, found in row["ways"].items():
            if "unavailable" in found:
                assert name == "torch_remat"
                continue
            assert "failure" not in found
            for part in ("forward_seconds", "backward_seconds", "step_seconds", "host_seconds"):
                assert 0 < found[part]["p20"] <= found[part]["p50"] <= found[part]["p80"]
            assert list(found["step_ratio"]) == ["eager", "checkpoint"]
        for name in ("eager", "checkpoint"):
            assert set(row["ways"][name]["step_ratio"][name].values()) == {1.0}


def test_memory_is_that_of_one_layer(results: dict[str, Any]) -> None:
    for row in results["results"]:
        kept = {name: found.get("kept_bytes") for name, found in row["ways"].items()}
        assert kept["checkpoint"] == kept["checkpoint_reentrant"] == 2 * 9 * 16 * 4  # the input
        assert kept["torch_remat"] in (None, kept["checkpoint"])
        assert kept["checkpoint"] < kept["selective_matmuls"] < kept["eager"]
        assert kept["checkpoint"] < kept["selective_attention"] < kept["eager"]
        for name, found in row["ways"].items():
            by = {"selective_matmuls": "allocator"}.get(name, "autograd")
            assert found.get("kept_by", by) == by
            # What a checkpoint holds besides, and no hook sees, is the generator's state.
            beside = torch.get_rng_state().nbytes if name in STOCK[1:] else 0
            assert 0 <= found.get("held_bytes", 0) - found.get("kept_bytes", 0) <= beside
        assert kept["checkpoint"] < kept["full"] < kept["lean"] < kept["none"] < kept["eager"]
        full = row["ways"]["full"]
        assert full["kept_bytes_per_token"] == full["kept_bytes"] / 18
        assert full["forward_peak_bytes"] <= full["step_peak_bytes"]
        assert full["backward_peak_bytes"] > 12 * 16 * 16 * 4  # the weights' gradients


def test_the_row_says_where_and_how(results: dict[str, Any]) -> None:
    machine = results["machine"]
    assert machine["threads"] == torch.get_num_threads() and machine["torch"] == torch.__version__
    assert set(machine) >= {"cpu", "cores", "python", "commit", "dirty", "source", "date"}
    assert results["config"]["rounds"] == 2
    assert all(row["machine"] == machine for row in results["results"])


def test_tables_have_a_line_per_way_and_target(results: dict[str, Any]) -> None:
    row = results["results"][0]
    assert title(row) == "float32, pre-norm, dropout 0, (B, S, D, H) = (2, 9, 16, 2)"
    lines = case_table(row).splitlines()
    assert [line.split()[0] for line in lines[1:]] == EVERY_WAY
    assert target_table(results).count("not measured") == len(TARGETS)  # D = 16


def test_a_run_is_taken_up_where_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    measure = layers.measure

    def counted(subject: Any, *rest: Any, **more: Any) -> dict[str, Any]:
        measured.append(subject.dropout)
        return measure(subject, *rest, **more)

    monkeypatch.setattr(layers, "measure", counted)
    ways = ("--ways", "full", "--dropout")
    bench(tmp_path, *ways, "0")
    assert len(bench(tmp_path, *ways, "0", "0.1")["results"]) == 2
    assert measured == [0.0, 0.1]
    bench(tmp_path, "--ways", "lean", "--dropout", "0")  # a way that the row lacks
    assert len(bench(tmp_path, *ways, "0.1", "--fresh")["results"]) == 2
    assert measured == [0.0, 0.1, 0.0, 0.1]
    monkeypatch.setattr(timing, "checkout", lambda: ("another commit", False))
    found = bench(tmp_path, *ways, "0.1")
    assert len(measured) == 5 and len(found["results"]) == 2
    assert [row["machine"]["commit"] for row in found["results"]].count("another commit") == 1


def test_quantiles() -> None:
    assert quantiles([5.0, 1.0, 2.0, 4.0, 3.0, 0.0]) == {"p20": 1.0, "p50": 2.5, "p80": 4.0}


def test_rounds_take_turns() -> None:
    """Every name once a round, in every place equally often, behind either of two others."""
    names = ["a", "b", "c", "d"]
    orders = [rotated(names, index) for index in range(8)]
    assert all(sorted(order) == names for order in orders)
    for place in range(4):
        assert sorted(order[place] for order in orders) == sorted(2 * names)
    before_a = {order[order.index("a") - 1] for order in orders if order[0] != "a"}
    assert before_a == {"b", "d"}
    ran: list[str] = []
    found = interleave({n: lambda n=n: ran.append(n) or len(ran) for n in names}, 4, 60.0)
    rounds = (0, 1, 0, 1, 2, 3)  # the first two are the warm-up
    assert ran == [name for index in rounds for name in rotated(names, index)]
    assert found["a"] == [i + 1 for i, n in enumerate(ran) if n == "a"][2:]


def test_time_ends_the_rounds_but_not_the_first_few() -> None:
    assert len(interleave({"a": lambda: 0}, 100, 0.0)["a"]) == turns.FEWEST_ROUNDS
    assert len(interleave({"a": lambda: 0}, 3, 0.0)["a"]) == 3


def row(way: str, ratio: float | None, commit: str = "now", **case: Any) -> dict[str, Any]:
    """A case in which one way was measured: `ratio` times checkpoint, or wrong if None."""
    sizes = {"dtype": "float32", "batch": 4, "seq_len": 512, "d_model": 512, "nhead": 8}
    found: dict[str, Any] = {"failure": "wrong"}
    if ratio is not None:
        found = {"step_ratio": {"checkpoint": {"p50": ratio}}}
    return {
        "case": {"norm": "pre", "dropout": 0.0, **sizes, **case},
        "machine": {"commit": commit, "date": "some day"},
        "ways": {way: found},
    }


@pytest.mark.parametrize(
    ("rows", "met", "measured"),
    [
        ([row("full", 0.95)], True, "0.950 (worst: full pre-norm 4x512x512x8)"),
        ([row("full", 0.951)], False, "0.951 (worst: full pre-norm 4x512x512x8)"),
        (
            [row("full", 0.9), row("full", 0.96, d_model=1024)],
            False,
            "0.900 to 0.960, 1 of 2 within (worst: full pre-norm 4x512x1024x8)",
        ),
        (
            [row("full", 0.9), row("full", None, d_model=1024)],
            False,
            "wrong results: full pre-norm 4x512x1024x8",
        ),
        ([row("full", 0.9, "before")], None, "not measured"),
        ([row("lean", 0.9)], None, "not measured"),
        ([row("full", 0.9, norm="post")], None, "not measured"),
        ([row("full", 0.9, dropout=0.1)], None, "not measured"),
        ([row("full", 0.9, d_model=256)], None, "not measured"),
        ([row("full", 0.9, dtype="bfloat16")], None, "not measured"),
        ([row("full", 0.9, causal=True)], None, "not measured"),
        ([row("full", 0.9, activation="relu")], None, "not measured"),
    ],
)
def test_verdicts(rows: list[dict[str, Any]], met: bool | None, measured: str) -> None:
    target = TARGETS[0]
    assert target.text == "full ≤ 0.95× checkpoint (float32, pre-norm, dropout 0)"
    machine = {"commit": "now", "date": "another day"}
    found = verdict(target, {"machine": machine, "config": {}, "results": rows})
    assert (found.met, found.measured) == (met, measured)


@pytest.mark.parametrize("native", [True, False])
def test_a_verdict_says_where_stock_products_are_slow(native: bool) -> None:
    target = next(t for t in TARGETS if t.dtype == "bfloat16" and t.ways == ("full",))
    machine = {"commit": "now", "date": "a day", "native_bfloat16": native}
    rows = [row("full", 0.1, dtype="bfloat16") | {"machine": machine}]
    found = verdict(target, {"machine": machine, "config": {}, "results": rows})
    assert found.met and ("unaccelerated" in found.measured) is not native
