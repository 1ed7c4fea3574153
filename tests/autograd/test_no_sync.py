"""Nothing waits for the device, as CUDA graphs need, shown on tensors without memory.

A meta tensor has no values, so that whatever asked for one (`item`, `nonzero`, a mask's largest)
would raise; `Observer` refuses copies between devices besides, and notes what draws random numbers.
Layers and ops take the same way there as on a GPU: the eager backend's, or the triton backend's,
whose launches are built and not run. What is left to a GPU is in tests/gpu/test_gpu_cuda_graphs.py.
"""

import pytest
import torch
from op_cases import CASES
from reference import EXACT_PRESETS
from small_layers import KINDS, B, D, H, S, layers_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from fused_remat import ops
from fused_remat.execution import choose

DEVICE = "meta"
#: The triton backend with the tables of an A100 and of an H100.
BACKENDS = ("eager", "triton sm_80", "triton sm_90")
_COPIES = ("_to_copy", "copy_", "copy", "_copy_from", "set_", "lift_fresh")
_VALUES = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select")


class Observer(TorchDispatchMode):
    """Raises for what would wait for a device; `drawn` are the operators that drew at random."""

    def __init__(self):
        super().__init__()
        self.drawn = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        tensors = [t for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor)]
        devices = {t.device.type for t in tensors}
        if devices != {"cpu"} and name in _VALUES:
            raise AssertionError(f"{name} reads a value from the device")
        if len(devices) > 1 and name in _COPIES:
            raise AssertionError(f"{name} copies between devices: {devices}")
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.drawn.append((name, devices, made))
        return made


class Driver:
    """Triton's, and its active one, as far as launches that are not frozen ask it."""

    get_current_device = staticmethod(lambda: 0)


Driver.active = Driver


@pytest.fixture(params=BACKENDS)
def backend(request, monkeypatch):
    """By name; the triton backend as on a GPU, all but the launches themselves."""
    name, *arch = request.param.split(" sm_")
    if arch:
        pytest.importorskip("triton", reason="Triton is not installed")
        from fused_remat import triton
        from fused_remat.triton import launch

        if launch.INTERPRETED:
            pytest.skip("Triton interprets kernels in this process")
        target = launch.Target("cuda", int(arch[0]), 132)
        for module in vars(triton).values():
            if hasattr(module, "target_of"):
                monkeypatch.setattr(module, "target_of", lambda device: target)
        monkeypatch.setattr(launch, "_DRIVER", Driver)
        monkeypatch.setattr(launch.Launch, "compiled", lambda self: None)
        monkeypatch.setitem(choose.BACKENDS, "triton", choose.Backend)
        launched = []
        monkeypatch.setattr(launch.Launch, "run", lambda self: launched.append(self))
        choose.forget()
        yield name
        choose.forget()
        assert launched
    else:
        yield name


def on_device(value, dtype=torch.bfloat16):
    """The tensors of `value` there."""

    def moved(t):
        there = t.detach().to(DEVICE, dtype if t.is_floating_point() else t.dtype)
        return there.requires_grad_(t.requires_grad)

    return tree_map_only(torch.Tensor, moved, value)


def watched(function, draws):
    """Forward and backward of `function()`; `draws` seeds are drawn, in forward, and nothing else.

    A seed is one int64 number, drawn on the device by `random_` on torch's default generator: what
    a CUDA graph draws anew at every replay.
    """
    with Observer() as watch:
        y = function()
        for name, devices, seed in watch.drawn:
            assert name == "random_" and devices == {DEVICE}
            assert seed.shape == () and seed.dtype == torch.int64
        assert len(watch.drawn) == draws
        y.backward(torch.empty_like(y))
    assert len(watch.drawn) == draws, "backward drew random numbers"


MASKS = {
    "causal": {"src_mask": torch.ones(S, S), "is_causal": True},
    "learned": {
        "src_mask": torch.ones(B * H, S, S, requires_grad=True),
        "src_key_padding_mask": torch.ones(B, S),
    },
}


@pytest.mark.composes("CUDA graphs", "no wait for the device and no copy in any step of a layer")
@pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("policy", EXACT_PRESETS)
@pytest.mark.parametrize(
    "kind, masks", [*((kind, None) for kind in KINDS), *(("pre-norm", name) for name in MASKS)]
)
def test_layers(policy, kind, masks, backend):
    """Of an activation of one's own, too, which is tried on one token at every call."""
    options = {"norm_first": False} if masks == "learned" else {}
    (layer,), *given = layers_of(kind, policy=policy, **options)
    layer.to(DEVICE, torch.bfloat16).backend = backend
    x, kwargs, _ = on_device(given)
    kwargs |= on_device(MASKS.get(masks, {}))
    assert layer.why_not_fused(x, **kwargs) is None
    watched(lambda: layer(x, **kwargs), draws=1)


#: Whose cases make tables and lengths on the CPU (layers have those); packed; without a kernel.
ELSEWHERE = {
    "attention_lengths", "qk_norm_attention_block", "causal_block", "causal_block_sandwich",
    "attention_packed", "attention_block_packed", "mlp_custom",
}  # fmt: skip


@pytest.mark.composes(
    "CUDA graphs",
    "no wait for the device and no copy in any op",
    limits="packed sequences and experts only on the triton backend",
)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ELSEWHERE])
@pytest.mark.parametrize("policy, p", [("full", 0.0), ("none", 0.1)])
def test_ops(policy, p, name, backend):
    """Of experts with the kernels: the loop of the eager backend reads how many tokens each has."""
    case, how = CASES[name], {"policy": policy, "backend": backend}
    tensors = on_device(case.tensors())
    if name.startswith("moe") and backend == "eager":
        with pytest.raises((AssertionError, NotImplementedError)), Observer():
            case.op(tensors, p, **how)
        return
    watched(lambda: case.op(tensors, p, **how), draws=int(p > 0 and case.dropout))


ATTENTION = {
    "causal window": {"is_causal": True, "window": (2, 0)},
    "lengths": {"key_lengths": torch.full((B,), S, dtype=torch.int32)},
    "packed": {"cu_seqlens_q": torch.zeros(4, dtype=torch.int32)},
}


@pytest.mark.parametrize("policy", ["full", "none"])
@pytest.mark.parametrize("name", ATTENTION)
def test_attention(name, policy, backend):
    """Of packed sequences one launch, but on the eager backend a loop over values."""
    batch = 1 if name == "packed" else B
    q, k, v = on_device([torch.zeros(batch, H, S, D // H, requires_grad=True) for _ in "qkv"])
    how = {**on_device(ATTENTION[name]), "policy": policy, "backend": backend}
    if (name, backend) == ("packed", "eager"):
        with pytest.raises((RuntimeError, NotImplementedError)), Observer():
            ops.attention(q, k, v, **how)
    else:
        watched(lambda: ops.attention(q, k, v, **how), 0)
