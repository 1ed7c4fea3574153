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
from bench.tables import RESULTS, load, markdown

#: What the tests on a GPU gave there; written by `make gpu` (`bench.gpu.outcomes`).
OUTCOMES = RESULTS / "gpu" / "tests.json"
GROUPS = (
    "torch.compile", "torch.export", "Autocast", "DDP", "FSDP2", "FSDP1", "Tensor parallel",
    "Pipeline parallel", "Engines",
    "CUDA graphs", "Outer checkpointing", "Replay check", "Concurrency and faults", "Hugging Face",
    "PEFT",
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

    @property
    def node(self) -> str:
        """The test as pytest names it, without parameters."""
        return f"{self.path}::{self.test}"


def marks(files: Iterable[Path], root: Path = ROOT) -> Iterator[Mark]:
    """Every mark in `files`, in their order.

    Raises: ValueError for a mark whose arguments are not literal strings, that names no known
        group, or that does not decorate a test or a class of tests.
    """
    for path in files:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        try:
            found = list(_marks_of(tree, path.relative_to(root).as_posix()))
            for mark in found:
                if mark.group not in GROUPS or not mark.name or set("".join(mark[4:])) & set("|\n"):
                    raise ValueError(f"no known group, no name, or no cells of a table: {mark}")
            written = (n for n in ast.walk(tree) if isinstance(n, ast.Attribute))
            if sum(_kind(node) == "composes" for node in written) != len(found):
                raise ValueError("the mark composes must be called, and decorate a test")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error!r}") from error
        yield from found


def _marks_of(tree: ast.Module, path: str) -> Iterator[Mark]:
    of_file = [
        node
        for line in tree.body
        if isinstance(line, ast.Assign) and ast.unparse(line.targets[0]) == "pytestmark"
        for node in ast.walk(line.value)
    ]
    for name, own, above in _tests(tree):
        kinds = {_kind(node): node for node in (*of_file, *above, *own)}
        fails = _arguments(kinds["xfail"])[1]["reason"] if "xfail" in kinds else ""
        for node in own:
            if _kind(node) == "composes" and isinstance(node, ast.Call):
                args, named = _arguments(node)
                yield Mark(path, name, "gpu" in kinds, fails, *args, **named)


def _tests(tree: Any, of: str = "", above: Any = ()) -> Iterator[tuple[str, Any, Any]]:
    """Tests, classes of tests and tests in them: the name, its decorators and the class's."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield of + node.name, node.decorator_list, above
            if isinstance(node, ast.ClassDef):
                yield from _tests(node, f"{of}{node.name}::", node.decorator_list)


def _kind(node: ast.AST) -> str:
    """ "gpu" for `pytest.mark.gpu`, called or not; something else for anything else."""
    text = ast.unparse(node.func if isinstance(node, ast.Call) else node)
    return text.removeprefix("pytest.mark.")


def _arguments(mark: Any) -> tuple[list[str], dict[str, str]]:
    """Of a call, whose arguments are literals."""
    named = {word.arg: ast.literal_eval(word.value) for word in mark.keywords}
    return [ast.literal_eval(value) for value in mark.args], named


def works(row: list[Mark], outcomes: Mapping[str, Any]) -> str:
    """What the tests of a row say: "yes", "no: why", or what a GPU said or has yet to say.

    `outcomes` is what `bench.gpu.outcomes` wrote: the "machine", and "tests" by name.
    """
    here = [m for m in row if not m.gpu and not m.fails]
    reasons = "; ".join(dict.fromkeys(m.fails for m in row if m.fails))
    if reasons:
        return f"yes, but not: {reasons}" if here else f"no: {reasons}"
    results = {outcomes.get("tests", {}).get(m.node) for m in row if m.gpu}
    if not results:
        return "yes"
    found = "by its GPU test, not yet run on hardware"
    if "failed" in results or results == {"passed"}:
        machine = outcomes["machine"]
        said = "no: failed" if "failed" in results else "yes,"
        found = f"{said} on {machine['gpu']} at {machine['commit'][:7]}"
    return f"yes, on a CPU; {found}" if here else found


def table(found: Iterable[Mark] | None = None, outcomes: Mapping[str, Any] | None = None) -> str:
    """A heading and a table for each group that has a mark, in the order of `GROUPS`."""
    if outcomes is None:
        outcomes = load(OUTCOMES) if OUTCOMES.exists() else {}
    rows: dict[str, dict[str, list[Mark]]] = {group: {} for group in GROUPS}
    for mark in marks(sorted((ROOT / "tests").rglob("test_*.py"))) if found is None else found:
        rows[mark.group].setdefault(mark.name, []).append(mark)
    parts = []
    for group, names in rows.items():
        cells = [[name, works(row, outcomes), *_where(row)] for name, row in names.items()]
        shown = markdown(("what", "works", "tested where", "limits"), cells)
        parts += [f"## {group}\n\n{shown}"] if cells else []
    return "\n\n".join(parts)


def _where(row: list[Mark]) -> tuple[str, str]:
    """The tests, linked from the root of the repository, and their limits."""
    where = ", ".join(f"[{Path(m.path).name}::{m.test}]({m.path})" for m in row)
    return where, "; ".join(dict.fromkeys(m.limits for m in row if m.limits))
