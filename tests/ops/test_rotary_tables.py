"""Rotary embedding and norms of heads: tables, sums in float32, and work in place."""

import pytest
import torch
import torch.nn.functional as F
from block_inputs import check_beside, compare, in_pieces, normal
from op_cases import HEADS, ROTARY_BLOCKS, D, rotary, rotated

from fused_remat import explain
from fused_remat.autograd import run_block
from fused_remat.execution.observe import TRACERS
from fused_remat.graph.build import BlockBuilder, rotary_node

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


# --- work in place


@pytest.mark.parametrize(
    "name, policy, in_place",
    [
        ("half", "full", True),
        ("half", "fast", True),
        ("norm half", "full", True),
        ("norm half", "fast", False),  # the projection is kept
    ],
)
def test_in_place_is_the_projections_memory_and_explained(name, policy, in_place):
    case, at = ROTARY_BLOCKS[f"{name} block"], {}

    def trace(step, chunk):
        at.update({held: chunk[held].data_ptr() for held in ("qkv", "rotated") if held in chunk})

    class Model(torch.nn.Module):
        def forward(self, tensors):
            return case.op(tensors, 0.0, policy=policy)

    TRACERS.append(trace)
    try:
        (found,) = explain(Model(), case.tensors(BATCH, SEQ))
    finally:
        TRACERS.remove(trace)
    said = dict(found.forward)["rotated"]
    assert (at["qkv"] == at["rotated"]) == ("in place" in said) == in_place


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
