"""`python -m bench kernels`, tiny: who is right, who is not, how much work, what is measured."""

import json
import re

import pytest
import torch
import torch.nn.functional as F
from kernel_problems import PROBLEMS
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from bench.kernels import command
from bench.kernels.attention import ATTENTION
from bench.kernels.attention_problem import FORMS, Attention
from bench.kernels.passes import NORMED, Dropout, Norm, Rope
from bench.kernels.problem import (
    DIRECTIONS,
    Op,
    Problem,
    contests,
    through_autograd,
    ways_of,
)
from bench.kernels.products import LINEAR, MLP, Linear, Mlp, apart, side_by_side
from bench.kernels.shapes import MODELS, at_tokens
from bench.kernels.table import OPS
from bench.measure.contest import P, Rig, Work, WrongResultError, admit, check
from bench.pages import kernels as report

#: Compiled by inductor, which takes longer than all the rest; see the dry runs.
COMPILED = ("compile", "flex")
PRODUCTS = [name for name, (op, _) in PROBLEMS.items() if op in (LINEAR, MLP)]


def rig_of(dtype=torch.float32):
    torch.manual_seed(0)
    return Rig(torch.device("cpu"), dtype, True)


def problem(name, dtype=torch.float32):
    return PROBLEMS[name][1](rig_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_provider_is_right_both_ways_or_says_why_it_is_absent(name, dtype):
    op, made = PROBLEMS[name][0], problem(name, dtype)
    assert made.name == (name if name != "shared heads" else "causal")
    expected = {"aten"} | {n for n in op if n.startswith("fused_remat eager")}
    expected |= {"math"} if op is ATTENTION else set()
    expected |= {"bare"} if "bare" in op and name != "linear, no bias" else set()
    for direction, contest in contests(op, made, [n for n in op if n not in COMPILED]):
        rows = admit(contest)
        assert set(rows) == set(op) - set(COMPILED)
        assert {n for n, row in rows.items() if "check" in row} == expected, (direction, rows)
        for row in (rows[n] for n in rows.keys() - expected):
            why = ("CUDA", "not installed", "nothing but the products", "our backwards take")
            assert any(text in row["absent"] for text in why), row


def test_flex_has_a_forward_on_a_cpu_and_says_why_it_has_no_backward():
    made = dict(contests(ATTENTION, problem("packed"), ("aten", "flex")))
    assert "check" in admit(made["fwd"])["flex"]
    assert admit(made["bwd"])["flex"] == {"absent": "it has no backward on a CPU"}
    dropped = dict(contests(ATTENTION, problem("causal dropout"), ("aten", "flex")))
    assert dropped["fwd"].absent == {"flex": "it has no dropout"}


@pytest.mark.parametrize("form", FORMS)
def test_truth_of_attention_is_softmax_of_what_flex_would_see(form):
    """Both what is exact and PyTorch's mask against scores written out."""
    made = problem(form)
    q, k, v = (t.double() for t in made.sets[0].values())
    sees, place = made.sees() or (lambda b, h, i, j: i + j >= 0), torch.arange(48)
    seen = sees(0, 0, place[:, None], place)
    scores = (q @ k.transpose(-1, -2) / 4.0).masked_fill(~seen, -torch.inf)
    half = made.form.causal and made.mask is None  # its diagonal is counted as half of it
    assert made.share == pytest.approx(seen.double().mean().item() - 0.5 * half / 48, abs=1e-12)
    exact = made.truth("fwd", dropped=False)
    assert torch.allclose(exact["y"], scores.softmax(-1) @ v, atol=1e-12)


# --- what is not right


class Doubled(Problem):
    """y = 2 x."""

    shapes = {"x": (4, 3)}  # noqa: RUF012

    def reference(self, *inputs):
        return 2.0 * inputs[0]

    def work(self, direction):
        return Work(bytes=2 * 4 * 3 * 4)


def doubled():
    return Doubled(rig_of(), "doubled")


def causal():
    return problem("causal")


def causal_by(offset):
    """Query i sees keys up to i + offset."""
    mask = torch.ones(48, 48, dtype=torch.bool).tril(offset)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)


