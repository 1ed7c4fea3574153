"""A training step of whole Hugging Face models in every way: bytes, batch, tokens/s, side by side.

    python -m bench model --model smollm-135m --device cpu --memory 4GiB
    python -m bench model --model qwen2-1.5b --layers 4 --lora 0 16 --ways stock full fast

Random weights of the published configuration; nothing is downloaded. A step is forward and
backward; gradients are added into `.grad`s that exist. Every way's loss and gradients are checked
before it is measured: a wrong one prints FAIL instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.commands.layers import wrong_of_ours
from bench.measure.contest import Rig
from bench.measure.machine import version
from bench.measure.options import Parser, positive
from bench.measure.results import Row
from bench.measure.steps import run
from bench.model.measure import Options, measure
from bench.pages.models import title
from bench.subjects.configs import MODELS
from bench.subjects.model_ways import DEFAULT, WAYS
from bench.subjects.models import Case, affordable_layers, memory_of, usual_tokens
from fused_remat.report.units import bytes_of


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("model", __doc__, "device dtype seconds threads out fresh", seconds=120.0)
    add = parser.add
    parser.several("model", choices=MODELS, default=["smollm-135m"], help="(smollm-135m)")
    add("--layers", type=positive, help="(default: as many as half of the free memory can train)")
    add("--batch", type=positive, help="sequences (default: 1; on cuda 8)")
    add("--seq", type=positive, help="tokens of each, as the model takes them (512; on cuda 2048)")
    parser.several(
        "lora", type=int, default=[0], metavar="RANK", help="ranks; 0: all is trained (default)"
    )
    add("--memory", metavar="SIZE", help="cap of the largest batch, or none (4GiB; cuda: 24GiB)")
    add("--steps", type=positive, default=12, dest="rounds", help="timed of a way at most (12)")
    parser.add_ways(WAYS, DEFAULT)
    parser.by_device(batch=(1, 8), seq=(512, 2048), memory=("4GiB", "24GiB"))
    args = parser.parse(arguments)
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


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table per case.

    Returns 1 if a result of ours was wrong: of others', FAIL in the table says it.
    """
    args = parse(arguments)
    options = Options(args.ways, memory=args.memory)

    def one(case: Case, rig: Rig) -> Row:
        return measure(case, options, rig)

    config = {"memory": args.memory, "peft": version("peft")}
    results, rows = run(args, f"model-{args.device}.json", one, title, case_table, **config)
    print(f"\n{results.path}")
    return int(any(wrong_of_ours(row, WAYS, "ours", "loss") for row in rows))
