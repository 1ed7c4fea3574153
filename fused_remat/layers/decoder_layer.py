"""`FusedRematDecoderLayer`: `nn.TransformerDecoderLayer` in a fraction of the activation memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.layers import decoder_call
from fused_remat.layers.fused_layer import DropInLayer
from fused_remat.layers.read import LayerCall, Place
from fused_remat.policies import Policy
from fused_remat.spec import nn_layer_spec


class FusedRematDecoderLayer(DropInLayer, nn.TransformerDecoderLayer):
    """A transformer decoder layer that keeps its inputs and rebuilds what backward asks for.

    Same constructor, parameters, `state_dict`, initialisation and forward as
    `nn.TransformerDecoderLayer`; calls that the fused path cannot serve run PyTorch's own forward,
    under non-reentrant checkpoint when training, with one `FusedRematWarning` that says why.

    Args:
        policy, backend, accumulate_into: as in `FusedRematLayer`.
        (all others): as `nn.TransformerDecoderLayer`.

    Shapes: tgt (S, B, D) and memory (M, B, D); (B, S, D) and (B, M, D) if `batch_first`; or (S, D)
        and (M, D). Returns a tensor like tgt, under autocast in the dtype that the stock layer
        gives.
    Units: bytes kept per token of tgt at 16 bits, F = 4·D: pre-norm full 2·D, lean 6·D, balanced
        10·D, fast 18·D, none 26·D; post-norm 2·D, 4·D, 8·D, 20·D, 28·D; of memory 4·D per token
        from "fast" on; plus statistics (24 bytes, 4·nhead for each of `attn` and `cross` that is
        kept), and the memory itself, which all layers of a model share.
    Raises: as `FusedRematLayer`; for bad arguments and inputs, what `nn.TransformerDecoderLayer`
        raises.
    Source: Vaswani et al. 2017; Chen et al. 2016 (recompute); Korthikanti et al. 2022 (selective).

    >>> import torch
    >>> layer = FusedRematDecoderLayer(64, 4, 256, batch_first=True, policy="lean")
    >>> tgt, memory = torch.randn(2, 16, 64), torch.randn(2, 9, 64, requires_grad=True)
    >>> layer(tgt, memory).sum().backward()
    >>> memory.grad.shape
    torch.Size([2, 9, 64])
    """

    stock = nn.TransformerDecoderLayer
    _mask_pairs = (
        (("tgt_mask", 2), ("tgt_key_padding_mask", 4)),
        (("memory_mask", 3), ("memory_key_padding_mask", 5)),
    )

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

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """As `nn.TransformerDecoderLayer.forward`: masks are bool (True = excluded) or float."""
        return self._serve(
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask,
            tgt_is_causal, memory_is_causal,
        )  # fmt: skip

    def why_not_fused(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> str | None:
        """Why this call of `forward` would not take the fused path, or None if it would.

        >>> import torch
        >>> layer = FusedRematDecoderLayer(16, 2, 32)
        >>> layer.why_not_fused(torch.zeros(5, 3, 16), torch.zeros(7, 3, 16).half())
        'memory is torch.float16, tgt torch.float32'
        """
        return self._why_not(
            tgt, memory, tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask,
            tgt_is_causal, memory_is_causal,
        )  # fmt: skip

    _inputs = ("input", "memory")

    def _example(self) -> Graph:
        return block_graph(nn_layer_spec(self.norm_first, 1, 1, "relu", (1e-5,) * 3))

    def _places(self) -> tuple[Place, ...]:
        return decoder_call.places_of(self)

    def _heads(self) -> dict[str, int]:
        return {"heads": int(self.self_attn.num_heads)}

    def _choose(self, *args: Any) -> LayerCall | str:
        return decoder_call.call_of(self, *args)
