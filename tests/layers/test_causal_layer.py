"""`FusedRematCausalLayer`: the block, the same in ordinary PyTorch, and when which of them runs."""

import copy
import functools
import itertools
import pickle
import warnings

import pytest
import torch
from accuracy import check_error
from block_inputs import in_pieces, normal, results
from reference import EXACT_PRESETS, randomize
from reference import causal_block as plain
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformer_variations import BATCH, BLOCK, SEQ, tables

from fused_remat import (
    FusedRematCausalLayer,
    FusedRematWarning,
    Policy,
    check_replay,
    memory_report,
    ops,
)
from fused_remat.convert import set_policy
from fused_remat.graph.build import block_graph
from fused_remat.layers.causal import read_call
from fused_remat.report.allocations import SavedBytes, measure_allocations, predict_kept_bytes

LLAMA = {"kv_heads": 2, "head_dim": BLOCK.head_dim}
KINDS = {
    "llama": {},
    "qwen": {"qkv_bias": True, "qk_norm": True, "window": 3},
    "gemma": {"placement": "sandwich", "activation": "gelu_tanh", "softcap": 2.0, "qk_norm": True},
    "vit": {"norm": "layer_norm", "bias": True, "gated": False, "activation": "gelu",
            "is_causal": False, "kv_heads": 4},
    "bert": {"placement": "post", "norm": "layer_norm", "bias": True, "gated": False,
             "is_causal": False, "window": 2},
}  # fmt: skip
PADDING = torch.zeros(BATCH, SEQ, dtype=torch.bool)
PADDING[0, :2] = PADDING[1, 5:] = True
BLOCK_NAMES = {"up": "fc1", "down": "fc2"}


def make(kind="llama", dtype=torch.float64, **options):
    torch.manual_seed(0)
    given = {**LLAMA, **KINDS[kind], "dtype": dtype, **options}
    return randomize(FusedRematCausalLayer(BLOCK.d, BLOCK.nhead, BLOCK.hidden, **given))


def src(dtype=torch.float64, batch=BATCH, seq=SEQ):
    return normal(batch, seq, BLOCK.d, seed=1, dtype=dtype)


def own(layer):
    return [p for p in layer.parameters() if p.requires_grad]


def step(call, layer, x, *args, **kwargs):
    """Output and gradients from one state of torch's generator."""
    torch.manual_seed(1)
    y = call(x, *args, **kwargs)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *own(layer)])]


def assert_bits(got, expected):
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def by_block(layer):
    """The parameters by the names of `ops.causal_block`."""
    named = {}
    for name, p in layer.named_parameters():
        module, kind = name.split(".")
        named[f"{BLOCK_NAMES.get(module, module)}.{kind}"] = p
    return named


def as_op(layer):
    """What the op and plain PyTorch take for what the layer was made with."""
    window = -1 if layer.window is None else layer.window
    return {
        "kv_heads": layer.kv_heads, "is_causal": layer.is_causal, "window": (window, window),
        "softcap": layer.softcap, "placement": layer.placement, "activation": layer.activation,
        "norm": "rms_norm" if type(layer.norm1) is nn.RMSNorm else "layer_norm",
        "rope_interleaved": layer.rope_interleaved,
    }  # fmt: skip


def check_errors(ours, peer, truth, dtype):
    """`check_error`, of vectors together: the dozen numbers of a norm's weight are no sample."""
    vectors = [i for i, t in enumerate(truth) if t.dim() == 1]

    def joined(found):
        ends = [found[i].double() / truth[i].norm() for i in vectors]
        others = [t for i, t in enumerate(found) if i not in vectors]
        return [*others, torch.cat(ends).to(found[-1].dtype)]

    named = map(str, range(len(truth) - len(vectors) + 1))
    check_error(joined(ours), joined(peer), joined(truth), list(named), computed=dtype)


