"""A row of an architecture is what the recorder reads: the same steps, of the same tensors."""

import dataclasses
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
    """Steps with numbers in the places of names, and the tensors that they read."""
    numbers = {name: i for i, name in enumerate((*graph.inputs, *[n.name for n in graph.nodes]))}
    steps, read = [], []
    for node in graph.nodes:
        fields = {}
        for field in dataclasses.fields(node):
            value = getattr(node, field.name)
            if field.name in ("site", "like", "of"):
                continue
            if isinstance(value, AttentionSpec):
                value = dataclasses.replace(value, **HOW)
            if isinstance(value, str) and value in tensors and value not in graph.inputs:
                read.append(tensors[value])
            elif (
                isinstance(value, tuple)
                and value
                and all(name in tensors for name in value if name)
            ):
                read += [tensors[name] for name in value if name]
            elif value in ((), ("",), ("", "", "")) or (isinstance(value, str) and not value):
                continue
            elif field.name == "role":
                fields["role"] = value
            else:
                fields[field.name] = numbers.get(value, value) if isinstance(value, str) else value
        steps.append((type(node).__name__, fields))
    return steps, [t for t in read if t is not None and t.is_floating_point()]


@pytest.mark.parametrize("name", hf_models.MODELS)
def test_a_row_is_what_is_read(name, monkeypatch):
    model, batch = hf_models.build(name), hf_models.inputs_of(name)
    rows = blocks(convert(model), batch)
    revert(model)
    monkeypatch.setattr(
        sys.modules["fused_remat.convert"],
        "converted_class",
        lambda layer: traced_class(type(layer)),
    )
    reads = blocks(convert(model), batch)
    assert any(isinstance(module, TracedLayer) for module in model.modules())
    assert len(rows) == len(reads) == 2
    for row, read in zip(rows, reads, strict=True):
        (expected, its), (found, mine) = described(*row), described(*read)
        assert [kind for kind, _ in found] == [kind for kind, _ in expected]
        for (_, fields), (_, others) in zip(found, expected, strict=True):
            fields.pop("name"), others.pop("name")
            assert fields.keys() == others.keys()
            for key, value in fields.items():
                if isinstance(value, AttentionSpec):
                    assert value.scale == pytest.approx(others[key].scale, rel=1e-12)
                    assert dataclasses.replace(value, scale=others[key].scale) == others[key]
                else:
                    assert value == others[key], key
        assert len(mine) == len(its)
        assert all(a is b or torch.equal(a, b.to(a.dtype)) for a, b in zip(mine, its, strict=True))
