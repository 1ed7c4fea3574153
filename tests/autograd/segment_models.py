"""What the tests of segments share: stacks of layers with places in segments, and their steps."""

import contextlib
import copy
import warnings

import pytest
import torch
from reference import randomize
from same_bits import assert_same_bits, step
from small_layers import B, D, F, H, S
from torch import nn

from fused_remat import FusedRematLayer, FusedRematWarning, Policy

ALL = ("first", "inner", "inner", "inner")
PLACES = {
    "all": ALL,
    "pairs": ("first", "inner", "first", "inner"),
    "gaps": ("first", "inner", "full", "inner"),
    "without a first": ("inner",) * 4,
}
X = torch.randn(B, S, D, generator=torch.Generator().manual_seed(0))


def warned(reason=""):
    """What is inside warns that a layer keeps its input, for that reason."""
    return pytest.warns(FusedRematWarning, match=f"outside its segment, and keeps its.*{reason}")


@contextlib.contextmanager
def unheeded():
    """A layer may keep its input."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusedRematWarning)
        yield


def place(layers, places=ALL, save=()):
    """Policies of `layers`: places in segments, or presets, or policies."""
    for layer, where in zip(layers, places, strict=True):
        in_segment = where in ("first", "inner")
        layer.policy = Policy(save=save, segment=where) if in_segment else where
    return layers


def stack(places=ALL, save=(), mixed=False, **kwargs):
    """`mixed`: pre-norm, post-norm, and an activation without a row that has a parameter."""
    torch.manual_seed(0)
    options = {"dropout": 0.1, "batch_first": True, "norm_first": True, **kwargs}
    kinds = ({}, {"norm_first": False}, {"activation": nn.PReLU(init=0.2)})
    made = [
        FusedRematLayer(D, H, F, **options | (kinds[i % 3] if mixed else {}))
        for i in range(len(places))
    ]
    return place(randomize(nn.Sequential(*made)), places, save)


def full(model):
    """The same with every layer at policy "full"."""
    other = copy.deepcopy(model)
    for layer in other.modules():
        if hasattr(layer, "policy"):
            layer.policy = "full"
    return other


def grads_of(y, leaves):
    return torch.autograd.grad(y.sin().sum(), leaves, allow_unused=True)


def assert_as_full(model, way=lambda model: model, x=X):
    """The step of `way(model)` has the bits of policy "full" without `way`."""
    other = full(model)
    assert_same_bits(step(way(model), model, x), step(other, other, x))


def segments_of(y):
    """Those of the nodes in the graph of `y`."""
    nodes, found = [y.grad_fn], {}
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found[node] = getattr(getattr(node, "extras", None), "segment", None)
            nodes += [next_node for next_node, _ in node.next_functions]
    return [segment for segment in found.values() if segment is not None]


def keeps_input(y):
    """Of the layers that made `y`, the first one's first, whether each keeps its input."""
    return [segment.input_kept for segment in reversed(segments_of(y))]
