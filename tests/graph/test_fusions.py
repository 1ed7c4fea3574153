"""Fused steps have the bits of single steps, where the operation runs those one by one."""

import itertools

import pytest
import torch
from reference import EXACT_PRESETS
from tiers import pairwise

from fused_remat import Policy, ops
from fused_remat.autograd import function
from fused_remat.execution import choose
from fused_remat.graph.build import BlockBuilder, block_graph
from fused_remat.graph.schedule import schedule
from fused_remat.spec import BlockSpec, BranchSpec, MLPSpec, NormSpec
from fused_remat.steps.activation import ACTIVATIONS, MLPActivation
from fused_remat.steps.fused import linear_norm_fwd, mlp_bwd, mlp_up_fwd
from fused_remat.steps.operations import OPERATIONS, Faster

ALL = frozenset(
    {"linear_norm"} | {f"{n} {a}" for n in ("linear_act", "mlp_bwd") for a in ACTIVATIONS}
)
FUSED = (mlp_up_fwd, mlp_bwd, linear_norm_fwd)


@pytest.fixture
def fusing(monkeypatch):
    """Names of the fused operations that run on the backend "fusing", a copy of eager."""
    called = set()

    def noting(function):
        def run(*args):
            called.add(function.__name__)
            return function(*args)

        return Faster(run, lambda key: None, "")

    for op in FUSED:
        monkeypatch.setitem(OPERATIONS[op].faster, "fusing", noting(op))
    monkeypatch.setitem(choose.BACKENDS, "fusing", choose.Backend)
    choose.forget()
    yield called
    choose.forget()


ENCODER = {
    "qkv": (24, 8), "proj": (8, 8), "fc1": (16, 8), "fc2": (8, 16), "norm1": (8,), "norm2": (8,),
}  # fmt: skip


def encoder_case(policy, norm_first, needs_grad):
    torch.manual_seed(0)
    weights = {f"{name}.weight": torch.randn(shape) for name, shape in ENCODER.items()}
    weights |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in ENCODER.items()}
    x, dy = torch.randn(2, 3, 5, 8)
    leaves = {"input": x, **weights}
    for name, leaf in leaves.items():
        leaf.requires_grad_(needs_grad(name))

    def step(backend):
        torch.manual_seed(1)
        y = ops.encoder_block(
            x, weights, 2, norm_first=norm_first, activation="gelu", dropout_p=0.2, policy=policy,
            backend=backend,
        )  # fmt: skip
        given = [leaf for leaf in leaves.values() if leaf.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, given, dy)]

    return step


WANTS = {
    "all": lambda name: True,
    "input": lambda name: name == "input",
    "weights": lambda name: name != "input",
    "fc2 frozen": lambda name: not name.startswith("fc2"),
    "fc2.bias only": lambda name: name == "fc2.bias",
    "fc1 only": lambda name: name.startswith("fc1"),
    "norm2 only": lambda name: name.startswith("norm2"),
}


@pytest.mark.parametrize(
    "norm_first, policy, needs_grad", pairwise([False, True], list(EXACT_PRESETS), list(WANTS))
)
def test_encoder_gives_the_same_bits(fusing, policy, norm_first, needs_grad):
    step = encoder_case(policy, norm_first, WANTS[needs_grad])
    for a, b in zip(step("fusing"), step("eager"), strict=True):
        assert torch.equal(a, b)
    assert {"mlp_up_fwd", "linear_norm_fwd"} <= fusing
    if needs_grad in ("all", "fc2 frozen", "input"):
        # "none" keeps up; post-norm, "full" rebuilds it anyway, for sum2.
        kept = policy == "none" or (policy == "full" and not norm_first)
        assert ("mlp_bwd" in fusing) != kept


@pytest.mark.parametrize(
    "gated, policy, frozen",
    pairwise([False, True], ["full", "none"], [(), (0,), (1,), (2,), (0, 1)]),
)
def test_mlp_gives_the_same_bits(fusing, gated, policy, frozen):
    torch.manual_seed(0)
    x, dy = torch.randn(2, 3, 5, 8)
    shapes = [(16, 8), (16, 8), (8, 16)] if gated else [(16, 8), (16,), (8, 16), (8,)]
    weights = [torch.randn(shape) for shape in shapes]
    for index, weight in enumerate(weights):
        weight.requires_grad_(index not in frozen)
    x.requires_grad_()
    results = []
    for backend in ("fusing", "eager"):
        torch.manual_seed(1)
        op = ops.gated_mlp if gated else ops.mlp
        y = op(x, *weights, dropout_p=0.3, policy=policy, backend=backend)
        leaves = [x, *(w for w in weights if w.requires_grad)]
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)
    assert ("mlp_bwd" in fusing) == (policy == "full")


