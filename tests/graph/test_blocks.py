"""Schedules: what they keep, rebuild and free, read from their steps."""

import itertools

import pytest
import torch
from reference import EXACT_PRESETS

from fused_remat.execution.prepare import BlockConfig, chunks_of
from fused_remat.graph.build import block_graph, norm_graph
from fused_remat.graph.schedule import schedule
from fused_remat.layer_specs import nn_layer_spec, transformer_spec
from fused_remat.policies import kept_names
from fused_remat.spec import BlockSpec, BranchSpec, MLPSpec, NormSpec
from fused_remat.steps.chunk import Chunks, spans

PRE = block_graph(nn_layer_spec(True, 2, 4, "gelu"))
POST = block_graph(nn_layer_spec(False, 2, 4, "gelu"))
FIELDS = {
    "activation": "silu", "gated": True, "num_heads": 4, "num_kv_heads": 2, "head_dim": 6,
    "scale": 0.4, "window": (-1, 0), "projection": "split", "rotary": True,
}  # fmt: skip
LLAMA = block_graph(transformer_spec("rms_norm", 1e-6, **FIELDS))


def backward_steps(graph, policy, frozen=(), tiled=False):
    wanted = {"input", *(n for n in graph.params if not n.startswith(tuple(frozen)))}
    plan = schedule(graph, kept_names(policy, graph), frozenset(wanted), tiled)
    return [str(step) for step in plan.backward + plan.tile_backward]


def rebuilt(*args, **options):
    """Names that backward rebuilds, in order."""
    steps = backward_steps(*args, **options)
    return [step.removeprefix("compute ") for step in steps if step.startswith("compute")]


# DESIGN's claims: fc2 is never re-run pre-norm, the out-projection not when `mid` is kept, ...
@pytest.mark.parametrize(
    ("graph", "policy", "expected"),
    [
        (PRE, "full", "norm1 qkv attn mid norm2 up act"),
        (PRE, "lean", "norm1 qkv mid norm2 up act"),
        (PRE, "balanced", "norm1 qkv norm2 up act"),
        (PRE, "fast", "norm1 norm2 up act"),
        (PRE, "none", "norm1 norm2 act"),
        (POST, "full", "qkv attn sum1 mid up act sum2"),
        (POST, "lean", "qkv attn sum1 mid up act"),
        (POST, "balanced", "qkv sum1 mid up act"),
        (POST, "fast", "mid up act"),
        (POST, "none", "mid act"),
        (LLAMA, "full", "norm1 qkv rotated attn mid norm2 gate up act"),
        (LLAMA, "fast", "norm1 norm2 gate up act"),
        (LLAMA, "none", "norm1 norm2 act"),
    ],
)
@pytest.mark.parametrize("tiled", [True, False])
def test_backward_rebuilds_what_it_asks_for_and_nothing_else(graph, policy, expected, tiled):
    assert sorted(rebuilt(graph, policy, tiled=tiled)) == sorted(expected.split())  # each once


def test_backward_visits_steps_in_reverse():
    assert backward_steps(LLAMA, "full")[-10:] == [
        "backward output", "backward act", "backward up", "backward gate", "backward norm2",
        "backward mid", "backward attn", "backward rotated", "backward qkv", "backward norm1",
    ]  # fmt: skip


@pytest.mark.parametrize("placement, of_fc2", [("post", "sum2"), ("sandwich", "down")])
def test_fc2_is_rebuilt_only_where_its_norm_asks_for_it(placement, of_fc2):
    graph = block_graph(transformer_spec("rms_norm", 1e-6, placement=placement, **FIELDS))
    assert [p for p in EXACT_PRESETS if of_fc2 in rebuilt(graph, p)] == ["full"]


def test_frozen_weights_ask_for_less():
    weights = PRE.params
    assert set(rebuilt(PRE, "fast", weights)) == {"norm2", "up"}
    assert rebuilt(PRE, "none", weights) == []
    assert rebuilt(LLAMA, "none", ("q.", "k.", "v.", "proj", "gate", "fc1", "fc2")) == []
    steps = rebuilt(LLAMA, "lean", ("fc2",))
    assert "act" not in steps and "up" in steps
    plan = schedule(PRE, frozenset(), frozenset({"fc2.bias"}), False)
    assert plan.kept == () and not plan.kept_inputs
    assert not any(step.kind == "compute" for step in plan.backward)


