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
from bench.tables import Cell, load, markdown

#: What the tests on a GPU gave there; written by `make gpu` (`bench.gpu.outcomes`).
OUTCOMES = ROOT / "bench" / "results" / "gpu" / "tests.json"
GROUPS = (
    "torch.compile", "torch.export", "Autocast", "DDP", "FSDP2", "FSDP1", "Tensor parallel",
    "Pipeline parallel", "Engines",
    "CUDA graphs", "Outer checkpointing", "Replay check", "Concurrency and faults", "Hugging Face",
    "PEFT",
)  # fmt: skip
_Test = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


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
    for test, name, above in _tests(tree):
        others = [*above, *test.decorator_list]
        gpu = any(_kind(mark) == "gpu" for mark in (*of_file, *others))
        fails = "; ".join(_reason(d, shown) for d in others if _kind(d) == "xfail")
        for decorator in test.decorator_list:
            if _kind(decorator) == "composes":
                seen.update(ast.walk(decorator))
                yield Mark(*_arguments(decorator, shown), shown, name, gpu, fails)
    for node in ast.walk(tree):
        if _kind(node) == "composes" and node not in seen:
            raise ValueError(f"{_where(node, shown)}: the mark composes must decorate a test")


def _tests(tree: ast.Module) -> Iterator[tuple[_Test, str, list[ast.expr]]]:
    """Tests, classes of tests and tests in them: the name, and the decorators of the class."""
    for outer in tree.body:
        if isinstance(outer, _Test):
            yield outer, outer.name, []
        if isinstance(outer, ast.ClassDef):
            for inner in outer.body:
                if isinstance(inner, _Test):
                    yield inner, f"{outer.name}::{inner.name}", outer.decorator_list


def _kind(node: ast.AST) -> str:
    """ "gpu" for `pytest.mark.gpu`, called or not; "" for anything else."""
    node = node.func if isinstance(node, ast.Call) else node
    is_mark = isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pytest.mark"
    return node.attr if is_mark and isinstance(node, ast.Attribute) else ""


def _where(node: Any, shown: str) -> str:
    return f"{shown}:{node.lineno}"


def _composes(group: str, name: str, limits: str = "") -> tuple[str, str, str]:
    """The arguments of the mark."""
    assert name and all(isinstance(v, str) for v in (group, name, limits))
    return group, name, limits


def _arguments(mark: ast.expr, shown: str) -> tuple[str, str, str]:
    where = _where(mark, shown)
    try:
        assert isinstance(mark, ast.Call)
        given = [ast.literal_eval(a) for a in mark.args]
        named = {str(k.arg): ast.literal_eval(k.value) for k in mark.keywords}
        group, name, limits = _composes(*given, **named)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f'{where}: expected composes("group", "name", limits="..."), in literal strings'
        ) from error
    if group not in GROUPS:
        raise ValueError(f"{where}: unknown group {group!r}; known: {', '.join(GROUPS)}")
    if any(c in text for text in (name, limits) for c in "|\n"):
        raise ValueError(f"{where}: a cell of a table holds neither | nor line breaks")
    return group, name, limits


def _reason(mark: ast.expr, shown: str) -> str:
    keywords = mark.keywords if isinstance(mark, ast.Call) else []
    for keyword in keywords:
        if keyword.arg == "reason" and isinstance(keyword.value, ast.Constant):
            return str(keyword.value.value)
    raise ValueError(f"{_where(mark, shown)}: xfail needs a literal reason")


def works(row: list[Mark], outcomes: Mapping[str, Any]) -> str:
    """What the tests of a row say: "yes", "no: why", or what a GPU said or has yet to say.

    `outcomes` is what `bench.gpu.outcomes` wrote: the "machine", and "tests" by name.
    """
    here = [m for m in row if not m.gpu and not m.fails]
    failing = [m.fails for m in row if m.fails]
    if failing:
        reasons = "; ".join(dict.fromkeys(failing))
        return f"yes, but not: {reasons}" if here else f"no: {reasons}"
    there = [m for m in row if m.gpu]
    if not there:
        return "yes"
    results = {outcomes.get("tests", {}).get(m.node) for m in there}
    found = "by its GPU test, not yet run on hardware"
    if "failed" in results or results == {"passed"}:
        machine = outcomes["machine"]
        found = f"on {machine['gpu']} at {machine['commit'][:7]}"
        found = f"no: failed {found}" if "failed" in results else f"yes, {found}"
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
