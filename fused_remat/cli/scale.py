"""`scale`: what a model takes on a mesh of devices, on paper, and how long a step is there."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fused_remat.cli.outputs import CommandError
from fused_remat.planner.options import bytes_of
from fused_remat.policies import ALL_PRESETS, EXACT_PRESETS
from fused_remat.report.report import aligned, human
from fused_remat.scale.costs import FILE_KEYS, HARDWARE, Costs, Figure, of_file, of_this_machine
from fused_remat.scale.estimate import (
    BASELINES,
    PLANNER,
    Estimate,
    estimate,
    largest_batch,
    largest_seq,
    smallest_mesh,
)
from fused_remat.scale.layout import Layout, mesh_of, padded
from fused_remat.scale.memory import OPTIMIZERS, Setup
from fused_remat.scale.shapes import LARGE, MODELS

_EXAMPLES = """
examples:
  python -m fused_remat scale --model llama3-70b --mesh 8x8
  python -m fused_remat scale --model llama3-405b --mesh 64x8 --batch 2 --policy lean
  python -m fused_remat scale --model llama3-8b --mesh 8 --batch 4 --hardware h200 --devices
  python -m fused_remat scale --model gpt3-175b --mesh 32x8 --seq 2048 --batch 8 --json

Nothing is allocated and nothing is run. The exit status is 1 if no policy fits.
"""
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_LANGUAGE = {n: m for n, m in (MODELS | LARGE).items() if m.causal and m.vocab}
#: Options of a rate: the keys of a costs file that they replace.
_RATES = {
    "peak_tflops": ("peak_tflops", "what the maker states; MFU is of it"),
    "tflops": ("products_tflops", "of large products, and of attention"),
    "bandwidth": ("bandwidth_GBps", "GB/s of a device's memory"),
    "link_GBps": ("link_GBps", "that a device sends within a node"),
    "network_GBps": ("network_GBps", "that a device sends to other nodes"),
}


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a positive number is expected, got {text!r}")
    return value


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m fused_remat scale",
        description="Says what a training step takes on every device of a mesh, by part, what "
        "fits, what the planner would keep, and how long a step is, from the graphs of the layers "
        "and the rates of the hardware. Every rate is printed with where it is from.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", required=True, help=f"one of {', '.join(_LANGUAGE)}")
    add("--mesh", required=True, metavar="DATAxTENSOR",
        help="8x8: 8 data-parallel (FSDP2) by 8 tensor-parallel ranks; 8: 8x1")  # fmt: skip
    add("--seq", type=int, help="tokens of a sequence (default: what the model is for)")
    add("--batch", type=int, default=1,
        help="sequences of each data-parallel rank at a time (default: 1)")  # fmt: skip
    add("--sequence-parallel", action=argparse.BooleanOptionalAction, default=True,
        help="divide the residual stream by tokens among tensor-parallel ranks")  # fmt: skip
    add("--policy", default="all", help=f"all (default), or one of {', '.join(ALL_PRESETS)}")
    add("--offload", default="", metavar="NAMES", help="kept names that wait in the host's memory")
    add("--loss", choices=("fused", "whole"), default="fused",
        help="a block of logits at a time, or all at once (default: fused)")  # fmt: skip
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="(default: adamw)")
    add("--accumulates", action="store_true", help="gradients are there all along")
    add("--dtype", choices=_DTYPES, default="bf16", help="of what is computed (default: bf16)")
    add("--param-dtype", choices=_DTYPES, default="fp32",
        help="of weights, gradients and states as they are held (default: fp32)")  # fmt: skip
    group = parser.add_argument_group("the hardware")
    group.add_argument("--hardware", choices=(*HARDWARE, "here"), default="h100",
        help="(default: h100); here: this machine, measured now")  # fmt: skip
    group.add_argument("--device-memory", help="(default: the hardware's) 80GiB, 141GB")
    group.add_argument("--costs", type=Path, metavar="FILE",
        help=f"rates: of `bench kernels`, or JSON with {', '.join(FILE_KEYS)}")  # fmt: skip
    for option, (_, what) in _RATES.items():
        group.add_argument(f"--{option.replace('_', '-')}", type=_positive, help=what)
    add("--devices", action="store_true", help="also the fewest devices on which it fits")
    add("--json", action="store_true", help="the same as JSON")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Print the estimate; 1 if no policy fits.

    Raises: CommandError for a model, mesh, size or file that cannot be.
    """
    args = parse(arguments)
    found, more = _estimated(args)
    if args.json:
        print(json.dumps(as_data(found, more), indent=1))
    else:
        print("\n".join(lines(found, more)))
    if any(map(found.fits, found.rows.keys() - set(BASELINES))):
        return 0
    print(f"python -m fused_remat scale: nothing fits into {human(found.memory)}", file=sys.stderr)
    return 1


