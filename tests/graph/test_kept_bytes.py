"""Memory: what is kept equals the prediction and the published table; the peak of a whole step."""

import pytest
import torch
from reference import EXACT_PRESETS, weights_of
from tiers import pairwise
from torch import nn

from fused_remat import FusedRematLayer, ops, policies
from fused_remat.graph.build import block_graph
from fused_remat.report.allocations import SavedBytes, measure_allocations, predict_kept_bytes
from fused_remat.spec import nn_layer_spec
from fused_remat.steps import attention_rows

# Elements per token in units of D, F = 4D, besides statistics (docs/presets.md).
TABLE = {
    True: {"full": 1, "lean": 2, "balanced": 3, "fast": 6, "none": 10},
    False: {"full": 1, "lean": 2, "balanced": 3, "fast": 7, "none": 11},
}
KEEPS_ATTENTION = {True: EXACT_PRESETS[1:], False: EXACT_PRESETS[2:]}
B, S, D, H = 3, 200, 48, 4


def prediction(layer, dtype, needs_grad, dropout):
    spec = nn_layer_spec(layer.norm_first, H, D // H, "relu", dropout=dropout)
    shapes = {"input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D),
              "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D)}  # fmt: skip
    return predict_kept_bytes(block_graph(spec), layer.policy, shapes, needs_grad, B, S, dtype)


def measured(layer, x):
    with SavedBytes(exclude=layer.parameters()) as saved:
        y = layer(x)
    del y
    allocated = measure_allocations(lambda: layer(x)).net - x.nbytes  # less the output
    return saved.total, allocated + x.nbytes * (saved.total > 0)  # plus the input, kept by name


ALL = (*nn_layer_spec(True, H, D // H, "relu").weights, "input")


@pytest.mark.parametrize(
    "dtype, norm_first, dropout, policy, tokens",
    pairwise(
        [torch.float32, torch.bfloat16, torch.float64], [True, False], [0.0, 0.1],
        list(EXACT_PRESETS), [64, 512],
    ),
)  # fmt: skip
def test_kept_bytes_are_the_table_and_the_prediction(
    dtype, norm_first, dropout, policy, tokens, monkeypatch
):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
    layer = FusedRematLayer(
        D, H, 4 * D, dropout, norm_first=norm_first, batch_first=True, dtype=dtype, policy=policy
    )
    x = torch.randn(B, S, D, dtype=dtype, requires_grad=True)
    item, stat = x.element_size(), max(x.element_size(), 4)
    statistics = 4 * stat + (H * stat if policy in KEEPS_ATTENTION[norm_first] else 0)
    table = B * S * (TABLE[norm_first][policy] * D * item + statistics) + (8 if dropout else 0)
    predicted = sum(prediction(layer, dtype, ALL, dropout).values())
    assert predicted == table
    assert measured(layer, x) == (predicted, predicted)


FROZEN = {
    "all weights": [n for n in ALL if n not in ("input",)],
    "mlp": [n for n in ALL if n.startswith("fc")],
    "all but fc2": [n for n in ALL if not n.startswith("fc2")],
    "input only frozen": ["input"],
}


@pytest.mark.parametrize("which", FROZEN)
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_nothing_is_kept_for_what_is_frozen(which, policy):
    layer = FusedRematLayer(D, H, 4 * D, 0.0, norm_first=True, batch_first=True, policy=policy)
    needs_grad = [n for n in ALL if n not in FROZEN[which]]
    for name, weight in weights_of(layer).items():
        weight.requires_grad_(name in needs_grad)
    x = torch.randn(B, S, D, requires_grad="input" in needs_grad)
    predicted = prediction(layer, x.dtype, needs_grad, 0.0)
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(x)
    assert saved.total == sum(predicted.values())
    if which == "all but fc2":
        # fc2's gradients need dy and act: act's chain, but nothing of attention's backward
        assert "attn.lse" not in predicted and "norm1.mean" not in predicted
    if which == "all weights" and policy == "none":
        assert "norm1" not in predicted and "act" not in predicted


def test_nothing_is_kept_without_gradients():
    for training in (True, False):
        layer = FusedRematLayer(D, H, 4 * D, batch_first=True, policy="none").train(training)
        x = torch.randn(B, S, D)
        with torch.no_grad():
            y = layer(x)
            assert not y.requires_grad
            assert measure_allocations(lambda: layer(x)).net == x.nbytes  # noqa: B023
        layer.requires_grad_(False)
        with SavedBytes() as saved:
            layer(x)
        assert saved.total == 0


def test_without_grad_mode_no_policy_holds_more():
    layer, x = FusedRematLayer(16, 2, 64, batch_first=True), torch.randn(4, 8, 16)
    peaks = []
    for layer.policy in ("full", "none"):
        with torch.no_grad():
            peaks.append(measure_allocations(lambda: layer(x)).peak)
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(("activation", "units"), [("relu", 12), ("gelu", 16)])
@pytest.mark.parametrize("norm_first", [True, False])
def test_what_the_stock_layer_keeps(activation, units, norm_first):
    """The README's 24D and 32D bytes at 16 bits without dropout; statistics take below 0.1."""
    layer = nn.TransformerEncoderLayer(
        256, 4, 1024, 0.0, activation, norm_first=norm_first, batch_first=True, dtype=torch.bfloat16
    )
    x = torch.randn(2, 64, 256, dtype=torch.bfloat16, requires_grad=True)
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(x)
    assert units <= saved.total / x.nbytes <= units + 0.1


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("norm_first, layers, dropout", pairwise([True, False], [1, 4], [0.0, 0.1]))
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
    assert peak <= blocks * attention_rows._BLOCK * 4 + 10 * q.nbytes
    assert peak < 4 * 2048 * 2048 * 4 / 2  # half of all scores


@torch.no_grad()
def test_a_group_is_freed_before_the_next_one_is_allocated():
    layer, x = FusedRematLayer(64, 4, 256, 0.0), torch.randn(600, 4, 64)  # four groups
    layer(x)
    above = measure_allocations(lambda: layer(x)).peak - x.nbytes
    assert above <= 7 * x[:, :1].nbytes  # 8 with what is left of the one before


def test_a_changed_preset_is_the_next_calls(monkeypatch):
    layer, x = FusedRematLayer(D, H, 4 * D, policy="lean", dropout=0.0), torch.randn(5, 2, D)
    before = layer(x).grad_fn.execution.call.save
    row = frozenset({"attn", "qkv"})
    assert before != row
    monkeypatch.setitem(policies.EXACT_PRESETS["lean"], "encoder_postnorm", row)
    assert layer(x).grad_fn.execution.call.save == row
    monkeypatch.setitem(policies.ALL_PRESETS, "mine", {})
    layer.policy = "mine"
    assert layer(x).grad_fn.execution.call.save == frozenset()
    monkeypatch.delitem(policies.ALL_PRESETS, "mine")
    with pytest.raises(ValueError, match="unknown policy 'mine'"):
        layer(x)
