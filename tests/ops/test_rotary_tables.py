"""Rotary embedding and norms of heads: tables, sums in float32, and work in place."""

import pytest
import torch
import torch.nn.functional as F
from block_inputs import calls, check_beside, compare, in_pieces, normal
from op_cases import HEADS, ROTARY_BLOCKS, D, Heads, rotary, rotated

from fused_remat import Policy
from fused_remat.autograd import run_block
from fused_remat.graph.build import BlockBuilder, rotary_node
from fused_remat.graph.schedule import schedule
from fused_remat.policies import EXACT_PRESETS
from fused_remat.steps.rotary import Rotary

BATCH, SEQ = 3, 7


@pytest.fixture(params=HEADS)
def heads(request):
    return HEADS[request.param]


def inputs(heads, dtype=torch.float64, batch=BATCH):
    """The packed projection x, and weights of norms; leaves."""
    x = {"x": normal(batch, SEQ, heads.packed, dtype=dtype)}
    weights = heads.weights.items()
    return x | {n: normal(*s, seed=i, dtype=dtype) for i, (n, s) in enumerate(weights)}


# --- tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("table", [torch.float32, None])
def test_errors_are_no_larger_than_pytorchs(heads, dtype, table):
    tables = heads.tables(normal(BATCH, SEQ, 1, dtype=table or dtype)) or ()
    given = inputs(heads, dtype) | dict(zip(("cos", "sin"), tables, strict=False))

    def turned(fn):
        def call(t):
            t = dict(t)
            return fn(t, heads, (t.pop("cos"), t.pop("sin")) if tables else None)

        return call

    check_beside(turned(rotary), turned(rotated), given)


def test_float32_tables_beside_16_bits_are_not_rounded():
    """An angle whose sine bfloat16 cannot tell from that of another one, on numbers that it has."""
    heads, x = HEADS["half"], torch.zeros(1, SEQ, HEADS["half"].packed, dtype=torch.bfloat16)
    x[..., :3] = 256.0
    sin = torch.full((SEQ, 3), 2.0**-2 + 2.0**-11)  # 256 * sin = 64.125: bfloat16 says 64
    cos = torch.full((SEQ, 3), 0.5 + 2.0**-9)  # 128.5
    y = rotary({"x": x}, heads, (cos, sin))
    x1, x2 = 128.0, 64.0  # 128.5 rounds to even
    assert (y[..., :3] == x1).all() and (y[..., 3:6] == x2).all()
    x[..., 3:6] = 256.0
    y = rotary({"x": x}, heads, (cos, sin))
    # 128.5 + 64.125 = 192.625, rounded once to 193 (steps of 1); rounded tables give 192.
    assert (y[..., 3:6] == 193.0).all()


def test_one_sequences_tables_serve_the_whole_batch():
    heads, t = HEADS["half"], inputs(HEADS["half"])
    cos, sin = heads.tables(t["x"])
    expected = rotary(t, heads)
    assert torch.equal(rotary(t, heads, (cos[None], sin[None])), expected)
    whole = cos.expand(BATCH, -1, -1), sin.expand(BATCH, -1, -1)
    with in_pieces(4):
        assert torch.equal(rotary(t, heads, whole), expected)


@pytest.mark.parametrize("name", ["cos", "sin"])
def test_changing_tables_raises(name):
    heads, t = HEADS["half"], inputs(HEADS["half"])
    cos, sin = (table.clone() for table in heads.tables(t["x"]))
    y = rotary(t, heads, (cos, sin))
    with torch.no_grad():
        {"cos": cos, "sin": sin}[name].add_(1.0)
    with pytest.raises(RuntimeError, match="inplace"):
        y.sum().backward()


@pytest.mark.parametrize("tokens", [512, 16])
def test_weight_gradients_of_16_bits_are_summed_in_float32(tokens):
    """2000 sequences of one sign: sums in bfloat16 would stop at 256 terms."""
    heads = Heads(1, 1, 4, 0, norm=True)
    t = inputs(heads, torch.bfloat16, batch=2000)
    t["x"] = t["x"].detach().abs() + 1
    dy = torch.ones_like(t["x"])
    check_beside(lambda t: rotary(t, heads), lambda t: rotated(t, heads), t, dy, tokens)


# --- work in place

# Policy -> whether forward and whether the rebuild in backward (None: there is none) write over
# the projection: not where it is kept, nor where its own backward still asks for it.
IN_PLACE = {
    "half": {"full": (True, True), "lean": (True, True), "fast": (True, None),
             "qkv": (False, False), "rotated": (True, None)},
    "norm half": {"full": (True, False), "lean": (True, False), "fast": (False, False),
                  "qkv": (False, False), "rotated": (True, None)},
}  # fmt: skip


def plan_of(name, policy, tiled=False, wanted=None):
    """The schedule of an attention block with the heads `name`."""
    case = ROTARY_BLOCKS[f"{name} block"]
    t = case.tensors(BATCH, SEQ)
    t = {n: v.detach().requires_grad_(wanted in (None, n)) for n, v in t.items()}
    ((call, _),) = calls(lambda: case.op(t, 0.0, policy=policy))
    return schedule(call.graph, call.save, call.needs_grad, tiled)


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("tiled", [False, True])
def test_where_it_works_in_place(name, tiled):
    for policy, expected in IN_PLACE[name].items():
        chosen = policy if policy in EXACT_PRESETS else Policy(save={policy})
        plan, found = plan_of(name, chosen, tiled), []
        for steps in (plan.forward, plan.backward):
            made = [s.node for s in steps if s.kind == "compute" and isinstance(s.node, Rotary)]
            found.append(made[0].in_place if made else None)
        assert tuple(found) == expected, policy


def test_what_is_read_again_is_not_written_over():
    """output = rotated + qkv: the projection outlives the rotation."""
    heads = HEADS["half"]
    b = BlockBuilder()
    qkv = b.linear("qkv", "input", "qkv")
    b.sum("output", b.add(rotary_node("rotated", qkv, heads.spec())), qkv)
    graph, x, weight = b.graph("test"), normal(2, SEQ, D), normal(heads.packed, D)
    cos, sin = heads.tables(x)
    given = {"input": x, "qkv.weight": weight, "cos": cos, "sin": sin}

    def expected():
        packed = F.linear(x, weight)
        return rotated({"x": packed}, heads) + packed

    for tokens in (512, 4):
        with in_pieces(tokens):
            compare(lambda: run_block(graph, "full", given), expected, [x, weight])


def test_frozen_projections_keep_and_rebuild_no_more_than_heads_need():
    """With x alone wanted, "fast" rebuilds nothing: rotating back reads tables only."""
    plan = plan_of("half", "fast", wanted="x")
    assert not any(step.kind == "compute" for step in plan.backward)
