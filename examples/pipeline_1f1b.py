"""Train a small causal language model over two pipeline stages, one in each process.

The text counts, modulo 32, by a stride of the sequence's own. The last stage prints the losses.

    torchrun --nproc-per-node 2 examples/pipeline_1f1b.py
    torchrun --nproc-per-node 2 examples/pipeline_1f1b.py --schedule zero-bubble
"""

from __future__ import annotations

import argparse
import gc
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble

from fused_remat import FusedRematCausalLayer

VOCABULARY, WIDTH, HEADS, LAYERS = 32, 64, 4, 4
BATCH, SEQ_LEN, MICROBATCHES = 16, 32, 4


class Stage(nn.Module):
    """Half of the model: `first` has the embedding, the other one the head."""

    def __init__(self, first: bool, policy: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if first else None
        self.layers = nn.ModuleList(
            FusedRematCausalLayer(WIDTH, HEADS, 2 * WIDTH, policy=policy)
            for _ in range(LAYERS // 2)
        )
        self.head = (
            None if first else nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
        )
        half = torch.arange(WIDTH // HEADS // 2)
        angles = torch.outer(torch.arange(SEQ_LEN), 10_000.0 ** (-half / len(half)))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        for layer in self.layers:
            x = layer(x, rope=(self.cos, self.sin))
        return x if self.head is None else self.head(x)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def text(step: int) -> Tensor:
    """A batch of sequences, and one token more for the targets; the same in every process."""
    generator = torch.Generator().manual_seed(step)
    start, stride = torch.randint(1, 5, (2, BATCH, 1), generator=generator)
    return (start + stride * torch.arange(SEQ_LEN + 1)) % VOCABULARY


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedule", choices=("1f1b", "zero-bubble"), default="1f1b")
    parser.add_argument("--policy", default="full")
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    cuda = torch.cuda.device_count() >= 2
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = Stage(rank == 0, options.policy).to(device)
    stage = PipelineStage(model, rank, 2, device)
    if options.schedule == "1f1b":
        schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=loss_fn)
    else:
        schedule = ScheduleInterleavedZeroBubble([stage], MICROBATCHES, loss_fn=loss_fn)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(options.steps):
        adam.zero_grad()
        tokens, losses = text(step).to(device), []
        if rank == 0:
            schedule.step(tokens[:, :-1])
        else:
            schedule.step(target=tokens[:, 1:], losses=losses)
        adam.step()
        if losses:
            print(f"step {step}: loss {torch.stack(losses).mean():.4f}", flush=True)
    dist.barrier()  # gloo's threads let go of the last tensors now: at exit they would abort
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    gc.collect()  # the stage is in a cycle and holds the group, whose threads would outlive it
