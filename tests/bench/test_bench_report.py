"""What `python -m bench report` makes of result files, and of those that are not there."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from bench import tables
from bench.commands import profile as profile_step
from bench.gpu import kernels as gpu_kernels
from bench.kernels.problem import DIRECTIONS
from bench.kernels.table import OPS
from bench.measure.contest import Rig
from bench.measure.machine import environment
from bench.pages import command, frontier, kernels, overview, pictures, presets
from bench.subjects.layers import Case

ROOT = Path(__file__).resolve().parents[2]


def ceiling(unit, most):
    return {"case": {"op": "ceilings"}, "unit": unit, "ways": {"torch": {unit: most}}}


def kernel(direction, floor, work, **us):
    case = {"op": "norm", "name": "layer_norm", "direction": direction, "model": "gpt2",
            "batch": 1, "seq_len": 256, "sizes": {"tokens": 256}}  # fmt: skip
    ways = {name.replace("_", " "): {"us": {"p50": t}} for name, t in us.items()}
    ways["liger"] = {"absent": "needs a CUDA device"}
    return {"case": case, "floor_us": floor, "work": work, "ways": ways}


def results(**config):
    """Two cases: of memory alone, and one that products bound."""
    wrong = kernel("bwd", 20.0, {"flops": 2e7, "bytes": 1e4}, aten=40.0)
    wrong["ways"]["fused_remat eager"] = {"error": "WrongResultError: relative error of dx is 1"}
    fast = kernel("fwd", 10.0, {"flops": 0.0, "bytes": 1e5}, aten=25.0, compile=20.0, bare=12.0)
    fast["ways"]["fused_remat eager"] = {"us": {"p50": 16.0}}
    found = [ceiling("GB/s", 10.0), ceiling("TFLOP/s", 1.0), fast, wrong]
    machine = environment("cpu") | config.pop("machine", {})
    rows = [row | {"machine": machine} for row in found]
    return {"machine": machine, "config": config, "results": rows}


def test_a_kernel_beside_its_floor_and_its_best_peer():
    text = kernels.section(results())
    assert "Ceilings: 10 GB/s, 1 TFLOP/s." in text
    shares = "62% (62% to 62%) | 50% (50% to 50%) | 0.80× (0.80 to 0.80)"
    assert f"| norm | fwd | memory | eager | 1 | {shares} |" in text
    assert "| norm | bwd | products | absent | 1 | - | 50% (50% to 50%) | |" in text
    fast = "| - | 0.10 | 10 µs | memory | eager, 16 µs (62%) | compile, 20 µs (50%) | 0.80× |"
    assert fast in text  # bare, in 12 µs, does less
    assert "(FAIL: fused_remat eager) | bwd | 0.02 | 0.01 | 20 µs | products | absent |" in text
    assert "Absent everywhere: liger (needs a CUDA device)." in text


def test_what_counts_as_work_is_said_of_every_op():
    rows = [row.split("|")[1:3] for row in kernels.work_table().splitlines()[2:]]
    assert [op.strip() for op, said in rows if len(said) > 10] == list(OPS)


def test_a_dry_run_is_no_measurement():
    with pytest.raises(ValueError, match="a dry run is no measurement"):
        kernels.section(results(dry_run=True))


def test_parts_without_results_say_so(tmp_path):
    parts = (
        "frontier.readme frontier.section kernels.cpu kernels.gpu "
        "layers.cases layers.profile layers.targets models.section plans.readme "
        "plans.section"
    )
    assert {command.part(name, root=tmp_path) for name in parts.split()} == {command.UNMEASURED}


def test_a_set_of_a_gpu_is_drawn_and_shown_with_its_machine(tmp_path):
    pytest.importorskip("matplotlib")
    gpu = {"gpu": "NVIDIA H200", "driver": "1.2", "commit": "0123456789", "dirty": True}
    layer = {"dtype": "bfloat16", "norm": "pre", "dropout": 0.0, "batch": 8, "seq_len": 2048,
             "nhead": 8, "d_model": 512}  # fmt: skip
    eager = {"ratio": {"eager": dict.fromkeys(("p20", "p50", "p80"), 1.0)}, "kept_bytes": 9}
    data = results(machine=gpu)
    step = {"case": {"section": "layers"}, "layer": layer, "machine": data["machine"]}
    data["results"].append(step | {"ways": {"eager": eager}})
    root, folder = tmp_path / "results", tmp_path / "results" / "2030-01-01-h200-0123456"
    folder.mkdir(parents=True)
    others = {"other": results(), "dry": results(machine=gpu, dry_run=True)}  # of a CPU, of none
    for name, found in ({"gpu": data} | others).items():
        (folder / f"{name}.json").write_text(json.dumps(found))
    assert [path for path, _ in tables.gpu_files(root)] == [folder]
    text = kernels.gpu(root)
    assert text.startswith("### NVIDIA H200 (`bench/results/2030-01-01-h200-0123456`)")
    assert "Measured on NVIDIA H200, driver 1.2, " in text
    assert "commit 0123456 with uncommitted changes." in text
    assert frontier.section(root).startswith("### NVIDIA H200 (")
    assert [path.name for path in pictures.stale(root)] == ["frontier.png", "frontier.svg"]
    pictures.rewrite(root)
    assert pictures.stale(root) == []
    eager["kept_bytes"] = 7  # measured again: all is relative to it
    (folder / "gpu.json").write_text(json.dumps(data))
    assert len(pictures.stale(root)) == 2


def test_rows_of_bench_gpu_are_told_apart_by_op_direction_and_sizes():
    """Of its contests of ops; our own routes and tiles, in the same file, are nobody's peers."""
    rig = Rig(torch.device("cpu"), torch.float32, False, None, math.inf)  # no tensor is made of it
    given = {"models": gpu_kernels.model_entries, "attention": gpu_kernels.attention_entries}
    cases = [
        {"section": section, **case} for section, make in given.items() for case, _ in make(rig)
    ]
    ways = {"aten": {"us": {"p50": 20.0}}}
    work = {"flops": 1e6, "bytes": 1e5}
    rows = [{"case": case, "floor_us": 5.0, "work": work, "ways": ways} for case in cases]
    tiles = ways | {"mlp_bwd": {"us": {"p50": 1.0}}}
    own = {"section": "products", "name": "mlp_bwd gelu", "tokens": 8192}
    rows += [{"case": own, "floor_us": 5.0, "work": work, "ways": tiles}]
    rows += [ceiling("GB/s", 10.0), ceiling("TFLOP/s", 1.0)]
    found = kernels.entries(rows)
    assert {(e.op, e.direction) for e in found} == {(op, d) for op in OPS for d in DIRECTIONS}
    assert len({(e.op, e.direction, e.name) for e in found}) == len(found) == len(cases)
    assert any(e.name.startswith("causal, B = 2, S = 8192, nhead 16, ") for e in found)


