"""The loss of a head on a GPU: both backends, every tile, against float64."""

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import BF16, DEVICE, ON_GPU, check_error, normal, sized, target

pytest.importorskip("triton", reason="Triton is not installed")

from fused_remat import ops
from fused_remat.triton import cross_entropy as kernels
from fused_remat.triton import tables

pytestmark = pytest.mark.gpu
OPTIONS = {"label_smoothing": 0.1, "z_loss": 1e-3, "softcap": 10.0}


def operands(dtype, tokens, width, vocab):
    """hidden, weight, and targets of which the first and every seventh are ignored."""
    hidden = normal(dtype, tokens, width).requires_grad_()
    weight = normal(dtype, vocab, width, scale=width**-0.5).requires_grad_()
    labels = torch.randint(vocab, (tokens,), device=DEVICE)
    labels[::7] = -100
    return hidden, weight, labels


def results(loss, leaves):
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["16 bits", "float32"])
@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("vocab", [32_000, 50_257], ids=["even", "odd"])
@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "all"])
def test_loss_and_gradients(dtype, backend, vocab, options):
    """In several blocks, of tokens and of columns, which is not what a default takes here."""
    tokens, width, classes = sized(1500, 512, vocab, tiny=(40, 24, 75 + vocab % 2))
    hidden, weight, labels = operands(dtype, tokens, width, classes)
    chunk = 1 << 20 if ON_GPU else 700
    loss = ops.linear_cross_entropy(hidden, weight, labels, chunk=chunk, backend=backend, **options)
    low = [t.detach().double().requires_grad_() for t in (hidden, weight)]
    exact = ops.linear_cross_entropy(*low, labels, chunk=chunk, backend="eager", **options)
    names = zip(results(loss, [hidden, weight]), results(exact, low), strict=True)
    for found, truth in names:
        check_error(found, truth)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize("kernel", ["cross_entropy_fwd", "cross_entropy_bwd"])
def test_every_tile(kernel, index):
    tiles = tables.TILES[kernel][tables.family(target())]
    if index >= len(tiles):
        pytest.skip("no such tile")
    tokens, width, vocab = sized(1030, 328, 4001)
    x, weight, labels = (t.detach() for t in operands(BF16, tokens, width, vocab))
    z = F.linear(x.double(), weight.double())
    high, columns = z.amax(1).float(), tiles[index].block_n
    log_sum = (z.logsumexp(1) - z.amax(1)).float()
    if kernel == "cross_entropy_fwd":
        highs, sums = (
            torch.full((-(-vocab // columns), tokens), torch.nan, device=DEVICE) for _ in range(2)
        )
        picked = torch.zeros(tokens, device=DEVICE)
        kernels.cross_entropy_fwd(
            x, weight, None, labels, 0.0, 0, highs, sums, None, picked, target(), tiles[index]
        ).run()
        check_error(highs.amax(0), high.double())
        check_error((highs + sums.log()).logsumexp(0), z.logsumexp(1))
        used = labels >= 0
        check_error(picked[used], z[used].gather(1, labels[used, None])[:, 0])
        return
    dz = torch.full((tokens, -(-vocab // 8) * 8), torch.nan, dtype=BF16, device=DEVICE)
    one = torch.ones(tokens, device=DEVICE)
    slopes = one, None, -one
    kernels.cross_entropy_bwd(
        x, weight, None, labels, 0.0, 0, (high, log_sum), slopes, dz[:, :vocab], target(),
        tiles[index],
    ).run()  # fmt: skip
    exact = z.softmax(1)
    used = (labels >= 0).nonzero()[:, 0]
    exact[used, labels[used]] -= 1
    check_error(dz[:, :vocab], exact)


def test_no_host_sync_and_autocast():
    """Nothing waits for the device: targets are checked there."""
    hidden, weight, labels = operands(torch.float32, *sized(512, 256, 1000))

    def step():
        with torch.autocast(DEVICE.type, BF16):
            loss = ops.linear_cross_entropy(hidden, weight, labels, backend="triton")
        return results(loss, [hidden, weight])

    step()
    if ON_GPU:
        torch.cuda.set_sync_debug_mode("error")
    try:
        found = step()
    finally:
        if ON_GPU:
            torch.cuda.set_sync_debug_mode("default")
    low = [t.detach().to(BF16).double().requires_grad_() for t in (hidden, weight)]
    for ours, truth in zip(
        found, results(F.cross_entropy(F.linear(*low), labels), low), strict=True
    ):
        # Of dhidden and dweight, float32 here, operands were rounded to 16 bits.
        assert (ours.double() - truth).norm() <= 4e-3 * truth.norm()
