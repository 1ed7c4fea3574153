"""CUDA graphs: a step captured once and replayed, with fresh dropout, gradients in static buffers.

What a CPU can show of this, that nothing waits for the device: tests/autograd/test_no_sync.py.
"""

import copy

import pytest
import torch
import torch.nn.functional as F
from block_inputs import results
from gpu_layers import APART, CUDA_ONLY, NO_FALLBACK, B, D, H, S, data, layer_of, stack_of
from places import BF16, DEVICE, error_of, normal
from reference import EXACT_PRESETS
from torch import nn

from fused_remat import ops
from fused_remat.execution import program

pytestmark = [pytest.mark.gpu, CUDA_ONLY, NO_FALLBACK]
BACKEND = pytest.mark.parametrize("backend", ["triton", "eager"])
#: Results under other masks, at dropout 0.5, are much further apart than APART.
OTHER_MASKS = 0.1


@pytest.fixture(autouse=True, params=[1 << 30, 1], ids=["steps", "programs"])
def captured_passes(request, monkeypatch):
    """Capture steps, or programs, which are recorded and compared before."""
    monkeypatch.setattr(program, "FEW", request.param)


class Captured:
    """A graph of `function()` and its backward from `dy`, and what every replay writes."""

    def __init__(self, function, leaves, dy):
        self.leaves = leaves
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # kernels are compiled, workspaces made
                function().backward(dy)
        torch.cuda.current_stream().wait_stream(side)
        for leaf in leaves:
            leaf.grad = None  # so that the graph makes them, in memory of its own
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = function()
            self.y.backward(dy)
        self.at = [leaf.grad.data_ptr() for leaf in leaves]

    def replay(self):
        self.graph.replay()
        assert [leaf.grad.data_ptr() for leaf in self.leaves] == self.at
        return [t.detach().clone() for t in (self.y, *(leaf.grad for leaf in self.leaves))]


def check_close(found, expected, factor=1):
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert error_of(a, b) <= factor * APART, i


def check_replays(function, leaves, dy, fresh=True):
    """Each replay is an eager run from the same state of the generator; `fresh`: masks differ."""
    captured = Captured(function, leaves, dy)
    torch.manual_seed(7)
    replays = [captured.replay() for _ in range(3)]
    after = torch.cuda.get_rng_state(DEVICE)
    torch.manual_seed(7)
    runs = [results(function, leaves, dy) for _ in range(3)]
    for found, expected in zip(replays, runs, strict=True):
        check_close(found, expected)
    assert torch.equal(after, torch.cuda.get_rng_state(DEVICE))
    if fresh:
        for i in (0, 1):
            assert error_of(replays[i][0], replays[i + 1][0]) > OTHER_MASKS
            assert error_of(replays[i][1], replays[i + 1][1]) > OTHER_MASKS
    else:
        check_close(replays[0], replays[2])


@pytest.mark.composes(
    "CUDA graphs",
    "forward and backward in a torch.cuda.graph, dropout anew at every replay",
    limits="warmed up first, as always; on the fused path: the fallback's checkpoint reads the "
    "generator's state, which PyTorch refuses there",
)
@pytest.mark.parametrize("norm_first", [False, True], ids=["post", "pre"])
@pytest.mark.parametrize("dropout", [0.5, 0.0])
@BACKEND
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_replays_are_eager_runs(policy, backend, dropout, norm_first):
    layer = layer_of(policy, dropout, "gelu", backend=backend, norm_first=norm_first)
    x = data().requires_grad_()
    check_replays(lambda: layer(x), [x, *layer.parameters()], data(), fresh=dropout > 0)


@pytest.mark.composes("CUDA graphs", "an activation function without a row")
def test_an_activation_without_a_row():
    layer, x = layer_of("lean", 0.5, F.softsign, backend="triton"), data().requires_grad_()
    check_replays(lambda: layer(x), [x, *layer.parameters()], data())


def masks():
    """Of `ops.attention`: each kind, as keywords."""
    torch.manual_seed(2)
    some = torch.rand(B, S, device=DEVICE) < 0.2
    some[:, 0] = False
    return {
        "causal": {"is_causal": True},
        "window": {"window": (16, 0)},
        "bool": {"attn_mask": torch.ones(S, S, dtype=torch.bool, device=DEVICE).tril()},
        "learned": {"attn_mask": normal(BF16, H, S, S).requires_grad_()},
        "padding": {"key_padding_mask": some},
        "lengths": {"key_lengths": torch.arange(S, S - B, -1, device=DEVICE)},
    }


