"""A row of an architecture is what the recorder reads: the same steps, of the same tensors."""

import dataclasses
import re
import sys

import hf_models
import pytest
import torch

from fused_remat import convert, revert
from fused_remat.execution.observe import OBSERVERS
from fused_remat.spec import AttentionSpec
from fused_remat.tracing.layer import TracedLayer, traced_class

#: Where a field says how the block was described, not what it computes.
HOW = {"projection": "packed", "masks": (), "true_means": "attend"}


def blocks(model, batch):
    """The blocks of a step, and their tensors."""
    runs = []
    model(**batch)  # a first call reads
    OBSERVERS.append(runs.append)
    try:
        model(**batch)
    finally:
        OBSERVERS.remove(runs.append)
    return [
        (run.call.graph, dict(zip(run.call.graph.tensors, run.tensors, strict=True)))
        for run in runs
    ]


def described(graph, tensors):
    """Steps with numbers instead of names, and the tensors that they read."""
    numbers = {
        name: str(i) for i, name in enumerate((*graph.inputs, *[n.name for n in graph.nodes]))
    }
    steps, read = [], []

    def renamed(match):
        role, name = match.groups()
        if role:
            return match[0]
        if name in tensors and name not in graph.inputs:
            read.append(tensors[name])
            return "''" if tensors[name] is None else "'tensor'"
        return f"'{numbers.get(name, name)}'"

    for node in graph.nodes:
        changes = {n: "" for n in ("name", "site", "like", "of") if hasattr(node, n)}
        if isinstance(getattr(node, "spec", None), AttentionSpec):
            scale = float(f"{node.spec.scale:.12e}")
            changes["spec"] = dataclasses.replace(node.spec, scale=scale, **HOW)
        text = re.sub(r"(role=)?'([^']*)'", renamed, str(dataclasses.replace(node, **changes)))
        steps.append(re.sub(r"\(('', )*'',?\)", "()", text))
    return steps, [t for t in read if t is not None and t.is_floating_point()]


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_an_entry_is_what_is_traced(name, monkeypatch):
    model, batch = hf_models.build(name), hf_models.inputs_of(name)
    rows = blocks(convert(model), batch)
    revert(model)
    monkeypatch.setattr(
        sys.modules["fused_remat.convert"],
        "converted_class",
        lambda layer: traced_class(type(layer)),
    )
    traces = blocks(convert(model), batch)
    assert any(isinstance(module, TracedLayer) for module in model.modules())
    assert len(rows) == len(traces) == 2
    for row, trace in zip(rows, traces, strict=True):
        (expected, its), (found, mine) = described(*row), described(*trace)
        assert found == expected
        assert len(mine) == len(its)
        assert all(a is b or torch.equal(a, b.to(a.dtype)) for a, b in zip(mine, its, strict=True))