def gate_of_another_input(b):
    b.linear("h", "input", "square")
    b.linear("gate", "input", "up")
    b.linear("up", "h", "up")
    b.add(MLPActivation(name="act", gate="gate", up="up", act="silu"))
    b.linear("output", "act", "down")


def act_is_the_residual_too(b):
    b.linear("up", "input", "square")
    b.add(MLPActivation(name="act", up="up", act="gelu"))
    b.linear("output", "act", "square", residual="act")


def act_is_read_twice(b):
    b.linear("up", "input", "up")
    b.add(MLPActivation(name="act", up="up", act="gelu"))
    b.linear("one", "act", "down")
    b.linear("output", "act", "other", residual="one")


def residual_made_after_act(b):
    b.linear("up", "input", "up")
    b.add(MLPActivation(name="act", up="up", act="gelu"))
    b.linear("r", "input", "square")
    b.linear("output", "act", "down", residual="r")


def sum_read_before_its_norm(b):
    b.linear("sum", "input", "square", residual="input")
    b.linear("up", "sum", "up")
    b.norm("normed", "sum", NormSpec(), weights="norm")
    b.linear("down", "up", "down")
    b.sum("output", "normed", "down")


ODD = (gate_of_another_input, act_is_the_residual_too, act_is_read_twice, residual_made_after_act,
       sum_read_before_its_norm)  # fmt: skip
SHAPES = {"square": (8, 8), "up": (16, 8), "down": (8, 16), "other": (8, 16), "norm": (8,)}


@pytest.mark.parametrize(
    "draw, frozen, kept",
    pairwise(ODD, [(), ("down",), ("down", "other", "square"), ("up",)], [(), ("up",), ("act",)]),
)
def test_graphs_that_no_block_has_give_the_same_bits(fusing, draw, frozen, kept):
    b = BlockBuilder()
    draw(b)
    graph = b.graph("odd")
    torch.manual_seed(0)
    tensors = {f"{name}.weight": torch.randn(shape) for name, shape in SHAPES.items()}
    tensors |= {f"{name}.bias": torch.randn(shape[0]) for name, shape in SHAPES.items()}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name.split(".")[0] not in frozen)
    x, dy = torch.randn(2, 3, 5, 8)
    tensors["input"] = x.requires_grad_()
    leaves = [t for t in tensors.values() if t.requires_grad]
    save = Policy(save=set(kept) & set(graph.names))
    results = []
    for backend in ("fusing", "eager"):
        y = function.run_block(graph, save, tensors, backend=backend)
        grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
        results.append([y.detach(), *(g for g in grads if g is not None)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


SAVES = [
    frozenset(names)
    for size in range(5)
    for names in itertools.combinations(("norm", "gate", "up", "act"), size)
]


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("save", SAVES, ids=lambda save: "-".join(sorted(save)) or "nothing")
def test_no_fusion_changes_what_is_kept_or_reads_what_is_not_there(gated, save):
    op = MLPSpec(activation="gelu", gated=gated, dropout=0.1)
    branch = BranchSpec(op=op, norm=NormSpec(kind="rms_norm"), dropout=0.1)
    graph = block_graph(BlockSpec(kind="mlp_block", branches=(branch,)))
    save &= set(graph.names)
    for needs_grad in ({"input"}, {"fc2.weight"}, {"input", *graph.params} - {"seed"}):
        for tiled in (False, True):
            plain = schedule(graph, save, frozenset(needs_grad), tiled)
            fused = schedule(graph, save, frozenset(needs_grad), tiled, ALL)
            for name in ("kept", "kept_group", "kept_tile", "kept_inputs", "saved_params"):
                assert getattr(plain, name) == getattr(fused, name)
            forward = fused.tile_forward if tiled else fused.forward
            check_reads(forward, {"input"}, set(fused.kept))
            check_reads(
                fused.tile_backward if tiled else fused.backward, {"input", *fused.kept}, set()
            )


def check_reads(steps, have, must_make):
    """Every step reads names that exist by then, and all kept names are made."""
    made = set(have)
    for step in steps:
        if step.node is None:
            continue
        if step.kind == "compute":
            assert set(step.node.reads) <= made, f"{step} reads what is not there"
            made |= set(step.node.makes)
        made -= set(step.free)
    assert must_make <= made
