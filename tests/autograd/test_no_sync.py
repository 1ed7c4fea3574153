"""Nothing waits for the device, as CUDA graphs need, shown on tensors without memory.

A meta tensor has no values, so that whatever asked for one (`item`, `nonzero`, a mask's largest)
would raise; `Observer` refuses copies between devices besides, and notes what draws random numbers.
Layers and ops take the same way there as on a GPU: the eager backend's, or the triton backend's,
whose launches are built and not run. What is left to a GPU is in tests/gpu/test_gpu_cuda_graphs.py.
"""

import functools

import pytest
import torch
import torch.nn.functional as F
from attention_calls import attention_call
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fused_remat import FusedRematLayer, ops
from fused_remat.execution import choose
from fused_remat.ops import activation
from fused_remat.ops.checks import seed_tensor
from fused_remat.steps import attention_library
from fused_remat.steps.attention import attention_fwd

B, S, D, H = 2, 40, 32, 4
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
        for name_of in triton.__all__:
            if hasattr(module := getattr(triton, name_of), "target_of"):
                monkeypatch.setattr(module, "target_of", lambda device: target)
        monkeypatch.setitem(choose.BACKENDS, "triton", choose.Backend)
        launched = []
        monkeypatch.setattr(launch.Launch, "run", lambda self: launched.append(self))
        choose.forget()
        yield name
        choose.forget()
        assert launched
    else:
        yield name


def values(*shape, dtype=torch.bfloat16, grad=True):
    return torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=grad)


def plain(*shape, dtype=torch.bfloat16):
    return values(*shape, dtype=dtype, grad=False)


def make(policy, backend, norm_first=True, dtype=torch.bfloat16, act="gelu"):
    return FusedRematLayer(
        D, H, 4 * D, 0.1, act, batch_first=True, norm_first=norm_first, device=DEVICE,
        dtype=dtype, policy=policy, backend=backend,
    )  # fmt: skip


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


def test_what_would_be_refused():
    x = torch.ones(3, device=DEVICE)
    for refused in (
        lambda: x.sum().item(),
        lambda: bool(x.any()),
        lambda: x.tolist(),
        lambda: x.nonzero(),
        lambda: x.cpu(),
        lambda: torch.equal(x, x),
        lambda: x.copy_(torch.ones(3)),
        lambda: torch.ones(3).to(DEVICE),
    ):
        with Observer(), pytest.raises((AssertionError, RuntimeError, NotImplementedError)):
            refused()
    # On meta this is not seen, on fake tensors it is.
    with FakeTensorMode(), Observer(), pytest.raises(AssertionError, match="between devices"):
        torch.tensor([1.0], device="cuda")


MASKS = {
    "none": dict,
    "causal": lambda: {"src_mask": plain(S, S), "is_causal": True},
    "bool": lambda: {
        "src_mask": plain(S, S, dtype=torch.bool),
        "src_key_padding_mask": plain(B, S, dtype=torch.bool),
    },
    "learned": lambda: {"src_mask": values(B * H, S, S), "src_key_padding_mask": plain(B, S)},
}


@pytest.mark.composes("CUDA graphs", "no wait for the device and no copy in any step of a layer")
@pytest.mark.filterwarnings("error::fused_remat.FusedRematWarning")
@pytest.mark.parametrize("masks", MASKS)
@pytest.mark.parametrize(
    "policy, norm_first",
    [("full", True), ("lean", False), ("balanced", True), ("fast", False), ("none", True)],
)
def test_layers(policy, norm_first, masks, backend):
    layer = make(policy, backend, norm_first)
    x, given = values(B, S, D), MASKS[masks]()
    watched(lambda: layer(x, **given), draws=1)


@pytest.mark.parametrize("policy", ["full", "none"])
def test_layers_of_other_kinds(policy, backend):
    x = values(B, S, D)
    unknown = make(policy, backend, act=F.softsign)  # which is tried on one token at every call
    assert unknown.why_not_fused(x) is None
    watched(lambda: unknown(x), draws=1)
    layer, x = make(policy, backend, False, torch.float32), values(B, S, D, dtype=torch.float32)
    watched(lambda: layer(x), draws=1)
    with torch.no_grad(), Observer() as watch:
        nn.Sequential(layer, layer)(plain(B, S, D, dtype=torch.float32))
    assert len(watch.drawn) == 2
    for module in (layer.self_attn, layer.dropout, layer.dropout1, layer.dropout2):
        module.eval()
    watched(lambda: layer(x), draws=0)


