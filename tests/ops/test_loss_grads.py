"""`ops.linear_cross_entropy(grad_in_forward=True)`: three products, and what is kept."""

import pytest
import torch
from block_inputs import compare, normal
from reference import linear_cross_entropy as plain
from test_linear_cross_entropy import OPTIONS, VOCAB, WIDTH, operands
from tiers import pairwise
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from fused_remat import ops
from fused_remat.report.allocations import AllocationTrace, SavedBytes

#: Logits in a block of 3 tokens, and in one of all.
BLOCKS = 3 * VOCAB, None


def loss_of(leaves, target, **options):
    hidden, weight, *bias = leaves
    return ops.linear_cross_entropy(hidden, weight, target, *bias, grad_in_forward=True, **options)


@pytest.mark.parametrize(
    "reduction, options, chunk", pairwise(["mean", "sum"], list(OPTIONS), BLOCKS)
)
def test_is_cross_entropy_of_the_logits(reduction, options, chunk):
    """Times a factor, which backward multiplies the gradients by."""
    *leaves, target = operands()
    given = OPTIONS[options] | {"reduction": reduction}
    target = target.clamp(min=given.get("ignore_index", -100))
    hidden, weight, bias = leaves
    compare(
        lambda: -3.7 * loss_of(leaves, target, chunk=chunk, **given),
        lambda: -3.7 * plain(hidden, weight, target, bias, **given),
        leaves,
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", list(OPTIONS))
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_bits_are_those_of_backward_in_one_block(dtype, options, reduction):
    """Of a mean over 16 tokens as well, which scales by a power of 2."""
    *leaves, target = operands(dtype)
    target.view(-1)[:5], target.view(-1)[5:] = -100, target.view(-1)[5:].clamp(min=1)
    given = OPTIONS[options] | {"reduction": reduction}
    if options == "a class is ignored":
        target.clamp_(min=0)
    found = [
        [loss.detach(), *torch.autograd.grad(loss, leaves)]
        for loss in (
            loss_of(leaves, target, **given),
            ops.linear_cross_entropy(*leaves[:2], target, leaves[2], **given),
        )
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_no_token_counts(reduction):
    *leaves, target = operands()
    for nothing, hidden in (
        (torch.full_like(target, -100), leaves[0]),
        (target[:0], leaves[0][:0]),
    ):
        loss = loss_of([hidden, *leaves[1:]], nothing, reduction=reduction)
        assert loss.isnan() if reduction == "mean" else loss == 0
        assert not any(grad.any() for grad in torch.autograd.grad(loss, leaves))


def test_float16_keeps_small_gradients():
    """Of a mean over many tokens, before a loss scale multiplies them."""
    hidden, weight = normal(4096, WIDTH), normal(VOCAB, WIDTH, scale=1e-3)
    target = torch.randint(VOCAB, (4096,), generator=torch.Generator().manual_seed(0))
    grads = []
    for dtype in (torch.float16, torch.float64):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (hidden, weight)]
        grads.append(torch.autograd.grad(2.0**16 * loss_of(leaves, target), leaves))
    for ours, exact in zip(*grads, strict=True):
        assert ours.dtype == torch.float16
        assert (ours - exact).norm() < 2e-3 * exact.norm()


# --- work and memory


def test_three_products_instead_of_four():
    hidden, weight = normal(*(40, 16), dtype=torch.float32), normal(100, 16, dtype=torch.float32)
    target, product = torch.arange(40), 2 * 40 * 16 * 100

    def counts(leaves, **options):
        found = []
        with FlopCounterMode(display=False) as counter:
            loss = ops.linear_cross_entropy(hidden, weight, target, **options)
        found.append(counter.get_total_flops() // product)
        with FlopCounterMode(display=False) as counter:
            torch.autograd.grad(loss, leaves)
        return *found, counter.get_total_flops() // product

    assert counts([hidden, weight]) == (1, 3)
    assert counts([hidden, weight], grad_in_forward=True) == (3, 0)
    weight.requires_grad_(False)
    assert counts([hidden], grad_in_forward=True) == (2, 0)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        loss = ops.linear_cross_entropy(hidden, weight, target, grad_in_forward=True)
    assert counter.get_total_flops() == product and not loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("frozen", ["", "hidden", "weight", "bias"])
def test_keeps_the_gradients_and_nothing_else(dtype, frozen):
    *tensors, target = operands(dtype)
    named = dict(zip(("hidden", "weight", "bias"), tensors, strict=True))
    if frozen:
        named[frozen].requires_grad_(False)
    leaves = [t for t in tensors if t.requires_grad]
    with SavedBytes(exclude=[*named.values(), target]) as saved:
        loss = loss_of(tensors, target)
    itemsize = max(dtype.itemsize, 4 if dtype == torch.float16 else 0)
    assert saved.total == itemsize * sum(t.numel() for t in leaves)
    assert [g.dtype for g in torch.autograd.grad(loss, leaves)] == [dtype] * len(leaves)


def test_backward_multiplies_in_place():
    hidden, weight = normal(64, 32, dtype=torch.float32), normal(4000, 32, dtype=torch.float32)
    with AllocationTrace() as trace:
        loss = ops.linear_cross_entropy(hidden, weight, torch.arange(64), grad_in_forward=True)
        trace.mark("backward")
        grads = torch.autograd.grad(loss, [hidden, weight])
    forward, backward = trace.spans
    kept = hidden.nbytes + weight.nbytes
    # A block of 64 tokens: logits, and their exponentials; no second sum of the same dtype.
    assert forward.peak <= kept + 3 * 4 * 64 * 4000
    assert backward.start < kept + 100 and backward.peak < kept + 1000
    assert grads[1].is_contiguous()


# --- autograd


def test_every_pass_of_a_retained_graph_gives_the_same():
    *leaves, target = operands()
    loss = 2.5 * loss_of(leaves, target)
    first = torch.autograd.grad(loss, leaves, retain_graph=True)
    second = torch.autograd.grad(loss, leaves, retain_graph=True)
    third = torch.autograd.grad(loss, leaves)
    for grads in zip(first, second, third, strict=True):
        assert torch.equal(grads[0], grads[1]) and torch.equal(grads[0], grads[2])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, leaves)


def test_batches_of_gradients_and_some_of_them():
    *leaves, target = operands()
    factors = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    each = [torch.autograd.grad(loss_of(leaves, target), leaves, f) for f in factors]
    loss = loss_of(leaves, target)
    batched = torch.autograd.grad(loss, leaves, factors, is_grads_batched=True, retain_graph=True)
    for grads, *ones in zip(batched, *each, strict=True):
        torch.testing.assert_close(grads, torch.stack(ones))
    (weight,) = torch.autograd.grad(loss, leaves[1:2])
    torch.testing.assert_close(weight, each[0][1])


def test_double_backward_raises():
    *leaves, target = operands()
    grads = torch.autograd.grad(loss_of(leaves, target), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="double backward is not supported"):
        grads[1].sum().backward()


@pytest.mark.parametrize("around", ["checkpoint", "save_on_cpu", "compiled"])
def test_composes(around):
    *leaves, target = operands(torch.float32)
    expected = torch.autograd.grad(loss_of(leaves, target), leaves)
    if around == "checkpoint":
        loss = checkpoint(loss_of, leaves, target, use_reentrant=False)
    elif around == "save_on_cpu":
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(leaves, target)
    else:  # the gradients are computed in backward
        torch._dynamo.reset()
        loss = torch.compile(loss_of, fullgraph=True, backend="aot_eager")(leaves, target)
    for ours, theirs in zip(torch.autograd.grad(loss, leaves), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("native", [False, True])
def test_autocast_computes_as_backward_does(native, monkeypatch):
    monkeypatch.setattr("fused_remat.steps.linear.widens", lambda x: not native)
    hidden, weight, bias, target = operands(torch.float32)
    leaves, found = [hidden, weight, bias], []
    for early in (True, False):
        with torch.autocast("cpu", torch.bfloat16), SavedBytes([weight, bias, target]) as saved:
            loss = ops.linear_cross_entropy(hidden, weight, target, bias, grad_in_forward=early)
        if early:
            assert saved.total == 2 * hidden.numel() + 4 * (weight.numel() + bias.numel())
        found.append(torch.autograd.grad(loss, leaves))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).norm() <= 2**-7 * theirs.norm()


def test_a_loss_for_each_token_is_refused():
    *leaves, target = operands()
    with pytest.raises(ValueError, match="only backward has"):
        loss_of(leaves, target, reduction="none")


def test_a_factor_that_requires_a_gradient():
    """As of a loss with a learned weight, also with create_graph."""
    hidden, weight = torch.randn(6, 8, requires_grad=True), torch.randn(23, 8, requires_grad=True)
    target, found = torch.randint(23, (6,)), []
    for early in (False, True):
        scale = torch.zeros((), requires_grad=True)
        loss = ops.linear_cross_entropy(hidden, weight, target, grad_in_forward=early)
        wanted = hidden, weight, scale
        grads = torch.autograd.grad((-scale).exp() * loss + scale, wanted, create_graph=True)
        found.append(grads)
        with pytest.raises(RuntimeError, match="double backward"):
            grads[0].sum().backward()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
