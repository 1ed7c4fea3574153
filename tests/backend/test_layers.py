"""Blocks on kernels against float64: outputs and every gradient, at each policy; bits, bytes.

Beside plain PyTorch in the same dtype; with dropout beside the eager backend, which draws the same.
"""

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from accuracy import assert_bits
from block_inputs import LAYOUTS
from layer_kinds import KINDS, Kind, check_errors, run
from places import (
    BF16,
    COMPILED,
    DEVICE,
    ON_GPU,
    ROUTES,
    at,
    compiled,
    deterministic,
    error_of,
    normal,
)
from reference import EXACT_PRESETS
from tiers import executed, pairwise

from fused_remat import FusedRematWarning, explain, memory_report  # fmt: skip
from fused_remat.execution import choose

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
F16, F32 = torch.float16, torch.float32
B, S, M, D, H, HKV = at((4, 512, 768, 1024, 16, 4), (2, 9, 13, 32, 4, 2), (2, 40, 24, 128, 4, 2))
# The error may be 1.5 times plain PyTorch's in the same dtype, plus this: a sixth of a rounding to
# bfloat16 or float16, a whole one where a gradient is a dozen numbers; float32: another order.
FLOOR = {torch.bfloat16: 1e-3, F16: at(1e-4, 1e-3), F32: 1e-5}
# Under autocast PyTorch's own error of those happens to be next to nothing, and is no yardstick.
AUTOCAST_FLOOR = {torch.bfloat16: 1e-3, F16: at(1e-4, 4 * torch.finfo(F16).eps)}
#: How far two routes of the same call may be apart in 16 bits: each is off by up to 7e-3.
APART = compiled(2e-2, 2**-9)
interpreted_only = pytest.mark.skipif(COMPILED, reason="of the interpreter's routes and dtypes")


@dataclass(frozen=True)
class Subject:
    """A kind of layer in the sizes of this place, called with masks of a form, and with more."""

    kind: Kind
    form: str = "tables"
    more: Callable[[], dict] = dict
    batch: int = B

    def layers(self, dropout=0.0, policy="full", dtype=F32):
        """Plain and fused, on the device."""
        plain, fused = self.kind.pair(policy, dropout=dropout)
        fused.backend = "triton"
        return plain.to(DEVICE, dtype), fused.to(DEVICE, dtype)

    def data(self, dtype):
        """Inputs, and the gradient of the output."""
        return [t.to(DEVICE) for t in self.kind.data(dtype, S, M, self.batch)]

    def given(self, dtype):
        """All that a call has besides."""

        def there(t):
            if not isinstance(t, torch.Tensor):
                return tuple(map(there, t)) if isinstance(t, tuple) else t
            return t.detach().to(DEVICE).requires_grad_(t.requires_grad)

        made = self.kind.given(self.form, dtype, S, M, self.batch)
        return {name: there(value) for name, value in made.items()} | self.more()

    def run(self, layer, tensors, low=None):
        """Output, and every gradient; under autocast if `low` is given."""
        torch.manual_seed(1)
        return run(layer, *tensors, low=low, **self.given(tensors[0].dtype))

    def check(self, fused, other, dtype, low=None, tensors=None):
        """Every error of `fused` beside those of `other`."""
        tensors = self.data(dtype) if tensors is None else tensors
        floor = FLOOR[dtype] if low is None else AUTOCAST_FLOOR[low]
        given = self.given(tensors[0].dtype)
        check_errors(self.kind, other, fused, *tensors, low=low, floor=floor, **given)


def eager_of(fused):
    """The same layer on the other backend."""
    eager = copy.deepcopy(fused)
    eager.backend = "eager"
    return eager


SIZES = {"d_model": D, "nhead": H, "dim_feedforward": 4 * D}


