"""The ops `linear` and `mlp` of `python -m bench kernels`, at tiny sizes on a CPU."""

import dataclasses

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bench.kernels import linear, mlp
from bench.kernels.linear import Linear
from bench.kernels.mlp import Mlp
from bench.kernels.problem import (
    DIRECTIONS,
    accumulated,
    contests,
    through_autograd,
    ways_of,
)
from bench.kernels.shapes import MODELS, at_tokens
from bench.measure.contest import Rig, WrongResultError, admit, check

CPU = torch.device("cpu")
BATCH, SEQ_LEN, WIDTH, HIDDEN = 2, 20, 24, 40
TOKENS = BATCH * SEQ_LEN
OURS = {"fused_remat eager none", "fused_remat eager full"}
#: Form -> op, problem, and who serves it here besides torch.compile (`test_bench_kernels.py`).
FORMS = {
    "linear": (linear.OP, lambda rig: Linear(rig, TOKENS, WIDTH, HIDDEN), {"aten", "bare"}),
    "linear, no bias": (
        linear.OP,
        lambda rig: Linear(rig, TOKENS, WIDTH, HIDDEN, bias=False),
        {"aten"},
    ),
    "linear + gelu_tanh": (
        linear.OP,
        lambda rig: Linear(rig, TOKENS, WIDTH, HIDDEN, "gelu_tanh"),
        {"aten", "bare"},
    ),
    "gelu": (
        mlp.OP,
        lambda rig: Mlp(rig, False, "gelu", BATCH, SEQ_LEN, WIDTH, HIDDEN),
        {"aten", "bare", *OURS},
    ),
    "gated silu": (
        mlp.OP,
        lambda rig: Mlp(rig, True, "silu", BATCH, SEQ_LEN, WIDTH, HIDDEN),
        {"aten", "bare", *OURS},
    ),
}


def rig_of(dtype=torch.float32):
    torch.manual_seed(0)
    return Rig(CPU, dtype, True, None, ends=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_every_provider_is_right_or_says_why_it_is_absent(form, dtype):
    op, problem, present = FORMS[form]
    made = problem(rig_of(dtype))
    assert made.name == form
    for direction, contest in contests(op, made):
        ways = {name: way for name, way in contest.ways.items() if name != "compile"}
        rows = admit(dataclasses.replace(contest, ways=ways))
        assert {name for name, row in rows.items() if "check" in row} == present, direction
        assert not [row["error"] for row in rows.values() if "error" in row]
        assert all(row.get("absent", "here") for row in rows.values())
        assert set(rows) == set(op) - {"compile"}


@pytest.mark.parametrize("form", FORMS)
def test_work_is_that_of_the_products(form):
    """As PyTorch counts it."""
    made = FORMS[form][1](rig_of())
    leaves, dy = [t.requires_grad_() for t in made.sets[0].values()], made.dys[0]
    with FlopCounterMode(display=False) as forward:
        y = made.reference(*leaves)
    with FlopCounterMode(display=False) as backward:
        torch.autograd.grad(y, leaves, dy)
    counted = [forward.get_total_flops(), backward.get_total_flops()]
    assert [made.work(direction).flops for direction in DIRECTIONS] == counted


def test_bytes_are_inputs_and_results_once():
    """A hand count, in bfloat16: x and weights, y; again with dy, and gradients."""
    rig = rig_of(torch.bfloat16)
    made = Linear(rig, 40, 24, 16)
    x, weight, bias, y = 40 * 24, 24 * 16, 16, 40 * 16
    assert made.work("fwd").bytes == 2 * (x + weight + bias + y)
    assert made.work("bwd").bytes == 2 * (x + weight + y + x + weight + bias)
    made = Mlp(rig, True, "silu", 4, 10, 24, 16)
    assert made.work("fwd").bytes == 2 * (x + 3 * weight + x)
    assert made.work("bwd").bytes == 2 * (x + 3 * weight + x + x + 3 * weight)
    made = Mlp(rig, False, "gelu", 4, 10, 24, 16)
    assert made.work("fwd").bytes == 2 * (x + 2 * weight + 16 + 24 + x)
    assert made.work("bwd").bytes == 2 * (x + 2 * weight + x + x + 2 * weight + 16 + 24)


@pytest.mark.parametrize("form", ["linear", "gelu", "gated silu"])
def test_bare_is_every_product_and_each_is_checked(form):
    """As many operations as the work says, and no way to be wrong in one of them."""
    op, problem, _ = FORMS[form]
    made = problem(rig_of())
    for direction, way in ways_of(op["bare"], made).items():
        given = way.prepare(0)
        with FlopCounterMode(display=False) as counter:
            found = way.run(given)
        assert counter.get_total_flops() == made.work(direction).flops
        assert way.truth is not None
        exact = way.truth(found)
        assert set(found) == set(exact) and check(found, exact)
        for name in found:
            with pytest.raises(WrongResultError, match=f"of {name} is"):
                check(found | {name: 1.001 * found[name]}, exact)


def test_a_provider_may_take_the_weights_otherwise():
    """Packed as QuACK takes them, with gradients in our layout; or gradients left in `.grad`."""
    p = Mlp(rig_of(), True, "silu", BATCH, SEQ_LEN, WIDTH, HIDDEN)

    def packed(x, gate_up, down):
        gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up @ down.t()

    taken = {
        "packed": through_autograd(packed, p, pack=mlp.side_by_side, unpack=mlp.apart),
        "accumulated": through_autograd(p.reference, p, gradients_of=accumulated),
    }
    for ways in taken.values():
        for direction, way in ways.items():
            found = way.run(way.prepare(0))
            assert set(found) == set(p.truth(direction))
            assert check(found, p.truth(direction))
    assert all(t.grad is None for t in p.sets[0].values())


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_linears_and_its_mlp(name):
    size = at_tokens(MODELS[name], 64)
    found = [problem.name for op in (linear.OP, mlp.OP) for problem in op.of_model(rig_of(), size)]
    act = MODELS[name].activation
    gated = ["linear, no bias", f"gated {act}"]
    assert found == (gated if MODELS[name].gated else ["linear", f"linear + {act}", act])


def test_what_no_model_here_has_is_refused():
    biased = dataclasses.replace(MODELS["llama3-8b"], bias=True)
    with pytest.raises(ValueError, match="llama3-8b: plain MLPs have biases here, gated ones"):
        list(mlp.of_model(rig_of(), at_tokens(biased, 64)))
    with pytest.raises(ValueError, match="unknown activation 'mish'; valid: relu, gelu, "):
        Linear(rig_of(), 4, 4, 4, "mish")
