"""Under `torch.autocast`: the fused path, in its dtypes, keeping what the graph says."""

import contextlib
import warnings
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accuracy import check_error
from reference import EXACT_PRESETS, masked_encoder, pair, run
from tiers import pairwise
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat import FusedRematLayer, explain, memory_report, ops
from fused_remat.execution.executor import autocast_on
from fused_remat.execution.observe import TRACERS
from fused_remat.graph.build import block_graph, dropout_add_graph
from fused_remat.graph.precision import mixed_precision
from fused_remat.layers import FusedRematWarning
from fused_remat.layers.precision import precision_of, why_not_autocast
from fused_remat.report import saved
from fused_remat.report.allocations import SavedBytes, measure_allocations, predict_kept_bytes
from fused_remat.spec import nn_layer_spec

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
LOW = pytest.mark.parametrize("low", [BF16, FP16], ids=["bf16", "fp16"])
NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
PRESET = pytest.mark.parametrize("policy", EXACT_PRESETS)
SIZES = {"d_model": 24, "nhead": 3, "dim_feedforward": 40, "batch_first": True}
FLOOR = {low: 4 * torch.finfo(low).eps for low in (BF16, FP16)}  # four roundings


@pytest.fixture(autouse=True)
def no_fallback():
    """A call that silently took PyTorch's own forward would pass most tests here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        yield


def autocast(low, enabled=True):
    return torch.autocast("cpu", low, enabled=enabled)


def layers(policy="full", **kwargs):
    return pair(**{**SIZES, "dropout": 0.0, "activation": "gelu", **kwargs}, policy=policy)


def data(batch=3, seq_len=11, width=24):
    return torch.randn(2, batch, seq_len, width, generator=torch.Generator().manual_seed(1))


def step(layer, x, dy, low, **kwargs):
    """`reference.run` with the forward under autocast and the backward outside."""
    x = x.detach().clone().requires_grad_()
    with autocast(low):
        y = layer(x, **kwargs)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    leaves += [m for m in kwargs.values() if isinstance(m, torch.Tensor) and m.requires_grad]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]


# --- results


@pytest.mark.composes("Autocast", "forward and backward of the layer, bfloat16 and float16, CPU")
@LOW
@NORMS
@pytest.mark.parametrize("masks", ["none", "float masks with gradients", "causal and padding"])
def test_errors_are_those_of_the_stock_layer(low, norm_first, masks):
    stock, fused = layers(norm_first=norm_first)
    x, dy = data()
    kwargs = {}
    if masks == "float masks with gradients":
        kwargs["src_mask"] = torch.randn(9, 11, 11).requires_grad_()
        kwargs["src_key_padding_mask"] = torch.randn(3, 11).requires_grad_()
    elif masks == "causal and padding":
        kwargs["src_mask"] = torch.ones(11, 11).triu(1).bool()
        kwargs["src_key_padding_mask"] = torch.arange(11) >= torch.tensor([[11], [7], [3]])
    found, theirs = step(fused, x, dy, low, **kwargs), step(stock, x, dy, low, **kwargs)
    double = {k: m if m.dtype == torch.bool else m.detach().double() for k, m in kwargs.items()}
    for mask in double.values():
        mask.requires_grad_(mask.is_floating_point())
    check_error(found, theirs, run(stock.double(), x.double(), dy.double(), **double), computed=low)


@LOW
@NORMS
def test_dropout_is_that_of_the_seed(low, norm_first):
    """The mask's bits are not PyTorch's: the yardstick is the block with these masks."""
    from fused_remat import random

    _, fused = layers(norm_first=norm_first, dropout=0.2)
    x, dy = data()
    torch.manual_seed(5)
    found = step(fused, x, dy, low)
    torch.manual_seed(5)
    seed = random.draw_seed(x.device)

    def reference(layer, x, dy, context):
        x = x.detach().clone().requires_grad_()
        with context:
            y = masked_encoder(layer, x, seed)
        return [y.detach(), *torch.autograd.grad(y, [x, *layer.parameters()], dy)]

    theirs = reference(fused, x, dy, autocast(low))
    exact = reference(fused.double(), x.double(), dy.double(), contextlib.nullcontext())
    check_error(found, theirs, exact, computed=low)


@pytest.mark.parametrize("low, norm_first, tokens", pairwise([BF16, FP16], [True, False], [7, 512]))
def test_rungs_have_the_same_bits(low, norm_first, tokens, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
    x, dy = data()
    kwargs = {"src_mask": torch.ones(11, 11).triu(1).bool(), "is_causal": True}
    first = None
    for policy in EXACT_PRESETS:
        _, fused = layers(policy, norm_first=norm_first, dropout=0.1)
        torch.manual_seed(3)
        found = step(fused, x, dy, low, **kwargs)
        first = first or found
        assert all(torch.equal(a, b) for a, b in zip(found, first, strict=True))


@NORMS
def test_pieces_add_up(norm_first, monkeypatch):
    """Weight gradients are summed over pieces in float32: pieces differ by less than a rounding."""
    x, dy = data()
    found = []
    for tokens in (7, 512):
        monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
        found.append(step(layers(norm_first=norm_first)[1], x, dy, BF16))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= FLOOR[BF16] * b.norm()


# --- dtypes


def dtypes_of(layer, x, low):
    with autocast(low):
        y = layer(x.clone().requires_grad_())
    leaves = [p for p in layer.parameters()]
    grads = torch.autograd.grad(y.sum(), leaves)
    return [y.dtype, *(g.dtype for g in grads)]


@pytest.mark.parametrize(
    "low, norm_first, src, weights",
    pairwise(
        [BF16, FP16], [True, False], [FP32, BF16, FP16, FP64], [FP32, BF16, FP64, "low products"]
    ),
)
def test_dtypes_and_refusals_are_those_of_the_stock_layer(low, norm_first, src, weights):
    stock, fused = layers(norm_first=norm_first)
    for layer in (stock, fused):
        for module in layer.modules():
            if weights != "low products":
                module.to(weights)
            elif isinstance(module, nn.Linear):
                module.to(FP16)
    x = data()[0].to(src)
    try:
        expected = dtypes_of(stock, x, low)
    except RuntimeError as error:
        with autocast(low), pytest.raises(RuntimeError) as raised:
            fused(x)
        assert str(raised.value)[:30] == str(error)[:30]
        return
    assert dtypes_of(fused, x, low) == expected
    with autocast(low):
        assert fused.why_not_fused(x) is None


@pytest.mark.parametrize("weights", [FP32, BF16], ids=str)
@pytest.mark.parametrize(
    ("src", "low", "norm_first", "stream"),
    [
        (FP32, BF16, True, FP32), (FP32, FP16, False, FP32), (BF16, BF16, True, BF16),
        (BF16, BF16, False, FP32), (FP16, BF16, True, FP32), (BF16, FP16, False, FP32),
    ],
    ids=str,
)  # fmt: skip
def test_dtypes_on_cuda(src, low, norm_first, stream, weights):
    """Norms give float32 there; `tests/backend/test_layers.py` asks the stock layer itself."""
    with FakeTensorMode(), torch.device("cuda"):
        x = torch.empty(2, 5, 24, dtype=src)
        params = {"norm1.weight": torch.empty(24, dtype=weights), "norm1.bias": None}
        assert why_not_autocast(x, "src", params, low) is None
        assert precision_of(x, params, low, norm_first).stream == stream


@LOW
@NORMS
@pytest.mark.parametrize("other", [False, True], ids=["autocast's dtype", "the other one"])
def test_a_low_precision_src(low, norm_first, other):
    """As the stock layer on CPU: in autocast's own dtype it stays, in another it is widened."""
    stock, fused = layers(norm_first=norm_first)
    src = {BF16: FP16, FP16: BF16}[low] if other else low
    x, dy = (t.to(src) for t in data())
    found, theirs = step(fused, x, dy, low), step(stock, x, dy, low)
    assert found[0].dtype == (FP32 if other else low)
    check_error(found, theirs, run(stock.double(), x.double(), dy.double()), computed=low)


