"""Train a small byte-level language model in seven ways; compare their loss, memory and step time.

The ways: PyTorch's own layers (eager), the same under `torch.utils.checkpoint`, and the same after
`fused_remat.convert` at each preset. The text is the English of Python's own manual, which ships
with CPython (`pydoc_data.topics`). All ways start from the same weights and take the same batches
in turn, one step each per round, so that other work of the machine slows all of them equally.

    python examples/train_byte_lm.py                # 3 to 5 minutes on 2 cores
    python examples/train_byte_lm.py --device cuda
"""

from __future__ import annotations

import os

# Read when torch is loaded: keeps the profiler, which counts bytes on CPU, from logging its starts.
os.environ["KINETO_LOG_LEVEL"] = os.environ.get("KINETO_LOG_LEVEL", "99")

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from pydoc_data.topics import topics
from statistics import fmean
from typing import Any

import torch
import torch.nn.functional as F
from byte_lm_report import notes, plot, table, title
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from tqdm import trange

sys.path.append(str(Path(__file__).parents[1]))  # for `bench`, which is not installed
from bench.measure.clock import quantiles, ratios
from bench.measure.machine import machine, synchronize
from fused_remat import convert
from fused_remat.policies import EXACT_PRESETS
from fused_remat.report.allocations import measure_allocations

StockLayer = nn.TransformerEncoderLayer
WAYS = ("eager", "checkpoint", *EXACT_PRESETS)
VOCABULARY = 256
LEARNING_RATE = 1e-3
FINAL_STEPS = 5


@dataclass(frozen=True)
class Sizes:
    """Sizes of the model and of the run; the defaults are the demo's, for a CPU with 2 cores."""

    d_model: int = 256
    nhead: int = 4
    dim_feedforward: int = 1024
    layers: int = 4
    seq_len: int = 256
    batch: int = 8
    steps: int = 26
    dropout: float = 0.1
    validation_batches: int = 4
    warmup_steps: int = 5
    decays: bool = False

    def rate(self, step: int) -> float:
        """The learning rate of a step, as a part of `LEARNING_RATE`: a rise, then 1, or a cosine
        down to 0 if it `decays`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if not self.decays:
            return 1.0
        done = (step - self.warmup_steps) / (self.steps - self.warmup_steps)
        return 0.5 + 0.5 * math.cos(math.pi * done)


QUICK = Sizes(d_model=64, dim_feedforward=256, layers=2, seq_len=64, batch=4, steps=4)


class CheckpointedLayer(StockLayer):
    """The stock layer under `torch.utils.checkpoint`: keeps its input, runs forward again."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        out: Tensor = checkpoint(super().forward, *args, use_reentrant=False, **kwargs)
        return out


class ByteLM(nn.Module):
    """A causal language model over bytes: tokens (B, S) int64 to logits (B, S, 256)."""

    mask: Tensor

    def __init__(self, sizes: Sizes, layer_type: type[StockLayer]) -> None:
        super().__init__()
        layer = layer_type(
            sizes.d_model, sizes.nhead, sizes.dim_feedforward, sizes.dropout,
            activation="gelu", batch_first=True, norm_first=True,
        )  # fmt: skip
        self.bytes = nn.Embedding(VOCABULARY, sizes.d_model)
        self.positions = nn.Parameter(0.02 * torch.randn(sizes.seq_len, sizes.d_model))
        norm = nn.LayerNorm(sizes.d_model)
        self.encoder = nn.TransformerEncoder(layer, sizes.layers, norm, enable_nested_tensor=False)
        self.head = nn.Linear(sizes.d_model, VOCABULARY)
        mask = nn.Transformer.generate_square_subsequent_mask(sizes.seq_len)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions
        logits: Tensor = self.head(self.encoder(x, mask=self.mask, is_causal=True))
        return logits


def loss_of(model: ByteLM, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte, of windows (B, S + 1) of text."""
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


class Text:
    """The training and validation bytes, int64 on the device, and how windows are cut from them.

    `seed` is that of the order of the training windows and of dropout.
    """

    def __init__(self, sizes: Sizes, device: str, seed: int = 0) -> None:
        raw = bytearray("".join(topics.values()).encode())
        text = torch.frombuffer(raw, dtype=torch.uint8).long().to(device)
        split = len(text) * 9 // 10
        self.train, self.validation = text[:split], text[split:]
        self.sizes, self.seed = sizes, seed

    def _windows(self, text: Tensor, starts: Tensor) -> Tensor:
        columns = torch.arange(self.sizes.seq_len + 1)
        return text[(starts[:, None] + columns).to(text.device)]

    def seed_of(self, step: int) -> int:
        """A generator's seed for what is drawn in a step; it has 32 bits on a CPU."""
        return 1_000_000 * self.seed + step

    def training_batch(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed_of(step))
        last = len(self.train) - self.sizes.seq_len
        starts = torch.randint(last, (self.sizes.batch,), generator=generator)
        return self._windows(self.train, starts)

    def validation_batches(self) -> Iterator[Tensor]:
        last = len(self.validation) - self.sizes.seq_len - 1
        count = self.sizes.validation_batches * self.sizes.batch
        starts = torch.linspace(0, last, count).long()
        for chunk in starts.split(self.sizes.batch):
            yield self._windows(self.validation, chunk)


@dataclass
class Run:
    """One way's model and optimizer, and what was measured of them."""

    way: str
    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss_of: Callable[[Any, Tensor], Tensor] = loss_of
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")
    kept_bytes: float = float("nan")
    peak_bytes: int = 0


def build(sizes: Sizes, device: str, dtype: torch.dtype) -> list[Run]:
    """One run per way, all with the same initial weights."""
    torch.manual_seed(0)
    weights = ByteLM(sizes, StockLayer).state_dict()
    runs = []
    for way in WAYS:
        model = ByteLM(sizes, CheckpointedLayer if way == "checkpoint" else StockLayer)
        model.load_state_dict(weights)
        if way in EXACT_PRESETS:
            convert(model, policy=way)
        model.to(device, dtype)
        runs.append(Run(way, model, torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)))
    return runs


