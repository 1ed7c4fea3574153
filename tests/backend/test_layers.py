"""Whole layers on kernels: errors, dropout, bits of every preset, kept bytes, autocast.

Against plain PyTorch in the same dtype and in float64; with dropout against the eager backend.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from places import BF16, DEVICE, ON_GPU, ROUTES, assert_bits, at, deterministic, error_of, normal
from reference import EXACT_PRESETS, pair, randomize
from tiers import pairwise
from torch import nn

from fused_remat import FusedRematCausalLayer, explain, memory_report
from fused_remat.triton import norm as norms

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
F16, F32 = torch.float16, torch.float32
B, S, M, D, H, HKV = at((4, 512, 768, 1024, 16, 4), (2, 9, 13, 32, 4, 2))
# The error may be 1.5 times plain PyTorch's in the same dtype, plus this: a sixth of a rounding to
# bfloat16 or float16, a whole one where a gradient is a dozen numbers; float32: another order.
FLOOR = {torch.bfloat16: 1e-3, F16: at(1e-4, 1e-3), F32: 1e-5}
# Under autocast PyTorch's own error of those happens to be next to nothing, and is no yardstick.
AUTOCAST_FLOOR = {torch.bfloat16: 1e-3, F16: at(1e-4, 4 * torch.finfo(F16).eps)}


class Plain(nn.Module):
    """A language model's layer as plain PyTorch, of the same parameters."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, rope=(None, None), **masks):
        return self.layer.stock.forward(self.layer, x, *rope, **masks)


@dataclass(frozen=True)
class Subject:
    """A layer and the same in plain PyTorch, with random parameters: `make(dropout, policy)`.

    Attributes:
        lengths: of its inputs (B, length, D).
        options: all that a call has besides, given a dtype.
        cancels: gradients this small beside the largest are left over from terms that cancel (a
            key's bias), and have no relative error.
    """

    make: Callable[..., tuple[nn.Module, nn.Module]]
    lengths: tuple[int, ...] = (S,)
    options: Callable[[torch.dtype], dict] = field(default=lambda dtype: {})
    cancels: float = 1e-3

    def layers(self, dropout=0.0, policy="full", dtype=F32):
        """Plain and fused, on the device."""
        plain, fused = self.make(dropout, policy)
        fused.backend = "triton"
        return plain.to(DEVICE, dtype), fused.to(DEVICE, dtype)

    def data(self, dtype):
        """Inputs, and the gradient of the output."""
        return [normal(dtype, B, length, D) for length in (*self.lengths, S)]

    def run(self, layer, tensors, low=None):
        """Output, and gradients of inputs and parameters, under autocast if `low` is given."""
        *inputs, dy = tensors
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        torch.manual_seed(1)
        with torch.autocast(DEVICE.type, low or BF16, enabled=low is not None):
            y = layer(*leaves, **self.options(inputs[0].dtype))
        leaves += [p for p in layer.parameters() if p.requires_grad]
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))]

    def check(self, fused, other, dtype, low=None, floor=FLOOR, join=False):
        """Dtypes, and every error, of `fused` beside those of `other`.

        `join`: vectors together, of which the dozen numbers of one are no sample.
        """
        tensors = self.data(dtype)
        found, theirs = self.run(fused, tensors, low), self.run(other, tensors, low)
        exact = self.run(copy.deepcopy(other).double(), [t.double() for t in tensors])
        assert [t.dtype for t in found] == [t.dtype for t in theirs]
        largest = max(t.norm() for t in exact[1:])
        rows = [
            row for row in zip(found, theirs, exact, strict=True)
            if row[2].norm() > self.cancels * largest
        ]  # fmt: skip
        if join:
            vectors = [row for row in rows if row[2].dim() == 1]
            ends = zip(*([t / row[2].norm() for t in row] for row in vectors), strict=True)
            rows = [row for row in rows if row[2].dim() > 1] + [tuple(map(torch.cat, ends))]
        for i, (mine, yardstick, true) in enumerate(rows):
            allowed = 1.5 * error_of(yardstick, true) + floor[low or dtype]
            assert error_of(mine, true) <= allowed, (
                f"{i}: {error_of(mine, true):.1e}, {allowed:.1e}"
            )


def encoder(norm_first):
    def make(dropout, policy):
        how = {"batch_first": True, "norm_first": norm_first, "activation": "gelu"}
        return pair(D, H, 4 * D, dropout, policy=policy, **how)

    def causal(dtype):
        mask = nn.Transformer.generate_square_subsequent_mask(S, DEVICE, dtype)
        return {"src_mask": mask, "is_causal": True}

    return Subject(make, options=causal, cancels=0.0)