# --- results


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["rope", "padding", "mask"])
def test_the_layer_is_the_block_and_the_same_in_ordinary_operations(kind, given):
    layer, x = make(kind), src()
    rope = tables("whole") if given == "rope" else None
    padding = PADDING if given == "padding" else None
    mask = normal(SEQ, SEQ, seed=3) if given == "mask" else None
    leaves = [x, *own(layer), *([] if mask is None else [mask])]
    cos, sin = rope or (None, None)
    expected = results(
        lambda: plain(x, by_block(layer), BLOCK.nhead, mask, key_padding_mask=padding, rope=rope,
                      **as_op(layer)),
        leaves,
    )  # fmt: skip
    ours = results(lambda: layer(x, rope, mask, padding), leaves)
    ordinary = results(lambda: layer.stock.forward(layer, x, cos, sin, mask, padding), leaves)
    for a, b, e in zip(ours, ordinary, expected, strict=True):
        torch.testing.assert_close(a, e)
        torch.testing.assert_close(b, e)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma", "bert"])
def test_errors_are_no_larger_than_pytorchs(kind, dtype):
    layer, exact = make(kind, dtype), make(kind)
    exact.load_state_dict(layer.state_dict())
    x, (cos, sin) = src(dtype, seq=37), tables("partial", 37, torch.float32)
    dy = normal(*x.shape, seed=9, dtype=dtype).detach()
    wide = x.detach().double().requires_grad_()
    ours = results(lambda: layer(x, (cos, sin)), [x, *own(layer)], dy)
    peer = results(lambda: layer.stock.forward(layer, x, cos, sin), [x, *own(layer)], dy)
    truth = results(
        lambda: exact.stock.forward(exact, wide, cos, sin), [wide, *own(exact)], dy.double()
    )  # in float64, of tables in float32
    check_errors(ours, peer, truth, dtype)


@pytest.mark.composes("Autocast", "`FusedRematCausalLayer`, norms before, after, and both")
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma", "bert"])
def test_autocast(kind, given):
    """The stream in the dtype of the ordinary operations, errors no larger; presets bit by bit."""
    layer, exact = make(kind, torch.float32), make(kind)
    exact.load_state_dict(layer.state_dict())
    x, (cos, sin) = src(given, seq=37), tables("whole", 37, torch.float32)
    wide = x.detach().double().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        peer = results(lambda: layer.stock.forward(layer, x, cos, sin), [x, *own(layer)])
        dy = normal(*x.shape, seed=99, dtype=peer[0].dtype).detach()
        assert layer.why_not_fused(x, (cos, sin)) is None
        runs = []
        for layer.policy in EXACT_PRESETS:
            with in_pieces(40):
                runs.append(results(lambda: layer(x, (cos, sin)), [x, *own(layer)], dy))
    truth = results(
        lambda: exact.stock.forward(exact, wide, cos, sin), [wide, *own(exact)], dy.double()
    )
    check_errors(runs[0], peer, truth, torch.bfloat16)
    for other in runs[1:]:
        assert_bits(other, runs[0])


def test_dropout_is_the_blocks_and_off_in_eval():
    layer, x = make(dropout=0.3, attention_dropout=0.1), src()
    torch.manual_seed(3)
    y = layer(x)
    torch.manual_seed(3)
    seed = int(torch.empty((), dtype=torch.int64).random_())
    how = as_op(layer) | {"dropout_p": 0.3, "attention_dropout_p": 0.1, "seed": seed}
    torch.testing.assert_close(y, plain(x, by_block(layer), BLOCK.nhead, **how))
    layer.eval()
    torch.testing.assert_close(layer(x), plain(x, by_block(layer), BLOCK.nhead, **as_op(layer)))


def test_packed_sequences_are_as_if_they_were_alone():
    layer, x, cu = make(), src(batch=1), [0, 3, SEQ]
    cos, sin = tables("whole")
    dy = normal(1, SEQ, BLOCK.d, seed=9).detach()
    spans = list(itertools.pairwise(cu))
    places = torch.cat([torch.arange(b - a) for a, b in spans])
    rope = cos[places], sin[places]
    whole = results(lambda: layer(x, rope, cu_seqlens=torch.tensor(cu)), [x, *own(layer)], dy)
    sums = [torch.zeros_like(t) for t in whole]
    for a, b in spans:
        one = x.detach()[:, a:b].requires_grad_()
        alone = layer(one, (cos[: b - a], sin[: b - a]))
        sums[0][:, a:b] = alone.detach()
        dx, *grads = torch.autograd.grad(alone, [one, *own(layer)], dy[:, a:b])
        sums[1][:, a:b] = dx
        sums[2:] = [s + g for s, g in zip(sums[2:], grads, strict=True)]
    for a, b in zip(whole, sums, strict=True):
        torch.testing.assert_close(a, b)


