"""Attention, rotary embedding and dropout of `bench kernels`, tiny: who is right, who is not."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from bench.kernels import dropout, rope
from bench.kernels.attention import OP as ATTENTION_OP
from bench.kernels.attention_problem import FORMS, Attention
from bench.kernels.dropout import Dropout
from bench.kernels.problem import Op, contests, through_autograd
from bench.kernels.rope import NORMED, Rope
from bench.kernels.table import OPS
from bench.measure.contest import P, Rig, admit

#: Compiled by inductor, which takes longer than all the rest; see the dry runs.
COMPILED = ("compile", "flex")


def rig_of(dtype=torch.float32):
    return Rig(torch.device("cpu"), dtype, True, None, float("inf"))


def attention(form, dtype=torch.float32, kv_heads=4):
    """48 tokens of four heads of 16."""
    return Attention(rig_of(dtype), form, 1, 4, kv_heads, 48, 16)


def problems(dtype):
    """Every form."""
    rig = rig_of(dtype)
    found = {form: (ATTENTION_OP, attention(form, dtype)) for form in FORMS}
    found["shared heads"] = ATTENTION_OP, attention("causal", dtype, 1)
    found |= {name: (rope.OP, Rope(rig, name, 2, 4, 2, 9, 16)) for name in ("rope", NORMED)}
    return found | {"dropout": (dropout.OP, Dropout(rig, 65, 48))}


def found(op, problem):
    """Direction -> provider -> its row before it is timed; what needs no compiler."""
    names = [name for name in op if name not in COMPILED]
    return {direction: admit(contest) for direction, contest in contests(op, problem, names)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", problems(torch.float32))
def test_every_provider_of_this_cpu_is_right_both_ways(name, dtype):
    op, problem = problems(dtype)[name]
    for direction, rows in found(op, problem).items():
        right = {provider for provider, row in rows.items() if "check" in row}
        assert {"aten", "fused_remat eager"} <= right, (direction, rows)
        assert not any("error" in row for row in rows.values()), (direction, rows)
        absent = [row["absent"] for row in rows.values() if "absent" in row]
        assert all("CUDA" in why or "not installed" in why for why in absent), absent


def test_flex_has_a_forward_on_a_cpu_and_says_why_it_has_no_backward():
    made = dict(contests(ATTENTION_OP, attention("packed"), ("aten", "flex")))
    assert "check" in admit(made["fwd"])["flex"]
    assert admit(made["bwd"])["flex"] == {"absent": "it has no backward on a CPU"}
    dropped = dict(contests(ATTENTION_OP, attention("causal dropout"), ("aten", "flex")))
    assert dropped["fwd"].absent == {"flex": "it has no dropout"}


@pytest.mark.parametrize("form", FORMS)
def test_truth_of_attention_is_softmax_of_what_flex_would_see(form):
    """Both what is exact and PyTorch's mask against scores written out."""
    problem = attention(form)
    q, k, v = (t.double() for t in problem.sets[0].values())
    sees, place = problem.sees(), torch.arange(48)
    scores = q @ k.transpose(-1, -2) / 4.0
    if sees is not None:
        seen = sees(0, 0, place[:, None], place)
        scores = scores.masked_fill(~seen, -torch.inf)
        # Causal ones count half of the square; what is seen holds the diagonal as a whole.
        assert abs(seen.double().mean().item() - problem.share) < 1 / 48
    exact = problem._without_and_with_dropout("fwd")[0] if problem.form.p else problem.truth("fwd")
    assert torch.allclose(exact["y"], scores.softmax(-1) @ v, atol=1e-12)


# --- what is not right


def judged(problem, wrong):
    """Of both directions, the row of a wrong provider beside the baseline."""
    op = Op("it", lambda rig, size: iter(()))
    op.provider("aten", baseline=True)(lambda p: p.reference)
    op.provider("wrong")(lambda p: wrong)
    return {direction: admit(contest)["wrong"] for direction, contest in contests(op, problem)}


