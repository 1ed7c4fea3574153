"""docs/tables/composition.md, read from the tests' `composes` marks; no test is imported.

`python -m bench report` writes it into the page. A mark decorates a test:

    @pytest.mark.composes("DDP", "gradient accumulation", limits="two processes, gloo")

Its arguments are literal strings. Tests that share group and name make one row.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from bench.measure.machine import ROOT
from bench.tables import files, load, markdown

#: What the tests on a GPU gave there; written by `make gpu` (`bench.gpu.outcomes`).
OUTCOMES = "tests.json"
GROUPS = (
    "torch.compile", "torch.export", "Autocast", "DDP", "FSDP2", "FSDP1", "Tensor parallel",
    "Pipeline parallel", "Engines",
    "CUDA graphs", "Outer checkpointing", "Replay check", "Concurrency and faults", "Hugging Face",
    "Diffusers", "PEFT",
)  # fmt: skip


class Mark(NamedTuple):
    """One `composes` mark, and what else is known of the test that carries it."""

    path: str  # of the file, relative to the repository
    test: str  # its name in the file
    gpu: bool  # it needs a GPU
    fails: str  # why it is expected to fail (xfail)
    group: str
    name: str
    limits: str = ""


def marks(files: Iterable[Path], root: Path = ROOT) -> Iterator[Mark]:
    """Yield every mark in `files`. Raises: ValueError for arguments that are no literal strings."""
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for mark in _marks_of(tree, path.relative_to(root).as_posix()):
            if mark.group not in GROUPS:
                raise ValueError(f"{path}: no known group: {mark}; groups: {', '.join(GROUPS)}")
            yield mark


def _marks_of(tree: ast.Module, path: str) -> Iterator[Mark]:
    named = [line for line in tree.body if isinstance(line, ast.Assign)]
    of_file = [line.value for line in named if ast.unparse(line.targets[0]) == "pytestmark"]
    above = [node for value in of_file for node in ast.walk(value)]
    for test in (line for line in tree.body if isinstance(line, ast.FunctionDef)):
        kinds = {_kind(node): node for node in (*above, *test.decorator_list)}
        fails = _arguments(kinds["xfail"])[1]["reason"] if "xfail" in kinds else ""
        for node in test.decorator_list:
            if _kind(node) == "composes" and isinstance(node, ast.Call):
                args, more = _arguments(node)
                yield Mark(path, test.name, "gpu" in kinds, fails, *args, **more)


def _kind(node: ast.AST) -> str:
    """Return the name of a mark, such as "gpu" for `pytest.mark.gpu`, called or not."""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return text.removeprefix("pytest.mark.")


def _arguments(mark: Any) -> tuple[list[str], dict[str, str]]:
    """Return the arguments of a call, which are literals."""
    named = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
    return [ast.literal_eval(value) for value in mark.args], named


def works(row: list[Mark], outcomes: Mapping[str, Any]) -> str:
    """Return the outcome of an entry's tests: "yes", "no: why", or that of a GPU."""
    here = [m for m in row if not m.gpu and not m.fails]
    reasons = "; ".join(dict.fromkeys(m.fails for m in row if m.fails))
    if reasons:
        return f"yes, but not: {reasons}" if here else f"no: {reasons}"
    results = {outcomes.get("tests", {}).get(f"{m.path}::{m.test}") for m in row if m.gpu}
    if not results:
        return "yes"
    found = "by its GPU test, not yet run on hardware"
    if "failed" in results or results == {"passed"}:
        machine = outcomes["machine"]
        outcome = "no: failed" if "failed" in results else "yes,"
        found = f"{outcome} on {machine['gpu']} at {machine['commit'][:7]}"
    return f"yes, on a CPU; {found}" if here else found


def table(found: Iterable[Mark] | None = None, outcomes: Mapping[str, Any] | None = None) -> str:
    """Return a heading and a table for each group that has a mark, in the order of `GROUPS`."""
    if found is None or outcomes is None:
        found = marks(sorted((ROOT / "tests").rglob("test_*.py")))
        every = [load(path) for path in files(OUTCOMES)]
        outcomes = max(every, key=lambda found: str(found["machine"]["date"]), default={})
    rows: dict[str, dict[str, list[Mark]]] = {group: {} for group in GROUPS}
    for mark in found:
        rows[mark.group].setdefault(mark.name, []).append(mark)
    parts = []
    for group, names in rows.items():
        cells = []
        for name, row in names.items():
            where = ", ".join(f"[{Path(m.path).name}::{m.test}]({m.path})" for m in row)
            limits = "; ".join(dict.fromkeys(m.limits for m in row if m.limits))
            cells.append([name, works(row, outcomes), where, limits])
        shown = markdown(("what", "works", "tested where", "limits"), cells)
        parts += [f"## {group}\n\n{shown}"] if cells else []
    return "\n\n".join(parts)
