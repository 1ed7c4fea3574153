"""A session of `bench gpu`: its sections within their minutes, every result written at once."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
import triton

from bench import figures
from bench.audit import cases as audit_cases
from bench.commands import gpu
from bench.commands.gpu import SECTIONS, Section
from bench.measure import contest
from bench.measure.case import DTYPES
from bench.measure.contest import Contest, Entry, Rig
from bench.measure.machine import environment
from bench.measure.options import Parser
from bench.measure.registry import described
from bench.pages.frontier import panels
from bench.pages.gpu import line, report, title
from bench.pages.kernels import ceilings as known_ceilings
from bench.tables import ResultsFile, Row, current, errors_of, gpu_files, load
from fused_remat.triton.launch import INTERPRETED, target_of

#: The exit status after a case that hung or broke the device.
BROKEN = 3
UNFINISHED = "the process ended within this case: a crash, or no answer for too long"


def ceilings(rig: Rig) -> Iterator[Entry]:
    """Yield what the machine can do at most."""
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


def precompiled(rig: Rig) -> Iterator[Entry]:
    """Yield the compilation of kernels."""
    yield {"name": "kernels compiled"}, precompile


# --- running them


def run_entry(
    entry: Entry, section: str, rig: Rig, results: ResultsFile, needs: float, attempt: int = 1
) -> None:
    """Measure and write a row; the process ends if the device does not answer any more."""
    case, measure = entry
    row = {"case": {"section": section, **case}}
    results.put(row | {"error": UNFINISHED, "attempts": attempt})  # stays if the process ends
    watch = threading.Timer(30.0 + 3.0 * needs, os._exit, (BROKEN,))
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
    except BaseException:
        watch.cancel()
        raise
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


def key(case: Row) -> str:
    """Return what a case is called whatever its section."""
    return json.dumps({name: value for name, value in case.items() if name != "section"})


def committed(gpu: str) -> set[str]:
    """Return the cases that committed results of a GPU have, right and measured."""
    rows = (row for _, data in gpu_files() if data["machine"]["gpu"] == gpu
            for row in data["results"])  # fmt: skip
    return {key(row["case"]) for row in rows if "ways" in row and "error" not in row}


def entries_of(section: Section, rig: Rig) -> Iterable[Entry]:
    """Return the entries of a section, by its function."""
    module, function = section.entries.split(".")
    found: Iterable[Entry] = getattr(importlib.import_module(f"bench.gpu.{module}"), function)(rig)
    return found


def run_all(
    sections: Mapping[str, Section],
    rig: Rig,
    results: ResultsFile,
    known: Collection[str] = (),
    find: Callable[[Section, Rig], Iterable[Entry]] = entries_of,
) -> None:
    """Run each section within its minutes, what is not `known` first; then the rest.

    Of a case in which an earlier process ended, at most one more attempt is made, after the others.
    """
    own = {json.dumps(row["case"]): row for row in results.own if "skipped" not in row}
    waiting, last = [], []
    for name, section in sections.items():
        until = rig.left - 60.0 * section.minutes
        entries = sorted(find(section, rig), key=lambda entry: key(entry[0]) in known)
        for case, measure in entries:
            row = own.get(json.dumps({"section": name, **case}))
            if row is not None:
                if row.get("error") == UNFINISHED and row["attempts"] == 1:
                    last.append(((case, measure), name))
            elif rig.dry or (rig.left > until and section.needs < rig.left):
                run_entry((case, measure), name, rig, results, section.needs)
            else:
                waiting.append(((case, measure), name))
    for index, (entry, name) in enumerate([*waiting, *last]):
        needs, again = sections[name].needs, index >= len(waiting)
        if rig.dry or needs < rig.left:
            run_entry(entry, name, rig, results, needs, attempt=1 + again)
        elif not again:
            case = {"section": name, **entry[0]}
            results.put({"case": case, "skipped": "no time was left"})


def work(args: argparse.Namespace) -> None:
    """Measure what this code has not yet measured on this machine."""
    start = time.perf_counter()
    device = torch.device("cpu" if args.dry_run else f"cuda:{torch.cuda.current_device()}")
    # A tenth is kept: the last case may take longer.
    ends = start + 54.0 * args.minutes
    dtype, target = DTYPES[args.dtype], target_of(device)
    rig = Rig(device, dtype, args.dry_run, target, ends, out=args.out)
    if not args.dry_run:
        gc.collect()
        gc.freeze()  # measuring memory collects garbage, again and again
    results = ResultsFile(args.out / "gpu.json", environment(device), args.config)
    if args.fresh:
        again = [row for row in results.own if row["case"]["section"] in args.sections]
        results.rows = [row for row in results.rows if row not in again]
    rig.ceilings |= known_ceilings(results.own)
    known = set() if args.dry_run else committed(results.machine["gpu"])
    run_all({name: SECTIONS[name] for name in args.sections}, rig, results, known)


# --- the command


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("gpu", gpu.__doc__, "dtype fresh dry-run", folder="gpu")
    parser.add("--list", action="store_true", help="print the sections and their minutes")
    parser.add("--minutes", type=float, default=8.0, help="it ends well within these (default: 8)")
    parser.add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="NAME")
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
