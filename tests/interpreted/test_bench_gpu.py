"""`python -m bench gpu` in a dry run: all but the clock of what runs on a GPU."""

import contextlib
import functools
import gc
import importlib
import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from places import target

from bench.audit.cases import cases, tile_name
from bench.audit.cases import target as target_of
from bench.commands import gpu
from bench.gpu import layers as gpu_layers
from bench.gpu import profile, session
from bench.gpu.profile import KINDS
from bench.measure.contest import Rig
from bench.pages.gpu import profile_table, title
from bench.tables import ResultsFile, errors_of, ratios, us
from fused_remat.policies import EXACT_PRESETS
from fused_remat.triton import tables

TARGET = target()
KERNELS = Path(__file__).resolve().parents[2] / "kernels"

#: Why somebody is absent without a GPU, never one of ours.
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
    assert errors_of(rows, title) == []
    assert not any("error" in row or "skipped" in row for row in rows)


def test_every_way_is_right_and_timed(rows):
    measured = [row for row in rows if "ways" in row]
    assert len(measured) > 20
    for row in measured:
        for name, way in row["ways"].items():
            if "absent" in way:
                ours = name.startswith("fused_remat")
                assert ABSENT.search(way["absent"]) and not ours, (row["case"], name, way)
                assert name not in (*EXACT_PRESETS, "eager", "checkpoint"), (row["case"], name)
                continue
            assert set(us(way)) == {"p20", "p50", "p80"}, (row["case"], name)
            if row["case"]["section"] != "ceilings":
                assert way["check"] and ratios(way), (row["case"], name)


def test_settings_of_a_process_are_in_its_row(rows):
    found = [row["settings"] for row in rows if row["case"]["section"] == "programs"]
    assert found == [{"FUSED_REMAT_PROGRAMS": value} for value in "01"]
    huge = [row["settings"] for row in rows if "huge" in row["case"]["name"]]
    makefile = (Path(__file__).resolve().parents[2] / "Makefile").read_text()
    assert huge and f"HUGE := {' '.join(f'{k}={v}' for k, v in huge[0].items())}\n" in makefile


def test_every_tile_and_preset_is_there(rows):
    ways = {(row["case"]["section"], row["case"]["name"]): row.get("ways", {}) for row in rows}
    for kernel, families in tables.TILES.items():
        names = {tile_name(tile) for tile in families["interpreter"]}
        assert set(ways["tiles", f"tiles of {kernel}"]) == names
    layers = [row["ways"] for row in rows if row["case"]["section"] in ("layers", "dropout")]
    assert [list(found) for found in layers] == [list(gpu_layers.WAYS), list(gpu_layers.DRY)]
    assert not any("step_peak_bytes" in way for found in layers for way in found.values())


def test_the_long_case_is_compared_with_what_keeps_all(rows):
    (row,) = [row for row in rows if row["case"]["section"] == "long"]
    assert row["ways"]["none"]["check"]["against"] == "float64"
    assert {"eager", "none"} <= set(row["ways"]["eager"]["step_ratio"])


def test_every_way_of_a_profile_is_taken_apart(rows):
    (row,) = [row for row in rows if row["case"]["section"] == "profile"]
    assert list(row["ways"]) == list(profile.WAYS)
    for name, way in row["ways"].items():
        assert set(way["kinds_us"]) == set(KINDS) and way["launches"], name
        assert {"check", "step_ratio", "host_seconds"} <= set(way), name


@pytest.fixture
def rig():
    return Rig(torch.device("cpu"), torch.float32, True, TARGET, ends=0.0)


def test_a_failing_case_is_a_row(rig, tmp_path):
    def measure(rig):
        raise ValueError("no\nsuch size")

    results = ResultsFile(tmp_path / "gpu.json", {}, {})
    session.run_entry(({"name": "it"}, measure), "norms", rig, results, 5.0)
    (row,) = rows_of(tmp_path)
    assert row["error"] == "ValueError: no such size"
    assert errors_of([row], title) == ["norms it: ValueError: no such size"]


# --- sessions that are cut

#: Section -> its minutes, and cases that take one each.
PLAN = {"first": (2, "ab"), "second": (2, "cde"), "third": (1, "f")}


@pytest.fixture
def run_session(tmp_path):
    """Run a session of so many minutes, which ends in the case `cut`; return what it measured."""

    def run(minutes, known="", cut=None):
        rig = Rig(torch.device("cpu"), torch.float32, ends=time.perf_counter() + 60.0 * minutes)
        measured = []

        def measure(rig, name):
            measured.append(name)
            if name == cut:
                raise KeyboardInterrupt  # nothing catches it, like a kill
            rig.ends -= 60.0
            return {"ways": {}}

        def find(section, rig):
            for name in section.entries:
                yield {"name": name}, functools.partial(measure, name=name)

        plan = {name: gpu.Section(minutes, 40.0, of, "") for name, (minutes, of) in PLAN.items()}
        results = ResultsFile(tmp_path / "gpu.json", {}, {})
        done = {session.key({"section": "of before", "name": name}) for name in known}
        with contextlib.suppress(KeyboardInterrupt):
            session.run_all(plan, rig, results, done, find)
        return "".join(measured)

    return run