def printed(args: argparse.Namespace) -> Iterator[str]:
    """The lines that a command line prints without --json. Raises: as `main`."""
    return lines(*_estimated(args))


def _estimated(args: argparse.Namespace) -> tuple[Estimate, dict[str, Any]]:
    try:
        setup, costs = _setup(args), _costs(args)
        policies = _policies(args.policy)
        found = estimate(setup, costs, _memory(args, costs), policies)
        return found, _limits(found, policies, args.devices)
    except (ValueError, OSError) as error:
        raise CommandError(str(error)) from error


def _setup(args: argparse.Namespace) -> Setup:
    if args.model not in _LANGUAGE:
        raise CommandError(f"--model is one of {', '.join(_LANGUAGE)}, got {args.model!r}")
    model = _LANGUAGE[args.model]
    seq = model.seq_len if args.seq is None else args.seq
    for name, value in (("batch", args.batch), ("seq", seq)):
        if value < 1:
            raise CommandError(f"--{name} must be at least 1, got {value}")
    layout = Layout(mesh_of(args.mesh), args.sequence_parallel)
    model = padded(model, layout.mesh)
    offload = tuple(name.strip() for name in args.offload.split(",") if name.strip())
    return Setup(
        model, layout, args.batch, seq, _DTYPES[args.dtype], _DTYPES[args.param_dtype],
        args.optimizer, args.loss == "fused", offload, args.accumulates,
    )  # fmt: skip


def _policies(text: str) -> tuple[str, ...]:
    if text == "all":
        return tuple(EXACT_PRESETS)
    if text not in ALL_PRESETS:
        raise CommandError(f"--policy is all or one of {', '.join(ALL_PRESETS)}, got {text!r}")
    return (text,)


def _costs(args: argparse.Namespace) -> Costs:
    here = args.hardware == "here"
    costs = HARDWARE["h100" if here else args.hardware]
    if here:
        costs = of_this_machine(_DTYPES[args.dtype], costs)
    if args.costs is not None:
        costs = of_file(args.costs, costs)
    given = {}
    for option, (key, _) in _RATES.items():
        value = getattr(args, option)
        if value is not None:
            name, unit = FILE_KEYS[key]
            given[name] = Figure(value * unit, f"--{option.replace('_', '-')}")
    if args.dtype == "fp32" and costs.name in HARDWARE and "products" not in given:
        raise CommandError("no rate of float32 products is known: give --tflops and --peak-tflops")
    return costs.with_figures(given)


def _memory(args: argparse.Namespace, costs: Costs) -> int:
    if args.device_memory is None:
        if args.hardware == "here":
            return bytes_of("100%")
        return int(costs.memory.value)
    try:
        return bytes_of(args.device_memory)
    except (ValueError, TypeError) as error:
        raise CommandError(f"--device-memory: {error}") from error


def _limits(found: Estimate, policies: tuple[str, ...], devices: bool) -> dict[str, Any]:
    """The largest batch of every policy, the longest sequence of that which holds most, and the
    smallest mesh."""
    setup, costs, memory = found.setup, found.costs, found.memory
    names = [name for name in found.rows if name != PLANNER]
    batches = {name: largest_batch(setup, costs, memory, name) for name in names}
    best = max(policies, key=lambda name: (batches[name], -found.rows[name].step))
    stream = setup.layout.stream
    multiple = stream if 1024 % stream else 1024
    longest = best, largest_seq(setup, costs, memory, best, multiple)
    smallest = smallest_mesh(setup, costs, memory, policies) if devices else None
    return {"batches": batches, "longest": longest, "devices": devices, "smallest": smallest}


def as_data(found: Estimate, more: Mapping[str, Any]) -> dict[str, Any]:
    """All that is printed, as plain data; bytes and seconds."""
    setup = found.setup
    rows = {
        name: dataclasses.asdict(row)
        | {
            "peak": row.peak,
            "fits": found.fits(name),
            "step": row.step,
            "tokens_per_second": found.tokens_per_second(name),
            "mfu": found.mfu(name),
            "largest_batch": more["batches"].get(name),
        }
        for name, row in found.rows.items()
    }
    mesh, smallest = setup.layout.mesh, more["smallest"]
    return {
        "model": setup.model.name,
        "parameters": setup.parameters.count(),
        "mesh": {"data": mesh.data, "tensor": mesh.tensor, "sequence": setup.layout.sequence},
        "batch": setup.batch,
        "seq": setup.seq,
        "device_memory": found.memory,
        "rows": rows,
        "largest_seq": {"policy": more["longest"][0], "seq": more["longest"][1]},
        "smallest_mesh": smallest and {"mesh": str(smallest[0]), "policy": smallest[1]},
        "hardware": found.costs.name,
        "costs": {
            name: {"value": figure.value, "source": figure.source, "measured": figure.measured}
            for name, figure in found.costs.figures.items()
        },
    }