def test_everything_in_autocasts_dtype_is_the_plain_block():
    _, fused = layers(dtype=BF16)
    x, dy = data().bfloat16()
    plain, inside = run(fused, x, dy), step(fused, x, dy, BF16)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


def test_autocast_off_inside_is_off():
    _, fused = layers()
    x, dy = data()
    plain = run(fused, x, dy)
    with autocast(BF16), autocast(BF16, enabled=False):
        inside = run(fused, x, dy)
    assert all(torch.equal(a, b) for a, b in zip(plain, inside, strict=True))


# --- backward


@pytest.mark.composes("Autocast", "backward inside autocast, outside, or under another dtype's")
@NORMS
@pytest.mark.parametrize("activation", ["gelu", nn.Linear(40, 40)], ids=["gelu", "a linear layer"])
def test_backward_is_forwards_whatever_autocast_is_on(norm_first, activation):
    _, fused = layers(norm_first=norm_first, dropout=0.1, activation=activation)
    x, dy = data()
    expected = None
    for context in (
        contextlib.nullcontext(), autocast(BF16), autocast(FP16), autocast(BF16, enabled=False)
    ):  # fmt: skip
        torch.manual_seed(2)
        with autocast(BF16):
            y = fused(x)
        with context:
            grads = torch.autograd.grad(y, list(fused.parameters()), dy)
        expected = expected or grads
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_autocast_around_a_plain_forwards_backward_changes_nothing():
    _, fused = layers()
    x, dy = data()
    y = fused(x)
    expected = torch.autograd.grad(y, list(fused.parameters()), dy, retain_graph=True)
    with autocast(BF16):
        found = torch.autograd.grad(y, list(fused.parameters()), dy)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@NORMS
