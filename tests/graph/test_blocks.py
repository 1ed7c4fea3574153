"""Schedules: what they keep, rebuild and free, read from their steps."""

import itertools

import pytest
import torch
from reference import EXACT_PRESETS

from fused_remat.execution.prepare import BlockConfig, chunks_of, prepare
from fused_remat.graph.build import BlockBuilder, block_graph, norm_graph
from fused_remat.graph.schedule import schedule
from fused_remat.layer_specs import nn_layer_spec, transformer_spec
from fused_remat.policies import kept_names
from fused_remat.spec import BlockSpec, BranchSpec, MLPSpec, NormSpec
from fused_remat.steps.chunk import Chunks, spans
from fused_remat.steps.replay import Replay

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


#: SmolLM-135M's layer in 16 bits.
SMALL = {**FIELDS, "num_heads": 9, "num_kv_heads": 3, "head_dim": 64, "scale": 0.125}


@pytest.mark.parametrize(
    ("width", "hidden", "device", "group"),
    [
        # 2^27 elements of the hidden width are 87,381 tokens: 42 sequences of 2048
        (576, 1536, "meta", 42),
        (4096, 14336, "meta", 8),  # 16,384 tokens at least
        (576, 1536, "cpu", 1),
    ],
)
def test_chunks_on_devices_are_sized_by_elements(width, hidden, device, group):
    graph = block_graph(transformer_spec("rms_norm", 1e-6, **SMALL))
    shapes = {"input": (247, 2048, width), "qkv.weight": (960, width), "proj.weight": (width, 576)}
    shapes |= dict.fromkeys(("gate.weight", "fc1.weight"), (hidden, width))
    shapes |= {"fc2.weight": (width, hidden)}
    shapes |= dict.fromkeys(("cos", "sin"), (2048, 32))
    given = [torch.Size(shapes[n]) if n in shapes else None for n in graph.tensors]
    call = BlockConfig(graph, *[frozenset()] * 2, "eager")
    chunks = prepare(call, torch.empty(0, device=device, dtype=torch.bfloat16), given).chunks
    assert chunks.group == group and chunks.tiled == (device == "cpu")


def test_chunks_of_replayed_functions_keep_their_number_of_tokens():
    """Their own activations, which may be wider than all others, are not known."""
    b = BlockBuilder()
    b.add(Replay(name="output", xs=("input",), function="mixer", what="a mixer", needed_for=((),)))
    call = BlockConfig(b.graph("mixer"), *[frozenset()] * 2, "eager")
    x = torch.empty(64, 1024, 16, device="meta")
    assert call.prepare([x]).chunks.group == 16
