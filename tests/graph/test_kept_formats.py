"""Blocks that keep quantized activations: bits of forward, errors of gradients, bytes, uses."""

import copy
from collections import Counter

import pytest
import torch
from block_inputs import same_bits
from reference import randomize, run
from tiers import exhaustive
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from bench.commands.formats import SHAPES, errors, names_of
from fused_remat import (
    FusedRematCausalLayer,
    FusedRematDecoderLayer,
    FusedRematLayer,
    Policy,
    check_replay,
    formats,
    ops,
)
from fused_remat.autograd import function
from fused_remat.formats import FORMATS, Format
from fused_remat.graph.build import block_graph
from fused_remat.graph.quantized import in_formats
from fused_remat.graph.schedule import schedule
from fused_remat.policies import LOSSY_PRESETS
from fused_remat.report.allocations import AllocationTrace, SavedBytes
from fused_remat.report.saved import _predicted
from fused_remat.spec import nn_layer_spec

B, S, D, H = 3, 40, 48, 4
GELU = nn_layer_spec(True, H, D // H, "gelu")


def built(cls, *sizes, **options):
    torch.manual_seed(0)
    return randomize(cls(*sizes, **options))


def encoder(policy="full", dropout=0.0, **options):
    options = {"activation": "gelu", "norm_first": True, "batch_first": True, **options}
    return built(FusedRematLayer, D, H, 4 * D, dropout, policy=policy, **options)


def causal(policy="full", dropout=0.0, **options):
    options |= {"kv_heads": 2, "policy": policy}
    return built(FusedRematCausalLayer, D, H, 3 * D, dropout, **options)


def decoder(policy="full"):
    return built(FusedRematDecoderLayer, D, H, 4 * D, 0.0, batch_first=True, policy=policy)


def source(seq_len=S):
    return torch.randn(B, seq_len, D, generator=torch.Generator().manual_seed(1))


def step(layer, x=None, **given):
    """Output and gradients of a call whose dropout is the same every time."""
    x = source() if x is None else x
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(2))
    torch.manual_seed(5)
    return run(layer, x, dy, **given)