def test_the_drawn_block_is_the_graph():
    """docs/images/block.svg is drawn by hand."""
    names = re.findall(r'class="name">(\w+)<', (ROOT / "docs/images/block.svg").read_text())
    assert tuple(names) == ("input", *presets.block(True).names, "output")


def test_a_quick_run_of_few_layers_is_not_the_headline(monkeypatch):
    before, rows = overview.headline(), overview._models()
    short = [row | {"case": row["case"] | {"layers": 2, "seq_len": 7, "lora": 16}} for row in rows]
    monkeypatch.setattr(overview, "_models", lambda: short + rows)
    assert overview.headline() == before


def test_a_profile_has_a_row_per_kind_and_a_column_per_way(capsys):
    found = profile_step.measure(Case("float32", "pre", 0.0, 1, 8, 16, 2), ["eager", "full"], 1)
    assert all(way["products"] > 0 and way["step"] > way["products"] for way in found.values())
    lines = profile_step.table({"ways": found}).splitlines()
    assert lines[0] == "| ms a step | eager | full |" and lines[-1].startswith("| step |")
    with pytest.raises(SystemExit, match="2"):
        profile_step.main(["--way", "full_triton"])
    assert "full_triton: needs a CUDA device" in capsys.readouterr().err


def test_links_of_a_part_fit_the_page_it_stands_on(monkeypatch):
    part = "[a](bench/tables.py) [b](https://example.org) [c](elsewhere.md)"
    monkeypatch.setattr(overview, "demo", lambda: part)
    empty = "<!-- overview.demo:begin --><!-- overview.demo:end -->"
    below = command.render(empty, ROOT / "docs" / "tables" / "page.md")
    assert part.replace("bench/", "../../bench/") in below
    assert part in command.render(empty, ROOT / "README.md")


def test_a_way_without_numbers_is_a_sentence_and_widens_no_column():
    ways = {"eager": {"kept": 1}, "none": {"failure": "relative error of\noutput is 1"}}
    columns = [("kept", lambda way: tables.number(way["kept"])), ("peak", lambda way: None)]
    assert tables.ways_table(ways, columns).splitlines()[2:] == [
        "| eager | 1 | |",
        "| none | FAIL: relative error of output is 1 | |",
    ]
    assert tables.ways_table(ways, columns, write=tables.terminal).splitlines() == [
        "       kept  peak",
        "eager     1     -",
        "none   FAIL: relative error of output is 1",
    ]
