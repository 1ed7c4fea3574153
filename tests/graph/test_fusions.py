"""Fused steps have the bits of single steps, where the operation runs those one by one.

What they read and keep: test_blocks.py.
"""

import pytest
import torch
from block_inputs import normal, same_bits
from op_cases import CASES
from reference import EXACT_PRESETS
from tiers import pairwise

from fused_remat import Policy
from fused_remat.autograd import function
from fused_remat.execution import choose
from fused_remat.graph.build import BlockBuilder
from fused_remat.graph.fusions import MlpBackward
from fused_remat.graph.schedule import schedule
from fused_remat.spec import NormSpec
from fused_remat.steps import modulation
from fused_remat.steps.activation import MLPActivation
from fused_remat.steps.fused import linear_norm_fwd, mlp_bwd, mlp_up_fwd
from fused_remat.steps.operations import OPERATIONS, Faster

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


def check_same_bits(call, tensors):
    """`call(backend)` gives the same output and gradients where steps are fused."""
    wanted, found = [t for t in tensors.values() if t.requires_grad], []
    for backend in ("fusing", "eager"):
        y = call(backend)
        dy = normal(*y.shape, seed=99, dtype=y.dtype).detach()
        grads = torch.autograd.grad(y, wanted, dy, allow_unused=True)
        found.append([y, *(g for g in grads if g is not None)])
    assert same_bits(*found)


WANTS = {
    "all": lambda name: True,
    "input": lambda name: name == "x",
    "weights": lambda name: name != "x",
    "fc1 frozen": lambda name: not name.startswith(("fc1", "up")),
    "fc2 frozen": lambda name: not name.startswith(("fc2", "down")),
    "fc2.bias only": lambda name: name == "fc2.bias",
    "fc1 only": lambda name: name.startswith("fc1"),
    "norms only": lambda name: name.startswith(("norm", "fc1.bias")),
}


@pytest.mark.parametrize(
    "name, policy, wants",
    pairwise(
        ["encoder_prenorm", "encoder_postnorm", "mlp", "gated_mlp", "mlp_block", "gated_mlp_block"],
        list(EXACT_PRESETS), list(WANTS),
    ),
)  # fmt: skip
def test_ops_give_the_same_bits(fusing, name, policy, wants):
    case, tensors = CASES[name], CASES[name].tensors(batch=3, dtype=torch.float32)
    for of, t in tensors.items():
        t.requires_grad_(WANTS[wants](of))
    check_same_bits(lambda on: case.op(tensors, 0.2, policy=policy, seed=1, backend=on), tensors)
    if name.startswith("encoder"):
        assert {"mlp_up_fwd", "linear_norm_fwd"} <= fusing
    if wants in ("all", "fc2 frozen", "input"):
        # "none" keeps up; post-norm, "full" rebuilds it anyway, for sum2.
        kept = policy == "none" or (policy == "full" and name == "encoder_postnorm")
        assert ("mlp_bwd" in fusing) != kept


def gelu(b, **gate):
    b.add(MLPActivation(name="act", up="up", act="gelu", **gate))


