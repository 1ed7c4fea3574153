"""Attention's backward from quantized heads, interpreted: the bits of dequantizing them before.

Heads of 64 and 128 elements are dequantized as they are loaded, others before.
"""

import dataclasses

import pytest
import torch
from attention_cases import attention_call, normal

from fused_remat.execution.choose import ops_for
from fused_remat.formats import Quantized, QuantizedHeads, quantize
from fused_remat.random import Uniform, site_keys
from fused_remat.steps.attention import attention_bwd, attention_fwd

INF = float("inf")
CASES = {
    "causal": dict(right=0),
    "shared key heads": dict(right=0, kv_heads=2),
    "window and soft-cap": dict(left=7, right=2, softcap=2.0),
    "lengths": dict(lengths=torch.tensor([20, 11])),
    "packed sequences": dict(cu_q=torch.tensor([0, 13, 40]), cu_k=torch.tensor([0, 13, 40])),
    "a mask and its gradient": dict(mask=True, mask_grad=True),
}


def heads_of(batch, nhead, kv, tokens, width, dtype):
    """q, k and v in one quantized matrix, and the same heads as tensors."""
    x = normal(batch * tokens, (nhead + 2 * kv) * width, dtype)
    uniform = Uniform(site_keys(torch.tensor(0))[0], 0, *x.shape)
    packed = Quantized("int8", quantize(x, "int8", uniform), x.shape[1], dtype)
    columns = [0, nhead * width, (nhead + kv) * width]
    found = [
        QuantizedHeads(packed, batch, first, count, width)
        for first, count in zip(columns, (nhead, kv, kv), strict=True)
    ]
    return found, [heads.of(packed.tensor()) for heads in found]


# Masks do not depend on the width, nor on the dtype.
@pytest.mark.parametrize(
    "case, width, dtype",
    [
        *(("shared key heads", width, torch.float16) for width in (64, 128, 20)),
        ("shared key heads", 64, torch.float32),
        *((case, 64, torch.float32) for case in CASES if case != "shared key heads"),
    ],
    ids=str,
)
def test_gradients_are_those_of_unpacked_heads(case, width, dtype):
    torch.manual_seed(0)
    options = dict(CASES[case])
    whole = case == "packed sequences"
    batch, nhead, tokens = (1, 4, 40) if whole else (2, 4, 20)
    kv = options.pop("kv_heads", nhead)
    if options.get("mask"):
        options["mask"] = torch.randn(1, nhead, tokens, tokens).to(dtype)
    call = attention_call((batch, nhead, kv, tokens, tokens, width), **options)
    table = ops_for("triton", torch.empty(1), dtype)
    packed, plain = heads_of(batch, nhead, kv, tokens, width, dtype)
    out, lse = table[attention_fwd](*plain, call)
    dy = torch.randn_like(out)
    results = []
    for q, k, v in (packed, plain):
        mine = dataclasses.replace(call)
        if call.mask_grad:
            mine = dataclasses.replace(call, dmask=torch.zeros_like(call.mask, dtype=torch.float32))
        grads = tuple(torch.full(x.shape, torch.nan, dtype=dtype) for x in (q, k, v))
        table[attention_bwd](dy, q, k, v, out, lse, mine, grads)
        results.append([*grads, *([mine.dmask] if call.mask_grad else [])])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected) and expected.isfinite().all()
