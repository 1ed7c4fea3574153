"""`FusedRematLayer`: `nn.TransformerEncoderLayer` in a fraction of the activation memory."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused_remat import accumulation
from fused_remat.backends.base import FusedRematWarning
from fused_remat.backends.registry import check_name
from fused_remat.blocks.encoder import EncoderConfig, encoder_graph
from fused_remat.layers import encoder_call, fastpath
from fused_remat.layers.encoder_call import EncoderCall
from fused_remat.layers.replay import checkpointed
from fused_remat.ops.encoder import run_encoder
from fused_remat.policies import Policy, kept_names


class FusedRematLayer(nn.TransformerEncoderLayer):
    """A transformer encoder layer that keeps its input and rebuilds what backward asks for.

    Same constructor, parameters, `state_dict`, initialisation and forward as
    `nn.TransformerEncoderLayer`; calls that the fused path cannot serve run PyTorch's own forward,
    under non-reentrant checkpoint when training, with one `FusedRematWarning` that says why.
    In eval without gradients and masks, a plain layer is PyTorch's inference kernel.

    Args:
        policy: what to keep between forward and backward: a rung ("full", "lean", "balanced",
            "fast", "none": fewest bytes first) or a `Policy`.
        backend: "auto" (by device) or a registered name.
        accumulate_into: "main_grad" or "grad": backward adds weight gradients to that attribute of
            every parameter, in float32 and unrounded, and returns none to autograd (see below).
        (all others): as `nn.TransformerEncoderLayer`.

    Shapes: src (S, B, D), (B, S, D) if `batch_first`, or (S, D); returns the same, in src.dtype;
        under autocast in the dtype that the stock layer gives.
    Units: bytes kept per token at 16 bits, F = 4·D, pre-norm: full 2·D, lean 4·D, balanced 6·D,
        fast 12·D, none 20·D, plus statistics (16 bytes, and 4·nhead where `attn` is kept).
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

    # Class attributes serve layers unpickled, or re-classed, from the stock one.
    _policy: str | Policy = "full"
    _backend: str = "auto"
    _accumulate_into: str | None = None

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

    @classmethod
    def from_layer(
        cls,
        layer: nn.TransformerEncoderLayer,
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
    ) -> FusedRematLayer:
        """A `FusedRematLayer` with the submodules of `layer`: same parameters, mode and hooks.

        Raises: TypeError if `layer` is not an `nn.TransformerEncoderLayer`, or is of a subclass
            (whose behaviour would be lost).

        >>> stock = nn.TransformerEncoderLayer(64, 4)
        >>> fused = FusedRematLayer.from_layer(stock, policy="balanced")
        >>> fused.linear1.weight is stock.linear1.weight
        True
        """
        if type(layer) is not nn.TransformerEncoderLayer and not isinstance(layer, cls):
            raise TypeError(
                f"from_layer takes an nn.TransformerEncoderLayer, got {type(layer).__name__}"
            )
        new = cls.__new__(cls)
        new.__dict__ = {
            k: dict(v) if type(v) is dict else v.copy() if hasattr(v, "copy") else v
            for k, v in layer.__dict__.items()
        }
        new.policy = policy
        new.backend = backend
        new.accumulate_into = accumulate_into
        return new

    @property
    def policy(self) -> str | Policy:
        """What the layer keeps; may be set at any time, for the calls from then on."""
        return self._policy

    @policy.setter
    def policy(self, policy: str | Policy) -> None:
        graph = encoder_graph(EncoderConfig(self.norm_first, 1, 1, "relu", 0.0, 0.0))
        kept_names(policy, graph.kind, graph.names)
        self._policy = policy

    @property
    def backend(self) -> str:
        """Who does the arithmetic: "auto" or a registered name."""
        return self._backend

    @backend.setter
    def backend(self, backend: str) -> None:
        self._backend = check_name(backend)

    @property
    def accumulate_into(self) -> str | None:
        """Where backward adds weight gradients: None (autograd's way), "grad" or "main_grad"."""
        return self._accumulate_into

    @accumulate_into.setter
    def accumulate_into(self, target: str | None) -> None:
        self._accumulate_into = accumulation.check_target(target)

    def extra_repr(self) -> str:
        shown = f"policy={self._policy!r}, backend={self._backend!r}"
        target = self._accumulate_into
        return shown if target is None else f"{shown}, accumulate_into={target!r}"

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As `nn.TransformerEncoderLayer.forward`: masks are bool (True = excluded) or float."""
        args = (src, src_mask, src_key_padding_mask, is_causal)
        if _is_traced():
            self._refuse_to_accumulate(_TRACED)
            return super().forward(*args)
        call = self._choose(*args)
        if isinstance(call, EncoderCall):
            if not torch.compiler.is_compiling():
                _warn_mismatch(src_mask, src_key_padding_mask)
            return self._fused(src, src_key_padding_mask, call)
        if torch.compiler.is_compiling():
            if call not in (_EXACT, _NESTED) and _wants_grad(*args[:3], *self.parameters()):
                _warn_compiled(type(self).__name__, call)
            return super().forward(*args)
        for observe in DECISIONS:
            observe(self, call)
        if call is _EXACT:
            return super().forward(*args)
        return self._nested(*args) if call is _NESTED else self._fallback(call, *args)

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
        if _is_traced():
            return _TRACED
        call = self._choose(src, src_mask, src_key_padding_mask, is_causal)
        return call if isinstance(call, str) else None

    def _choose(
        self, src: Tensor, mask: Tensor | None, padding: Tensor | None, is_causal: bool
    ) -> EncoderCall | str:
        """The block that serves a call, or why none does: `_EXACT`, `_NESTED` or a reason."""
        params = encoder_call.tensors_of(self)
        if (
            mask is None
            and padding is None
            and not _wants_grad(src, *params.values())
            and fastpath.is_exact(self, params)
        ):
            return _EXACT
        if getattr(src, "is_nested", False):
            return _NESTED
        return encoder_call.call_of(self, params, src, mask, padding, is_causal)

    def _nested(self, src: Tensor, *masks: Any) -> Tensor:
        """What `nn.TransformerEncoder` hands on in eval, where the native kernel would be wrong."""
        if (
            self.training
            or src.layout is not torch.strided
            or any(m is not None for m in masks[:2])
        ):
            return super().forward(src, *masks)  # which raises
        return fastpath.padded(self.forward, src)

    def _unfused(self, *args: Any) -> Tensor:
        """PyTorch's forward through the submodules, also in eval."""
        with fastpath.off():
            return super().forward(*args)

    def _fallback(self, reason: str, *args: Any) -> Tensor:
        """The same, under checkpoint where gradients are wanted, and with a warning then."""
        if not _wants_grad(*args, *self.parameters()):
            return self._unfused(*args)
        self._refuse_to_accumulate(reason)
        if self._policy == "none":
            out = self._unfused(*args)
            _warn(self, f"PyTorch's own forward: {reason}")
        else:
            out = checkpointed(self, self._unfused, *args)
            _warn(self, f"PyTorch's own forward under torch.utils.checkpoint: {reason}")
        return out

    def _refuse_to_accumulate(self, reason: str | None) -> None:
        """Raise RuntimeError if gradients were to be accumulated, and `reason` forbids it."""
        target = self._accumulate_into
        if target is not None and reason is not None and _wants_grad(*self.parameters()):
            raise accumulation.refusal(target, reason)

    def _fused(self, src: Tensor, padding: Tensor | None, call: EncoderCall) -> Tensor:
        if self._accumulate_into is not None:
            compiled = "the call is compiled" if torch.compiler.is_compiling() else None
            self._refuse_to_accumulate(compiled or accumulation.why_not_engine(self))
        unbatched = src.dim() == 2
        if unbatched:
            src = src.unsqueeze(0)
            padding = None if padding is None else padding.unsqueeze(0)
        compute = None
        if call.precision is not None:
            src, compute = src.to(call.precision.stream), call.precision.compute
        out = run_encoder(
            src,
            {**call.tensors, "padding": padding},
            call.config,
            policy=self._policy,
            backend=self._backend,
            seq_first=call.seq_first,
            functions=call.functions,
            accumulate_into=self._accumulate_into,
            compute=compute,
        )
        return out.squeeze(0) if unbatched else out


