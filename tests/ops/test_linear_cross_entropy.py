"""`ops.cross_entropy`: F.cross_entropy and its conventions, memory, autograd, errors."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from block_inputs import check_beside, compare, normal, results
from reference import linear_cross_entropy as plain
from tiers import exhaustive, pairwise

from fused_remat import ops
from fused_remat.report.allocations import AllocationTrace, SavedBytes
from fused_remat.steps import logit_blocks

TOKENS, WIDTH, VOCAB = (3, 7), 12, 53
#: Many blocks, the last ones smaller: 6 tokens by 6 columns or so.
BLOCKS = 40
OPTIONS = {
    "plain": {},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 0.01},
    "softcap": {"softcap": 3.0},
    "scaled": {"logit_scale": 0.3},
    "all": {"label_smoothing": 0.2, "z_loss": 0.1, "softcap": 2.0, "logit_scale": 1.7},
    "a class is ignored": {"ignore_index": 0},
}


def operands(dtype=torch.float64, scale=1.0):
    """hidden, weight, bias, and targets of which some are ignored."""
    hidden = normal(*TOKENS, WIDTH, dtype=dtype)
    weight, bias = (
        normal(VOCAB, WIDTH, dtype=dtype, seed=1, scale=scale),
        normal(VOCAB, dtype=dtype),
    )
    target = torch.randint(VOCAB, TOKENS, generator=torch.Generator().manual_seed(0))
    target[0, 2:5] = target[2, 6] = -100
    return hidden, weight, bias, target


def compare_losses(leaves, target, chunk=None, **options):
    """Loss and gradients of hidden, weight and perhaps bias beside plain PyTorch's."""
    hidden, weight, *bias = leaves
    compare(
        lambda: ops.linear_cross_entropy(hidden, weight, target, *bias, chunk=chunk, **options),
        lambda: plain(hidden, weight, target, *bias, **options),
        leaves,
    )


@pytest.mark.parametrize(
    "reduction, options, chunk", pairwise(["mean", "sum", "none"], list(OPTIONS), [None, BLOCKS, 1])
)
def test_is_cross_entropy_of_the_logits(reduction, options, chunk):
    *leaves, target = operands()
    given = OPTIONS[options] | {"reduction": reduction}
    target = target.clamp(min=given.get("ignore_index", -100))
    compare_losses(leaves, target, chunk=chunk, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 6.0], ids=["spread", "confident"])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_errors_are_within_those_of_pytorch(dtype, scale, options):
    """Also where a target has nearly all of the mass, and the loss is small beside the logits."""
    hidden, weight, bias, target = operands(dtype, scale=scale)
    with torch.no_grad():
        best = F.linear(hidden, weight, bias).argmax(-1)
        target = torch.where(target == -100, target, best) if scale > 1 else target
    # A loss for each token: the error of one sum is a matter of chance.
    given = OPTIONS[options] | {"reduction": "none"}
    tensors = {"hidden": hidden, "weight": weight, "bias": bias, "target": target}
    check_beside(
        lambda t: ops.linear_cross_entropy(**t, chunk=BLOCKS, **given),
        lambda t: plain(**t, **given), tensors, computed=dtype,
    )  # fmt: skip
    assert ops.linear_cross_entropy(**tensors).dtype == torch.float32


@pytest.mark.parametrize("options", ["plain", "all"])
def test_no_token_counts(options):
    """A mean is NaN and its gradients zeros, as PyTorch has it; a sum is 0."""
    *leaves, target = operands()
    hidden, weight, bias = leaves
    nothing = torch.full_like(target, -100)
    given = OPTIONS[options]
    mean = ops.linear_cross_entropy(hidden, weight, nothing, bias, **given)
    assert mean.isnan()
    for grad in torch.autograd.grad(mean, leaves):
        assert not grad.any()
    given = {**given, "reduction": "none"}
    assert not ops.linear_cross_entropy(hidden, weight, nothing, bias, **given).any()
    empty = ops.linear_cross_entropy(hidden[:0], weight, target[:0], reduction="sum")
    assert empty == 0 and not any(g.any() for g in torch.autograd.grad(empty, leaves[:2]))


def test_ignored_tokens_cost_nothing_on_a_cpu_and_may_hold_anything():
    hidden, weight, _, target = operands()
    expected = results(lambda: plain(hidden, weight, target), [hidden, weight])
    with torch.no_grad():
        hidden[target == -100] = torch.nan
    found = results(lambda: ops.linear_cross_entropy(hidden, weight, target), [hidden, weight])
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_shift_is_that_of_a_language_model():
    """As slicing both, and as Hugging Face's loss, with and without `num_items_in_batch`."""
    loss_utils = pytest.importorskip("transformers.loss.loss_utils")
    hidden, weight, _, labels = operands(torch.float32)
    ours = ops.linear_cross_entropy(hidden, weight, labels, shift=True)
    sliced = ops.linear_cross_entropy(hidden[:, :-1], weight, labels[:, 1:])
    torch.testing.assert_close(ours, sliced)
    logits = F.linear(hidden, weight)
    torch.testing.assert_close(ours, loss_utils.ForCausalLMLoss(logits, labels, VOCAB))
    total = ops.linear_cross_entropy(hidden, weight, labels, shift=True, reduction="sum")
    theirs = loss_utils.ForCausalLMLoss(logits, labels, VOCAB, num_items_in_batch=torch.tensor(31))
    torch.testing.assert_close(total / 31, theirs)


