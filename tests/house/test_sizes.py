"""Nothing grows unnoticed: each package has a total of lines, and a file at most 450."""

import csv
import importlib
from collections import Counter

import pytest
from test_arrows import FILES, MODULES, ROOT, within

#: Lines of a file, and parameters of a kernel: more are groups, which are `NamedTuple`s.
MOST_LINES, MOST_PARAMETERS = 450, 24


def lines_of(path):
    return len(path.read_text(encoding="utf-8").splitlines())


def totals():
    """Lines of Python by package: those of `fused_remat`, its sum, and the other folders."""
    found = Counter()
    for path in FILES:
        package = path.relative_to(ROOT).parent
        found[str(package)] += lines_of(path)
        found["all of fused_remat"] += lines_of(path) * (package.parts[0] != "kernels")
    for folder in ("bench", "tests", "tests/ptx"):
        found[folder] = sum(lines_of(path) for path in (ROOT / folder).rglob("*.py"))
    return found


def test_no_package_exceeds_its_ceiling():
    with (ROOT / "tests" / "house" / "sizes.tsv").open(newline="") as file:
        _, *entries = csv.reader(file, delimiter="\t")
    allowed, found = {name: int(lines) for name, lines, *_ in entries}, totals()
    assert found.keys() == allowed.keys(), "one entry for each package"
    over = {name: (n, allowed[name]) for name, n in found.items() if n > allowed[name]}
    assert not over, "take something out; only a feature that an issue requests raises a ceiling"


def test_no_file_has_more_than_450_lines():
    over = {str(path.relative_to(ROOT)): lines_of(path) for path in FILES}
    assert {path: n for path, n in over.items() if n > MOST_LINES} == {}


def test_no_kernel_takes_more_than_24_parameters():
    triton = pytest.importorskip("triton", reason="Triton is not installed")
    from triton.runtime.interpreter import InterpretedFunction

    found = {}
    for module in (name for name in MODULES if within(name, "kernels")):
        for name, value in vars(importlib.import_module(f"fused_remat.{module}")).items():
            if isinstance(value, (triton.JITFunction, InterpretedFunction)):
                found[name] = len(value.arg_names)
    assert sum(name.endswith("_kernel") for name in found) > 20
    assert {name: n for name, n in found.items() if n > MOST_PARAMETERS} == {}


def test_the_readme_is_one_screen():
    assert lines_of(ROOT / "README.md") <= 120
