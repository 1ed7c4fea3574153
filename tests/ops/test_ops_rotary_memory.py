"""Rotary embedding and head norms: the same in every policy, kept bytes, and work in place."""

import pytest
import torch
import torch.nn.functional as F
from reference import EXACT_PRESETS
from reference_ops import calls, compare, in_pieces, normal, results
from reference_rotary import (
    BATCH,
    HEADS,
    SEQ,
    TOKENS,
    WIDTH,
    block,
    block_tensors,
    every_heads,
    op,
    plain,
)  # fmt: skip
from tiers import pairwise

from fused_remat import Policy, explain
from fused_remat.autograd import run_block
from fused_remat.execution.observe import TRACERS
from fused_remat.graph.build import BlockBuilder, rotary_node
from fused_remat.graph.schedule import kept_bytes, schedule
from fused_remat.report.allocations import SavedBytes, measure_allocations
from fused_remat.spec import AttentionSpec, RotarySpec
from fused_remat.steps.rotary import Rotary

heads = every_heads


def policies(heads):
    names = ("norm", "qkv", "rotated", "attn")
    return (*EXACT_PRESETS, *(Policy(save={n}) for n in names), Policy(save={"qkv", "rotated"}))


@pytest.mark.parametrize(
    "heads, tokens, dtype",
    pairwise(list(HEADS), TOKENS, [torch.float32, torch.bfloat16]),
    indirect=["heads"],
)
def test_gradients_are_the_same_bits_in_every_policy(heads, tokens, dtype):
    t = block_tensors(heads, dtype)
    with in_pieces(tokens):
        first, *others = (
            results(lambda: block(t, heads, policy=policy), [*t.values()])  # noqa: B023
            for policy in policies(heads)
        )
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("tokens", [512, 4])
def test_backward_twice_gives_the_same_and_changes_no_operand(heads, tokens):
    """What is kept and what is given is never written over, whatever the policy keeps."""
    t, tables = block_tensors(heads), heads.tables()
    given = [*t.values(), *(tables or ())]
    before = [v.detach().clone() for v in given]
    for policy in policies(heads):
        with in_pieces(tokens):
            y = block(t, heads, tables, policy=policy)
            out, dy = y.detach().clone(), torch.randn_like(y)
            first = torch.autograd.grad(y, [*t.values()], dy.clone(), retain_graph=True)
            second = torch.autograd.grad(y, [*t.values()], dy)
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert torch.equal(y, out)
        assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))


def test_rotary_alone_changes_neither_its_input_nor_its_gradient(heads):
    x, weights, tables = normal(BATCH, SEQ, heads.packed), heads.weights(), heads.tables()
    before, dy = x.detach().clone(), normal(BATCH, SEQ, heads.packed, seed=3).detach()
    given = dy.clone()
    with torch.no_grad():
        op(x, heads, tables, weights)
    y = op(x, heads, tables, weights)
    first = torch.autograd.grad(y, [x, *weights.values()], given, retain_graph=True)
    second = torch.autograd.grad(y, [x, *weights.values()], given)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert torch.equal(x, before) and torch.equal(given, dy)


# Policy -> whether forward and whether the rebuild in backward (None: there is none) write over
# the projection: not where it is kept, nor where its own backward still asks for it.
IN_PLACE = {
    "half": {"full": (True, True), "lean": (True, True), "fast": (True, None),
             "qkv": (False, False), "rotated": (True, None)},
    "norm half": {"full": (True, False), "lean": (True, False), "fast": (False, False),
                  "qkv": (False, False), "rotated": (True, None)},
}  # fmt: skip


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("tiled", [False, True])
def test_where_it_works_in_place(name, tiled):
    heads = HEADS[name]
    t = block_tensors(heads)
    for policy, expected in IN_PLACE[name].items():
        chosen = policy if policy in EXACT_PRESETS else Policy(save={policy})
        ((call, _),) = calls(lambda: block(t, heads, policy=chosen))  # noqa: B023
        plan = schedule(call.graph, call.save, call.needs_grad, tiled)
        found = []
        for steps in (plan.forward, plan.backward):
            made = [s.node for s in steps if s.kind == "compute" and isinstance(s.node, Rotary)]
            found.append(made[0].in_place if made else None)
        assert tuple(found) == expected, policy


