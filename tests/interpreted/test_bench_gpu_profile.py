"""Where a GPU's time goes: what kernels are for, what they add up to, and what is the least."""

import importlib
import re
from pathlib import Path

import pytest
import torch

from bench.audit import cases as audit_cases
from bench.gpu import kinds, profile
from bench.pages.gpu import profile_table
from bench.subjects.layers import Case

KERNELS = Path(__file__).resolve().parents[2] / "kernels"
#: As CUDA 12 and 13, ATen and cuDNN 9 name them on Hopper.
NAMES = {
    "products": (
        "nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1",
        "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x256_32x3_nt_align8>",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float>",
        "void cublasLt::epilogue::impl::globalKernel<8, 32, __nv_bfloat16, float, true, true, 1>",
        "mlp_bwd_kernel",
    ),
    "attention": (
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false>>",
        "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<128, 64>>",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<...>>>",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1",
        "void cudnn::fusion::compute_dot_do_o_specialized<true, __nv_bfloat16, int>",
        "fmha_cutlassB_bf16_aligned_128x128_k128_sm80(PyTorchMemEffAttention::AttentionBackward)",
        "attention_dkdv_bwd_kernel",
        "fused_remat.kernels.attention.attention_fwd_kernel",
    ),
    "norms": (
        "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float, float>",
        "void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<float, 64>",
        "column_sum_kernel",
    ),
    "pointwise": (
        "void at::native::vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl(...)>",
        "void at::native::(anonymous namespace)::fused_dropout_kernel_vec<c10::BFloat16, float>",
        "dropout_add_fwd_kernel",
        "act_bwd_kernel_0d1d2d",
    ),
    "reductions": (
        "void at::native::reduce_kernel<128, 4, at::native::ReduceOp<c10::BFloat16, float>>",
    ),
    "copies and fills": (
        "Memcpy DtoD (Device -> Device)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, direct_copy_kernel_cuda(TensorIteratorBase&)>",
        "void at::native::multi_tensor_apply_kernel<TensorListMetadata<2>, CopyFunctor<BFloat16>>",
        "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>>",
    ),
    "other": ("void cub::DeviceRadixSortHistogramKernel<int>", "a_norm_bwd_kernels"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), [(k, n) for k, names in NAMES.items() for n in names])
def test_what_a_kernel_is_for(kind, name):
    assert kinds.kind_of(name) == kind


def test_forwards_of_attention_are_known():
    found = [name for names in NAMES.values() for name in names if kinds.FORWARD.search(name)]
    assert len(found) == 3 and all("wd" in name or "fprop" in name for name in found)
    assert kinds.FORWARD.search("attention_fwd_kernel")
    assert not kinds.FORWARD.search("void pytorch_flash::flash_fwd_splitkv_combine_kernel<...>")


def test_every_kernel_of_ours_has_a_kind():
    """Those that a launch can name, and those that are in `kernels/`."""
    at = audit_cases.target(90)
    launched = {case.launch.kernel.fn.__name__ for case in audit_cases.cases(at, torch.bfloat16)}
    assert launched <= set(kinds.ours())
    assert set(kinds.OURS) <= {path.stem for path in KERNELS.glob("*.py")}
    for path in KERNELS.glob("*.py"):
        module = importlib.import_module(f"fused_remat.kernels.{path.stem}")
        own = [n for n in vars(module) if n.endswith("_kernel")]
        assert set(own) <= set(kinds.ours()), path.stem
    assert set(kinds.ours().values()) <= set(kinds.KINDS)


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
    assert found["attention_forwards"] == 0.5
    assert {kind: us for kind, us in found["kinds_us"].items() if us} == {
        "products": 15.0, "attention": 2.0, "copies and fills": 6.0, "other": 0.5,
    }  # fmt: skip
    first = {"name": "nvjet_tst", "kind": "products", "us": 15.0, "count": 1.0}
    assert found["kernels"][0] == first and len(found["kernels"]) == 4
    row = {
        "case": {"section": "profile", "name": "pre-norm", "width": 8},
        "ways": {
            "eager": found | {"us": {"p50": 30.0}, "gaps_us": 9.5, "host_us": 7.0,
                              "least_us": {"products": 12.0}},
            "lean": {"error": "wrong"},
        },
    }  # fmt: skip
    lines = profile_table(row).splitlines()
    assert lines[0] == "profile pre-norm width=8, microseconds a step (least)"
    table = dict(re.split(r"\s{2,}", line.strip()) for line in lines[2:])
    assert table["products"] == "15 (12)" and table["other"] == "0" and table["step"] == "30"


def test_a_device_that_cannot_be_profiled_is_an_error(monkeypatch):
    monkeypatch.setattr(profile, "_is_note", lambda event: True)
    with pytest.raises(profile.NothingRecordedError, match="saw nothing run"):
        profile.recorded(lambda: torch.ones(3), torch.device("cpu"))


def test_the_profiler_tells_operators_apart():
    """On a CPU those that call no other; marked ranges are nobody's work."""

    def work():
        with torch.profiler.record_function("mine"):
            torch.ones(4, 4).exp_()

    events = profile.recorded(work, torch.device("cpu"))
    names = {event.name for event in events}
    assert "aten::exp_" in names and not {"mine", "aten::ones"} & names
    assert all(event.end >= event.start for event in events)


def flops(way, example, kind):
    return sum(part.flops for part in profile.parts_of(way, example) if part.kind == kind)


def test_the_least_is_what_the_graph_computes():
    """Against the FLOPs of such a layer by hand, with D² and S·D a token; MLP 4D wide."""
    case = Case("float32", "pre", 0.0, 2, 12, 32, 2, causal=True, attention_dropout=0.0)
    example = profile.example_of(case.subject("cpu"))
    square, core = 24 * 32**2, 24 * 12 * 32
    again = {"eager": (0, 0), "checkpoint": (16, 2), "full": (16, 2), "lean": (16, 0),
             "balanced": (14, 0), "fast": (8, 0), "none": (0, 0)}  # fmt: skip
    assert set(again) == set(profile.WAYS)
    for way, (products, attention) in again.items():
        assert flops(way, example, "products") == (72 + products) * square, way
        assert flops(way, example, "attention") == (7 + attention) * core, way
    ceilings = {"TFLOP/s": 1e-3, "GB/s": 1e9}  # products alone take time
    least = profile.least("eager", example, ceilings)
    assert least["products"] == pytest.approx(1e6 * 72 * square / 1e9)
    assert profile.least("eager", example, {}) == {}
    of_memory = {
        name: profile.least(name, example, ceilings)["norms"] for name in ("eager", "none")
    }
    assert of_memory["none"] > of_memory["eager"] > 0.0  # none rebuilds norms
    with pytest.raises(ValueError, match="torch_remat"):
        profile.parts_of("torch_remat", example)
