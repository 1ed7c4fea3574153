"""The transformer block of language models on the triton backend, interpreted."""

import pytest
import torch
from block_inputs import Block, leaves, normal, results
from reference import causal_block as plain

from fused_remat import FusedRematCausalLayer, explain, ops
from fused_remat.triton import tables

SEQ = 7
LLAMA = Block(d=24, head_dim=8, hidden=40)
GEMMA = Block(d=24, head_dim=8, hidden=40, placement="sandwich", qk_norm=True, split=False)
QWEN = Block(d=24, head_dim=8, hidden=40, qk_norm=True, qkv_bias=True)
BERT = Block(d=24, head_dim=8, hidden=40, placement="post", norm="layer_norm", gated=False,
             bias=True)  # fmt: skip
PADDING = torch.zeros(2, SEQ, dtype=torch.bool)
PADDING[0, :3] = PADDING[1, 5:] = True
CASES = {
    "llama": (LLAMA, {}),
    "llama, left and right padding": (LLAMA, {"key_padding_mask": PADDING}),
    "gemma": (GEMMA, {"norm_offset": 1.0, "activation": "gelu_tanh", "softcap": 2.0,
                      "window": (3, 0)}),
    "qwen, window": (QWEN, {"window": (4, 0), "dropout_p": 0.2, "seed": 5}),
    "bert": (BERT, {"is_causal": False, "activation": "gelu", "dropout_p": 0.2, "seed": 5}),
}  # fmt: skip
# Where PyTorch's own error happens to be next to nothing, 1.5 times it is no yardstick; float32
# sums are in another order.
FLOOR = {torch.float16: 4 * torch.finfo(torch.float16).eps, torch.float32: 2e-6}


@pytest.fixture
def routes(request, monkeypatch):
    """One of two settings of the tables of routes; the interpreter's own is "one kernel"."""
    if request.param == "as on Hopper":
        monkeypatch.setattr(tables, "MLP_BWD_IN_ONE", frozenset())
        monkeypatch.setattr(tables, "LINEAR_END_IN_KERNEL", frozenset())
        monkeypatch.setattr(tables, "ATTENTION_BY_ATEN", frozenset({"interpreter"}))


BOTH = pytest.mark.parametrize(
    ("dtype", "routes"),
    [(torch.float32, "one kernel"), (torch.float16, "as on Hopper")],
    ids=str,
    indirect=["routes"],
)


def check_errors(ours, peer, truth, dtype):
    for i, (a, b, exact) in enumerate(zip(ours, peer, truth, strict=True)):
        assert a.dtype == b.dtype and a.shape == b.shape
        error, allowed = ((t.double() - exact).norm() / exact.norm() for t in (a, b))
        assert error <= 1.5 * allowed + FLOOR[dtype], f"{i}: {error:.1e} beside {allowed:.1e}"


def run(block, how, dtype, lora=(), **options):
    """Ours, PyTorch's in the same dtype, and in float64: outputs and gradients."""
    x = normal(2, SEQ, block.d, seed=1, dtype=dtype)
    weights, dy = block.weights(dtype), normal(2, SEQ, block.d, seed=9, dtype=dtype).detach()
    rope = block.rope(SEQ, torch.float32)
    how = {**how, "kv_heads": block.kv_heads, "rope": rope, "placement": block.placement,
           "norm": block.norm}  # fmt: skip
    given = block.updates(lora, dtype=torch.float32) if lora else []

    def exactly(t):
        return t.detach().double().requires_grad_()

    wide, wide_x = {n: exactly(t) for n, t in weights.items()}, exactly(x)
    wide_lora = [(n, exactly(a), exactly(b), scale) for n, a, b, scale in given]
    op = {**how, **options, "backend": "triton", "lora": given}
    mine = list(leaves(x, weights, given).values())
    ours = results(lambda: ops.causal_block(x, weights, block.nhead, **op), mine, dy)
    peer = results(lambda: plain(x, weights, block.nhead, **how, lora=given), mine, dy)
    truth = results(
        lambda: plain(wide_x, wide, block.nhead, **how, lora=wide_lora),
        list(leaves(wide_x, wide, wide_lora).values()),
        dy.double(),
    )
    return ours, peer, truth


@BOTH
@pytest.mark.parametrize("name", CASES)
def test_errors_are_no_larger_than_pytorchs(name, dtype, routes):
    block, how = CASES[name]
    check_errors(*run(block, how, dtype, policy="lean"), dtype)


@BOTH
def test_updates_in_float32(dtype, routes):
    check_errors(*run(LLAMA, {}, dtype, lora=("q", "v", "gate", "fc2")), dtype)


def test_rungs_have_the_same_bits_under_deterministic_mode():
    block, how = CASES["gemma"]
    torch.use_deterministic_algorithms(True)
    try:
        found = [
            run(block, how, torch.float32, policy=policy)[0] for policy in ("full", "fast", "none")
        ]
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def layer(**options):
    torch.manual_seed(0)
    options = {"kv_heads": 2, "head_dim": 8, "backend": "triton", **options}
    return FusedRematCausalLayer(24, 4, 40, **options)


@pytest.mark.parametrize(
    ("placement", "routes"),
    [("post", "one kernel"), ("sandwich", "as on Hopper")],
    indirect=["routes"],
)
def test_autocast(placement, routes):
    """Norms' weights and the stream in float32, heads' weights in float32 beside float16."""
    ours, exact = layer(placement=placement, qk_norm=True), layer(placement=placement, qk_norm=True)
    exact.double()
    x, rope = torch.randn(2, SEQ, 24), LLAMA.rope(SEQ, torch.float32)
    params, wide = list(ours.parameters()), list(exact.parameters())
    with torch.autocast("cpu", torch.float16):
        found = results(lambda: ours(x, rope), params)
        peer = results(lambda: ours.stock.forward(ours, x, *rope), params)
    truth = results(lambda: exact.stock.forward(exact, x.double(), *rope), wide)
    # Vectors together: the dozen numbers of a norm's weight are no sample.
    matrices = [i for i, t in enumerate(truth) if t.dim() > 1]
    scales = {i: t.norm() for i, t in enumerate(truth) if t.dim() == 1}

    def joined(results):
        ends = torch.cat([results[i].double() / scale for i, scale in scales.items()])
        return [*(results[i] for i in matrices), ends]

    check_errors(joined(found), joined(peer), joined(truth), torch.float16)


def test_the_gated_mlp_is_one_kernel_there_and_back():
    explained = explain(layer(), torch.randn(2, SEQ, 24))
    (block,) = explained
    steps = dict(block.forward)
    assert "gate" not in steps and "up" not in steps  # never written
    assert steps["act"] == "one kernel: product and activation"
    assert steps["qkv"] == "ATen's addmm: nothing follows that could be fused"
    assert any(step.startswith("backward output and act (one kernel") for step in block.backward)