def dropped_attention():
    return Attention(rig_of(), "causal dropout", 4, 8, 8, 64, 16)


def attended(factor, p=P):
    return lambda q, k, v: factor * F.scaled_dot_product_attention(q, k, v, None, p, True)


def of_another_mask(function):
    """A gradient by another mask than the output's."""

    def wrong(*inputs):
        y, other = function(*inputs), function(*inputs)
        return y.detach() + other - other.detach()

    return wrong


def dropout():
    return Dropout(rig_of(), 65, 48)


def dropped(p=P, scale=1.0):
    return lambda x, residual: residual + scale * F.dropout(x, p)


def fixed(x, residual):
    """The same mask at every call."""
    generator = torch.Generator().manual_seed(987_654_321)  # of no test: x may not be alike
    keep = torch.rand(x.shape, generator=generator) >= P
    return residual + x * keep / (1.0 - P)


def rope():
    return Rope(rig_of(), "rope", 2, 4, 2, 9, 16)


def rotated(sign, values):
    """Heads turned this way, values too or not."""
    made = rope()
    cos, sin = (t[:, None] for t in made.doubled_tables)

    def turned(t):
        first, second = t.chunk(2, -1)
        return t * cos + sign * torch.cat([-second, first], -1) * sin

    def function(x):
        q, k, v = made.heads(x)
        return torch.cat([turned(q), turned(k), turned(v) if values else v], 2).flatten(2)

    return function


OFF = "WrongResultError: relative error of"
WRONG = {
    "a gradient": (doubled, lambda x: x + x.detach(), None, f"{OFF} dx is 0.5"),
    "slightly": (doubled, lambda x: 2.001 * x, f"{OFF} y is 0.0005", OFF),
    "shifted": (doubled, lambda x: 2.0 * x + 0.1, f"{OFF} y", f"{OFF} y"),
    "right mask": (causal, causal_by(0), None, None),
    "wrong mask": (causal, causal_by(1), OFF, OFF),
    "scaled attention": (dropped_attention, attended(0.6), "on average", "on average"),
    "nan": (dropped_attention, attended(torch.nan), "on average", "on average"),
    "none dropped": (dropped_attention, attended(1.0, 0.0), "dropout changes y", "dropout changes"),
    "much dropped": (dropped_attention, attended(1.0, 0.7), "dropout changes y", "dropout changes"),
    "another mask backward": (dropped_attention, of_another_mask(attended(1.0)), None,
                              "dv is of another mask than y"),
    "no dropout": (dropout, dropped(0.0), "it keeps", "it keeps"),
    "too much dropout": (dropout, dropped(0.2), "it keeps", "it keeps"),
    "scaled dropout": (dropout, dropped(P, 0.9), OFF, OFF),
    "same mask": (dropout, fixed, None, "the mask is that of a call before"),
    "another mask": (dropout, of_another_mask(dropped()), None, f"{OFF} dx"),
    "rotated": (rope, rotated(1.0, False), None, None),
    "rotated back": (rope, rotated(-1.0, False), OFF, OFF),
    "rotated values": (rope, rotated(1.0, True), OFF, OFF),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails_and_says_how(name):
    make, wrong, *messages = WRONG[name]
    op = Op("it", lambda rig, size: (), stock=False)
    op.provider("aten", baseline=True)(lambda p: p.reference)
    op.provider("it")(lambda p: wrong)
    for (direction, contest), message in zip(contests(op, make()), messages, strict=True):
        row = admit(contest)["it"]
        assert "check" in row if message is None else message in row["error"], (direction, row)


class InPlace(torch.autograd.Function):
    """Doubles its input, and the gradient, where they are."""

    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2.0)

    @staticmethod
    def backward(ctx, dy):
        return dy.mul_(2.0)


