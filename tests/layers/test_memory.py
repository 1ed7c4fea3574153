"""What a layer keeps for backward: a table, the prediction, and two ways of measuring."""

import functools

import pytest
import torch
from layer_kinds import DECODERS, KINDS, MODELS, B, D, H, M, S, run
from reference import EXACT_PRESETS

from fused_remat import memory_report
from fused_remat.report.allocations import SavedBytes, measure_allocations

FP32, BF16 = torch.float32, torch.bfloat16
autocast = functools.partial(torch.autocast, "cpu")

# Per token of the input, in units of D, with F = 4D, without statistics. Of the encoder under
# autocast, with a float32 stream and 16-bit products: bytes. Of the decoder in float32: elements,
# and from "fast" on 2D more for each token of the memory.
TABLE = {
    "encoder, pre-norm": {"full": 4, "lean": 6, "balanced": 10, "fast": 16, "none": 24},
    "encoder, post-norm": {"full": 4, "lean": 8, "balanced": 10, "fast": 20, "none": 28},
    "decoder, pre-norm": {"full": 1, "lean": 3, "balanced": 5, "fast": 9, "none": 13},
    "decoder, post-norm": {"full": 1, "lean": 2, "balanced": 4, "fast": 10, "none": 14},
}


def in_table(name, policy, dropout):
    """Bytes that a call keeps by the table."""
    units, seed = TABLE[name][policy], 8 if dropout else 0
    has_attention = policy != "full" and not ("post" in name and policy == "lean")
    if name in DECODERS:
        memory = (3 if policy in ("fast", "none") else 1) * M * D
        return 4 * B * (S * units * D + memory + S * (6 + 2 * H * has_attention)) + seed
    return B * S * (units * D + 16 + 4 * H * has_attention) + seed


def kept(layer, inputs, low=None, **given):
    """Bytes by hooks on saved tensors, by what is alive after forward, and as predicted."""
    call = functools.partial(layer, *inputs, **given)
    with autocast(low or BF16, enabled=low is not None):
        with SavedBytes(exclude=[*layer.parameters(), *given.get("rope", ())]) as saved:
            call()
        # The output is there, and as large as the input, which was there before.
        alive = measure_allocations(call).net + sum(t.nbytes for t in inputs[1:])
    (predicted,) = saved.predicted.values()
    return saved.total, alive, sum(predicted.values())


def inputs_of(kind, *args, **kwargs):
    return [t.requires_grad_() for t in kind.data(FP32, *args, **kwargs)[:-1]]


@pytest.mark.composes("Autocast", "bytes kept: 4/6/10/16/24·D pre-norm, no copies of the weights")
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("low", [None, BF16], ids=["float32", "autocast"])
@pytest.mark.parametrize("tokens, dropout", [(4, 0.1), (512, 0.0)], ids=["pieces", "whole"])
def test_kept_bytes_are_the_table_and_the_prediction(name, low, tokens, dropout, monkeypatch):
    """And rise from preset to preset."""
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    kind = KINDS[name]
    _, layer = kind.pair(dim_feedforward=4 * D, dropout=dropout)
    rope, totals = {} if name == "qwen" else kind.given("tables", FP32), []
    for layer.policy in EXACT_PRESETS:
        found = kept(layer, inputs_of(kind), low, **rope)
        assert len(set(found)) == 1, found
        if name in TABLE and (low is None) == kind.has_memory:
            assert found[0] == in_table(name, layer.policy, dropout)
        totals.append(found[0])
    assert totals == sorted(set(totals))
    with autocast(low or BF16, enabled=low is not None):
        report = memory_report(layer, *inputs_of(kind), **rope)
    shared = sum(t.nbytes for t in rope.get("rope", ()))
    assert (report.kept_bytes - shared, report.predicted_bytes) == (totals[-1], totals[-1])


@pytest.mark.parametrize("name", MODELS)
def test_frozen_weights_keep_nothing_for_themselves(name):
    _, layer = KINDS[name].pair("none")
    (x,) = inputs_of(KINDS[name])
    whole, _, _ = kept(layer, (x,))
    layer.requires_grad_(False)
    assert kept(layer, (x,))[0] <= whole
    run(layer, x, torch.ones_like(x))
    assert [n for n, p in layer.named_parameters() if p.grad is not None] == []
    x.requires_grad_(False)
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(x)
    assert saved.total == 0
