"""`python -m bench kernels`, tiny: right and wrong results, the work counted, the command."""

import json
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from kernel_problems import PROBLEMS
from torch.utils.flop_counter import FlopCounterMode

from bench.kernels import command
from bench.kernels.attention import FORMS, Attention
from bench.kernels.experts import EXPERTS, GROUPED, Grouped
from bench.kernels.ops import MLP, OPS, Mlp, Norm
from bench.kernels.problem import DIRECTIONS, Op, Problem, contests
from bench.measure.contest import Contest, Rig, Work, admit

#: All but `torch.compile`, which takes longer than all the rest.
NAMES = [n for n in dict.fromkeys(n for op in OPS.values() for n in op) if n != "compile"]


def rig_of(dtype=torch.float32):
    torch.manual_seed(0)
    return Rig(torch.device("cpu"), dtype, True)


def problem(name, dtype=torch.float32):
    return PROBLEMS[name][1](rig_of(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_every_provider_is_right_both_ways_or_absent_with_a_reason(name, dtype):
    op, made = PROBLEMS[name][0], problem(name, dtype)
    expected = {"aten"} | {n for n in op if n.startswith("fused_remat eager")}
    expected |= {"grouped_mm"} & op.keys()
    expected |= {n for n in {"trl", "transformers"} & op.keys() if find_spec(n)}
    for direction, contest in contests(op, made, [n for n in op if n in NAMES]):
        rows = admit(contest)
        assert {n for n, row in rows.items() if "check" in row} == expected, (direction, rows)
        for row in (rows[n] for n in rows.keys() - expected):
            assert "CUDA" in row["absent"] or "not installed" in row["absent"], row


def test_weights_that_quack_joins_have_their_own_gradients(monkeypatch):
    """With the signature of its function, in PyTorch: it needs a GPU itself."""

    def mlp_func(x, both, down, activation, recompute, concat_layout):
        assert (activation, recompute, concat_layout) == ("swiglu", True, True)
        gate, up = F.linear(x, both).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    monkeypatch.setitem(sys.modules, "quack", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "quack.mlp", SimpleNamespace(mlp_func=mlp_func))
    made = problem("gated silu")
    for direction, way in MLP["quack"].build(made).items():
        contest = Contest({"quack": way}, lambda d=direction: made.truth(d), Work(), ())
        assert "check" in admit(contest)["quack"]
        found = way.run(way.prepare(0))
        assert found.keys() == made.truth(direction).keys()


@pytest.mark.parametrize("form", FORMS)
def test_truth_of_attention_is_softmax_of_the_keys_that_are_seen(form):
    """Against scores written out."""
    made = problem(form)
    q, k, v = (t.double() for t in made.sets[0].values())
    bias = made.mask.double() if made.form.bias else 0.0
    plain = made.mask is None or made.form.bias
    seen = torch.ones(48, 48, dtype=torch.bool) if plain else made.mask
    seen = seen.tril() if made.form.causal else seen
    scores = (q @ k.transpose(-1, -2) / 4.0 + bias).masked_fill(~seen, -torch.inf)
    half = made.form.causal and made.mask is None  # its diagonal is counted as half of it
    assert made.share == pytest.approx(seen.double().mean().item() - 0.5 * half / 48, abs=1e-12)
    assert torch.allclose(made.truth("fwd")["y"], scores.softmax(-1) @ v, atol=1e-12)


class Doubled(Problem):
    """y = 2 x."""

    shapes = {"x": (4, 3)}  # noqa: RUF012

    def reference(self, *inputs):
        return 2.0 * inputs[0]

    def work(self, direction):
        return Work(bytes=2 * 4 * 3 * 4)


OFF = "WrongResultError: relative error of"


@pytest.mark.parametrize(
    ("wrong", "messages"),
    [(lambda x: x + x.detach(), (None, f"{OFF} dx is 0.5")),
     (lambda x: 2.001 * x, (f"{OFF} y is 0.0005", OFF))],
)  # fmt: skip
def test_a_wrong_result_is_an_error(wrong, messages):
    op = Op("it", lambda rig, size: (), stock=False)
    op.provider("aten", baseline=True)(lambda p: p.reference)
    op.provider("it")(lambda p: wrong)
    found = contests(op, Doubled(rig_of(), "doubled"))
    for (direction, contest), message in zip(found, messages, strict=True):
        row = admit(contest)["it"]
        assert "check" in row if message is None else message in row["error"], (direction, row)


#: Ops whose reference computes no more than the products that are counted.
PRODUCTS = (MLP, GROUPED, EXPERTS)


def flops(run):
    with FlopCounterMode(display=False) as counter:
        result = run()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("name", [n for n, (op, _) in PROBLEMS.items() if op in PRODUCTS])
def test_work_is_that_of_the_products(name):
    made = problem(name)
    leaves, dy = [t.requires_grad_() for t in made.sets[0].values()], made.dys[0]
    forward, y = flops(lambda: made.reference(*leaves))
    backward, _ = flops(lambda: torch.autograd.grad(y, leaves, dy))
    assert [made.work(direction).flops for direction in DIRECTIONS] == [forward, backward]


def test_work_of_attention_is_counted_by_hand():
    made = Attention(rig_of(), "full", 2, 4, 2, 10, 8)
    product = 2 * (2 * 4) * 10 * 10 * 8  # FLOPs of all heads' scores
    assert made.work("fwd").flops == 2 * product and made.work("bwd").flops == 5 * product
    made = Attention(rig_of(), "causal", 2, 4, 2, 10, 8)
    assert made.work("bwd").flops == 2.5 * product


#: Problem -> elements read and written forward, and backward: everything once.
HEADS, X, WEIGHT, WIDE = 2 * 10 * 8, 40 * 24, 24 * 16, 65 * 48
ELEMENTS = [
    ((Norm, "layer_norm", 65, 48), 2 * WIDE, 3 * WIDE),
    ((Attention, "full", 2, 4, 2, 10, 8), (4 + 2 + 2 + 4) * HEADS, 2 * (4 + 2 + 2 + 4) * HEADS),
    ((Mlp, True, "silu", 4, 10, 24, 16), X + 3 * WEIGHT + X, 3 * X + 6 * WEIGHT),
    (
        (Grouped, "up", 10, 24, 16, 5, 2),
        10 * 24 + 5 * WEIGHT + 20 * 16,
        2 * (10 * 24 + 5 * WEIGHT) + 20 * 16,
    ),
    ((Mlp, False, "gelu", 4, 10, 24, 16), X + 2 * WEIGHT + 40 + X, 3 * X + 4 * WEIGHT + 40),
]


@pytest.mark.parametrize(("made", "forward", "backward"), ELEMENTS, ids=str)
def test_bytes_are_inputs_and_results_once(made, forward, backward):
    """A hand count, in bfloat16."""
    made = made[0](rig_of(torch.bfloat16), *made[1:])
    assert [made.work(d).bytes for d in DIRECTIONS] == [2 * forward, 2 * backward]


def test_the_command_measures_every_op_both_ways(tmp_path):
    options = ["--device", "cpu", "--dry-run", "--models", "gpt2", "qwen2-1.5b", "gpt-oss-20b"]
    assert command.main([*options, "--out", str(tmp_path), "--providers", *NAMES]) == 0
    rows = json.loads((tmp_path / "kernels-cpu.json").read_text())["results"]
    found = {(row["case"]["op"], row["case"].get("direction")) for row in rows}
    assert found == {(op, way) for op in OPS for way in ("fwd", "bwd")} | {("ceilings", None)}
    for row in (row for row in rows if row["case"]["op"] != "ceilings"):
        assert {"us", "ratio", "check", "of_ceiling"} <= set(row["ways"]["aten"]), row["case"]
        timed = {name for name, way in row["ways"].items() if "us" in way}
        own = {name for name in OPS[row["case"]["op"]] if name.startswith("fused_remat eager")}
        assert own <= timed, row["case"]
        assert row["floor_us"] > 0 and any(row["work"].values())
