"""Low-rank updates on the triton backend, interpreted: beside fused steps, and in two dtypes."""

import pytest
import torch
from block_inputs import Block, leaves, normal, results
from reference import causal_block as plain

from fused_remat import ops

BLOCK = Block(d=24, head_dim=8, nhead=4, kv_heads=2, hidden=40)


CASES = {
    "q, v beside float32": (torch.float32, ("q", "v"), 0.0),
    "all, with dropout, beside float16": (torch.float16, (), 0.3),
}


@pytest.mark.parametrize("dtype, layers, p", CASES.values(), ids=CASES)
def test_matches_plain_pytorch_in_float64(dtype, layers, p):
    """Adapters in float32, the block in float32 or float16."""
    found = []
    for exact in (False, True):
        to, inside = (torch.float64,) * 2 if exact else (dtype, torch.float32)
        x = normal(2, 7, 24, dtype=dtype, seed=50).detach().to(to).requires_grad_()
        w = {n: t.detach().to(dtype).to(to) for n, t in BLOCK.weights().items()}
        lora = [
            (n, a.detach().to(inside).requires_grad_(), b.detach().to(inside).requires_grad_(), s)
            for n, a, b, s in BLOCK.updates(layers, dtype=torch.float32)
        ]
        rope = tuple(t.to(inside) for t in BLOCK.rope(7, torch.float32))
        kw = {"kv_heads": 2, "rope": rope, "lora": lora, "lora_dropout_p": p, "seed": 5}
        way, backend = (plain, {}) if exact else (ops.causal_block, {"backend": "triton"})
        dy = normal(2, 7, 24, seed=60).detach().to(dtype).to(to)
        call = lambda way=way, x=x, w=w, kw=kw, b=backend: way(x, w, 4, **kw, **b)  # noqa: E731
        named = leaves(x, w, lora)
        found.append(results(call, list(named.values()), dy))
    # Sums in another order in float32; in float16 a dozen steps in a row round by 2**-11.
    limit = 2e-5 if dtype == torch.float32 else 1e-2
    for name, a, b in zip(["y", *named], *found, strict=True):
        error = (a.double() - b).norm() / b.norm()
        assert error <= limit, f"{name}: {error:.1e}"
