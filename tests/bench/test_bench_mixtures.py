"""`python -m bench mixtures` at tiny sizes: what is held against own checkpointing."""

import json

import pytest

from bench.commands import mixtures
from bench.pages import mixtures as page
from bench.subjects.mixtures import MIXTURES

pytest.importorskip("transformers")


@pytest.mark.parametrize("model", sorted(MIXTURES))
def test_a_layer_keeps_and_needs_at_most_what_its_own_checkpointing_does(model, tmp_path):
    options = f"--device cpu --model {model} --part 16 --seq-len 32 --rounds 1 --seconds 0.1"
    ways = ["stock", "full", "fast"]
    assert mixtures.main([*options.split(), "--ways", *ways, "--out", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / page.FILE).read_text())["results"]
    own = row["ways"]["checkpoint"]
    for name in ("full", "fast"):
        assert row["ways"][name]["check"]["against"] == "float64"
        assert row["ways"][name]["step_peak_bytes"] <= own["step_peak_bytes"], name
    # What is kept of the routing: a byte for each expert, and the norm's statistics.
    routing = 32 * (MIXTURES[model].top_k + 4)
    assert row["ways"]["full"]["kept_bytes"] <= own["kept_bytes"] + routing
    for part_ in (page.cases, page.targets, page.frontier, page.bytes_per_token):
        assert model in part_(tmp_path.parent if part_ is page.bytes_per_token else tmp_path)


def test_the_bytes_that_sonicmoe_publishes():
    """Qwen3-30B-A3B: 104 KiB keeping everything, 28 SonicMoE, 4 the input alone."""
    text = page.bytes_per_token()
    assert all(f"| {kib}.0 KiB |" in text for kib in (104, 28, 4))
