"""`ops.causal_block` on kernels beside plain PyTorch: what no layer has, and low-rank updates."""

import pytest
import torch
from block_inputs import Block, leaves, normal, results
from places import PLACE, error_of
from reference import causal_block as plain

from fused_remat import ops

pytestmark = pytest.mark.skipif(PLACE != "interpreter", reason="needs TRITON_INTERPRET=1")
SEQ = 7
LLAMA = Block(d=24, head_dim=8, hidden=40)
GEMMA = Block(d=24, head_dim=8, hidden=40, placement="sandwich", qk_norm=True, split=False)
#: A block, options, and the layers that have an update: all for ().
CASES = {
    "gemma": (
        GEMMA,
        {"norm_offset": 1.0, "activation": "gelu_tanh", "softcap": 2.0, "window": (3, 0)},
        None,
    ),
    "some updates": (LLAMA, {}, ("q", "v", "gate", "fc2")),
    "updates of attention": (LLAMA, {}, ("q", "v")),
    "all updates, dropout": (LLAMA, {"lora_dropout_p": 0.3, "seed": 5}, ()),
}
# Where PyTorch's own error happens to be next to nothing, 1.5 times it is no yardstick; float32
# sums are in another order.
FLOOR = {torch.float16: 4 * torch.finfo(torch.float16).eps, torch.float32: 2e-6}


@pytest.mark.parametrize(
    ("dtype", "routes"),
    [(torch.float32, "one kernel"), (torch.float16, "as on Hopper")],
    ids=str,
    indirect=["routes"],
)
@pytest.mark.parametrize("name", CASES)
def test_errors_are_no_larger_than_pytorchs(name, dtype, routes):
    """Updates are in float32, beside float32 or float16."""
    block, how, updated = CASES[name]
    x = normal(2, SEQ, block.d, seed=1, dtype=dtype)
    weights, dy = block.weights(dtype), normal(2, SEQ, block.d, seed=9, dtype=dtype).detach()
    how = {**how, "kv_heads": block.kv_heads, "rope": block.rope(SEQ, torch.float32),
           "placement": block.placement, "norm": block.norm}  # fmt: skip
    lora = [] if updated is None else block.updates(updated, dtype=torch.float32)

    def exactly(t):
        return t.detach().double().requires_grad_()

    wide, wide_x = {n: exactly(t) for n, t in weights.items()}, exactly(x)
    wide_lora = [(n, exactly(a), exactly(b), scale) for n, a, b, scale in lora]
    mine, given = list(leaves(x, weights, lora).values()), (x, weights, block.nhead)
    op = {**how, "policy": "lean", "backend": "triton", "lora": lora}
    ours = results(lambda: ops.causal_block(*given, **op), mine, dy)
    peer = results(lambda: plain(*given, **how, lora=lora), mine, dy)
    truth = results(
        lambda: plain(wide_x, wide, block.nhead, **how, lora=wide_lora),
        list(leaves(wide_x, wide, wide_lora).values()),
        dy.double(),
    )
    for i, (a, b, exact) in enumerate(zip(ours, peer, truth, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        error, allowed = error_of(a, exact), 1.5 * error_of(b, exact) + FLOOR[dtype]
        assert error <= allowed, f"{i}: {error:.1e} beside {allowed:.1e}"
