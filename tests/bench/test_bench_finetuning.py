"""Models with adapters keep at most what their own checkpointing keeps, in every family."""

import pytest
import torch

from bench.commands.model import memory
from bench.subjects.models import ADAPTERS, WAYS, Case

pytest.importorskip("peft")

FAMILIES = ("qwen3-512", "llama-512", "phi3-512", "gemma2-512", "glm4-512", "olmo2-512")


def gradients(forward, subject):
    subject.zero()
    forward(subject.x).backward()
    return torch.cat([t.grad.flatten() for t in subject.leaves().values()])


@pytest.mark.parametrize("adapter", ADAPTERS)
@pytest.mark.parametrize("name", FAMILIES)
def test_bytes_and_peak_are_at_most_those_of_own_checkpointing(name, adapter):
    if adapter in ("nf4", "int8"):
        pytest.importorskip("bitsandbytes")
    subject = Case(name, 2, 2, 32, "float32", 4, adapter, tiny=True).subject("cpu")
    found, grads = {}, {}
    for way in ("checkpoint", "full"):
        forward = WAYS[way].build(subject)
        grads[way] = gradients(forward, subject)  # the first call of ours traces the layers
        found[way] = memory(forward, subject, split=False)
    own, new = found["checkpoint"], found["full"]
    for key in ("kept_bytes", "step_peak_bytes"):
        assert new[key] <= own[key], (key, new[key] / own[key])
    # Sums in another order, of gradients whose terms cancel: each is off by a few roundings.
    error = (grads["full"] - grads["checkpoint"]).norm() / grads["checkpoint"].norm()
    assert error < 1e-5
