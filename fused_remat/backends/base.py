"""What a backend provides: the arithmetic of every step of a block, on matrices (tokens, width)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(eq=False, slots=True)
class AttentionCall:
    """Sizes, masks and randomness of one attention over a group of whole sequences.

    Attributes:
        batch, seq_len, nhead: B, S, H; q, k and v have width D / H each.
        scale: multiplies q k^T.
        causal: keys after the query are excluded.
        mask: (S, S) or (B, H, S, S); bool, True = excluded, or float, added to the scores.
        padding: (B, S) over the keys, of the same two kinds.
        dmask, dpadding: float buffers of the same shapes to add the masks' gradients to, or None.
        mask_grad: whether any gradient of a mask is wanted (in forward too: it decides the route).
        p, site_key, row0: dropout of the probabilities; `row0` is the row of the first (b, h, q)
            in the sense of `fused_remat.random`.
    """

    batch: int
    seq_len: int
    nhead: int
    scale: float
    causal: bool
    mask: Tensor | None
    padding: Tensor | None
    dmask: Tensor | None
    dpadding: Tensor | None
    mask_grad: bool
    p: float
    site_key: Tensor | None
    row0: int


class Backend(Protocol):
    """Arithmetic of a block's steps. T tokens, D and F widths; results in the dtype of `x`.

    A routine gives the same bits for the same shapes and values, every time: a rebuilt activation
    is computed by the routine that computed it in forward. `out`, where given, is a contiguous
    matrix to write the result to; weights and biases may be None where the block has none.
    """

    name: str

    def chunk_tokens(self, x: Tensor) -> int:
        """About how many tokens to work on at a time (bounds the transients)."""

    def norm_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """LayerNorm: y (T, D), and mean and rstd (T, 1) in float32 (float64 for float64)."""

    def norm_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        mean: Tensor,
        rstd: Tensor,
        weight: Tensor | None,
        wants: tuple[bool, ...],
        add: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx + `add`, dweight, dbias: those that `wants` marks, else None."""

    def linear_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor | None = None,
        keep: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual + keep * (x @ weight.T + bias), rounded to the dtype of x once."""

    def linear_dx(self, dy: Tensor, weight: Tensor | None) -> Tensor:
        """dy @ weight."""

    def linear_dw(self, dy: Tensor, x: Tensor, into: Tensor | None, partial: bool) -> Tensor:
        """into + dy.T @ x. `partial`: more will be added, so the sum is held in float32."""

    def bias_grad(self, dy: Tensor) -> Tensor:
        """The sum of dy over tokens, in float32 (float64 for float64)."""

    def act_fwd(self, x: Tensor, act: str, keep: Tensor | None) -> Tensor:
        """keep * act(x)."""

    def act_bwd(self, dy: Tensor, x: Tensor, act: str, keep: Tensor | None, owned: bool) -> Tensor:
        """The gradient of `act_fwd` in x; may overwrite dy when `owned`."""

    def dropout_bwd(self, dy: Tensor, keep: Tensor) -> Tensor:
        """keep * dy, a new tensor."""

    def attention_fwd(self, qkv: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
        """Attention over packed qkv (B*S, 3D): attn (B*S, D) and lse, float, B*S*H elements."""

    def attention_bwd(
        self,
        dattn: Tensor,
        qkv: Tensor,
        attn: Tensor,
        lse: Tensor,
        call: AttentionCall,
        wants_qkv: bool,
    ) -> Tensor | None:
        """dqkv (B*S, 3D) if wanted; adds to call.dmask and call.dpadding where given."""
