"""A kernel that cannot be compiled or loaded is replaced by its operation, with one warning."""

import warnings

import pytest
import torch
from places import DEVICE, INTERPRETED, normal
from triton.runtime.errors import OutOfResources, PTXASError

from fused_remat import ops
from fused_remat.execution import choose
from fused_remat.spec import AttentionSpec, NormSpec, RotarySpec
from fused_remat.steps.norm import norm_bwd, norm_fwd
from fused_remat.steps.operations import Fault, FusedRematWarning
from fused_remat.steps.rotary import RotaryTables, rotary_bwd
from fused_remat.triton import launch, tables
from fused_remat.triton.launch import Launch

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels are not compiled"),
    pytest.mark.usefixtures("launches"),
]
F32, BF16 = torch.float32, torch.bfloat16
NO_ROOM = OutOfResources(300_000, 232_448, "shared memory")


@pytest.fixture
def launched(described, monkeypatch):
    """Names of the kernels that ran: they are not frozen."""
    monkeypatch.setattr(launch, "_KNOWN", False)
    return described


@pytest.fixture
def fails(monkeypatch):
    """A function: from now on the compiler raises an error for a kernel."""
    real = Launch._run

    def install(name, error=NO_ROOM):
        def run(self, warmup):
            if warmup and self.kernel.__name__ == name:
                raise error
            return real(self, warmup)

        monkeypatch.setattr(Launch, "_run", run)

    return install


def served(function):
    return choose.ops_for("triton", normal(BF16, 1, 1))[function]


def recorded(call):
    """What a call returns, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return result, [str(w.message) for w in caught if w.category is FusedRematWarning]


def close(got, expected):
    for one, other in zip(got, expected, strict=True):
        # Other values are rounded to 16 bits.
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def test_the_operation_serves_from_then_on_and_one_warning_says_why(fails, launched):
    fails("norm_fwd_kernel")
    args = NormSpec(), normal(F32, 5, 48), None, None
    got, said = recorded(lambda: served(norm_fwd)(*args))
    close(got, norm_fwd(*args))
    (text,) = said
    assert "norm_fwd runs ATen's native_layer_norm; not triton: kernel norm_fwd_kernel on" in text
    assert "out of resource: shared memory" in text
    assert recorded(lambda: served(norm_fwd)(*args))[1] == [], "one warning"
    reason = choose.choose(norm_fwd, "triton", ("layer_norm", F32, DEVICE, 48)).refused
    assert "norm_fwd_kernel" in reason and text.endswith(reason.removeprefix("; "))
    assert not launched
    recorded(lambda: served(norm_bwd)(args[0], args[1], args[1], got[1:], None, (True,) * 3))
    assert launched, "other operations keep their kernels"


def test_nothing_is_launched_unless_everything_can_be(fails, launched):
    """dx is written over dy by the first kernel, and the second cannot be compiled."""
    fails("column_sum_kernel")
    spec = AttentionSpec(
        num_heads=2, num_kv_heads=1, head_dim=16, scale=1.0, rotary=RotarySpec(),
        head_norm=NormSpec(kind="rms_norm", eps=1e-6),
    )  # fmt: skip
    tables_and_weights = *normal(F32, 2, 3, 8), *normal(F32, 2, 16)
    call = RotaryTables(spec, *tables_and_weights, 0, 3)
    x, dy = normal(F32, 3, 64), normal(F32, 3, 64)
    expected = rotary_bwd(dy.clone(), x, call, (True,) * 3, False)
    got, said = recorded(lambda: served(rotary_bwd)(dy, x, call, (True,) * 3, True))
    close(got, expected)
    assert len(said) == 1 and not launched


def ops_mlp(backend):
    x, up, down = normal(BF16, 40, 32), normal(BF16, 64, 32), normal(BF16, 32, 64)
    given = [t.requires_grad_() for t in (x, up, down)]
    y = ops.mlp(x, up, None, down, None, "gelu", policy="full", backend=backend)
    return y, *torch.autograd.grad(y, given, torch.ones_like(y))


def ops_attention(backend, **options):
    q, k, v = (normal(BF16, 1, heads, 40, 16).requires_grad_() for heads in (2, 1, 1))
    y = ops.attention(q, k, v, softcap=5.0, backend=backend, **options)
    return y, *torch.autograd.grad(y, (q, k, v), torch.ones_like(y))


def ops_far_mask(backend):
    """Kernels shift the scores of a row whose mask is far from 0, and their lse with them."""
    mask = torch.zeros(40, 40, device=DEVICE)
    mask[3], mask[5] = -1e4, -300.0
    return ops_attention(backend, attn_mask=mask)


def check_block(block):
    torch.manual_seed(1)
    expected = block("eager")
    torch.manual_seed(1)
    got, said = recorded(lambda: block("triton"))
    for one, other in zip(got, expected, strict=True):
        error = (one.float() - other.float()).norm() / other.float().norm()
        assert error < 2e-2  # other values are rounded to 16 bits
    return said


@pytest.mark.parametrize(
    ("block", "name"),
    [
        (ops_mlp, "act_fwd_kernel"),
        (ops_mlp, "act_bwd_kernel"),
        (ops_attention, "attention_fwd_kernel"),
        (ops_attention, "attention_dkdv_bwd_kernel"),
        (ops_far_mask, "attention_fwd_kernel"),
        (ops_far_mask, "attention_dkdv_bwd_kernel"),
    ],
)
def test_forward_and_backward_agree_whichever_faults(fails, monkeypatch, block, name):
    """What the other direction keeps or reads is the same in kernels and in operations."""
    monkeypatch.setattr(tables, "MLP_IN_KERNELS", frozenset())
    fails(name)
    said = check_block(block)
    assert len(said) == 1 and name in said[0]
    assert check_block(block) == []


@pytest.mark.parametrize(
    "error",
    [
        PTXASError("ptxas died"),
        RuntimeError("PassManager::run failed"),
        RuntimeError("Triton Error [CUDA]: device kernel image is invalid"),
        FileNotFoundError("ptxas"),
    ],
    ids=lambda error: str(error),
)
def test_faults_of_compilers_and_of_loading_are_survived(fails, error):
    fails("norm_fwd_kernel", error)
    args = NormSpec(), normal(F32, 5, 48), None, None
    got, said = recorded(lambda: served(norm_fwd)(*args))
    close(got, norm_fwd(*args))
    assert len(said) == 1


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
    ],
    ids=lambda error: str(error),
)
def test_what_is_no_fault_of_a_kernel_is_raised(fails, error):
    fails("norm_fwd_kernel", error)
    with pytest.raises(type(error)) as raised:
        served(norm_fwd)(NormSpec(), normal(F32, 5, 48), None, None)
    assert raised.value is error and not isinstance(error, Fault)
    assert not choose.FAULTS
