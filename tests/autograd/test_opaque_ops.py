"""The operators behind torch.compile: PyTorch's own checks of them, and the text of a call."""

import functools
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from block_inputs import in_pieces, normal, results
from op_cases import CASES
from reference import EXACT_PRESETS
from same_bits import assert_same_bits, step
from tiers import exhaustive
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fused_remat import FusedRematDecoderLayer, FusedRematLayer
from fused_remat.autograd import function, operators
from fused_remat.graph.build import block_graph
from fused_remat.graph.text import block
from fused_remat.spec import BlockSpec, BranchSpec, MLPSpec

X = torch.randn(3, 6, 16, generator=torch.Generator().manual_seed(2))
NAMES = [name for name in CASES if name != "mlp_custom"]


def opaque(fn):
    """`fn`, its blocks run through the operators, as under a selective checkpoint."""

    def call(*args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(function, "_chosen_by_operator", lambda: True)
            return fn(*args)

    return call


def operator_calls(fn):
    """The operators of this library that `fn` calls, with their arguments."""
    seen = []

    class Observer(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "fused_remat":
                seen.append((func, args))
            return func(*args, **(kwargs or {}))

    with Observer():
        fn()
    return seen


def call_of(name, policy, batch, seq):
    """A call of the op with dropout, if it has that, and its leaves."""
    case = CASES[name]
    tensors = case.tensors(batch, seq)
    p, options = (0.3, {"seed": 3}) if case.dropout else (0.0, {})
    return lambda: case.op(tensors, p, policy=policy, **options), list(tensors.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("policy", ["full", "none", *map(exhaustive, EXACT_PRESETS[1:-1])])
def test_an_operator_is_the_block_bit_for_bit_also_in_pieces(name, policy):
    call, leaves = call_of(name, policy, 3, 7)
    with in_pieces():
        assert_same_bits(results(opaque(call), leaves), results(call, leaves))


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    """Schema (nothing returned shares memory with an input), autograd, fake tensors, AOT."""
    call, _ = call_of(name, "none", 2, 5)
    seen = operator_calls(lambda: opaque(call)().sum().backward())
    assert [len(args) for _, args in seen] == [2, 4]  # forward and backward
    (forward, args), (backward, back_args) = seen
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in args[0]]
    torch.library.opcheck(forward, (leaves, args[1]))
    saved = [t.detach() for t in back_args[0]]
    torch.library.opcheck(backward, (saved, *back_args[1:]))


def test_opcheck_of_a_decoder():
    """What it keeps of the memory has as many tokens as the memory."""
    module = FusedRematDecoderLayer(8, 2, 12, 0.1, batch_first=True, policy="none").double()
    call = opaque(lambda: module(normal(2, 5, 8), normal(2, 7, 8)))
    (forward, (tensors, text)), _ = operator_calls(lambda: call().sum().backward())
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in tensors]
    torch.library.opcheck(forward, (leaves, text))


def test_the_text_of_a_call_is_all_there_is_of_it(tmp_path):
    """Another process, which has built no graph, computes the same from it."""
    case = CASES["mlp_block"]
    tensors = {name: t.detach() for name, t in case.tensors().items()}
    ((operator, args),) = operator_calls(lambda: opaque(lambda: case.op(tensors, 0.3, seed=3))())
    torch.save((args, operator(*args)), tmp_path / "call.pt")
    script = (
        "import sys, torch, fused_remat\n"
        "args, expected = torch.load(sys.argv[1])\n"
        "made = torch.ops.fused_remat.mlp_block(*args)\n"
        "assert all(torch.equal(a, b) for a, b in zip(made, expected, strict=True))\n"
    )
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, "-c", script, tmp_path / "call.pt"]
    subprocess.run(command, env=os.environ | threads, check=True)


# --- graphs as text


def define(activation):
    """As a cell of a notebook."""

    @block
    def redefined_mlp(p):
        branch = BranchSpec(op=MLPSpec(activation=activation, dropout=p))
        spec = BlockSpec(kind="mlp", branches=(branch,), residual=False)
        return replace(block_graph(spec), kind="redefined_mlp")

    up, down = normal(32, 16).float(), normal(16, 32).float()

    def call(x):
        given = {"input": x, "fc1.weight": up, "fc2.weight": down}
        return function.run_block(redefined_mlp(0.0), "full", given)

    return call, torch.compile(call, backend="aot_eager", fullgraph=True)


