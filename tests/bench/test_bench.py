"""The commands at tiny sizes: what they ask for, measure, take up, and when they fail."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from bench.audit import command as audit
from bench.commands import frontier, layers, model, plan
from bench.kernels import command as kernels
from bench.measure import machine
from bench.pages.layers import TARGETS, case_table, target_table, verdict
from bench.subjects.layer_ways import WAYS, select
from bench.subjects.stacks import PEERS
from fused_remat.policies import EXACT_PRESETS

#: Of `bench layers`.
TINY = "--batch 2 --seq-len 9 --d-model 16 --nhead 2 --norm pre --rounds 2"
STOCK = ["eager", "checkpoint", "checkpoint_reentrant", "selective_matmuls",
         "selective_attention", "torch_remat"]  # fmt: skip
EVERY_WAY = [*STOCK, *EXACT_PRESETS]


def options(text):
    return ["--device", "cpu", *text.split()]


def bench(folder, text, status=0):
    assert layers.main([*options(f"{TINY} {text}"), "--out", str(folder)]) == status
    return json.loads((folder / "layers-cpu.json").read_text())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("bench"), f"--ways {' '.join(EVERY_WAY)}")


@pytest.mark.parametrize("arguments", [[], ["nonsense"]])
def test_anything_but_a_sub_command_is_a_usage_error(arguments):
    command = [sys.executable, "-m", "bench", *arguments]
    done = subprocess.run(command, cwd=machine.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: python -m bench {architectures,") and not done.stdout


#: Command -> what it refuses, each to be split at spaces.
BAD = {
    layers: ("--nhead=3", "--ways=fastest", "--d-model=511", "--dropout=1", "--rounds=0",
             *(["--device=cuda"] * (not torch.cuda.is_available()))),
    frontier: ("--seq-len=100", "--d-model=100", "--ways=fastest"),
    model: ("--model=gpt5", "--ways=fastest", "--memory=much", "--layers=31", "--seq=0",
            "--lora=-1 --layers=1", "--article --model=vit-l", "--losses=-1 --layers=1"),
    plan: ("--d-model=100", "--nhead=5", "--dropout=1", "--seq=-1", "--dtype=int8"),
    kernels: ("--device=tpu", "--op=nonsense", "--tokens=0", "--threads=0", "--sweep 128 -1"),
    audit: ("--arch=75", "--only=norm --write-budgets"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("command", "text"),
    [(command, text) for command, given in BAD.items() for text in given],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_bad_options_are_usage_errors(command, text, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(text.split())
    assert "error: " in capsys.readouterr().err


def test_axes_make_a_grid():
    """Each point once; heads as wide as those of the sizes they take the place in."""
    args = layers.parse(options("--d-model 64 128 --seq-len 9 --norm pre --dropout 0 --causal"))
    sizes = [(c.batch, c.seq_len, c.d_model, c.nhead) for c in args.cases]
    assert sizes == [(b, 9, *width) for b in (4, 8) for width in ((64, 1), (128, 2))]
    assert all(c.causal and c.dtype == "float32" for c in args.cases)
    args = layers.parse(options("--nhead 2 4 --batch 1 --norm pre --dropout 0"))
    assert [(c.d_model, c.nhead) for c in args.cases] == [(512, 2), (512, 4), (1024, 2), (1024, 4)]


def test_ways_are_asked_for_by_name_or_group():
    """A group has every way once: none that only another device runs, or is the same here."""
    assert select(["stock"], "cpu") == STOCK
    assert select(["full_triton", "lean"], "cpu") == ["eager", "lean", "full_triton"]
    usual = layers.parse(["--device", "cpu"]).ways
    assert {"compile_budget_0.5", "fast", "fast_compiled"} < set(usual)
    elsewhere = {f"{name}_{backend}" for name in EXACT_PRESETS for backend in ("eager", "triton")}
    assert set(WAYS) - set(select(WAYS.groups, "cpu")) == elsewhere
    on_gpu = set(select(WAYS.groups, "cuda"))
    assert set(WAYS) - on_gpu == {f"{name}_triton" for name in EXACT_PRESETS}
    with pytest.raises(ValueError, match="unknown way 'fastest'; valid: stock, compiled, ours"):
        select(["fastest"], "cpu")


def test_every_way_is_measured(results):
    assert [row["case"]["dropout"] for row in results["results"]] == [0.0, 0.1]
    for row in results["results"]:
        assert row["machine"] == results["machine"] and row["rounds"] == 2
        assert list(row["ways"]) == EVERY_WAY
        for name, found in row["ways"].items():
            if "unavailable" in found:
                assert name == "torch_remat"
                continue
            for part in ("forward_seconds", "backward_seconds", "step_seconds", "host_seconds"):
                assert 0 < found[part]["p20"] <= found[part]["p50"] <= found[part]["p80"]
            assert list(found["step_ratio"]) == ["eager", "checkpoint"]
        for name in ("eager", "checkpoint"):
            assert set(row["ways"][name]["step_ratio"][name].values()) == {1.0}
    lines = case_table(results["results"][0]).splitlines()
    assert [line.split()[0] for line in lines[1:]] == EVERY_WAY
    covered = [t for t in TARGETS if any(t.covers(row["case"]) for row in results["results"])]
    assert target_table(results).count("not measured") == len(TARGETS) - len(covered)
    assert all(target.sizes == () for target in covered)


def test_memory_is_that_of_one_layer(results):
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


def test_a_run_is_taken_up_where_it_ended(tmp_path, monkeypatch, capsys):
    """What is known is not measured again, and a case that cannot be measured costs no other."""
    measured = []

    def measure(subject, ways, names, rig):
        measured.append((subject.x.shape[1], subject.dropout))
        if subject.x.shape[1] == 8:
            raise MemoryError("too large")
        return {"rounds": 1, "ways": {name: {"unavailable": "not today"} for name in names}}

    monkeypatch.setattr(layers, "measure", measure)
    bench(tmp_path, "--ways full --dropout 0")
    assert "absent: not today" in capsys.readouterr().out
    assert len(bench(tmp_path, "--ways full --dropout 0 0.1")["results"]) == 2
    assert "(in the file already, 1 rounds)" in capsys.readouterr().out
    assert measured == [(9, 0.0), (9, 0.1)]
    bench(tmp_path, "--ways lean --dropout 0")  # a way that the row lacks
    assert len(bench(tmp_path, "--ways full --dropout 0.1 --fresh")["results"]) == 2
    assert measured[2:] == [(9, 0.0), (9, 0.1)]
    assert len(bench(tmp_path, "--seq-len 8 9 --ways lean --dropout 0", 1)["results"]) == 2
    assert measured[4:] == [(8, 0.0)]
    assert "(FAIL: MemoryError: too large)" in capsys.readouterr().out


#: Command -> its registry, and options.
QUICK = {
    layers: (WAYS, f"{TINY} --dropout 0 --ways"),
    frontier: (WAYS, "--tokens 8 --seq-len 8 --d-model 16 --head-dim 8 --rounds 1 --ways"),
    plan: (PEERS, "--layers 2 --batch 1 --seq 8 --d-model 16 --nhead 2 --rounds 1 --no-compile"),
}


@pytest.mark.parametrize(("way", "status"), [("full", 1), ("eager", 1), ("selective_matmuls", 0)])
@pytest.mark.parametrize("command", QUICK, ids=lambda command: command.__name__)
def test_no_speed_of_what_is_wrong_and_ours_fails_the_command(
    command, way, status, tmp_path, monkeypatch, capsys
):
    """Of PyTorch's own, FAIL in the table says it; by eager all are judged."""
    pytest.importorskip("matplotlib")
    if way == "eager" and command is not layers:
        status = 2  # nothing is left to draw
    registry, text = QUICK[command]

    def doubled(build):
        return lambda *given: lambda x: 2 * build(*given)(x)

    if way in registry:
        wrong = dataclasses.replace(registry[way], build=doubled(registry[way].build))
        monkeypatch.setitem(registry, way, wrong)
    else:
        monkeypatch.setattr(plan, "forward_of", doubled(plan.forward_of))
    given = options(text) if command is plan else options(f"{text} {way}")
    assert command.main([*given, "--out", str(tmp_path)]) == status
    if command is layers:
        (row,) = json.loads((tmp_path / "layers-cpu.json").read_text())["results"]
        assert list(row["ways"][way]) == ["failure"]
    pages = "".join(path.read_text() for path in tmp_path.glob("*.md"))
    assert status == 2 or "relative error of " in "".join(capsys.readouterr()) + pages