# --- memory


@pytest.mark.parametrize(
    ("kind", "rotates"), [("llama", True), ("qwen", False), ("gemma", True), ("bert", False)]
)
def test_kept_bytes_are_predicted_and_rise_from_rung_to_rung(kind, rotates):
    layer, x = make(kind, torch.float32), src(torch.float32, batch=3, seq=30)
    rope = tables("whole", 30, torch.float32) if rotates else None
    totals = []
    for layer.policy in EXACT_PRESETS:
        call = read_call(layer, x, *(rope or (None, None)))
        shapes = {n: tuple(t.shape) for n, t in call.tensors.items() if t is not None}
        needs_grad = [n for n, t in call.tensors.items() if t is not None and t.requires_grad]
        predicted = predict_kept_bytes(
            block_graph(call.spec), layer.policy, shapes, needs_grad, 3, 30, x.dtype
        )
        total = sum(predicted.values())
        with in_pieces(64):
            with SavedBytes(exclude=[*layer.parameters(), *(rope or ())]) as saved:
                layer(x, rope)
            assert saved.total == total
            assert measure_allocations(lambda: layer(x, rope)).net == total
        totals.append(total)
    assert totals == sorted(set(totals))
    report = memory_report(layer, x, rope=rope)
    assert report.kept_bytes - (sum(t.nbytes for t in rope) if rope else 0) == totals[-1]
    assert report.predicted_bytes == totals[-1]


def test_frozen_weights_keep_nothing_for_themselves():
    layer, x = make(dtype=torch.float32, policy="none"), src(torch.float32)

    def kept():
        with SavedBytes(exclude=layer.parameters()) as saved:
            y = layer(x)
        torch.autograd.grad(y.sum(), [x, *own(layer)])
        return saved.total

    whole = kept()
    layer.requires_grad_(False)
    assert kept() <= whole
    assert [n for n, p in layer.named_parameters() if p.grad is not None] == []
    x.requires_grad_(False)
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(x)
    assert saved.total == 0


# --- what it is beside


@pytest.mark.composes("torch.compile", "`FusedRematCausalLayer`, `fullgraph=True`, dynamic shapes")
@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_compiles_as_one_dynamic_graph_bit_for_bit(kind):
    torch._dynamo.reset()
    layer, counter = make(kind, torch.float32, dropout=0.1), CompileCounterWithBackend("aot_eager")
    call = torch.compile(layer, fullgraph=True, backend=counter, dynamic=True)
    frames = set()
    for batch, seq in ((2, 7), (3, 9)):
        x, rope = src(torch.float32, batch, seq), tables("whole", seq, torch.float32)
        padding = torch.arange(seq) > torch.tensor([seq, 4, 2])[:batch, None]
        assert_bits(
            step(call, layer, x, rope, key_padding_mask=padding),
            step(layer, layer, x, rope, key_padding_mask=padding),
        )
        frames.add(counter.frame_count)
    assert len(frames) == 1  # no compilation after the first call


@pytest.mark.composes("torch.export", "`FusedRematCausalLayer`: ordinary operations")
def test_exported_and_transformed_calls_are_ordinary_operations():
    layer, x, rope = make(), src(), tables("whole")
    assert layer(x, rope).allclose(torch.export.export(layer, (x, rope)).module()(x, rope))
    params = {n: p.detach() for n, p in layer.named_parameters()}

    def loss(params):
        return torch.func.functional_call(layer, params, (x.detach(), rope)).square().sum()

    named = torch.func.grad(loss)(params)
    y = layer(x, rope).square().sum()
    for p, g in zip(own(layer), torch.autograd.grad(y, own(layer)), strict=True):
        name = next(n for n, q in layer.named_parameters() if q is p)
        torch.testing.assert_close(named[name], g)
    each = torch.vmap(layer, in_dims=(0, None))(x.detach()[:, None], rope)
    torch.testing.assert_close(each[:, 0], layer(x, rope).detach())


