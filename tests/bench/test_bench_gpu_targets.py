"""The targets of GPUs, of rows that were made up: met, missed, wrong and not measured."""

import json

import pytest

from bench.gpu import kernels as gpu_kernels
from bench.gpu import targets
from bench.gpu.profile import KINDS
from bench.measure.machine import environment
from bench.pages import gpu as hardware

WIDTHS = (1024, 2048, 4096)


def way(us, kept=0.0, **ratio):
    ratios = {name: {"p50": value} for name, value in ratio.items()}
    return {"us": {"p50": us}, "ratio": ratios, "kept_bytes": kept}


def row(section, name, ways, floor=None, **case):
    return {"case": {"section": section, "name": name, **case}, "ways": ways, "floor_us": floor}


def layer(width, fast=0.9, dropout=0.0, **more):
    ways = {
        "eager": way(100.0, 1000.0, eager=1.0),
        "checkpoint": way(120.0, 60.0, eager=1.2),
        "full": way(100.0, 60.0, eager=1.0, checkpoint=0.85),
        "lean": way(99.0, 100.0, eager=0.99, checkpoint=0.8),
        "balanced": way(98.0, 190.0, eager=0.98, checkpoint=0.8),
        "fast": way(100.0 * fast, 380.0, eager=fast, checkpoint=0.75),
        "none": way(90.0, 600.0, eager=0.9),
    }
    return row("layers", "pre-norm", ways | more, width=width, dropout=dropout)


def profile(width, seq_len=2048, forwards=1.0):
    kinds = dict.fromkeys(KINDS, 0.0) | {"products": 70.0, "attention": 20.0, "norms": 4.0}
    found = way(110.0) | {
        "kinds_us": kinds, "gaps_us": 11.0, "busy_us": 99.0, "launches": 30.0, "host_us": 50.0,
        "least_us": {"products": 60.0, "attention": 8.0, "norms": 4.0}, "kernels": [],
        "attention_forwards": forwards,
    }  # fmt: skip
    ways = {"eager": found | way(100.0), "checkpoint": found, "fast": found, "balanced": found}
    return row("profile", "pre-norm", ways, width=width, seq_len=seq_len) | {"profiled": {}}


def mlp(width, full):
    ways = {"eager": way(100.0, eager=1.0), "full": way(100.0 * full, eager=full)}
    return row("mlp", "mlp", ways, 40.0, width=width)


def mlp_backward(width, fused, **more):
    ways = {"aten": way(50.0, bare=1.6), "bare": way(30.0, bare=1.0),
            "mlp_bwd": way(30.0 * fused, bare=fused), "split": way(45.0, bare=1.5),
            "absent": {"absent": "no"}}  # fmt: skip
    return row("products", "mlp_bwd gelu", ways | more, 20.0, width=width)


def attention(direction, kernel, ours, seq_len):
    ways = {
        "aten": way(100.0, aten=1.0), "cudnn": way(80.0, aten=0.8),
        "math": way(1.0, aten=0.01), "flash": {"absent": "no"},
        "fused_remat kernel": way(kernel, aten=kernel / 100),
        "fused_remat triton": way(100.0 * ours, aten=ours),
    }  # fmt: skip
    case = {"seq_len": seq_len, "head_dim": 128}
    return row("attention", f"attention_{direction} causal", ways, 48.0, **case)


def norm(kind, width, ours=0.5, of_ceiling=0.81):
    mine = way(10 * ours, aten=ours) | {"of_ceiling": of_ceiling}
    ways = {"aten": way(10.0, aten=1.0), "fused_remat triton": mine}
    return row("norms", f"norm_bwd {kind}", ways, 4.0, width=width)


def model(name, ours, **more):
    speeds = {"checkpoint": 100.0, "full": ours, "fast": ours - 1.0, "full_loss": 150.0,
              "liger_checkpoint": 140.0}  # fmt: skip
    ways = {n: way(1.0) | {"tokens_per_second": speed, "largest_batch": 3}
            for n, speed in speeds.items()}  # fmt: skip
    return row("model", f"{name}, full fine-tuning, the largest batch", ways | more)


