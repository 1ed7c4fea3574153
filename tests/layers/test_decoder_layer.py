"""`FusedRematDecoderLayer` against PyTorch's own: results, dropout, memory, fallback, state."""

import copy
import pickle
import warnings

import pytest
import torch
from accuracy import check_error
from decoder_cases import MASKS, B, D, F, H, M, S, data, masks, pair, run
from reference import EXACT_PRESETS, masked_decoder
from tiers import pairwise
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from fused_remat import (
    FusedRematDecoderLayer,
    FusedRematWarning,
    Policy,
    check_replay,
    explain,
    memory_report,
    random,
)
from fused_remat.autograd import function
from fused_remat.graph.build import block_graph
from fused_remat.report.allocations import SavedBytes, measure_allocations, predict_kept_bytes
from fused_remat.spec import nn_layer_spec

WEIGHTS = nn_layer_spec(True, H, D // H, "gelu", (1e-5,) * 3).weights
NORMS = pytest.mark.parametrize("norm_first", [True, False], ids=["pre", "post"])
PRESET = pytest.mark.parametrize("policy", EXACT_PRESETS)
PIECES = pytest.mark.parametrize("tokens", [4, 512], ids=["in pieces", "whole"])


@pytest.fixture(autouse=True)
def no_fallback():
    """A call that silently took PyTorch's own forward would pass most tests here."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        warnings.filterwarnings("ignore", "Support for mismatched")
        yield


@pytest.fixture
def pieces(monkeypatch):
    """Groups of one sequence, tiles of four tokens, attention in blocks of one row."""
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", 4)
    monkeypatch.setattr("fused_remat.steps.attention_rows._BLOCK", 1)


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)  # float64, other order of sums


# --- results


@pytest.mark.parametrize(
    "kind, lengths, norm_first",
    pairwise(MASKS, [(S, M), (3, 6), (1, 4), (6, 1)], [True, False]),
)
def test_masks_and_hints_of_every_kind(kind, lengths, norm_first, pieces):
    stock, fused = pair(norm_first=norm_first, dtype=torch.float64)
    tensors = data(torch.float64, *lengths)
    kwargs = masks(kind, torch.float64, *lengths)
    assert fused.why_not_fused(*tensors[:2], **kwargs) is None
    assert_close(run(fused, *tensors, **kwargs), run(stock, *tensors, **kwargs))


@pytest.mark.parametrize("layout", ["batch first", "sequence first", "unbatched"])
@pytest.mark.parametrize("bias", [True, False])
def test_layouts(layout, bias):
    first = layout == "batch first"
    stock, fused = pair(batch_first=first, bias=bias, dtype=torch.float64)
    tensors = data()
    if layout == "unbatched":
        tensors = [t[0] for t in tensors]
    elif not first:
        tensors = [t.transpose(0, 1).contiguous() for t in tensors]
    padding = torch.arange(M) > 3 if layout == "unbatched" else torch.arange(M).expand(B, M) > 3
    kwargs = {"memory_key_padding_mask": padding}
    assert_close(run(fused, *tensors, **kwargs), run(stock, *tensors, **kwargs))
    assert fused(*tensors[:2]).stride() == stock(*tensors[:2]).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@NORMS
@PIECES
def test_error_is_at_most_one_and_a_half_times_pytorchs(dtype, norm_first, tokens, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
    stock, fused = pair(norm_first=norm_first, dtype=dtype)
    tensors, kwargs = data(dtype), masks("padding", dtype)
    exact = run(copy.deepcopy(stock).double(), *(t.double() for t in tensors), **kwargs)
    check_error(run(fused, *tensors, **kwargs), run(stock, *tensors, **kwargs), exact)


@NORMS
@PIECES
def test_every_policy_gives_the_same_bits(norm_first, tokens, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
    found = []
    for policy in (*EXACT_PRESETS, Policy(save={"query", "mid1"}), Policy(save={"kv", "act"})):
        _, fused = pair(policy, norm_first=norm_first, dropout=0.2)
        torch.manual_seed(1)
        found.append(run(fused, *data(torch.float32)))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


FROZEN = {
    "memory": ("memory",),
    "all but the cross attention": [n for n in WEIGHTS if not n.startswith("cross")],
    "the cross attention's projection, and both inputs": ("cross.weight", "tgt", "memory"),
}


@pytest.mark.parametrize("which", FROZEN)
@NORMS
def test_frozen_parts_get_no_gradient_and_the_others_the_same(which, norm_first, pieces):
    """The cross attention's packed weight is a parameter that two steps share."""
    names = FROZEN[which]
    where = {"qkv": "self_attn.in_proj_", "proj": "self_attn.out_proj.", "fc1": "linear1.",
             "cross": "multihead_attn.in_proj_", "cross_proj": "multihead_attn.out_proj.",
             "fc2": "linear2."}  # fmt: skip
    frozen = {
        where.get(n.split(".")[0], n.split(".")[0] + ".") + n.split(".")[1]
        for n in names
        if "." in n
    }
    results = []
    for layer in pair("lean", norm_first=norm_first, dtype=torch.float64):
        for name, p in layer.named_parameters():
            p.requires_grad_(name not in frozen)
        tgt, memory, dy = data()
        tgt.requires_grad_("tgt" not in names), memory.requires_grad_("memory" not in names)
        layer(tgt, memory).backward(dy)
        results.append([t.grad for t in (tgt, memory, *layer.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)  # float64, other order of sums


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("target", ["main_grad", "grad"])
def test_accumulates_into_float32(target, native, pieces, monkeypatch):
    """`native`: as on a CPU with bfloat16 products of its own, whose results are bfloat16."""
    monkeypatch.setattr("fused_remat.steps.linear.widens", lambda x: not native)
    _, fused = pair(dtype=torch.bfloat16)
    tensors, params = data(torch.bfloat16), list(fused.parameters())
    expected = run(fused, *tensors)[3:]
    for p in params:
        if target == "main_grad":
            p.main_grad = torch.ones_like(p, dtype=torch.float32)
        else:
            p.grad_dtype = torch.float32
            p.grad = torch.ones_like(p, dtype=torch.float32)
    fused.accumulate_into = target
    fused(*tensors[:2]).backward(tensors[2])
    for p, g in zip(params, expected, strict=True):
        found = getattr(p, target) - 1
        assert found.dtype is torch.float32
        if native:  # autograd's is a sum of pieces, each rounded by up to 2**-8, in two stages
            assert (found - g).norm() <= 2**-7 * found.norm()
        else:  # what autograd rounded once; 1 was added in float32
            torch.testing.assert_close(found, g.float(), rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("memory_dtype", ["of tgt", "of autocast"])
@NORMS
@pytest.mark.composes("Autocast", "the decoder layer, bfloat16 and float16, CPU")
def test_autocast(low, memory_dtype, norm_first, pieces):
    stock, fused = pair("lean", norm_first=norm_first)
    tgt, memory, dy = data(torch.float32)
    memory = memory.to(low) if memory_dtype == "of autocast" else memory
    exact = run(copy.deepcopy(stock).double(), tgt.double(), memory.double(), dy.double())
    results = []
    for layer in (fused, stock):
        leaves = [t.clone().requires_grad_() for t in (tgt, memory)]
        with torch.autocast("cpu", low):
            y = layer(*leaves)
        results.append([y.detach(), *torch.autograd.grad(y, [*leaves, *layer.parameters()], dy)])
    check_error(*results, exact, computed=low)


def test_a_function_as_activation_sees_whole_tensors(pieces):
    """Cut nowhere: also where the memory is the longer sequence."""
    slope = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))
    shapes = []

    def leaky(x):
        shapes.append(tuple(x.shape))
        return torch.where(x > 0, x, slope * x)

    stock, fused = pair(activation=leaky, dtype=torch.float64)
    tgt, memory, dy = data(memory_len=3 * S)
    grads = []
    for layer in (stock, fused):
        shapes.clear()
        y = layer(tgt, memory)
        grads.append(torch.autograd.grad(y, [slope, *layer.parameters()], dy))
        assert {s for s in shapes if s[1] != 1} == {(B, S, F)}
    assert_close(grads[1], grads[0])


@pytest.mark.parametrize(("batch", "seq_len"), [(0, 3), (2, 0)])
def test_empty_inputs(batch, seq_len):
    stock, fused = pair()
    tensors = data(torch.float32, seq_len=seq_len, batch=batch)
    for a, b in zip(run(fused, *tensors), run(stock, *tensors), strict=True):
        torch.testing.assert_close(a, b)


# --- dropout


@NORMS
@PRESET
def test_dropout_uses_the_masks_of_the_definition(norm_first, policy, pieces):
    """Against plain autograd over explicit masks: any other mask anywhere would show."""
    _, fused = pair(policy, norm_first=norm_first, dropout=0.3, dtype=torch.float64)
    for i, child in enumerate((fused.dropout, fused.dropout1, fused.dropout2, fused.dropout3)):
        child.p = 0.1 * i  # each rules its own
    fused.self_attn.dropout, fused.multihead_attn.dropout = 0.45, 0.5
    torch.manual_seed(11)
    seed = random.draw_seed(torch.device("cpu"))
    torch.manual_seed(11)
    tgt, memory, dy = data()
    got = run(fused, tgt, memory, dy)
    assert torch.equal(torch.get_rng_state(), _after_one_draw(11))
    leaves = [t.clone().requires_grad_() for t in (tgt, memory)]
    y = masked_decoder(fused, *leaves, seed)
    assert_close(got, [y.detach(), *torch.autograd.grad(y, [*leaves, *fused.parameters()], dy)])


def _after_one_draw(manual_seed):
    torch.manual_seed(manual_seed)
    random.draw_seed(torch.device("cpu"))
    return torch.get_rng_state()


def test_rate_and_independence_of_the_residual_masks_as_applied():
    """Weights that let one site through at a time show its mask."""
    layer = FusedRematDecoderLayer(32, 1, 32, dropout=0.25, batch_first=True, norm_first=True)
    x, kept = torch.randn(64, 16, 32), {}
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        for name, weights in (
            ("dropout1", layer.self_attn.out_proj), ("dropout2", layer.multihead_attn.out_proj),
            ("dropout3", layer.linear2),
        ):  # fmt: skip
            weights.bias.fill_(1.0)
            torch.manual_seed(4)
            kept[name] = ((layer(x, x) - x).flatten() > 0.5).double()
            weights.bias.zero_()
    for name, values in kept.items():  # five standard deviations
        assert abs(values.mean() - 0.75) < 5 * (0.1875 / values.numel()) ** 0.5, name
    for a, b in (("dropout1", "dropout2"), ("dropout2", "dropout3")):
        product = (kept[a] - 0.75) * (kept[b] - 0.75) / 0.1875
        assert abs(product.mean()) * product.numel() ** 0.5 < 5


def test_nothing_is_drawn_or_dropped_in_eval():
    stock, fused = pair(dropout=0.5, dtype=torch.float64)
    stock.eval(), fused.eval()
    state = torch.get_rng_state()
    assert_close(run(fused, *data()), run(stock, *data()))
    with torch.no_grad():
        torch.testing.assert_close(fused(*data()[:2]), stock(*data()[:2]))
    assert torch.equal(torch.get_rng_state(), state)


# --- memory

# Elements per token of tgt in units of D, F = 4D, and from "fast" on 2D per token of the memory.
TABLE = {
    True: {"full": 1, "lean": 3, "balanced": 5, "fast": 9, "none": 13},
    False: {"full": 1, "lean": 2, "balanced": 4, "fast": 10, "none": 14},
}


def prediction(norm_first, policy, needs_grad, dropout, compute=None, memory=torch.float32):
    spec = nn_layer_spec(norm_first, H, D // H, "gelu", (1e-5,) * 3, dropout)
    shapes = {"qkv.weight": (3 * D, D), "proj.weight": (D, D), "cross.weight": (3 * D, D),
              "cross_proj.weight": (D, D), "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D),
              "input": (D,), "memory": (B, M, D)}  # fmt: skip
    graph = block_graph(spec)
    given = (graph, policy, shapes, needs_grad, B, S, torch.float32, compute)
    return predict_kept_bytes(*given, input_dtypes={"memory": memory})


def measured(layer, tgt, memory):
    """By saved-tensor hooks, and by live storages: less the output, plus the inputs."""
    with SavedBytes(exclude=layer.parameters()) as saved:
        y = layer(tgt, memory)
    del y
    live = measure_allocations(lambda: layer(tgt, memory)).net - tgt.nbytes
    return saved.total, live + tgt.nbytes + memory.nbytes


@pytest.mark.parametrize(
    "norm_first, policy, dropout, tokens",
    pairwise([True, False], list(EXACT_PRESETS), [0.0, 0.1], [4, 512]),
)
def test_kept_bytes_are_the_table_and_the_prediction(
    norm_first, policy, dropout, tokens, monkeypatch
):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
    _, layer = pair(policy, dim_feedforward=4 * D, norm_first=norm_first, dropout=dropout)
    tgt, memory, _ = (t.requires_grad_() for t in data(torch.float32))
    attentions = 0 if policy == "full" or (not norm_first and policy == "lean") else 2
    kept = TABLE[norm_first][policy] * S + (3 if policy in ("fast", "none") else 1) * M
    table = 4 * B * (kept * D + S * (6 + attentions * H)) + (8 if dropout else 0)
    predicted = sum(prediction(norm_first, policy, ("input", "memory", *WEIGHTS), dropout).values())
    assert predicted == table
    assert measured(layer, tgt, memory) == (predicted, predicted)


@NORMS
@pytest.mark.parametrize("low", [torch.float32, torch.bfloat16], ids=str)
def test_kept_bytes_under_autocast(norm_first, low):
    """Products in 16 bits, the stream in 32; no copies of weights, nor of the memory in `low`."""
    _, layer = pair("fast", dim_feedforward=4 * D, norm_first=norm_first, dropout=0.1)
    tgt, memory, _ = (t.requires_grad_() for t in data(torch.float32))
    memory = memory.detach().to(low).requires_grad_()
    with SavedBytes(exclude=layer.parameters()) as saved, torch.autocast("cpu", torch.bfloat16):
        layer(tgt, memory)
    needs_grad = ("input", "memory", *WEIGHTS)
    predicted = prediction(norm_first, "fast", needs_grad, 0.1, torch.bfloat16, low)
    assert saved.total == sum(predicted.values())
    with torch.autocast("cpu", torch.bfloat16):
        row = memory_report(layer, tgt, memory).layers[0]
    found = {a.name: (a.bytes, a.predicted) for a in row.activations}
    assert found["memory"] == (memory.nbytes, memory.nbytes)


def test_kept_bytes_with_everything_frozen_but_the_cross_attention():
    _, layer = pair("fast", dim_feedforward=4 * D, norm_first=True)
    for name, p in layer.named_parameters():
        p.requires_grad_("multihead_attn" in name)
    needs_grad = [n for n in WEIGHTS if n.startswith("cross")]
    predicted = prediction(True, "fast", needs_grad, 0.0)
    assert not {"qkv", "attn", "input", "norm1.mean"} & {*predicted}
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(*data(torch.float32)[:2])
    assert saved.total == sum(predicted.values())


@NORMS
def test_a_fraction_of_what_the_stock_layer_keeps(norm_first):
    totals = []
    for layer in pair(norm_first=norm_first, dim_feedforward=4 * D):
        with SavedBytes(exclude=layer.parameters()) as saved:
            layer(*(t.requires_grad_() for t in data(torch.float32)[:2]))
        totals.append(saved.total)
    assert totals[1] <= totals[0] / 8


@pytest.mark.composes("Replay check", "the decoder layer")
def test_the_replay_check_passes_and_sees_a_changed_memory(pieces):
    _, fused = pair("fast", dropout=0.1)
    tgt, memory, _ = data(torch.float32)
    with check_replay():
        fused(tgt, memory).sum().backward()
        y = fused(tgt, memory)
    memory.data[1, 2, 3] += 1
    with pytest.raises(RuntimeError, match=r"'memory' differs at \(index 1, 2, 3"):
        y.sum().backward()


def test_explain_names_the_steps():
    _, fused = pair("balanced", norm_first=True)
    (block,) = explain(fused, *data(torch.float32)[:2])
    assert block.title.startswith("decoder_prenorm") and "cross" in block.kept
    assert {"query", "kv"} <= dict(block.forward).keys() and "compute kv" in block.backward


# --- what else a drop-in is


def test_parameters_state_and_constructor_are_the_stock_layers():
    for options in ({}, {"bias": False, "norm_first": True, "activation": "gelu"}):
        torch.manual_seed(0)
        stock = nn.TransformerDecoderLayer(16, 2, 32, **options)
        torch.manual_seed(0)
        fused = FusedRematDecoderLayer(16, 2, 32, **options, policy="fast")
        assert list(fused.state_dict()) == list(stock.state_dict())
        assert [n for n, _ in fused.named_children()] == [n for n, _ in stock.named_children()]
        for a, b in zip(fused.parameters(), stock.parameters(), strict=True):
            assert torch.equal(a, b)
    for other in (copy.deepcopy(fused), pickle.loads(pickle.dumps(fused))):
        assert other.policy == "fast" and isinstance(other, nn.TransformerDecoderLayer)
    assert FusedRematDecoderLayer.from_layer(stock).linear1 is stock.linear1
    with pytest.raises(TypeError, match=r"nn\.TransformerDecoderLayer, got Linear"):
        FusedRematDecoderLayer.from_layer(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="valid names: norm1, qkv, attn, mid1"):
        fused.policy = Policy(save={"sum1"})


def _change(**attributes):
    def change(layer):
        for name, make in attributes.items():
            setattr(layer, name, make(layer))

    return change


def _doubled(layer):
    return lambda x, *args: 2 * type(layer)._mha_block(layer, x, *args)


def _two_heads(layer):
    return nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64)


#: A change of the layer, by the reason that it gives.
FALLBACKS = {
    "multihead_attn has hooks": lambda layer: layer.multihead_attn.register_forward_hook(
        lambda *_: None
    ),
    "norm3 is torch.nn.RMSNorm; the fused path supports": _change(
        norm3=lambda _: nn.RMSNorm(D, dtype=torch.float64)
    ),
    "FusedRematDecoderLayer._mha_block is overridden": _change(_mha_block=_doubled),
    "multihead_attn differs from self_attn in num_heads": _change(multihead_attn=_two_heads),
}


@pytest.mark.parametrize("reason", FALLBACKS)
def test_fallback_under_checkpoint_with_one_warning(reason):
    stock, fused = pair(dtype=torch.float64)
    for layer in (stock, fused):
        FALLBACKS[reason](layer)
    fused.load_state_dict(stock.state_dict())
    with pytest.warns(FusedRematWarning, match=f"checkpoint: {reason}") as seen:
        got = run(fused, *data())
    assert len(seen) == 1 and seen[0].filename.endswith("reference.py")
    assert_close(got, run(stock, *data()))
    run(fused, *data())  # no second warning: they are errors here
    with SavedBytes(exclude=fused.parameters()) as saved:
        fused(*(t.requires_grad_() for t in data()[:2]))
    assert saved.total <= 2 * sum(t.nbytes for t in data()[:2])


@pytest.mark.parametrize(
    ("shapes", "kwargs"),
    [
        (((B, S, D), (B + 1, M, D)), {}),
        (((B, S, D), (M, D)), {}),
        (((B, S, D), (B, M, D + 1)), {}),
        (((B, S, D), (B, M, D)), {"memory_mask": torch.zeros(S, S)}),
        (((B, S, D), (B, M, D)), {"memory_mask": torch.zeros(1), "memory_is_causal": True}),
        (((B, S, D), (B, M, D)), {"memory_key_padding_mask": torch.zeros(B, S)}),
        (((B, S, D), (B, M, D)), {"memory_is_causal": True}),
        (((B, S, D), (B, M, D)), {"tgt_mask": torch.zeros(M, S)}),
    ],
)
@pytest.mark.filterwarnings("ignore::fused_remat.FusedRematWarning")
def test_bad_input_raises_what_pytorch_raises(shapes, kwargs):
    errors = []
    for layer in pair():
        with pytest.raises(Exception) as caught:
            layer(*map(torch.randn, shapes), **kwargs)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_mutation_and_double_backward_raise():
    _, fused = pair()
    tgt, memory, _ = data(torch.float32)
    y = fused(tgt, memory)
    memory.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    tgt.requires_grad_()
    (dx,) = torch.autograd.grad(fused(tgt, memory).square().sum(), tgt, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward"):
        dx.sum().backward()


# --- operators


@pytest.mark.composes("torch.compile", "the decoder layer, dropout, sizes dynamic")
def test_compile_fullgraph_bit_for_bit():
    torch._dynamo.reset()
    _, fused = pair("fast", norm_first=True, dropout=0.1)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fused, fullgraph=True, backend=counter, dynamic=True)
    frames = set()
    for lengths in ((S, M), (6, 200)):  # the second is two groups in eager mode
        results = []
        for layer in (fused, compiled):
            tgt, memory, dy = data(torch.float32, *lengths)
            tgt.requires_grad_(), memory.requires_grad_()
            torch.manual_seed(1)
            y = layer(tgt, memory)
            leaves = [tgt, memory, *fused.parameters()]
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        frames.add(counter.frame_count)
    assert len(frames) == 1  # no compilation after the first call


def test_operators_are_the_block_in_pieces_and_pass_opcheck(pieces, monkeypatch):
    _, fused = pair("none", norm_first=True, dropout=0.1, batch_first=False)
    tensors = [t.transpose(0, 1) for t in data(torch.float32)]
    torch.manual_seed(1)
    expected = run(fused, *tensors)
    monkeypatch.setattr(function, "_chosen_by_operator", lambda: True)
    torch.manual_seed(1)
    seen, forward = [], torch.ops.fused_remat.decoder_prenorm.default

    class Observer(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is forward:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Observer():
        got = run(fused, *tensors)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    ((given, text),) = seen
    leaves = [t.detach().requires_grad_(t.requires_grad) for t in given]
    torch.library.opcheck(forward, (leaves, text))


def test_torch_func_and_export_are_pytorchs_own():
    stock, fused = pair(dtype=torch.float64)
    tgt, memory, _ = data()

    def loss(layer):
        return lambda params: torch.func.functional_call(layer, params, (tgt, memory)).sum()

    grads = [
        torch.func.grad(loss(layer))(dict(layer.named_parameters())) for layer in (stock, fused)
    ]
    assert_close(grads[1].values(), grads[0].values())
    program = torch.export.export(fused.eval(), (tgt, memory)).module()
    torch.testing.assert_close(program(tgt, memory), stock.eval()(tgt, memory))
