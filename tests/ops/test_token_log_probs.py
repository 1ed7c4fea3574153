"""`ops.token_log_probs`: values and gradients of complete logits' softmax, and what is kept."""

import pytest
import torch
import torch.nn.functional as F
from block_inputs import check_beside, compare
from test_linear_cross_entropy import BLOCKS, operands
from tiers import pairwise

from fused_remat import ops
from fused_remat.ops.token_log_probs import token_losses
from fused_remat.report.allocations import SavedBytes

OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "all": {"temperature": 1.3, "softcap": 2.0, "logit_scale": 1.7},
}


def logits_of(hidden, weight, bias, temperature=1.0, softcap=0.0, logit_scale=1.0):
    z = F.linear(hidden, weight, bias)
    z = logit_scale * z.to(torch.promote_types(z.dtype, torch.float32))
    return (softcap * torch.tanh(z / softcap) if softcap else z) / temperature


def plain(hidden, weight, bias, target, **options):
    """Stack log-probabilities and entropies, from complete logits."""
    log_p = logits_of(hidden, weight, bias, **options).log_softmax(-1)
    used = target != -100
    picked = log_p.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    # Where p is 0, its term is 0 and log p may be -inf.
    entropy = -(log_p.exp() * log_p.clamp(min=-1e4)).sum(-1)
    return torch.stack((picked, entropy)).masked_fill(~used, 0)


def fused(hidden, weight, bias, target, **options):
    return torch.stack(
        ops.token_log_probs(hidden, weight, target, bias=bias, entropy=True, **options)
    )


@pytest.mark.parametrize("options, chunk", pairwise(list(OPTIONS), [None, BLOCKS, 1]))
def test_are_those_of_complete_logits(options, chunk):
    """Together, and each alone; of a token that does not count both are 0."""
    *leaves, target = operands()
    given = OPTIONS[options]
    ours = lambda: fused(*leaves, target, chunk=chunk, **given)  # noqa: E731
    theirs = lambda: plain(*leaves, target, **given)  # noqa: E731
    compare(ours, theirs, leaves)
    for one in (0, 1):
        compare(lambda at=one: ours()[at], lambda at=one: theirs()[at], leaves)
    hidden, weight, bias = leaves
    alone = ops.token_log_probs(hidden, weight, target, bias=bias, **given)
    torch.testing.assert_close(alone, theirs()[0])
    assert not alone[target == -100].any()


def test_gradients_are_derivatives():
    *leaves, target = operands(scale=0.5)
    assert torch.autograd.gradcheck(
        lambda *t: fused(*t, target, chunk=BLOCKS, **OPTIONS["all"]), leaves
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 6.0], ids=["spread", "confident"])
def test_errors_are_within_those_of_pytorch(dtype, scale):
    hidden, weight, bias, target = operands(dtype, scale=scale)
    tensors = {"hidden": hidden, "weight": weight, "bias": bias, "target": target}
    check_beside(
        lambda t: fused(**t, chunk=BLOCKS, temperature=0.9),
        lambda t: plain(**t, temperature=0.9), tensors, computed=dtype,
    )  # fmt: skip


def test_masked_columns_have_no_part():
    """A bias of -inf, in some blocks of all columns; a class of all the mass has entropy 0."""
    hidden, weight, bias, target = operands()
    with torch.no_grad():
        bias[:20] = -torch.inf
    target = target.clamp(min=20)
    leaves = [hidden, weight]
    compare(
        lambda: fused(*leaves, bias.detach(), target, chunk=BLOCKS),
        lambda: plain(*leaves, bias.detach(), target),
        leaves,
    )
    with torch.no_grad():
        bias[21:] = -torch.inf
    found = fused(*leaves, bias.detach(), torch.full_like(target, 20), chunk=BLOCKS)
    assert not found.any()
    assert not any(grad.any() for grad in torch.autograd.grad(found.sum(), leaves))


def test_statistics_without_gradients():
    """What TRL logs and weights by, in any order; a tie is decided for the first column."""
    hidden, weight, bias, target = operands()
    with torch.no_grad():
        weight[40], bias[40] = weight[7], bias[7].add_(12.0)
    z = logits_of(hidden, weight, bias)
    target[0], target[1:] = 40, z[1:].argmax(-1)
    assert (z[0].argmax(-1) == 7).any() and (target == 7).any()
    names = "is_top1", "mean_logits", "entropy", "log_sum_sq_probs"
    exact = {
        "is_top1": (z.argmax(-1) == target).double(),
        "mean_logits": z.mean(-1),
        "entropy": torch.distributions.Categorical(logits=z).entropy(),
        "log_sum_sq_probs": (2 * z.log_softmax(-1)).logsumexp(-1),
    }
    for chunk in (None, BLOCKS):
        _, *found = token_losses(hidden, weight, bias, target, outputs=names, chunk=chunk)
        for name, ours in zip(names, found, strict=True):
            torch.testing.assert_close(ours, exact[name].masked_fill(target == -100, 0))


@pytest.mark.parametrize("entropy", [False, True])
def test_hidden_and_two_or_three_numbers_a_token_are_kept(entropy):
    hidden, weight, bias, target = operands(torch.bfloat16)
    with SavedBytes(exclude=[weight, bias, target]) as saved:
        ops.token_log_probs(hidden, weight, target, bias=bias, entropy=entropy)
    assert saved.total == hidden.nbytes + target.numel() * (12 if entropy else 8)


@pytest.mark.composes("torch.compile", "`ops.token_log_probs`, with the entropy")
def test_compiles_whole():
    *leaves, target = operands(torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    results = []
    for run in (compiled, fused):
        out = run(*leaves, target)
        results.append([out.detach(), *torch.autograd.grad(out.sum(), leaves)])
    torch.testing.assert_close(*results, rtol=0, atol=0)  # the same operator


def test_refused_arguments():
    hidden, weight, _, target = operands()
    with pytest.raises(ValueError, match=r"temperature must be positive and finite, got 0\.0"):
        ops.token_log_probs(hidden, weight, target, temperature=0.0)
    with pytest.raises(IndexError, match=r"53 is out of bounds: .* 53 columns\. Pass -100"):
        ops.token_log_probs(hidden, weight, target.fill_(53))
