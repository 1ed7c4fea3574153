"""The loss of a head: statistics and gradients of logits in every tile, and the op, in blocks."""

import pytest
import torch
import torch.nn.functional as F
from places import (
    BF16,
    DEVICE,
    ON_GPU,
    PLACE,
    at,
    check_all,
    check_error,
    check_written,
    compiled,
    double,
    ids,
    nan,
    normal,
    poisoned,
    sized,
    target,
)  # fmt: skip

from fused_remat import ops
from fused_remat.steps.token_losses import CrossEntropyTargets, losses
from fused_remat.triton import cross_entropy as kernels
from fused_remat.triton import tables

pytestmark = pytest.mark.usefixtures("floats_are_tensors")
F16, F32 = torch.float16, torch.float32
# Tokens, vocabulary, width. Interpreted: single, odd, even sizes (tensor descriptors), more tiles
# than programs.
CASES = at(
    [(BF16, (1030, 4001, 328))],
    [(F32, (1, 1, 1)), (F32, (33, 65, 63)), (BF16, (40, 136, 32))],
    [(BF16, (200, 333, 72)), (F16, (130, 257, 63))],
)
CASE = pytest.mark.parametrize(("dtype", "shape"), CASES, **ids)
INDEX = pytest.mark.parametrize("index", range(compiled(3, 2)))
OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": at(1e-3, 0.01), "softcap": at(10.0, 3.0)},
    "scaled": {"softcap": at(10.0, 3.0), "logit_scale": 1.7},
}
ALL = pytest.mark.parametrize("softcap", [0.0, 3.0], ids=["plain", "all"])
BACKENDS = {"gpu": ["triton", "eager"], "aten": ["eager"]}.get(PLACE, ["triton"])


def operands(dtype, tokens, vocab, width):
    """Leaves hidden, weight and bias; targets, of which the first and every seventh are ignored."""
    hidden, weight = normal(dtype, tokens, width), normal(dtype, vocab, width, scale=width**-0.5)
    labels = torch.randint(vocab, (tokens,), device=DEVICE)
    labels[::7] = -100
    return *(t.requires_grad_() for t in (hidden, weight, normal(dtype, vocab))), labels


def tile_of(kernel, index):
    tiles = tables.TILES[kernel].get(tables.family(target()), ())
    if index >= len(tiles):
        pytest.skip("no such tile")
    return tiles[index]


def logits(x, weight, bias, softcap):
    """In float64, before and after the soft-cap."""
    z = F.linear(*double(x, weight, bias)).requires_grad_()
    return z, softcap * torch.tanh(z / softcap) if softcap else z


