"""`python -m bench gpu` in a dry run: all but the clock of what runs on a GPU."""

import gc
import json
import os
import re
import sys
import types

import pytest
import torch
from places import target

from bench.audit.cases import tile_name
from bench.commands import gpu
from bench.gpu import layers as gpu_layers
from bench.gpu.kinds import KINDS
from bench.measure import options
from bench.measure.contest import Rig
from bench.measure.results import ResultsFile
from bench.pages.gpu import failures
from bench.tuning import attention_tiles
from fused_remat.policies import EXACT_PRESETS
from fused_remat.triton import tables

TARGET = target()

#: What is not there, or serves nothing here: without a GPU.
PEERS = {
    *("flash", "cudnn", "efficient", "varlen", "flex", "flash-attn", "flash-attn 3", "bare"),
    *("liger", "liger tiled", "liger fused", "quack", "quack recompute", "torch_remat"),
}
ABSENT = re.compile(
    "needs a CUDA device|is not installed|no backward on a CPU|it has no norm|the same as aten|"
    "No module named|nothing but the products|ATen's products"
)


def rows_of(folder):
    return json.loads((folder / "gpu.json").read_text())["results"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    gc.freeze()  # the interpreter makes much garbage: do not walk all of torch for it
    try:
        assert gpu.main(["--dry-run", "--out", str(folder)]) == 0
    finally:
        gc.unfreeze()
    return rows_of(folder)


def test_every_section_has_rows_and_nothing_failed(rows):
    assert {row["case"]["section"] for row in rows} == set(gpu.SECTIONS)
    assert failures(rows) == []
    assert not any("error" in row or "skipped" in row for row in rows)


def test_every_way_is_right_and_timed(rows):
    measured = [row for row in rows if "ways" in row]
    assert len(measured) > 30
    for row in measured:
        for name, way in row["ways"].items():
            if "absent" in way:  # never ours, and always with a reason
                known = name in PEERS or row["case"]["name"].startswith("linear_bwd")
                assert known and ABSENT.search(way["absent"]), (row["case"], name, way)
                continue
            assert set(way["us"]) == {"p20", "p50", "p80"}, (row["case"], name)
            if row["case"]["section"] != "ceilings":
                assert way["check"] and way["ratio"], (row["case"], name)


def test_every_tile_and_rung_is_there(rows):
    ways = {(row["case"]["section"], row["case"]["name"]): row.get("ways", {}) for row in rows}
    for kernel, families in tables.TILES.items():
        names = {tile_name(tile) for tile in families["interpreter"]}
        assert set(ways["tiles", f"tiles of {kernel}"]) == {"bare", *names}
    for kernel in attention_tiles.KERNELS:
        found = ways["attention tiles", f"tiles of attention_{kernel} causal"]
        tiles = attention_tiles.CANDIDATES["interpreter"].get(kernel, ())
        assert len(found) == 1 + len(tiles)
        assert {attention_tiles.tile_name(tile) for tile in tiles} <= set(found)
    layers = [row["ways"] for row in rows if row["case"]["section"] == "layers"]
    assert [list(found) for found in layers] == [list(gpu_layers.WAYS), *[list(gpu_layers.DRY)] * 2]
    assert not any("step_peak_bytes" in way for found in layers for way in found.values())


def test_the_long_case_is_compared_with_what_keeps_all(rows):
    (row,) = [row for row in rows if row["case"]["section"] == "long"]
    assert row["ways"]["none"]["check"]["against"] == "float64"
    assert {"eager", "none"} <= set(row["ways"]["eager"]["ratio"])


def test_every_way_of_a_profile_is_taken_apart(rows):
    (row,) = [row for row in rows if row["case"]["section"] == "profile"]
    assert list(row["ways"]) == ["eager", "checkpoint", *EXACT_PRESETS]
    for name, way in row["ways"].items():
        assert way["us"]["p50"] - way["busy_us"] == way["gaps_us"]
        assert set(way["kinds_us"]) == set(KINDS) and way["launches"] and way["kernels"], name
        assert {"products", "attention", "norms", "pointwise"} == set(way["least_us"]), name
        assert {"us", "check", "ratio", "host_us", "busy_us", "gaps_us"} <= set(way), name


@pytest.fixture
def rig():
    return Rig(torch.device("cpu"), torch.float32, True, TARGET, ends=0.0)


def test_a_failing_case_is_a_row(rig, tmp_path):
    def measure(rig):
        raise ValueError("no\nsuch size")

    results = ResultsFile(tmp_path / "gpu.json", {}, {})
    gpu.run_entry(({"name": "it"}, measure), "norms", rig, results)
    (row,) = rows_of(tmp_path)
    assert row["error"] == "ValueError: no such size"
    assert failures([row]) == ["norms it: ValueError: no such size"]


def test_what_was_measured_is_not_measured_again(rig, tmp_path, monkeypatch):
    """Nor is the case in which a worker ended, until the command is given again."""
    measured, path = [], tmp_path / "gpu.json"

    def section(needs, *names):
        entries = [({"name": n}, lambda rig, n=n: measured.append(n) or {}) for n in names]
        return gpu.Section(1.0, needs, lambda rig: entries)

    def run(seconds, **code):
        results = ResultsFile(path, {"gpu": "this"} | code, {})
        ends = gpu.time.perf_counter() + seconds
        gpu.run_all(sections, Rig(rig.device, rig.dtype, False, TARGET, ends), results)
        return {row["case"]["name"]: row for row in results.own}

    sections = {"it": section(1.0, "done", "crashed", "next"), "long": section(1e9, "too long")}
    monkeypatch.setattr(gpu, "SECTIONS", sections)
    monkeypatch.setattr(gpu, "line", lambda row: "")
    for name, more in (("done", {"error": "no"}), ("crashed", {"error": gpu.UNFINISHED})):
        case = {"section": "it", "name": name}
        ResultsFile(path, {"gpu": "this", "date": "then"}, {}).put({"case": case} | more)
    found = run(60)
    assert measured == ["next"]
    assert found["crashed"]["error"] == gpu.UNFINISHED and "skipped" in found["too long"]
    run(1e10)  # more time
    assert measured == ["next", "too long"]
    gpu.begin(again := ResultsFile(path, {"gpu": "this"}, {}), fresh=False)
    again.write()
    run(1e10)
    assert measured[2:] == ["crashed"]
    gpu.begin(again := ResultsFile(path, {"gpu": "this"}, {}), fresh=True)
    assert again.rows == []
    run(1e10, source="other code")
    assert measured[3:] == ["done", "crashed", "next", "too long"]


@pytest.mark.parametrize(("statuses", "status"), [((gpu.BROKEN, 1, 0), 0), ((1,) * 8, 1)])
def test_workers_follow_one_another_until_one_ends_well(statuses, status, monkeypatch, tmp_path):
    """That none does is a failure, though they wrote nothing that says so."""
    left, commands = list(statuses), []

    def run(command, **rest):
        commands.append(command)
        return types.SimpleNamespace(returncode=left.pop(0))

    monkeypatch.setattr(gpu.subprocess, "run", run)
    for module in (gpu, options):
        monkeypatch.setattr(module, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu.main(["--out", str(tmp_path / "new")]) == status and not left
    assert all(command[:4] == [sys.executable, "-m", "bench", "gpu"] for command in commands)
    numbers = [command[command.index("--worker") + 1] for command in commands]
    assert numbers == [str(index) for index in range(len(commands))]
    with pytest.raises(SystemExit, match="2"):
        gpu.parse(["--minutes", "0.2"])


def test_dry_runs_are_interpreted(monkeypatch):
    assert os.environ["TRITON_INTERPRET"] == "1"
    with pytest.raises(SystemExit, match="2"):
        gpu.parse([])
    with pytest.raises(SystemExit, match="2"):
        gpu.parse(["--dry-run", "--sections", "nonsense"])
    assert gpu.parse(["--dry-run"]).out.parts[-3:] == ("build", "dry-run", "gpu")