def lines(found: Estimate, more: Mapping[str, Any]) -> Iterator[str]:
    """What is printed."""
    setup = found.setup
    mesh, name = setup.layout.mesh, {v: k for k, v in _DTYPES.items()}
    divided = ", stream divided by tokens" if setup.layout.stream > 1 else ""
    yield (
        f"{setup.model.name}: {setup.parameters.count() / 1e9:.2f} B parameters on {mesh.devices} "
        f"devices of {human(found.memory)} ({found.costs.name}): {mesh.data} data-parallel (FSDP2) "
        f"× {mesh.tensor} tensor-parallel{divided}"
    )
    yield (
        f"{setup.batch} × {setup.seq} tokens a data-parallel rank, "
        f"computed in {name[setup.dtype]}, held in {name[setup.param_dtype]}, {setup.optimizer}, "
        f"{'fused loss' if setup.fused_loss else 'whole logits'}"
    )
    whole = _LANGUAGE[setup.model.name].vocab
    if setup.model.vocab != whole:
        yield f"vocabulary padded from {whole} to {setup.model.vocab} rows, to divide it evenly"
    yield ""
    yield from aligned(list(_table(found, more)))
    presets = [preset for preset in found.rows if preset in ALL_PRESETS]
    shown = PLANNER if PLANNER in found.rows and len(presets) > 1 else presets[0]
    yield ""
    if PLANNER in found.rows:
        yield f"the planner would keep: {found.rows[PLANNER].policy}"
    else:
        yield "the planner finds nothing that fits"
    policy, tokens = more["longest"]
    longest = f"{tokens} tokens ({policy})" if tokens else "nothing fits"
    yield f"longest sequence that fits, batch {setup.batch}: {longest}"
    if more["devices"]:
        smallest = more["smallest"]
        shown_mesh = f"{smallest[0]} ({smallest[1]})" if smallest else "none"
        yield f"smallest mesh on which it fits, of so many sequences a rank: {shown_mesh}"
    yield ""
    yield from _parts(found, shown)
    yield ""
    yield "rates"
    for what, figure in found.costs.figures.items():
        if what != "memory":
            yield f"  {what.replace('_', ' ')}: {_rate(what, figure.value)} ({figure})"


def _table(found: Estimate, more: Mapping[str, Any]) -> Iterator[list[str]]:
    """A row for every policy."""
    hosts = ["on the host"] if found.setup.offload else []
    yield ["policy", "kept", *hosts, "peak", "fits", "batch", "rebuilt", "collectives", "step",
           "tokens/s", "MFU"]  # fmt: skip
    for name, row in found.rows.items():
        forward, backward, _ = row.collectives
        batch = more["batches"].get(name)
        yield [
            name, human(row.kept), *[human(row.hosted) for _ in hosts], human(row.peak),
            "yes" if found.fits(name) else "no",
            "" if batch is None else str(batch), f"{row.rebuilt:.0%}",
            f"{forward:.3g} + {backward:.3g}", f"{row.step:.3g} s",
            f"{found.tokens_per_second(name):,.0f}", f"{found.mfu(name):.0%}",
        ]  # fmt: skip


def _parts(found: Estimate, name: str) -> Iterator[str]:
    row = found.rows[name]
    yield f"a device's memory at its peak ({name}): from the graphs and shapes, not measured"
    yield from aligned([["  " + what, human(nbytes)] for what, nbytes in row.memory.items()])
    if row.hosted:
        yield f"  in the host's memory besides: {human(row.hosted)}"
    yield ""
    yield f"a step's time ({name}): estimated at the rates below"
    yield from aligned([["  " + what, f"{1e3 * s:.1f} ms"] for what, s in row.seconds.items()])


def _rate(what: str, value: float) -> str:
    if what == "overhead":
        return f"{1e6 * value:.3g} µs"
    if what in ("bandwidth", "link", "network", "host"):
        return f"{value / 1e9:.4g} GB/s"
    return f"{value / 1e12:.4g} TFLOP/s"
