"""Operations: registering implementations, choosing one, and what `explain` prints of it."""

import dataclasses

import pytest
import torch
from attention_calls import attention_call
from torch import nn

from fused_remat import explain, ops
from fused_remat.execution import choose
from fused_remat.spec import NormSpec
from fused_remat.steps import attention_aten
from fused_remat.steps.linear import bias_grad
from fused_remat.steps.norm import norm_fwd
from fused_remat.steps.operations import OPERATIONS, faster


@pytest.fixture
def mine(monkeypatch):
    """The calls of a backend "mine" that implements RMSNorm."""
    calls = []

    def unsupported_reason(key):
        return None if key[0] == "rms_norm" else f"no {key[0]}"

    def my_norm(spec, x, weight, bias, out=None, stats=None):
        calls.append(spec)
        return norm_fwd(spec, x, weight, bias, out, stats)

    monkeypatch.setitem(choose.BACKENDS, "mine", choose.Backend)
    faster(norm_fwd, "mine", unsupported_reason=unsupported_reason, description="my norm")(my_norm)
    choose.forget()
    yield calls
    del OPERATIONS[norm_fwd].faster["mine"]
    choose.forget()


def test_one_operation_of_one_backend(mine):
    table, x = choose.ops_for("mine", torch.ones(1)), torch.randn(3, 8)
    assert table[bias_grad] is bias_grad and table[norm_fwd] is not norm_fwd
    for kind, served in (("layer_norm", 0), ("rms_norm", 1), ("rms_norm", 2)):
        spec = NormSpec(kind=kind)
        found, exact = table[norm_fwd](spec, x, None, None), norm_fwd(spec, x, None, None)
        assert len(mine) == served
        assert all(torch.equal(a, b) for a, b in zip(found, exact, strict=True))


def test_a_layer_takes_it_and_explain_says_why(mine):
    class Norms(nn.Module):
        def forward(self, x):
            y = ops.rms_norm(x, torch.ones(8), backend="mine")
            return ops.layer_norm(y, backend="mine")

    first, second = explain(Norms(), torch.randn(3, 8, requires_grad=True))
    assert dict(first.forward)["output"] == "my norm" and mine
    said = "ATen's native_layer_norm; not mine: no layer_norm"
    assert dict(second.forward)["output"] == said


def test_a_choice_is_made_once_for_a_key(mine, monkeypatch):
    asked = []
    row = OPERATIONS[norm_fwd].faster["mine"]
    counted = dataclasses.replace(row, unsupported_reason=lambda key: asked.append(key))
    monkeypatch.setitem(OPERATIONS[norm_fwd].faster, "mine", counted)
    norm, spec = choose.ops_for("mine", torch.ones(1))[norm_fwd], NormSpec()
    for shape in ((3, 8), (5, 8), (3, 4)):
        norm(spec, torch.ones(shape), None, None)
    assert [key[-1] for key in asked] == [8, 4]


def test_parameters_that_are_not_the_operations():
    def other(grad):
        return grad.sum(0)

    expected = r"other\(grad\) cannot implement bias_grad: its parameters must be \(dy\)"
    with pytest.raises(TypeError, match=expected):
        faster(bias_grad, "mine", description="")(other)


def test_an_option_that_library_kernels_do_not_know_is_refused():
    """An option that is new in `AttentionSpec` must not be ignored."""
    call = attention_call((1, 2, 2, 4, 4, 8))
    q = torch.randn(1, 2, 4, 8)
    assert attention_aten.unsupported_call_reason(q, q, call) is None
    assert call.spec.options == ()
    spec = dataclasses.replace(call.spec)
    spec.__dict__["options"] = ("sinks",)
    call = dataclasses.replace(call, spec=spec)
    assert attention_aten.unsupported_call_reason(q, q, call) == "they have no sinks"


def test_an_operator_with_other_arguments_is_not_called(monkeypatch):
    q = torch.randn(1, 2, 4, 8)
    monkeypatch.setattr(attention_aten, "has", lambda kernel: False)
    found = attention_aten.unsupported_call_reason(q, q, attention_call((1, 2, 2, 4, 4, 8)))
    assert found == "this version of PyTorch has another operator"
