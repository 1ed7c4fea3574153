"""The driver as the library meets it: which backend runs tensors on a CPU."""

import pytest
import torch
from places import EXECUTED, INTERPRETED, ON_GPU

from fused_remat.execution import choose
from fused_remat.triton.launch import Target, target_of
from fused_remat.triton.pointwise import activation_fwd_triton

from .driver import GPUS, installed

CPU = torch.device("cpu")


@pytest.fixture
def anew():
    choose.forget()
    yield
    choose.forget()


@pytest.mark.skipif(INTERPRETED or EXECUTED > 0, reason="there is a driver, or none is asked")
@pytest.mark.usefixtures("anew")
def test_kernels_serve_the_tensors_of_the_active_driver():
    x = torch.ones(2, 3)
    said = "kernels run on CUDA devices, and the tensors are on cpu"
    assert choose.unsupported_reason("triton", CPU, x.dtype) == said
    if not ON_GPU:
        with pytest.raises(RuntimeError, match=r"Triton kernels run on .* got cpu"):
            target_of(CPU)
    with installed(90) as driver:
        assert target_of(CPU) == Target("cuda", 90, GPUS[90][0])
        assert choose.ops_for("triton", x).name == "triton"
        assert choose.ops_for("auto", x).name == "eager"
        assert not driver.launches
    assert choose.unsupported_reason("triton", CPU, x.dtype) == said


@pytest.mark.skipif(INTERPRETED or EXECUTED > 0, reason="there is a driver, or none is asked")
def test_a_launch_counts_its_sectors_and_instructions():
    """silu(gate) * up of 4 x 1024 in 16 bits: each matrix is read or written once, as sectors."""
    gate, up = torch.randn(2, 4, 1024, dtype=torch.bfloat16).unbind()
    with installed(80, count=True) as driver:
        activation_fwd_triton("silu", gate, up, None)
    (launch,) = driver.launches
    assert launch.counts["load sectors"] == 2 * 4 * 1024 * 2 / 32
    assert launch.counts["store sectors"] == launch.counts["load sectors"] / 2
    assert launch.counts["warp instructions"] == sum(launch.outcome.opcodes.values()) > 0
