"""The targets of GPUs, of rows that were made up: met, missed, wrong and not measured."""

import json
from typing import Any

from bench import tables
from bench.gpu import kernels as gpu_kernels
from bench.gpu import targets
from bench.gpu.kinds import KINDS
from bench.measure.machine import environment
from bench.pages import command
from bench.pages import gpu as hardware
from bench.pages.gpu import report

WIDTHS = (1024, 2048, 4096)
Row = dict[str, Any]


def way(us, kept=0.0, **ratio):
    ratios = {name: {"p50": value} for name, value in ratio.items()}
    return {"us": {"p50": us}, "ratio": ratios, "kept_bytes": kept}


def row(section, name, ways, floor=None, **case):
    return {"case": {"section": section, "name": name, **case}, "ways": ways, "floor_us": floor}


def layer(width, fast=0.9, **more):
    ways = {
        "eager": way(100.0, 1000.0, eager=1.0),
        "checkpoint": way(120.0, 60.0, eager=1.2),
        "full": way(100.0, 60.0, eager=1.0, checkpoint=0.85),
        "lean": way(99.0, 100.0, eager=0.99, checkpoint=0.8),
        "balanced": way(98.0, 190.0, eager=0.98, checkpoint=0.8),
        "fast": way(100.0 * fast, 380.0, eager=fast, checkpoint=0.75),
    }
    return row("layers", "pre-norm", ways | more, width=width, dropout=0.0)


def profile(width, seq_len=2048, forwards=1.0):
    kinds = dict.fromkeys(KINDS, 0.0) | {"products": 70.0, "attention": 20.0, "norms": 4.0}
    found = way(110.0) | {
        "kinds_us": kinds, "gaps_us": 11.0, "busy_us": 99.0, "launches": 30.0, "host_us": 50.0,
        "least_us": {"products": 60.0, "attention": 8.0, "norms": 4.0}, "kernels": [],
        "attention_forwards": forwards,
    }  # fmt: skip
    ways = {"eager": found | way(100.0), "checkpoint": found, "fast": found, "balanced": found}
    made = row("profile", "pre-norm", ways, width=width, seq_len=seq_len)
    return made | {"profiled": {}}


def found(rows, number, text=""):
    (line,) = [one for one in targets.lines(rows) if one.number == number
               and text in one.verdict.target]  # fmt: skip
    return line


def test_every_target_has_a_line_and_none_is_measured_at_first():
    lines = targets.lines([])
    assert {line.number for line in lines} == set(range(1, 9))
    assert {(line.verdict.measured, line.verdict.met) for line in lines} == {("not measured", None)}


def test_a_target_is_met_in_every_case_or_not_at_all():
    rows = [layer(width) for width in WIDTHS]
    line = found(rows, 1, "fast ≤")
    assert line.verdict.met and line.between == ""
    assert line.verdict.measured.count("0.900 (D = ") == 3
    assert found(rows, 1, "fast keeps").verdict.met is True
    assert found(rows, 1, "post-norm").verdict.met is None
    two = found(rows[:2], 1, "fast ≤").verdict
    assert two.met is None and two.measured.endswith("; 1 of 3 not measured")
    with_dropout = [one | {"case": one["case"] | {"dropout": 0.1}} for one in rows]
    assert found(with_dropout, 1, "fast ≤").verdict.measured == "not measured"


def test_what_is_missed_is_shown_with_its_least_and_what_is_above_it():
    rows = [layer(1024), layer(2048, 1.1), layer(4096, 1.2), profile(2048)]
    line = found(rows, 1, "fast ≤")
    assert line.verdict.met is False
    assert "1.100 (D = 2048)" in line.verdict.measured
    at_2048 = (
        "D = 2048: least 72 of 110 µs, 0.72× eager's step; above the least, µs: "
        "attention +12, gaps +11, products +10"
    )
    assert at_2048 in line.between and "D = 4096: not profiled" in line.between
    assert "D = 1024" not in line.between


def test_wrong_results_miss_a_target():
    rows = [layer(1024), layer(2048), layer(4096)]
    rows[1]["ways"]["fast"] = {"error": "WrongResultError: off"}
    verdict = found(rows, 1, "fast ≤").verdict
    assert verdict.met is False and verdict.measured == "wrong, or failed: D = 2048"
    failed = {"case": {"section": "layers", "name": "pre-norm", "width": 1024}, "error": "broken"}
    assert found([failed], 1, "fast ≤").verdict.met is None


