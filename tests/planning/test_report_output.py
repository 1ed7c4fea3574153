"""`memory_report`: its report as a table, as JSON and as a picture."""

import json
import sys

import pytest
import torch
from report_models import LanguageModel, data, encoder, ids
from torch import nn

from fused_remat import MemoryReport, Policy, convert, memory_report


def test_table():
    text = str(memory_report(convert(encoder(12), "lean"), data()))
    lines = text.splitlines()
    assert lines[0] == "TransformerEncoder" and lines[1].split("  ")[-1] == "backward peak"
    assert "layers.1 … layers.11 (11×) FusedRematLayer lean" in text
    assert any(line.startswith("  attn 120×32 float32 ") for line in lines)
    assert "* passed to the model" in text
    assert max(map(len, lines)) <= 120
    assert len({line.rindex("B") for line in lines[2:5] if "input" in line}) == 1
    brief = memory_report(encoder(12), data()).table(activations=False)
    assert len(brief.splitlines()) <= 6 and "Backward0" not in brief


def test_equal_layers_are_listed_once():
    text = str(memory_report(convert(LanguageModel(4), every=2), ids()))
    assert text.count("ReluBackward0.result") == 1 == text.count("  norm1.mean")


def test_json_round_trip(tmp_path):
    report = memory_report(convert(LanguageModel(), Policy(save={"attn", "qkv"})), ids())
    text = report.to_json(tmp_path / "report.json")
    assert (tmp_path / "report.json").read_text(encoding="utf-8") == text + "\n"
    assert MemoryReport.from_json(text) == report
    given = json.loads(text)
    assert given["kept_bytes"] == report.kept_bytes
    assert given["layers"][0]["policy"] == "{attn, qkv}"
    assert given["layers"][0]["activations"][0]["name"] == "input"


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(tmp_path, suffix):
    matplotlib = pytest.importorskip("matplotlib")
    before, backend = dict(matplotlib.rcParams), matplotlib.get_backend(auto_select=False)
    path = tmp_path / f"report{suffix}"
    memory_report(convert(LanguageModel(3), every=2), ids()).plot(path)
    assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    assert path.stat().st_size > 5000
    assert dict(matplotlib.rcParams) == before
    assert matplotlib.get_backend(auto_select=False) == backend


def test_plot_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"fused-remat\[bench\]"):
        memory_report(nn.Linear(2, 2), torch.randn(3, 2)).plot(tmp_path / "report.png")