def measure_memory(run: Run, text: Text, device: str) -> None:
    """Bytes kept by one layer, and the peak of one step, before training; weights do not change.

    Bytes kept are what a forward of the layer leaves allocated: all that backward will read but the
    layer's input, and the output, which is the next layer's input and so stands for it. The peak
    is of forward, loss and backward, above weights and gradients, which a first step allocated.
    """
    sizes, model = text.sizes, run.model
    assert isinstance(model, ByteLM)
    windows = text.training_batch(0)
    loss_of(model, windows).backward()
    run.peak_bytes = measure_allocations(lambda: loss_of(model, windows).backward(), device).peak
    shape = (sizes.batch, sizes.seq_len, sizes.d_model)
    x = torch.zeros(shape, device=device, dtype=model.positions.dtype, requires_grad=True)
    layer = model.encoder.layers[0]
    net = measure_allocations(lambda: layer(x, src_mask=model.mask, is_causal=True), device).net
    run.kept_bytes = net / (sizes.batch * sizes.seq_len)


def train_step(run: Run, windows: Tensor, rate: float, device: str) -> None:
    """One timed step: forward, loss, backward and the optimizer's."""
    for group in run.optimizer.param_groups:
        group["lr"] = LEARNING_RATE * rate
    synchronize(device)
    start = time.perf_counter()
    run.optimizer.zero_grad(set_to_none=False)
    loss = run.loss_of(run.model, windows)
    loss.backward()
    run.optimizer.step()
    synchronize(device)
    run.seconds.append(time.perf_counter() - start)
    run.losses.append(loss.item())


@torch.no_grad()
def validate(run: Run, text: Text) -> None:
    """The loss on windows spread over the validation text, without dropout."""
    run.model.eval()
    losses = [run.loss_of(run.model, windows) for windows in text.validation_batches()]
    run.validation_loss = torch.stack(losses).mean().item()
    run.model.train()


def train(runs: list[Run], text: Text, device: str) -> None:
    """All runs in turn, one step each per round; who goes first rotates."""
    rounds = trange(text.sizes.steps, unit=" rounds", disable=None)  # a bar on a terminal
    for step in rounds:
        windows = text.training_batch(step)
        first = step % len(runs)
        for run in runs[first:] + runs[:first]:
            torch.manual_seed(text.seed_of(step))
            train_step(run, windows, text.sizes.rate(step), device)
        rounds.set_postfix({run.way: f"{run.losses[-1]:.3f}" for run in (runs[0], runs[-1])})
    for run in runs:
        validate(run, text)


def agree(runs: list[Run]) -> bool:
    """Whether the runs have the same bits: every training loss, the final weights, validation."""
    first, *others = runs
    weights = first.model.state_dict()
    return all(
        run.losses == first.losses
        and run.validation_loss == first.validation_loss
        and all(torch.equal(p, weights[name]) for name, p in run.model.state_dict().items())
        for run in others
    )


def results(runs: list[Run], sizes: Sizes, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Everything measured, as plain data."""
    by_way = {run.way: run for run in runs}
    beside_eager = ratios({run.way: run.seconds for run in runs}, ["eager"])
    ways = {
        run.way: {
            "final_loss": fmean(run.losses[-FINAL_STEPS:]),
            "validation_loss": run.validation_loss,
            "losses": run.losses,
            "kept_bytes_per_token_per_layer": run.kept_bytes,
            "step_peak_bytes": run.peak_bytes,
            "step_seconds": quantiles(run.seconds),
            "step_time_ratio": beside_eager[run.way]["eager"],
        }
        for run in runs
    }
    return {
        "machine": machine(device),
        "device": device,
        "sizes": dataclasses.asdict(sizes) | {"dtype": str(dtype).removeprefix("torch.")},
        "final_steps": min(FINAL_STEPS, sizes.steps),
        "presets_bit_identical": agree([by_way[preset] for preset in EXACT_PRESETS]),
        "checkpoint_bit_identical_to_eager": agree([by_way["eager"], by_way["checkpoint"]]),
        "ways": ways,
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--steps", type=int, help="training steps of each way")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a few seconds")
    parser.add_argument("--out", type=Path, default=Path("demo.png"), help="the plot")
    parser.add_argument("--json", type=Path, help="also write the results here")
    return parser.parse_args()


def main() -> None:
    """Build, measure, train, report."""
    start = time.perf_counter()
    args = parse()
    sizes = QUICK if args.quick else Sizes()
    if args.steps is not None:
        sizes = dataclasses.replace(sizes, steps=args.steps)
    dtype = getattr(torch, args.dtype)
    text, runs = Text(sizes, args.device), build(sizes, args.device, dtype)
    print(f"measuring memory, then {sizes.steps} rounds of {len(runs)} ways", file=sys.stderr)
    for run in runs:
        measure_memory(run, text, args.device)
    train(runs, text, args.device)
    found = results(runs, sizes, args.device, dtype)
    found["seconds"] = time.perf_counter() - start
    plot(found, args.out)
    print(f"{title(found)}\n\n{table(found)}\n\n{notes(found)}")
    if args.json is not None:
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{args.out} written; {found['seconds']:.0f} s in all")


if __name__ == "__main__":
    main()