_EXACT = "evaluation without gradients is PyTorch's own where that is exact"
_NESTED = "src is a nested tensor"
_TRACED = "the call is exported, transformed or traced"

#: Called with the layer and the reason when a call does not take the fused path; usually empty.
DECISIONS: list[Callable[[nn.Module, str], None]] = []

_warned: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def _warn(layer: FusedRematLayer, message: str) -> None:
    """Warn of a fallback, once for each layer and reason."""
    seen = _warned.setdefault(layer, set())
    if message not in seen:
        text = f"{type(layer).__name__} runs {message}"
        warnings.warn(text, FusedRematWarning, stacklevel=6)
        seen.add(message)


def _warn_compiled(layer: str, reason: str) -> None:
    """The same while compiling; what PyTorch's forward keeps is then the compiler's choice."""
    warnings.warn(
        f"{layer}, compiled, runs PyTorch's own forward and saves no memory: {reason}",
        FusedRematWarning,
        stacklevel=2,
    )


_warn_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # not traced, but called


def _warn_mismatch(mask: Tensor | None, padding: Tensor | None) -> None:
    if mask is not None and padding is not None and mask.dtype != padding.dtype:
        warnings.warn(
            f"Support for mismatched src_key_padding_mask ({padding.dtype}) and src_mask "
            f"({mask.dtype}) is deprecated. Use same type for both instead.",
            stacklevel=5,
        )


def _is_traced() -> bool:
    """Whether the call is exported, transformed or traced: PyTorch's own forward serves those."""
    return (
        torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def _wants_grad(*values: Any) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )
