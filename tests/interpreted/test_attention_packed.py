"""Attention's kernels, interpreted: packed sequences, and which blocks are visited."""

import pytest
import torch
from attention_cases import (
    INF,
    SMALL,
    attention_call,
    check,
    normal,
    packed_heads,
    run_kernels,
    spoiled_results,
)  # fmt: skip
from poisoned import TARGET

from fused_remat.triton import attention

PACKED = {
    "self": ([0, 5, 5, 33, 40], None),
    "tail": ([0, 9, 21], None),
    "head": ([3, 20, 38], None),
    "cross": ([0, 5, 20, 20, 40], [0, 17, 21, 30, 36]),
    "none": ([0], None),
}


@pytest.mark.parametrize("name", PACKED)
@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (4, 1)], ids=str)
def test_packed_sequences(name, window):
    cu_q, cu_k = (None if c is None else torch.tensor(c, dtype=torch.int32) for c in PACKED[name])
    cu_k = cu_q if cu_k is None else cu_k
    options = dict(cu_q=cu_q, cu_k=cu_k, left=window[0], right=window[1], p=0.2)
    sizes = (1, 2, 1, 40, 40, 16)
    clean = check(sizes, **options)

    def spoil(q, k, v):
        q[:, :, int(cu_q[-1]) :] = torch.nan
        k[:, :, int(cu_k[-1]) :], v[:, :, int(cu_k[-1]) :] = torch.nan, INF
        return q, k, v

    spoiled = spoiled_results(sizes, torch.float32, spoil, **options)
    for found in ("out", "dq", "dk", "dv"):
        assert torch.equal(spoiled[found], clean[found]), found


@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_tokens_of_no_sequence_may_hold_anything(softcap):
    """NaN in them, and in their gradient, reaches no other token, and their own gradient is 0."""
    torch.manual_seed(0)
    cu = torch.tensor([3, 20, 38])
    call = attention_call((1, 2, 1, 40, 40, 16), cu_q=cu, cu_k=cu, softcap=softcap)
    outside = torch.ones(40, dtype=torch.bool)
    outside[3:38] = False
    _, heads = packed_heads((1, 2, 1, 40, 40, 16), torch.float32, 16, normal)
    dattn = normal(40, 32, torch.float32)
    clean = run_kernels(call, *heads, dattn)
    for x in heads:
        x[:, :, outside] = torch.nan
    dattn[outside] = torch.nan
    spoiled = run_kernels(call, *heads, dattn)
    for name in ("out", "dq", "dk", "dv"):
        assert torch.equal(spoiled[name], clean[name]), name
    assert (spoiled["dq"][:, :, outside] == 0.0).all()


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
def test_bounds_beyond_the_tokens_reach_no_others(by_keys):
    """On a GPU nobody checks them: nothing beyond the tensors may be read for it."""
    cu = torch.tensor([-5, 9, 1000])
    call = attention_call((1, 1, 1, 40, 40, 16), cu_q=cu, cu_k=cu)
    bounds, launch = attention._bounds(call, 80, 80, by_keys)
    launch.run()
    assert bounds.min() >= 0 and bounds.max() <= 40


def test_packed_sequences_with_masks():
    cu = torch.tensor([0, 13, 30])
    mask, padding = torch.randn(1, 2, 40, 40), torch.rand(1, 40) < 0.2
    check(
        (1, 2, 2, 40, 40, 16), cu_q=cu, cu_k=cu, mask=mask, padding=padding, mask_grad=True, right=0
    )


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
@pytest.mark.parametrize("name", PACKED)
def test_intervals_of_packed_sequences(name, by_keys):
    cu_q, cu_k = (None if c is None else torch.tensor(c) for c in PACKED[name])
    call = attention_call(
        (1, 1, 1, 40, 40, 16), cu_q=cu_q, cu_k=cu_q if cu_k is None else cu_k, left=4, right=2
    )
    bounds, launch = attention._bounds(call, 4, 2, by_keys)
    launch.run()
    seen = torch.zeros(40, 40, dtype=torch.bool)
    for i in range(cu_q.numel() - 1):
        for q in range(int(cu_q[i]), int(cu_q[i + 1])):
            at = q + int(call.cu_k[i + 1]) - int(cu_q[i + 1])
            first, last = max(int(call.cu_k[i]), at - 4), min(int(call.cu_k[i + 1]), at + 3)
            seen[q, first:last] = True
    row = torch.arange(40)
    expected = seen.t() if by_keys else seen
    assert torch.equal((row >= bounds[:, :1]) & (row < bounds[:, 1:]), expected)


@pytest.mark.parametrize("by_keys", [False, True], ids=["by queries", "by keys"])
def test_lists_of_blocks(by_keys):
    """Visited is what anything of is seen; without mask arithmetic, what is seen whole."""
    mask = torch.zeros(2, 1, 37, 70)
    mask[0, :, :, 16:32], mask[0, 0, 3, 5], mask[1, :, 16:, :20] = -INF, 0.5, -INF
    padding = torch.zeros(2, 70, dtype=torch.bool)
    padding[1, 50:] = True
    call = attention_call((2, 3, 3, 37, 70, 16), mask=mask, padding=padding, right=4, left=40)
    problem, before = attention.prepare(torch.empty(2, 3, 37, 16), call, TARGET, True)
    blocks, strides, launches = attention.lists(problem, SMALL, by_keys)
    for launch in before + launches:
        launch.run()
    assert blocks.shape[:2] == (2, 1) and strides[1] == 0
    place = torch.arange(37)[:, None] + 33
    window = (torch.arange(70) <= place + 4) & (torch.arange(70) >= place - 40)
    bias = mask[:, 0].masked_fill(padding[:, None], -INF).masked_fill(~window, -INF)
    if by_keys:
        bias = bias.transpose(1, 2)
    rows, cols = bias.shape[1:]
    width = -(-cols // 16)
    for b in range(2):
        for i in range(-(-rows // 16)):
            row = blocks[b, 0, i]
            pieces = [bias[b, 16 * i : 16 * i + 16, 16 * j : 16 * j + 16] for j in range(width)]
            whole = [j for j in range(width) if (pieces[j] == 0).all() and pieces[j].shape[1] == 16]
            partial = [j for j in range(width) if (pieces[j] != -INF).any() and j not in whole]
            assert row[: row[width]].tolist() == partial
            assert sorted(row[width - row[width + 1] : width].tolist()) == whole
