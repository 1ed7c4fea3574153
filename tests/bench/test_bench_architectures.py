"""`python -m bench architectures`: how tiny models are read, and what a step of each keeps."""

import json

import pytest
import torch
from tiers import exhaustive

from bench import tables
from bench.commands import architectures
from bench.pages import architectures as page
from tests.recognition import models


def ran(tmp_path, *names):
    status = architectures.main(["--names", *names, "--tokens", "12", "--out", str(tmp_path)])
    return status, json.loads((tmp_path / "architectures.json").read_text())


def test_a_model_without_checkpointing_of_its_own(tmp_path, capsys):
    status, data = ran(tmp_path, "nanogpt")
    (row,) = data["results"]
    assert status == 0 and page.converts(row) and not page.pieces(row)
    kept = {name: way.get("kept") for name, way in row["ways"].items()}
    assert kept["full"] < kept["balanced"] < kept["none"] < kept["stock"]
    assert kept["checkpoint"] is None and page.ratio(row) is None
    assert row["ways"]["full"]["dtype"] == "float64"
    assert 0 < row["ways"]["full"]["error"]["gradient"] < 1e-12
    line = capsys.readouterr().out.splitlines()[0]
    assert line.startswith("nanogpt: a block; KiB: stock ") and "checkpoint none" in line
    assert "1 of 1 architectures convert: 1 without" in page.table(tmp_path / "architectures.json")


@pytest.mark.parametrize("name", ["llama", exhaustive("mixtral"), exhaustive("t5")])
def test_a_model_beside_its_own_checkpointing(tmp_path, name):
    pytest.importorskip("transformers")
    status, data = ran(tmp_path, name)
    (row,) = data["results"]
    ways, pieces = row["ways"], {"mixtral": {"mlp"}}.get(name, set())
    assert status == 0 and page.pieces(row) == pieces
    assert ways["checkpoint"]["kept"] <= ways["checkpoint"]["held"] < ways["stock"]["kept"] / 2
    # ATen has no product of experts in float64, as the model calls it.
    assert ways["full"]["dtype"] == ("float32" if name == "mixtral" else "float64")
    assert ways["checkpoint"]["error"]["gradient"] < 1e-5


def test_a_package_that_is_not_there_and_a_model_that_fails_are_said(tmp_path, monkeypatch, capsys):
    def missing():
        raise ModuleNotFoundError("No module named 'absent_package'")

    def broken():
        raise ValueError("of no use")

    rows = {"missing": missing, "broken": broken}
    for name, make in rows.items():
        row = models.Row(("Layer",), make, models._ids, "absent_package")
        monkeypatch.setitem(models.MODELS, name, row)
    assert ran(tmp_path, "missing")[0] == 0
    assert ran(tmp_path, "missing", "broken")[0] == 1
    assert "wrong: broken" in capsys.readouterr().err
    text = page.table(tmp_path / "architectures.json")
    assert "missing (absent_package is not installed)" in text
    assert "broken (ValueError: of no use)" in text and "0 of 0 architectures" in text


def test_a_wrong_gradient_is_a_failure():
    grads = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    stock = {"loss": 2.0, "grads": grads}
    moved = grads | {"a": torch.tensor([3.0, 4.5])}
    found = architectures.compared({"loss": 2.5, "grads": moved}, stock)
    assert found["loss"] == 0.25 and found["parameter"] == "a"
    assert found["gradient"] == pytest.approx(0.1)
    row = {"case": {"name": "one"}, "ways": {"full": {"error": found}}}
    assert not page.is_right(row, architectures.ALLOWED) and page.is_right(row, 0.2)
    assert architectures.compared(stock | {"grads": {}}, stock)["gradient"] == float("inf")


def test_what_is_passed_by_name_is_held_beside():
    """Llama's layers are given RoPE's tables, cos and sin of 12 positions and 8 numbers each."""
    pytest.importorskip("transformers")
    _, found = architectures.run("llama", "checkpoint", torch.float32, 12)
    positions = 12 * 8  # int64
    assert found["held"] - found["kept"] == 2 * 12 * 8 * 4 + positions


def test_the_page_has_every_architecture_of_the_table():
    data = tables.load(page.FILE)
    assert [row["case"]["name"] for row in tables.current(data)] == list(models.MODELS)
    assert all(page.is_right(row, architectures.ALLOWED) for row in data["results"])
    assert all(tuple(row["layers"]) == models.MODELS[row["case"]["name"]].layers
               for row in data["results"] if "ways" in row)  # fmt: skip
