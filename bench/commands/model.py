"""A training step of Hugging Face models by training method: time, kept bytes and peak.

    python -m bench model --model smollm-135m --device cpu
    python -m bench model --model qwen2-1.5b --layers 4 --lora 0 16 --ways stock full fast

Weights are random, of the published configuration; nothing is downloaded. A step is forward and
backward; gradients are added into existing ones. The loss and gradients of every way are checked
before it is measured: a wrong one prints FAIL.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.commands.layers import wrong_of_ours
from bench.measure.contest import Rig
from bench.measure.machine import version
from bench.measure.models import Options, measure
from bench.measure.options import Parser, positive
from bench.measure.results import Row
from bench.measure.steps import run
from bench.pages.models import case_table, title
from bench.subjects.configs import MODELS
from bench.subjects.model_ways import DEFAULT, WAYS
from bench.subjects.models import Case


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `cases` are each model, batch and rank of adapters."""
    parser = Parser("model", __doc__, "device dtype seconds threads fresh", seconds=120.0)
    add = parser.add
    parser.several("model", choices=MODELS, default=["smollm-135m"], help="(smollm-135m)")
    add("--layers", type=positive, help="(default: all of the model's)")
    parser.several("batch", type=positive, help="sequences (default: 1; on cuda 8)")
    add("--seq", type=positive, help="tokens of each, as the model takes them (512; on cuda 2048)")
    ranks = "ranks of LoRA; 0: all is trained (default)"
    parser.several("lora", type=int, default=[0], metavar="RANK", help=ranks)
    add("--steps", type=positive, default=12, dest="rounds", help="timed of a way at most (12)")
    parser.add_ways(WAYS, DEFAULT)
    parser.by_device(batch=([1], [8]), seq=(512, 2048))
    args = parser.parse(arguments)
    with parser.usage_errors():
        args.ways = WAYS.select(args.ways)
        args.cases = []
        for name in args.model:
            model = MODELS[name]
            tokens = min(args.seq, model.longest)
            kind = name, args.layers or model.layers
            args.cases += [Case(*kind, batch, tokens, args.dtype, rank)
                           for batch in args.batch for rank in args.lora]  # fmt: skip
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table per case; 1 if a result of ours was wrong."""
    args = parse(arguments)
    options = Options(args.ways)

    def one(case: Case, rig: Rig) -> Row:
        return measure(case, options, rig)

    config = {"peft": version("peft")}
    results, rows = run(args, f"model-{args.device}.json", one, title, case_table, **config)
    print(f"\n{results.path}")
    return int(any(wrong_of_ours(row, WAYS, "ours", "loss") for row in rows))
