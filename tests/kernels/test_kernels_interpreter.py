"""Every kernel against its definition, without a GPU: interpreted, and compiled ahead of time.

Triton decides at import whether it interprets, so each check runs in a process of its own: this
file, run as a script with the check's name.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


# row0, M, N, p: every p; widths 1, 63, 1000; rows about and beyond 2**32; below and above the 2**14
# elements at which `random.keep_scale` goes from numpy to torch.
KEEP_SCALE_CASES = [
    (0, 1, 1, 0.5),
    (5, 3, 63, 0.1),
    (2**32 - 2, 5, 1000, 0.1),
    (2**32 - 2, 17, 1000, 0.1),
    (2**40 + 1, 70, 63, 0.5),
    (2**40 + 1, 300, 63, 0.5),
    (2**62, 20000, 1, 0.1),
    (7, 16, 128, 1.0),
    (7, 129, 129, 1.0),
    (7, 40, 65, 0.0),
]


def interpret_keep_scale() -> None:
    import torch

    from fused_remat import random
    from fused_remat.kernels.dropout import keep_scale_fwd_kernel

    for seed in (0, -1, 2**63 - 1):
        key = random.site_keys(torch.tensor(seed))[random.MLP]
        for row0, m, n, p in KEEP_SCALE_CASES:
            expected = random.keep_scale(key, row0, m, n, p, torch.float32)
            # Columns two apart, and a margin: what the kernel does not write stays NaN.
            buffer = torch.full((m + 2, 2 * n + 3), torch.nan)
            out = buffer[1 : m + 1, 1 : 2 * n : 2]
            block_m = 1024 if n == 1 else 32
            grid = (-(-m // block_m), -(-n // 64))
            keep_scale_fwd_kernel[grid](
                key, out, *out.stride(), row0, m, n, random.threshold(p), random.scale(p),
                BLOCK_M=block_m, BLOCK_N=64,
            )  # fmt: skip
            assert torch.equal(out, expected), (seed, row0, m, n, p)
            assert buffer.isnan().sum() == buffer.numel() - m * n, "wrote outside its tile"


def compile_keep_scale() -> None:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from fused_remat.kernels.dropout import keep_scale_fwd_kernel

    signature = {
        "site_key_ptr": "*i64", "out_ptr": "*fp32", "stride_om": "i64", "stride_on": "i32",
        "row0": "i64", "M": "i64", "N": "i32", "threshold": "i32", "scale": "fp32",
        "BLOCK_M": "constexpr", "BLOCK_N": "constexpr",
    }  # fmt: skip
    source = ASTSource(keep_scale_fwd_kernel, signature, {"BLOCK_M": 32, "BLOCK_N": 64})
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32))
    assert kernel.asm["cubin"]
    assert ".target sm_90" in kernel.asm["ptx"]
    assert kernel.asm["ptx"].count("ld.global") == 1, "the generator loads nothing but the key"


def check_alone(check: str, **environment: str) -> None:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | environment
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, __file__, check], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-4000:]


def test_cases_cover_both_paths_of_the_definition():
    from fused_remat import random

    assert {m * n <= random._SMALL for _, m, n, _ in KEEP_SCALE_CASES} == {True, False}


@pytest.mark.parametrize("check", ["interpret_keep_scale"])
def test_interpreted_kernel_gives_the_same_bits(check):
    pytest.importorskip("triton", reason="Triton is not installed")
    check_alone(check, TRITON_INTERPRET="1")


@pytest.mark.parametrize("check", ["compile_keep_scale"])
def test_kernel_compiles_ahead_of_time(check, tmp_path):
    pytest.importorskip("triton", reason="Triton is not installed")
    check_alone(check, TRITON_CACHE_DIR=str(tmp_path))


if __name__ == "__main__":
    globals()[sys.argv[1]]()
