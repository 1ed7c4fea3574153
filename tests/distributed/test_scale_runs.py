"""What the model on paper says a rank holds, beside runs of two and four processes: to the byte."""

import json
from pathlib import Path

import pytest

from bench.pages import scale
from bench.pages.scale import is_right
from bench.scale.runs import held, tiny


def equal(ranks):
    for rank, parts in enumerate(ranks):
        assert len(parts) == 5
        for part, held_ in parts.items():
            assert held_.measured == held_.on_paper > 0, f"rank {rank}, {part}: {held_}"


@pytest.mark.parametrize("policy", ["full", "fast", "none"])
@pytest.mark.parametrize("name", ["llama3-70b", "gpt3-175b"])
def test_sharded_between_two(two_processes, name, policy):
    equal(two_processes.run(held, tiny(name, 2, 1), policy))


def test_computed_in_16_bits(two_processes):
    equal(two_processes.run(held, tiny("llama3-70b", 2, 1, low=True), "balanced"))


@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "whole"])
@pytest.mark.parametrize("policy", ["full", "lean", "none"])
def test_divided_between_two(two_processes, policy, sequence):
    equal(two_processes.run(held, tiny("llama3-70b", 1, 2, sequence), policy))


@pytest.mark.parametrize("name", ["llama3-70b", "qwen3-32b", "gpt3-175b"])
def test_two_by_two(four_processes, name):
    equal(four_processes.run(held, tiny(name, 2, 2), "fast"))


def test_the_committed_runs_are_as_predicted(tmp_path):
    data = json.loads((Path(scale.RESULTS) / "scale-cpu.json").read_text())
    assert len(data["results"]) == 15 and all(map(is_right, data["results"]))
    assert {len(row["ranks"]) for row in data["results"]} == {1, 2, 4}
    assert "**other bytes**" not in scale.checked() and scale.checked(tmp_path) == scale.UNMEASURED
