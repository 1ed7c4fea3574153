"""Fused layers divided among ranks: the losses, gradients and outputs of one process."""

import contextlib
import functools

import pytest
import torch
import torch.distributed as dist
from block_inputs import in_pieces
from processes import in_two_processes
from reference import EXACT_PRESETS, randomize
from tensor_parallel_steps import (
    CLOSE,
    KINDS,
    B,
    D,
    H,
    S,
    Stack,
    check,
    divided,
    given,
    mesh_of,
    options_of,
    stack,
    step,
    whole,
)
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fused_remat import FusedRematDecoderLayer, FusedRematLayer, Policy, check_replay, memory_report
from fused_remat.autograd.function import OBSERVERS, run_block
from fused_remat.graph.build import block_graph
from fused_remat.parallel import LayerParallel, pack_attention
from fused_remat.report.allocations import SavedBytes
from fused_remat.spec import AttentionSpec, BlockSpec, BranchSpec, MLPSpec, NormSpec, ParallelSpec

SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])


def divided_as_whole(kind, policy, sequence, tokens=512):
    model = stack(kind, policy)
    with in_pieces(tokens):
        check(model, divided(model, sequence), given(), **options_of(kind, masks=True))


@pytest.mark.composes(
    "Tensor parallel",
    "`LayerParallel` of encoder and causal layers, with sequence parallel or without; masks",
)
@SEQUENCE
@pytest.mark.parametrize("kind", KINDS)
def test_layers(two_processes, kind, sequence):
    two_processes.run(divided_as_whole, kind, "full", sequence)


@pytest.mark.composes("Tensor parallel", "every policy")
@pytest.mark.composes("Tensor parallel", "groups of sequences and tiles of tokens")
@SEQUENCE
@pytest.mark.parametrize(
    "policy, kind",
    [(policy, "causal, heads normed") for policy in EXACT_PRESETS[1:]]
    + [("balanced", "encoder pre-norm"), ("balanced", "causal, sandwich")],
)
def test_policies(two_processes, kind, policy, sequence):
    two_processes.run(divided_as_whole, kind, policy, sequence, tokens=2)


@pytest.mark.composes("Tensor parallel", "the decoder layer; its memory is whole on every rank")
@SEQUENCE
@pytest.mark.parametrize("norm_first", [False, True])
@in_two_processes
def test_decoder(norm_first, sequence):
    torch.manual_seed(0)
    layers = [FusedRematDecoderLayer(D, H, 12, 0.0, norm_first=norm_first) for _ in range(2)]
    model = Stack(layers).double()  # (S, B, D)
    randomize(model)
    memory = given(3, (5, B, D))
    mask = given(4, (B * H, S, S)) > 1.0  # of every head
    mask[..., 0] = False
    results = []
    for m in (model, divided(model, sequence)):
        own = memory.clone().requires_grad_()
        y, dx, grads = step(m, given(1, (S, B, D)), memory=own, tgt_mask=mask)
        results.append([y, dx, own.grad, pack_attention(grads)])
    assert_close(*results, **CLOSE)


@pytest.mark.composes(
    "Tensor parallel",
    "dropout: of what every rank has, the first rank's; of what is divided, each rank's own",
)
@SEQUENCE
@in_two_processes
def test_dropout(sequence):
    make = {"norm_first": True, "batch_first": True}
    model = FusedRematLayer(D, H, 12, 0.3, policy="lean", **make).double()
    randomize(model)
    other = divided(nn.Sequential(model), sequence)
    params = list(other.parameters())

    def loss(x, seed=5):
        torch.manual_seed(seed + dist.get_rank())  # ranks need not agree
        return (other(x) * given(2)).sum()

    x = given().requires_grad_()
    loss(x).backward()
    assert loss(x, 5) == loss(x, 5) != loss(x, 6)
    # Along a random direction, alike on all ranks, of the input and of every parameter.
    torch.manual_seed(1)
    dx, slope = torch.randn_like(x), 0.0
    moves = []
    for p in params:
        move = torch.randn(p.shape, dtype=p.dtype)
        moves.append(torch.distributed.tensor.distribute_tensor(move, p.device_mesh, p.placements))
        slope += (whole(p.grad) * move).sum().item()
    slope += (x.grad * dx).sum().item()
    values = []
    for eps in (1e-6, -1e-6):
        with torch.no_grad():
            for p, move in zip(params, moves, strict=True):
                p.add_(move, alpha=eps)
            values.append(loss(x + eps * dx).item())
            for p, move in zip(params, moves, strict=True):
                p.add_(move, alpha=-eps)
    assert abs((values[0] - values[1]) / 2e-6 - slope) < 1e-5 * max(1.0, abs(slope))


def test_ranks_draw_their_own_masks_of_what_is_divided(two_processes):
    for sequence in (False, True):
        masks = two_processes.run(dropped, sequence)
        assert 0.2 < masks[0].double().mean() < 0.8
        assert not torch.equal(*masks)


def dropped(sequence):
    """Where the MLP's activation was dropped, of two equal shards and equal seeds."""
    layer = FusedRematLayer(D, H, 64, 0.5, norm_first=True, policy=Policy(save={"act"}))
    layer.dropout1.p = layer.self_attn.dropout = 0.0
    with torch.no_grad():
        layer.linear1.weight.zero_()
        layer.linear1.bias.fill_(1.0)
    parallelize_module(layer, mesh_of(), LayerParallel(sequence=sequence))
    torch.manual_seed(5)
    found = []
    OBSERVERS.append(found.append)
    try:
        layer(torch.zeros(S, B, D, requires_grad=True))
    finally:
        OBSERVERS.pop()
    kept = dict(
        zip((name for name, _ in found[0].execution.kept_chunks()), found[0].kept, strict=True)
    )
    return kept["act"] == 0


