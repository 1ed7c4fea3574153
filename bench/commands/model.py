"""A training step of Hugging Face models by training method: time, kept bytes and peak.

    python -m bench model --model smollm-135m --device cpu
    python -m bench model --model qwen2-1.5b --layers 4 --lora 0 16 --ways stock full fast
    python -m bench model --model phi3-512 --lora 16 --adapter lora dora nf4 int8

Weights are random, of the published configuration; nothing is downloaded. A step is forward and
backward; gradients are added into existing ones. The loss and gradients of every way are checked
before it is measured, and with adapters the losses of 30 steps: a wrong one prints FAIL.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import itertools
from collections.abc import Callable, Sequence

import torch

from bench.commands.layers import wrong_of_ours
from bench.measure.checks import Checks
from bench.measure.contest import TOLERANCE, Rig
from bench.measure.options import Parser, positive
from bench.measure.registry import Absent, WrongResultError
from bench.measure.steps import Step, Steps, kept_bytes, peaks, run
from bench.pages.models import case_table, title
from bench.subjects.models import (
    ADAPTERS,
    BASELINE,
    DEFAULT,
    MODELS,
    WAYS,
    Case,
    Forward,
    Loss,
    Subject,
    build,
    dropout_free,
    fixed_bytes,
)  # fmt: skip
from bench.tables import Row
from fused_remat.report.allocations import measure_allocations

#: Layers, sequences and tokens of the model that is compared with float64: layers are equal, and
#: float64 takes two to four times the memory.
LAYERS, BATCH, TOKENS = 2, 2, 128
#: Bytes that the float64 copy of the parameters may take; a larger vocabulary is cut.
_LARGEST = 4 << 30
_FEW_WORDS = {"vocab_size": 8192, "bos_token_id": 0, "eos_token_id": 0}
#: Roundings accumulate in a model: a result may be off by so many single operations.
_FACTOR = 3.0
#: Of AdamW, with adapters, on one sequence: our losses are compared with the stock model's.
_STEPS, _RATE = 30, 2e-4


def measure(
    case: Case,
    rig: Rig,
    ways: Sequence[str],
    backend: str = "auto",
    find: Callable[[Forward, Subject], Row] = lambda *_: {},
) -> Row:
    """Return a row of the results file, without the case: check, weigh and time these ways.

    `find` adds to a way's row, after all were timed.
    """
    # What building such a model imports is frozen: every memory measurement collects garbage, and
    # would visit all of transformers each time.
    dataclasses.replace(case, layers=1, seq_len=1, tiny=True).subject("cpu")
    gc.collect()
    gc.freeze()
    with Steps(rig) as steps:
        small = dataclasses.replace(checked_subject(case, rig.device), backend=backend)
        checks = Checks(small, _FACTOR * TOLERANCE[small.dtype])
        train = functools.partial(_train, subject=small, stock=[])
        for name in WAYS.select(ways):
            ours = name == BASELINE or WAYS[name].traits["group"] in ("ours", "loss")
            steps.admit_way(WAYS[name], checks, *([train] if case.lora and ours else []))
        steps.forwards.clear()  # no forward of the small model remains
        del checks, small
        subject = dataclasses.replace(case.subject(rig.device), backend=backend)
        _weigh(subject, steps)
        steps.time(Step, subject, (*WAYS.baselines, "liger_checkpoint"))
        for name, forward in steps.forwards.items():
            steps.rows[name] |= find(forward, subject)
        row = {"fixed_bytes": fixed_bytes(subject.module), "rounds": steps.rounds}
    return row | {"ways": steps.rows}


def checked_subject(case: Case, device: torch.device | str) -> Subject:
    """Return the case's model for comparing results: few layers and tokens, no dropout."""
    published = dropout_free(case.published)
    seq_len = min(TOKENS, case.seq_len)
    layers = min(LAYERS, case.layers)
    model = build(published, layers, torch.float32, "meta")
    if 8 * sum(p.numel() for p in model.parameters()) > _LARGEST:
        published = dataclasses.replace(published, values=published.values | _FEW_WORDS)
    small = dataclasses.replace(case, layers=layers, batch=BATCH, seq_len=seq_len)
    return small.subject(device, published)


