"""torch.compile on a GPU: Inductor around the operators, CUDA graphs, what is kept."""

import pytest
import torch
from gpu_layers import B, D, S, data, stack_of, step
from places import BF16, assert_bits, deterministic, error_of, normal
from reference import EXACT_PRESETS

from fused_remat.report.allocations import SavedBytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning"),  # no fallback
]


@pytest.fixture(autouse=True)
def same_routines():
    """Of forward and backward, compiled or not."""
    torch._dynamo.reset()
    with deterministic():
        yield


@pytest.mark.composes("torch.compile", "Inductor on CUDA: eager mode's bits and bytes kept")
@pytest.mark.parametrize("policy", EXACT_PRESETS)
def test_inductor(policy):
    model = stack_of([policy] * 2)
    call = torch.compile(model, fullgraph=True, dynamic=True)
    for batch in (B, B + 1):
        x = normal(BF16, batch, S, D)
        assert_bits(step(call, model, x), step(model, model, x))
    kept = []
    for way in (model, call):
        with SavedBytes(exclude=model.parameters()) as saved:
            y = way(data().requires_grad_())
        kept.append(saved.total)
        del y
    assert kept[0] == kept[1]


@pytest.mark.composes(
    "torch.compile", 'mode="reduce-overhead" (CUDA graphs), dropout anew at every step'
)
def test_reduce_overhead():
    model = stack_of(["lean"] * 2, dropout=0.5)
    call = torch.compile(model, fullgraph=True, mode="reduce-overhead")
    x = data()
    made = []
    for seed in (1, 2, 1, 2, 1):
        torch.compiler.cudagraph_mark_step_begin()
        torch.manual_seed(seed)
        y = call(x)
        y.float().square().mean().backward()
        made.append(y.detach().clone())
        model.zero_grad()
    assert not torch.equal(made[3], made[4])  # replays: another seed, other dropout
    assert error_of(made[2], made[4]) < 1e-2  # the same seed, the same
