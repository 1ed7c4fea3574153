"""What a backend provides: the arithmetic of every step of a block, on matrices (tokens, width)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fused_remat.formats import Packed, Parts
from fused_remat.random import Keep, Uniform

#: Norms by name, and the statistics each keeps: a float per token, in this order.
NORM_STATS: dict[str, tuple[str, ...]] = {
    "layer_norm": ("mean", "rstd"),
    "rms_norm": ("rstd",),
}


class FusedRematWarning(UserWarning):
    """Something slower serves than was asked for, rightly; the message says what and why."""


#: What a routine that loads elements itself is given: a matrix, or one as it is stored.
Loaded = Tensor | Packed


@dataclass(frozen=True, eq=False, slots=True)
class Packing:
    """How an activation is to be stored.

    Attributes:
        stored: a row of `formats.FORMATS`.
        uniform: random numbers for each element, where the format is rounded stochastically.
    """

    stored: str
    uniform: Uniform | None = None


#: A weight and a bias, either of which may be absent.
Affine = tuple[Tensor | None, Tensor | None]


@dataclass(eq=False, slots=True)
class AttentionCall:
    """Sizes, masks and randomness of one attention over a group of whole sequences.

    With sizes and scale alone, every query sees every key, and nothing is dropped.

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
        lengths: (B,) of integers, or None: keys from lengths[b] on are excluded.
        cu_q, cu_k: (N + 1,) of integers, or None: one batch of N packed sequences. Queries
            cu_q[n] to cu_q[n + 1] see keys cu_k[n] to cu_k[n + 1] only, with the offset of these
            lengths; a query of no sequence sees none. Rows and columns of dropout, and masks, are
            those of the whole: row (h, q), column k.
        head_rows, col0: for dropout where the call is a part of another: rows from one head to the
            next, 0 for S_q, and the column of the first key.
    """

    batch: int
    nhead: int
    kv_heads: int
    q_len: int
    kv_len: int
    scale: float
    left: int = -1
    right: int = -1
    softcap: float = 0.0
    mask: Tensor | None = None
    padding: Tensor | None = None
    dmask: Tensor | None = None
    dpadding: Tensor | None = None
    mask_keeps: bool = False
    mask_grad: bool = False
    p: float = 0.0
    site_key: Tensor | None = None
    row0: int = 0
    lengths: Tensor | None = None
    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    head_rows: int = 0
    col0: int = 0

    @property
    def masked(self) -> bool:
        return self.mask is not None or self.padding is not None

    @property
    def offset(self) -> int:
        return self.kv_len - self.q_len


@dataclass(eq=False, slots=True)
class RotaryCall:
    """Sizes, tables and weights of one rotary step over consecutive tokens.

    Token t of the whole call is (b, s) = divmod(t, seq_len), and the first one here is `token0`.

    Attributes:
        nhead, kv_heads: H query heads, Hkv key heads and Hkv value heads make a row.
        cos, sin: (S, R/2) or (B, S, R/2), float32 or the dtype of what is rotated, or both None:
            nothing is rotated. The first R elements of a head are; R is at most its width.
        interleaved: pairs are neighbours, (2i, 2i + 1); else (i, i + R/2).
        q_weight, k_weight: (E,) of an RMSNorm of each query and key head before it is rotated,
            with `eps`; or both None: nothing is normed.
    """

    nhead: int
    kv_heads: int
    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float
    token0: int
    seq_len: int

    @property
    def rotated(self) -> int:
        """R, how many elements of a head are rotated."""
        return 0 if self.cos is None else 2 * self.cos.shape[-1]


@dataclass(eq=False, slots=True)
class CrossEntropyCall:
    """Targets and options of a cross-entropy over the logits of T tokens.

    Attributes:
        target: (T,) int64, a column each, or `ignore_index`: such a token's loss is 0.
        label_smoothing: this share of each target is spread over all columns.
        z_loss: times logsumexp² is added to each token's loss.
        softcap: logits become softcap * tanh(logits / softcap); 0 for none.
        logits: about how many to hold at a time; 0 for what suits the device.
        group: of ranks among which the columns are divided, "" for none; then targets are columns
            of this rank's, or a negative number other than `ignore_index`, of another's.
        classes: columns of all ranks; 0: those that there are.
    """

    target: Tensor
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float
    logits: int
    group: str = ""
    classes: int = 0


@dataclass(eq=False, slots=True)
class PackedHeads:
    """Heads (B, H, S, E) of a packed matrix (B*S, W): columns from `first` on, side by side.

    Attributes:
        whole: the matrix.
        batch, first, nhead, width: B, the first column, H, E.
    """

    whole: Packed
    batch: int
    first: int
    nhead: int
    width: int

    @property
    def shape(self) -> torch.Size:
        rows = self.whole.shape[0]
        return torch.Size((self.batch, self.nhead, rows // self.batch, self.width))

    @property
    def dtype(self) -> torch.dtype:
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        return self.whole.device

    def stand_in(self) -> Tensor:
        """A tensor of this shape and dtype that takes no memory, to choose a routine by."""
        row = torch.empty((1, self.whole.width), dtype=self.dtype, device=self.device)
        return self.of(row.expand(self.whole.shape))

    @staticmethod
    def stands_for(x: LoadedHeads) -> Tensor:
        """Heads in memory, or the stand-in of packed ones."""
        return x if isinstance(x, Tensor) else x.stand_in()

    def of(self, matrix: Tensor) -> Tensor:
        """These heads of a matrix (B*S, W), as a view."""
        columns = matrix.unflatten(0, (self.batch, -1))
        columns = columns[..., self.first : self.first + self.nhead * self.width]
        heads: Tensor = columns.unflatten(-1, (self.nhead, self.width)).transpose(1, 2)
        return heads


#: Heads as a routine is given them that unpacks what it reads.
LoadedHeads = Tensor | PackedHeads


class Backend(Protocol):
    """Arithmetic of a block's steps. T tokens, D and F widths; results in the dtype of `x`.

    A routine gives the same bits for the same shapes and values, every time: without `fusions`, a
    rebuilt activation is computed by the routine that computed it in forward. `out`, where given,
    is a contiguous matrix to write the result to; weights and biases may be None where the block
    has none. A `keep` is a dropout site's multiplier, described: a backend makes a tensor of it, or
    draws the same bits where it needs them.
    """

    name: str
    #: Whether `norm_bwd` takes a dy of another dtype than x.
    mixes_norms: bool

    def why_not(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Why this backend cannot compute in `dtype` on `device`, or None if it can."""

    def fusions(self, dtype: torch.dtype) -> frozenset[str]:
        """Rows of `blocks.fusions.FUSIONS` that are one routine here for products in `dtype`.

        By name, and that of the activation where there is one: "linear_norm", "mlp_bwd gelu".
        None under `torch.use_deterministic_algorithms(True)`, where every policy takes the same
        routine for a step, so that gradients have the same bits in all of them.
        """

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
        stats: tuple[Tensor, ...] | None = None,
    ) -> tuple[Tensor, ...]:
        """y (T, D) and the statistics of `kind`, (T, 1) in float32 (float64 for float64).

        `out` may be of a lower dtype than x; weight and bias may be float32 whatever x is.
        `stats`, where given, are those of x, and may be taken instead of computed again.
        """

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
        keep: Keep | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """residual + keep * (x @ weight.T + bias), in the dtype of x.

        Without residual and keep, `out` may be columns of a matrix.
        """

    def linear_dx(self, dy: Tensor, weight: Tensor | None, into: Tensor | None = None) -> Tensor:
        """into + dy @ weight, in `into` if given; dy may be columns of a matrix."""

    def add_product(self, y: Tensor, x: Tensor, weight: Tensor | None, scale: float) -> None:
        """y += scale * x @ weight.T; y may be columns of a matrix, and of a lower dtype."""

    def linear_dw(
        self, dy: Tensor, x: Tensor, into: Tensor | None, partial: bool, exact: bool = False
    ) -> Tensor:
        """into + dy.T @ x, in `into` if given. `partial`: more will be added, so the sum is held in
        float32; `exact`: so is the product, which is not rounded to 16 bits before it is added."""

    def bias_grad(self, dy: Tensor) -> Tensor:
        """The sum of dy over tokens, in float32 (float64 for float64)."""

    def pack(self, x: Tensor, packing: Packing) -> Parts:
        """x as it is to be stored: codes, and scales if the format has them; new tensors."""

    def unpack(self, x: Packed) -> Tensor:
        """The whole of x, a new matrix in its dtype."""

    # What is `Loaded` may be packed, and is then unpacked where it is read, never whole; each
    # element rounded to its dtype, as `unpack` does, so that results are those of unpacking first.

    def act_fwd(self, x: Loaded, act: str, keep: Keep | None) -> Tensor:
        """keep * act(x)."""

    def act_bwd(self, dy: Tensor, x: Loaded, act: str, keep: Keep | None, owned: bool) -> Tensor:
        """The gradient of `act_fwd` in x; may overwrite dy when `owned`."""

    def gated_fwd(self, gate: Loaded, up: Loaded, act: str, keep: Keep | None) -> Tensor:
        """keep * act(gate) * up."""

    def gated_bwd(
        self,
        dy: Tensor,
        gate: Loaded,
        up: Loaded | None,
        act: str,
        keep: Keep | None,
        owned: bool,
        wants_up: bool,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The gradients of `gated_fwd` in gate (None if `up` is) and in up (if wanted)."""

    def add_fwd(
        self, x: Tensor, residual: Tensor, keep: Keep | None, out: Tensor | None = None
    ) -> Tensor:
        """residual + keep * x, rounded once, in the dtype of the residual."""

    def dropout_bwd(self, dy: Tensor, keep: Keep, dtype: torch.dtype | None = None) -> Tensor:
        """keep * dy, a new tensor, in `dtype` or that of dy."""

    def rotary_fwd(self, x: Tensor, call: RotaryCall, out: Tensor | None = None) -> Tensor:
        """x (T, (H + 2·Hkv)·E) with its query and key heads normed and rotated; values as they are.

        With RMSNorm, if it has weights, n = x * rstd * weight, else n = x, and of each pair of n
        y1 = n1 * cos - n2 * sin, y2 = n2 * cos + n1 * sin. `out` may be x.
        """

    def rotary_bwd(
        self, dy: Tensor, x: Tensor | None, call: RotaryCall, wants: tuple[bool, ...], owned: bool
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx and the weights' gradients, those that `wants` marks, else None.

        x only where there are weights; may overwrite dy when `owned`.
        """

    def cross_entropy_fwd(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: CrossEntropyCall,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of each token whose logits are x @ weight.T + bias, their maximum, and
        log(sum(exp(logits - maximum))): each (T, 1), float32, or float64 for float64.

        Logits are made a block at a time. Weight and bias may be of another dtype than x, and are
        then rounded to it. Statistics of ignored tokens are 0.

        Raises: IndexError for a target out of range, on CPU; elsewhere the device asserts.
        """

    def cross_entropy_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stats: tuple[Tensor, Tensor],
        call: CrossEntropyCall,
        wants: tuple[bool, ...],
        exact: bool = False,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """dx, dweight, dbias: those that `wants` marks, else None, summed in float32.

        dweight is of the dtype of weight; `exact`: of float32 at least, and not rounded.
        """

    # Several steps in one; see `blocks.fusions`.

    def linear_act_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_pre: bool,
        packing: Packing | None = None,
    ) -> tuple[Tensor | None, Tensor, Parts]:
        """pre = x @ weight.T + bias, if wanted; keep * act(pre); pre packed, if it is to be."""

    def gated_linear_act_fwd(
        self,
        x: Tensor,
        gate: Affine,
        up: Affine,
        act: str,
        keep: Keep | None,
        wants: tuple[bool, ...] = (False, False),
        packings: tuple[Packing | None, ...] = (None, None),
    ) -> tuple[Tensor, tuple[Tensor | None, ...], tuple[Parts, ...]]:
        """keep * act(gate(x)) * up(x); gate(x) and up(x), those wanted; and packed, those that are
        to be."""

    def linear_norm_fwd(
        self,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        residual: Tensor,
        keep: Keep | None,
        kind: str,
        norm: Affine,
        eps: float,
        out: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        """sum = residual + keep * (x @ weight.T + bias), norm(sum) (into `out`), its statistics.

        The sum is of the dtype of the residual, which may be another than that of x.
        """

    def mlp_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        up: Affine,
        out_weight: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_act: bool,
    ) -> tuple[Tensor | None, Tensor]:
        """keep * act(up(x)), if wanted, and the gradient of up(x), from the MLP's, dy (T, D)."""

    def gated_mlp_bwd(
        self,
        dy: Tensor,
        x: Tensor,
        gate: Affine,
        up: Affine,
        out_weight: Tensor | None,
        act: str,
        keep: Keep | None,
        wants_act: bool,
    ) -> tuple[Tensor | None, Tensor, Tensor]:
        """As `mlp_bwd` for keep * act(gate(x)) * up(x): and the gradients of gate(x) and up(x)."""

    def attention_fwd(
        self, q: Tensor, k: Tensor, v: Tensor, call: AttentionCall, out: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Attention over q (B, H, S_q, E), k and v (B, Hkv, S_k, E) of any strides.

        Returns attn (B*S_q, H*E) and lse, float, B*H*S_q elements in that order.
        """

    def attention_bwd(
        self,
        dattn: Tensor,
        q: LoadedHeads,
        k: LoadedHeads,
        v: LoadedHeads,
        attn: Tensor,
        lse: Tensor,
        call: AttentionCall,
        grads: tuple[Tensor, Tensor, Tensor] | None,
    ) -> None:
        """Fills `grads`, shaped like q, k and v; adds to call.dmask and call.dpadding.

        Kernels that want heads in memory have what is packed unpacked for their time.
        """

    def norm_route(self, kind: str, x: Tensor) -> str:
        """As `attention_route`, for a norm."""

    def linear_route(self, x: Tensor, ends: bool = False) -> str:
        """As `attention_route`, for a linear layer; `ends`: with dropout or a residual."""

    def pointwise_route(self, x: Loaded, act: str = "", *beside: Loaded) -> str:
        """As `attention_route`, for a pointwise step, an activation if `act` names one.

        `beside`: what else it loads packed.
        """

    def packing_route(self, x: Loaded, stored: str) -> str:
        """As `attention_route`, for packing x, or unpacking it where it is packed."""

    def rotary_route(self, x: Tensor, call: RotaryCall) -> str:
        """As `attention_route`, for a rotary step."""

    def cross_entropy_route(self, x: Tensor) -> str:
        """As `attention_route`, for a cross-entropy over a product of x."""

    def fused_route(self, fusion: str, x: Tensor, *stored: str) -> str:
        """As `attention_route`, for a row of `blocks.fusions.FUSIONS`.

        `stored`: the formats in which it packs what it makes.

        Of "linear_norm", x is the residual; of others, their input.
        """

    def attention_route(self, q: LoadedHeads, v: LoadedHeads, call: AttentionCall) -> str:
        """Which routine serves the call, and why a faster one does not: a phrase.

        Of packed heads also where they are unpacked.
        """
