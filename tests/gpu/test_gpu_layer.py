"""The layer and the ops at real sizes on a GPU: results, bits, memory, training."""

import contextlib
import copy

import pytest
import torch
import torch.nn.functional as F
from gpu_checks import BF16, DEVICE, ON_GPU, error_of, normal, sized
from reference import EXACT_PRESETS, PARAM_NAMES
from torch import nn

from fused_remat import FusedRematLayer, explain, memory_report, ops
from fused_remat.autograd.partial import round_vectors
from fused_remat.graph.build import block_graph
from fused_remat.report.allocations import measure_allocations, predict_kept_bytes
from fused_remat.spec import nn_layer_spec

pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]
B, S, D, H = sized(4, 512, 1024, 8) if ON_GPU else (2, 9, 24, 3)
NORMS = pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
PRESET = pytest.mark.parametrize("policy", EXACT_PRESETS)
# The error may be 1.5 times PyTorch's own in the same dtype, plus this: a sixth of a rounding to
# bfloat16 or float16; float32 sums in another order.
FLOOR = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-5}
NAMES = ("y", "dx", *PARAM_NAMES)
#: How far two routes of the same call may be apart in bfloat16: each is off by up to 7e-3.
APART = 2e-2


def layers(dtype=BF16, dropout=0.0, norm_first=True, policy="full", activation="gelu"):
    """A stock layer with random parameters, and a fused one with the same, on the device."""
    torch.manual_seed(0)
    how = {"batch_first": True, "norm_first": norm_first, "activation": activation}
    how["device"] = DEVICE
    stock = nn.TransformerEncoderLayer(D, H, 4 * D, dropout, **how)
    with torch.no_grad():
        for p in stock.parameters():
            if p.dim() == 1:  # biases and norms are constants at first
                p.add_(0.1 * torch.randn_like(p))
    fused = FusedRematLayer(D, H, 4 * D, dropout, **how, policy=policy, backend="triton")
    fused.load_state_dict(stock.state_dict())
    return stock.to(dtype), fused.to(dtype)


def data(dtype=BF16):
    return normal(dtype, B, S, D), normal(dtype, B, S, D)


def run(layer, x, dy, *masks, seed=1, **kwargs):
    """Output, and gradients of x and every parameter, detached."""
    x = x.detach().requires_grad_()
    torch.manual_seed(seed)
    y = layer(x, *masks, **kwargs)
    leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
def test_vectors_are_rounded_together_to_the_bits_that_autograd_gives(low):
    wide = [normal(torch.float32, size, scale=1e4) for size in (1, 7, 1024, 4096, 65537)]
    wide[1][:4] = torch.tensor([1e38, -torch.inf, 1e-40, 3e-8])
    grads = [None, *wide, normal(torch.float32, 2, 2)]
    round_vectors(grads, low, [low] * len(grads))
    assert grads[0] is None and grads[-1].dtype is torch.float32
    for found, exact in zip(grads[1:-1], wide, strict=True):
        assert torch.equal(found, exact.to(low)) and found.dtype is low


def check_against(found, yardstick, exact, dtype):
    """Every error at most 1.5 times the yardstick's, plus a floor."""
    for name, mine, theirs, true in zip(NAMES, found, yardstick, exact, strict=True):
        error, allowed = error_of(mine, true), 1.5 * error_of(theirs, true) + FLOOR[dtype]
        assert error <= allowed, f"relative error of {name} is {error:.1e}, allowed {allowed:.1e}"


def causal_mask(dtype):
    return nn.Transformer.generate_square_subsequent_mask(S, DEVICE, dtype)


def of_backend(layer, backend):
    """The same layer, computed by another backend."""
    other = copy.deepcopy(layer)
    other.backend = backend
    return other


# --- results


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@NORMS
@PRESET
def test_matches_pytorchs_layer(dtype, norm_first, policy):
    stock, fused = layers(dtype, norm_first=norm_first, policy=policy)
    x, dy = data(dtype)
    causal = {"src_mask": causal_mask(dtype), "is_causal": True}
    yardstick, found = run(stock, x, dy, **causal), run(fused, x, dy, **causal)
    causal["src_mask"] = causal_mask(torch.float64)
    check_against(found, yardstick, run(stock.double(), *(t.double() for t in (x, dy)), **causal),
                  dtype)  # fmt: skip


