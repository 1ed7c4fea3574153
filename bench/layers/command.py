"""Time and memory of a training step of one encoder layer, in every way, side by side.

    python -m bench layers --device cpu --out bench/results
    python -m bench layers --dtype float32 --norm pre --dropout 0 --sizes 4x512x512x8 --ways full

A step is forward and backward; gradients are added into `.grad`s that exist, the input wants one.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.layers.checks import Checks, WrongResultError
from bench.layers.report import case_table, target_table, title
from bench.layers.ways import BASELINE, WAYS, Forward, Layer, Sample
from bench.measure.machine import ROOT, machine, synchronize, version
from bench.measure.results import ResultsFile
from bench.measure.turns import interleave, quantiles
from fused_remat.memory import SavedBytes, measure_allocations

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
NORMS = {"pre": True, "post": False}
SIZES = ((4, 512, 512, 8), (2, 512, 1024, 16))
DROPOUTS = (0.0, 0.1)


@dataclass(frozen=True)
class Case:
    """A point of the grid."""

    dtype: str
    norm: str
    dropout: float
    batch: int
    seq_len: int
    d_model: int
    nhead: int
    activation: str = "gelu"

    def sample(self, device: str) -> Sample:
        """A layer with random parameters, biases and norms included, and random data."""
        torch.manual_seed(zlib.crc32(repr(self).encode()))
        layer = Layer(
            self.d_model, self.nhead, 4 * self.d_model, self.dropout, self.activation,
            batch_first=True, norm_first=NORMS[self.norm],
        )  # fmt: skip
        with torch.no_grad():
            for p in layer.parameters():
                if p.dim() == 1:
                    p.add_(0.1 * torch.randn_like(p))
        x, dy = torch.randn(2, self.batch, self.seq_len, self.d_model).unbind()
        dtype = DTYPES[self.dtype]
        layer.to(device, dtype)
        # clone: of their own, not halves of one storage, whose bytes would be counted twice
        return Sample(
            layer, x.to(device, dtype).clone(), dy.to(device, dtype).clone(), self.dropout
        )


def grid(args: argparse.Namespace) -> list[Case]:
    """The cases that the command line asks for."""
    axes = itertools.product(args.sizes, args.dtype, args.norm, args.dropout)
    return [Case(dtype, norm, dropout, *sizes) for sizes, dtype, norm, dropout in axes]


def admit(name: str, sample: Sample, checks: Checks) -> tuple[dict[str, Any], Forward | None]:
    """The beginning of a way's row, and the way itself if its results are right."""
    way = WAYS[name]
    try:
        forward = way.build(sample.layer)
    except ImportError as error:
        return {"unavailable": str(error)}, None
    try:
        return {"check": checks.check(way, forward)}, forward
    except WrongResultError as error:
        return {"failure": str(error)}, None
    except Exception as error:  # one broken way must not cost the results of the others
        return {"failure": f"{type(error).__name__}: {error}"}, None


def memory(forward: Forward, sample: Sample, device: str) -> dict[str, Any]:
    """Bytes saved for backward, parameters apart, and peaks above what is there before.

    Backward's is above what forward left, and known only where it is the step's: allocations of
    before a measurement are not seen to be freed in it.
    """
    with SavedBytes(sample.layer.parameters()) as saved:
        forward(sample.x)
    kept = saved.total
    del saved  # it holds what it counted
    first = measure_allocations(lambda: forward(sample.x), device)
    step = measure_allocations(lambda: forward(sample.x).backward(sample.dy), device)
    return {
        "kept_bytes": kept,
        "kept_bytes_per_token": kept / sample.x[..., 0].numel(),
        "forward_peak_bytes": first.peak,
        "backward_peak_bytes": step.peak - first.net if step.peak > first.peak else None,
        "step_peak_bytes": step.peak,
    }


def timed_step(forward: Forward, sample: Sample, device: str) -> tuple[float, float]:
    """Seconds of one forward and of its backward."""
    synchronize(device)
    start = time.perf_counter()
    y = forward(sample.x)
    synchronize(device)
    between = time.perf_counter()
    y.backward(sample.dy)
    synchronize(device)
    return between - start, time.perf_counter() - between