def packed_mlp(x, gate_up, down):
    gate, up = (x @ gate_up.t()).chunk(2, dim=-1)
    return F.silu(gate) * up @ down.t()


class Again(torch.autograd.Function):
    """A function of x, run again in backward, which adds the weights' gradients to `.grad`."""

    @staticmethod
    def forward(ctx, x, function):
        ctx.x, ctx.function = x, function
        return function(x)

    @staticmethod
    def backward(ctx, dy):
        x = ctx.x.detach().requires_grad_()
        with torch.enable_grad():
            ctx.function(x).backward(dy)
        return x.grad, None


@pytest.mark.parametrize("kind", ["in place", "packed", "adds to .grad"])
def test_what_a_provider_may_do_with_inputs_and_gradients(kind):
    """Overwrite them; take weights packed, as QuACK does; add to `.grad`, as Liger-Kernel does."""
    p = doubled() if kind == "in place" else problem("gated silu")
    ways = {
        "in place": lambda: through_autograd(InPlace.apply, p, in_place=True),
        "packed": lambda: through_autograd(packed_mlp, p, pack=side_by_side, unpack=apart),
        "adds to .grad": lambda: through_autograd(
            lambda x, *weights: Again.apply(x, lambda piece: p.reference(piece, *weights)), p
        ),
    }[kind]()
    for direction, way in [*ways.items()] * 3:  # inputs are whole every time
        found = way.run(way.prepare(0))
        assert set(found) == set(p.truth(direction)) and check(found, p.truth(direction))
    assert all(t.grad is None for t in p.sets[0].values())