@NORMS
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_padding_and_float16(norm_first, activation):
    stock, fused = layers(torch.float16, norm_first=norm_first, activation=activation)
    x, dy = data(torch.float16)
    padding = torch.zeros(B, S, dtype=torch.bool, device=DEVICE)
    padding[1, S // 2 :] = True
    masks = {"src_key_padding_mask": padding}
    yardstick, found = run(stock, x, dy, **masks), run(fused, x, dy, **masks)
    exact = run(stock.double(), x.double(), dy.double(), **masks)
    check_against(found, yardstick, exact, torch.float16)


@NORMS
@PRESET
def test_matches_eager_with_dropout(norm_first, policy):
    """The eager backend draws the same bits; in float64 it is the truth, in bfloat16 the rule."""
    _, fused = layers(dropout=0.1, norm_first=norm_first, policy=policy)
    x, dy = data()
    yardstick = run(of_backend(fused, "eager"), x, dy)
    exact = run(of_backend(fused, "eager").double(), x.double(), dy.double())
    check_against(run(fused, x, dy), yardstick, exact, BF16)


@NORMS
def test_frozen_weights(norm_first):
    stock, fused = layers(norm_first=norm_first)
    x, dy = data()
    whole = dict(zip(NAMES, run(fused, x, dy), strict=True))
    for layer in (stock, fused):
        for name, p in layer.named_parameters():
            p.requires_grad_(name.startswith("linear2"))
    names = ("y", "dx", "linear2.weight", "linear2.bias")
    for name, value in zip(names, run(fused, x, dy), strict=True):
        assert error_of(value, whole[name]) <= APART, name


def test_explain_names_kernels():
    _, fused = layers(dropout=0.1)
    text = str(explain(fused, data()[0]))
    assert "backend triton" in text and "not fused" not in text and "kernel norm_fwd" in text


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_mlp_ops(policy, gated):
    """Against the eager backend in float64; the eager backend in bfloat16 is the yardstick."""
    torch.manual_seed(0)
    width = 4 * D
    weights = [normal(BF16, width, D, scale=D**-0.5), normal(BF16, D, width, scale=width**-0.5)]
    if gated:
        weights.insert(0, normal(BF16, width, D, scale=D**-0.5))
    x, dy = (t.flatten(0, 1) for t in data())

    def results(dtype, backend):
        leaves = [t.detach().to(dtype).requires_grad_() for t in (x, *weights)]
        how = {"dropout_p": 0.1, "policy": policy, "backend": backend, "seed": 5}
        if gated:
            y = ops.gated_mlp(*leaves, **how)
        else:
            y = ops.mlp(leaves[0], leaves[1], None, leaves[2], None, **how)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(dtype))]

    exact, theirs = results(torch.float64, "eager"), results(BF16, "eager")
    for mine, other, true in zip(results(BF16, "triton"), theirs, exact, strict=True):
        assert error_of(mine, true) <= 1.5 * error_of(other, true) + FLOOR[BF16]


# --- bits


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@NORMS
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_rungs_have_the_same_bits_under_deterministic_algorithms(norm_first, dropout):
    x, dy = data()
    with deterministic():
        found = [
            run(layers(dropout=dropout, norm_first=norm_first, policy=policy)[1], x, dy)
            for policy in EXACT_PRESETS
        ]
    for policy, other in zip(EXACT_PRESETS[1:], found[1:], strict=True):
        for name, a, b in zip(NAMES, found[0], other, strict=True):
            assert torch.equal(a, b), f"{name} of {policy}"


@NORMS
@pytest.mark.parametrize("policy", ["full", "fast"])
def test_twenty_runs_have_the_same_bits(norm_first, policy):
    """Under deterministic algorithms: attention's backward adds in any order otherwise."""
    _, fused = layers(dropout=0.1, norm_first=norm_first, policy=policy)
    x, dy = data()
    with deterministic():
        first = run(fused, x, dy)
        for _ in range(20):
            assert all(torch.equal(a, b) for a, b in zip(first, run(fused, x, dy), strict=True))


def test_fused_kernels_have_the_same_bits_in_twenty_runs():
    """Without attention, in the ordinary mode: no kernel of ours adds in any order."""
    torch.manual_seed(0)
    x, dy = (t.flatten(0, 1) for t in data())
    weights = normal(BF16, 4 * D, D, scale=D**-0.5), normal(BF16, D, 4 * D, scale=0.5 * D**-0.5)
    norm = normal(BF16, D, shift=1.0), normal(BF16, D)
    leaves = [t.requires_grad_() for t in (x, *norm, *weights)]

    def step():
        y = ops.layer_norm(x, *norm, backend="triton")
        y = ops.mlp(y, weights[0], None, weights[1], None, "gelu", 0.1, seed=3, backend="triton")
        y = ops.dropout_add(y, x, 0.1, seed=4, backend="triton")
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    first = step()
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, step(), strict=True))


# --- memory