#: What calls of a builder draw.
ODD = {
    "a gate of another input": lambda b: (
        b.linear("h", "input", "square"), b.linear("gate", "input", "up"),
        b.linear("up", "h", "up"), gelu(b, gate="gate"), b.linear("output", "act", "down"),
    ),
    "act is the residual too": lambda b: (
        b.linear("up", "input", "square"), gelu(b),
        b.linear("output", "act", "square", residual="act"),
    ),
    "act is read twice": lambda b: (
        b.linear("up", "input", "up"), gelu(b), b.linear("one", "act", "down"),
        b.linear("output", "act", "other", residual="one"),
    ),
    "a layer of some rows of a weight": lambda b: (
        b.linear("up", "input", "square"), gelu(b),
        b.linear("output", "act", "up", part=(0, 8, 16)),
    ),
    "a residual made after act": lambda b: (
        b.linear("up", "input", "up"), gelu(b), b.linear("r", "input", "square"),
        b.linear("output", "act", "down", residual="r"),
    ),
    "a sum read before its norm": lambda b: (
        b.linear("sum", "input", "square", residual="input"), b.linear("up", "sum", "up"),
        b.norm("normed", "sum", NormSpec(), weights="norm"), b.linear("down", "up", "down"),
        b.sum("output", "normed", "down"),
    ),
    "two layers of act": lambda b: (
        b.linear("up", "input", "up"), gelu(b), b.linear("one", "act", "down"),
        b.linear("two", "act", "other"), b.sum("output", "one", "two"),
    ),
    "a layer of up before act": lambda b: (
        b.linear("up", "input", "up"), b.linear("one", "up", "down"), gelu(b),
        b.linear("two", "act", "other"), b.sum("output", "one", "two"),
    ),
}  # fmt: skip
SHAPES = {"square": (8, 8), "up": (16, 8), "down": (8, 16), "other": (8, 16), "norm": (8,)}


def odd_graph(name):
    b = BlockBuilder()
    ODD[name](b)
    return b.graph("odd")


@pytest.mark.parametrize(
    "name, frozen, kept",
    pairwise(
        list(ODD), [(), ("down",), ("down", "other", "square"), ("up",)], [(), ("up",), ("act",)]
    ),
)
def test_graphs_that_no_block_has_give_the_same_bits(fusing, name, frozen, kept):
    graph, given = odd_graph(name), {"input": normal(3, 5, 8, dtype=torch.float32)}
    for i, (layer, shape) in enumerate(SHAPES.items()):
        for kind, size in (("weight", shape), ("bias", shape[:1])):
            leaf = normal(*size, seed=i, dtype=torch.float32)
            given[f"{layer}.{kind}"] = leaf.requires_grad_(layer not in frozen)
    save = Policy(save=set(kept) & set(graph.names))
    check_same_bits(lambda on: function.run_block(graph, save, given, backend=on), given)


@pytest.mark.parametrize("long", [1, 64], ids=["by sequence", "by product"])
@pytest.mark.parametrize(
    "frozen", [(), ("gate",), ("down",), ("down", "gate"), ("up",), ("input",)], ids=str
)
def test_a_gated_layer_gives_the_same_bits(fusing, frozen, long, monkeypatch):
    monkeypatch.setattr(modulation, "_LONG_CPU", long)
    b = BlockBuilder()
    b.linear("up", "input", "up")
    gelu(b)
    down = {"weights": ("down.weight",), "biases": ("down.bias",), "gate": "gate.weight"}
    b.add(modulation.GatedLinear(name="output", x="act", residual="input", **down))
    shapes = {f"{name}.{kind}": SHAPES[name][: 2 if kind == "weight" else 1]
              for name in ("up", "down") for kind in ("weight", "bias")}  # fmt: skip
    given = {
        name: normal(*shape, seed=i, dtype=torch.float32).requires_grad_(
            name.partition(".")[0] not in frozen
        )
        for i, (name, shape) in enumerate(
            {"input": (3, 5, 8), "gate.weight": (3, 1, 8), **shapes}.items()
        )
    }
    graph = b.graph("gated")
    check_same_bits(lambda on: function.run_block(graph, "full", given, backend=on), given)
    assert "mlp_bwd" in fusing


def steps_of(name, fusion):
    """Of an odd graph with frozen weights, so that no layer reads `act` in backward."""
    return schedule(odd_graph(name), frozenset(), frozenset({"input"}), False, frozenset({fusion}))


def test_an_activation_whose_gradient_two_layers_give():
    steps = steps_of("two layers of act", "mlp_bwd gelu").backward
    assert not any(isinstance(step.node, MlpBackward) for step in steps)


def test_a_product_that_is_read_before_its_activation():
    made = {"input"}
    for step in steps_of("a layer of up before act", "linear_act gelu").forward:
        assert set(step.node.reads) <= made, f"{step} reads what is not there"
        made |= set(step.node.makes)
