"""What the model on paper says a rank holds, beside runs of two and four processes: to the byte."""

import json
from pathlib import Path

import pytest

from bench.commands.scale import held, tiny
from bench.pages import scale
from bench.pages.scale import is_right

#: The model, its mesh (data by tensor) and options, and the policy.
RUNS = [
    *((n, (2, 1), {}, p) for n in ("llama3-70b", "gpt3-175b") for p in ("full", "fast", "none")),
    ("llama3-70b", (2, 1), {"low": True}, "balanced"),
    *(
        ("llama3-70b", (1, 2), {"sequence": sequence}, policy)
        for sequence in (True, False)
        for policy in ("full", "lean", "none")
    ),
    *((name, (2, 2), {}, "fast") for name in ("llama3-70b", "qwen3-32b", "gpt3-175b")),
]


@pytest.mark.parametrize("name, mesh, options, policy", RUNS, ids=str)
def test_every_part_to_the_byte(request, name, mesh, options, policy):
    processes = request.getfixturevalue("four_processes" if mesh == (2, 2) else "two_processes")
    for rank, parts in enumerate(processes.run(held, tiny(name, *mesh, **options), policy)):
        assert len(parts) == 5
        for part, held_ in parts.items():
            assert held_.measured == held_.on_paper > 0, f"rank {rank}, {part}: {held_}"


def test_the_committed_runs_are_as_predicted():
    data = json.loads((Path(scale.RESULTS) / "scale-cpu.json").read_text())
    assert len(data["results"]) == 15 and all(map(is_right, data["results"]))
    assert {len(row["ranks"]) for row in data["results"]} == {1, 2, 4}
    assert "**other bytes**" not in scale.checked()