@pytest.mark.composes("CUDA graphs", "the functional ops, every kind of mask")
@pytest.mark.parametrize("kind", ["causal", "window", "bool", "learned", "padding", "lengths"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.5])
@BACKEND
def test_attention(backend, dropout_p, kind):
    torch.manual_seed(0)
    q, k, v = (normal(BF16, B, H, S, D // H).requires_grad_() for _ in "qkv")
    given = masks()[kind]
    leaves = [q, k, v, *(m for m in given.values() if getattr(m, "requires_grad", False))]
    how = {"dropout_p": dropout_p, "backend": backend}
    dy = normal(BF16, B, H, S, D // H)
    check_replays(lambda: ops.attention(q, k, v, **given, **how), leaves, dy, dropout_p > 0)


@pytest.mark.composes(
    "CUDA graphs",
    "packed sequences",
    limits="on the triton backend; the eager one reads cu_seqlens on the host",
)
def test_packed_sequences():
    torch.manual_seed(0)
    q, k, v = (normal(BF16, 1, H, S, D // H).requires_grad_() for _ in "qkv")
    cu = torch.tensor([0, S // 4, S // 2, S], dtype=torch.int32, device=DEVICE)
    dy = normal(BF16, 1, H, S, D // H)
    call = {"cu_seqlens_q": cu, "dropout_p": 0.5, "backend": "triton"}
    check_replays(lambda: ops.attention(q, k, v, **call), [q, k, v], dy)
    captured = Captured(lambda: ops.attention(q, k, v, **call | {"dropout_p": 0.0}), [q, k, v], dy)
    cu.copy_(torch.tensor([0, S // 2, S // 2, S], dtype=torch.int32))
    expected = results(lambda: ops.attention(q, k, v, **call | {"dropout_p": 0.0}), [q, k, v], dy)
    check_close(captured.replay(), expected)


@pytest.mark.composes("CUDA graphs", "a seed of one's own, changed in place between replays")
@BACKEND
def test_a_seed_in_a_static_tensor(backend):
    x, dy = data().requires_grad_(), data()
    up, down = normal(BF16, 4 * D, D, scale=D**-0.5), normal(BF16, D, 4 * D, scale=D**-0.5)
    leaves = [x, up.requires_grad_(), down.requires_grad_()]
    seed = torch.tensor(3, device=DEVICE)

    def mlp():
        return ops.mlp(x, up, None, down, None, dropout_p=0.5, seed=seed, backend=backend)

    captured = Captured(mlp, leaves, dy)
    found = []
    for value in (3, 4, 3):
        seed.fill_(value)
        found.append(captured.replay())
        check_close(found[-1], results(mlp, leaves, dy))
    check_close(found[0], found[2])
    assert error_of(found[0][0], found[1][0]) > OTHER_MASKS


def check_training(graphed, other):
    """Five steps of both, from the same seed: losses and gradients."""
    x, dy, losses = data().requires_grad_(), data(), []
    for model in (graphed, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        torch.manual_seed(7)
        losses.append([])
        for _ in range(5):
            optimizer.zero_grad()
            x.grad = None
            loss = (model(x).float() * dy.float()).mean() * D
            loss.backward()
            losses[-1].append(torch.stack([loss.detach(), x.grad.float().norm()]))
            optimizer.step()
    ours, theirs = (torch.stack(found) for found in losses)
    # The same masks; apart by rounding, which five small steps hardly amplify.
    check_close([ours], [theirs])
    for a, b in zip(graphed.parameters(), other.parameters(), strict=True):
        check_close([a.grad], [b.grad], 2)  # of weights that rounding has set apart


@pytest.mark.composes("CUDA graphs", "torch.cuda.make_graphed_callables, of a layer and of a stack")
@pytest.mark.parametrize("how", [*EXACT_PRESETS, "a stack", "each of a stack"])
@BACKEND
def test_make_graphed_callables(how, backend):
    """Of a layer, of layers of every preset, and of each of these, which then share memory."""
    policies = [how] if how in EXACT_PRESETS else EXACT_PRESETS
    stack = stack_of(policies, 0.5, alternating=True, activation="gelu", backend=backend)
    other, samples = copy.deepcopy(stack), [(data().requires_grad_(),) for _ in stack]
    if how == "each of a stack":
        graphs = torch.cuda.make_graphed_callables(tuple(stack), tuple(samples))
        graphed = nn.Sequential(*graphs)
    else:
        graphed = torch.cuda.make_graphed_callables(stack, samples[0])
    check_training(graphed, other)