def of_kind(name, form="tables", more=dict, batch=B, **options):
    kind = KINDS[name]
    if kind.is_causal:
        options = {"kv_heads": HKV, "head_dim": D // H, **options}
    made = replace(kind, sizes=SIZES, options={**kind.options, "nhead": H, **options})
    return Subject(made, form, more, batch)


def sequences():
    """Of very different lengths, one of them empty."""
    return {"cu_seqlens": torch.tensor([0, S // 3, S // 3, S - 2, S], device=DEVICE).int()}


ENCODERS = {
    f"encoder {norm}": of_kind(f"encoder, {norm}-norm", "a hint") for norm in ("post", "pre")
}
#: Of language models: what is before the heads, around the halves, and seen.
SUBJECTS = {
    **ENCODERS,
    "decoder post": of_kind("decoder, post-norm", "a mask, padding and a hint"),
    "decoder pre": of_kind("decoder, pre-norm", "bool padding"),
    "decoder, hints": of_kind("decoder, pre-norm", "a hint"),
    "llama": of_kind("llama"),
    "llama, padded": of_kind("llama", "bool padding"),
    "qwen3": of_kind("qwen", window=S // 2),
    "gemma": of_kind("gemma", window=S // 3),
    "bert": of_kind("bert", window=None),
}
MASKED = {
    "encoder, padded": of_kind("encoder, post-norm", "bool padding"),
    "encoder, masks": of_kind("encoder, pre-norm", "float and padding, with gradients"),
    "a mask of heads": of_kind("llama", "per head, with a gradient", rope_interleaved=True),
    "packed": of_kind("llama", more=sequences, batch=1, qk_norm=True),
}
EVERY = SUBJECTS | MASKED
DTYPES = [BF16, F32]

# --- results

ERRORS = executed(
    pairwise(list(EVERY), compiled([*DTYPES, F16], DTYPES), list(EXACT_PRESETS), ROUTES),
    ("encoder pre", BF16, "full", "kernels alone"),
    ("encoder post", BF16, "none", "kernels alone"),
    ("decoder pre", BF16, "lean", "kernels alone"),
    ("llama", BF16, "full", "kernels alone"),
)
DROPOUT = pairwise(list(EVERY), [compiled(BF16, F32)], ["full", "fast"], ROUTES)


@pytest.mark.parametrize("name, dtype, policy, routes", ERRORS, ids=str, indirect=["routes"])
def test_errors_are_those_of_plain_pytorch(name, dtype, policy, routes):
    plain, fused = EVERY[name].layers(policy=policy, dtype=dtype)
    EVERY[name].check(fused, plain, dtype)


@pytest.mark.parametrize("name, dtype, policy, routes", DROPOUT, ids=str, indirect=["routes"])
def test_dropout_is_the_eager_backends(name, dtype, policy, routes):
    _, fused = EVERY[name].layers(0.2, policy, dtype)
    EVERY[name].check(fused, eager_of(fused), dtype)


@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_sequences_one_at_a_time(policy, pieces):
    _, fused = SUBJECTS["qwen3"].layers(0.2, policy, DTYPES[0 if COMPILED else 1])
    SUBJECTS["qwen3"].check(fused, eager_of(fused), DTYPES[0 if COMPILED else 1])


FROZEN = {
    "a weight": lambda name: name in ("linear2.weight", "down.weight"),
    "a layer": lambda name: name.startswith(("linear1", "up")),
    "all but a layer": lambda name: not name.startswith(("linear2", "down")),
}


@pytest.mark.parametrize(
    "name, policy, frozen", pairwise([*ENCODERS, "llama"], ["full", "fast"], list(FROZEN)), ids=str
)
def test_frozen_parameters(name, policy, frozen, routes):
    _, fused = SUBJECTS[name].layers(0.2, policy, dtype := compiled(BF16, F32))
    for parameter, p in fused.named_parameters():
        p.requires_grad_(not FROZEN[frozen](parameter))
    SUBJECTS[name].check(fused, eager_of(fused), dtype)


@pytest.mark.parametrize("layout", [*LAYOUTS, "misaligned"])
@pytest.mark.parametrize("name", ENCODERS)
def test_memory_of_any_layout(name, layout):
    """Of the input, of the gradient of the output, and of biases and norms."""

    def misaligned(x):
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    (plain, fused), lay = SUBJECTS[name].layers(dtype=BF16), LAYOUTS.get(layout, misaligned)
    for p in (*plain.parameters(), *fused.parameters()):
        p.data = lay(p.data) if p.dim() == 1 else p.data
    tensors = [lay(t) for t in SUBJECTS[name].data(BF16)]
    SUBJECTS[name].check(fused, plain, BF16, tensors=tensors)


@pytest.mark.parametrize("backend", at(["triton", "eager"], ["triton"]))
@pytest.mark.parametrize("name", ENCODERS)
def test_accumulates_into_main_grad(name, backend, routes):
    """In float32, to which gradients of 16 bits are added before they are rounded."""
    _, fused = SUBJECTS[name].layers(dtype=BF16)
    fused.backend = backend
    (x, dy), params = SUBJECTS[name].data(BF16), [*fused.parameters()]
    expected = torch.autograd.grad(fused(x), params, dy)
    fused.accumulate_into = "main_grad"
    for p in params:
        p.main_grad = torch.ones_like(p, dtype=F32)
    fused(x).backward(dy)
    for p, g in zip(params, expected, strict=True):
        assert error_of(p.main_grad - 1, g) <= APART
        assert p.grad is None and not torch.equal(p.main_grad, p.main_grad.to(BF16).float())


# --- bits, bytes

#: The dtype of autocast or None, and the routes. In both, encoders.
WAYS = [(name, None, ROUTES[0]) for name in SUBJECTS]
WAYS += [(name, low, ROUTES[-1]) for name in ENCODERS for low in compiled([BF16], [None, BF16])]


@pytest.mark.parametrize("name, low, routes", WAYS, ids=str, indirect=["routes"])
@pytest.mark.parametrize("dropout", at([0.0, 0.1], [0.1]))
def test_presets_have_the_same_bits_under_deterministic_algorithms(name, low, dropout, routes):
    """Attention's backward adds in any order otherwise. On a GPU twenty runs."""
    subject, dtype = SUBJECTS[name], BF16 if low is None else F32
    tensors = subject.data(dtype)
    few = EXACT_PRESETS if name in ENCODERS and low is None else ("full", "none")
    presets = at(EXACT_PRESETS * 4, few)
    with deterministic():
        first, *others = (
            subject.run(subject.layers(dropout, policy, dtype)[1], tensors, low)
            for policy in presets
        )
    for policy, other in zip(presets[1:], others, strict=True):
        assert_bits(other, first, policy)


@pytest.mark.parametrize("name, low, routes", WAYS, ids=str, indirect=["routes"])
@pytest.mark.parametrize("policy", at(EXACT_PRESETS, ("full", "fast")))
def test_kept_bytes_are_the_predicted(name, low, policy, routes):
    subject, dtype = SUBJECTS[name], BF16 if low is None else F32
    inputs = [x.requires_grad_() for x in subject.data(dtype)[:-1]]
    rope = subject.given(dtype).get("rope", ())
    _, fused = subject.layers(0.1, policy, dtype)
    with torch.autocast(DEVICE.type, BF16, enabled=low is not None):
        (row,) = memory_report(fused, *inputs, *([rope] if rope else [])).layers[:1]
        # The caller's own tables are not predicted.
        assert row.kept_bytes == row.predicted_bytes + sum(t.nbytes for t in rope) > 0
        if not ON_GPU or name not in ENCODERS:
            return
        (x,) = inputs
        fused(x).sum().backward()  # workspaces and compiled kernels stay
        requested = "requested_bytes.all.current"  # before the allocator rounds them
        before = torch.cuda.memory_stats(DEVICE)[requested]
        y = fused(x)
        kept = torch.cuda.memory_stats(DEVICE)[requested] - before - y.nbytes + x.nbytes
    assert kept == row.predicted_bytes  # no copies of weights among them


# --- autocast: a float32 stream


@pytest.mark.composes("Autocast", "forward and backward of the layer, Triton kernels on CUDA")
@pytest.mark.parametrize(
    "name, low, src, policy, routes",
    pairwise(
        list(SUBJECTS), list(dict.fromkeys([BF16, F16])), compiled([F32, BF16, F16], [F32, F16]),
        at(["full"], ["full", "fast"]), ROUTES,
    ),
    ids=str, indirect=["routes"],
)  # fmt: skip
def test_autocast(name, low, src, policy, routes):
    """Dtypes of output and gradients too, for every dtype of src; norms' parameters are float32."""
    plain, fused = SUBJECTS[name].layers(policy=policy)
    SUBJECTS[name].check(fused, plain, src, low)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.skipif(not ON_GPU, reason="autocast converts the norms' parameters on CUDA only")
def test_autocast_of_parameters_in_low_precision(name):
    plain, fused = SUBJECTS[name].layers(dtype=BF16)
    SUBJECTS[name].check(fused, plain, F32, BF16)


@pytest.mark.parametrize("name", ENCODERS)
def test_autocast_with_dropout(name, routes):
    _, fused = SUBJECTS[name].layers(0.1, "balanced")
    SUBJECTS[name].check(fused, eager_of(fused), F32, BF16)


# --- training


def losses_of(layer, steps):
    """Under autocast the first gradients overflow: that step is skipped."""
    torch.manual_seed(2)
    x, target = normal(F32, 2, B, S, D)
    scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    found = []
    for i in range(steps):
        optimizer.zero_grad()
        with torch.autocast(DEVICE.type, F16):
            loss = F.mse_loss(layer(x).float(), target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update(None if i else 2.0**8)
        found.append(loss.detach())
    return torch.stack(found)


@pytest.mark.composes("Autocast", "training with `torch.amp.GradScaler`, float16 on CUDA")
def test_training_with_a_grad_scaler_follows_the_stock_layer():
    layers = SUBJECTS["encoder pre"].layers()
    theirs, ours = (losses_of(layer, at(21, 5)) for layer in layers)
    assert ours[0] == ours[1] and theirs[0] == theirs[1]
    # Roundings of two orders of summation, in 20 steps of the same path.
    torch.testing.assert_close(theirs, ours, rtol=4 * torch.finfo(F16).eps, atol=0.0)
    assert ours[-1] < ours[0]


# --- who serves


@interpreted_only
def test_explain_says_what_is_one_kernel():
    fused, x = SUBJECTS["encoder pre"].layers(0.1)[1], SUBJECTS["encoder pre"].data(F32)[0]
    with torch.autocast("cpu", F16):
        (block,) = explain(fused, x)
    assert "products in float16, stream in float32" in block.title
    steps = dict(block.forward)
    assert steps["norm1"] == "kernel norm_fwd, rounded to float16"
    assert steps["act"] == "one kernel: product and activation"
    assert steps["output"].startswith(
        "ATen's addmm: nothing follows that could be fused; pointwise"
    )
    assert any("backward output and act (one kernel" in step for step in block.backward)


@interpreted_only
def test_what_the_kernels_cannot_do_falls_back_with_one_warning():
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            assert choose.ops_for("triton", x).name == "eager"
            assert choose.ops_for("triton", x.bfloat16()).name == "eager"
    assert sum("float64" in str(w.message) for w in caught) == 1
    assert any("bfloat16" in str(w.message) for w in caught)
    assert all(issubclass(w.category, FusedRematWarning) for w in caught)