# --- memory


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_never_whole_and_a_frozen_head_has_no_gradient(dtype):
    tokens, width, vocab, chunk = 256, 32, 2048, 1 << 14
    hidden, weight = normal(tokens, width, dtype=dtype), normal(vocab, width, dtype=dtype)
    target = torch.randint(vocab, (tokens,))
    peaks = []
    for leaves in ([hidden], [hidden, weight]):
        head = weight if len(leaves) > 1 else weight.detach()
        with AllocationTrace() as trace:
            loss = ops.linear_cross_entropy(hidden, head, target, chunk=chunk)
            trace.mark("backward")
            torch.autograd.grad(loss, leaves)
        peaks.append([span.peak for span in trace.spans])
    # A block's logits and what is computed of them, three or four at a time; operands' copies.
    block = 4 * 4 * chunk + 4 * 4 * 128 * width
    statistics = 2 * 4 * tokens * (vocab // 128) + 64 * tokens  # of each block of columns
    assert max(forward for forward, _ in peaks) <= block + statistics
    assert block + statistics < 4 * tokens * vocab / 4
    frozen, trained = (backward for _, backward in peaks)
    assert frozen <= block + 6 * tokens * width + 64 * tokens  # dx in float32, and as it is given
    # And a block of it in float32, while a block of logits is in 16 bits.
    assert trained <= frozen + weight.nbytes + 4 * 128 * width + 2 * chunk
    assert trained >= frozen + 0.9 * weight.nbytes


def test_blocks_are_as_large_as_the_limit_allows():
    """A number of logits on a CPU, and bytes on devices."""
    sizes = itertools.product((0, 1, 100, 10_000, 1_000_000), (1, 1000, 262_144))
    kinds = (("cpu", 4, 1 << 20), ("meta", 4, 1 << 27), ("meta", 2, 1 << 28))
    for (tokens, vocab), (kind, itemsize, limit) in itertools.product(sizes, kinds):
        x = torch.empty(tokens, 576, device=kind)
        rows, columns = logit_blocks.block_of(tokens, vocab, 0, x, itemsize)
        assert 1 <= rows <= max(tokens, 1) and 1 <= columns <= vocab
        assert min(0.9 * limit, max(tokens, 1) * vocab) <= rows * columns <= limit


def used(total, rows, width):
    """Return the share of 132 multiprocessors' waves that products of the parts fill."""
    tile = min((256, 192, 128), key=lambda n: -(-width // n) * n)
    parts = [min(rows, total - at) for at in range(0, total, rows)]
    tiles = [-(-part // 128) * -(-width // tile) for part in parts]
    return sum(tiles) / sum(-(-n // 132) * 132 for n in tiles)


@pytest.mark.parametrize("width", [576, 1536, 2048, 4096])
@pytest.mark.parametrize("tokens", [8192, 65_536, 505_856])
@pytest.mark.parametrize("vocab", [49_152, 151_936])
def test_blocks_fill_waves(tokens, vocab, width):
    """Of 132 multiprocessors, and no other number of tokens within the limit would fill more."""
    assert 0.72 < used(8192, 8192, 576) < 0.73  # as blocks of 2^26 logits did
    rows, columns = logit_blocks.block_shape(tokens, vocab, 1 << 28, width, 132)
    assert rows * columns <= 1 << 28
    most = min(tokens, 1 << 14)
    if rows < tokens:
        others = [used(tokens, n, width) for n in range(most, most // 2, -128)]
        assert used(tokens, rows, width) == max(others) > 0.96
        assert used(vocab, columns, width) > 0.9
    else:
        assert rows == tokens
    plain = logit_blocks.block_shape(tokens, vocab, 1 << 28, width, 0)
    assert plain[0] == most  # where the number of multiprocessors is unknown


# --- autograd, compilers, checks


@pytest.mark.composes("torch.compile", "the loss of a head, `ops.cross_entropy`")
@pytest.mark.parametrize("dtype", [torch.bfloat16, exhaustive(torch.float32)])
def test_compiles_whole(dtype):
    hidden, weight, bias, target = operands(dtype)

    def loss(hidden, weight, bias):
        return ops.linear_cross_entropy(hidden, weight, target, bias, shift=True, softcap=3.0)

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    leaves = [hidden, weight, bias]
    found, expected = (results(lambda f=f: f(*leaves), leaves) for f in (compiled, loss))
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)  # the same operator


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_autocast_computes_as_a_linear_layer_would(compiled, native, monkeypatch):
    """Products of operands rounded to bfloat16; the weight's gradient is not rounded to it.

    `native`: as on a CPU with bfloat16 products of its own, which rounds their results as well.
    """
    monkeypatch.setattr("fused_remat.steps.linear.widens", lambda x: not native)
    hidden, weight, bias, target = operands(torch.float32)
    low = [t.detach().bfloat16().double().requires_grad_() for t in (hidden, weight, bias)]

    def loss(hidden, weight, bias):
        with torch.autocast("cpu", torch.bfloat16):
            return ops.linear_cross_entropy(hidden, weight, target, bias)

    torch._dynamo.reset()
    run = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    with SavedBytes(exclude=[weight, bias, target]) as saved:
        found = run(hidden, weight, bias)
    assert saved.total == hidden.numel() * 2 + target.numel() * 8 + 8  # the mean's divisor
    exact = plain(*low[:2], target, low[2])
    grads = torch.autograd.grad(found, [hidden, weight, bias])
    assert all(grad.dtype == torch.float32 for grad in grads)
    # Of operands rounded alike, only sums in float32 differ, and dhidden is rounded to bfloat16, by
    # 2**-8 of a value at most. Native products round logits as well: in a token's loss that is two
    # roundings of a number of a few units, in the mean of all tokens less than one of 1.
    unit = 2**-8
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=unit if native else 1e-5)
    allowed = (2 * unit,) * 3 if native else (unit, 1e-5, 1e-5)
    for grad, truth, tolerance in zip(grads, torch.autograd.grad(exact, low), allowed, strict=True):
        assert (grad - truth).norm() <= tolerance * truth.norm()
