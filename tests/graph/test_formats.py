"""Storage formats: what is lost, what is not, and how many bytes they take."""

import pickle

import pytest
import torch

from fused_remat import Policy, formats, random
from fused_remat.formats import BLOCK, FORMATS, LEVELS, OFFSET, Quantized, quantize
from fused_remat.graph.build import block_graph
from fused_remat.policies import kept_names
from fused_remat.spec import nn_layer_spec

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
VALUES = [name for name, row in FORMATS.items() if not row.signs]
INT8 = ["int8", "int8_stochastic"]
WIDTHS = [1, 63, 128, 200, 1000]


def uniform(x, seed=0):
    key = random.site_keys(torch.tensor(seed), random.ROUNDING)[0]
    return random.Uniform(key, 0, *x.shape)


def through(x, stored, seed=0):
    """`x` as it comes back."""
    return Quantized(stored, quantize(x, stored, uniform(x, seed)), x.shape[1], x.dtype).tensor()


def sample(rows, width, dtype=torch.float32, seed=0):
    """Values with rows and channels of very different size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    x[:, ::37] *= 50
    x *= torch.logspace(-2, 2, rows)[:, None]
    return x.to(dtype)


def steps(x):
    """The step of every element."""
    wide = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    step = wide.abs().amax(-1, keepdim=True) / LEVELS
    return step.expand_as(wide).flatten(1)[:, : x.shape[1]]


@pytest.mark.parametrize("stored, steps_off", [("int8", 0.5), ("int8_stochastic", 1)])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_half_a_step_off_at_most_and_one_if_rounded_stochastically(
    dtype, width, stored, steps_off
):
    x = sample(7, width, dtype)
    off = (through(x, stored).double() - x.double()).abs()
    rounding = x.double().abs() * torch.finfo(dtype).eps  # of the result, and of the arithmetic
    assert (off <= steps(x) * (steps_off + 1e-5) + rounding).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_is_at_most_a_sixteenth_off(dtype):
    x = sample(7, 1000, dtype)
    off = (through(x, "fp8_e4m3").double() - x.double()).abs()
    least = steps(x) * LEVELS / 448 * 2.0**-9  # the smallest number, which what is smaller becomes
    assert (off <= x.double().abs() / 16 * (1 + 1e-2) + least).all()


@pytest.mark.parametrize("stored", VALUES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_signs_are_kept_and_zeros_stay_zero(stored, dtype):
    x = sample(9, 256, dtype)
    x[:, ::3] = 0
    x[0, :5] = torch.tensor([1e-3, -1e-3, 1e-4, -1e-4, 0.0], dtype=dtype)  # far below the step
    assert torch.equal(through(x, stored).sign(), x.sign())


@pytest.mark.parametrize("stored", VALUES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_makes_its_block_nan_and_no_other(stored, value):
    x = sample(4, 300)
    clean = through(x, stored)
    x[1, 2 * BLOCK + 2] = value
    back = through(x, stored)
    mine = slice(2 * BLOCK, 3 * BLOCK)
    assert back[1, mine].isnan().all()
    back[1, mine] = clean[1, mine]
    assert torch.equal(back, clean)
    codes = quantize(x, stored, uniform(x))[0].float()
    assert codes[1, 2 * BLOCK + 2] == 0  # the same bits every time


@pytest.mark.parametrize("stored", VALUES)
def test_blocks_of_almost_nothing_are_zero(stored):
    x = torch.full((2, 256), 1e-38)
    x[:, :128] = 1.0
    back = through(x, stored)
    assert (back[:, 128:] == 0).all() and torch.allclose(back[:, :128], x[:, :128])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_largest_numbers_stay_finite(dtype):
    x = torch.full((1, 128), torch.finfo(dtype).max, dtype=dtype)
    assert through(x, "int8").isfinite().all()


def test_stochastic_rounding_is_unbiased():
    # 100 draws of 4,096 elements: a mean's standard error is at most half a step over 10. 5 of them
    # are passed by one in a million. Together the elements' errors average out to within a fifth of
    # a percent of a step; the nearest level is off by a fixed amount for each instead.
    x = sample(4, 1024, seed=3)
    draws = torch.stack([through(x, "int8_stochastic", seed) for seed in range(100)]).double()
    off = (draws.mean(0) - x.double()) / steps(x)
    far = x.double().abs() >= OFFSET * steps(x)
    assert off[far].abs().max() < 0.25
    assert abs(off[far].mean()) < 0.002 and off.std() < 0.06
    assert ((through(x, "int8").double() - x.double()) / steps(x)).std() > 0.25


def test_uniform_numbers_are_the_generators():
    draw = random.Uniform(random.site_keys(torch.tensor(7))[2], 5, 64, 1000)
    u = draw.tensor()
    assert u.min() >= 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005 and abs(u.var() - 1 / 12) < 0.002
    assert torch.equal(draw.of_rows(10, 3).tensor(), u[10:13])
    # Bits 7 to 30 of the hash that decides about dropout: below 1 - p and it survives.
    kept = random.keep_scale(draw.site_key, 5, 64, 1000, 0.25, torch.float32) > 0
    assert torch.equal(kept, u < 0.75)


@pytest.mark.parametrize("width", [1, 8, 63, 200])
def test_signs_are_relus_derivative(width):
    x = sample(5, width)
    x[0, 0], x[1, 0], x[2, 0], x[3, 0] = 0.0, -0.0, float("nan"), float("inf")
    back = through(x, "sign")
    dy = torch.randn_like(x)
    derivative = torch.ops.aten.threshold_backward
    assert torch.equal(derivative(dy, back, 0), derivative(dy, x, 0))
    assert not FORMATS["sign"].lossy


@pytest.mark.parametrize("stored", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows, width", [(0, 40), *((5, width) for width in WIDTHS)])
def test_bytes_are_those_of_the_parts(stored, dtype, rows, width):
    x = sample(rows, width, dtype)
    parts = quantize(x, stored, uniform(x))
    said = FORMATS[stored].nbytes(rows, width, dtype.itemsize)
    assert sum(part.untyped_storage().nbytes() for part in parts) == said
    assert through(x, stored).shape == x.shape


@pytest.mark.parametrize("stored", FORMATS)
def test_packing_a_few_rows_at_a_time_changes_nothing(stored, monkeypatch):
    x = sample(50, 300)
    whole = quantize(x, stored, uniform(x))
    back = through(x, stored)
    monkeypatch.setattr(formats, "_CACHED", 900)
    for a, b in zip(whole, quantize(x.t().contiguous().t(), stored, uniform(x)), strict=True):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
    assert torch.equal(through(x, stored), back)


# --- policies


def test_a_policy_of_formats():
    policy = Policy(save={"attn": "native", "qkv": "int8"})
    assert policy == Policy(save={"attn", "qkv:int8"}) == Policy(["qkv:int8", "attn"])
    assert hash(policy) == hash(Policy(save={"attn", "qkv:int8"}))
    assert policy != Policy(save={"attn", "qkv"})
    assert repr(policy) == "Policy(save={'attn': 'native', 'qkv': 'int8'})"
    for same in (eval(repr(policy), {"Policy": Policy}), pickle.loads(pickle.dumps(policy))):
        assert same == policy and same.formats == {"attn": "native", "qkv": "int8"}
    assert Policy(save={"attn": "native"}) == Policy(save={"attn"})
    assert repr(Policy(save={"attn": "native"})) == "Policy(save={'attn'})"
    graph = block_graph(nn_layer_spec(True, 2, 4, "gelu"))
    assert kept_names(policy, graph) == {"attn", "qkv:int8"}


@pytest.mark.parametrize(
    ("save", "error", "message"),
    [
        ({"qkv": "int4"}, ValueError, "unknown format 'int4' for 'qkv'; valid formats: native, in"),
        ({"qkv:int4"}, ValueError, "unknown format 'int4'"),
        ({"qkv": 8}, TypeError, "got 'qkv': 8"),
        ({8: "int8"}, TypeError, "got 8: 'int8'"),
        (["qkv", "qkv:int8"], ValueError, "'qkv' in two formats: 'native' and 'int8'"),
        ({"qkv:int8": "native"}, ValueError, "'qkv' in two formats: 'int8' and 'native'"),
        ({"qkv:int8": "int4"}, ValueError, "unknown format 'int4' for 'qkv'"),
        ({"qkv:"}, ValueError, "unknown format '' for 'qkv'"),
    ],
)
def test_bad_formats(save, error, message):
    with pytest.raises(error, match=message):
        Policy(save=save)


def test_an_unknown_name_is_told_without_its_format():
    with pytest.raises(ValueError, match="unknown activation 'ups' in Policy"):
        kept_names(Policy(save={"ups": "int8"}), block_graph(nn_layer_spec(True, 2, 4, "gelu")))


def test_a_seeded_format_needs_random_numbers():
    with pytest.raises(ValueError, match="'int8_stochastic' rounds stochastically"):
        quantize(torch.ones(1, 4), "int8_stochastic")