@pytest.mark.parametrize("policy", ["full", "fast"])
@pytest.mark.parametrize("wanted", ["linear1", "norm", "self_attn.in_proj_bias", "nothing"])
def test_frozen_parameters(norm_first, policy, wanted):
    """What is wanted has the gradient that it has when everything is; the rest has none."""
    _, fused = layers(policy, norm_first=norm_first)
    x, dy = data()
    with autocast(BF16):
        y = fused(x)
    names = [n for n, _ in fused.named_parameters() if n.startswith(wanted)]
    whole = torch.autograd.grad(y, [fused.get_parameter(n) for n in names], dy) if names else ()
    for name, p in fused.named_parameters():
        p.requires_grad_(name in names)
    given = x.clone().requires_grad_(not names)
    with autocast(BF16):
        y = fused(given)
    y.backward(dy)
    for name, expected in zip(names, whole, strict=True):
        assert torch.equal(fused.get_parameter(name).grad, expected)
    assert (given.grad is None) == bool(names)


def test_outer_checkpoint_runs_the_block_again_in_the_same_dtypes():
    from torch.utils.checkpoint import checkpoint

    _, fused = layers(dropout=0.1)
    x, dy = data()
    found = []
    for wrap in (lambda f, t: f(t), lambda f, t: checkpoint(f, t, use_reentrant=False)):
        torch.manual_seed(2)
        with autocast(BF16):
            y = wrap(fused, x)
        found.append(torch.autograd.grad(y, list(fused.parameters()), dy))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# --- the caller's own activation


class Learned(nn.Module):
    """Has a product (autocast's dtype), and a sum with a float32 parameter (which promotes).

    Smooth: at a kink, a rounding decides between two gradients.
    """

    def __init__(self):
        super().__init__()
        self.linear, self.shift = nn.Linear(40, 40), nn.Parameter(torch.randn(40))

    def forward(self, x):
        assert torch.is_autocast_enabled("cpu") and x.dtype == torch.get_autocast_dtype("cpu")
        return self.linear(x).tanh() + self.shift