def _train(forward: Forward, subject: Subject, stock: list[float]) -> Row:
    """Return how far the losses of `_STEPS` of AdamW are from the first way's, kept in `stock`."""
    leaves, losses = [*subject.leaves().values()], []
    start = [leaf.detach().clone() for leaf in leaves]
    optimizer = torch.optim.AdamW(leaves, _RATE)
    x = {name: t[:1] for name, t in subject.x.items()}
    for _ in range(_STEPS):
        subject.zero()
        loss = forward(x)
        loss.backward()
        optimizer.step()
        losses.append(loss.value.item())
    with torch.no_grad():
        for leaf, value in zip(leaves, start, strict=True):
            leaf.copy_(value)
    stock.extend([] if stock else losses)
    error = max(abs(a - b) / b for a, b in zip(losses, stock, strict=True))
    if not error <= 10 * TOLERANCE[subject.dtype]:
        raise WrongResultError(f"the losses of {_STEPS} steps differ by {error:.1e}")
    return {"losses": {"steps": _STEPS, "error": error, "first": losses[0], "last": losses[-1]}}


def memory(forward: Forward, subject: Subject, split: bool = True) -> Row:
    """Return a step's loss, and bytes by the allocator, above those before the step."""
    x, device, values = subject.x, subject.device, []
    kept = kept_bytes(lambda: forward(x).value, subject, "allocator")
    below = measure_allocations(lambda: forward.below_head(x), device).net if split else None

    def backward(loss: Loss) -> None:
        loss.backward()
        values.append(loss.value.item())

    step = peaks(lambda: forward(x), backward, device)
    return {
        "loss": values[0],
        "kept_bytes": kept,
        "kept_below_head_bytes": below,
        "kept_bytes_per_token": kept / (subject.case.batch * subject.case.seq_len),
        **step,
        "fixed_bytes": fixed_bytes(subject.module),
    }


def _weigh(subject: Subject, steps: Steps) -> None:
    """Measure the memory of the ways that are right, in the full model."""
    dropout = any(v for k, v in subject.published.values.items() if "dropout" in k)
    rows, allowed = steps.rows, 10 * TOLERANCE[subject.dtype]

    def weigh(forward: Forward, name: str) -> Row:
        try:
            row = memory(forward, subject, not WAYS[name].traits["compiled"])
        except torch.OutOfMemoryError as error:
            raise Absent("out of memory at this batch") from error
        if not dropout and BASELINE in steps.forwards and name != BASELINE:
            loss, theirs = row["loss"], rows[BASELINE]["loss"]
            error = abs(loss - theirs) / abs(theirs)
            if not error <= allowed:
                raise WrongResultError(
                    f"the loss at the measured size is {loss:.6g}, the unconverted model's "
                    f"{theirs:.6g}"
                )
            row["check"] = rows[name]["check"] | {"loss": error}
        return row

    for name in [name for name, row in rows.items() if "check" in row]:
        finds = [] if steps.rig.dry else [functools.partial(weigh, name=name)]
        steps.admit(name, functools.partial(WAYS[name].build, subject), *finds)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; `cases` are each model, batch and rank of adapters."""
    parser = Parser("model", __doc__, "device seconds threads fresh", seconds=120.0)
    add = parser.add
    parser.several("dtype")
    parser.several("model", choices=MODELS, default=["smollm-135m"], help="(smollm-135m)")
    add("--layers", type=positive, help="(default: all of the model's)")
    parser.several("batch", type=positive, help="sequences (default: 1; on cuda 8)")
    add("--seq", type=positive, help="tokens of each, as the model takes them (512; on cuda 2048)")
    ranks = "ranks of LoRA; 0: all is trained (default)"
    parser.several("lora", type=int, default=[0], metavar="RANK", help=ranks)
    kinds = "with ranks: lora, dora, or lora on quantized weights (lora)"
    parser.several("adapter", choices=ADAPTERS, default=[""], help=kinds)
    add("--steps", type=positive, default=12, dest="rounds", help="timed of a way at most (12)")
    parser.add_ways(WAYS, DEFAULT)
    parser.by_device(batch=([1], [8]), seq=(512, 2048))
    args = parser.parse(arguments)
    with parser.usage_errors():
        args.ways = WAYS.select(args.ways)
        args.cases = []
        grid = itertools.product(args.model, args.dtype, args.batch, args.lora, args.adapter)
        for name, dtype, batch, rank, adapter in grid:
            model = MODELS[name]
            kind, tokens = (name, args.layers or model.layers), min(args.seq, model.longest)
            args.cases.append(Case(*kind, batch, tokens, dtype, rank, adapter))
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure and print a table per case; 1 if a result of ours was wrong."""
    args = parse(arguments)
    file, one = f"model-{args.device}.json", functools.partial(measure, ways=args.ways)
    results, rows = run(args, file, one, title, case_table)
    print(f"\n{results.path}")
    return int(any(wrong_of_ours(row, WAYS, "ours", "loss") for row in rows))
