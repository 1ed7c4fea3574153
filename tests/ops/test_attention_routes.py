"""Which kernels serve attention on CUDA, as far as that can be tested without a GPU."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch
from attention_calls import attention_call
from torch._subclasses.fake_tensor import FakeTensorMode

from fused_remat.execution.choose import choose
from fused_remat.steps import attention_library
from fused_remat.steps.attention import attention_fwd
from fused_remat.steps.attention_call import attention_key

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")


def route(monkeypatch, dtype=torch.bfloat16, heads=(4, 4), width=64, s=(64, 64), **options):
    """What the triton backend would run on an H200, for tensors without memory."""
    from fused_remat.triton import attention
    from fused_remat.triton.launch import Target

    monkeypatch.setattr(attention, "target_of", lambda device: Target("cuda", 90, 132))
    # What PyTorch would choose needs a GPU to ask.
    monkeypatch.setattr(attention_library, "kernel", lambda *_: "cudnn")
    with FakeTensorMode():
        q = torch.empty(2, heads[0], s[0], width, dtype=dtype, device="cuda")
        k = v = torch.empty(2, heads[1], s[1], width, dtype=dtype, device="cuda")
        made = {name: make() if callable(make) else make for name, make in options.items()}
        call = attention_call((2, *heads, *s, width), **{"scale": 0.125, **made})
        key = attention_key(q, v, call)
        return choose(attention_fwd, "triton", key).reason(q, k, v, call)


def fake(*shape, dtype=torch.bool):
    return lambda: torch.empty(shape, dtype=dtype, device="cuda")


LIBRARY = {"full": {}, "causal": {"right": 0}, "cross": {"s": (64, 80)}}
OWN = {
    "dropout": {"p": 0.1},
    "window": {"left": 8, "right": 0},
    "soft-cap": {"softcap": 30.0},
    "shared heads": {"heads": (4, 2)},
    "causal cross": {"s": (64, 80), "right": 0},
    "mask": {"mask": fake(64, 64)},
    "mask with gradient": {"mask": fake(64, 64, dtype=torch.float32), "mask_grad": True},
    "padding": {"padding": fake(2, 64)},
    "lengths": {"lengths": fake(2, dtype=torch.int32)},
    "packed": {"cu_q": fake(3, dtype=torch.int32), "cu_k": fake(3, dtype=torch.int32)},
    "odd width": {"width": 20},
}
NEITHER = {
    "wide": {"width": 320},
    "negative scale": {"scale": -1.0, "left": 3},
    "float32": {"dtype": torch.float32, "p": 0.1},
}


@pytest.mark.parametrize("name", LIBRARY)
def test_plain_calls_are_atens(name, monkeypatch):
    assert route(monkeypatch, **LIBRARY[name]) == "ATen's cudnn kernel"


@pytest.mark.parametrize("name", OWN)
def test_other_calls_are_our_kernels_and_say_why(name, monkeypatch):
    said = route(monkeypatch, **OWN[name])
    assert said.startswith("kernel attention_fwd; attention_dkdv_bwd and attention_dq_bwd: ")


@pytest.mark.parametrize("name", NEITHER)
def test_what_neither_serves_falls_back_and_says_why(name, monkeypatch):
    said = route(monkeypatch, **NEITHER[name])
    assert said.startswith("blocks of query rows: ") and "not triton: " in said


def test_the_library_is_asked_for_nothing_else(monkeypatch):
    """ATen's choice is queried only where its kernels can serve, since a query makes tensors."""
    seen = SimpleNamespace(count=0)

    def count(*_):
        seen.count += 1
        return None

    monkeypatch.setattr("fused_remat.steps.attention_library.why_not", count)
    route(monkeypatch, **OWN["lengths"])
    route(monkeypatch, **OWN["mask"])
    assert seen.count == 0
