"""What the model on paper says a rank holds, beside runs of two and four processes: to the byte."""

import pytest
from scale_ranks import held, tiny

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
            most = held_.on_paper  # exact for the first data-parallel ranks
            assert 0 < held_.measured <= most, f"rank {rank}, {part}: {held_}"
            assert held_.measured == most or rank >= mesh[1], f"rank {rank}, {part}: {held_}"