def test_a_session_of_four_minutes_is_continued_by_the_same_command(run_session, tmp_path):
    assert run_session(4.5) == "abcd"
    assert {r["case"]["name"] for r in rows_of(tmp_path) if "skipped" in r} == {"e", "f"}
    assert run_session(4.5) == "ef"
    assert not any("skipped" in row for row in rows_of(tmp_path))
    assert run_session(4.5) == ""


def test_a_section_ends_at_its_minutes_and_its_rest_comes_last(run_session):
    assert run_session(9.5) == "abcdfe"


def test_what_committed_results_lack_comes_first(run_session):
    assert run_session(9.5, known="acf") == "badefc"


def test_a_case_in_which_a_session_ended_is_tried_again_once_after_all_others(run_session):
    assert run_session(9.5, cut="b") == "ab"
    assert run_session(9.5, cut="b") == "cdfeb"
    assert run_session(9.5, cut="b") == ""


def test_a_killed_session_keeps_its_results(tmp_path):
    """Killed between or within cases, whatever it was doing; the same command continues."""
    command = [sys.executable, "-m", "bench", "gpu", "--dry-run", "--out", str(tmp_path),
               "--sections", "ceilings", "attention tiles"]  # fmt: skip
    path = tmp_path / "gpu.json"
    first = subprocess.Popen(command, cwd=KERNELS.parent, stdout=subprocess.PIPE)
    while not (path.exists() and sum("ways" in row for row in rows_of(tmp_path)) >= 3):
        assert first.poll() is None and first.stdout.readline()
    first.kill()
    first.wait()
    kept = [row for row in rows_of(tmp_path) if "ways" in row]
    assert len(kept) >= 3
    subprocess.run(command, cwd=KERNELS.parent, check=True, capture_output=True)
    rows = rows_of(tmp_path)
    assert len(rows) > len(kept) and not errors_of(rows, title)
    assert [row for row in rows if row in kept] == kept  # none was measured again


# --- profiles: what kernels are for, what they add up to, and what is the least

#: As CUDA 12 and 13, ATen and cuDNN 9 name them on Hopper.
NAMES = {
    "products": (
        "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nt_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>",
        "mlp_bwd_kernel",
    ),
    "attention": (
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, int>",
        "fused_remat.kernels.attention.attention_fwd_kernel",
    ),
    "norms": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "column_sum_kernel",
    ),
    "pointwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(...)>",
        "act_bwd_kernel_0d1d2d",
    ),
    "reductions": (
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, float>>",
    ),
    "copies and fills": (
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)>",
    ),
    "other": ("void cub::DeviceRadixSortHistogramKernel<int>", "a_norm_bwd_kernels"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in NAMES.items() for n in names])
def test_what_a_kernel_is_for(kind, name):
    assert profile.kind_of(name) == kind


def test_every_kernel_of_ours_has_a_kind():
    """Those that a launch can name, and those that are in `kernels/`."""
    at = target_of(90)
    launched = {case.launch.kernel.fn.__name__ for case in cases(at, torch.bfloat16)}
    assert launched <= set(profile.ours())
    assert set(profile.OURS) <= {path.stem for path in KERNELS.glob("*.py")}
    for path in KERNELS.glob("*.py"):
        module = importlib.import_module(f"fused_remat.kernels.{path.stem}")
        own = [n for n in vars(module) if n.endswith("_kernel")]
        assert set(own) <= set(profile.ours()), path.stem
    assert set(profile.ours().values()) <= set(profile.KINDS)


def test_what_kernels_add_up_to():
    """Side by side and one within another, time is busy once; of two steps, the mean."""
    given = (
        ("nvjet_tst", 0.0, 10.0), ("nvjet_tst", 20.0, 40.0), ("flash_fwd_kernel", 5.0, 9.0),
        ("Memset (Device)", 38.0, 50.0), ("who knows", 60.0, 61.0),
    )  # fmt: skip
    events = [profile.Event(*event) for event in given]
    assert profile.busy(events) == 10.0 + 30.0 + 1.0
    found = profile.tally(events, 2)
    assert found["busy_us"] == 20.5 and found["launches"] == 2.5
    assert {kind: us for kind, us in found["kinds_us"].items() if us} == {
        "products": 15.0, "attention": 2.0, "copies and fills": 6.0, "other": 0.5,
    }  # fmt: skip
    row = {
        "case": {"section": "profile", "name": "pre-norm", "width": 8},
        "ways": {
            "eager": found | {"us": {"p50": 31.0}, "host_us": 7.0},
            "lean": {"error": "wrong"},
        },
    }  # fmt: skip
    lines = profile_table(row).splitlines()
    assert lines[0] == "profile pre-norm width=8, microseconds of a step"
    table = dict(re.split(r"\s{2,}", line.strip()) for line in lines[2:])
    assert table["products"] == "15" and table["other"] == "0" and table["step"] == "31"
    assert table["gaps"] == "10"  # 31 less the 20.5 that it is busy, rounded to even
