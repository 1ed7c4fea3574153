"""A step calls, compiles and keeps no more than when `make baseline` last recorded it."""

import json
from pathlib import Path

import pytest
from baseline import versions
from processes import printed

HERE = Path(__file__).parent
BASELINE = json.loads((HERE / "baseline.json").read_text())
VERSIONS = BASELINE.pop("versions")


@pytest.fixture(scope="module")
def now():
    """In a process of its own: Triton decides at import to interpret."""
    pytest.importorskip("triton", reason="Triton is not installed")
    pytest.importorskip("transformers")
    return json.loads(printed(HERE / "baseline.py", TRITON_INTERPRET="1"))


@pytest.mark.parametrize("row", BASELINE)
def test_no_row_grows(row, now):
    before, found = BASELINE[row], now[row]
    if row.startswith("kept"):
        assert found == before
    comparable = "" if versions() == VERSIONS else ("operation", "launch")  # by all, or by depths
    grown = {what: n for what, n in found.items() if n > before.get(what, 0)}
    assert not {what: n for what, n in grown.items() if what.endswith(comparable)}, before
