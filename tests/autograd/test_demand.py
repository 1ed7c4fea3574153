"""Backward passes that ask a block for some gradients: those alone are computed, the same bits."""

import contextlib
import functools
import itertools
import weakref

import pytest
import torch
from block_inputs import Block, leaves, normal
from op_cases import HEADS
from reference import EXACT_PRESETS, X, make
from same_bits import assert_same_bits
from segment_models import place, stack
from small_layers import KINDS, B, D, F, S, draw, layers_of
from tiers import pairwise
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

from fused_remat import FusedRematWarning, check_replay, defer_weight_gradients, ops
from fused_remat.autograd import run_block
from fused_remat.execution import choose
from fused_remat.graph.build import BlockBuilder, rotary_node

WIDE = torch.float64
pytestmark = pytest.mark.usefixtures("one_thread", "served")
PARTS = ("input", "params", "one weight", "one bias", "all but the input's", "input and a weight")


def of_kind(kind, policy, **options):
    """The output of a layer, its inputs, and its parameters."""
    (layer,), x, kwargs, more = layers_of(kind, dtype=WIDE, policy=policy, **options)
    return layer(x, **kwargs), [x, *more], list(layer.parameters())


def autocast(policy):
    (layer,), x, _, _ = layers_of("pre-norm", policy=policy)
    with torch.autocast("cpu", torch.bfloat16):
        return layer(x), [x], list(layer.parameters())


def cross_entropy(policy):
    x, weight = draw(4, 5, 8), draw(11, 8, seed=1)
    targets = torch.arange(20).view(4, 5) % 11
    return ops.linear_cross_entropy(x, weight, targets), [x], [weight]


def lora(policy):
    block = Block(qk_norm=True)
    x, weights, updates = normal(3, 5, block.d, seed=50), block.weights(), block.updates()
    params = list(leaves(x, weights, updates).values())
    kwargs = {"nhead": block.nhead, "kv_heads": block.kv_heads, "rope": block.rope(5)}
    more = {"lora": updates, "lora_dropout_p": 0.3, "seed": 7, "policy": policy}
    return ops.causal_block(x, weights, **kwargs, **more), [x], [p for p in params if p is not x]


def frozen(policy):
    (layer,), x, _, _ = layers_of("pre-norm", dtype=WIDE, policy=policy)
    layer.linear1.requires_grad_(False)
    return layer(x), [x], [p for p in layer.parameters() if p.requires_grad]


def odd(policy):
    """A product of heads before they are rotated, and one after: rotated again over the first's."""
    heads, b, x = HEADS["half"], BlockBuilder(), normal(3, 5, D)
    before = b.linear("qkv", "input", "qkv")
    after = b.linear("down", b.add(rotary_node("rotated", before, heads.spec())), "down")
    b.sum("output", after, b.linear("up", before, "up"))
    sizes = {"qkv": (heads.packed, D), "down": (D, heads.packed), "up": (D, heads.packed)}
    weights = {f"{name}.weight": normal(*size) for name, size in sizes.items()}
    cos, sin = heads.tables(x)
    given = {"input": x, "cos": cos, "sin": sin, **weights}
    return run_block(b.graph("odd"), policy, given), [x], [*weights.values()]


BLOCKS = {
    **{kind: functools.partial(of_kind, kind) for kind in KINDS},
    # Without dropout a layer's own gradient is what a product takes, and what is added to after.
    "post-norm": functools.partial(of_kind, "post-norm, sequence first, masks", dropout=0.0),
    "autocast": autocast,
    "cross entropy": cross_entropy,
    "frozen": frozen,
    "lora": lora,
    "odd": odd,
}


def part_of(inputs, params, part):
    weights = [p for p in params if p.dim() > 1]
    biases = [p for p in params if p.dim() < 2] or params
    return {
        "input": inputs,
        "params": params,
        "one weight": weights[-1:],
        "one bias": biases[1:2] or biases,
        "all but the input's": [*inputs[1:], *params],
        "input and a weight": [*inputs, weights[0]],
    }[part]


