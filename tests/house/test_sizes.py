"""Nothing grows unseen: each file of the package has a row, and no more lines than that allows."""

import csv
import importlib

import pytest
from test_arrows import FILES, MODULES, ROOT, within

#: A seventh more, or a few lines of a small file, need no reason.
ROOM, FEW = 1.15, 5
#: `STYLE`: more are groups, which are `NamedTuple`s.
MOST_PARAMETERS = 24


def test_every_file_has_a_row_and_keeps_to_it():
    with (ROOT / "tests" / "house" / "sizes.tsv").open(newline="") as file:
        _, *rows = csv.reader(file, delimiter="\t")
    allowed = {path: int(lines) for path, lines, *_ in rows}
    package = [p.relative_to(ROOT) for p in FILES if "kernels" not in p.parts]
    found = {str(p): len((ROOT / p).read_text().splitlines()) for p in package}
    assert found.keys() == allowed.keys(), "one row for each file: what it holds, and why"
    over = {p: n for p, n in found.items() if n > max(ROOM * allowed[p], allowed[p] + FEW)}
    assert not over, "move something, or raise the row and say why"


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
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
