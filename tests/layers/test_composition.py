"""Layers under the compiler, export, torch.func, frozen parts, gradient buffers, replay check."""

import functools
import warnings

import pytest
import torch
from accuracy import assert_bits, assert_close
from block_inputs import in_pieces
from layer_kinds import DECODERS, KINDS, TORCH_NN, B, F, M, S, run
from tiers import pairwise
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat import FusedRematLayer, FusedRematWarning, check_replay

FP32, BF16 = torch.float32, torch.bfloat16

pytestmark = pytest.mark.usefixtures("served")


@pytest.mark.composes("torch.compile", "the decoder layer, dropout, sizes dynamic")
@pytest.mark.composes("torch.compile", "`FusedRematCausalLayer`, `fullgraph=True`, dynamic shapes")
@pytest.mark.parametrize("name", ["decoder, pre-norm", "llama", "gemma"])
def test_compiles_as_one_dynamic_graph_bit_for_bit(name):
    torch._dynamo.reset()
    kind, counter, frames = KINDS[name], CompileCounterWithBackend("aot_eager"), set()
    _, fused = kind.pair("fast" if kind.has_memory else "full", dropout=0.1)
    compiled = torch.compile(fused, fullgraph=True, backend=counter, dynamic=True)
    for batch, seq, memory in ((B, S, M), (3, 9, 200)):  # a memory of two groups in eager mode
        tensors, given = kind.data(FP32, seq, memory, batch), kind.given("tables", FP32, seq)
        if kind.is_causal:
            given["key_padding_mask"] = (
                torch.arange(seq) > torch.tensor([seq, 4, 2, 3])[:batch, None]
            )
        found = []
        for call in (fused, compiled):
            *inputs, dy = (t.clone().requires_grad_() for t in tensors)
            torch.manual_seed(1)
            y = call(*inputs, **given)
            found.append([y, *torch.autograd.grad(y, [*inputs, *fused.parameters()], dy)])
        assert_bits(*found)
        frames.add(counter.frame_count)
    assert len(frames) == 1  # no compilation after the first call


@pytest.mark.composes("torch.export", "`FusedRematCausalLayer`: ordinary operations")
@pytest.mark.parametrize("name", ["encoder, post-norm", "decoder, post-norm", "llama"])
def test_torch_func_export_and_tracing_are_ordinary_operations(name):
    kind = KINDS[name]
    stock, fused = kind.pair(dtype=torch.float64)
    *inputs, _ = kind.data()
    given = kind.given("tables")

    def gradients(layer):
        def loss(params):
            y = torch.func.functional_call(layer, params, tuple(inputs), given)
            return y.square().sum()

        return torch.func.grad(loss)(dict(layer.named_parameters()))

    found, expected = gradients(fused), gradients(stock)
    assert list(found) == list(expected)
    assert_close(found.values(), expected.values())
    traced = torch.jit.trace(fused, tuple(inputs), check_trace=False)
    torch.testing.assert_close(traced(*inputs), stock(*inputs))
    program = torch.export.export(fused, tuple(inputs), given).module()
    torch.testing.assert_close(program(*inputs, **given), stock(*inputs, **given))
    fused.eval(), stock.eval()
    program = torch.export.export(fused, tuple(inputs), given).module()
    torch.testing.assert_close(program(*inputs, **given), stock(*inputs, **given))
    if kind.is_causal:
        each = torch.vmap(functools.partial(fused, **given))(inputs[0][:, None])
        torch.testing.assert_close(each[:, 0], stock(*inputs, **given).detach())


#: Beginnings of the names of parameters that require a gradient, and how many of the inputs do.
WANTED = {
    "the first linear layer": (("linear1", "up"), 0),
    "norms": (("norm",), 0),
    "a bias of a packed weight": (("self_attn.in_proj_bias", "q.bias"), 0),
    "cross attention, or a projection": (("multihead_attn", "proj"), 2),
    "one packed weight not": (("self_attn", "linear", "norm", "multihead_attn.in_proj_b"), 0),
    "the memory not": (("",), 1),
    "inputs alone": ((), 2),
}


@pytest.mark.parametrize(
    "which, name, policy, low, tokens",
    pairwise(list(WANTED), [*TORCH_NN, "llama", "bert"], ["full", "lean", "fast"], [None, BF16],
             [4, 512]),
)  # fmt: skip
def test_frozen_parts_get_no_gradient_and_the_others_the_same(
    which, name, policy, low, tokens, monkeypatch
):
    """What is required has the gradient that it has when everything is, bit for bit."""
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    kind, (beginnings, wanted) = KINDS[name], WANTED[which]
    _, fused = kind.pair(policy)
    *inputs, dy = kind.data(FP32)
    _, *whole = run(fused, *inputs, dy, low=low)
    for n, p in fused.named_parameters():
        p.requires_grad_(n.startswith(beginnings))
    inputs = [t.requires_grad_(i < wanted) for i, t in enumerate(inputs)]
    leaves = [*inputs, *fused.parameters()]
    if not any(t.requires_grad for t in leaves):
        assert which == "a bias of a packed weight" and kind.is_causal  # bert alone has one
        return
    with torch.autocast("cpu", BF16, enabled=low is not None):
        y = fused(*inputs)
    y.backward(dy)
    for leaf, expected in zip(leaves, whole, strict=True):
        assert torch.equal(leaf.grad, expected) if leaf.requires_grad else leaf.grad is None


@pytest.mark.composes("Replay check", "the decoder layer")
@pytest.mark.parametrize("name, dtype", [(DECODERS[1], FP32), ("llama", BF16), ("gemma", BF16)])
def test_the_replay_check_passes_and_sees_a_changed_input(name, dtype):
    kind = KINDS[name]
    _, fused = kind.pair("fast" if kind.has_memory else "full", dropout=0.1, dtype=dtype)
    *inputs, dy = kind.data(dtype)
    given = kind.given("tables", dtype)
    with check_replay(), in_pieces(4):
        run(fused, *inputs, dy, **given)
        y = fused(*inputs, **given)
    inputs[-1].data[1, 2, 3] += 1
    changed = "memory" if kind.has_memory else "input"
    with pytest.raises(RuntimeError, match=rf"'{changed}' differs at \(index 1, 2, 3"):
        y.sum().backward()


def test_a_function_as_activation_sees_whole_tensors(pieces):
    """Cut nowhere: also where the memory is the longer sequence."""
    kind, shapes, grads = KINDS["decoder, post-norm"], [], []
    slope = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def leaky(x):
        shapes.append(tuple(x.shape))
        return torch.where(x > 0, x, slope * x)

    tgt, memory, dy = kind.data(memory=3 * S)
    for layer in kind.pair(activation=leaky, dtype=torch.float64):
        shapes.clear()
        y = layer(tgt, memory)
        grads.append(torch.autograd.grad(y, [slope, *layer.parameters()], dy))
        assert {s for s in shapes if s[1] != 1} == {(B, S, F)}
    assert_close(grads[1], grads[0])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_fake_tensors(dropout, policy):
    with FakeTensorMode(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        layer = FusedRematLayer(8, 2, 16, dropout=dropout, policy=policy)
        x = torch.randn(5, 2, 8, requires_grad=True)
        y = layer(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (5, 2, 8)
