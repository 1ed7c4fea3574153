"""`python -m bench architectures`: a converted step compared with checkpointing, model by model."""

import itertools
import json
import re

import pytest
import torch
from processes import ROOT

from bench import tables
from bench.commands import architectures
from bench.pages import architectures as page
from bench.pages import diffusion
from bench.subjects import architectures as subjects


def test_a_row_a_line_and_a_page(tmp_path, capsys):
    options = "--names nanogpt --variants bare cache lora --tokens 16 --out"
    architectures.main([*options.split(), str(tmp_path)])
    data = json.loads((tmp_path / "architectures.json").read_text())
    bare, cache, lora = data["results"]
    own, new = bare["ways"]["own"], bare["ways"]["converted"]
    assert own["gradient"] == 0 and new["gradient"] < 1e-5
    unit = 2 * 16 * subjects.WIDTH * 4
    assert 4 * unit <= own["kept"] < 5 * unit < own["peak"]
    assert bare["layers"] == {"blocks": 2} and cache["absent"] == "it has no cache"
    assert lora["ways"]["own"]["kept"] < own["kept"] + unit
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("nanogpt bare: 2 blocks, kept ")
    assert lines[1] == "nanogpt cache: not run: it has no cache"
    text = page.table(tmp_path / "architectures.json")
    assert "| nanogpt | 2 blocks |" in text and "1 of 1 architectures run every layer" in text


def test_what_is_worse_is_a_violation():
    own = {"kept": 1000, "peak": 1000, "first_peak": 1000, "gradient": 0.0}
    new = own | {"gradient": 1e-6, "parameter": "a", "statistics": 8}
    row = {"ways": {"own": own, "converted": new}, "largest": 10, "repeated": []}
    row |= {"layers": {"blocks": 2}, "conversion": []}

    def found(**changed):
        ways = {"own": own, "converted": new | changed}
        return set(architectures.violations(row | {"ways": ways}))

    assert found() == found(kept=1028, peak=1050, first_peak=1120, gradient=9e-5) == set()
    assert found(kept=1029, peak=1051, first_peak=1121) == {"kept", "peak", "first_peak"}
    more = row | {"ways": {"own": own, "converted": new | {"kept": 2000}}}
    assert architectures.violations(more, policy="lean") == {}  # keeps more on purpose
    assert found(gradient=2e-4) == {"gradients"} and found(gradient=2e-4, gradient64=1e-9) == set()
    assert set(architectures.violations(row | {"repeated": ["again"]})) == {"warnings"}
    plain = row | {"layers": {"plain": 1}}
    assert set(architectures.violations(plain)) == {"plain"}
    assert architectures.violations(plain | {"effects": True}) == {}


def test_distances_of_gradients_and_warnings_that_are_repeated():
    stock = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0])}
    moved = stock | {"a": torch.tensor([3.0, 4.5])}
    assert architectures.distance(moved, stock) == (pytest.approx(0.1, rel=1e-3), "a")
    assert architectures.distance(stock | {"b": torch.tensor([torch.nan])}, stock)[0] == torch.inf
    warned = ["layer 1 is slow", "layer 2 is slow", "of the model", "of the model", "alone"]
    assert architectures.repeated(warned, ["of the model"] * 2) == ["layer # is slow"]


def test_groups_of_what_people_train():
    pytest.importorskip("transformers")
    expected = {
        "LlamaForCausalLM": "language", "Gemma3ForConditionalGeneration": "language",
        "Qwen3MoeForCausalLM": "mixtures", "DeepseekV3ForCausalLM": "mixtures",
        "WhisperForCausalLM": "speech", "Qwen2AudioForConditionalGeneration": "speech",
        "timm_vit": "vision", "wan": "diffusion", "of another version": "language",
    }  # fmt: skip
    assert {name: subjects.group(name) for name in expected} == expected
    assert set(map(subjects.group, subjects.ARCHITECTURES)) == set(page.TITLES)


def test_the_readme_has_the_counts_of_the_page():
    rows = page.first_rows(tables.load(page.FILE)["results"])
    text = " ".join((ROOT / "README.md").read_text().split())
    (found,) = re.findall(r"Of \[(\d+) models measured\]\S+ (\d+) run .* and (\d+) pass", text)
    assert list(map(int, found)) == [
        len(rows),
        sum(map(page.fused, rows)),
        sum(map(page.passes, rows)),
    ]


def test_a_page_of_diffusion_models_from_results_of_two_policies(tmp_path):
    own = {"kept": 100, "peak": 100, "first_peak": 100, "seconds": 1.0}
    machine = {"cpu": "a CPU", "threads": 1, "torch": "2.13.0", "commit": "0123456789"}

    def write(folder, config, **changed):
        case = {"name": "flux", "variant": "bare"}
        row = {"case": case, "machine": machine, "config": config, "violations": {"peak": ""}}
        row |= {"ways": {"own": own, "converted": own | changed}, "layers": {"blocks": 4}}
        row["conversion"] = ["checkpointed 1 × Block (a): 2 checkpointed training calls (a reason)"]
        (tmp_path / folder).mkdir()
        data = {"machine": machine, "config": config, "results": [row]}
        (tmp_path / folder / diffusion.FILE).write_text(json.dumps(data))

    assert diffusion.table(tmp_path) == diffusion.models(tmp_path) == ""
    write("1-diffusion-full", {"tokens": 256}, kept=500)
    write("2-diffusion-full", {"tokens": 256}, kept=102, peak=101, seconds=1.0)
    write("2-diffusion-lean", {"tokens": 256, "policy": "lean"}, kept=150, seconds=0.91)
    write("3-others", {"tokens": 256}, kept=500)
    cells = "1.02× | **1.01×** | 1.00× | 1.00× | 1.50× | 1.00× | **0.91×** |"
    text = diffusion.table(tmp_path)
    assert f"| `flux` | 4 blocks | {cells}" in text and "LoRA" not in text
    assert text.count("Measured on a CPU, 1 thread, torch 2.13.0, commit 0123456.") == 1
    entry = "| `FluxTransformer2DModel` | 4 blocks: a reason |"
    assert entry in diffusion.models(tmp_path)


def test_the_page_has_known_architectures_and_no_wrong_gradient():
    data = tables.load(page.FILE)
    rows = [row for row in data["results"] if page.ran(row)]
    found = {(row["case"]["name"], row["case"]["variant"]) for row in rows}
    every = itertools.product(subjects.ARCHITECTURES, architectures.VARIANTS)
    assert len(found) > 40 and found <= set(every), "python -m bench architectures"
    wrong = {check for row in data["results"] for check in row["violations"]}
    assert not wrong & {"crash", "warnings", "plain"}
    for new in (row["ways"]["converted"] for row in rows if "gradients" in row["violations"]):
        # Terms of this gradient, which transformers computes in float32, cancel.
        assert new["parameter"].endswith("linear_attn.A_log") and new["gradient"] < 2.5e-4