@pytest.mark.parametrize(
    "policy, block, tokens", pairwise(["full", "balanced", "none"], list(BLOCKS), [None, 3])
)
def test_a_part_is_that_part_of_the_whole(block, policy, tokens, monkeypatch):
    if tokens:  # groups of one sequence, and tiles
        monkeypatch.setattr(choose, "_CPU_TOKENS", tokens)
    torch.manual_seed(0)
    y, inputs, params = BLOCKS[block](policy)
    dy, leaves = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape), inputs + params
    whole = dict(zip(leaves, torch.autograd.grad(y, leaves, dy, retain_graph=True), strict=True))
    for part in PARTS:
        mine = part_of(inputs, params, part)
        for defer in (False, True):
            with defer_weight_gradients() if defer else contextlib.nullcontext():
                found = torch.autograd.grad(y, mine, dy, retain_graph=True)
                rest = [leaf for leaf in leaves if not any(leaf is one for one in mine)]
                more = torch.autograd.grad(y, rest, dy, retain_graph=True) if rest else ()
        for leaf, grad in zip([*mine, *rest], [*found, *more], strict=True):
            assert torch.equal(grad, whole[leaf]), (part, defer, leaf.shape)


def flops(fn):
    with FlopCounterMode(display=False) as counted:
        result = fn()
    return result, counted.get_total_flops()


def test_products_that_nobody_asks_for_are_not_computed():
    _, layer = make("none")
    x = X.clone().requires_grad_()
    y = layer(x)
    dy, weights = torch.ones_like(y), list(layer.parameters())

    def count(*args, **kwargs):
        grad = functools.partial(torch.autograd.grad, *args, dy, retain_graph=True, **kwargs)
        return flops(grad)[1]

    products = 2 * 10 * 8 * (24 + 8 + 12 + 12)  # of the four linear layers, over ten tokens
    whole, some = count(y, [x, *weights]), count(y, [x])
    assert whole - some == products and 0 < some < whole
    assert count(y, [layer.linear2.weight]) == 2 * 10 * 8 * 12
    assert count(y, [layer.linear2.bias]) == 0
    assert count(y, [x, *weights], allow_unused=True) == whole
    assert flops(lambda: y.backward(dy, inputs=[x], retain_graph=True))[1] == some
    assert layer.linear1.weight.grad is None
    edges = [GradientEdge(y.grad_fn, 0)], [torch.autograd.graph.get_gradient_edge(x)]
    assert count(*edges) == some


def test_an_ordinary_backward_computes_each_product_once():
    """With hooks on parameters, and with another backward pass for an input alone inside of it."""
    x, inner, up, down = draw(2, 5, 8), draw(2, 5, 8), draw(12, 8), draw(8, 12)

    def mlp(x):
        return ops.mlp(x, up, None, down, None, "relu", policy="none")

    def restricted(grad):
        with torch.enable_grad():
            z = mlp(inner)
        torch.autograd.grad(z, inner, torch.ones_like(z))

    up.register_hook(lambda g: g * 1)
    down.register_post_accumulate_grad_hook(lambda p: None)
    y = mlp(x)
    y.register_hook(restricted)
    product = 2 * 10 * 8 * 12
    assert flops(lambda: y.sum().backward())[1] == (4 + 4) * product


# --- split in two, as the zero-bubble schedules do it


def net(policy, depth=3, **kwargs):
    return stack((policy,) * depth, dtype=WIDE, **kwargs)


def forward(model):
    x = draw(B, S, D)
    torch.manual_seed(1)
    y = model(x)
    return x, y, torch.linspace(0.5, 1.5, y.numel(), dtype=WIDE).view(y.shape)


def in_one(model):
    x, y, dy = forward(model)
    _, count = flops(lambda: y.backward(dy))
    grads = [p.grad for p in model.parameters()]
    model.zero_grad()
    return x.grad, grads, count