def summary(
    times: dict[str, list[tuple[float, float]]], baselines: list[str]
) -> dict[str, dict[str, Any]]:
    """Percentiles of every way's times, and of its step's ratio to each baseline's, by round."""
    steps = {name: [sum(t) for t in rounds] for name, rounds in times.items()}
    return {
        name: {
            "forward_seconds": quantiles([forward for forward, _ in rounds]),
            "backward_seconds": quantiles([backward for _, backward in rounds]),
            "step_seconds": quantiles(steps[name]),
            "step_ratio": {
                baseline: quantiles(
                    [mine / other for mine, other in zip(steps[name], steps[baseline], strict=True)]
                )
                for baseline in baselines
            },
        }
        for name, rounds in times.items()
    }


def measure(case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """A row of the results file: every way of the case checked, and if it is right, measured."""
    sample = case.sample(args.device)
    checks = Checks(sample)
    ways: dict[str, dict[str, Any]] = {}
    forwards: dict[str, Forward] = {}
    for name in args.ways:
        ways[name], forward = admit(name, sample, checks)
        if forward is not None:
            forwards[name] = forward
    del checks
    for name, forward in forwards.items():
        ways[name] |= memory(forward, sample, args.device)
    steps = {
        name: functools.partial(timed_step, forward, sample, args.device)
        for name, forward in forwards.items()
    }
    times = interleave(steps, args.rounds, args.seconds)
    for name, row in summary(times, [n for n in times if WAYS[n].is_baseline]).items():
        ways[name] |= row
    rounds = max(map(len, times.values()), default=0)
    return {"case": dataclasses.asdict(case), "rounds": rounds, "ways": ways}


def sizes(text: str) -> tuple[int, ...]:
    """(B, S, D, H) of "4x512x512x8"."""
    found = tuple(map(int, text.split("x")))
    if len(found) != 4 or min(found) < 1 or found[2] % found[3]:
        raise ValueError(f"expected BxSxDxH, D a multiple of H: {text}")
    return found


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; the ways come in the order of the table, the baseline always with them."""
    parser = argparse.ArgumentParser(
        prog="python -m bench layers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--out", type=Path, default=ROOT / "bench" / "results", help="folder of the results file")
    add("--dtype", nargs="+", default=list(DTYPES), choices=DTYPES)
    add("--norm", nargs="+", default=list(NORMS), choices=NORMS)
    add("--dropout", nargs="+", type=float, default=list(DROPOUTS))
    add("--sizes", nargs="+", type=sizes, default=list(SIZES), metavar="BxSxDxH")
    add("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    add("--rounds", type=int, default=36, help="timed rounds of a case at most (default: 36)")
    add("--seconds", type=float, default=180.0, help="timed seconds of a case, about (180)")
    add("--threads", type=int, help="torch's threads on CPU")
    add("--fresh", action="store_true", help="measure again what is in the file already")
    args = parser.parse_args(arguments)
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("no CUDA device")
    if args.rounds < 1:
        parser.error("--rounds must be at least 1")
    args.ways = [name for name in WAYS if name in {*args.ways, BASELINE}]
    return args


def run(cases: list[Case], args: argparse.Namespace, results: ResultsFile) -> bool:
    """Measure and print the cases that the file does not have; whether no result was wrong."""
    right = True
    for index, case in enumerate(cases):
        known = dataclasses.asdict(case)
        print(f"\n[{index + 1}/{len(cases)}] {title({'case': known})}", flush=True)
        start = time.perf_counter()
        row = None if args.fresh else results.find(known, args.ways)
        how = "in the file already: "
        if row is None:
            row = measure(case, args)
            results.put(row)
            how = f"{time.perf_counter() - start:.0f} s, "
        print(f"{case_table(row)}\n({how}{row['rounds']} rounds)", flush=True)
        right &= not any("failure" in found for found in row["ways"].values())
    return right


def main(arguments: list[str]) -> int:
    """Measure the grid, print a table per case and the targets of CPUs; 1 if a result was wrong."""
    args = parse(arguments)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    config = {
        "ways": args.ways,
        "rounds": args.rounds,
        "seconds": args.seconds,
        "dim_feedforward": "4 D",
        "torch_remat": version("torch-remat"),
    }
    path = args.out / f"layers-{args.device}.json"
    results = ResultsFile(path, machine(args.device), config)
    right = run(grid(args), args, results)
    targets = f"\n{target_table(results.data)}\n" if args.device == "cpu" else ""
    print(f"{targets}\n{path}")
    return 0 if right else 1
