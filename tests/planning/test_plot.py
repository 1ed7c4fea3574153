"""Charts of plans and of reports."""

import sys

import pytest
from planned_models import planned
from report_models import LanguageModel, ids

from fused_remat import Plan, convert, memory_report

pytestmark = pytest.mark.usefixtures("one_machine")


def tight():
    fastest = planned("pre-norm")
    return fastest.within(fastest.frontier[0].peak_bytes)


DRAWN = {
    "segments": lambda: planned("pre-norm").within(None, "sqrt"),
    "a budget": tight,
    "report": lambda: memory_report(convert(LanguageModel(3), every=2), ids()),
}


@pytest.mark.parametrize("name", DRAWN)
def test_a_chart_shows_its_parts_and_changes_no_setting(name, tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)
    drawn = DRAWN[name]()
    drawn.plot(tmp_path / "drawn.svg")
    svg = (tmp_path / "drawn.svg").read_text()
    if isinstance(drawn, Plan):
        texts = {"kept", "at work", "parameters", *(event.what for event in drawn.timeline())}
        assert ("<!-- budget -->" in svg) == (drawn.budget is not None)
        assert ("replay" in texts) == bool(drawn.choice.segments)
    else:
        texts = {"others", "layers.0 full", "layers.1", "layers.2 full", "(other)"}
    assert {text for text in texts if f"<!-- {text} -->" not in svg} == set()
    drawn.plot(tmp_path / "drawn.png")
    assert (tmp_path / "drawn.png").stat().st_size > 10_000
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend(auto_select=False) == backend


@pytest.mark.parametrize("drawn", ["segments", "report"])
def test_a_chart_needs_matplotlib(drawn, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'plot needs matplotlib: pip install "fused-remat\[ben'):
        DRAWN[drawn]().plot(tmp_path / "drawn.png")