@pytest.mark.gpu
@INDEX
@CASE
@ALL
def test_statistics_of_tiles(index, dtype, shape, softcap):
    """Everything is written, nothing beside it; the target's logit by one tile alone."""
    tile, (m, n, _) = tile_of("cross_entropy_fwd", index), shape
    x, weight, bias, labels = (t.detach() for t in operands(dtype, *shape))
    # As if the weights were a part of a larger vocabulary; sums of all logits for smoothing.
    first, bias, smoothing = (1000, bias, 0.1) if softcap else (0, None, 0.0)
    highs, sums, totals = (nan(-(-n // tile.block_n), m) for _ in range(3))
    picked, totals = nan(m), totals if smoothing else None
    kernels.cross_entropy_fwd(
        x, weight, bias, labels + first, softcap, first, highs, sums, totals, picked, target(), tile
    ).run()
    _, z = logits(x, weight, bias, softcap)
    used = labels >= 0
    assert torch.equal(picked.isnan(), ~used)
    check_error(highs.amax(0), z.amax(1), compiled(1, 4))
    check_error(picked[used], z[used].gather(1, labels[used, None])[:, 0], compiled(1, 4))
    total = torch.zeros(m, device=DEVICE) if totals is None else totals.sum(0)
    parts = highs.t(), sums.t(), picked.nan_to_num()[:, None], total[:, None]
    assert not any(part.isnan().any() for part in parts)
    call = CrossEntropyTargets(labels, -100, smoothing, 0.0, softcap, 0)
    loss, high, log_sum = losses(*parts, n, call)
    check_error(high + log_sum, z.logsumexp(1, keepdim=True), compiled(1, 4))
    exact = F.cross_entropy(z, labels, label_smoothing=smoothing, reduction="none")
    check_error(loss[used, 0], exact[used], compiled(1, 4))


@pytest.mark.gpu
@INDEX
@CASE
@ALL
def test_gradient_of_logits(index, dtype, shape, softcap):
    tile, (m, n, _) = tile_of("cross_entropy_bwd", index), shape
    x, weight, bias, labels = (t.detach() for t in operands(dtype, *shape))
    first, bias, smoothing = (7, bias, 0.1) if softcap else (0, None, 0.0)
    z, capped = logits(x, weight, bias, softcap)
    dy = torch.randn(m, dtype=torch.float64, device=DEVICE).masked_fill(labels < 0, 0.0)
    loss = F.cross_entropy(capped, labels, label_smoothing=smoothing, reduction="none")
    (exact,) = torch.autograd.grad(loss, z, dy)
    high = capped.detach().amax(1)
    log_sum = capped.detach().logsumexp(1) - high
    # A token that does not count may be anything.
    stats = high.float().masked_fill(labels < 0, torch.nan), log_sum.float()
    dz, dy = poisoned(m, n, dtype), dy.float()
    slopes = dy, dy * (-smoothing / n) if smoothing else None, dy * (smoothing - 1.0)
    kernels.cross_entropy_bwd(
        x, weight, bias, labels + first, softcap, first, stats, slopes, dz, target(), tile
    ).run()
    check_written(dz)
    check_error(dz, exact, compiled(1, 4))


@pytest.mark.gpu
@INDEX
@CASE
@ALL
def test_gradient_of_logits_in_place_of_their_exponentials(index, dtype, shape, softcap):
    """Of what forward writes, rounded to 16 bits; a target that is almost certain keeps its own."""
    tile, (m, n, _) = tile_of("cross_entropy_exps", index), shape
    x, weight, bias, labels = (t.detach() for t in operands(dtype, *shape))
    bias[0] += 30.0  # of all the mass, to rounding, in most rows
    labels[1::3] = 0
    smoothing = 0.1 if softcap and dtype != F16 else 0.0
    z, capped = logits(x, weight, bias, softcap)
    loss = F.cross_entropy(capped, labels, label_smoothing=smoothing, reduction="none")
    (exact,) = torch.autograd.grad(loss.sum(), z)
    highs, sums = (nan(-(-n // tile.block_n), m) for _ in range(2))
    picked, exps = torch.zeros(m, device=DEVICE), poisoned(m, n, dtype)
    given = x, weight, bias, labels, softcap, 0, highs, sums, None, picked
    kernels.cross_entropy_fwd(*given, target(), tile, exps).run()
    check_written(exps)
    tops = highs.repeat_interleave(tile.block_n, 0)[:n].t().double()
    check_error(exps, (capped.detach() - tops).exp(), compiled(1, 4))
    high = capped.detach().amax(1)
    stats = high.float(), (capped.detach().logsumexp(1) - high).float()
    mass = (labels >= 0).float()
    slopes = mass, mass * (-smoothing / n) if smoothing else None, mass * (smoothing - 1.0)
    kernels.cross_entropy_grad(exps, labels, softcap, highs, stats, slopes, tile.block_n).run()
    check_error(exps, exact, compiled(2, 8))
    sure = labels >= 0
    at = exps[sure].gather(1, labels[sure, None]), exact[sure].gather(1, labels[sure, None])
    check_error(*at, compiled(1, 4))


@pytest.mark.parametrize("dtype", [BF16, F32], **ids)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("vocab", [32_000, 50_257], ids=["even", "odd"])
@pytest.mark.parametrize("options", [*OPTIONS, "frozen weights"])
@pytest.mark.parametrize("chunk", at([1 << 20], [None, 700]), ids=str)
@pytest.mark.parametrize("early", [False, True], ids=["in backward", "in forward"])
def test_loss_and_gradients(dtype, backend, vocab, options, chunk, early):
    """In one block, and in several, of tokens and of columns, as a default takes for more."""
    tokens, width, classes = sized(1500, 512, vocab, tiny=(21, 24, 75 + vocab % 2))
    *leaves, labels = operands(dtype, tokens, classes, width)
    wanted = (True, options in OPTIONS, options in OPTIONS)

    def results(backend, dtype):
        made = (t.detach().to(dtype) for t in leaves)
        hidden, weight, bias = (t.requires_grad_(w) for t, w in zip(made, wanted, strict=True))
        how = {"chunk": chunk, "backend": backend, **OPTIONS.get(options, {})}
        how["grad_in_forward"] = early
        loss = ops.linear_cross_entropy(hidden, weight, labels, bias, **how)
        grads = torch.autograd.grad(loss, [t for t in (hidden, weight, bias) if t.requires_grad])
        return [loss.detach(), *grads]

    found, exact = results(backend, dtype), results("eager", torch.float64)
    assert found[0].dtype == F32
    # ATen's logits are of 16 bits; here their gradient is rounded to these before the products.
    check_error(found[0], exact[0], compiled(1, 4), dtype=dtype if PLACE == "aten" else F32)
    check_all(found[1:], exact[1:], compiled(1, 4))


def test_no_host_sync_and_autocast():
    """Weights are rounded a block at a time; nothing waits for a GPU: targets are checked there."""
    tokens, width, vocab = sized(512, 256, 1000, tiny=(21, 24, 75))
    hidden, weight, _, labels = operands(F32, tokens, vocab, width)

    def results():
        with torch.autocast(DEVICE.type, BF16):
            loss = ops.linear_cross_entropy(
                hidden, weight, labels, chunk=at(None, 700), backend=BACKENDS[0]
            )
        return loss.detach(), torch.autograd.grad(loss, [hidden, weight])

    results()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        loss, grads = results()
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")
    low = [t.detach().to(BF16).double().requires_grad_() for t in (hidden, weight)]
    exact = F.cross_entropy(F.linear(*low), labels)
    check_error(loss, exact.detach(), compiled(1, 4), dtype=F32 if PLACE == "interpreter" else BF16)
    for ours, truth in zip(grads, torch.autograd.grad(exact, low), strict=True):
        # float32 here; operands of the products were rounded to 16 bits.
        assert ours.dtype == F32
        check_error(ours, truth, compiled(1, 4), dtype=BF16)
