"""What a backend provides: the arithmetic of every step of a block, on matrices (tokens, width)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

#: Norms by name, and the statistics each keeps: a float per token, in this order.
NORM_STATS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("mean", "rstd"),
    "rms_norm": ("rstd",),
}


@dataclass(eq=False, slots=True)
class AttentionCall:
    """Sizes, masks and randomness of one attention over a group of whole sequences.

    Attributes:
        batch, nhead, kv_heads, q_len, kv_len: B, H, Hkv, S_q, S_k.
        scale: multiplies q k^T.
        left, right: query i sees keys i + offset - left to i + offset + right, where
            offset = S_k - S_q; -1 for no limit. Causal is right = 0.
        softcap: scores become softcap * tanh(scores / softcap) before masks; 0 for none.
        mask: (S_q, S_k), or broadcasts to (B, H, S_q, S_k); bool, or float, added to the scores.
        padding: (B, S_k) over the keys; bool, True = excluded, or float, added.
        mask_keeps: True in a bool `mask` takes part, else is excluded.
        dmask, dpadding: float buffers of the same shapes to add the masks' gradients to, or None.
        mask_grad: whether any gradient of a mask is wanted (in forward too: it decides the route).
        p, site_key, row0: dropout of the probabilities; `row0` is the row of the first (b, h, q)
            in the sense of `fused_remat.random`.
    """

    batch: int
    nhead: int
    kv_heads: int
    q_len: int
    kv_len: int
    scale: float
    left: int
    right: int
    softcap: float
    mask: Tensor | None
    padding: Tensor | None
    dmask: Tensor | None
    dpadding: Tensor | None
    mask_keeps: bool
    mask_grad: bool
    p: float
    site_key: Tensor | None
    row0: int

    @property
    def masked(self) -> bool:
        return self.mask is not None or self.padding is not None

    @property
    def offset(self) -> int:
        return self.kv_len - self.q_len


class Backend(Protocol):
    """Arithmetic of a block's steps. T tokens, D and F widths; results in the dtype of `x`.

    A routine gives the same bits for the same shapes and values, every time: a rebuilt activation
    is computed by the routine that computed it in forward. `out`, where given, is a contiguous
    matrix to write the result to; weights and biases may be None where the block has none.
    """

    name: str

    def chunk_tokens(self, x: Tensor) -> int:
        """About how many tokens of `x` to work on at a time (bounds the transients)."""

    def norm_fwd(
        self,
        kind: str,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """y (T, D) and the statistics of `kind`, (T, 1) in float32 (float64 for float64)."""

    def norm_bwd(
        self,
        kind: str,
        dy: Tensor,
        x: Tensor,
        stats: tuple[Tensor, ...],
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
        """residual + keep * (x @ weight.T + bias), in the dtype of x."""

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

    def gated_fwd(self, gate: Tensor, up: Tensor, act: str, keep: Tensor | None) -> Tensor:
        """keep * act(gate) * up."""

    def gated_bwd(
        self,
        dy: Tensor,
        gate: Tensor,
        up: Tensor | None,
        act: str,
        keep: Tensor | None,
        owned: bool,
        wants_up: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `gated_fwd` in gate (None if `up` is) and in up (if wanted)."""

    def add_fwd(
        self, x: Tensor, residual: Tensor, keep: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """residual + keep * x, rounded once."""

    def dropout_bwd(self, dy: Tensor, keep: Tensor) -> Tensor:
        """keep * dy, a new tensor."""

    def attention_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over q (B, H, S_q, E), k and v (B, Hkv, S_k, E) of any strides.

        Returns attn (B*S_q, H*E) and lse, float, B*H*S_q elements in that order.
        """

    def attention_bwd(
        self,
        dattn: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn: Tensor,
        lse: Tensor,
        call: AttentionCall,
        grads: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Fills `grads`, shaped like q, k and v; adds to call.dmask and call.dpadding."""

    def norm_route(self, kind: str, x: Tensor) -> str:
        """As `attention_route`, for a norm."""

    def linear_route(self, x: Tensor) -> str:
        """As `attention_route`, for a linear layer."""

    def attention_route(self, q: Tensor, v: Tensor, call: AttentionCall) -> str:
        """Which routine serves the call, and why a faster one does not: a phrase."""