def in_two(model, between=lambda y: None):
    x, y, dy = forward(model)
    (dx, groups), first = flops(lambda: stage_backward_input([y], [dy], [x], model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    between(groups)
    _, second = flops(lambda: stage_backward_weight(model.parameters(), groups))
    return dx[0], [p.grad for p in model.parameters()], (first, second)


def same(found, expected):
    assert_same_bits([found[0], *found[1]], [expected[0], *expected[1]])


@pytest.fixture
def one():
    """Of one layer: its input, output, the gradient of that, and the weights."""
    model = net("full", depth=1)
    return *forward(model), list(model.parameters())


@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_two_passes_give_what_one_does(policy):
    model, products = net(policy), 3 * 2 * B * S * D * (3 * D + D + F + F)
    whole = in_one(model)
    again = in_two(model)
    same(again, whole)
    assert again[2][0] == whole[2] - products
    assert again[2][1] <= whole[2]  # rebuilt and propagated once more
    model.zero_grad()
    with defer_weight_gradients():
        deferred = in_two(model)
        model.zero_grad()
        with check_replay():
            same(in_two(model), whole)
    same(deferred, whole)
    assert deferred[2] == (whole[2] - products, products)


@pytest.mark.parametrize("policy", ["full", "none"])
def test_bytes_held_between_the_passes(policy):
    model, held = net(policy, depth=1, dropout=0.0), []

    def measure(groups):
        nodes = itertools.chain.from_iterable(group["intermediates"] for group in groups)
        (node,) = [node for node in nodes if hasattr(node, "execution")]
        kept = {t.untyped_storage()._cdata for t in node.saved_tensors if t is not None}
        factors = [t for p in node.deferred.products for t in (p.dy, p.x)]
        new = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in factors}
        held.append(sum(size for data, size in new.items() if data not in kept))
        held.extend(weakref.ref(t) for t in factors)

    with defer_weight_gradients():
        in_two(model, measure)
    # norm1, attn, norm2, act (F); the output's gradient, d_up (F), d_mid, d_qkv (3*D).
    wide = 8 * D + 2 * F - D * (policy == "none")
    assert held.pop(0) == B * S * 8 * wide
    assert not any(ref() is not None for ref in held)


def test_segments_need_the_factors():
    model = place(net("full", depth=4))
    whole = in_one(model)
    with pytest.raises(RuntimeError, match="second time"):  # the first layer's is freed by then
        in_two(model)
    model.zero_grad()
    with defer_weight_gradients():
        same(in_two(model), whole)


@pytest.mark.parametrize("target", ["grad", "main_grad"])
def test_accumulation(target):
    model = net("lean", depth=1, accumulate_into=target)
    weights = list(model.parameters())
    for p in weights:
        setattr(p, target, torch.zeros_like(p))
    sums = lambda: [getattr(p, target).clone() for p in weights]  # noqa: E731
    _, y, dy = forward(model)
    y.backward(dy)
    whole = sums()
    for p in weights:
        getattr(p, target).zero_()
    x, y, dy = forward(model)
    refused = pytest.warns(FusedRematWarning, match="not added to main_grad")
    with defer_weight_gradients():
        torch.autograd.grad(y, x, dy, retain_graph=True)
        with refused if target == "main_grad" else contextlib.nullcontext():
            found = torch.autograd.grad(y, weights, dy, retain_graph=True)
        assert not any(map(torch.any, sums()))  # they were asked for, and given
        y.backward(dy, inputs=weights)
    assert_same_bits(found, whole)
    assert_same_bits(sums(), whole)


@pytest.mark.parametrize("of_inference", [False, True])
def test_factors_serve_their_own_gradient_only(of_inference, one):
    """One of inference mode has no version to know it by, and nothing is held for it."""
    x, y, dy, weights = one
    expected = torch.autograd.grad(y, weights, 2 * dy, retain_graph=True)
    with torch.inference_mode(of_inference):
        dy = dy.clone()
    with defer_weight_gradients():
        torch.autograd.grad(y, x, dy, retain_graph=True)
        other = torch.autograd.grad(y, weights, 2 * dy, retain_graph=True)
        assert all(map(torch.equal, other, expected))
        with torch.inference_mode(of_inference):
            dy.mul_(2)
        assert all(map(torch.equal, torch.autograd.grad(y, weights, dy), expected))


def test_a_factor_changed_in_place_raises():
    x, weight = draw(2, 5, 8), draw(12, 8, seed=1)
    source = x * 1
    y = ops.mlp(source, weight, None, draw(8, 12, seed=2), None, "relu")
    dy = torch.ones_like(y)
    with defer_weight_gradients():
        torch.autograd.grad(y, x, dy, retain_graph=True)
        with torch.no_grad():
            source.add_(1)
        with pytest.raises(RuntimeError, match="inplace"):
            torch.autograd.grad(y, weight, dy)


def test_nothing_is_held_by_other_passes(one):
    x, y, dy, weights = one
    node = y.grad_fn
    torch.autograd.grad(y, x, dy, retain_graph=True)
    assert node.deferred is None  # outside
    with defer_weight_gradients():
        torch.autograd.grad(y, weights, dy, retain_graph=True)
        torch.autograd.grad(y, [x, *weights], dy, retain_graph=True)
        batched = torch.stack([dy, 2 * dy])
        (dx,) = torch.autograd.grad(y, x, batched, retain_graph=True, is_grads_batched=True)
        assert node.deferred is None
        (one,) = torch.autograd.grad(y, x, dy)  # the graph is not kept: nothing can come
        assert node.deferred is None
    assert torch.equal(dx[0], one)


def test_factors_go_with_the_graph(one):
    x, y, dy, _ = one
    with defer_weight_gradients():
        torch.autograd.grad(y, x, dy, retain_graph=True)
        node = y.grad_fn
        assert node.deferred is not None
        y.backward(dy)  # of everything, and the graph is freed
        assert node.deferred is None