def causal_by(offset):
    """Query i sees keys up to i + offset."""
    mask = torch.ones(48, 48, dtype=torch.bool).tril(offset)
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask)


def of_another_mask(q, k, v):
    """Attention with dropout whose gradient goes by another mask than its output."""
    y, other = (F.scaled_dot_product_attention(q, k, v, None, P, True) for _ in range(2))
    return y.detach() + other - other.detach()


def scaled(factor, p=P):
    return lambda q, k, v: factor * F.scaled_dot_product_attention(q, k, v, None, p, True)


def test_attention_with_a_wrong_mask_fails():
    rows = judged(attention("causal"), causal_by(1))
    assert all("WrongResultError: relative error of" in row["error"] for row in rows.values())
    assert all("check" in row for row in judged(attention("causal"), causal_by(0)).values())


@pytest.mark.parametrize(
    ("wrong", "forward", "backward"),
    [
        (scaled(0.6), "on average", "on average"),
        (scaled(torch.nan), "on average", "on average"),
        (scaled(1.0, p=0.0), "dropout changes y", "dropout changes d"),
        (scaled(1.0, p=0.7), "dropout changes y", "dropout changes d"),
        (of_another_mask, None, "dv is of another mask than y"),
    ],
    ids=["scaled", "nan", "no dropout", "too much", "another mask"],
)
def test_attention_that_drops_wrongly_fails(wrong, forward, backward):
    torch.manual_seed(0)
    rig = rig_of()
    rows = judged(Attention(rig, "causal dropout", 4, 8, 8, 64, 16), wrong)
    for row, message in zip((rows["fwd"], rows["bwd"]), (forward, backward), strict=True):
        assert "check" in row if message is None else message in row.get("error", ""), rows


def dropped(p, scale):
    return lambda x, residual: residual + scale * F.dropout(x, p)


def fixed(x, residual):
    """The same mask at every call."""
    generator = torch.Generator().manual_seed(987_654_321)  # of no test: x may not be alike
    keep = torch.rand(x.shape, generator=generator) >= P
    return residual + x * keep / (1.0 - P)


def mask_of_its_own(x, residual):
    """A gradient by another mask than the output's."""
    y, other = F.dropout(x, P), F.dropout(x, P)
    return residual + y.detach() + other - other.detach()


def test_dropout_that_is_none_or_too_much_or_badly_scaled_fails():
    for p in (0.0, 0.2):
        rows = judged(Dropout(rig_of(), 65, 48), dropped(p, 1.0))
        assert all("it keeps" in row["error"] for row in rows.values()), rows
    rows = judged(Dropout(rig_of(), 65, 48), dropped(P, 0.9))
    assert all("relative error of" in row["error"] for row in rows.values()), rows


def test_dropout_with_the_same_mask_at_every_call_fails():
    rows = judged(Dropout(rig_of(), 65, 48), fixed)
    assert "check" in rows["fwd"] and "a call before" in rows["bwd"]["error"]


def test_a_gradient_by_another_mask_than_the_outputs_fails():
    rows = judged(Dropout(rig_of(), 65, 48), mask_of_its_own)
    assert "check" in rows["fwd"] and "relative error of dx" in rows["bwd"]["error"]


def test_rotating_the_other_way_or_the_values_too_fails():
    problem = Rope(rig_of(), "rope", 2, 4, 2, 9, 16)
    cos, sin = (t[:, None] for t in problem.doubled_tables)

    def turned(t, sign):
        first, second = t.chunk(2, -1)
        return t * cos + sign * torch.cat([-second, first], -1) * sin

    def rotated(x, sign, values):
        q, k, v = problem.heads(x)
        v = turned(v, sign) if values else v
        return torch.cat([turned(q, sign), turned(k, sign), v], 2).flatten(2)

    for sign, values, right in ((1.0, False, True), (-1.0, False, False), (1.0, True, False)):
        rows = judged(problem, lambda x, s=sign, v=values: rotated(x, s, v))
        assert all(("check" in row) is right for row in rows.values()), rows


