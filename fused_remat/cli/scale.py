"""`scale`: estimates memory and time of a training step on a mesh of devices."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from fused_remat.cli.options import (
    DTYPES,
    CommandError,
    NothingFits,
    add_dtype,
    add_sizes,
    add_training,
    check_sizes,
    memory_of,
    new_parser,
)
from fused_remat.policies import EXACT_PRESETS
from fused_remat.report.units import aligned, human, milliseconds
from fused_remat.scale.costs import FILE_KEYS, HARDWARE, Costs, of_file, rate_text
from fused_remat.scale.estimate import BASELINES, PLANNER, Estimate, estimate
from fused_remat.scale.layout import Layout, mesh_of
from fused_remat.scale.memory import Setup
from fused_remat.scale.shapes import LARGE, MODELS

_DESCRIPTION = """\
Estimates a training step on a mesh of devices: memory of each device by part, which policies
fit, what the planner would choose, and the time of the step. The estimate follows from the
graphs of the layers and the rates of the hardware; each rate is printed with its source.
"""
_EXAMPLES = """
examples:
  python -m fused_remat scale --model llama3-70b --mesh 8x8 --batch 2
  python -m fused_remat scale --model llama3-405b --mesh 64x8 --batch 2 --policy lean
  python -m fused_remat scale --model llama3-8b --mesh 8 --batch 4 --hardware h200
  python -m fused_remat scale --model gpt3-175b --mesh 32x8 --seq 2048 --batch 8 --json

No model is allocated or run. The exit status is 1 if no policy fits.
"""
_LANGUAGE = {n: m for n, m in (MODELS | LARGE).items() if m.causal and m.vocab}


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = new_parser("scale", _DESCRIPTION, _EXAMPLES)
    add = parser.add_argument
    add("--model", required=True, help=f"one of {', '.join(_LANGUAGE)}")
    mesh = "8x8: 8 data-parallel (FSDP2) by 8 tensor-parallel ranks; 8 is the same as 8x1"
    add("--mesh", required=True, metavar="DATAxTENSOR", help=mesh)
    group = parser.add_argument_group("the training step")
    add = group.add_argument
    add_sizes(group, "sequences per data-parallel rank in a step")
    divide = "divide the residual stream by tokens among tensor-parallel ranks (default: yes)"
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True, help=divide)
    add("--policy", default="all", help=f"all (default), or one of {', '.join(EXACT_PRESETS)}")
    hosted = "names to keep in the host's memory, such as attn,mid"
    add("--offload", default="", metavar="NAMES", help=hosted)
    logits = "compute logits block by block, or all at once (default: fused)"
    add("--loss", choices=("fused", "whole"), default="fused", help=logits)
    add_training(group)
    add_dtype(group, "--dtype", "activations", "bf16", "bf16")
    add_dtype(group, "--param-dtype", "weights, gradients and optimizer states", "fp32", "fp32")
    group = parser.add_argument_group("the hardware")
    add = group.add_argument
    add("--hardware", choices=HARDWARE, default="h100", help="kind of device (default: h100)")
    add("--device-memory", help="memory of a device, such as 80GiB (default: the hardware's)")
    rates = f"JSON with rates: {', '.join(FILE_KEYS)}"
    add("--costs", type=Path, metavar="FILE", help=rates)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the estimate.

    Raises: NothingFits if no policy fits; CommandError for a wrong model, mesh, size or file.
    """
    args = parse(arguments)
    found = estimated(args)
    print(json.dumps(_as_data(found), indent=1) if args.json else "\n".join(lines(found)))
    if not any(map(found.fits, found.rows.keys() - set(BASELINES))):
        raise NothingFits(f"no policy fits into {human(found.memory)}")
    return 0


def estimated(args: argparse.Namespace) -> Estimate:
    """Return the estimate that the options describe. Raises: CommandError for a wrong option."""
    if args.policy not in ("all", *EXACT_PRESETS):
        valid = ", ".join(EXACT_PRESETS)
        raise CommandError(f"--policy is all or one of {valid}, got {args.policy!r}")
    policies = tuple(EXACT_PRESETS) if args.policy == "all" else (args.policy,)
    try:
        setup, costs = _setup(args), _costs(args)
        memory = int(costs.memory.value)
        if args.device_memory is not None:
            memory = memory_of("--device-memory", args.device_memory)
        return estimate(setup, costs, memory, policies)
    except ValueError as error:
        raise CommandError(str(error)) from error


def _setup(args: argparse.Namespace) -> Setup:
    if args.model not in _LANGUAGE:
        raise CommandError(f"--model is one of {', '.join(_LANGUAGE)}, got {args.model!r}")
    check_sizes(args, "batch", "seq")
    model, layout = _LANGUAGE[args.model], Layout(mesh_of(args.mesh), args.sequence_parallel)
    offload = tuple(name.strip() for name in args.offload.split(",") if name.strip())
    return Setup(
        model, layout, args.batch or 1, args.seq or model.seq_len,
        DTYPES[args.dtype], DTYPES[args.param_dtype], args.optimizer, args.loss == "fused",
        offload, args.accumulates,
    )  # fmt: skip