@pytest.mark.parametrize("policy", ["full", "fast"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_is_the_projections_memory(name, policy):
    at = {}

    def trace(step, frame):
        for held in ("qkv", "rotated"):
            if held in frame:
                at[held] = frame[held].data_ptr()

    TRACERS.append(trace)
    try:
        y = block(block_tensors(HEADS[name]), HEADS[name], policy=policy)
    finally:
        TRACERS.remove(trace)
    assert y.requires_grad
    assert (at["qkv"] == at["rotated"]) == IN_PLACE[name][policy][0]


def test_what_is_read_again_is_not_written_over():
    """output = rotated + qkv: the projection outlives the rotation."""
    heads = HEADS["half"]
    spec = AttentionSpec(
        num_heads=4, num_kv_heads=2, head_dim=heads.packed // 8, scale=1.0, rotary=RotarySpec()
    )
    b = BlockBuilder()
    qkv = b.linear("qkv", "input", "qkv")
    b.sum("output", b.add(rotary_node("rotated", qkv, spec)), qkv)
    graph = b.graph("test")
    x, weight, tables = normal(2, SEQ, WIDTH), normal(heads.packed, WIDTH), heads.tables()
    named = {"input": x, "qkv.weight": weight, "cos": tables[0], "sin": tables[1]}

    def expected():
        return plain(F.linear(x, weight), heads, tables, {}) + F.linear(x, weight)

    for tokens in (512, 4):
        with in_pieces(tokens):
            compare(lambda: run_block(graph, "full", named), expected, [x, weight])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_kept_bytes_are_the_prediction_and_the_table(heads, dtype):
    t, tables = block_tensors(heads, dtype), heads.tables(dtype)
    item, stat, tokens = dtype.itemsize, max(dtype.itemsize, 4), BATCH * SEQ
    attn = heads.nhead * (heads.width * item + stat)  # and its logsumexp
    base = WIDTH * item + 2 * stat
    table = {"full": base, "lean": base + attn, "balanced": base + attn}
    table |= dict.fromkeys(("fast", "none"), base + attn + heads.packed * item)
    own = [v for n, v in t.items() if n != "x"] + list(tables or ())
    for policy in policies(heads):

        def run(policy=policy):
            return block(t, heads, tables, policy=policy)

        ((call, shapes),) = calls(run)
        kept = kept_bytes(call.graph, call.save, call.needs_grad, shapes, item)
        with SavedBytes(exclude=own) as saved:
            run()
        assert saved.total == sum(kept.values())
        if policy in table:
            assert saved.total == tokens * table[policy]


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_nothing_else_stays_allocated(name, policy):
    t, tables = block_tensors(HEADS[name]), HEADS[name].tables()

    def run():
        return block(t, HEADS[name], tables, policy=policy)

    ((call, shapes),) = calls(run)
    kept = kept_bytes(call.graph, call.save, call.needs_grad, shapes, 8)
    new = sum(n for name, n in kept.items() if name != "input")
    assert measure_allocations(run).net == new + t["x"].nbytes  # and the output


@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_rotary_alone_keeps_its_input_only_for_norms(heads, policy):
    x, weights, tables = normal(BATCH, SEQ, heads.packed), heads.weights(), heads.tables()
    with SavedBytes(exclude=[*weights.values(), *(tables or ())]) as saved:
        op(x, heads, tables, weights, policy=policy)
    assert saved.total == (x.nbytes if heads.norm else 0)


def test_frozen_projections_keep_and_rebuild_no_more_than_heads_need():
    """With x alone wanted, "fast" rebuilds nothing: rotating back reads tables only."""
    heads = HEADS["half"]
    t = {n: v.detach().requires_grad_(n == "x") for n, v in block_tensors(heads).items()}
    ((call, _),) = calls(lambda: block(t, heads, policy="fast"))
    plan = schedule(call.graph, call.save, call.needs_grad, False)
    assert not any(step.kind == "compute" for step in plan.backward)


def test_explain_names_the_step():
    heads = HEADS["half"]
    t = block_tensors(heads)

    class Model(torch.nn.Module):
        def forward(self, x):
            return block({**t, "x": x}, heads)

    text = str(explain(Model(), t["x"]))
    assert "rotary_attention_block" in text
    assert "rotated" in text and "pointwise, eager, in place" in text
    assert "backward rotated" in text