def test_mlps():
    def mlp(width, full):
        ways = {"eager": way(100.0, eager=1.0), "full": way(100.0 * full, eager=full)}
        return row("mlp", "mlp", ways, width=width, tokens=1000)

    ceiling = row("ceilings", "product", {"torch": {"us": {"p50": 1.0}, "TFLOP/s": 1e3}})
    line = found([mlp(1024, 1.0), mlp(2048, 1.0), mlp(4096, 1.3), ceiling], 2)
    assert line.verdict.met is False
    least = 7 * 2 * 1000 * 4 * 4096**2 / 1e15 * 1e6
    said = f"7 products take {least:,.0f} µs at least, {least / 100:.2f}× eager's step"
    assert line.between == f"D = 4096: {said}"

    def backward(width, fused):
        ways = {"aten": way(50.0, bare=1.6), "bare": way(30.0, bare=1.0),
                "mlp_bwd": way(30.0 * fused, bare=fused) | {"of_ceiling": 0.5},
                "split": way(45.0, bare=1.5) | {"of_ceiling": 0.4},
                "absent": {"absent": "no"}}  # fmt: skip
        return row("products", "mlp_bwd gelu", ways, 20.0, width=width)

    rows = [backward(width, 1.05) for width in WIDTHS]
    line = found(rows, 3)
    assert line.verdict.met and "1.050 (D = 1024, mlp_bwd)" in line.verdict.measured
    line = found([*rows[:2], backward(4096, 1.2)], 3)
    assert line.between == "D = 4096, mlp_bwd: floor 20 µs; of its speed: mlp_bwd 50%"
    broken = backward(1024, 1.0)
    broken["ways"]["split"] = {"error": "no"}
    assert found([broken], 3).verdict.met is False


def test_one_long_sequence():
    ways = {"none": way(100.0, none=1.0), "balanced": way(107.0, none=1.07)}
    rows = [row("long", "pre-norm", ways, width=2048, seq_len=32768), profile(2048, 32768)]
    assert found(rows, 4, "≤ 1.08×").verdict.met and found(rows, 4, "once").verdict.met
    assert found([profile(2048)], 4, "once").verdict.met is None
    assert found([profile(2048, 32768, 2.0)], 4, "once").verdict.met is False
    for forwards in (0.0, 0.2, 1.4):  # no kernel was known by its name, or some were missed
        assert found([profile(2048, 32768, forwards)], 4, "once").verdict.met is None


def test_attention_beside_the_best_of_the_library():
    def contest(direction, kernel, ours, seq_len):
        ways = {
            "aten": way(100.0, aten=1.0) | {"of_ceiling": 0.5},
            "cudnn": way(80.0, aten=0.8) | {"of_ceiling": 0.6},
            "math": way(1.0, aten=0.01), "flash": {"absent": "no"},
            "fused_remat kernel": way(kernel, aten=kernel / 100) | {"of_ceiling": 0.48},
            "fused_remat triton": way(100.0 * ours, aten=ours),
        }  # fmt: skip
        name, case = f"attention_{direction} causal", {"seq_len": seq_len, "head_dim": 128}
        return row("attention", name, ways, 48.0, **case)

    rows = [contest("fwd", 90.0, 1.0, s) for s in (512, 1024, 2048)]
    rows += [contest("fwd", 100.0, 1.03, 4096), contest("bwd", 90.0, 1.0, 512)]
    forward = found(rows, 5, "forward")
    span = "0.889 (causal, S = 512, E = 128) to 0.800 (causal, S = 4096, E = 128), 3 of 4 within"
    assert forward.verdict.measured == f"{span}; 4 of 8 not measured"
    assert forward.verdict.met is False
    shares = "floor 48 µs; of its speed: fused_remat kernel 48%, cudnn 60%"
    assert forward.between == f"causal, S = 4096, E = 128: {shares}"
    assert found(rows, 5, "backward").verdict.met is None  # of eight, one
    many = [contest("bwd", 90.0, 1.0, 2**n) for n in range(8)]
    assert found(many, 5, "backward").verdict.met is True
    dispatch = found(rows, 5, "is used").verdict
    assert dispatch.met is False and "1.030 (fwd causal, S = 4096, E = 128)" in dispatch.measured


def test_norms():
    ways = {"aten": way(10.0, aten=1.0) | {"of_ceiling": 0.4},
            "fused_remat triton": way(5.0, aten=0.5) | {"of_ceiling": 0.81}}  # fmt: skip
    kinds, widths = ("layer_norm", "rms_norm"), gpu_kernels.WIDTHS
    rows = [row("norms", f"norm_bwd {kind}", ways, 4.0, width=w) for kind in kinds for w in widths]
    assert found(rows, 6, "bandwidth").verdict.met and found(rows, 6, "speed").verdict.met
    assert found(rows[1:], 6, "bandwidth").verdict.met is None
    in_half = [one | {"config": {"dtype": "float16"}} for one in rows]
    assert found(in_half, 6, "speed").verdict.measured == "not measured"
    slow = {"aten": ways["aten"],
            "fused_remat triton": way(12.5, aten=1.25) | {"of_ceiling": 0.32}}  # fmt: skip
    line = found([*rows, row("norms", "norm_bwd rms_norm", slow, 4.0, width=512)], 6, "speed")
    assert line.verdict.met is False and "0.800 (rms_norm, D = 512)" in line.verdict.measured
    assert line.between.endswith("of its speed: fused_remat triton 32%, aten 40%")


