"""Every operation on kernels, and low-rank updates beside it, against plain PyTorch in float64."""

import functools

import pytest
import torch
from accuracy import assert_bits, check_error
from block_inputs import Block, normal, results
from op_cases import CASES, ROTARY, ROTARY_BLOCKS, Case
from places import PLACE
from reference import causal_block
from tiers import pairwise

from fused_remat import ops

pytestmark = pytest.mark.skipif(PLACE != "interpreter", reason="needs TRITON_INTERPRET=1")
BLOCK = Block(d=24, head_dim=8, hidden=40)
SHAPES = {name: tuple(weight.shape) for name, weight in BLOCK.weights().items()}


def updated(*layers):
    """A Llama's block with low-rank updates of `layers`."""

    def call(fn, t, p, **how):
        weights = {name: t[name] for name in SHAPES}
        lora = [(n, t[f"{n}.A.weight"], t[f"{n}.B.weight"], 0.5) for n in layers]
        how |= {"kv_heads": BLOCK.kv_heads, "rope": BLOCK.rope(t["x"].shape[1], t["x"].dtype)}
        return fn(t["x"], weights, BLOCK.nhead, lora=lora, lora_dropout_p=p, **how)

    shapes = {"x": ("B", "S", BLOCK.d), **SHAPES}
    for layer in layers:
        out, width = BLOCK.linears[layer]
        shapes |= {f"{layer}.A.weight": (3, width), f"{layer}.B.weight": (out, 3)}
    return Case(
        functools.partial(call, ops.causal_block),
        lambda t, p, seed: call(causal_block, t, p, seed=seed), shapes, (0, 0),
    )  # fmt: skip


UPDATED = {
    "some updates": updated("q", "v", "gate", "fc2"),
    "updates of attention": updated("q", "v"),
    "all updates": updated(*BLOCK.linears),
}
EVERY = CASES | ROTARY | ROTARY_BLOCKS | UPDATED


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