def test_a_provider_that_cannot_be_built_costs_nobody_else_their_results():
    op = Op("it", lambda rig, size: iter(()))
    op.provider("aten", baseline=True)(lambda p: p.reference)

    def broken(p):
        raise ValueError("no such version")

    op.provider("broken")(broken)
    op.provider("may fail", optional=True)(broken)
    for _, contest in contests(op, Rope(rig_of(), "rope", 1, 2, 1, 4, 8)):
        rows = admit(contest)
        assert "check" in rows["aten"]
        assert rows["broken"] == {"error": "ValueError: no such version"}
        assert rows["may fail"] == {"absent": "ValueError: no such version"}


# --- work


def test_work_of_attention_is_counted_by_hand_and_by_torch():
    problem = Attention(rig_of(), "full", 2, 4, 2, 10, 8)
    product = 2 * (2 * 4) * 10 * 10 * 8  # FLOPs of all heads' scores
    tokens = 2 * 10 * 8 * 4  # bytes of a head
    assert problem.work("fwd").flops == 2 * product and problem.work("bwd").flops == 5 * product
    assert problem.work("fwd").bytes == (4 + 2 + 2 + 4) * tokens  # q, k, v, out
    assert problem.work("bwd").bytes == 2 * (4 + 2 + 2 + 4) * tokens
    # Others are not counted.
    explicit = through_autograd(ATTENTION_OP["math"].build(problem), problem)
    for direction, products in (("fwd", 2), ("bwd", 4)):  # which keeps the scores
        way = explicit[direction]
        given = way.prepare(0)
        with FlopCounterMode(display=False) as counter:
            way.run(given)
        assert counter.get_total_flops() == products * product
    causal = Attention(rig_of(), "causal", 2, 4, 2, 10, 8)
    assert causal.work("bwd").flops == 2.5 * product


@pytest.mark.parametrize(
    ("form", "share"),
    [
        ("full", 1.0),
        ("causal", 0.5),
        ("causal dropout", 0.5),
        ("half the blocks", 0.5),
        # 24 of 48 keys: 1 + 2 + ... + 24, then 24 for each of 24 more.
        ("window", (24 * 25 / 2 + 24 * 24) / 48**2),
        # Bounds 0, 4, 5, 17, 24, 26, 41, 43, 48.
        ("packed", 0.5 * (16 + 1 + 144 + 49 + 4 + 225 + 4 + 25) / 48**2),
    ],
)
def test_share_of_the_scores_that_is_seen(form, share):
    assert attention(form).share == pytest.approx(share, abs=1e-12)


def test_work_of_rotary_and_dropout_is_each_matrix_once():
    matrix = 2 * 9 * (4 + 2 * 2) * 16 * 4
    plain, normed = (Rope(rig_of(), name, 2, 4, 2, 9, 16) for name in ("rope", NORMED))
    assert [plain.work(d).bytes for d in ("fwd", "bwd")] == [2 * matrix, 2 * matrix]
    assert [normed.work(d).bytes for d in ("fwd", "bwd")] == [2 * matrix, 3 * matrix]
    problem, matrix = Dropout(rig_of(), 65, 48), 65 * 48 * 4
    assert [problem.work(d).bytes for d in ("fwd", "bwd")] == [3 * matrix, 2 * matrix]


def test_packed_sequences_are_one_batch():
    with pytest.raises(ValueError, match="one batch, got 2"):
        Attention(rig_of(), "packed", 2, 4, 4, 48, 16)


def test_every_op_has_one_baseline_and_both_of_ours():
    for name, op in OPS.items():
        assert op.baselines == ("aten",), name
    assert {"fused_remat eager", "fused_remat triton", "fused_remat kernel"} <= set(ATTENTION_OP)
