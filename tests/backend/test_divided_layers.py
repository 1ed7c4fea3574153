"""Divided layers on the triton backend: as one process's."""

import pytest
import torch
from places import PLACE
from quick_interpreter import quicken
from tensor_parallel_steps import Stack, causal, check, divided, encoder, given, options_of

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
    for sequence in (False, True) if kind == "causal" else (True,):
        model.zero_grad()
        # float32 sums in another order.
        check(model, divided(model, sequence), x, {"rtol": 1e-4, "atol": 1e-5}, **kwargs)