def test_a_builder_that_is_defined_again():
    """Never the other definition's graph."""
    torch._dynamo.reset()
    first, compiled = define("gelu")
    expected = first(X)
    assert torch.equal(compiled(X), expected)
    second, compiled_second = define("relu")
    assert torch.equal(compiled_second(X), second(X)) and torch.equal(opaque(second)(X), second(X))
    with pytest.raises(RuntimeError, match="defined again"):
        opaque(first)(X)
    assert torch.equal(compiled(X), expected)  # what was compiled is still there
    operators.parse_call.cache_clear()  # as in another process
    with pytest.raises(RuntimeError, match="is not the graph that this program was"):
        compiled(X)
    torch._dynamo.reset()
    with pytest.raises(Exception, match="'redefined_mlp' was defined again"):
        compiled(X)


def test_double_backward_raises():
    module = layer("full")
    x = torch.randn(3, 6, 16, requires_grad=True)
    (grad,) = torch.autograd.grad(opaque(module)(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grad.sum().backward()


def test_compiled_autograd_of_a_forward_in_eager_mode():
    torch._dynamo.reset()
    module = layer("full")
    _, *expected, _, _ = step(module, module, X)
    torch.manual_seed(1)
    x = X.clone().requires_grad_()
    module.zero_grad()
    loss = module(x).sin().sum()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    assert_same_bits([x.grad, *(p.grad for p in module.parameters())], expected)


# --- selective checkpointing


def layer(policy="balanced", **kwargs):
    torch.manual_seed(0)
    options = {"dropout": 0.2, "norm_first": True, "batch_first": True}
    return FusedRematLayer(16, 2, 32, policy=policy, **options, **kwargs)


def saving(*ops):
    """A policy of selective checkpointing that saves the outputs of `ops`, and its questions."""
    asked = []

    def policy(ctx, op, *args, **kwargs):
        asked.append((op, ctx.is_recompute))
        chosen = op in ops
        return CheckpointPolicy.MUST_SAVE if chosen else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, policy), asked


@pytest.mark.composes(
    "Outer checkpointing",
    "`create_selective_checkpoint_contexts`, by name: `torch.ops.fused_remat.encoder_prenorm`, ...",
    limits="a block saved by name keeps its output and what its own policy names; one with an "
    "activation function of your own is not seen, and rebuilt; weights changed in place between "
    "forward and backward of a saved block are not noticed, as of a saved matmul",
)
@pytest.mark.parametrize(
    ("policy", "saved"), [*((preset, True) for preset in EXACT_PRESETS), ("balanced", False)]
)
def test_selective_checkpointing_sees_a_block_by_name(policy, saved, monkeypatch):
    module, functions, ran = layer(policy), [], []
    name = torch.ops.fused_remat.encoder_prenorm.default
    contexts, asked = saving(*([name] if saved else []))
    way = functools.partial(checkpoint, use_reentrant=False, context_fn=contexts)

    def inner(x):
        return module(x.sin()).tanh()

    expected, run_forward = step(inner, module, X), operators.executor.forward
    monkeypatch.setattr(function, "OBSERVERS", [functions.append])
    monkeypatch.setattr(
        operators.executor, "forward", lambda *args: ran.append(1) or run_forward(*args)
    )
    assert_same_bits(step(functools.partial(way, inner), module, X), expected)
    assert (name, False) in asked and not functions  # the operator, not the Function
    assert len(ran) == (1 if saved else 2)


@pytest.mark.composes("torch.compile", "`torch.utils.checkpoint` around it, selective too")
@pytest.mark.parametrize("selective", [True, False])
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_checkpointing_compiled(selective):
    torch._dynamo.reset()
    module, name = layer(), torch.ops.fused_remat.encoder_prenorm.default
    contexts, asked = saving(name)
    options = {"context_fn": contexts} if selective else {}

    def inner(x):
        return module(x.sin()).tanh()

    def outer(x):
        return checkpoint(inner, x, use_reentrant=False, **options)

    got = step(torch.compile(outer, backend="aot_eager", fullgraph=True), module, X)
    assert_same_bits(got, step(inner, module, X))
    assert not selective or name in [op for op, _ in asked]