def row(way, ratio, commit="now", **case):
    """A case in which one way was measured: `ratio` times checkpoint, or wrong if None."""
    sizes = {"dtype": "float32", "batch": 4, "seq_len": 512, "d_model": 512, "nhead": 8}
    right = {"step_ratio": {"checkpoint": {"p50": ratio}}}
    return {
        "case": {"norm": "pre", "dropout": 0.0, **sizes, **case},
        "machine": {"commit": commit, "date": "some day"},
        "ways": {way: {"failure": "wrong"} if ratio is None else right},
    }


def post(ratio, **more):
    return row("lean", ratio, **{"norm": "post", **more})


WIDE = {"d_model": 1024}


@pytest.mark.parametrize(
    ("rows", "met", "measured"),
    [
        ([post(0.88)], True, "0.880 (worst: lean (4, 512, 512, 8))"),
        ([post(0.8), post(0.881, **WIDE)], False,
         "0.800 to 0.881 (worst: lean (4, 512, 1024, 8)); 1 of 2 within"),
        ([post(0.8), post(None, **WIDE)], False, "wrong results: lean (4, 512, 1024, 8)"),
        ([post(0.8, commit="before")], None, "not measured"),
        ([row("full", 0.8, norm="post")], None, "not measured"),
        *(([post(0.8, **other)], None, "not measured") for other in (
            {"norm": "pre"}, {"dropout": 0.1}, {"dtype": "bfloat16"}, {"causal": True},
            {"activation": "relu"})),
    ],
)  # fmt: skip
def test_verdicts(rows, met, measured):
    (target,) = [target for target in TARGETS if target.norm == "post" and len(target.limits) == 1]
    machine = {"commit": "now", "date": "another day"}
    found = verdict(target, {"machine": machine, "config": {}, "results": rows})
    assert found.target == "lean ≤ 0.88 × checkpoint (float32, post-norm, dropout 0)"
    assert (found.met, found.measured) == (met, measured)


def test_a_verdict_of_one_shape_names_every_ratio():
    machine = {"commit": "now", "date": "another day"}
    for wide, measured in (({}, "full 0.901"), (WIDE, "not measured")):
        data = {"machine": machine, "config": {}, "results": [row("full", 0.901, **wide)]}
        found = verdict(TARGETS[0], data)
        assert found.target.startswith(
            "full ≤ 0.90 × checkpoint (float32, pre-norm, dropout 0, (4,"
        )
        assert not found.met and found.measured == measured


@pytest.mark.parametrize("native", [True, False])
def test_a_verdict_says_where_stock_products_are_slow(native):
    target = next(t for t in TARGETS if t.dtype == "bfloat16" and "full" in t.limits)
    machine = {"commit": "now", "date": "a day", "native_bfloat16": native}
    rows = [row("full", 0.1, dtype="bfloat16") | {"machine": machine}]
    found = verdict(target, {"machine": machine, "config": {}, "results": rows})
    assert found.met and ("unaccelerated" in found.measured) is not native
