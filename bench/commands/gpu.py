"""Kernels and layers on one GPU against PyTorch's own, most important first, within some minutes.

    python -m bench gpu --out bench/results/gpu --minutes 8
    TRITON_INTERPRET=1 python -m bench gpu --out DIR --dry-run

Every case is checked against float64 before it is timed, and written to DIR/gpu.json at once. A
case that fails is recorded with its error; one that hangs or breaks the device ends the
process with status 3: give the same command again to continue. `--dry-run`: the full path at tiny
sizes on this CPU, under Triton's interpreter; its times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
import triton

from bench import figures
from bench.audit import cases as audit_cases
from bench.gpu import kernels, layers, profile, tiles
from bench.measure import contest
from bench.measure.case import DTYPES
from bench.measure.contest import Contest, Entry, Rig
from bench.measure.machine import environment
from bench.measure.options import Parser
from bench.measure.registry import described
from bench.pages.frontier import panels
from bench.pages.gpu import line, report, title
from bench.pages.kernels import ceilings as known_ceilings
from bench.tables import ResultsFile, Row, current, errors_of, load
from fused_remat.triton.launch import INTERPRETED, target_of

#: The exit status after a case that hung or broke the device.
BROKEN = 3
UNFINISHED = "the process ended within this case: a crash, or no answer for too long"


@dataclass(frozen=True)
class Section:
    share: float  # of the time that is left, relative to the sections after it
    needs: float  # seconds that a case takes at most, if all goes well
    entries: Callable[[Rig], Iterable[Entry]]  # the most important first


def _ceilings(rig: Rig) -> Iterator[Entry]:
    for unit, (name, _) in contest.CEILINGS.items():
        yield {"name": name}, functools.partial(contest.ceiling, unit=unit)


def precompile(rig: Rig) -> Row:
    """Compile what the contests launch on all cores, as far as time allows; the rest when used."""
    start, seconds = time.perf_counter(), min(75.0, 0.2 * rig.left)
    cases = audit_cases.cases(rig.target, rig.dtype)
    launches, done = [case.launch for case in cases if case.default], 0
    if rig.dry:
        return {"found": {"kernels": len(launches), "compiled": 0}}
    batch, mode = 2 * (os.cpu_count() or 1), getattr(triton, "AsyncCompileMode", None)
    while done < len(launches) and time.perf_counter() - start < seconds:
        with contextlib.ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
            if mode is not None:  # an error shows where a kernel is launched
                stack.enter_context(mode(pool, ignore_errors=True))
            for launch in launches[done : done + batch]:
                launch.kernel.warmup(
                    *launch.args, grid=launch.grid, **launch.keywords,
                    num_warps=launch.num_warps, num_stages=launch.num_stages,
                )  # fmt: skip
        done += batch
    took = time.perf_counter() - start
    return {"found": {"kernels": len(launches), "compiled": min(done, len(launches)), "s": took}}


#: In this order; shares are of what is left. `torch.compile` late: it takes long to start;
#: the profiler last, since it may stay attached.
SECTIONS: dict[str, Section] = {
    "ceilings": Section(1.0, 5.0, _ceilings),
    "precompile": Section(10.0, 90.0, lambda rig: [({"name": "kernels compiled"}, precompile)]),
    "attention": Section(14.0, 8.0, kernels.attention_entries),
    "layers": Section(10.0, 20.0, layers.layer_entries),
    "long": Section(3.0, 40.0, layers.long_entries),
    "model": Section(16.0, 60.0, layers.model_entries),
    "plans": Section(5.0, 60.0, layers.plan_entries),
    "attention calls": Section(8.0, 8.0, kernels.special_entries),
    "norms": Section(5.0, 5.0, kernels.norm_entries),
    "frontier": Section(4.0, 20.0, layers.frontier_entries),
    "tiles": Section(5.0, 10.0, tiles.tile_entries),
    "compile": Section(6.0, 150.0, layers.compile_entries),
    "profile": Section(10.0, 30.0, profile.profile_entries),
}


# --- running them


def run_entry(entry: Entry, section: str, rig: Rig, results: ResultsFile) -> None:
    """Measure and write a row; the process ends if the device does not answer any more."""
    case, measure = entry
    row = {"case": {"section": section, **case}}
    results.put(row | {"error": UNFINISHED})  # stays if so, until --fresh
    watch = threading.Timer(30.0 + 3.0 * SECTIONS[section].needs, os._exit, (BROKEN,))
    watch.daemon = True
    if not rig.dry:
        watch.start()
    start = time.perf_counter()
    torch.manual_seed(0)
    try:
        found = measure(rig)
        row |= contest.measure(found, rig) if isinstance(found, Contest) else found
    except Exception as error:  # recorded, and the next case is measured
        row |= {"error": described(error)}
    row["seconds"] = time.perf_counter() - start
    results.put(row)
    print(f"[{max(rig.left, 0.0):.0f} s left] {line(row)}", flush=True)
    if rig.device.type == "cuda":
        gc.collect()
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError:
            os._exit(BROKEN)
    watch.cancel()


def run_all(sections: Iterable[str], rig: Rig, results: ResultsFile) -> None:
    """Run each section in its share of the time, then the rest while time remains."""
    done = {json.dumps(row["case"]) for row in results.own if "skipped" not in row}
    left, waiting = list(sections), []
    while left:
        share = SECTIONS[left[0]].share / sum(SECTIONS[name].share for name in left)
        name, ends = left.pop(0), time.perf_counter() + share * rig.left
        for case, measure in SECTIONS[name].entries(rig):
            if json.dumps({"section": name, **case}) in done:
                continue
            if rig.dry or (time.perf_counter() < ends and SECTIONS[name].needs < rig.left):
                run_entry((case, measure), name, rig, results)
            else:
                waiting.append(((case, measure), name))
    for entry, name in waiting:
        if SECTIONS[name].needs < rig.left:
            run_entry(entry, name, rig, results)
        else:
            case = {"section": name, **entry[0]}
            results.put({"case": case, "skipped": "no time was left"})


def work(args: argparse.Namespace) -> None:
    """Measure what this code has not yet measured on this machine."""
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else f"cuda:{torch.cuda.current_device()}")
    # A tenth is kept: the last case may take longer.
    ends = start + 54.0 * args.minutes
    rig = Rig(device, DTYPES[args.dtype], args.dry_run, target_of(device), ends)
    if not args.dry_run:
        gc.collect()
        gc.freeze()  # measuring memory collects garbage, again and again
    results = ResultsFile(args.out / "gpu.json", environment(device), args.config)
    if args.fresh:
        again = [row for row in results.own if row["case"]["section"] in args.sections]
        results.rows = [row for row in results.rows if row not in again]
    rig.ceilings |= known_ceilings(results.own)
    run_all(args.sections, rig, results)


# --- the command


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("gpu", __doc__, "dtype fresh dry-run", folder="gpu")
    parser.add("--minutes", type=float, default=8.0, help="it ends well within these (default: 8)")
    parser.add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    args = parser.parse(arguments)
    if args.dry_run != INTERPRETED:
        parser.error("--dry-run and TRITON_INTERPRET=1 go together")
    if not args.dry_run and not torch.cuda.is_available():
        parser.error("no CUDA device: --dry-run shows the path without one")
    args.dtype = args.dtype or ("float32" if args.dry_run else "bfloat16")
    if args.minutes < 1 and not args.dry_run:
        parser.error(f"--minutes must be at least 1, not {args.minutes:g}")
    args.out = args.out.absolute()
    args.config = {"dtype": args.dtype, "dry_run": args.dry_run, "rounds": contest.ROUNDS}
    return args


def main(arguments: Sequence[str]) -> int:
    """Measure, write gpu.json, gpu.txt and frontier.png, print the table; 1 if anything failed."""
    args = parse(arguments)
    path = args.out / "gpu.json"
    args.out.mkdir(parents=True, exist_ok=True)
    work(args)
    rows = [row for row in current(load(path)) if row["config"] == args.config]
    text = report(rows)
    path.with_suffix(".txt").write_text(text + "\n")
    print(text, f"\n{path}", sep="\n")
    try:
        picture = figures.frontier(args.out, panels(load(path)))
        picture.draw(picture)
    except (ValueError, ImportError) as error:  # no layer was measured, no matplotlib
        print(f"no picture of the frontier: {error}")
    return int(bool(errors_of(rows, title)))