def _costs(args: argparse.Namespace) -> Costs:
    costs = HARDWARE[args.hardware]
    if args.costs is not None:
        try:
            costs = of_file(args.costs, costs)
        except OSError as error:
            raise CommandError(f"--costs: cannot read the file: {error}") from error
    if DTYPES[args.dtype] is torch.float32 and costs.name in HARDWARE:
        raise CommandError(
            f"the rate of float32 products on {costs.name} is unknown; give --costs FILE with "
            "products_tflops and peak_tflops"
        )
    return costs


def _as_data(found: Estimate) -> dict[str, Any]:
    """Return everything that is printed, as plain data in bytes and seconds."""
    setup = found.setup
    rows = {
        name: dataclasses.asdict(row)
        | {"peak": row.peak, "fits": found.fits(name), "step": row.step, "mfu": found.mfu(name)}
        | {"tokens_per_second": found.tokens_per_second(name)}
        | {"largest_batch": found.batches.get(name)}
        for name, row in found.rows.items()
    }
    return {
        "model": setup.model.name,
        "parameters": setup.parameters.count(),
        "layout": dataclasses.asdict(setup.layout),
        "batch": setup.batch,
        "seq": setup.seq,
        "device_memory": found.memory,
        "rows": rows,
        "largest_seq": {"policy": found.longest[0], "seq": found.longest[1]},
        "costs": dataclasses.asdict(found.costs),
    }


def lines(found: Estimate) -> Iterator[str]:
    """Yield the lines to print."""
    yield from _head(found.setup, found)
    yield ""
    yield from aligned(list(_table(found)))
    yield ""
    if PLANNER in found.rows:
        yield f"the planner would choose: {found.rows[PLANNER].policy}"
    else:
        yield "the planner finds no policies that fit"
    policy, seq = found.longest
    longest = f"{seq} tokens, with policy {policy!r}" if seq else "nothing fits"
    yield f"longest sequence that fits at batch {found.setup.batch}: {longest}"
    yield ""
    presets = [preset for preset in found.rows if preset in EXACT_PRESETS]
    yield from _parts(found, PLANNER if PLANNER in found.rows and len(presets) > 1 else presets[0])
    yield "\nrates"
    for what, figure in found.costs.figures.items():
        if what != "memory":
            yield f"  {what.replace('_', ' ')}: {rate_text(what, figure.value)} ({figure})"


def _head(setup: Setup, found: Estimate) -> Iterator[str]:
    """Yield lines on the model, the mesh and the step."""
    mesh, names = setup.layout.mesh, {dtype: name for name, dtype in reversed(DTYPES.items())}
    divided = ", residual stream divided by tokens" if setup.layout.stream > 1 else ""
    yield (
        f"{setup.model.name}: {setup.parameters.count() / 1e9:.2f} B parameters on {mesh.devices} "
        f"devices of {human(found.memory)} ({found.costs.name}): {mesh.data} data-parallel (FSDP2) "
        f"× {mesh.tensor} tensor-parallel{divided}"
    )
    yield (
        f"{setup.batch} × {setup.seq} tokens per data-parallel rank, activations in "
        f"{names[setup.dtype]}, weights in {names[setup.param_dtype]}, {setup.optimizer}, "
        f"{'fused loss' if setup.fused_loss else 'whole logits'}"
    )
    whole = _LANGUAGE[setup.model.name].vocab
    if setup.model.vocab != whole:
        yield f"vocabulary padded from {whole} to {setup.model.vocab} to divide it evenly"


def _table(found: Estimate) -> Iterator[list[str]]:
    """Yield the entries of the table: a line for every policy."""
    hosts = ["on the host"] if found.setup.offload else []
    yield ["policy", "kept", *hosts, "peak", "fits", "batch", "rebuilt", "collectives", "step",
           "tokens/s", "MFU"]  # fmt: skip
    for name, row in found.rows.items():
        forward, backward = row.collectives
        batch = found.batches.get(name)
        yield [
            name, human(row.kept), *[human(row.hosted) for _ in hosts], human(row.peak),
            "yes" if found.fits(name) else "no",
            "" if batch is None else str(batch), f"{row.rebuilt:.0%}",
            f"{forward:.3g} + {backward:.3g}", f"{row.step:.3g} s",
            f"{found.tokens_per_second(name):,.0f}", f"{found.mfu(name):.0%}",
        ]  # fmt: skip


def _parts(found: Estimate, name: str) -> Iterator[str]:
    row = found.rows[name]
    yield f"memory of a device at its peak ({name}), computed from graphs and shapes, not measured"
    yield from aligned([["  " + what, human(nbytes)] for what, nbytes in row.memory.items()])
    if row.hosted:
        yield f"  additionally in the host's memory: {human(row.hosted)}"
    yield ""
    yield f"time of a step ({name}), estimated from the rates below"
    yield from aligned([["  " + what, milliseconds(s)] for what, s in row.seconds.items()])
