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
from bench.tables import RESULTS, Cell, load, markdown

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

    group: str
    name: str
    limits: str
    path: str  # of the file, relative to the repository
    test: str  # its name in the file
    gpu: bool = False  # it needs a GPU
    fails: str = ""  # why it is expected to fail (xfail)

    @property
    def node(self) -> str:
        """The test as pytest names it, without parameters."""
        return f"{self.path}::{self.test}"


def marks(files: Iterable[Path], root: Path = ROOT) -> list[Mark]:
    """Every mark in `files`, in their order.

    Raises: ValueError for a mark whose arguments are not literal strings, that names no known
        group, or that does not decorate a test or a class of tests.
    """
    return [mark for path in files for mark in _marks_of(path, path.relative_to(root).as_posix())]


def _marks_of(path: Path, shown: str) -> Iterator[Mark]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    of_file = [
        mark
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
        for mark in ast.walk(node.value)
    ]
    seen: set[ast.AST] = set()
    for name, own, above in _tests(tree):
        others = [*above, *own]
        gpu = any(_kind(mark) == "gpu" for mark in (*of_file, *others))
        fails = "; ".join(_reason(d, f"{shown}:{d.lineno}") for d in others if _kind(d) == "xfail")
        for decorator in own:
            if _kind(decorator) == "composes":
                seen.update(ast.walk(decorator))
                said = _arguments(decorator, f"{shown}:{decorator.lineno}")
                yield Mark(*said, shown, name, gpu, fails)
    for node in ast.walk(tree):
        if isinstance(node, ast.expr) and _kind(node) == "composes" and node not in seen:
            raise ValueError(f"{shown}:{node.lineno}: the mark composes must decorate a test")


def _tests(tree: Any, of: str = "", above: Any = ()) -> Iterator[tuple[str, Any, Any]]:
    """Tests, classes of tests and tests in them: the name, its decorators and the class's."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield of + node.name, node.decorator_list, above
            if isinstance(node, ast.ClassDef):
                yield from _tests(node, f"{of}{node.name}::", node.decorator_list)


def _kind(node: ast.AST) -> str:
    """ "gpu" for `pytest.mark.gpu`, called or not; "" for anything else."""
    node = node.func if isinstance(node, ast.Call) else node
    is_mark = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    return node.attr if is_mark and isinstance(node, ast.Attribute) else ""


def _arguments(mark: ast.expr, where: str) -> tuple[str, str, str]:
    """Group, name and limits of the mark."""

    def composes(group: str, name: str, limits: str = "") -> tuple[str, str, str]:
        assert name and all(isinstance(v, str) for v in (group, name, limits))
        return group, name, limits

    try:
        assert isinstance(mark, ast.Call)
        named = {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}
        group, name, limits = composes(*map(ast.literal_eval, mark.args), **named)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f'{where}: expected composes("group", "name", limits="..."), in literal strings'
        ) from error
    if group not in GROUPS:
        raise ValueError(f"{where}: unknown group {group!r}; known: {', '.join(GROUPS)}")
    if any(c in text for text in (name, limits) for c in "|\n"):
        raise ValueError(f"{where}: a cell of a table holds neither | nor line breaks")
    return group, name, limits


def _reason(mark: ast.expr, where: str) -> str:
    for keyword in mark.keywords if isinstance(mark, ast.Call) else ():
        if keyword.arg == "reason" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    raise ValueError(f"{where}: xfail needs a literal reason")


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
    outcomes = load(OUTCOMES) or {} if outcomes is None else outcomes
    rows: dict[str, dict[str, list[Mark]]] = {group: {} for group in GROUPS}
    for mark in marks(sorted((ROOT / "tests").rglob("test_*.py"))) if found is None else found:
        rows[mark.group].setdefault(mark.name, []).append(mark)
    parts = []
    for group, names in rows.items():
        cells = [_cells(name, row, outcomes) for name, row in names.items()]
        shown = markdown(("what", "works", "tested where", "limits"), cells)
        parts += [f"## {group}\n\n{shown}"] if cells else []
    return "\n\n".join(parts)


def _cells(name: str, row: list[Mark], outcomes: Mapping[str, Any]) -> list[Cell]:
    """Tests are linked from the root of the repository."""
    where = [f"[{Path(m.path).name}::{m.test}]({m.path})" for m in row]
    limits = "; ".join(dict.fromkeys(m.limits for m in row if m.limits))
    return [name, works(row, outcomes), ", ".join(where), limits]