@pytest.mark.composes("Hugging Face", "PEFT's LoRA on `FusedRematCausalLayer`, also compiled")
def test_lora_on_its_linear_layers_is_in_the_block():
    peft = pytest.importorskip("peft")
    layer, x, rope = make(dtype=torch.float32), src(torch.float32), tables("whole")
    rope = tuple(t.float() for t in rope)
    config = peft.LoraConfig(
        r=3, lora_alpha=6, target_modules=["q", "v", "up", "down"], init_lora_weights=False
    )
    peft.inject_adapter_in_model(config, layer)
    assert layer.why_not_fused(x, rope) is None and len(own(layer)) == 8
    ours = step(layer, layer, x, rope)
    for a, b in zip(
        ours, step(functools.partial(layer.stock.forward, layer), layer, x, *rope), strict=True
    ):
        assert (a - b).norm() <= 1e-5 * b.norm()  # a hundred roundings to float32
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_bits(step(compiled, layer, x, rope), ours)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def hooked(layer):
    layer.down.register_forward_hook(lambda module, args, out: 2 * out)


def replaced(layer):
    layer.down = Doubled(BLOCK.hidden, BLOCK.d, False, dtype=torch.float64)


def another_norm(layer):
    layer.norm2 = nn.LayerNorm(BLOCK.d, dtype=torch.float64)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hooked, "down has hooks"),
        (replaced, "down is test_causal_layer.Doubled; the fused path supports torch.nn.Linear"),
        (another_norm, "norm1 is torch.nn.RMSNorm and norm2 is torch.nn.LayerNorm"),
        (lambda layer: layer.q.register_parameter("bias", nn.Parameter(torch.ones(1).double())),
         r"q.bias has shape \(1,\), expected \(24,\)"),
        (lambda layer: layer.k.float(), "x is torch.float64 on cpu but k.weight is torch.float32"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("policy", ["full", "none"])
def test_what_the_block_cannot_serve_runs_the_submodules(change, reason, policy):
    layer, x = make(policy=policy), src()
    change(layer)
    assert reason.replace("\\", "") in layer.why_not_fused(x)
    if "float32" in reason:
        with pytest.raises(RuntimeError, match="dtype"):
            layer(x)
        return
    under = "" if policy == "none" else " under torch.utils.checkpoint"
    with pytest.warns(FusedRematWarning, match=f"unfused forward{under}: {reason}"):
        got = step(layer, layer, x)
    for a, b in zip(
        got, step(functools.partial(layer.stock.forward, layer), layer, x), strict=True
    ):
        torch.testing.assert_close(a, b)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer(x)  # said once


def test_state_copies_and_pickles():
    layer, x = make("gemma", policy="lean"), src()
    assert set(layer.state_dict()) == {
        f"{n}.weight" for n in ("q", "k", "v", "proj", "gate", "up", "down", "norm1", "norm2",
                                "post1", "post2", "q_norm", "k_norm")
    }  # fmt: skip
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.policy == "lean" and torch.equal(other(x), layer(x))


def test_policies():
    model = nn.Sequential(*(make() for _ in range(2)))
    set_policy(model, "1", Policy(save={"gate", "up"}))
    assert [str(layer.policy) for layer in model] == ["full", "Policy(save={'gate', 'up'})"]
    with pytest.raises(ValueError, match="unknown activation 'post1' in Policy"):
        model[0].policy = Policy(save={"post1"})
    model[0].policy = Policy(save={"rotated"})
    with pytest.raises(ValueError, match="unknown activation 'rotated'"):
        model[0](src())  # nothing is rotated


def test_accumulates_into_main_grad():
    layer, x = make(dtype=torch.float32), src(torch.float32)
    expected = torch.autograd.grad(layer(x).sum(), own(layer))
    layer.accumulate_into = "main_grad"
    for p in own(layer):
        p.main_grad = torch.zeros_like(p)
    layer(x).sum().backward()
    for p, g in zip(own(layer), expected, strict=True):
        torch.testing.assert_close(p.main_grad, g)
        assert p.grad is None


@pytest.mark.parametrize("kind", ["llama", "gemma"])
def test_the_replay_check_passes(kind):
    layer, x = make(kind, torch.bfloat16, dropout=0.1), src(torch.bfloat16)
    with check_replay(), in_pieces(8):
        step(layer, layer, x, tables("whole", dtype=torch.float32))


# --- errors


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"kv_heads": 3}, ValueError, "got 4 and 3"),
        ({"head_dim": None, "nhead": 5, "kv_heads": 5}, ValueError, "got 5 and 12"),
        ({"norm": "batch_norm"}, ValueError, "'batch_norm'"),
        ({"placement": "both"}, ValueError, "'both'"),
        ({"activation": "sigmoid"}, ValueError, "unknown activation 'sigmoid'; valid: relu"),
        ({"activation": torch.sin}, ValueError, "unknown activation"),
        ({"window": -1}, ValueError, "got -1"),
        ({"window": (3, 0)}, ValueError, r"got \(3, 0\)"),
        ({"softcap": -2.0}, ValueError, r"got -2\.0"),
        ({"dropout": 1.5}, ValueError, r"dropout must be between 0 and 1, got 1\.5"),
        ({"attention_dropout": -1.0}, ValueError, r"attention_dropout .* got -1\.0"),
        ({"policy": "lavish"}, ValueError, "unknown policy 'lavish'"),
        ({"backend": "abacus"}, ValueError, "unknown backend 'abacus'"),
        ({"accumulate_into": "buffer"}, ValueError, "'buffer'"),
    ],
)
def test_bad_arguments(options, error, message):
    sizes = {"d_model": 12, "nhead": 4, "dim_feedforward": 20, **LLAMA}
    with pytest.raises(error, match=message):
        FusedRematCausalLayer(**sizes | options)


