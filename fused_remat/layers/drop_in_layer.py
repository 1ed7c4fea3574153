"""What the drop-in layers share: the fused path, and PyTorch's forward beside it."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fused_remat.layers import fastpath
from fused_remat.layers.fused_layer import (
    DECISIONS,
    TRACED,
    FusedLayer,
    is_traced,
    wants_grad,
    warn_compiled,
    warn_once,
)
from fused_remat.layers.layer_call import LayerCall
from fused_remat.layers.replay import checkpointed
from fused_remat.policies import Policy

Layer = TypeVar("Layer", bound="DropInLayer")


class DropInLayer(FusedLayer):
    """A layer of `torch.nn` whose forward is a block; mixed in before the stock class.

    A subclass has `_choose` and `_example`, and a `forward` that calls `_serve`.

    Attributes:
        stock: the class of `torch.nn` that it stands in for.
    """

    stock: ClassVar[type[nn.Module]]
    #: Pairs of masks that PyTorch wants of one dtype, as (name, index in forward), (name, index).
    _mask_pairs: ClassVar[tuple[tuple[tuple[str, int], tuple[str, int]], ...]] = ()
    #: What `_choose` says where PyTorch's own forward is what is wanted.
    _quiet: ClassVar[tuple[str, ...]] = ()
    #: The block's inputs, the first arguments of forward.
    _inputs: ClassVar[tuple[str, ...]] = ("input",)

    @classmethod
    def from_layer(
        cls: type[Layer],
        layer: nn.Module,
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
    ) -> Layer:
        """A fused layer with the submodules of `layer`: same parameters, mode and hooks.

        Raises: TypeError if `layer` is not of the stock class, or is of a subclass (whose
            behaviour would be lost).

        >>> from fused_remat import FusedRematLayer
        >>> stock = nn.TransformerEncoderLayer(64, 4)
        >>> fused = FusedRematLayer.from_layer(stock, policy="balanced")
        >>> fused.linear1.weight is stock.linear1.weight
        True
        """
        if type(layer) is not cls.stock and not isinstance(layer, cls):
            name = cls.stock.__name__
            wanted = f"an nn.{name}" if cls.stock.__module__.startswith("torch.") else f"a {name}"
            raise TypeError(f"from_layer takes {wanted}, got {type(layer).__name__}")
        new = cls.__new__(cls)
        new.__dict__ = {
            k: dict(v) if type(v) is dict else v.copy() if hasattr(v, "copy") else v
            for k, v in layer.__dict__.items()
        }
        new.policy = policy
        new.backend = backend
        new.accumulate_into = accumulate_into
        return new

    def _choose(self, *args: Any) -> LayerCall | str:
        """The block that serves a call of forward, or why none does."""
        raise NotImplementedError

    def _why_not(self, *args: Any) -> str | None:
        """Why this call of `forward` would not take the fused path, or None if it would."""
        if is_traced():
            return TRACED
        if self._division is None:
            call = self._choose(*args)
        else:
            inputs, dim = self._divided_inputs(args)
            call = self._choose_by(args, self._stand_ins(inputs, dim))
        return call if isinstance(call, str) else None

    def _serve(self, *args: Any) -> Tensor:
        """`forward(*args)`: the block, or PyTorch's own forward."""
        if self._division is not None:
            return self._serve_divided(*args)
        if is_traced():
            self._refuse_to_accumulate(TRACED)
            return super().forward(*args)  # type: ignore[no-any-return]
        call = self._choose(*args)
        if isinstance(call, LayerCall):
            if not torch.compiler.is_compiling():
                _warn_mismatch(self._mask_pairs, args)
            return self._fused(call)
        if torch.compiler.is_compiling():
            if call not in self._quiet and wants_grad(*args, *self.parameters()):
                warn_compiled(type(self).__name__, call)
            return super().forward(*args)  # type: ignore[no-any-return]
        self._refuse_dtensors(args)
        for observe in DECISIONS:
            observe(self, call)
        return self._quietly(call, *args) if call in self._quiet else self._fallback(call, *args)

    def _serve_divided(self, *args: Any) -> Tensor:
        """`_serve` of a layer that is divided among ranks."""
        if torch.compiler.is_compiling():
            from fused_remat import uncompiled

            return uncompiled.eagerly(self._serve_divided, *args)  # type: ignore[no-any-return]
        if is_traced():
            raise RuntimeError(f"fused_remat: a tensor-parallel layer cannot run: {TRACED}")
        inputs, dim = self._divided_inputs(args)
        return self._divided(functools.partial(self._choose_by, args), inputs, dim)

    def _divided_inputs(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
        """The block's inputs by name, and the dimension that the tokens are in."""
        x, attn = args[0], getattr(self, "self_attn", None)
        if not isinstance(x, Tensor) or x.is_nested or x.dim() not in (2, 3):
            raise ValueError(f"expected a Tensor of 2 or 3 dimensions, got {_shown(x)}")
        dim = 0 if x.dim() == 2 or not getattr(attn, "batch_first", True) else 1
        return dict(zip(self._inputs, args, strict=False)), dim

    def _choose_by(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> LayerCall | str:
        """`_choose(*args)` with `inputs` in the place of the first."""
        names = self._inputs
        return self._choose(*[inputs[name] for name in names], *args[len(names) :])

    def _quietly(self, reason: str, *args: Any) -> Tensor:
        """What serves a call that `_choose` gave one of `_quiet` for."""
        raise NotImplementedError

    def _unfused(self, *args: Any) -> Tensor:
        """PyTorch's forward through the submodules, also in eval."""
        with fastpath.off():
            return super().forward(*args)  # type: ignore[no-any-return]

    def _fallback(self, reason: str, *args: Any) -> Tensor:
        """The same, under checkpoint where gradients are wanted, and with a warning then."""
        if not wants_grad(*args, *self.parameters()):
            return self._unfused(*args)
        self._refuse_to_accumulate(reason)
        if self._policy == "none":
            out = self._unfused(*args)
            warn_once(self, f"PyTorch's own forward: {reason}", stacklevel=7)
        else:
            out = checkpointed(self, self._unfused, *args)
            warn_once(
                self, f"PyTorch's own forward under torch.utils.checkpoint: {reason}", stacklevel=7
            )
        return out


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "a nested one" if value.is_nested else f"shape {tuple(value.shape)}"


def _warn_mismatch(
    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...], args: tuple[Any, ...]
) -> None:
    for (name, i), (other, j) in pairs:
        mask, padding = args[i], args[j]
        if mask is not None and padding is not None and mask.dtype != padding.dtype:
            warnings.warn(
                f"Support for mismatched {other} ({padding.dtype}) and {name} "
                f"({mask.dtype}) is deprecated. Use same type for both instead.",
                stacklevel=6,
            )