@pytest.mark.composes("Tensor parallel", "whole residual stream: its dropout is one process's")
@in_two_processes
def test_dropout_of_the_stream_is_one_processs():
    model = stack("encoder pre-norm")
    for layer in model.layers:
        layer.dropout1.p, layer.dropout2.p = 0.3, 0.4
    other = divided(model)
    torch.manual_seed(3)
    expected = step(model, given())
    torch.manual_seed(3 + 10 * dist.get_rank())
    found = step(other, given())
    assert_close(found[:2], expected[:2], **CLOSE)


@pytest.mark.composes("Tensor parallel", "kept bytes of a rank, as predicted from its graph")
@SEQUENCE
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@in_two_processes
def test_kept_bytes(policy, sequence):
    """Bytes that autograd saves, that the report says, and of docs/scale.md."""
    layer = FusedRematLayer(D, H, 4 * D, 0.0, norm_first=True, batch_first=True, policy=policy)
    layer = parallelize_module(layer, mesh_of(), LayerParallel(sequence=sequence))
    tokens = S // 2 if sequence else S
    x = torch.randn(B, tokens, D, requires_grad=True)
    with SavedBytes(exclude=[p.to_local() for p in layer.parameters()]) as saved:
        layer(x)
    report = memory_report(layer, x)
    stream = {"full": 1, "lean": 1, "balanced": 2, "fast": 2, "none": 2}[policy] * tokens
    heads = {"full": 0, "lean": 1, "balanced": 1, "fast": 4, "none": 8}[policy] * S // 2
    lse = 0 if policy == "full" else S * H // 2
    table = 4 * B * (D * (stream + heads) + 4 * tokens + lse)
    assert saved.total == report.kept_bytes == report.predicted_bytes == table


@SEQUENCE
@in_two_processes
def test_branches_that_read_one_gathered_norm(sequence):
    rank, group = dist.get_rank(), dist.group.WORLD.group_name
    attention = AttentionSpec(num_heads=2, num_kv_heads=2, head_dim=4, scale=0.5)
    branches = (
        BranchSpec(op=attention, norm=NormSpec()),
        BranchSpec(op=MLPSpec(activation="gelu"), parallel=True),
    )
    spec = BlockSpec(kind="beside", branches=branches)
    shapes = spec.linear_shapes(D, 12)
    full = {f"{name}.weight": given(i, shape) for i, (name, shape) in enumerate(shapes.items())}
    own = {n: w.chunk(2, int(n in ("proj.weight", "fc2.weight")))[rank] for n, w in full.items()}
    own["qkv.weight"] = full["qkv.weight"].view(3, 2, 4, D)[:, rank].reshape(12, D)

    def part(x):
        return x.chunk(2, 1)[rank] if sequence else x

    x, dy, results = given(), given(7), []
    place = ParallelSpec(group=group, size=2, rank=rank, sequence=sequence)
    for block, weights, cut in ((spec, full, lambda t: t), (spec.on_rank(place), own, part)):
        leaf = cut(x).clone().requires_grad_()
        y = run_block(block_graph(block), "lean", {"input": leaf, **weights})
        y.backward(cut(dy))
        results.append((y, leaf.grad))
    assert_close(results[1], tuple(map(part, results[0])), **CLOSE)


@pytest.mark.composes("Tensor parallel", "segments")
@pytest.mark.composes("Tensor parallel", "an outer checkpoint; the replay check")
@pytest.mark.composes(
    "Tensor parallel", "torch.compile", limits="the layers run outside of the compiled graph"
)
@pytest.mark.parametrize("way", ["segments", "checkpoint", "replay check", "compile"])
@in_two_processes
def test_ways_to_run(way):
    model = stack("causal", "full", count=3)
    other = divided(model, sequence=True)
    if way == "segments":
        for layer, place in zip(other.layers, ("first", "inner", "inner"), strict=True):
            layer.policy = Policy(save={"attn"}, segment=place)
    elif way == "checkpoint":
        other.forward = functools.partial(checkpoint, other.forward, use_reentrant=False)
    elif way == "compile":
        torch._dynamo.reset()
        other.compile(backend="aot_eager")
    with check_replay() if way == "replay check" else contextlib.nullcontext():
        check(model, other, given(), **options_of("causal", False))


@pytest.mark.composes("Tensor parallel", "autocast to bfloat16")
@pytest.mark.parametrize("kind", ["encoder post-norm", "causal, sandwich"])
@in_two_processes
def test_autocast(kind):
    for sequence in (False, True):
        model = stack(kind, width=64).float()
        other = divided(model, sequence)
        kwargs, x = options_of(kind, False, 64), given(1, (B, S, 64)).float()
        kwargs = {name: tuple(t.float() for t in tables) for name, tables in kwargs.items()}
        exact = step(model, x, **kwargs)
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = step(model, x, **kwargs), step(other, x, **kwargs)
        # Partial sums are rounded once more each.
        error = [(t[1] - exact[1]).norm() / exact[1].norm() for t in (expected, found)]
        assert error[1] < 1.5 * error[0] + 2 * 2**-8, error