GATED = BranchSpec(
    op=MLPSpec(activation="silu", gated=True, dropout=0.1), norm=NormSpec(kind="rms_norm"),
    dropout=0.1,
)  # fmt: skip
GRAPHS = {PRE: "gelu", POST: "gelu", block_graph(BlockSpec(kind="m", branches=(GATED,))): "silu"}
KEPT = ("kept", "kept_group", "kept_tile", "kept_inputs", "saved_params")


@pytest.mark.parametrize(("graph", "act"), GRAPHS.items())
@pytest.mark.parametrize("tiled", [True, False])
def test_every_use_is_defined_and_everything_is_freed(graph, act, tiled):
    """For every subset of names: steps, fused or not, read names that exist, and at the end none
    is left. No fusion changes what is kept.
    """
    fusions = frozenset({"linear_norm", f"linear_act {act}", f"mlp_bwd {act}"})
    wanted = {"input", *graph.params} - {"seed"}
    ends = wanted, {"input"}, wanted - {"input"}, {"fc1.weight"}, {"fc2.weight"}
    sizes = range(len(graph.names) + 1)
    saves = [save for n in sizes for save in itertools.combinations(graph.names, n)]
    for save, needs_grad in itertools.product(map(frozenset, saves), map(frozenset, ends)):
        plain, fused = (schedule(graph, save, needs_grad, tiled, f) for f in (frozenset(), fusions))
        for plan in (plain, fused):
            assert {*plan.kept} <= walk(plan.forward, {"input"}, plan.tile_forward, set())
            kept = {*plan.kept_group, *plan.kept_inputs}
            assert walk(plan.backward, kept, plan.tile_backward, {*plan.kept_tile}) == set()
        assert all(getattr(plain, what) == getattr(fused, what) for what in KEPT)


def walk(steps, have, of_tile, kept_in_tile):
    """The names that are there after steps; one of these may be all the steps of a tile."""
    have = set(have)
    for step in steps:
        if step.kind == "tiles":
            have |= walk(of_tile, have | kept_in_tile, (), set())
        elif step.kind == "compute":
            assert {*step.node.reads} <= have, f"{step} reads what is not there"
            have |= {*step.node.makes}
        else:
            assert {*step.node.needs(step.needs_grad)} <= have, step
        have -= {*step.free}
    return have


@pytest.mark.parametrize("batch", [1, 2, 5, 33])
@pytest.mark.parametrize("seq_len", [1, 7, 100, 1000])
@pytest.mark.parametrize("limit", [1, 16, 512, 10**6])
def test_chunks_cover_everything_once_and_stay_within_the_limit(batch, seq_len, limit):
    chunks = Chunks.of(batch, seq_len, limit)
    groups = list(chunks.groups)
    assert [i for a, b in groups for i in range(a, b)] == list(range(batch))
    for a, b in groups:
        rows = (b - a) * seq_len
        assert rows <= max(limit, seq_len)
        tiles = list(spans(rows, chunks.tile))
        assert [i for s, e in tiles for i in range(s, e)] == list(range(rows))
        assert all(e - s <= limit for s, e in tiles)
    assert chunks.tiled == any((b - a) * seq_len > chunks.tile for a, b in groups)


def test_groups_are_of_the_longest_activation():
    """Of a decoder's memory, say: four sequences of 8 tokens and of 32, 64 at a time."""
    assert Chunks.of(4, 8, 64).group == 4
    assert Chunks.of(4, 8, 64, 32).group == 2


def test_cheap_steps_alone_run_in_larger_pieces_unless_told_otherwise():
    x, call = (
        torch.empty(2048, 1, 64),
        BlockConfig(norm_graph(NormSpec()), *[frozenset()] * 2, "eager"),
    )
    assert call.prepare([x, None, None]).chunks.group == 2048
    with chunks_of(16):
        assert call.prepare([x, None, None]).chunks.group == 16
