"""`bench host`: a layer's step over a driver that launches nothing, of two checkouts."""

import json

import pytest
from tiers import exhaustive

from bench.commands import host
from bench.measure.machine import ROOT

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("way", ["stock", exhaustive("full")])
def test_launches_and_calls_are_counted_in_both_checkouts(tmp_path, capsys, way):
    given = ["--layers", "llama", "--ways", way, "--rounds", "1", "--beside", str(ROOT)]
    assert host.main([*given, "--out", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "host.json").read_text())
    assert found["machine"]["commit"]
    (row,) = found["results"].values()
    assert list(row) == ["this", "beside"]
    for one in row.values():
        assert one["above"] == one["step"] - one["aten"] and one["calls"] > 50
        assert (one["launches"] > 10) == (way == "full")
    assert row["this"]["calls"] == row["beside"]["calls"]
    assert f"above, to {found['beside'][:7]}'s" in capsys.readouterr().out
