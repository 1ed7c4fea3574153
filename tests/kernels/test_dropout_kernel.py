"""The generator of dropout: kernels draw the bits of its definition, `random.keep_scale`."""

import pytest
import torch
from places import BF16, DEVICE, PLACE, mask_of, poisoned, run, sized, target

from fused_remat import random
from fused_remat.kernels.dropout import keep_scale_fwd_kernel
from fused_remat.steps.residual import dropout
from fused_remat.triton import products

# row0, M, N, p: every p; widths 1, 63, 1000; rows about and beyond 2**32; below and above the 2**14
# elements at which `random.keep_scale` goes from numpy to torch.
CASES = [
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


def test_cases_cover_both_paths_of_the_definition():
    assert {m * n <= random._SMALL for _, m, n, _ in CASES} == {True, False}


@pytest.mark.gpu
@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1])
@pytest.mark.parametrize("row0, m, n, p", CASES)
def test_the_bits_of_the_definition(row0, m, n, p, seed):
    key = random.site_keys(torch.tensor(seed))[random.MLP]
    expected = random.keep_scale(key, row0, m, n, p, torch.float32)
    # Columns two apart, and a margin: what the kernel does not write stays NaN.
    buffer = torch.full((m + 2, 2 * n + 3), torch.nan, device=DEVICE)
    out = buffer[1 : m + 1, 1 : 2 * n : 2]
    block_m = 1024 if n == 1 else 32
    grid = (-(-m // block_m), -(-n // 64))
    keep_scale_fwd_kernel[grid](
        key.to(DEVICE), out, *out.stride(), row0, m, n, random.threshold(p), random.scale(p),
        BLOCK_M=block_m, BLOCK_N=64,
    )  # fmt: skip
    assert torch.equal(out.cpu(), expected)
    assert buffer.isnan().sum() == buffer.numel() - m * n, "wrote outside its tile"


@pytest.mark.parametrize("row0", [0, 2**32 - 3, 2**40 + 1])
def test_every_place_draws_them(row0):
    """In a pass over a matrix, in a product's end, and by the definition on this device."""
    rows, width = sized(515, 4104)
    mask = mask_of(rows, width, 0.3, row0)
    expected = random.keep_scale(mask.site_key.cpu(), row0, rows, width, 0.3, torch.float32)
    y = run(dropout, torch.ones(rows, width, device=DEVICE), mask)
    assert torch.equal(y.cpu(), expected)
    assert torch.equal(mask.tensor().cpu(), expected)
    if PLACE != "aten":
        ones = [torch.ones(n, 16, device=DEVICE, dtype=BF16) for n in (rows, width)]
        y = poisoned(rows, width, BF16)
        products.linear_fwd(*ones, None, None, mask, None, None, y, target()).run()
        assert torch.equal(y.cpu() != 0, expected != 0)


@pytest.mark.skipif(PLACE == "interpreter", reason="compiles, which an interpreting process cannot")
def test_the_kernel_compiles_ahead_of_time(monkeypatch, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
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
