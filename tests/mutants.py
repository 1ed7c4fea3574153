"""Mutants: bugs of one line, planted one at a time in a copy of the library. A test catches each.

    python tests/mutants.py [words of names] [--jobs 2] [--places]

`mutants.txt` lists them, five lines each: the part of the library and what breaks in it; the
function, class or table that the line is in; what stands there; what the mutant has instead; the
test that catches it. No file and no line number: a mutant goes where its function goes, and has to
be found there once.
"""

import argparse
import ast
import itertools
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT, LIST = Path(__file__).parents[1], Path(__file__).with_name("mutants.txt")
SECONDS = 300  # for one mutant's tests
ENDINGS = {"passes": "SURVIVED", "fails": "caught", "crashes": "caught"}
INTERPRETED = ("tests/kernels/", "tests/backend/", "tests/interpreted/")  # by TRITON_INTERPRET=1
OWN = """
import sys, fused_remat, fused_remat.kernels.norms as kernel
assert all(m.__file__.startswith(sys.argv[1]) for m in (fused_remat, kernel)), fused_remat
"""


@dataclass(frozen=True)
class Mutant:
    """A bug: `before` becomes `after` in the function, class or table `within`."""

    name: str  # "room: what breaks"
    within: str
    before: str
    after: str
    test: str  # which catches it: it fails, or crashes


def read(path: Path = LIST) -> list[Mutant]:
    """Return the mutants of a list, whose comments begin with #."""
    text = "\n".join(line for line in path.read_text().split("\n") if line[:1] != "#")
    made = []
    for block in filter(None, map(str.strip, text.split("\n\n"))):
        name, within, before, after, test = block.split("\n")
        assert (before[:1], after[:1]) == ("-", "+"), block
        made.append(Mutant(name, within, before[2:], after[2:], test))
    return made


def parts(module: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Functions, classes and tables of a module, by their names: "f", "Class.f", "TABLE"."""
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name, node
            inner = [n for n in node.body if isinstance(n, ast.FunctionDef)]
            yield from ((f"{node.name}.{n.name}", n) for n in inner)
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            yield ast.unparse(node).split()[0].strip(":"), node


def planted(tree: Path, mutants: list[Mutant]) -> dict[Mutant, tuple[Path, str]]:
    """For each mutant the file that it changes, relative to the tree, and the file's text then."""
    rooms = (tree / "fused_remat", tree / "kernels")
    found = {path.resolve() for room in rooms for path in room.rglob("*.py")}
    texts = {path: path.read_text().split("\n") for path in sorted(found)}
    places: dict[str, list[tuple[Path, ast.stmt]]] = defaultdict(list)
    for path, lines in texts.items():
        for name, node in parts(ast.parse("\n".join(lines))):
            places[name].append((path, node))
    made, lost = {}, []
    for m in mutants:
        at = {(path, i) for path, n in places[m.within] for i in range(n.lineno - 1, n.end_lineno)}
        hits = [(path, i) for path, i in at for _ in range(texts[path][i].count(m.before))]
        if len(hits) != 1:
            lost.append(f"{m.name}: {m.within}: found {len(hits)} times: {m.before}")
            continue
        ((path, i),) = hits
        lines = [*texts[path][:i], texts[path][i].replace(m.before, m.after), *texts[path][i + 1 :]]
        made[m] = path.relative_to(tree.resolve()), "\n".join(lines)
    if lost:
        raise SystemExit("\n".join(["each line must be found once in the code:", *lost]))
    return made


def environment(tree: Path, test: str = "") -> dict[str, str]:
    return os.environ | {
        "TRITON_INTERPRET": str(int(test.startswith(INTERPRETED))), "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (tree / "tests", tree))),
    }  # fmt: skip


def copied(tree: Path, to: Path) -> Path:
    """Return a copy of a tree, without what git ignores; it imports its own sources."""
    patterns = [".git", *(p.strip("/") for p in (tree / ".gitignore").read_text().split())]
    shutil.copytree(tree, to, symlinks=True, ignore=shutil.ignore_patterns(*patterns))
    subprocess.run([sys.executable, "-c", OWN, to], cwd=to, env=environment(to), check=True)
    return to


def outcome(tree: Path, tests: list[str], seconds: int | None = None) -> tuple[str, str]:
    """How pytest ends ("passes", "fails", "crashes", "hangs", or its error); what it printed."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    process = subprocess.Popen(
        command, cwd=tree, env=environment(tree, tests[0]), text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        out, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with what it has started
        return "hangs", ""
    status = "crashes" if process.returncode < 0 else f"error {process.returncode}"
    return {0: "passes", 1: "fails"}.get(process.returncode, status), out


def main() -> int:
    parser = argparse.ArgumentParser(description="Plant bugs in a copy, and see tests catch them.")
    parser.add_argument("words", nargs="*", help="mutants whose names have one of these")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time, a copy each")
    parser.add_argument("--places", action="store_true", help="only see that each has its place")
    given = parser.parse_args()
    mutants = [m for m in read() if any(w in m.name for w in given.words or [""])]
    texts = planted(ROOT, mutants)
    print(f"{len(mutants)} mutants, each found once", flush=True)
    if given.places or not mutants:
        return 0
    caught = 0
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(given.jobs) as pool:
        copies: queue.Queue[Path] = queue.Queue()
        for i in range(given.jobs):
            copies.put(copied(ROOT, Path(folder).resolve() / str(i)))

        def run(mutant: Mutant) -> tuple[str, float]:
            copy, begin, (path, text) = copies.get(), time.perf_counter(), texts[mutant]
            was, when = (copy / path).read_bytes(), (copy / path).stat().st_mtime_ns
            (copy / path).write_text(text)
            how, _ = outcome(copy, [mutant.test], SECONDS)
            (copy / path).write_bytes(was)
            os.utime(copy / path, ns=(when, when))  # by which Python knows what it has compiled
            copies.put(copy)
            return how, time.perf_counter() - begin

        tests = sorted({m.test for m in mutants})
        both = [[t for t in tests if t.startswith(INTERPRETED) == kind] for kind in (0, 1)]
        for how, out in pool.map(outcome, itertools.repeat(copies.queue[0]), filter(None, both)):
            if how != "passes":
                print(f"{out[-4000:]}\nthe tests have to pass without a mutant: {how}")
                return 2
        try:
            for mutant, (how, taken) in zip(mutants, pool.map(run, mutants), strict=True):
                how = ENDINGS.get(how, f"({how})")
                print(f"{how:9}{taken:6.1f} s  {mutant.name}", flush=True)
                caught += how == "caught"
        finally:  # also when interrupted
            pool.shutdown(cancel_futures=True)
    print(f"{caught} of {len(mutants)} caught")
    return int(caught < len(mutants))


if __name__ == "__main__":
    sys.exit(main())
