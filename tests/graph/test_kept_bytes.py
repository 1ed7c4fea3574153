"""Memory: peaks of a whole step, of attention, between groups.

What a layer keeps by the published table, and with what is frozen, in layers/test_memory.py; what
an operation keeps, in ops/test_every_op.py.
"""

import pytest
import torch
from tiers import pairwise
from torch import nn

from fused_remat import FusedRematLayer, Policy, ops
from fused_remat.report.allocations import SavedBytes, measure_allocations
from fused_remat.steps import attention_blocked


def test_without_grad_mode_no_policy_holds_more():
    layer, x = FusedRematLayer(16, 2, 64, batch_first=True), torch.randn(4, 8, 16)
    peaks = []
    for layer.policy in ("full", "none"):
        with torch.no_grad():
            peaks.append(measure_allocations(lambda: layer(x)).peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(("activation", "units"), [("relu", 12), ("gelu", 16)])
def test_what_the_stock_layer_keeps(activation, units):
    """24D and 32D bytes at 16 bits without dropout (docs/presets.md); statistics below 0.1."""
    layer = nn.TransformerEncoderLayer(256, 4, 1024, 0.0, activation, batch_first=True).bfloat16()
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(x)
    assert units <= saved.total / x.nbytes <= units + 0.1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("norm_first, layers, dropout", pairwise([True, False], [1, 2], [0.0, 0.1]))
def test_peak_of_a_whole_step(norm_first, layers, dropout):
    """(4, 512, 512, 8), float32, full, gradients preallocated: at most 12 + 1.02 N units."""
    batch, seq_len, width, nhead = 4, 512, 512, 8
    model = nn.Sequential(
        *(
            FusedRematLayer(width, nhead, 4 * width, dropout, norm_first=norm_first,
                            batch_first=True)
            for _ in range(layers)
        )
    )  # fmt: skip
    x = torch.randn(batch, seq_len, width, requires_grad=True)
    for t in (x, *model.parameters()):
        t.grad = torch.zeros_like(t)
    allocated = measure_allocations(lambda: model(x).sum().backward())
    assert allocated.net == 0
    assert (allocated.peak + x.nbytes) / x.nbytes <= 12 + 1.02 * layers


# How many blocks of scores backward holds at once: probabilities, their gradient, dropout's
# multiplier; with a soft-cap its tanh, and a product with it.
BLOCKS_ROUTE = {
    "dropout": (3, {"dropout_p": 0.1}),
    "causal dropout": (3, {"dropout_p": 0.1, "is_causal": True}),
    "window": (3, {"window": (700, 300)}),
    "soft-cap": (5, {"softcap": 2.0}),
    "mask with gradient": (3, {"attn_mask": torch.zeros(1, 2048, requires_grad=True)}),
    "packed": (0, {"cu_seqlens_q": torch.tensor([0, 1500, 2048])}),
    "packed causal": (0, {"is_causal": True, "cu_seqlens_q": torch.tensor([0, 1500, 2048])}),
    "packed dropout": (3, {"dropout_p": 0.1, "cu_seqlens_q": torch.tensor([0, 1500, 2048])}),
}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("name", BLOCKS_ROUTE)
def test_attention_in_blocks_never_holds_all_scores(name):
    """A step's peak: blocks of scores, and a few tensors of the size of q."""
    blocks, options = BLOCKS_ROUTE[name]
    q, k, v = (torch.randn(1, heads, 2048, 16, requires_grad=True) for heads in (4, 2, 2))
    step = lambda: ops.attention(q, k, v, **options).sum().backward()  # noqa: E731
    peak = measure_allocations(step).peak
    assert peak <= blocks * attention_blocked._BLOCK * 4 + 10 * q.nbytes
    assert peak < 4 * 2048 * 2048 * 4 / 2  # half of all scores


@torch.no_grad()
def test_a_group_is_freed_before_the_next_one_is_allocated():
    layer, x = FusedRematLayer(64, 4, 256, 0.0), torch.randn(600, 4, 64)  # four groups
    layer(x)
    above = measure_allocations(lambda: layer(x)).peak - x.nbytes
    assert above <= 7 * x[:, :1].nbytes  # 8 with what is left of the one before


@pytest.mark.parametrize("trained", [False, True])
def test_up_is_kept_for_the_gradient_of_its_gate_alone(trained):
    x, down = torch.randn(64, 16), torch.randn(16, 24)
    gate = torch.randn(24, 16, requires_grad=trained)
    up = torch.randn(24, 16, requires_grad=True)
    with SavedBytes(exclude=[gate, up, down]) as saved:
        ops.gated_mlp(x, gate, up, down, policy=Policy(save={"gate", "up"}))
    assert saved.total == x.nbytes + (1 + trained) * 64 * 24 * 4
