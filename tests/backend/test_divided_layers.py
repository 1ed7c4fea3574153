"""Divided layers on the triton backend: as one process's."""

import copy

import pytest
import torch
from places import PLACE
from quick_interpreter import quicken
from tensor_parallel_steps import Stack, causal, encoder, given, mesh_of, options_of, step
from torch.distributed.tensor.parallel import parallelize_module

from fused_remat.parallel import pack_attention, tensor_parallel_plan

pytestmark = pytest.mark.skipif(PLACE != "interpreter", reason="needs TRITON_INTERPRET=1")
WIDTH = 32


@pytest.mark.parametrize("kind", ["causal", "encoder"])
def test_as_one_process(two_processes, kind):
    two_processes.run(as_one_process, kind)


def as_one_process(kind):
    quicken()
    make = causal if kind == "causal" else encoder
    options = {"backend": "triton"} if kind == "causal" else {"backend": "triton", "dropout": 0.0}
    torch.manual_seed(0)
    model = Stack([make("lean", WIDTH, **options)], WIDTH)
    x = given(1, (1, 6, WIDTH)).float()
    kwargs = options_of(kind, False, WIDTH)
    kwargs = {name: tuple(t.float() for t in tables) for name, tables in kwargs.items()}
    expected = step(model, x, **kwargs)
    for sequence in (False, True) if kind == "causal" else (True,):
        other = copy.deepcopy(model)
        other.zero_grad()
        parallelize_module(other, mesh_of(), tensor_parallel_plan(other, sequence=sequence))
        found = step(other, x, **kwargs)
        # float32 sums in another order.
        close = {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(found[0], expected[0], **close)
        torch.testing.assert_close(found[1], expected[1], **close)
        for name, grad in pack_attention(found[2]).items():
            torch.testing.assert_close(grad, expected[2][name], **close)
