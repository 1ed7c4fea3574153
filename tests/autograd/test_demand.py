"""Partial gradients of a block: only those requested are computed, with the same bits."""

import contextlib
import functools

import pytest
import torch
from block_inputs import Block, leaves, normal
from reference import EXACT_PRESETS, X, make
from same_bits import assert_same_bits
from segment_models import place, stack
from small_layers import KINDS, B, D, F, S, draw, layers_of
from tiers import pairwise
from torch.autograd.graph import GradientEdge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

import fused_remat
from fused_remat import FusedRematWarning, check_replay, ops
from fused_remat.execution import choose

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


def lora(policy, dora=False, p=0.3):
    block = Block(qk_norm=True)
    x, weights, updates = normal(3, 5, block.d, seed=50), block.weights(), block.updates(dora=dora)
    params = list(leaves(x, weights, updates).values())
    kwargs = {"nhead": block.nhead, "kv_heads": block.kv_heads, "rope": block.rope(5)}
    more = {"lora": updates, "lora_dropout_p": p, "seed": 7, "policy": policy}
    return ops.causal_block(x, weights, **kwargs, **more), [x], [p for p in params if p is not x]


def frozen(policy):
    (layer,), x, _, _ = layers_of("pre-norm", dtype=WIDE, policy=policy)
    layer.linear1.requires_grad_(False)
    return layer(x), [x], [p for p in layer.parameters() if p.requires_grad]


BLOCKS = {
    **{kind: functools.partial(of_kind, kind) for kind in KINDS},
    # Without dropout a layer's own gradient is what a product takes, and what is added to after.
    "post-norm": functools.partial(of_kind, "post-norm, sequence first, masks", dropout=0.0),
    "autocast": autocast,
    "cross entropy": cross_entropy,
    "frozen": frozen,
    "lora": lora,
    "dora": functools.partial(lora, dora=True),
    "dora without dropout": functools.partial(lora, dora=True, p=0.0),
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
        monkeypatch.setattr(choose, "chunk_tokens", lambda *_: tokens)
    torch.manual_seed(0)
    y, inputs, params = BLOCKS[block](policy)
    dy, leaves = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).view(y.shape), inputs + params
    whole = dict(zip(leaves, torch.autograd.grad(y, leaves, dy, retain_graph=True), strict=True))
    for part in PARTS:
        mine = part_of(inputs, params, part)
        for leaf, grad in zip(mine, torch.autograd.grad(y, mine, dy, True), strict=True):
            assert torch.equal(grad, whole[leaf]), (part, leaf.shape)


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


def in_two(model):
    x, y, dy = forward(model)
    (dx, groups), first = flops(lambda: stage_backward_input([y], [dy], [x], model.parameters()))
    assert all(p.grad is None for p in model.parameters())
    _, second = flops(lambda: stage_backward_weight(model.parameters(), groups))
    return dx[0], [p.grad for p in model.parameters()], (first, second)


@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_two_passes_give_what_one_does(policy):
    model, products = net(policy), 3 * 2 * B * S * D * (3 * D + D + F + F)
    whole = in_one(model)
    split = in_two(model)
    assert_same_bits([split[0], *split[1]], [whole[0], *whole[1]])
    assert split[2][0] == whole[2] - products
    assert split[2][1] <= whole[2]  # rebuilt and propagated again
    model.zero_grad()
    with check_replay():
        split = in_two(model)
    assert_same_bits([split[0], *split[1]], [whole[0], *whole[1]])


def test_a_split_backward_of_segments_raises():
    with pytest.raises(RuntimeError, match=r"zero-bubble.*1F1B"):
        in_two(place(net("full", depth=4)))


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
    torch.autograd.grad(y, x, dy, retain_graph=True)
    with refused if target == "main_grad" else contextlib.nullcontext():
        returned = torch.autograd.grad(y, weights, dy, retain_graph=True)
    assert not any(map(torch.any, sums()))  # returned instead
    y.backward(dy, inputs=weights)
    assert_same_bits(returned, whole)
    assert_same_bits(sums(), whole)


def test_the_removed_deferral_says_what_to_use():
    with pytest.raises(RuntimeError, match=r"was removed: call schedule.step\(\) without it"):
        fused_remat.defer_weight_gradients()
