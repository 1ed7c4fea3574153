"""A spike that holds the shape of `autograd.py`: the same two functions serve an opaque op.

`torch.compile` must see a block as one op, or it traces the Function and ignores the policy. The op
itself is a later issue; this shows that `forward_block` and `backward_block` need no change for it:
they are functions of tensors and a hashable call, and return no aliases.
"""

import pytest
import torch
from torch import Tensor

from fused_remat.autograd import BlockCall, backward_block, forward_block, run_block
from fused_remat.blocks.encoder import EncoderConfig, encoder_graph

CONFIG = EncoderConfig(
    True, nhead=2, head_dim=8, activation="gelu", eps1=1e-5, eps2=1e-5, p_mlp=0.1
)
GRAPH = encoder_graph(CONFIG)
NAMES = tuple(p for p in GRAPH.params if p not in ("mask", "padding"))
CALLS: dict[str, BlockCall] = {}


def _given(x: Tensor, tensors: list[Tensor]) -> list[Tensor | None]:
    named = {"input": x, **dict(zip(NAMES, tensors, strict=True))}
    return [named.get(name) for name in GRAPH.tensors]


@torch.library.custom_op("fused_remat_spike::block", mutates_args=())
def block(x: Tensor, tensors: list[Tensor], key: str) -> list[Tensor]:
    call = CALLS[key]
    given = _given(x, tensors)
    out, kept = forward_block(call, call.prepare(given), given)
    return [out, *kept]


@block.register_fake
def _(x, tensors, key):
    call = CALLS[key]
    given = _given(x, tensors)
    out, kept = forward_block(call, call.prepare(given), given)
    return [out, *kept]


@torch.library.custom_op("fused_remat_spike::block_backward", mutates_args=())
def block_backward(
    x: Tensor, tensors: list[Tensor], kept: list[Tensor], dy: Tensor, key: str
) -> list[Tensor]:
    call = CALLS[key]
    given = _given(x, tensors)
    grads = backward_block(call, call.prepare(given), given, None, kept, dy)
    return [g for g in grads if g is not None]


@block_backward.register_fake
def _(x, tensors, kept, dy, key):
    return [torch.empty_like(t) for t in (x, *tensors[:-1])]


def _setup_context(ctx, inputs, output):
    x, tensors, ctx.key = inputs
    ctx.count = len(tensors)
    ctx.save_for_backward(x, *tensors, *output[1:])


def _backward(ctx, grads):
    x, *rest = ctx.saved_tensors
    tensors, kept = rest[: ctx.count], rest[ctx.count :]
    dx, *dtensors = block_backward(x, tensors, kept, grads[0], ctx.key)
    return dx, [*dtensors, None], None


block.register_autograd(_backward, setup_context=_setup_context)


@pytest.mark.parametrize("save", [(), ("attn", "up")])
def test_the_two_functions_serve_an_opaque_op_under_compile(save):
    torch.manual_seed(0)
    d, f = 16, 32
    shapes = {"qkv": (3 * d, d), "proj": (d, d), "fc1": (f, d), "fc2": (d, f)}
    params = {f"{k}.weight": torch.randn(s) / 4 for k, s in shapes.items()}
    params |= {f"{k}.bias": torch.randn(s[0]) for k, s in shapes.items()}
    params |= {f"norm{i}.{n}": torch.randn(d) for i in (1, 2) for n in ("weight", "bias")}
    x = torch.randn(2, 6, d, requires_grad=True)
    for p in params.values():
        p.requires_grad_()
    params["seed"] = torch.tensor(7)
    tensors = [params[n] for n in NAMES]
    leaves = [x, *tensors[:-1]]
    wants = frozenset({"input", *NAMES[:-1]})
    key = "spike " + " ".join(save)  # a compiled graph holds the key: one key, one call
    CALLS[key] = BlockCall(GRAPH, frozenset(save), wants, "eager")

    reference = run_block(GRAPH, frozenset(save), {"input": x, **params})
    expected = torch.autograd.grad(reference.square().sum(), leaves)

    compiled = torch.compile(
        lambda x, *tensors: block(x, list(tensors), key)[0].square().sum(),
        fullgraph=True, backend="aot_eager",
    )  # fmt: skip
    loss = compiled(x, *tensors)
    got = torch.autograd.grad(loss, leaves)
    for g, e in zip(got, expected, strict=True):
        assert torch.equal(g, e)
