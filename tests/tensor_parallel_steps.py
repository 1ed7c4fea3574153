"""Models that the tests of tensor parallel divide, and a step of one."""

import copy
import warnings

import torch
from reference import randomize
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing import assert_close

from fused_remat import FusedRematCausalLayer, FusedRematLayer, FusedRematWarning
from fused_remat.parallel import pack_attention, tensor_parallel_plan

# Sums over ranks are in another order; float64 stays far within this.
CLOSE = {"rtol": 1e-9, "atol": 1e-11}
B, S, D, H = 2, 6, 8, 4


def encoder(policy="full", width=D, **kwargs):
    return FusedRematLayer(width, H, width + 4, batch_first=True, policy=policy, **kwargs)


def causal(policy="full", width=D, **kwargs):
    return FusedRematCausalLayer(
        width, H, width + 4, kv_heads=2, bias=True, policy=policy, **kwargs
    )


KINDS = {
    "encoder pre-norm": (encoder, {"dropout": 0.0, "norm_first": True}),
    "encoder post-norm": (encoder, {"dropout": 0.0, "norm_first": False}),
    "encoder without biases": (encoder, {"dropout": 0.0, "bias": False}),
    "causal": (causal, {}),
    "causal, heads normed": (causal, {"qk_norm": True}),
    "causal, post": (causal, {"placement": "post", "norm": "layer_norm", "gated": False}),
    "causal, sandwich": (causal, {"placement": "sandwich", "window": 2}),
}


class Stack(nn.Module):
    """Layers between two linear ones, as an embedding and a head are."""

    def __init__(self, layers, width=D):
        super().__init__()
        self.before = nn.Linear(width, width)
        self.layers = nn.ModuleList(layers)
        self.after = nn.Linear(width, width)

    def forward(self, x, **kwargs):
        x = self.before(x)
        for layer in self.layers:
            x = layer(x, **kwargs)
        return self.after(x)


def stack(kind, policy="full", count=2, width=D):
    torch.manual_seed(0)
    make, kwargs = KINDS[kind]
    layers = [make(policy, width, **kwargs) for _ in range(count)]
    model = Stack(layers, width).double()
    randomize(model)
    return model


def mesh_of(dims=("tensor",), shape=(2,)):
    return init_device_mesh("cpu", shape, mesh_dim_names=dims)


def divided(model, sequence=False):
    """Return a copy of the model by its plan, among the ranks of one group."""
    other = copy.deepcopy(model)
    return parallelize_module(other, mesh_of(), tensor_parallel_plan(other, sequence=sequence))


def whole(t):
    """Return a sharded tensor gathered; others as they are."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def given(seed=1, shape=(B, S, D)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def step(model, x, **kwargs):
    x = x.clone().requires_grad_()
    y = model(x, **kwargs)
    (y * given(2, y.shape)).sum().backward()
    return y.detach(), x.grad, {name: whole(p.grad) for name, p in model.named_parameters()}


def check(model, other, x, close=CLOSE, **kwargs):
    """One step of both, which must agree, without leaving the fused path."""
    expected = step(model, x, **kwargs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusedRematWarning)
        found = step(other, x, **kwargs)
    assert_close([*found[:2], pack_attention(found[2])], [*expected], **close)


def options_of(kind, masks, width=D):
    """Arguments of forward: tables and masks."""
    made = {}
    if "causal" in kind:
        angles = torch.outer(torch.arange(S), 10.0 ** -torch.arange(width // H // 2)).double()
        made["rope"] = (angles.cos(), angles.sin())
    if masks:
        padding = torch.zeros(B, S, dtype=torch.bool)
        padding[0, -2:] = True
        name = "key_padding_mask" if "causal" in kind else "src_key_padding_mask"
        made[name] = padding
    return made
