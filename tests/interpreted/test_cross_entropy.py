import pytest
import torch
import torch.nn.functional as F
from poisoned import TARGET, check_error, check_margin, poisoned

from fused_remat import ops
from fused_remat.steps.cross_entropy import CrossEntropyCall, losses
from fused_remat.triton import cross_entropy as kernels
from fused_remat.triton import tables

# M, N, K: single, odd, even sizes (tensor descriptors), more tiles than programs.
CASES = [
    (torch.float32, (1, 1, 1)),
    (torch.float32, (33, 65, 63)),
    (torch.float16, (40, 136, 32)),
]
TILES = tables.TILES["cross_entropy_fwd"]["interpreter"]
OPTIONS = {
    "plain": {},
    "all": {"label_smoothing": 0.1, "z_loss": 0.01, "softcap": 3.0},
}
ids = {"ids": lambda value: str(value).removeprefix("torch.").replace(" ", "")}

pytestmark = pytest.mark.usefixtures("floats_are_tensors")


def operands(dtype, tokens, vocab, width):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width) * 2 * width**-0.5).to(dtype).requires_grad_()
    bias = torch.randn(vocab).to(dtype).requires_grad_()
    return hidden, weight, bias, torch.randint(0, vocab, (tokens,))


@pytest.mark.parametrize("tile", TILES, ids=["whole", "split"])
@pytest.mark.parametrize(("dtype", "shape"), CASES, **ids)
def test_statistics_of_tiles(tile, dtype, shape):
    """Everything is written, nothing beside it; the target's logit by one tile alone."""
    m, n, _ = shape
    x, weight, bias, target = (t.detach() for t in operands(dtype, *shape))
    target[0] = -100
    first = 1000  # as if the weights were a part of a larger vocabulary
    tiles = -(-n // tile.block_n)
    highs, sums, totals = (torch.full((tiles, m), torch.nan) for _ in range(3))
    picked = torch.full((m,), torch.nan)
    call = CrossEntropyCall(target, -100, 0.1, 0.0, 3.0, 0)
    kernels.cross_entropy_fwd(
        x, weight, bias, target + first, 3.0, first, highs, sums, totals, picked, TARGET, tile
    ).run()
    z = 3 * torch.tanh(F.linear(x.double(), weight.double(), bias.double()) / 3)
    assert picked[0].isnan() and not picked[1:].isnan().any()
    picked[0] = 0
    parts = highs.t(), sums.t(), picked[:, None], totals.sum(0)[:, None]
    assert not any(part.isnan().any() for part in parts)
    loss, high, log_sum = losses(*parts, n, call)
    check_error(high + log_sum, z.logsumexp(1, keepdim=True), torch.float32, 4)
    exact = F.cross_entropy(z[1:], target[1:], label_smoothing=0.1, reduction="none")
    check_error(loss[1:, 0], exact, torch.float32, 4)


@pytest.mark.parametrize("tile", TILES, ids=["whole", "split"])
@pytest.mark.parametrize(("dtype", "shape"), CASES, **ids)
@pytest.mark.parametrize("softcap", [0.0, 3.0])
def test_gradient_of_logits(tile, dtype, shape, softcap):
    m, n, _ = shape
    x, weight, bias, target = (t.detach() for t in operands(dtype, *shape))
    z = F.linear(x.double(), weight.double(), bias.double()).requires_grad_()
    capped = softcap * torch.tanh(z / softcap) if softcap else z
    dy = torch.randn(m, dtype=torch.float64)
    dy[0] = 0.0
    loss = F.cross_entropy(capped, target, label_smoothing=0.1, reduction="none")
    (exact,) = torch.autograd.grad(loss, z, dy)
    high = capped.detach().amax(1)
    log_sum = (capped.detach().logsumexp(1) - high).float()
    high[0] = torch.nan  # a token that does not count may be anything
    dz, dy = poisoned(m, n, dtype), dy.float()
    slopes = dy, dy * (-0.1 / n), dy * -0.9
    stats = high.float(), log_sum
    launch = kernels.cross_entropy_bwd(
        x, weight, bias, target + 7, softcap, 7, stats, slopes, dz, TARGET, tile
    )
    launch.run()
    check_margin(dz)
    check_error(dz, exact, dtype, 4)


@pytest.mark.parametrize("chunk", [None, 700], ids=["whole", "blocks"])
@pytest.mark.parametrize("options", OPTIONS)
def test_the_op_is_the_eager_backends(chunk, options):
    dtype = torch.float16 if chunk else torch.float32
    given = operands(dtype, 21, 75, 24)
    leaves, target = given[:3], given[3]
    target[::4] = -100

    def run(backend, *tensors):
        loss = ops.linear_cross_entropy(
            *tensors[:2], target, tensors[2], chunk=chunk, backend=backend, **OPTIONS[options]
        )
        return [loss.detach(), *torch.autograd.grad(loss, tensors)]

    found = run("triton", *leaves)
    exact = run("eager", *(t.detach().double().requires_grad_() for t in leaves))
    assert found[0].dtype == torch.float32
    for ours, truth in zip(found, exact, strict=True):
        # The logits' gradient is rounded to float16 once more before the products.
        check_error(ours, truth, dtype, 4)


def test_weights_in_another_dtype_and_frozen_ones():
    """Under autocast weights are rounded a block at a time; what is frozen has no gradient."""
    hidden, weight, bias, target = operands(torch.float32, 21, 75, 24)
    with torch.autocast("cpu", torch.float16):
        loss = ops.linear_cross_entropy(hidden, weight, target, chunk=700, backend="triton")
    low = [t.detach().half().double().requires_grad_() for t in (hidden, weight)]
    exact = F.cross_entropy(F.linear(*low), target)
    check_error(loss.detach(), exact.detach(), torch.float32, 4)
    grads = torch.autograd.grad(loss, [hidden, weight])
    for ours, truth in zip(grads, torch.autograd.grad(exact, low), strict=True):
        assert ours.dtype == torch.float32
        check_error(ours, truth, torch.float16, 4)
    loss = ops.linear_cross_entropy(
        hidden, weight.detach(), target, bias.detach(), backend="triton"
    )
    exact = F.cross_entropy(F.linear(hidden, weight.detach(), bias.detach()), target)
    (ours,), (truth,) = (torch.autograd.grad(y, [hidden]) for y in (loss, exact))
    check_error(ours, truth, torch.float32, 4)


@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_ignored_tokens_may_hold_anything():
    hidden, weight, _, target = operands(torch.float32, 8, 40, 16)
    with torch.no_grad():
        hidden[2:4] = torch.nan
    target[2:4] = -100
    loss = ops.linear_cross_entropy(hidden, weight, target, reduction="none", backend="triton")
    assert loss[2:4].tolist() == [0.0, 0.0]
    with pytest.raises(IndexError, match="Target 40 is out of bounds"):
        ops.linear_cross_entropy(hidden, weight, target.clamp(min=40), backend="triton")
