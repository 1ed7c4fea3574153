"""Every operation on kernels, and low-rank updates beside it, against plain PyTorch in float64."""

import pytest
import torch
from accuracy import assert_bits, check_error
from block_inputs import Block, leaves, normal, results
from op_cases import CASES, ROTARY, ROTARY_BLOCKS
from places import PLACE
from reference import causal_block
from tiers import pairwise

from fused_remat import ops

pytestmark = pytest.mark.skipif(PLACE != "interpreter", reason="needs TRITON_INTERPRET=1")
EVERY = CASES | ROTARY | ROTARY_BLOCKS


@pytest.mark.parametrize(
    "name, p, dtype, policy, routes",
    pairwise(
        list(EVERY), [0.3, 0.0], [torch.float16, torch.float32], ["lean", "full", "none"],
        ["one kernel", "as on Hopper"],
    ),
    ids=str, indirect=["routes"],
)  # fmt: skip
def test_errors_are_no_larger_than_pytorchs(name, p, dtype, policy, routes):
    """Low-rank updates are in float32, beside float32 or float16. Backward twice gives the same."""
    case = EVERY[name]
    tensors = {
        n: t.detach().to(torch.float32 if {"A", "B"} & {*n.split(".")} else dtype).requires_grad_()
        for n, t in case.tensors(seq=9).items()
    }
    wide = {n: t.detach().double().requires_grad_() for n, t in tensors.items()}
    y = case.op(tensors, p, policy=policy, backend="triton", **case.seed())
    dy = normal(*y.shape, seed=99).detach().to(dtype)
    grads, same = (torch.autograd.grad(y, [*tensors.values()], dy, retain_graph=True) for _ in "12")
    assert_bits(grads, same)
    peer = results(lambda: case.plain(tensors, p, 7), [*tensors.values()], dy)
    truth = results(lambda: case.plain(wide, p, 7), [*wide.values()], dy.double())
    ours, peer = ([t.to(dtype) for t in found] for found in ((y.detach(), *grads), peer))
    check_error(ours, peer, truth, ["output", *tensors])


@pytest.mark.parametrize("p, dtype", [(0.0, torch.float16), (0.3, torch.float32)])
def test_dora(p, dtype):
    """Its matrices are in float32."""
    block, found = Block(qkv_bias=True), []
    given = {"x": normal(2, 9, block.d), **block.weights()}
    lora, options = block.updates(dora=True), {"seed": 5, "lora_dropout_p": p, "kv_heads": 2}
    for op, widest, more in (
        (ops.causal_block, torch.float32, {"policy": "full", "backend": "triton"}),
        (causal_block, torch.float32, {}),
        (causal_block, torch.float64, {}),
    ):
        own = widest if widest == torch.float64 else dtype
        x, *rest = [t.detach().to(dtype).to(own).requires_grad_() for t in given.values()]
        weights = dict(zip(list(given)[1:], rest, strict=True))
        updates = [
            (name, *[t if isinstance(t, float) else as_leaf(t, widest) for t in more_of])
            for name, *more_of in lora
        ]
        call = lambda: op(x, weights, block.nhead, lora=updates, **options, **more)  # noqa: B023, E731
        found.append(results(call, [*leaves(x, weights, updates).values()]))
    # The magnitudes' gradient is that of the result without its bias, which is rounded with it.
    floor = torch.finfo(dtype).eps if dtype == torch.float16 else None
    check_error(*found, ["y", *leaves(x, weights, updates)], floor=floor)


def as_leaf(t, dtype):
    return t.detach().float().to(dtype).requires_grad_()