@pytest.mark.parametrize(
    ("x", "given", "error", "message"),
    [
        (torch.zeros(SEQ, 12), {}, ValueError, r"\(7, 12\), expected floating \(B, S, 12\)"),
        (torch.zeros(2, SEQ, 8), {}, ValueError, r"\(2, 7, 8\)"),
        (torch.zeros(2, SEQ, 12).long(), {}, ValueError, "torch.int64"),
        ([[1.0]], {}, TypeError, "got list"),
        (None, {"rope": torch.ones(SEQ, 3)}, TypeError, "rope takes two Tensors"),
        (None, {"rope": (torch.ones(SEQ, 4),) * 2}, ValueError, r"\(7, 4\), expected"),
        (None, {"attn_mask": torch.ones(3, SEQ) > 0}, ValueError, r"\(3, 7\), expected"),
        (None, {"key_padding_mask": torch.ones(2, 3) > 0}, ValueError, r"\(2, 3\), expected"),
        (None, {"key_lengths": torch.tensor([9, 1])}, ValueError, r"key_lengths\[0\] is 9"),
        (None, {"cu_seqlens": torch.tensor([0, SEQ])}, ValueError, "batch of 1"),
    ],
)
def test_bad_inputs(x, given, error, message):
    layer = make(dtype=torch.float32)
    with pytest.raises(error, match=message):
        layer(torch.zeros(2, SEQ, 12) if x is None else x, **given)


def test_settings_changed_later_count_and_bad_ones_raise():
    layer, x = make(), src()
    layer.dropout, layer.window = 1.5, 2
    with pytest.raises(ValueError, match=r"got 1\.5"):
        layer(x)
    layer.dropout, layer.window = 0.0, -1  # to a block: none
    with pytest.raises(ValueError, match=r"window .* got -1"):
        layer(x)
    layer.window = 2
    windowed = ops.causal_block(x, by_block(layer), 4, **as_op(layer))
    assert torch.equal(layer(x), windowed)
