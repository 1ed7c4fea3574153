"""`torch.distributed.pipelining` over two processes: one process's losses and gradients."""

import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from distributed_steps import CLOSE, encoder, loss_of
from processes import ROOT, torchrun
from reference import randomize
from torch import nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from fused_remat import FusedRematCausalLayer, FusedRematWarning, Policy, convert
from fused_remat.autograd.function import OBSERVERS

MICROBATCHES, LAYERS = 4, 4
SINGLE = ("GPipe", "1F1B")
V = ("ZBVZeroBubble", "DualPipeV")
ZERO_BUBBLE = {"InterleavedZeroBubble": "full", "ZBVZeroBubble": "fast", "DualPipeV": "none"}


class Causal(nn.Module):
    """A causal layer, with the rotary tables that a stage makes for itself."""

    def __init__(self, policy):
        super().__init__()
        self.layer = FusedRematCausalLayer(
            8, 2, 12, kv_heads=1, qk_norm=True, policy=policy, dtype=torch.float64
        )

    def forward(self, x):
        at = torch.arange(x.shape[1], dtype=x.dtype)
        angles = torch.outer(at, 0.1 ** torch.arange(2, dtype=x.dtype))
        return self.layer(x, rope=(angles.cos(), angles.sin()))


class Llama(nn.Module):
    """A decoder layer of a converted Hugging Face model."""

    def __init__(self, model, index):
        super().__init__()
        self.rotary, self.layer = model.model.rotary_emb, model.model.layers[index]

    def forward(self, x):
        place = torch.arange(x.shape[1])[None]
        return self.layer(x, position_embeddings=self.rotary(x, place), position_ids=place)


def layers(kind, policy, dropout=0.0):
    """Four layers in a row, of width 8 (Llama: 32), the same values in every rank."""
    torch.manual_seed(0)
    if kind == "encoder":
        return list(encoder(policy, dropout=dropout, layers=LAYERS))
    if kind == "llama":
        from hf_models import build

        model = convert(build("llama", num_hidden_layers=LAYERS), policy=policy)
        return [Llama(model, i) for i in range(LAYERS)]
    made = nn.Sequential(*(Causal(policy) for _ in range(LAYERS)))
    randomize(made)
    return list(made)


def batch(width):
    """What goes in, and what ought to come out: a sequence of 5 for each microbatch."""
    generator = torch.Generator().manual_seed(1)
    shape = (2, MICROBATCHES, 5, width)
    return torch.randn(shape, generator=generator, dtype=torch.float64).unbind()


def loss_fn(y, target):
    return loss_of(y - target)


def step(name, parts, width):
    """One step of a schedule; the losses, where they are, and this rank's gradients by layer.

    A rank has two stages of one layer each, or one of two.
    """
    rank, count = dist.get_rank(), 2 if name in SINGLE else 4
    mine = [rank] if count == 2 else [rank, 3 - rank] if name in V else [rank, rank + 2]
    each = len(parts) // count
    layers_of = {i: range(i * each, (i + 1) * each) for i in mine}
    stages = [
        PipelineStage(nn.Sequential(*(parts[j] for j in js)), i, count, torch.device("cpu"))
        for i, js in layers_of.items()
    ]
    schedule = getattr(pipelining, f"Schedule{name}")(
        stages if count == 4 else stages[0], MICROBATCHES, loss_fn=loss_fn
    )
    (x, target), losses = batch(width), []
    kwargs = {"target": target, "losses": losses} if count - 1 in mine else {}
    schedule.step(*([x] if 0 in mine else []), **kwargs)
    return [loss.detach() for loss in losses], {
        f"{j}.{n}": p.grad
        for js in layers_of.values()
        for j in js
        for n, p in parts[j].named_parameters()
    }


def as_one_process(name, policy, kind):
    width = 32 if kind == "llama" else 8
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        losses, grads = step(name, layers(kind, policy), width)
    alone = layers(kind, policy)
    x, target = batch(width)
    expected = [
        loss_fn(nn.Sequential(*alone)(a), b)
        for a, b in zip(x.split(1), target.split(1), strict=True)
    ]
    torch.stack(expected).mean().backward()
    if losses:
        torch.testing.assert_close(torch.stack(losses), torch.stack(expected).detach(), **CLOSE)
    assert len(grads) == sum(len(list(layer.parameters())) for layer in alone) // 2
    # transformers' RMSNorm, which a stage's layers do not have, is float32; its tables are too.
    close = {"rtol": 1e-6, "atol": 1e-8} if kind == "llama" else CLOSE
    named = {f"{i}.{n}": p.grad for i in range(LAYERS) for n, p in alone[i].named_parameters()}
    torch.testing.assert_close(grads, {name: named[name] for name in grads}, **close)
    return bool(losses)