def test_no_gradient_is_copied_while_a_backward_is_timed():
    """Attention's are strided otherwise than q, k and v, which are views of a packed projection."""
    found = []

    class Recorded(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found.append(str(function))
            return function(*args, **kwargs or {})

    p = Attention(rig_of(), "causal", 2, 4, 4, 40, 16)
    way = ways_of(OPS["attention"]["aten"], p)["bwd"]
    given = way.prepare(0)
    with Recorded():
        way.run(given)
    assert found and not [name for name in found if "clone" in name or "copy" in name], found


def test_a_provider_that_cannot_be_built_costs_nobody_else_their_results():
    op = Op("it", lambda rig, size: (), stock=False)
    op.provider("aten", baseline=True)(lambda p: p.reference)

    def broken(p):
        raise ValueError("no such version")

    op.provider("broken")(broken)
    op.provider("may fail", optional=True)(broken)
    for _, contest in contests(op, doubled()):
        rows = admit(contest)
        assert "check" in rows["aten"]
        assert rows["broken"] == {"error": "ValueError: no such version"}
        assert rows["may fail"] == {"absent": "ValueError: no such version"}


# --- work


def flops(run):
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("name", PRODUCTS)
def test_work_is_that_of_the_products(name):
    """As PyTorch counts it, and as "bare" computes it, each product of which is checked."""
    made = problem(name)
    leaves, dy = [t.requires_grad_() for t in made.sets[0].values()], made.dys[0]
    forward, y = flops(lambda: made.reference(*leaves))
    backward, _ = flops(lambda: torch.autograd.grad(y, leaves, dy))
    counted = {"fwd": forward, "bwd": backward}
    assert {direction: made.work(direction).flops for direction in DIRECTIONS} == counted
    if name == "linear, no bias":
        return
    made = problem(name)
    for direction, way in ways_of(PROBLEMS[name][0]["bare"], made).items():
        given = way.prepare(0)
        count, found = flops(lambda way=way, given=given: way.run(given))
        assert count == counted[direction]
        exact = way.truth(found)
        assert set(found) == set(exact) and check(found, exact)
        for result in found:
            with pytest.raises(WrongResultError, match=f"of {result} is"):
                check(found | {result: 1.001 * found[result]}, exact)


def test_bare_products_are_those_of_the_function():
    """Of a linear layer all its gradients; of an MLP the last weight's, for its hidden half."""
    made = Linear(rig_of(), 40, 24, 16)
    way = ways_of(LINEAR["bare"], made)["bwd"]
    found, exact = way.run(way.prepare(0)), made.truth("bwd")
    assert check({"dx": found["dhidden"], "dweight": found["dlast"]}, exact)


def test_work_of_attention_is_counted_by_hand_and_by_torch():
    made = Attention(rig_of(), "full", 2, 4, 2, 10, 8)
    product = 2 * (2 * 4) * 10 * 10 * 8  # FLOPs of all heads' scores
    assert made.work("fwd").flops == 2 * product and made.work("bwd").flops == 5 * product
    # Others are not counted; a backward that keeps the scores has a product less.
    explicit = through_autograd(ATTENTION["math"].build(made), made)
    for direction, products in (("fwd", 2), ("bwd", 4)):
        way = explicit[direction]
        given = way.prepare(0)
        assert flops(lambda way=way, given=given: way.run(given))[0] == products * product
    made = Attention(rig_of(), "causal", 2, 4, 2, 10, 8)
    assert made.work("bwd").flops == 2.5 * product


#: Problem -> elements read and written forward, and backward: everything once.
HEADS, ROPE, X, WEIGHT, Y, WIDE = 2 * 10 * 8, 2 * 9 * 8 * 16, 40 * 24, 24 * 16, 40 * 16, 65 * 48
ELEMENTS = [
    ((Norm, "layer_norm", 65, 48), 2 * WIDE, 3 * WIDE),
    ((Dropout, 65, 48), 3 * WIDE, 2 * WIDE),
    ((Rope, "rope", 2, 4, 2, 9, 16), 2 * ROPE, 2 * ROPE),
    ((Rope, NORMED, 2, 4, 2, 9, 16), 2 * ROPE, 3 * ROPE),  # x again for its norms' gradients
    ((Attention, "full", 2, 4, 2, 10, 8), (4 + 2 + 2 + 4) * HEADS, 2 * (4 + 2 + 2 + 4) * HEADS),
    ((Linear, 40, 24, 16), X + WEIGHT + 16 + Y, X + WEIGHT + Y + X + WEIGHT + 16),
    ((Mlp, True, "silu", 4, 10, 24, 16), X + 3 * WEIGHT + X, 3 * X + 6 * WEIGHT),
    ((Mlp, False, "gelu", 4, 10, 24, 16), X + 2 * WEIGHT + 40 + X, 3 * X + 4 * WEIGHT + 40),
]


@pytest.mark.parametrize(("made", "forward", "backward"), ELEMENTS, ids=str)
def test_bytes_are_inputs_and_results_once(made, forward, backward):
    """A hand count, in bfloat16."""
    made = made[0](rig_of(torch.bfloat16), *made[1:])
    assert [made.work(d).bytes for d in DIRECTIONS] == [2 * forward, 2 * backward]


# --- which problems there are


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_its_linears_and_its_mlp(name):
    size = at_tokens(MODELS[name], 64)
    found = [made.name for op in (LINEAR, MLP) for made in op.of_model(rig_of(), size)]
    act = MODELS[name].activation
    gated = ["linear, no bias", f"gated {act}"]
    assert found == (gated if MODELS[name].gated else ["linear", f"linear + {act}", act])


# --- the command

TINY = ["--device", "cpu", "--dry-run", "--models", "gpt2", "qwen2-1.5b"]
UNCOMPILED = [n for n in dict.fromkeys(n for op in OPS.values() for n in op)
              if n not in COMPILED]  # fmt: skip


def bench(folder, *arguments):
    given = arguments if "--providers" in arguments else ("--providers", *UNCOMPILED, *arguments)
    command.main(["--out", str(folder), *TINY, *given])
    return json.loads((folder / "kernels-cpu.json").read_text())["results"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("kernels"))


def test_every_op_is_measured_both_ways_beside_its_peers(rows):
    found = {(row["case"]["op"], row["case"].get("direction")) for row in rows}
    assert found == {(op, way) for op in OPS for way in ("fwd", "bwd")} | {("ceilings", None)}
    assert report.failures(rows) == []
    for row in rows:
        if row["case"]["op"] == "ceilings":
            continue
        ways = row["ways"]
        assert set(ways) <= set(OPS[row["case"]["op"]])
        assert {"us", "ratio", "check", "of_ceiling"} <= set(ways["aten"]), row["case"]
        assert ways["aten"]["ratio"]["aten"]["p50"] == 1.0
        assert any(name.startswith("fused_remat") for name, way in ways.items() if "us" in way) or (
            row["case"]["op"] == "linear"  # whose kernels need a GPU
        )
        assert row["floor_us"] > 0 and any(row["work"].values())
    norm = next(row for row in rows if row["case"]["op"] == "norm")
    why = {name: way["absent"] for name, way in norm["ways"].items() if "absent" in way}
    assert why["fused_remat triton"] == "needs a CUDA device"
    for name, said in why.items():
        assert re.search(f"^{name} +absent: {said}$", report.block(norm), re.M)


def test_a_run_is_taken_up_where_it_ended(tmp_path, monkeypatch, capsys):
    """A direction that cannot be measured costs no other, and is tried again."""
    one, left = ("--op", "norm", "--models", "gpt2"), [None, MemoryError("too large"), None, None]

    def measure(contest, rig):
        if error := left.pop(0):
            raise error
        return {"ways": {n: {"absent": "today"} for n in (*contest.ways, *contest.absent)}}

    monkeypatch.setattr(command, "measure", measure)
    *_, fwd, bwd = bench(tmp_path, *one)
    assert "ways" in fwd and fwd["case"]["direction"] == "fwd"
    assert bwd["error"] == "MemoryError: too large" and "FAIL: Mem" in report.block(bwd)
    *_, fwd, bwd = rows = bench(tmp_path, *one)  # both, on the same inputs
    assert "ways" in fwd and "ways" in bwd and "error" not in bwd and not left
    capsys.readouterr()
    assert bench(tmp_path, *one) == rows and len(rows) == 4  # with the ceilings
    assert "2 of 2 known before" in capsys.readouterr().out
    left += [None, None]
    bench(tmp_path, *one, "--fresh")
    assert not left


def test_a_dry_run_leaves_measured_results_alone():
    """By default; and rows of two dtypes are two cases."""
    assert command.parse(TINY).out.parts[-2:] == ("build", "dry-run")
    assert command.parse(["--device", "cpu"]).out.parts[-2:] == ("bench", "results")
    args = [command.parse([*TINY, "--dtype", name]) for name in ("float32", "bfloat16")]
    (first, _), (second, _) = (next(command.problems(command.rig_of(a), a)) for a in args)
    assert first != second and first | {"dtype": "bfloat16"} == second


def test_sizes_are_the_models_then_the_sweep_each_once():
    options = ["--device", "cpu", "--models", "gpt2", "smollm-135m", "--tokens", "512"]
    sizes = command.sizes_of(command.parse([*options, "--sweep", "256", "512"]))
    found = [(s.model.name, s.batch, s.seq_len) for s in sizes]
    assert found == [("gpt2", 1, 512), ("smollm-135m", 1, 512), ("smollm-135m", 1, 256)]
    assert at_tokens(MODELS["bert-base"], 4096).batch == 8


def test_a_wrong_result_is_said_in_its_line_and_among_the_failures():
    case = {"op": "it", "name": "doubled", "direction": "bwd", "model": "m", "sizes": {}}
    ways = {"aten": {"absent": "no"}, "mine": {"error": "WrongResultError: off"}}
    assert "mine  FAIL: WrongResultError" in report.block({"case": case, "ways": ways})
    assert len(report.failures([{"case": case, "ways": ways}])) == 1