def decoder(norm_first, hints=False):
    """Causal, and the memory padded; or both attentions causal by hints, which stand for masks."""

    def make(dropout, policy):
        how = {"batch_first": True, "norm_first": norm_first, "activation": "gelu"}
        return pair(D, H, 4 * D, dropout, policy=policy, decoder=True, **how)

    def masks(dtype):
        hint = torch.zeros(1, 1, device=DEVICE)
        later = torch.ones(S, S, dtype=torch.bool, device=DEVICE).triu(1)
        padding = torch.arange(M, device=DEVICE).expand(B, M) >= M - 5
        if hints:
            given = {"tgt_mask": hint, "memory_mask": hint, "memory_is_causal": True}
        else:
            given = {"tgt_mask": later, "memory_key_padding_mask": padding}
        return {"tgt_is_causal": True, **given}

    return Subject(make, (S, M), masks)


def causal(padded=False, **options):
    """The layer of a language model; `padded` on the left and on the right."""

    def make(dropout, policy):
        torch.manual_seed(0)
        how = {"kv_heads": HKV, "policy": policy, **options}
        layer = FusedRematCausalLayer(D, H, 3 * D, dropout, **how)
        randomize(layer)
        return Plain(copy.deepcopy(layer)), layer

    def given(dtype):
        angles = torch.outer(torch.arange(S), 10.0 ** -torch.arange(D // H // 2)).to(DEVICE)
        wide = torch.promote_types(dtype, F32)
        made = {"rope": (angles.cos().to(wide), angles.sin().to(wide))}
        if padded:
            padding = torch.zeros(B, S, dtype=torch.bool, device=DEVICE)
            padding[0, : S // 3] = padding[1, S - S // 3 :] = True
            made["key_padding_mask"] = padding
        return made

    return Subject(make, options=given)


#: Of language models: what is before the heads, around the halves, and seen.
SUBJECTS = {
    "encoder post": encoder(False),
    "encoder pre": encoder(True),
    "decoder post": decoder(False),
    "decoder pre": decoder(True),
    "decoder, hints": decoder(True, hints=True),
    "llama": causal(),
    "llama, padded": causal(padded=True),
    "qwen3": causal(qk_norm=True, qkv_bias=True, window=S // 2),
    "gemma": causal(qk_norm=True, placement="sandwich", activation="gelu_tanh", window=S // 3,
                    softcap=2.0),
    "bert": causal(placement="post", norm="layer_norm", gated=False, bias=True, is_causal=False,
                   activation="gelu"),
}  # fmt: skip
DTYPES = [BF16, F32]
ENCODERS = ("encoder post", "encoder pre")


#: On a GPU encoders in all dtypes and presets; else enough for every pair of values.
EVERY = [(name, dtype, policy) for name in SUBJECTS for dtype in DTYPES for policy in EXACT_PRESETS]
ERRORS = at(
    [
        (*case, ROUTES[0])
        for case in EVERY
        if case[0] in ENCODERS or (case[1] == BF16 and case[2] in ("full", "fast"))
    ],
    pairwise(list(SUBJECTS), DTYPES, list(EXACT_PRESETS), ROUTES),
)
DROPOUT = at(
    [case for case in ERRORS if case[1] == BF16],
    pairwise(list(SUBJECTS), [F32], ["full", "fast"], ROUTES),
)


@pytest.mark.parametrize("name, dtype, policy, routes", ERRORS, ids=str, indirect=["routes"])
def test_errors_are_those_of_plain_pytorch(name, dtype, policy, routes):
    plain, fused = SUBJECTS[name].layers(policy=policy, dtype=dtype)
    SUBJECTS[name].check(fused, plain, dtype)


@pytest.mark.parametrize("name, dtype, policy, routes", DROPOUT, ids=str, indirect=["routes"])
def test_dropout_is_the_eager_backends(name, dtype, policy, routes):
    _, fused = SUBJECTS[name].layers(0.2, policy, dtype)
    eager = copy.deepcopy(fused)
    eager.backend = "eager"
    SUBJECTS[name].check(fused, eager, dtype)


#: The dtype of autocast or None, and the routes. In both, encoders.
WAYS = [(name, None, ROUTES[0]) for name in SUBJECTS]
WAYS += [(name, low, ROUTES[-1]) for name in ENCODERS for low in at([BF16], [None, BF16])]


@pytest.mark.parametrize("name, low, routes", WAYS, ids=str, indirect=["routes"])
@pytest.mark.parametrize("dropout", at([0.0, 0.1], [0.1]))
def test_presets_have_the_same_bits_under_deterministic_algorithms(name, low, dropout, routes):
    subject, dtype = SUBJECTS[name], BF16 if low is None else F32
    tensors = subject.data(dtype)
    presets = at(EXACT_PRESETS, EXACT_PRESETS if name in ENCODERS else ("full", "fast", "none"))
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
    rope = subject.options(dtype).get("rope", ())
    _, fused = subject.layers(0.1, policy, dtype)
    with torch.autocast(DEVICE.type, BF16, enabled=low is not None):
        (row,) = memory_report(fused, *inputs, *([rope] if rope else [])).layers[:1]
        # The caller's own tables are not predicted.
        assert row.kept_bytes == row.predicted_bytes + sum(t.nbytes for t in rope) > 0
        if not ON_GPU or name not in ENCODERS:
            return
        (x,) = inputs
        fused(x).sum().backward()  # workspaces and compiled kernels stay
        requested = "requested_bytes.all.current"
        before = torch.cuda.memory_stats(DEVICE)[requested]
        y = fused(x)
        kept = torch.cuda.memory_stats(DEVICE)[requested] - before - y.nbytes + x.nbytes
    assert kept == row.predicted_bytes  # no copies of weights among them


# --- autocast: a float32 stream


@pytest.mark.composes("Autocast", "forward and backward of the layer, Triton kernels on CUDA")
@pytest.mark.parametrize(
    "name, low, src, policy, routes",
    pairwise(
        list(SUBJECTS), list(dict.fromkeys([BF16, F16])), at([F32, BF16, F16], [F32, F16]),
        at(["full"], ["full", "fast"]), ROUTES,
    ),
    ids=str, indirect=["routes"],
)  # fmt: skip
def test_autocast(name, low, src, policy, routes):
    """Dtypes of output and gradients too, for every dtype of src; norms' parameters are float32."""
    plain, fused = SUBJECTS[name].layers(policy=policy)
    join = name in ("qwen3", "gemma", "llama", "llama, padded", "bert")
    SUBJECTS[name].check(fused, plain, src, low, AUTOCAST_FLOOR, join)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.skipif(not ON_GPU, reason="autocast converts the norms' parameters on CUDA only")
def test_autocast_of_parameters_in_low_precision(name):
    plain, fused = SUBJECTS[name].layers(dtype=BF16)
    SUBJECTS[name].check(fused, plain, F32, BF16, AUTOCAST_FLOOR)


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("wide", [False, True], ids=["rows", "wide rows"])
def test_autocast_with_dropout(name, wide, routes, monkeypatch):
    """Of rows too wide for a kernel, a sum and its norm are two steps."""
    if wide:
        monkeypatch.setattr(norms, "FWD_WIDTH", 16)
        monkeypatch.setattr(norms, "BWD_WIDTH", 16)
    _, fused = SUBJECTS[name].layers(0.1, "balanced")
    eager = copy.deepcopy(fused)
    eager.backend = "eager"
    SUBJECTS[name].check(fused, eager, F32, BF16, AUTOCAST_FLOOR)


@pytest.mark.composes("Autocast", "training with `torch.amp.GradScaler`, float16 on CUDA")
def test_training_with_a_grad_scaler_follows_the_stock_layer():
    losses, steps = [], at(20, 4)
    for layer in SUBJECTS["encoder pre"].layers():
        torch.manual_seed(2)
        x, target = normal(F32, 2, B, S, D)
        scaler = torch.amp.GradScaler(DEVICE.type, init_scale=2.0**40)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        found = []
        for i in range(steps + 1):
            optimizer.zero_grad()
            with torch.autocast(DEVICE.type, F16):
                loss = F.mse_loss(layer(x).float(), target)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            # The first gradients overflow: that step is skipped.
            scaler.update(None if i else 2.0**8)
            found.append(loss.detach())
        assert found[0] == found[1]
        losses.append(torch.stack(found))
    # Roundings of two orders of summation, in 20 steps of the same path.
    torch.testing.assert_close(*losses, rtol=4 * torch.finfo(F16).eps, atol=0.0)
    assert losses[1][-1] < losses[1][0]


# --- who serves


@pytest.mark.skipif(ON_GPU, reason="of the interpreter's routes")
def test_explain_names_kernels_and_dtypes():
    subject = SUBJECTS["encoder pre"]
    fused, x = subject.layers(0.1)[1], subject.data(F32)[0]
    with torch.autocast("cpu", F16):
        (block,) = explain(fused, x)
    assert "backend triton, products in float16, stream in float32" in block.title
    steps = dict(block.forward)
    assert steps["norm1"] == "kernel norm_fwd, rounded to float16"
    assert "one kernel: product and activation" in steps["act"]
    end = "ATen's addmm: nothing follows that could be fused; pointwise kernel"
    assert steps["output"] == f"{end}, added to the residual in the stream's dtype"


@pytest.mark.skipif(ON_GPU, reason="of the interpreter's routes")
def test_the_gated_mlp_is_one_kernel_there_and_back():
    (block,) = explain(SUBJECTS["llama"].layers()[1], SUBJECTS["llama"].data(F32)[0])
    steps = dict(block.forward)
    assert "gate" not in steps and "up" not in steps  # never written
    assert steps["act"] == "one kernel: product and activation"
    assert steps["qkv"] == "ATen's addmm: nothing follows that could be fused"
    assert any(step.startswith("backward output and act (one kernel") for step in block.backward)