def compiled(name="pre-norm, budgets", **more):
    ways = {"eager": way(100.0, 1000.0), "compile": way(80.0, 700.0),
            "compile_budget_0": way(110.0, 100.0), "compile_budget_0.5": way(100.0, 50.0),
            "full": way(100.0, 100.0), "fast": way(90.0, 400.0)}  # fmt: skip
    return row("compile", name, ways | more, width=2048)


MACHINE = environment("cpu") | {"gpu": "NVIDIA H200"}
WRONG, SHARES = {"error": "WrongResultError: off"}, "of its speed: "
LAYERS = [layer(width) for width in WIDTHS]
BROKEN = LAYERS[1] | {"ways": LAYERS[1]["ways"] | {"fast": WRONG}}
FAILED = {"case": {"section": "layers", "name": "pre-norm", "width": 1024}, "error": "broken"}
MISSED = [LAYERS[0], layer(2048, 1.1), layer(4096, 1.2), profile(2048)]
AT_2048 = (
    "D = 2048: least 72 of 110 µs, 0.72× eager's step; above the least, µs: "
    "attention +12, gaps +11, products +10"
)
MLP_BWD = [mlp_backward(width, 1.05) for width in WIDTHS]
LONG = row("long", "pre-norm", {"none": way(100.0, none=1.0), "balanced": way(107.0, none=1.07)},
           width=2048, seq_len=32768)  # fmt: skip
ATTENTION = [attention("fwd", 90.0, 1.0, s) for s in (512, 1024, 2048)]
ATTENTION += [attention("fwd", 100.0, 1.03, 4096), attention("bwd", 90.0, 1.0, 512)]
BWD = [attention("bwd", 90.0, 1.0, 2**n) for n in range(8)]
NORMS = [norm(kind, w) for kind in ("layer_norm", "rms_norm") for w in gpu_kernels.WIDTHS]
HALF = [one | {"config": {"dtype": "float16"}} for one in NORMS]
GOOD, BAD = model("smollm-135m", 120.0), model("qwen2-1.5b", 105.0)
KEEPS = "fast beside compile, pre-norm, D = 2048 (none keeps as little as compile_budget_0.5)"

