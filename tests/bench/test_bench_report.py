"""What `python -m bench report` makes of result files, and of those that are not there."""

import re
from pathlib import Path

from bench import tables
from bench.measure.machine import environment
from bench.pages import kernels, overview, presets, targets
from fused_remat.policies import EXACT_PRESETS

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
    fast = "| fwd | 10 µs | memory | eager, 16 µs (62%) | compile, 20 µs (50%) | 0.80× |"
    assert fast in text  # bare, in 12 µs, does less
    assert "(FAIL: fused_remat eager) | bwd | 20 µs | products | absent |" in text


def test_the_drawn_block_is_the_graph():
    """docs/images/block.svg is drawn by hand."""
    names = re.findall(r'class="name">(\w+)<', (ROOT / "docs/images/block.svg").read_text())
    assert tuple(names) == ("input", *presets.block(True).names, "output")


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


def test_a_target_below_its_bound_is_dropped():
    values = {8: targets.Value(0.9, "gpu-1234567", 0.8), 16: targets.Value(1.2, "gpu-7654321", 1.1)}
    target = targets.Target("it", values.get, {8: 1.0, 16: 1.0, 32: 1.0})
    outcomes = "≤ 1.00 / – / 1.00", "yes / dropped / –", "0.80 / 1.10 / –", "1234567, 7654321"
    assert target.cells() == ["it", "D = 8 / 16 / 32", "0.90 / 1.20 / –", *outcomes]
    assert target._replace(at_least=True).cells()[3:5] == ["≥ 1.00 / – / 1.00", "no / dropped / –"]


def test_the_first_page_shows_a_gpu_with_every_preset():
    """The newest results of each kind of layer; the caption names the machine of all panels."""
    shown = overview.shown()
    assert {"Pre-norm", "Post-norm", "Pre-norm, dropout 0.1"} <= set(shown)
    for rows in shown.values():
        assert {"eager", "checkpoint", *EXACT_PRESETS} <= {row["way"] for row in rows}
        assert [row["kept"] for row in rows] == sorted(row["kept"] for row in rows)
    (machine,) = {panel.machine["gpu"] for _, panel in overview._encoders()}
    assert machine in overview.caption() and machine in overview.headline()
    assert "`torch.compile` keeps everything" in overview.layers()