@pytest.mark.composes(
    "Pipeline parallel",
    "`torch.distributed.pipelining`: GPipe, 1F1B, interleaved 1F1B, as one process",
)
@pytest.mark.composes(
    "Pipeline parallel",
    "zero-bubble schedules (interleaved, ZBV, DualPipeV): gradients of inputs and weights apart",
    limits="the weights' pass rebuilds and propagates inside each block again; with "
    "`accumulate_into`, gradients of weights alone are `torch.autograd.grad`'s, and go to `.grad`; "
    "torch 2.11 refuses all custom autograd functions there",
)
@pytest.mark.composes("Pipeline parallel", "`FusedRematCausalLayer`, whole and split backward")
@pytest.mark.composes("Pipeline parallel", "layers of a Hugging Face model, split backward")
@pytest.mark.parametrize(
    "name, policy, kind",
    [
        ("GPipe", "full", "encoder"),
        ("1F1B", "none", "encoder"),
        ("Interleaved1F1B", "balanced", "encoder"),
        *((name, policy, "encoder") for name, policy in ZERO_BUBBLE.items()),
        ("1F1B", "lean", "causal"),
        ("InterleavedZeroBubble", "lean", "causal"),
        ("InterleavedZeroBubble", "full", "llama"),
    ],
)
def test_schedules(two_processes, name, policy, kind):
    assert sum(two_processes.run(as_one_process, name, policy, kind)) == 1


def most_kept(name):
    """The most microbatches for which this rank's second layer keeps its input at a time."""
    parts, live, counts = layers("encoder", "full"), [], []

    def note(call):
        if any(t is p for t in call.tensors for p in last):
            live.append(weakref.ref(call.tensors[0]))
            counts.append(sum(ref() is not None for ref in live))

    last = list(parts[2 * dist.get_rank() + 1].parameters())
    OBSERVERS.append(note)
    try:
        step(name, parts, 8)
    finally:
        OBSERVERS.remove(note)
    return max(counts)


@pytest.mark.composes("Pipeline parallel", "kept bytes are those of the microbatches in flight")
@pytest.mark.parametrize("name, in_flight", [("GPipe", [4, 4]), ("1F1B", [2, 1])])
def test_microbatches_in_flight(two_processes, name, in_flight):
    assert two_processes.run(most_kept, name) == in_flight


def stepped(name, policies, dropout=0.0):
    parts = layers("encoder", "full", dropout)
    for layer, policy in zip(parts, policies, strict=True):
        layer.policy = policy
    torch.manual_seed(4 + dist.get_rank())
    return step(name, parts, 8)


@pytest.mark.composes(
    "Pipeline parallel", "dropout: a function of the seed, whatever the policy and the split"
)
@pytest.mark.composes(
    "Pipeline parallel", "segments within a stage", limits="RuntimeError in zero-bubble schedules"
)
def test_dropout_and_segments(two_processes):
    full, segments = ["full"] * 4, [Policy(save=(), segment=p) for p in ("first", "inner")] * 2
    for name, *ways in (
        ("ZBVZeroBubble", (full, 0.2), (["balanced"] * 4, 0.2)),
        ("1F1B", (full,), (segments,)),
    ):
        first, *others = [two_processes.run(stepped, name, *way) for way in ways]
        for other in others:
            torch.testing.assert_close(other, first, rtol=0, atol=0)


@pytest.mark.composes("Pipeline parallel", "`examples/pipeline_1f1b.py --schedule zero-bubble`")
def test_example():
    script = str(ROOT / "examples" / "pipeline_1f1b.py")
    shown = torchrun(script, "--schedule", "zero-bubble", "--steps", "3")
    losses = [float(line.split()[-1]) for line in shown.splitlines() if "loss" in line]
    assert len(losses) == 3 and losses[-1] < losses[0]