def predicted_bytes(policy, norm_first, dropout):
    """By name, for a call in which everything wants a gradient."""
    ps = (dropout,) * 4
    spec = nn_layer_spec(norm_first, H, D // H, "gelu", dropout=tuple(ps))
    shapes = {
        "input": (D,), "qkv.weight": (3 * D, D), "proj.weight": (D, D),
        "fc1.weight": (4 * D, D), "fc2.weight": (D, 4 * D),
    }  # fmt: skip
    needs_grad = (*spec.weights, "input")
    return predict_kept_bytes(block_graph(spec), policy, shapes, needs_grad, B, S, BF16)


def requested(what="current"):
    """Bytes asked of the allocator, before it rounds them."""
    return torch.cuda.memory_stats(DEVICE)[f"requested_bytes.all.{what}"]


@pytest.mark.skipif(not ON_GPU, reason="reads the allocator of CUDA")
@NORMS
@PRESET
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_bytes_kept_after_forward_are_the_predicted(norm_first, policy, dropout):
    _, fused = layers(dropout=dropout, norm_first=norm_first, policy=policy)
    x, dy = data()
    run(fused, x, dy)  # workspaces and compiled kernels stay
    torch.cuda.empty_cache()
    x.requires_grad_()
    before, allocated = requested(), torch.cuda.memory_allocated(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    y = fused(x)
    kept = requested() - before - y.nbytes + x.nbytes
    held = torch.cuda.memory_allocated(DEVICE) - allocated - y.nbytes + x.nbytes
    peak = torch.cuda.max_memory_allocated(DEVICE) - allocated
    names = predicted_bytes(policy, norm_first, dropout)
    assert kept == sum(names.values())
    # The allocator gives multiples of 512 bytes, and may leave up to a MiB of a block unsplit.
    assert kept <= held <= kept + (len(names) + 1) * 2**20
    assert peak >= held - x.nbytes
    y.backward(dy)
    assert memory_report(fused, x).kept_bytes == sum(names.values())


@pytest.mark.skipif(not ON_GPU, reason="reads the allocator of CUDA")
@NORMS
def test_nothing_stays_after_a_step_and_its_peak_is_lower(norm_first):
    stock, fused = layers(norm_first=norm_first)
    x, dy = data()
    peaks = []
    for layer in (stock, fused):
        leaves = [x.requires_grad_(), *layer.parameters()]
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        layer(x).backward(dy)
        step = measure_allocations(lambda layer=layer: layer(x).backward(dy), DEVICE)
        assert step.net == 0
        peaks.append(step.peak)
    assert peaks[1] < peaks[0]


# --- gradients and inputs of any layout


@NORMS
def test_expanded_gradients(norm_first):
    _, fused = layers(norm_first=norm_first)
    x, dy = data()[0], torch.ones(B, S, D, dtype=BF16, device=DEVICE)
    expanded = run(fused, x, dy[:1, :1, :1].expand(B, S, D))
    for name, a, b in zip(NAMES, run(fused, x, dy), expanded, strict=True):
        assert error_of(b, a) <= APART, name
    x = x.requires_grad_()
    fused(x).sum().backward()
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in fused.parameters())


@pytest.mark.parametrize("layout", ["transposed", "every other channel", "misaligned"])
def test_inputs_of_any_layout(layout):
    _, fused = layers()
    x, dy = data()
    if layout == "transposed":
        other = x.transpose(0, 1).contiguous().transpose(0, 1)
    elif layout == "every other channel":
        other = x.repeat_interleave(2, -1)[..., ::2]
    else:
        other = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    for name, a, b in zip(NAMES, run(fused, x, dy), run(fused, other, dy), strict=True):
        assert error_of(b, a) <= APART, name


# --- training


class ByteModel(nn.Module):
    """Two causal layers over embedded bytes."""

    def __init__(self, backend, width):
        super().__init__()
        self.embed = nn.Embedding(64, width)
        self.layers = nn.ModuleList(
            FusedRematLayer(
                width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True,
                policy="full", backend=backend,
            )
            for _ in range(2)
        )  # fmt: skip
        self.head = nn.Linear(width, 64)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, mask, is_causal=True)
        return self.head(x)


def walks(length, generator):
    """Sequences in which three of four bytes are the one before and three more, others random."""
    steps = torch.randint(64, (8, length), generator=generator)
    steps[torch.rand(steps.shape, generator=generator) < 0.75] = 3
    return steps.cumsum(1).remainder(64).to(DEVICE)


def train(backend, steps):
    """Losses of predicting what cannot be known altogether."""
    width, length = sized(256, 128, tiny=(16, 12))
    dtype = BF16 if ON_GPU else torch.float32
    torch.manual_seed(0)
    model, generator = ByteModel(backend, width).to(DEVICE, dtype), torch.Generator().manual_seed(1)
    # Weights in bfloat16 do not follow small steps: both backends see that alike.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    mask = nn.Transformer.generate_square_subsequent_mask(length, DEVICE, dtype)
    losses = []
    for _ in range(steps):
        tokens = walks(length + 1, generator)
        logits = model(tokens[:, :-1], mask).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def test_training_follows_the_eager_backend():
    steps = 200 if ON_GPU else 8
    ours, theirs = train("triton", steps), train("eager", steps)
    assert ours.isfinite().all()
    # Same seeds, so the same data and dropout: apart by rounding, which training amplifies slowly.
    torch.testing.assert_close(ours[:5], theirs[:5], rtol=2e-2, atol=0.0)
    tail = slice(-20, None)
    torch.testing.assert_close(ours[tail].mean(), theirs[tail].mean(), rtol=3e-2, atol=0.0)
    assert ours[tail].mean() < 0.6 * ours[0] or not ON_GPU
