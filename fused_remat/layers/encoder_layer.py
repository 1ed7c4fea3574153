"""`FusedRematLayer`: `nn.TransformerEncoderLayer` in a fraction of the activation memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.layers import eligibility, encoder_call
from fused_remat.layers.fused_layer import DropInLayer, wants_grad
from fused_remat.layers.read import LayerCall, Place
from fused_remat.ops.activation import activation_name
from fused_remat.policies import Policy
from fused_remat.spec import nn_layer_spec

_EXACT = "evaluation without gradients is PyTorch's own where that is exact"
_NESTED = "src is a nested tensor"


class FusedRematLayer(DropInLayer, nn.TransformerEncoderLayer):
    """A transformer encoder layer that keeps its input and rebuilds what backward asks for.

    Same constructor, parameters, `state_dict`, initialisation and forward as
    `nn.TransformerEncoderLayer`; calls that the fused path cannot serve run PyTorch's own forward,
    under non-reentrant checkpoint when training, with one `FusedRematWarning` that says why.
    In eval without gradients and masks, a plain layer is PyTorch's inference kernel.

    Args:
        policy: what to keep between forward and backward: a preset ("full", "lean", "balanced",
            "fast", "none": fewest bytes first; "balanced8", "fast8": partly in 8 bits) or a
            `Policy`.
        backend: "auto" (by device) or a registered name.
        accumulate_into: "main_grad" or "grad": backward adds weight gradients to that attribute of
            every parameter, in float32 and unrounded, and returns none to autograd (see below).
        (all others): as `nn.TransformerEncoderLayer`.

    Shapes: src (S, B, D), (B, S, D) if `batch_first`, or (S, D); returns the same, in src.dtype;
        under autocast in the dtype that the stock layer gives.
    Units: bytes kept per token at 16 bits, F = 4·D, pre-norm: full 2·D, lean 4·D, balanced 6·D,
        balanced8 11.44·D, fast 12·D, fast8 13.44·D, none 20·D, plus statistics (16 bytes, and
        4·nhead where `attn` is kept).
        Under autocast, float32 src: 4·D, 6·D, 10·D, 16·D, 24·D.
    Accumulation: `main_grad` is yours to set, shaped like its parameter, in float32 (float64 for
        float64); so is `grad`, or None, with `param.grad_dtype` set likewise. Hooks on parameters,
        DDP, FSDP, parameters that are no leaves, calls that do not take the fused path and
        create_graph=True raise RuntimeError; gradients that `torch.autograd.grad` asks for are
        returned as ever. An exception in backward leaves what was added until then.
    Raises: ValueError for an unknown policy, activation name, backend or accumulate_into; for bad
        arguments and inputs, what `nn.TransformerEncoderLayer` raises; RuntimeError in backward
        when a tensor that backward needs was changed in place, and for double backward.
    Source: Vaswani et al. 2017; Chen et al. 2016 (recompute); Korthikanti et al. 2022 (selective).

    >>> import torch
    >>> layer = FusedRematLayer(64, 4, 256, batch_first=True, norm_first=True, policy="lean")
    >>> x = torch.randn(2, 16, 64, requires_grad=True)
    >>> layer(x).sum().backward()
    >>> x.grad.shape
    torch.Size([2, 16, 64])
    """

    stock = nn.TransformerEncoderLayer
    _quiet = (_EXACT, _NESTED)
    _mask_pairs = ((("src_mask", 1), ("src_key_padding_mask", 2)),)

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
    ) -> None:
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps,
            batch_first, norm_first, bias, device, dtype,
        )  # fmt: skip
        self.policy = policy
        self.backend = backend
        self.accumulate_into = accumulate_into

    def _example(self) -> Graph:
        return block_graph(nn_layer_spec(self.norm_first, 1, 1, "relu"))

    def _places(self) -> tuple[Place, ...]:
        return encoder_call.places_of(self)

    def _heads(self) -> dict[str, int]:
        return {"heads": int(self.self_attn.num_heads)}

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As `nn.TransformerEncoderLayer.forward`: masks are bool (True = excluded) or float."""
        return self._serve(src, src_mask, src_key_padding_mask, is_causal)

    def why_not_fused(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> str | None:
        """Why this call of `forward` would not take the fused path, or None if it would.

        >>> import torch
        >>> layer = FusedRematLayer(16, 2, 32)
        >>> layer.norm1 = nn.RMSNorm(16)
        >>> layer.why_not_fused(torch.zeros(5, 3, 16))
        'its norm1 is a RMSNorm, not a LayerNorm'
        """
        return self._why_not(src, src_mask, src_key_padding_mask, is_causal)

    def _choose(self, *args: Any) -> LayerCall | str:
        """The block that serves a call, or why none does: `_EXACT`, `_NESTED` or a reason."""
        src, mask, padding, is_causal = args
        params = encoder_call.tensors_of(self)
        if (
            self._division is None
            and mask is None
            and padding is None
            and not wants_grad(src, *params.values())
            and is_exact(self, params)
        ):
            return _EXACT
        if getattr(src, "is_nested", False):
            return _NESTED
        return encoder_call.call_of(self, params, src, mask, padding, is_causal)

    def _quietly(self, reason: str, *args: Any) -> Tensor:
        if reason == _EXACT:
            return nn.TransformerEncoderLayer.forward(self, *args)
        return self._nested(*args)

    def _nested(self, src: Tensor, *masks: Any) -> Tensor:
        """What `nn.TransformerEncoder` hands on in eval, where the native kernel would be wrong."""
        if (
            self.training
            or src.layout is not torch.strided
            or any(m is not None for m in masks[:2])
        ):
            return nn.TransformerEncoderLayer.forward(self, src, *masks)  # which raises
        return padded(self.forward, src)


#: What the kernel computes for `layer.activation_relu_or_gelu`; at 0 it is not used.
_COMPUTED = {1: "relu", 2: "gelu"}


def is_exact(layer: nn.TransformerEncoderLayer, params: Mapping[str, Tensor | None]) -> bool:
    """Whether the kernel computes what the layer says, in eval and without masks.

    >>> layer = nn.TransformerEncoderLayer(8, 2, activation=nn.GELU(approximate="tanh"))
    >>> is_exact(layer.eval(), {})
    False
    """
    if layer.training or eligibility.why_not_module(layer) is not None:
        return False
    flag = layer.activation_relu_or_gelu
    if flag and _COMPUTED.get(flag) != activation_name(layer.activation):
        return False
    # It crashes on a missing bias or norm weight, unless all are missing.
    return None not in params.values() and not any(eligibility.dropout_ps(layer))


def padded(forward: Callable[..., Tensor], src: Tensor) -> Tensor:
    """`forward` on a strided nested tensor, as one padded batch; nested again.

    >>> src = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    >>> out = padded(lambda x, src_key_padding_mask: x + src_key_padding_mask.sum(), src)
    >>> [tuple(rows.shape) for rows in out.unbind()], out[0][0, 0].item()
    ([(2, 4), (3, 4)], 2.0)
    """
    lengths = [len(sequence) for sequence in src.unbind()]
    x = src.to_padded_tensor(0.0)
    positions = torch.arange(x.shape[1], device=src.device)
    excluded = positions >= torch.tensor(lengths, device=src.device).unsqueeze(1)
    out = forward(x, src_key_padding_mask=excluded)
    rows = [row[:length] for row, length in zip(out, lengths, strict=True)]
    nested: Tensor = torch.nested.as_nested_tensor(rows)
    return nested