ANGLES = torch.outer(torch.arange(S), 10000 ** -(torch.arange(D // H // 2) / (D // H // 2)))
ROPE = {"rope": (ANGLES.cos(), ANGLES.sin())}
#: A layer at a policy, and the other arguments of its call.
LAYERS = {
    "pre-norm": (encoder, {}),
    "pre-norm relu dropout": (lambda p: encoder(p, 0.2, activation="relu"), {}),
    "post-norm": (lambda p: encoder(p, norm_first=False), {}),
    "own activation": (lambda p: encoder(p, activation=torch.sin), {}),
    "decoder": (decoder, {"memory": source(seq_len=17)}),
    "gated rotary": (causal, ROPE),
    "gated qk-norm sandwich": (lambda p: causal(p, 0.1, qk_norm=True, placement="sandwich"), ROPE),
    "plain causal": (lambda p: causal(p, gated=False, activation="relu"), ROPE),
}


def check_close(found, exact, relative, floor=0.0):
    """Outputs have the same bits, gradients are close: those, too, that are small beside others."""
    assert torch.equal(found[0], exact[0])
    biggest = max(truth.norm() for truth in exact[1:])
    for got, truth in zip(found[1:], exact[1:], strict=True):
        assert (got - truth).norm() <= relative * max(truth.norm(), floor * biggest)


def every_name(layer, stored):
    graph_names = [name for name in layer._example().names if name != "output"]
    return Policy(save=dict.fromkeys(graph_names, stored))


@pytest.mark.composes(
    "Replay check", "kept activations in 8 bits", limits="what is rebuilt from them is not compared"
)
@pytest.mark.parametrize("which", LAYERS)
@pytest.mark.parametrize("tokens", [16, 512])
def test_the_forward_is_that_of_every_policy(which, tokens, monkeypatch):
    """Whatever is quantized, as a whole and in tiles; and gradients are close to the exact ones."""
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", tokens)
    make, given = LAYERS[which]
    layer = make("none")
    exact = step(layer, **given)
    # A step is 1/126 of a block; with fp8 in every name, sixteenths add up.
    limits = dict.fromkeys(LOSSY_PRESETS, 3e-2)
    limits |= {every_name(layer, n): 0.5 for n in ("int8", "int8_stochastic", "fp8_e4m3")}
    for layer.policy, limit in limits.items():
        made = step(layer, **given)
        check_close(made, exact, limit, 1e-2)
        assert not same_bits(made, exact)
        with check_replay():
            assert same_bits(step(layer, **given), made)


# --- the error of gradients


@pytest.mark.parametrize(
    ("shape", "scale"),
    [*((s, 1) for s in SHAPES), ("opt", 30), *(exhaustive(s, 30) for s in SHAPES if s != "opt")],
)
def test_gradients_are_off_by_at_most_two_and_a_half_times_bf16s_own_error(shape, scale):
    """The guarantee of the lossy presets, over four draws, beside "none".

    Of every gradient but those of the weights of norms of heads.
    """
    torch.manual_seed(0)
    layer = SHAPES[shape]().bfloat16()
    native, *lossy = errors(layer, ("none", *LOSSY_PRESETS), scale, seeds=range(4))
    for policy, found in zip(LOSSY_PRESETS, lossy, strict=True):
        for name, ratio in zip(names_of(layer), found / native, strict=True):
            # Of 64 numbers each, which every head's packed elements are multiplied into one by one:
            # 2.1 to 2.8, by the draws.
            of_heads = name in ("q_norm.weight", "k_norm.weight")
            assert ratio <= (3.0 if of_heads else 2.5), (policy, name, ratio)


def test_relus_derivative_is_exact_from_int8_and_from_signs():
    exact = step(encoder("none", 0.2, activation="relu"))
    signs = step(encoder(Policy(save={"act": "native", "up": "sign"}), 0.2, activation="relu"))
    assert same_bits(signs, exact)
    policy = Policy(save={"attn": "native", "mid": "native", "up": "int8"})
    made = step(encoder(policy, 0.2, activation="relu"))
    names = ["output", "x", *dict(encoder().named_parameters())]
    differ = [n for n, a, b in zip(names, made, exact, strict=True) if not torch.equal(a, b)]
    assert differ == ["linear2.weight"]


def test_signs_alone_serve_where_the_values_are_not_asked_for():
    layer = encoder(Policy(save={"up": "sign"}), activation="relu")
    layer.linear2.requires_grad_(False)
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(source())
    kept = B * S * (4 * D + 4 * D // 8 + 16)  # the input, signs, statistics
    assert saved.total == kept
    exact = encoder("full", activation="relu")
    exact.linear2.requires_grad_(False)
    assert same_bits(step(layer), step(exact))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_gradients(value):
    x = source()
    x[1, 2, 3] = value
    exact, made = step(encoder("none"), x), step(encoder("fast8"), x)
    assert torch.equal(made[0].isfinite(), exact[0].isfinite())
    assert any(not truth.isfinite().all() for truth in exact[1:])
    for got, truth in zip(made[1:], exact[1:], strict=True):
        assert not got[~truth.isfinite()].isfinite().any()


# --- bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("which", LAYERS)
def test_kept_bytes_are_predicted_scales_included(which, dtype, monkeypatch):
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", 16)
    make, given = LAYERS[which]
    given = {n: a.to(dtype) if isinstance(a, torch.Tensor) else a for n, a in given.items()}
    layer, x, seen = make("full").to(dtype), source().to(dtype).requires_grad_(), []
    monkeypatch.setattr(function, "OBSERVERS", [seen.append])
    for policy in ("fast8", "balanced8", every_name(layer, "int8_stochastic")):
        layer.policy = policy
        layer(x, **given)
        call = seen.pop()
        names, kept = [name for name, _ in call.execution.pieces()], Counter()
        for name, piece in zip(names, call.kept, strict=True):
            kept[name] += piece.nbytes
            assert piece.untyped_storage().nbytes() == piece.nbytes
        assert kept == {name: _predicted(call)[name] for name in kept}
        assert any(name.endswith(".scale") for name in kept)


def test_nothing_is_unpacked_whole_for_an_activation(monkeypatch):
    """Backward of the MLP from int8 needs no more memory than from native activations."""
    monkeypatch.setattr("fused_remat.execution.choose._CPU_TOKENS", 4096)
    monkeypatch.setattr(formats, "_CACHED", 1 << 14)
    x = torch.randn(4, 512, D, requires_grad=True)

    def peak(policy):
        layer = encoder(policy)
        layer(x).sum().backward()
        with AllocationTrace() as trace:
            y = layer(x)
            trace.mark("backward")
            y.sum().backward()
        last = trace.spans[-1]
        return last.peak - last.start

    whole = 4 * 512 * 4 * D * 4
    native = peak(Policy(save={"attn", "mid", "up"}))
    packed = Policy(save={"attn": "native", "mid": "native", "up": "int8"})
    assert peak(packed) < native + whole / 4


# --- what it composes with


@pytest.mark.composes("torch.compile", "kept activations in 8 bits")
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("stored", ["int8", "int8_stochastic", "sign"])
def test_compiled_gradients_are_the_same_bits(stored, dropout):
    policy = Policy(save={"attn": "native", "act": "native", "up": stored})
    eager = encoder(policy, dropout, activation="relu")
    compiled = torch.compile(copy.deepcopy(eager), backend="aot_eager", fullgraph=True)
    assert same_bits(step(compiled), step(eager))


def test_the_replay_check_sees_a_changed_code():
    layer = encoder("fast8")
    with (
        check_replay(),
        torch.autograd.graph.saved_tensors_hooks(
            lambda t: t, lambda t: t + 1 if t.dtype == torch.int8 else t
        ),
    ):
        y = layer(source().requires_grad_())
    with pytest.raises(RuntimeError, match="'qkv:int8' differs"):
        y.sum().backward()


@pytest.mark.parametrize("up, mid", [("int8", "native"), ("int8", "int8_stochastic")])
def test_segments_keep_packed_what_they_run_again(up, mid):
    model = nn.Sequential(*[encoder(dropout=0.1) for _ in range(3)])
    formats, found = {"up": up, "mid": mid}, []
    for segments in (("first", "inner", "inner"), (None,) * 3):
        for layer, where in zip(model, segments, strict=True):
            layer.policy = Policy(save=formats, segment=where)
        found.append(step(model))
        with check_replay():
            assert same_bits(step(model), found[-1])
    # The last of a segment is never run again, so it rebuilds all; others have what they packed.
    check_close(*found, 2e-2)


@pytest.mark.composes("Outer checkpointing", "kept activations in 8 bits")
def test_an_outer_checkpoint_packs_the_same_again():
    layer = encoder(Policy(save={"qkv": "int8_stochastic", "up": "int8"}), 0.2)

    class Outer(nn.Sequential):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    assert same_bits(step(Outer(layer)), step(layer))


@pytest.mark.composes("Autocast", "kept activations in 8 bits")
def test_autocast():
    layer = encoder("fast8", 0.1)
    with torch.autocast("cpu", torch.bfloat16):
        made = step(layer)
        layer.policy = "none"
        exact = step(layer)
    check_close(made, exact, 2e-2, 1e-2)


def test_stochastic_rounding_draws_a_seed_and_dropout_stays_the_same():
    """Where dropout draws one anyway, the generator advances as in every other policy."""
    rounded, states, found = Policy(save={"up": "int8_stochastic"}), [], []
    for policy in ("none", rounded):
        torch.manual_seed(3)
        encoder(policy, 0.2)(source())
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
    layer = encoder(rounded)
    for seed in (6, 6, 7):
        torch.manual_seed(seed)
        found.append(run(layer, source()))
    assert same_bits(found[0], found[1]) and not torch.equal(found[1][1], found[2][1])


# --- the registry, and what is refused


def test_a_format_of_ones_own_is_a_row(monkeypatch):
    half = Format(
        pack=lambda x, uniform: (x.to(torch.float16),),
        unpack=lambda parts, width: parts[0].float(),
        dtype=torch.float16, block=0,
    )  # fmt: skip
    monkeypatch.setitem(FORMATS, "half", half)
    layer = encoder(Policy(save={"up": "half"}))
    check_close(step(layer), step(encoder("full")), 1e-2)
    with SavedBytes(exclude=layer.parameters()) as saved:
        layer(source().requires_grad_())
    assert saved.total == B * S * (4 * D + 2 * 4 * D + 16)


@pytest.mark.parametrize("stored", FORMATS)
def test_fake_tensors(stored):
    """Nothing depends on values that are not there."""
    with FakeTensorMode():
        x, up = (torch.randn(n, D, requires_grad=True) for n in (6, 2 * D))
        policy = Policy(save={"act": "native", "up": stored})
        y = ops.mlp(x, up, None, torch.randn(D, 2 * D), None, activation="relu", policy=policy)
        y.sum().backward()
        assert x.grad.shape == x.shape


def test_a_row_that_does_not_fit_is_told(monkeypatch):
    one = lambda x, uniform: x.half()  # noqa: E731
    row = Format(pack=one, unpack=lambda parts, width: parts[0], dtype=torch.float16)
    monkeypatch.setitem(FORMATS, "one part", row)
    with pytest.raises(
        ValueError, match="'one part' must return a tuple of codes and scales, since block=64"
    ):
        encoder(Policy(save={"up": "one part"}))(source())
    for name in ("", "native", "a:b"):
        with pytest.raises(ValueError, match="invalid name of a format"):
            FORMATS[name] = row


def test_a_row_is_not_replaced(monkeypatch):
    with pytest.raises(
        ValueError, match="'int8' is or was the name of another format: choose a new name"
    ):
        FORMATS.update(int8=FORMATS["sign"])
    FORMATS["int8"] = FORMATS["int8"]
    policy = Policy(save={"up": "int8"})
    monkeypatch.delitem(FORMATS, "int8")
    with pytest.raises(ValueError, match="unknown format 'int8' for 'up'; valid formats: native"):
        encoder().policy = policy


def test_formats_that_do_not_hold_what_backward_asks_for():
    with pytest.raises(
        ValueError, match=r"'sign' keeps signs only, .*of a ReLU; backward of 'act' needs"
    ):
        encoder(Policy(save={"up": "sign"}))(source())
    with pytest.raises(ValueError, match=r"'sign' keeps signs only.*'attn' needs the values"):
        encoder(Policy(save={"qkv": "sign"}))(source())
    with pytest.raises(ValueError, match="cannot be kept as 'int8': it is the caller's"):
        q = torch.randn(1, 2, 8, 4, requires_grad=True)
        ops.attention(q, q, q, policy=Policy(save={"output": "int8"}))


def test_what_backward_does_not_ask_for_is_not_packed():
    graph = in_formats(block_graph(GELU), {"qkv:int8", "up:int8"})
    plan = schedule(graph, frozenset({"qkv:int8", "up:int8"}), frozenset({"fc2.bias"}), False)
    assert plan.kept == () and all(step.node.quantizes == "" for step in plan.forward)


def test_activations_are_rounded_at_sites_of_their_own():
    packed = in_formats(block_graph(GELU), {"qkv:int8_stochastic", "up:int8_stochastic"})
    assert len({node.site for node in packed.nodes if node.quantizes}) == 2


def test_equal_formats_share_one_graph():
    graph = block_graph(GELU)
    assert in_formats(graph, {"up:int8", "attn"}) is in_formats(graph, {"up:int8", "mid"})
    assert in_formats(graph, {"up", "attn"}) is graph
