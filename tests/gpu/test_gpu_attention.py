"""ATen's fused attention kernels as the backends call them, against explicit float64 attention."""

import contextlib

import pytest
import torch
from attention_calls import attention_call
from gpu_checks import BF16, DEVICE, ON_GPU, error_of, normal, sized
from torch.nn.attention import SDPBackend, sdpa_kernel

from fused_remat.steps import attention_library
from fused_remat.steps.attention import attention_bwd, attention_fwd

pytestmark = pytest.mark.gpu
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# Relative L2. The kernels round the probabilities and their gradients to the dtype before the next
# product, besides the result, and backward multiplies what forward rounded: about six roundings of
# 1.6e-3 in bfloat16, some of them shared by a whole row. float32: three tf32 products for one.
TOLERANCE = {torch.bfloat16: 1e-2, torch.float16: 1.5e-3, torch.float32: 1e-4}
B, H, S, E = sized(2, 8, 1000, 64) if ON_GPU else (2, 4, 33, 8)


def make_call(q_len=S, kv_len=S, kv_heads=H, causal=False, mask=None, padding=None, keeps=False):
    """A call without dropout."""
    return attention_call(
        (B, H, kv_heads, q_len, kv_len, E), right=0 if causal else -1, mask=mask, padding=padding,
        true_means="attend" if keeps else "exclude",
    )  # fmt: skip


def exact_attention(q, k, v, call, bias):
    """softmax(scale * q kᵀ + bias) v in the dtype of q; 0 for a row that sees nothing."""
    group = call.spec.num_heads // call.spec.num_kv_heads
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = call.spec.scale * q @ k.transpose(-1, -2)
    if bias is not None:
        scores = scores + bias
    if call.spec.window[1] == 0:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return (scores.masked_fill(nothing, 0.0).softmax(-1) @ v).masked_fill(nothing, 0.0)


def check(call, dtype, bias=None, strided=False):
    """Output and gradients, of the ATen body."""

    def heads(count, length):
        if strided:  # as views of a packed projection are
            return normal(dtype, B, length, 3, count, E)[:, :, 1].transpose(1, 2)
        return normal(dtype, B, count, length, E)

    q, k = heads(call.spec.num_heads, call.q_len), heads(call.spec.num_kv_heads, call.kv_len)
    v, dattn = heads(call.spec.num_kv_heads, call.kv_len), normal(dtype, B * call.q_len, H * E)
    assert attention_library.why_not_call(q, v, call) is None
    attn, lse = attention_fwd(q, k, v, call)
    assert lse.dtype == torch.float32 and lse.numel() == B * H * call.q_len
    grads = tuple(torch.full_like(t, torch.nan) for t in (q, k, v))
    attention_bwd(dattn, q, k, v, attn, lse, call, grads)
    leaves = [t.double().requires_grad_() for t in (q, k, v)]
    exact = exact_attention(*leaves, call, bias).transpose(1, 2).reshape(attn.shape)
    found = dict(zip(("attn", "dq", "dk", "dv"), (attn, *grads), strict=True))
    for (name, mine), true in zip(
        found.items(), (exact, *torch.autograd.grad(exact, leaves, dattn.double())), strict=True
    ):
        error = error_of(mine, true.detach())
        assert error <= TOLERANCE[dtype], f"relative error of {name} is {error:.1e}"


@contextlib.contextmanager
def only(name):
    """PyTorch may take this kernel alone; skips where it does not serve this device."""
    if not ON_GPU:
        yield
        return
    with sdpa_kernel([KERNELS[name]]):
        q = normal(torch.float16, B, H, S, E)
        if attention_library.kernel(q, *make_call()) != name:
            pytest.skip(f"no {name} kernel here")
        yield


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("strided", [False, True], ids=["whole", "strided"])
def test_kernels_without_a_mask(name, causal, dtype, strided):
    with only(name):
        check(make_call(causal=causal), dtype, strided=strided)


@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_float32(causal):
    check(make_call(causal=causal), torch.float32)


@pytest.mark.parametrize("name", KERNELS)
def test_shared_key_heads(name):
    """Query heads of a group are a call each, on slices of everything."""
    with only(name):
        check(make_call(kv_heads=H // 4), BF16)


def test_shared_key_heads_with_a_mask():
    mask = normal(BF16, S, S)
    check(make_call(kv_heads=H // 4, mask=mask), BF16, mask.double())


def test_other_lengths():
    check(make_call(q_len=S // 2 + 3, kv_len=S), BF16)


def far_rows(dtype):
    """A float mask: random; a row that sees nothing, half of it, and one with -1e9 everywhere."""
    mask = normal(torch.float32, S, S)
    mask[3], mask[5, : S // 2] = -torch.inf, -torch.inf
    if ON_GPU:  # on a CPU such a row is not the fused kernel's
        mask[7] = -1e9
    return mask.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("padded", [False, True], ids=["mask", "mask and padding"])
def test_float_masks(dtype, padded):
    """Beside -1e9 a logsumexp loses the scores: such a row is shifted before the kernel sees it."""
    mask = far_rows(dtype)
    bias, padding = mask.double(), None
    if ON_GPU:
        bias[7] = 0.0  # the same softmax: -1e9 everywhere changes nothing
    if padded:
        padding = torch.zeros(B, S, dtype=torch.bool, device=DEVICE)
        padding[1, -S // 3 :] = True
        bias = bias + torch.zeros(B, 1, 1, S, device=DEVICE).masked_fill(
            padding[:, None, None], -torch.inf
        )
    check(make_call(mask=mask, padding=padding), dtype, bias)


@pytest.mark.parametrize("keeps", [False, True], ids=["excludes", "keeps"])
def test_bool_masks(keeps):
    """One for every sequence and head; rows that see nothing."""
    excluded = torch.rand(B, H, S, S, device=DEVICE) < 0.3
    excluded[:, 1, 3:6] = True
    bias = torch.zeros(B, H, S, S, device=DEVICE, dtype=torch.float64)
    bias.masked_fill_(excluded, -torch.inf)
    mask = ~excluded if keeps else excluded
    check(make_call(mask=mask, keeps=keeps), BF16, bias)


def test_padding_of_a_whole_sequence():
    padding = torch.zeros(B, S, dtype=torch.bool, device=DEVICE)
    padding[0] = True
    padding[1, S // 2 :] = True
    bias = torch.zeros(B, 1, 1, S, device=DEVICE, dtype=torch.float64)
    bias.masked_fill_(padding[:, None, None], -torch.inf)
    check(make_call(padding=padding), BF16, bias)


def test_same_bits_under_deterministic_algorithms():
    call, found = make_call(causal=True), []
    q, k, v = (normal(BF16, B, H, S, E) for _ in range(3))
    dattn = normal(BF16, B * S, H * E)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(5):
            attn, lse = attention_fwd(q, k, v, call)
            grads = tuple(torch.empty_like(q) for _ in range(3))
            attention_bwd(dattn, q, k, v, attn, lse, call, grads)
            found.append((attn, *grads))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