#: Rows, target and words of its line; whether it is met, what is said, and what stands between.
CASES = [
    (LAYERS, 1, "fast ≤", True, "0.900 (D = 4096), 0.900 (D = 2048), 0.900 (D = 1024)", ""),
    (LAYERS, 1, "fast keeps", True, "0.380 (D = 1024)", ""),
    (LAYERS, 1, "post-norm", None, "not measured", ""),
    (LAYERS[:2], 1, "fast ≤", None, "; 1 of 3 not measured", ""),
    ([layer(w, dropout=0.1) for w in WIDTHS], 1, "fast ≤", None, "not measured", ""),
    (MISSED, 1, "fast ≤", False, "1.100 (D = 2048)", f"{AT_2048}; D = 4096: not profiled"),
    ([LAYERS[0], BROKEN, LAYERS[2]], 1, "fast ≤", False,
     "wrong, or failed: D = 2048", ""),
    ([FAILED], 1, "fast ≤", None, "not measured", ""),
    ([mlp(1024, 1.0), mlp(2048, 1.0), mlp(4096, 1.3)], 2, "", False, "1.300 (D = 4096)",
     f"D = 4096: floor 40 µs; {SHARES}eager 40%, full 31%"),
    (MLP_BWD, 3, "", True, "1.050 (D = 1024, mlp_bwd)", ""),
    ([*MLP_BWD[:2], mlp_backward(4096, 1.2)], 3, "", False, "1.200",
     f"D = 4096, mlp_bwd: floor 20 µs; {SHARES}bare 67%, mlp_bwd 56%"),
    ([mlp_backward(1024, 1.0, split=WRONG)], 3, "", False, "wrong, or failed", ""),
    ([LONG, profile(2048, 32768)], 4, "≤ 1.08×", True, "1.070", ""),
    ([LONG, profile(2048, 32768)], 4, "once", True, "1.000", ""),
    ([profile(2048)], 4, "once", None, "not measured", ""),
    ([profile(2048, 32768, 2.0)], 4, "once", False, "2.000", ""),
    # no kernel was known by its name, or some were missed
    *(([profile(2048, 32768, n)], 4, "once", None, "not measured", "") for n in (0.0, 0.2, 1.4)),
    (ATTENTION, 5, "forward", False,
     "0.889 (causal, S = 512, E = 128) to 0.800 (causal, S = 4096, E = 128), 3 of 4 within; "
     "4 of 8 not measured",
     f"causal, S = 4096, E = 128: floor 48 µs; {SHARES}cudnn 60%, fused_remat kernel 48%"),
    (ATTENTION, 5, "backward", None, "7 of 8 not measured", ""),
    (BWD, 5, "backward", True, "0.889", ""),
    (ATTENTION, 5, "is used", False, "1.030 (fwd causal, S = 4096, E = 128)", None),
    (NORMS, 6, "bandwidth", True, "0.810", ""),
    (NORMS, 6, "speed", True, "2.000", ""),
    (NORMS[1:], 6, "bandwidth", None, "not measured", ""),
    (HALF, 6, "speed", None, "not measured", ""),
    ([*NORMS, norm("rms_norm", 512, 1.25, 0.32)], 6, "speed", False, "0.800 (rms_norm, D = 512)",
     f"rms_norm, D = 512: floor 4 µs; {SHARES}aten 40%, fused_remat triton 32%"),
    ([GOOD], 7, "within", None, "1.200 (smollm-135m, full); 1 of 2 not measured", ""),
    ([GOOD, model("qwen2-1.5b", 116.0)], 7, "within", True, "1.160", ""),
    ([GOOD, BAD], 7, "within", False, "1.050", "qwen2-1.5b, full: batches of 3 and 3"),
    ([GOOD, BAD], 7, "fused loss", False, "1.071 (smollm-135m, full_loss)", None),
    ([GOOD, model("qwen2-1.5b", 105.0, fast=WRONG)], 7, "within", False,
     "wrong, or failed: qwen2-1.5b", ""),
    ([compiled()], 8, "", False, f"1.125 ({KEEPS}); 5 of 6 not measured",
     f"{KEEPS}: not profiled"),
    ([compiled("pre-norm, compiled")], 8, "", None, "not measured", ""),
    ([compiled(fast=WRONG)], 8, "", False, "wrong, or failed", ""),
]  # fmt: skip


@pytest.mark.parametrize(("rows", "number", "text", "met", "measured", "between"), CASES)
def test_what_a_target_says(rows, number, text, met, measured, between):
    (line,) = [one for one in targets.lines(rows) if one.number == number
               and text in one.verdict.target]  # fmt: skip
    assert line.verdict.met is met and measured in line.verdict.measured
    assert between is None or line.between == between


def test_every_target_has_a_line_and_none_is_measured_at_first():
    lines = targets.lines([])
    assert {line.number for line in lines} == set(range(1, 9))
    assert {(line.verdict.measured, line.verdict.met) for line in lines} == {("not measured", None)}


def test_the_table_is_at_the_end_of_a_runs_text():
    rows = [one | {"machine": MACHINE} for one in (layer(2048, 1.1), profile(2048))]
    text = hardware.report(rows)
    assert text.startswith("Measured on NVIDIA H200, ")
    assert text.endswith(targets.table(rows))
    assert "profile pre-norm width=2048 seq_len=2048, microseconds a step (least)" in text


def test_the_page_has_every_set_of_a_gpu(tmp_path):
    assert hardware.section(tmp_path / "none") == targets.table((), "not yet run on hardware")
    rows = [one | {"machine": MACHINE} for one in (layer(2048, 1.1), profile(2048))]
    folder = tmp_path / "results" / "2030-01-01-h200-0123456"
    folder.mkdir(parents=True)
    data = {"machine": MACHINE, "config": {}, "results": rows}
    (folder / "gpu.json").write_text(json.dumps(data))
    others = data | {"results": [{"case": {"op": "norm"}, "machine": MACHINE, "ways": {}}]}
    (folder / "kernels-cuda.json").write_text(json.dumps(others))
    text = hardware.section(folder.parent)
    assert text.startswith("### NVIDIA H200 (`bench/results/2030-01-01-h200-0123456`)")
    assert text.count("| target |") == 1 and "1.100 (D = 2048)" in text
    assert "<summary>Where a step spends its time</summary>" in text and "70 (60)" in text
