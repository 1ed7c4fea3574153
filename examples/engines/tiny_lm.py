"""What the scripts of this folder share: a small byte-level language model, its data, its losses.

Every script trains it, saves after some step and goes on; started again with `--resume` it has the
losses of the first start, bit for bit (on a CPU with a fixed number of threads).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from fused_remat import FusedRematCausalLayer

VOCABULARY, SEQ_LEN, BATCH = 256, 32, 4
WIDTH, HEADS, LAYERS = 64, 4, 2
LEARNING_RATE, WARMUP_STEPS, CLIP = 3e-3, 5, 1.0
SEED = 0


class TinyLM(nn.Module):
    """Bytes (B, S) to logits (B, S, 256); `forward` of layers of Llama's kind, with dropout."""

    def __init__(self, policy: str = "lean", dropout: float = 0.1) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            FusedRematCausalLayer(
                WIDTH, HEADS, 2 * WIDTH, dropout, kv_heads=HEADS // 2, policy=policy
            )
            for _ in range(LAYERS)
        )
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        half = WIDTH // HEADS // 2
        angles = torch.outer(torch.arange(SEQ_LEN), 10000.0 ** -(torch.arange(half) / half))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        h, length = self.embed(tokens), tokens.shape[1]
        for layer in self.layers:
            h = layer(h, (self.cos[:length], self.sin[:length]))
        return self.head(self.norm(h))


def loss_of(model: nn.Module, windows: Tensor) -> Tensor:
    """Mean cross-entropy of every byte of windows (B, S + 1) but the first."""
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


class Windows(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Python's own manual in windows of S + 1 bytes."""

    def __init__(self) -> None:
        text = "".join(topics.values()).encode()
        count = len(text) // (SEQ_LEN + 1)
        self.windows = torch.tensor([*text[: count * (SEQ_LEN + 1)]]).view(count, SEQ_LEN + 1)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> Tensor:
        return self.windows[index]


class Batches:
    """This rank's batches without end, in an order that only the seed decides.

    `state_dict` has the place in it, so that a restored one goes on with the next batch.
    """

    def __init__(self, rank: int, world: int) -> None:
        self.data, self.rank, self.world, self.taken = Windows(), rank, world, 0
        generator = torch.Generator().manual_seed(SEED)
        self.order = torch.randperm(len(self.data), generator=generator)

    def __len__(self) -> int:  # of an epoch; Lightning takes a batch ahead where it is not known
        return len(self.order) // (BATCH * self.world)

    def __iter__(self) -> Iterator[Tensor]:
        while True:
            first = (self.taken * self.world + self.rank) * BATCH
            places = torch.arange(first, first + BATCH) % len(self.order)
            self.taken += 1
            yield self.data.windows[self.order[places]]

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.1)


def warmup(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """A learning rate that rises for some steps, then falls as the root of the step."""

    def factor(step: int) -> float:
        return min((step + 1) / WARMUP_STEPS, (WARMUP_STEPS / (step + 1)) ** 0.5)

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


class RandomState:
    """torch's generators in this rank: where dropout's next seed comes from."""

    def state_dict(self) -> dict[str, Any]:
        state = {"cpu": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"].cpu())
        if torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())


class TrainState:
    """All that a start takes from the one before it, in `torch.distributed.checkpoint`'s form.

    Parameters and optimizer state by their names, whatever shards or wraps them; `others` (a
    schedule, the batches) are the same in all ranks. Random state is not: an entry for each rank.
    """

    def __init__(
        self, model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], **others: Any
    ) -> None:
        self.model, self.optimizers = model, tuple(optimizers)
        self.others, self.random = others, RandomState()

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizers)
        others = {name: other.state_dict() for name, other in self.others.items()}
        random = {f"random{dist.get_rank()}": self.random.state_dict()}
        return {"model": model, "optimizer": optimizer, **others, **random}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model, self.optimizers,
            model_state_dict=state["model"], optim_state_dict=state["optimizer"],
        )  # fmt: skip
        for name, other in self.others.items():
            other.load_state_dict(state[name])
        self.random.load_state_dict(state[f"random{dist.get_rank()}"])

    def save(self, folder: Path) -> None:
        """Every rank's part, with all ranks together."""
        dcp.save({"train": self}, checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        """In place; of as many ranks as wrote it, each of which has its random state there."""
        dcp.load({"train": self}, checkpoint_id=folder)


class Losses:
    """Every rank's loss of every step: a JSON line each, printed and written by rank 0."""

    def __init__(self, folder: Path, start: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"losses-from-{start}.jsonl"
        if dist.get_rank() == 0:
            self.path.write_text("")

    def note(self, step: int, loss: Tensor) -> None:
        mine = loss.detach().reshape(1)
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        if dist.get_rank() == 0:
            line = json.dumps({"step": step, "losses": [one.item() for one in every]})
            print(line, flush=True)
            with self.path.open("a") as file:
                print(line, file=file)


def join() -> torch.device:
    """Join the processes that torchrun started; this rank's GPU, or the CPU where there is none."""
    where = torch.device("cpu")
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        where = torch.device("cuda", torch.cuda.current_device())
    if not dist.is_initialized():
        dist.init_process_group("nccl" if where.type == "cuda" else "gloo")
    return where


def leave() -> None:
    """Leave the group, all ranks together."""
    gc.collect()  # models in cycles hold groups, whose threads would outlive them
    with contextlib.suppress(ValueError, AssertionError):  # some engines have left already
        dist.barrier()  # gloo's threads let go of the last tensors now: at exit they would abort
        dist.destroy_process_group()


def seed_all() -> None:
    """Give all ranks the same weights: call this, build the model, then `seed_rank`."""
    torch.manual_seed(SEED)


def seed_rank() -> None:
    """Dropout differs between ranks."""
    torch.manual_seed(SEED + 1 + dist.get_rank())


def parse(
    description: str, argv: Sequence[str] | None = None, **more: dict[str, Any]
) -> argparse.Namespace:
    """The command line that all scripts have, and `more` of one: its options, as argparse's."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    add = parser.add_argument
    add("--steps", type=int, default=20, help="the step to train to")
    add("--save-at", type=int, default=10, help="the step after which to save")
    add("--out", type=Path, default=Path("build/engines"), help="losses and checkpoints")
    add("--resume", type=Path, help="a checkpoint that the script wrote")
    add("--policy", default="lean", help="what layers keep: see README.md")
    for name, given in more.items():
        add(f"--{name}", **given)
    return parser.parse_args(argv)
