"""How the attentions and norms of a layer are read as tensors of its block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fused_remat.autograd.shards import is_dtensor
from fused_remat.layers.eligibility import (
    Unsupported,
    check_foreign_module,
    check_module,
    qualified,
)
from fused_remat.layers.linears import (
    active_module,
    affine_of,
    split_biases,
    tensor_of,
    without_adapters,
)
from fused_remat.steps.norm import NORMS

if TYPE_CHECKING:
    from fused_remat.layers.read import LayerMap


def read_projections(
    modules: Mapping[str, Any], path: str, names: tuple[str, ...], width: int
) -> dict[str, Tensor | None]:
    """The weights of the `nn.MultiheadAttention` at `path` by the block's names.

    `names`: of the packed projection, of q, k and v, and of the output. `width`: of the input.
    """
    attn = modules[path]
    check_module(attn, path, nn.MultiheadAttention)
    if attn.embed_dim != width:
        raise Unsupported(f"{path} has embed_dim {attn.embed_dim} and the input width {width}")
    if width % attn.num_heads:
        raise Unsupported(f"{path} has {attn.num_heads} heads, which do not divide {width}")
    packed, *split, output = names
    if not attn._qkv_same_embed_dim and not attn.kdim == attn.vdim == width:
        raise Unsupported(f"{path} has kdim {attn.kdim} and vdim {attn.vdim}, expected {width}")
    if attn.bias_k is not None or attn.add_zero_attn:
        raise Unsupported(f"{path} has add_bias_kv or add_zero_attn")
    found: dict[str, Tensor | None] = {}
    if attn._qkv_same_embed_dim:
        found[f"{packed}.weight"] = tensor_of(attn, "in_proj_weight")
    else:
        for letter, name in zip("qkv", split, strict=True):
            found[f"{name}.weight"] = tensor_of(attn, f"{letter}_proj_weight")
    # PyTorch reads the output's weight and does not call it: an adapter on it does not act.
    proj = modules[f"{path}.out_proj"]
    if type(proj) is not NonDynamicallyQuantizableLinear:
        proj = without_adapters(proj)
    if proj is None:
        raise Unsupported(f"{path}.out_proj is missing")
    if type(proj) is not NonDynamicallyQuantizableLinear:
        supported = qualified(NonDynamicallyQuantizableLinear)
        raise Unsupported(
            f"{path}.out_proj is {qualified(type(proj))}; the fused path supports {supported}"
        )
    weight, bias = affine_of(proj)
    found[f"{output}.weight"] = weight
    for name, tensor in found.items():
        if tensor is None:
            raise Unsupported(f"{path} has no {name}")
    found[f"{output}.bias"] = bias
    bias = tensor_of(attn, "in_proj_bias")
    if bias is not None and bias.shape != (3 * width,):
        raise Unsupported(f"{path}.in_proj_bias has shape {tuple(bias.shape)}")
    found[f"{packed}.bias"] = bias
    if attn._qkv_same_embed_dim or is_dtensor(bias):
        return found
    return split_biases(found)


def read_norms(
    row: LayerMap, modules: Mapping[str, Any], width: int, weights: dict[str, Tensor | None]
) -> tuple[str, list[float]]:
    """The kind of the norms over the width, and the eps of each; adds to `weights`."""
    kinds = {NORMS[kind].module: kind for kind in ((row.norm,) if row.norm else NORMS)}
    eps, first, first_path = [], None, ""
    for name, path in row.norms.items():
        norm, found = _read_norm(modules[path], path, row, tuple(kinds))
        if first is None:
            first, first_path = type(norm), path
        elif type(norm) is not first:
            raise Unsupported(
                f"{first_path} is {qualified(first)} and {path} is {qualified(type(norm))}; the "
                "fused path supports norms of one class"
            )
        shape = norm.__dict__.get("normalized_shape", (width,))
        if shape != (width,):
            raise Unsupported(f"{path} is over {tuple(shape)}; the fused path supports {(width,)}")
        eps.append(found)
        weights[f"{name}.weight"], weights[f"{name}.bias"] = affine_of(norm)
    return row.norm or kinds[first], eps  # type: ignore[index]


def read_head_norms(
    row: LayerMap, modules: Mapping[str, Any], weights: dict[str, Tensor | None]
) -> list[float]:
    """The eps of the norms of query and key heads; adds to `weights`."""
    eps = []
    for name, path in row.head_norms.items():
        norm, found = _read_norm(modules[path], path, row, (nn.RMSNorm,))
        weight, _ = affine_of(norm)
        if weight is None:
            raise Unsupported(f"{path} has no weight")
        weights[f"{name}.weight"] = weight
        eps.append(found)
    return eps


def _read_norm(
    norm: Any, path: str, row: LayerMap, kinds: tuple[type, ...]
) -> tuple[nn.Module, float]:
    """The norm that acts at `path`, and its eps."""
    if type(norm) not in kinds:
        norm = active_module(norm, path)
    if row.norm_class:
        check_foreign_module(norm, path, row.package, row.norm_class, decorates=True)
    else:
        check_module(norm, path, *kinds)
    state = norm.__dict__
    eps = state.get("variance_epsilon", state.get("eps"))
    if eps is None:
        raise Unsupported(f"{path} has no eps")
    return norm, float(eps)