def heads(count):
    return values(B, count, S, D // H)


ATTENTION = {
    "causal": lambda: {"is_causal": True},
    "window": lambda: {"window": (8, 0)},
    "softcap": lambda: {"softcap": 20.0},
    "bool": lambda: {"attn_mask": plain(B, 1, S, S, dtype=torch.bool)},
    "learned": lambda: {"attn_mask": values(H, S, S)},
    "padding": lambda: {"key_padding_mask": plain(B, S, dtype=torch.bool)},
    "lengths": lambda: {"key_lengths": plain(B, dtype=torch.int32)},
}


@pytest.mark.parametrize("dropout_p, policy", [(0.0, "full"), (0.1, "lean")])
def test_attention(dropout_p, policy, backend):
    how = {"dropout_p": dropout_p, "policy": policy, "backend": backend}
    for options in ATTENTION.values():
        given = options()
        q, k, v = heads(H), heads(1), heads(1)
        watched(functools.partial(ops.attention, q, k, v, **given, **how), int(dropout_p > 0))


@pytest.mark.composes(
    "CUDA graphs",
    "no wait for the device and no copy in any op",
    limits="packed sequences only on the triton backend",
)
@pytest.mark.parametrize("policy", ["full", "none"])
def test_ops(policy, backend):
    x, norm = values(B, S, D), values(D)
    up, gate, down = values(4 * D, D), values(4 * D, D), values(D, 4 * D)
    qkv, proj = values(3 * D, D), values(D, D)
    tables = plain(S, D // H // 2), plain(S, D // H // 2)
    weights = {"qkv": qkv, "proj": proj, "fc1": up, "fc2": down, "norm1": norm, "norm2": norm}
    weights = {f"{name}.weight": w for name, w in weights.items()}
    how = {"policy": policy, "backend": backend}
    drop = {"dropout_p": 0.1, **how}
    p = {"dropout_p": 0.1, "residual_dropout_p": 0.2, **how}
    calls = (
        (0, lambda: ops.layer_norm(x, norm, norm, backend=backend)),
        (0, lambda: ops.rms_norm(x, norm, backend=backend)),
        (1, lambda: ops.dropout_add(x, x, 0.1, backend=backend)),
        (1, lambda: ops.mlp(x, up, None, down, None, **drop)),
        (1, lambda: ops.gated_mlp(x, gate, up, down, **drop)),
        (0, lambda: ops.rotary(values(B, S, 3 * D), *tables, H, **how)),
        (1, lambda: ops.attention_block(x, norm, None, qkv, None, proj, None, H, rope=tables, **p)),
        (1, lambda: ops.mlp_block(x, norm, norm, up, None, down, None, gate_weight=gate, **p)),
        (1, lambda: ops.encoder_block(x, weights, H, norm_first=True, **drop)),
    )
    for draws, call in calls:
        watched(call, draws)


@pytest.mark.parametrize("seed", [7, -(2**63), 2**63 - 1])
def test_a_seed_that_is_a_number(seed):
    """It is filled in on the device, not copied there."""
    with FakeTensorMode(), Observer() as watch:
        seed_tensor(seed, torch.device("cuda"))
    assert not watch.drawn
    assert seed_tensor(seed, torch.device("cpu")).item() == seed


def test_an_activation_is_tried_while_a_graph_is_captured(monkeypatch):
    """When the generator's state cannot be read, the operators say whether they draw."""
    monkeypatch.setattr(activation, "_generator", lambda device: None)
    x = torch.ones(1, 3)
    assert "draws random numbers: it calls" in activation.prepare(lambda t: F.dropout(t, 0.5), x)
    why = activation.prepare(lambda t: t + torch.rand_like(t), x)
    assert why == "draws random numbers: it calls aten.rand_like.default"
    assert activation.prepare(F.softsign, x).captured == {}


# --- packed sequences: one launch, but on the eager backend a loop over values


@pytest.mark.parametrize("policy", ["full", "none"])
def test_packed_sequences(policy, backend):
    q, k, v = (values(1, H, S, D // H) for _ in "qkv")
    how = {"cu_seqlens_q": plain(4, dtype=torch.int32), "policy": policy, "backend": backend}
    if backend == "eager":
        with pytest.raises((RuntimeError, NotImplementedError)), Observer():
            ops.attention(q, k, v, **how)
    else:
        watched(lambda: ops.attention(q, k, v, **how), 0)


# --- the eager backend on CUDA: ATen's kernels, on fake tensors of that device


@pytest.mark.parametrize("name", ["flash", "cudnn", "efficient"])
def test_atens_kernels_on_cuda(name, monkeypatch):
    """Which kernel is chosen on the host; a GPU would say which."""
    monkeypatch.setattr(attention_library, "kernel", lambda *_: name)
    with FakeTensorMode(), Observer():

        def empty(*shape, dtype=torch.bfloat16):
            return torch.empty(shape, dtype=dtype, device="cuda")

        heads = [empty(B, H, S, 64) for _ in range(3)]
        masks = [{"right": 0}]
        if name == "efficient":
            masks = [{"mask": empty(S, S), "true_means": "exclude"}, {"mask": empty(B, 1, S, S)}]
        for given in masks:
            call = attention_call((B, H, H, S, S, 64), **given)
            assert attention_library.why_not_call(heads[0], heads[2], call) is None
            attention_fwd(*heads, call)
            mask = call.mask
            attn, lse = attention_library.cuda_forward(*heads, call, mask)
            attention_library.cuda_backward(attn, *heads, attn, lse, call, mask)