def test_largest_batches():
    def model(name, ours):
        speeds = {"checkpoint": 100.0, "full": ours, "fast": ours - 1.0, "full_loss": 150.0,
                  "liger_checkpoint": 140.0}  # fmt: skip
        ways = {n: way(1.0) | {"tokens_per_second": speed, "largest_batch": 3}
                for n, speed in speeds.items()}  # fmt: skip
        return row("model", f"{name}, full fine-tuning, the largest batch", ways)

    good, bad = model("smollm-135m", 120.0), model("qwen2-1.5b", 105.0)
    verdict = found([good], 7, "within").verdict
    assert verdict.met is None
    assert verdict.measured == "1.200 (smollm-135m, full); 1 of 2 not measured"
    assert found([good, model("qwen2-1.5b", 116.0)], 7, "within").verdict.met
    line = found([good, bad], 7, "within")
    assert line.verdict.met is False
    assert line.between == "qwen2-1.5b, full: batches of 3 and 3"
    fused = found([good, bad], 7, "fused loss").verdict
    assert fused.met is False and "1.071 (smollm-135m, full_loss)" in fused.measured
    bad["ways"]["fast"] = {"error": "no"}
    assert found([good, bad], 7, "within").verdict.measured == "wrong, or failed: qwen2-1.5b"


def test_compiled_layers():
    ways = {"eager": way(100.0, 1000.0), "compile": way(80.0, 700.0),
            "compile_budget_0": way(110.0, 100.0), "compile_budget_0.5": way(100.0, 50.0),
            "full": way(100.0, 100.0), "fast": way(90.0, 400.0)}  # fmt: skip
    line = found([row("compile", "pre-norm, budgets", ways, width=2048)], 8)
    assert line.verdict.met is False
    worst = "fast beside compile, pre-norm, D = 2048 (none keeps as little as compile_budget_0.5)"
    assert line.verdict.measured == f"1.125 ({worst}); 5 of 6 not measured"
    assert line.between == f"{worst}: not profiled"
    assert found([row("compile", "pre-norm, compiled", ways, width=2048)], 8).verdict.met is None
    broken = ways | {"fast": {"error": "no"}}
    line = found([row("compile", "pre-norm, budgets", broken, width=2048)], 8)
    assert line.verdict.met is False and line.verdict.measured.startswith("wrong, or failed")


def test_the_table_is_at_the_end_of_a_runs_text(tmp_path):
    rows = [one | {"run": "now"} for one in (layer(2048, 1.1), profile(2048))]
    (tmp_path / "gpu.json").write_text(json.dumps({"results": rows}))
    text = report(tmp_path / "gpu.json", "now")
    assert text.endswith(targets.table(rows))
    assert "profile pre-norm width=2048 seq_len=2048, microseconds a step (least)" in text


def test_the_page_has_every_set_of_a_gpu(tmp_path, monkeypatch):
    assert command.PARTS["targets_gpu"] is hardware.section
    monkeypatch.setattr(hardware, "gpu_sets", dict)
    assert hardware.section() == targets.table((), "not yet run on hardware")
    machine = environment("cpu") | {"gpu": "NVIDIA H200"}
    rows = [one | {"machine": machine} for one in (layer(2048, 1.1), profile(2048))]
    folder = tmp_path / "2030-01-01-h200-0123456"
    folder.mkdir()
    data = {"machine": machine, "config": {}, "results": rows}
    (folder / "gpu.json").write_text(json.dumps(data))
    others = data | {"results": [{"case": {"op": "norm"}, "machine": machine, "ways": {}}]}
    (folder / "kernels-cuda.json").write_text(json.dumps(others))
    monkeypatch.setattr(hardware, "gpu_sets", lambda: tables.gpu_sets(tmp_path))
    text = hardware.section()
    assert text.startswith("#### NVIDIA H200 (`bench/results/2030-01-01-h200-0123456`)")
    assert text.count("| target |") == 1 and "1.100 (D = 2048)" in text
    assert "<summary>Where a step spends its time</summary>" in text and "70 (60)" in text
