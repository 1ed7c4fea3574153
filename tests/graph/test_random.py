"""The dropout generator: test vectors, rates, independence, and equal bits on both paths."""

import itertools

import numpy as np
import pytest
import torch

from fused_remat import random

M64, M32 = (1 << 64) - 1, (1 << 32) - 1


def mix64(z):
    z = ((z ^ (z >> 30)) * random.MIX64_MUL1) & M64
    z = ((z ^ (z >> 27)) * random.MIX64_MUL2) & M64
    return z ^ (z >> 31)


def hash31(seed, site, row, col):
    """The definition in `random.py`'s docstring, in Python integers."""
    site_key = mix64((seed + random.GOLDEN64 * (site + 1)) & M64)
    row_key = mix64((site_key + random.GOLDEN64 * (row + 1)) & M64)
    k0, k1 = row_key & M32, row_key >> 32
    x = ((((col * random.GOLDEN32) & M32) ^ k0) * (k1 | 1)) & M32
    return (((x ^ (x >> 16)) * random.MUL32) & M32) & 0x7FFFFFFF


# (seed, site, row, col) -> 31-bit hash; frozen: a change here breaks every saved run.
VECTORS = {
    (0, 0, 0, 0): 129277347,
    (0, 2, 1, 3): 2130729293,
    (1234567890123456789, 1, 63, 1000): 1970097110,
    (-1, 3, 2**32 + 5, 4095): 157814742,
    (2**63 - 1, 0, 2**40, 2**20): 998945017,
}


@pytest.mark.parametrize("point", VECTORS)
def test_vectors(point):
    seed, site, row, col = point
    assert hash31(seed & M64, site, row, col) == VECTORS[point]


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (63, 33), (7, 1000), (64, 2048)])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("row0", [0, 2**32 - 3, 2**40])
def test_keep_scale_follows_the_definition(rows, width, p, row0):
    seed = 987654321987
    key = random.site_keys(torch.tensor(seed))[random.MLP]
    got = random.keep_scale(key, row0, rows, width, p, torch.float64)
    points = itertools.product((0, rows // 2, rows - 1), (0, width // 3, width - 1))
    for row, col in points:
        kept = hash31(seed, random.MLP, row0 + row, col) < random.threshold(p)
        assert got[row, col].item() == (random.scale(p) if kept else 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("heads", "stride"), [(1, 0), (3, 17), (4, 2**33)])
def test_the_two_paths_give_the_same_bits(dtype, heads, stride, monkeypatch):
    seed = torch.tensor(-5)
    args = (9, 13, 37, 0.3, dtype, heads, stride)
    small = random.keep_scale(random.site_keys(seed)[1], *args)
    monkeypatch.setattr(random, "_SMALL", -1)
    large = random.keep_scale(random.site_keys(seed)[1], *args)
    assert torch.equal(small, large)
    monkeypatch.setattr(random, "_CACHED", 40)  # many passes
    assert torch.equal(small, random.keep_scale(random.site_keys(seed)[1], *args))


def draws(seed=7, site=2, rows=1024, width=1024, p=0.1):
    key = random.site_keys(torch.tensor(seed))[site]
    keep = random.keep_scale(key, 0, rows, width, p, torch.float32)
    kept = (keep > 0).numpy().astype(np.float64)
    return (kept - (1 - p)) / np.sqrt(p * (1 - p))  # mean 0, variance 1


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_rates_of_the_whole_of_rows_and_of_columns(p):
    z = draws(p=p)
    n, m = z.shape
    assert abs(z.mean()) * np.sqrt(z.size) < 4.5  # standard errors
    for axis, size in ((0, n), (1, m)):
        means = z.mean(axis) * np.sqrt(size)
        assert abs(means).max() < 5.0
        assert abs(means.var() - 1.0) < 0.2


def test_draws_are_independent():
    """Of neighbours, corners of rectangles, sites and seeds; columns are not correlated."""
    z = draws()
    products = [z[::2, ::2] * z[1::2, ::2] * z[::2, 1::2] * z[1::2, 1::2]]
    for lag in (1, 2, 3, 4, 8, 16, 64, 256):
        products += [z[:, lag:] * z[:, :-lag], z[lag:] * z[:-lag]]
    products += [draws(site=a) * draws(site=b) for a, b in itertools.combinations(range(4), 2)]
    products += [z * draws(seed=s) for s in (8, 7 + 2**32, -7)]
    for product in products:
        assert abs(product.mean()) * np.sqrt(product.size) < 4.5
    correlations = (z.T @ z / np.sqrt(z.shape[0]))[np.triu_indices(z.shape[1], 1)]
    assert abs(correlations.std() - 1.0) < 0.02


def test_seed_is_a_device_tensor_from_the_default_generator():
    torch.manual_seed(5)
    a, b = random.draw_seed(torch.device("cpu")), random.draw_seed(torch.device("cpu"))
    torch.manual_seed(5)
    assert torch.equal(a, random.draw_seed(torch.device("cpu"))) and not torch.equal(a, b)
    assert a.shape == () and a.dtype == torch.int64
    assert random.draw_seed(torch.device("meta")).device.type == "meta"


def test_a_described_multiplier_is_the_same_tensor_whole_and_in_parts():
    key = random.site_keys(torch.tensor(3))[random.RESIDUAL1]
    whole = random.DropoutMask(key, 5, 7, 9, 0.4, torch.float32)
    assert torch.equal(whole.tensor(), random.keep_scale(key, 5, 7, 9, 0.4, torch.float32))
    assert torch.equal(whole.of_rows(2, 4).tensor(), whole.tensor()[2:6])
    assert whole.tensor() is whole.tensor()
    taken = whole.tensor(keep=False).zero_()
    assert whole.tensor() is not taken and whole.tensor().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_operators_of_small_draws(dtype):
    """A record calls them by their schemas, and fake tensors by their shapes."""
    key = random.site_keys(torch.tensor(3))[1]
    drawn = torch.ops.fused_remat
    torch.library.opcheck(drawn.small_site_keys.default, (torch.tensor(3), 8))
    torch.library.opcheck(drawn.small_keep_scale.default, (key, [5, 3, 2, 9], [1, 4], 0.3, dtype))