@pytest.mark.composes("Autocast", "an activation function or module of the caller's own")
@LOW
@pytest.mark.parametrize("policy", ["full", "none"])
def test_an_unknown_activation_sees_autocast_in_forward_and_rebuild(low, policy):
    torch.manual_seed(0)
    own = Learned()
    stock, fused = layers(policy, activation=own)
    stock.activation = fused.activation = own
    x, dy = data()
    found, theirs = step(fused, x, dy, low), step(stock, x, dy, low)

    class Exact(Learned):
        def forward(self, x):
            return self.linear(x).tanh() + self.shift

    exact = Exact()
    exact.load_state_dict(own.state_dict())
    stock.activation = exact
    stock.double()
    truth = run(stock, x.double(), dy.double())
    own.float()
    check_error(found, theirs, truth, computed=low)


def test_float64_is_left_alone():
    stock, fused = layers(dtype=FP64, activation=torch.sin)
    x, dy = data().double()
    found = step(fused, x, dy, BF16)
    for a, b in zip(found, step(stock, x, dy, BF16), strict=True):
        torch.testing.assert_close(a, b)
    assert all(torch.equal(a, b) for a, b in zip(found, run(fused, x, dy), strict=True))


# --- memory

# Bytes per token in units of D, F = 4D, float32 stream and 16-bit compute, besides statistics.
TABLE = {
    True: {"full": 4, "lean": 6, "balanced": 10, "fast": 16, "none": 24},
    False: {"full": 4, "lean": 8, "balanced": 10, "fast": 20, "none": 28},
}
KEEPS_ATTENTION = {True: EXACT_PRESETS[1:], False: EXACT_PRESETS[2:]}
B, S, D, H = 3, 100, 48, 4
WANTS = (*nn_layer_spec(True, H, D // H, "relu").weights, "input")
SHAPES = {
    "input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D), "fc1.weight": (4 * D, D),
    "fc2.weight": (D, 4 * D),
}  # fmt: skip


def kept(policy, norm_first, dropout=0.0, dtype=FP32, compute=BF16):
    graph = block_graph(nn_layer_spec(norm_first, H, D // H, "relu", dropout=dropout))
    return predict_kept_bytes(graph, policy, SHAPES, WANTS, B, S, dtype, compute)


@pytest.mark.composes("Autocast", "bytes kept: 4/6/10/16/24·D pre-norm, no copies of the weights")
@NORMS
@PRESET
def test_kept_bytes(norm_first, policy, monkeypatch):
    """By the table, the prediction, hooks on saved tensors, and what is alive after forward.

    With dropout, in groups and tiles.
    """
    dropout = 0.1
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", 64)
    layer = FusedRematLayer(
        D, H, 4 * D, dropout, norm_first=norm_first, batch_first=True, policy=policy
    )
    x = torch.randn(B, S, D, requires_grad=True)
    statistics = 16 + (4 * H if policy in KEEPS_ATTENTION[norm_first] else 0)
    table = B * S * (TABLE[norm_first][policy] * D + statistics) + 8
    assert sum(kept(policy, norm_first, dropout).values()) == table
    with autocast(BF16):
        with SavedBytes(exclude=layer.parameters()) as hooks:
            y = layer(x)
        del y
        alive = measure_allocations(lambda: layer(x)).net  # with the output, without the input
    assert (hooks.total, alive) == (table, table)
    if policy == "lean":
        with autocast(BF16):
            report = memory_report(layer, x)
        assert (report.kept_bytes, report.predicted_bytes) == (table, table)


@NORMS
def test_a_low_precision_stream_keeps_two_bytes_an_element(norm_first):
    layer = FusedRematLayer(D, H, 4 * D, 0.0, norm_first=norm_first, batch_first=True)
    x = torch.randn(B, S, D, dtype=BF16, requires_grad=True)
    with autocast(BF16), SavedBytes(exclude=layer.parameters()) as hooks:
        layer(x)
    assert hooks.total == sum(kept("full", norm_first, dtype=BF16).values()) == B * S * (2 * D + 16)


def test_the_graph_tells_every_dtype():
    """What a fake implementation of the op allocates from."""
    for norm_first in (True, False):
        graph = block_graph(nn_layer_spec(norm_first, H, D // H, "relu", dropout=0.1))
        assert set(graph.dtypes(BF16).values()) == {BF16, FP32}
        low = mixed_precision(graph, FP16)
        assert mixed_precision(graph, FP16) is low and low.names == graph.names
        stream = {name for name, dtype in low.dtypes(FP32).items() if dtype == FP32}
        sums = {"mid"} if norm_first else {"sum1", "mid", "sum2"}
        stats = {stat for node in graph.nodes for stat in node.stats}
        assert stream - stats == {"input", "output"} | sums


@NORMS
def test_what_is_kept_has_the_dtypes_and_widths_that_are_told(norm_first, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", 7)
    _, fused = layers("none", norm_first=norm_first, dropout=0.1)
    seen = []
    monkeypatch.setattr("fused_remat.autograd.function.OBSERVERS", [seen.append])
    with autocast(BF16):
        fused(data()[0])
    (invocation,) = seen
    execution = invocation.execution
    elements = dict.fromkeys(execution.plan.kept, 0)
    for name, t in saved._block_tensors(invocation):
        if name in execution.dtypes:
            assert t.dtype == execution.dtypes[name], name
        if name in elements:
            elements[name] += t.numel()
    assert elements == {name: 33 * execution.widths[name] for name in elements}


@NORMS
@pytest.mark.parametrize("tokens", [7, 512], ids=["tiles", "whole"])
def test_gradients_have_the_dtypes_of_what_they_are_of(norm_first, tokens, monkeypatch):
    """Before every step: of the stream in float32, of all else low."""
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
    wrong, seen = [], set()

    def look(step, frame):
        for name, (grad, _) in frame.grads.items():
            seen.add(name)
            if grad.dtype != frame.owner.execution.dtypes[name]:
                wrong.append((str(step), name, grad.dtype))

    TRACERS.append(look)
    try:
        step(layers(norm_first=norm_first)[1], *data(), BF16)
    finally:
        TRACERS.remove(look)
    assert not wrong and {"mid", "attn", "up", "input"} <= seen


def test_what_an_activation_captures_is_not_copied_for_good():
    """Autocast's own cache would hold a copy of its weight until the outermost autocast ends."""
    _, fused = layers(activation=nn.Linear(40, 40), dim_feedforward=40)
    x = data()[0].requires_grad_()
    with autocast(BF16):
        alive = measure_allocations(lambda: fused(x)).net
    assert alive == x.nbytes + 4 * 4 * 33  # the output, four statistics a token


@NORMS
def test_evaluation_without_gradients(norm_first):
    """With a mask, which PyTorch's kernel cannot be trusted with; without, it is PyTorch's own."""
    stock, fused = layers(norm_first=norm_first)
    x, mask = data()[0], torch.ones(11, 11).triu(1).bool()
    for kwargs in ({}, {"src_mask": mask}):
        expected = stock(x, **kwargs)
        with torch.no_grad(), autocast(BF16):
            found = fused.eval()(x, **kwargs)
        assert found.dtype == expected.dtype
        assert (found - expected).norm() <= FLOOR[BF16] * expected.norm()


def test_a_block_with_one_step_in_both_dtypes_is_refused():
    with pytest.raises(NotImplementedError, match="dropout_add cannot run under autocast"):
        mixed_precision(dropout_add_graph(0.0), BF16)


# --- what surrounds a layer


def losses(model, low, scaler=None, spoil=1.0, steps=20):
    """Of fitting fixed targets with SGD; the sixth loss is multiplied by `spoil`."""
    torch.manual_seed(1)
    x, target = torch.randn(2, 2, 6, 24)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = scaler or torch.amp.GradScaler("cpu", enabled=False)
    found = []
    for i in range(steps):
        optimizer.zero_grad()
        with autocast(low):
            loss = F.mse_loss(model(x).float(), target)
        scaler.scale(loss * spoil if i == 5 else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.detach())
    return torch.stack(found)


def encoders(norm_first):
    stock, fused = layers(norm_first=norm_first)
    made = [nn.TransformerEncoder(x, 2, enable_nested_tensor=False) for x in (stock, fused)]
    made[1].load_state_dict(made[0].state_dict())
    return made


@pytest.mark.composes("Autocast", "training of `nn.TransformerEncoder` follows the stock layers")
@pytest.mark.parametrize(("low", "norm_first"), [(BF16, True), (FP16, False)], ids=str)
def test_training_follows_the_stock_layers(low, norm_first):
    stock, fused = (losses(model, low) for model in encoders(norm_first))
    # Roundings of two orders of summation, in 20 steps of the same path.
    torch.testing.assert_close(fused, stock, rtol=4 * torch.finfo(low).eps, atol=0.0)
    assert fused[-1] < 0.9 * fused[0]


@pytest.mark.composes("Autocast", "`torch.amp.GradScaler`: steps with inf or nan are skipped")
@NORMS
def test_grad_scaler_skips_and_recovers_as_with_the_stock_layers(norm_first):
    found, scales = [], []
    for model in encoders(norm_first):
        before = [p.detach().clone() for p in model.parameters()]
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        losses(model, FP16, scaler, steps=1)  # gradients overflow
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        assert scaler.get_scale() == 2.0**39
        scaler.update(2.0**8)
        found.append(losses(model, FP16, scaler, spoil=torch.nan))
        scales.append(scaler.get_scale())
    assert scales == [2.0**7, 2.0**7]
    stock, fused = found
    torch.testing.assert_close(fused, stock, rtol=4 * torch.finfo(FP16).eps, atol=0.0)
    assert fused[5] == fused[6] and fused[-1] < 0.9 * fused[0]


def test_explain_says_the_dtypes():
    _, fused = layers(norm_first=True)
    with autocast(BF16):
        (block,) = explain(fused, data()[0])
    assert "products in bfloat16, stream in float32" in block.title and not block.reason
    steps = dict(block.forward)
    assert "rounded to bfloat16" in steps["norm1"]
    assert "added to the residual in the stream's dtype" in steps["mid"]


def test_what_autocast_does_not_convert_falls_back_with_a_reason():
    _, fused = layers()
    x = data()[0]
    with autocast(BF16):
        fused.norm1.to(BF16)
        assert "norms' parameters are torch.bfloat16" in fused.why_not_fused(x)
        fused.norm1.float()
        fused.linear1.double()
        assert "leaves linear1.weight torch.float64" in fused.why_not_fused(x)
        assert "but self_attn.in_proj_weight is not" in fused.why_not_fused(x.double())
    meta = torch.empty(1, device="meta")
    assert "on meta is on" in why_not_autocast(meta, "src", {}, BF16)


def test_ops_work_in_the_dtype_of_their_input():
    shapes = {"qkv": (72, 24), "proj": (24, 24), "fc1": (40, 24), "fc2": (24, 40)}
    weights = {f"{k}.weight": torch.randn(s) / 5 for k, s in shapes.items()}
    x = data()[0]
    plain = ops.encoder_block(x, weights, 3)
    with autocast(BF16):
        assert torch.equal(ops.encoder_block(x, weights, 3), plain)


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu"])
def test_autocast_of_every_device_is_seen(kind):
    x = SimpleNamespace(device=torch.device(kind), is_cpu=kind == "cpu", is_cuda=kind == "cuda")
    before = torch.is_autocast_enabled(kind)
    assert autocast_on(x) == before
    torch.set_autocast_enabled(kind, True)
    try:
        assert autocast_on(x)
    finally:
        torch.set_autocast_enabled(kind, before)
