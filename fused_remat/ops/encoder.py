"""The encoder block as a function."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from fused_remat.graph.build import block_graph
from fused_remat.ops.activation import ActivationLike
from fused_remat.ops.inputs import (
    check_alike,
    check_p,
    check_weights,
    resolve_activation,
    seed_tensor,
)
from fused_remat.ops.layer import run_layer
from fused_remat.ops.lora import Update, check_loras, lora_tensors, loras_of
from fused_remat.ops.masks import mask_of, masks_given, padding_of
from fused_remat.policies import Policy
from fused_remat.spec import nn_layer_spec


def encoder_block(
    x: Tensor,
    weights: Mapping[str, Tensor | None],
    nhead: int,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    key_padding_mask: Tensor | None = None,
    norm_first: bool = False,
    activation: ActivationLike = "relu",
    eps: float = 1e-5,
    lora: Sequence[Update] = (),
    lora_dropout_p: float = 0.0,
    policy: str | Policy = "full",
    seed: int | Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """A whole transformer encoder block, pre- or post-norm, keeping what `policy` names.

    Shapes: x (B, S, D); returns the same, in x.dtype. `weights` maps "qkv.weight" (3D, D),
        "proj.weight" (D, D), "fc1.weight" (F, D), "fc2.weight" (D, F) and, where they are to be,
        "norm1.weight" and "norm2.weight" (D,) and a ".bias" of each to tensors.
    attn_mask, key_padding_mask, is_causal: as in `attention`: an attn_mask's True **takes part**,
        a key_padding_mask's True is **excluded**.
    dropout_p: of all four sites: attention's probabilities, both residual branches, the MLP.
    activation: as in `mlp`; a function is given whole (B, S, F) tensors.
    lora, lora_dropout_p: updates of "qkv", "proj", "fc1" and "fc2", as in `causal_block`.
    Units: bytes kept = 2·D (full, 16-bit) to 22·D (none) per token, plus statistics.
    Raises: ValueError for shapes that do not fit, unknown or missing weights, an unknown policy or
        activation; RuntimeError for mixed dtypes or devices.
    Source: Vaswani et al. 2017; pre-norm after Xiong et al. 2020.

    >>> import torch
    >>> shapes = {"qkv": (24, 8), "proj": (8, 8), "fc1": (16, 8), "fc2": (8, 16)}
    >>> weights = {f"{k}.weight": torch.randn(s, requires_grad=True) for k, s in shapes.items()}
    >>> y = encoder_block(torch.randn(3, 5, 8), weights, nhead=2, norm_first=True, policy="lean")
    >>> y.sum().backward(); y.shape, weights["fc1.weight"].grad.shape
    (torch.Size([3, 5, 8]), torch.Size([16, 8]))
    """
    if not isinstance(weights, Mapping):
        raise TypeError(f"weights must map names to tensors, got {type(weights).__name__}")
    check_alike(x, weights)
    if x.dim() != 3:
        raise ValueError(f"x has shape {tuple(x.shape)}, expected (B, S, D)")
    batch, seq_len, d_model = x.shape
    if not isinstance(nhead, int):
        raise TypeError(f"nhead must be an int, got {nhead!r}")
    if nhead < 1 or d_model % nhead:
        raise ValueError(f"nhead must divide x's width, got {nhead} and {d_model}")
    grid = (batch, nhead, seq_len, seq_len)
    fc1 = weights.get("fc1.weight")
    width = 1 if fc1 is None else fc1.shape[0]
    name, captured, functions = resolve_activation(activation, x, (1, 2, width))
    if functions:
        functions = {"activation": _on_whole(functions["activation"], batch, seq_len)}
    masks = {"mask": mask_of(attn_mask, grid, x), "padding": padding_of(key_padding_mask, grid, x)}
    spec = nn_layer_spec(
        norm_first,
        nhead,
        d_model // nhead,
        name,
        (float(eps), float(eps)),
        check_p("dropout_p", dropout_p),
        causal=is_causal,
        masks=masks_given(masks),
        true_means="attend",
        captured=len(captured),
        loras=loras_of(lora, check_p("lora_dropout_p", lora_dropout_p), x),
    )
    check_weights(x, weights, spec)
    tensors = {
        **weights, **captured, **lora_tensors(lora), "input": x, **masks,
        "seed": seed_tensor(seed, x.device),
    }  # fmt: skip
    check_loras(lora, spec.linears, tensors)
    return run_layer(
        block_graph(spec), tensors, policy=policy, backend=backend, functions=functions,
        preserve_strides=norm_first,
    )  # fmt: skip


def _on_whole(
    fn: Callable[[Tensor], Tensor], batch: int, seq_len: int
) -> Callable[[Tensor], Tensor]:
    return lambda up: fn(up.view(batch, seq_len, -1)).reshape(up.shape)
