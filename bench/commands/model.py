"""A training step of whole Hugging Face models in every way: bytes, batch, tokens/s, side by side.

    python -m bench model --model smollm-135m --device cpu --memory 4GiB
    python -m bench model --model qwen2-1.5b --layers 4 --lora 0 16 --ways stock full fast
    python -m bench model --article

Random weights of the published configuration; nothing is downloaded. A step is forward and
backward; gradients are added into `.grad`s that exist. Every way's loss and gradients are checked
before it is measured: a wrong one prints FAIL instead. `--article` is the comparison of articles:
fine-tuning SmolLM-135M and Qwen2-1.5B with and without gradient checkpointing, all parameters and
LoRA, the largest batch within a memory cap, and 30 steps' losses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from bench.commands.layers import wrong_of_ours
from bench.measure.contest import Rig
from bench.measure.machine import version
from bench.measure.options import Parser, positive
from bench.measure.results import Row
from bench.measure.steps import run
from bench.model.measure import Options, measure
from bench.pages.models import case_table, file_section, losses_table, target_table, title
from bench.subjects.configs import MODELS
from bench.subjects.model_ways import DEFAULT, WAYS
from bench.subjects.models import Case, affordable_layers, memory_of, usual_tokens
from fused_remat.report.units import bytes_of

#: What `--article` is short for.
ARTICLE: dict[str, Any] = {
    "model": ["smollm-135m", "qwen2-1.5b"], "lora": [0, 16], "losses": 30,
}  # fmt: skip


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("model", __doc__, "device dtype seconds threads out fresh", seconds=120.0)
    add = parser.add
    parser.several("model", choices=MODELS, help="(default: smollm-135m)")
    add("--article", action="store_true", help="the comparison above, in one command")
    add("--layers", type=positive, help="(default: as many as half of the free memory can train)")
    add("--batch", type=positive, help="sequences (default: 1; on cuda 8)")
    add("--seq", type=positive, help="tokens of each, as the model takes them (512; on cuda 2048)")
    parser.several("lora", type=int, metavar="RANK", help="ranks; 0: all is trained (default)")
    add("--memory", metavar="SIZE", help="cap of the largest batch, or none (4GiB; cuda: 24GiB)")
    add("--steps", type=positive, default=12, dest="rounds", help="timed of a way at most (12)")
    add("--losses", type=positive, help="training steps whose losses are compared (default: none)")
    parser.add_ways(WAYS, DEFAULT)
    parser.by_device(batch=(1, 8), seq=(512, 2048), memory=("4GiB", "24GiB"))
    args = parser.parse(arguments)
    if args.article and args.model:
        parser.error("--article has its own models: give --model or --article")
    short: dict[str, Any] = {"model": ["smollm-135m"], "lora": [0], "losses": 0}
    for name, value in (ARTICLE if args.article else short).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    with parser.usage_errors():
        args.memory = None if args.memory == "none" else bytes_of(args.memory, args.device)
        args.ways = WAYS.select(args.ways)
        args.cases = cases(args)
    return args


def cases(args: argparse.Namespace) -> list[Case]:
    """What is measured: each model, as all of it is trained and as its adapters are.

    All of a model's have the layers that training all of it can afford.
    """
    free = memory_of(args.device)
    found = []
    for model in args.model:
        least = min(args.lora)
        layers = args.layers or affordable_layers(model, args.dtype, least, free)
        kind = layers, args.batch, usual_tokens(model, args.seq), args.dtype
        found += [Case(model, *kind, rank) for rank in args.lora]
    return found


def tables(row: Row) -> str:
    return "\n\n".join(["", *filter(None, (case_table(row), losses_table(row)))])


def answered_for(row: Row | None) -> list[str]:
    """Whose wrong results are an error of this project, losses of ours included."""
    mine = wrong_of_ours(row, WAYS, "ours", "loss")
    mine += ["losses"] if row and "losses_failure" in row else []
    losses = (row or {}).get("losses", {"differences": {}})
    return mine + [n for n, d in losses["differences"].items() if not d <= losses["allowed"]]


def main(arguments: Sequence[str]) -> int:
    """Measure, print a table per case and the targets, and write both beside the results.

    Returns 1 if a result of ours was wrong: of others', FAIL in the table says it.
    """
    args = parse(arguments)
    asked = {"memory": args.memory, "losses": args.losses}
    options = Options(args.ways, **asked)

    def one(case: Case, rig: Rig) -> Row:
        return measure(case, options, rig)

    file = f"model-{args.device}.json"
    results, rows = run(args, file, one, title, tables, **asked, peft=version("peft"))
    page = results.path.with_suffix(".md")
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(f"# Whole models\n\n{file_section(results.data)}\n")
    print(f"\n{target_table(results.data)}\n\n{results.path}\n{page}")
    return int(any(map(answered_for, rows)))
