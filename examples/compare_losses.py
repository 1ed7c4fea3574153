"""Train two small models with exact and with 8-bit kept activations; compare their losses.

The models: the byte-level language model of `train_byte_lm.py` (`nn.TransformerEncoderLayer`,
dropout), and a narrow one of SmolLM's shape (`LlamaForCausalLM`: rotary, shared key heads, gated
MLP; no dropout) with random weights. Each is trained as it is ("eager"), after
`fused_remat.convert` with the policy "none" ("native": the activations that "fast8" keeps, exact),
and with "fast8". A seed is that of the weights, of the order of the batches and of dropout; the
three ways of a seed have the same weights and batches, and "native" and "fast8" the same dropout.

    python examples/compare_losses.py           # 18 runs of 500 steps: half an hour on 2 cores
    python examples/compare_losses.py --quick   # tiny sizes: a few seconds

The learning rate rises for 50 steps and falls to 0 along a cosine; `--constant` keeps it.

Writes every step's loss to a JSON file and a figure beside it; one that was cut short is taken up.
Run it in a checkout (`bench` draws the figure); needs `transformers`, `peft` and `matplotlib`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from finetune_hf import smollm
from torch import Tensor, nn
from train_byte_lm import (
    LEARNING_RATE,
    QUICK,
    VOCABULARY,
    ByteLM,
    Run,
    Sizes,
    StockLayer,
    Text,
    loss_of,
    train,
)
from transformers import LlamaForCausalLM

from fused_remat import convert

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))  # for `bench`, which is not installed
from bench.figures.losses import picture
from bench.measure.machine import environment
from bench.measure.results import ResultsFile
from bench.pages.losses import table, verdicts

#: Way -> policy; None: not converted.
WAYS = {"eager": None, "native": "none", "fast8": "fast8"}


@dataclass(frozen=True)
class Subject:
    """A model to train: its sizes, how it is made of them, and its loss of windows (B, S + 1)."""

    sizes: Sizes
    quick: Sizes
    make: Callable[[Sizes], nn.Module]
    loss_of: Callable[[Any, Tensor], Tensor]


def smollm_shaped(sizes: Sizes) -> nn.Module:
    """A model over bytes in SmolLM's proportions; three heads share a key head."""
    config = smollm(sizes.layers, VOCABULARY, sizes.seq_len, kv_heads=sizes.nhead // 3)
    assert (config.hidden_size, config.intermediate_size) == (sizes.d_model, sizes.dim_feedforward)
    return LlamaForCausalLM(config)


def shifted_loss(model: Any, windows: Tensor) -> Tensor:
    """Mean cross-entropy, in nats per byte, of the last S bytes of windows; the model shifts."""
    tokens = windows[:, 1:]
    loss: Tensor = model(input_ids=tokens, labels=tokens).loss
    return loss


_RUN = Sizes(seq_len=128, steps=500, validation_batches=32, warmup_steps=50, decays=True)
_SMOLLM = {"d_model": 192, "nhead": 3, "dim_feedforward": 512, "dropout": 0.0}
SUBJECTS = {
    "byte_lm": Subject(
        dataclasses.replace(_RUN, d_model=128, dim_feedforward=512, layers=3),
        dataclasses.replace(QUICK, d_model=32, dim_feedforward=64, seq_len=16),
        lambda sizes: ByteLM(sizes, StockLayer),
        loss_of,
    ),
    "smollm": Subject(
        dataclasses.replace(_RUN, **_SMOLLM, layers=3),
        dataclasses.replace(QUICK, **_SMOLLM, layers=1, seq_len=16),
        smollm_shaped,
        shifted_loss,
    ),
}


def build(subject: Subject, sizes: Sizes, seed: int, device: str, dtype: torch.dtype) -> list[Run]:
    """One run per way, all with the seed's initial weights."""
    torch.manual_seed(seed)
    base = subject.make(sizes)
    runs = []
    for way, policy in WAYS.items():
        model = copy.deepcopy(base).to(device, dtype).train()
        if policy is not None:
            convert(model, policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
        runs.append(Run(way, model, optimizer, subject.loss_of))
    return runs


def compare(file: ResultsFile, args: argparse.Namespace) -> None:
    """Train what is not in the file yet, all ways of a model and seed in turn."""
    for name, seed in itertools.product(args.models, args.seeds):
        subject = SUBJECTS[name]
        sizes = subject.quick if args.quick else subject.sizes
        if args.steps is not None:
            sizes = dataclasses.replace(sizes, steps=args.steps)
        if args.constant:
            sizes = dataclasses.replace(sizes, warmup_steps=5, decays=False)
        case = {"model": name, "seed": seed, "dtype": args.dtype, **dataclasses.asdict(sizes)}
        if file.find(case, WAYS) is not None:
            continue
        print(f"{name}, seed {seed}: {sizes.steps} rounds of {len(WAYS)}", file=sys.stderr)
        runs = build(subject, sizes, seed, args.device, getattr(torch, args.dtype))
        train(runs, Text(sizes, args.device, seed), args.device)
        parameters = sum(p.numel() for p in runs[0].model.parameters())
        ways = {
            run.way: {
                "policy": WAYS[run.way],
                "validation_loss": run.validation_loss,
                "losses": run.losses,
            }
            for run in runs
        }
        file.put({"case": case, "parameters": parameters, "ways": ways})


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--models", nargs="+", default=tuple(SUBJECTS), choices=tuple(SUBJECTS))
    add("--seeds", nargs="+", type=int, default=(0, 1, 2))
    add("--steps", type=int, help="training steps of each run")
    add("--quick", action="store_true", help="tiny sizes: a few seconds")
    add("--constant", action="store_true", help="no decay, and 5 steps of warm-up")
    add("--device", default="cpu")
    add("--dtype", default="float32", choices=("float32", "bfloat16"))
    add("--out", type=Path, default=ROOT / "build" / "losses-cpu.json", help="the results")
    return parser.parse_args()


def main() -> None:
    """Train, report."""
    args = parse()
    config = {"learning_rate": LEARNING_RATE, "optimizer": "AdamW"}
    file = ResultsFile(args.out, environment(args.device), config)
    compare(file, args)
    made = picture(args.out, file.data["results"])
    made.write()
    print(f"{table(file.data)}\n\n{verdicts(file.data)}")
    print(f"\n{', '.join(str(path) for path in (args.out, *made.files))} written")


if __name__ == "__main__":
    main()
