"""Layers whose class `convert` has replaced: same object, same name, and their caches."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from fused_remat.layers.eligibility import Reason
from fused_remat.layers.fused_layer import FusedLayer, is_traced, wants_grad
from fused_remat.layers.read import GraphCall, LayerCall, read_block
from fused_remat.layers.warn import warn

_IDLE = Reason("no gradients are wanted", quiet=True)
#: Names that layers have had for a cache.
CACHES = ("past_key_values", "past_key_value", "layer_past")
#: The attribute of a cache that a call has left empty: the index of the first layer that did.
_UNFILLED = "_fused_remat_unfilled"

Converted = TypeVar("Converted", bound="ConvertedLayer")


class ConvertedLayer(FusedLayer):
    """Mixed in before a layer class of another library by `class_of`.

    Attributes:
        stock: the class that it stands in for.
        arguments: names of the positional arguments of its forward; none if it has some that cannot
            be passed by name.
    """

    arguments: ClassVar[tuple[str, ...]]
    _owner = "its own"

    @property
    def gradient_checkpointing(self) -> bool:
        """False, so that transformers does not rebuild around a block, which rebuilds itself.

        What transformers sets is kept, and applies where a block does not serve a call.
        """
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, asked: bool) -> None:
        self.__dict__["gradient_checkpointing"] = asked

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if "stock" not in type(self).__dict__:  # a user's subclass
            return reduced
        # By its stock class: this one's name is that of the stock one.
        return (self._new, (self.stock,), *reduced[2:])

    @staticmethod
    def _new(stock: type[nn.Module]) -> nn.Module:
        """An empty layer of the class that stands in for `stock`; for unpickling."""
        raise NotImplementedError

    def why_not_fused(self, *args: Any, **kwargs: Any) -> str | None:
        """Why this call of `forward` would not take the fused path, or None if it would.

        Calls without gradients and without dropout never do: they are the stock layer's.
        """
        named = self._named(args, kwargs)
        if named is None:
            return "its arguments do not fit forward"
        return self._why_not(**self._without_idle_cache(named))

    def _layer_index(self) -> int:
        """The layer's place in a cache."""
        raise NotImplementedError

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments by name; None if they do not fit, of which the stock forward complains."""
        given = dict(zip(self.arguments, args, strict=False))
        named = {**given, **kwargs}
        fits = len(args) <= len(self.arguments) and len(named) == len(given) + len(kwargs)
        return named if fits and self.arguments[0] in named else None

    def _read(self, **given: Any) -> LayerCall | GraphCall | Reason:
        """The block of a call that trains; others are the stock layer's, bit for bit.

        Without gradients a block serves only if it draws dropout: the call may be the first run of
        a reentrant checkpoint, whose replay, with gradients, has to draw the same.
        """
        trains = torch.is_grad_enabled()
        if self._tensor_parallel is None:
            if trains and not wants_grad(*given.values()) and not wants_grad(*self.parameters()):
                return _IDLE
            if not trains and (not self.training or torch.is_inference_mode_enabled()):
                return _IDLE
        reason = self._why_cached(given)
        call = self._block(**given) if reason is None else reason
        if trains or self._tensor_parallel is not None:
            return call
        draws = not isinstance(call, Reason) and call.graph.uses_seed
        return call if draws else _IDLE

    def _block(self, **given: Any) -> LayerCall | GraphCall | Reason:
        """The block of a call that trains, or why there is none."""
        return read_block(self, self._map, given)

    def _why_cached(self, given: Mapping[str, Any]) -> Reason | None:
        """Why a call has a cache, which a block neither reads nor fills; None if it has none."""
        if all(given.get(name) is None for name in CACHES):
            return None
        filled, fills = "the cache holds tokens", "the call fills a cache in evaluation"
        why = filled if self.training else fills
        hint = "" if self._tensor_parallel is None else "; pass use_cache=False"
        return Reason(f"{why}{hint}")

    def _without_idle_cache(self, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments, without a cache that is neither read nor filled.

        Models hand their layers an empty cache by default, also in training. It is dropped then,
        with transformers' own warning, as under its gradient checkpointing. One that holds tokens
        takes part in attention (prefix tuning), and one that is filled in evaluation is the
        caller's.
        """
        caches = {name: given[name] for name in CACHES if given.get(name) is not None}
        trains = torch.is_grad_enabled() or self._tensor_parallel is not None
        if not caches or not self.training or not trains or is_traced():
            return given
        # The layer's own part of the cache: others, not converted, may have filled theirs.
        index = self._layer_index()
        if not all(_is_empty(cache, index) for cache in caches.values()):
            return given
        if not torch.compiler.is_compiling():
            _warn_of_dropped(type(self).__name__, tuple(caches))
        kept = {name: value for name, value in given.items() if name not in CACHES}
        return {**kept, "use_cache": False} if "use_cache" in given else kept

    def _check_unfilled(self, cache: Any, dropped: bool) -> None:
        """Warn if an earlier call left the cache empty; note it where this one does.

        The layers of one call share a cache, so it is the first of them that notes and warns.
        """
        index = self._layer_index()
        first = getattr(cache, _UNFILLED, None)
        if first is None and dropped:
            setattr(cache, _UNFILLED, index)
        elif first is not None and first == index and _runs_forward() and _is_empty(cache, index):
            warn(
                self,
                "is given a cache that an earlier call in training left empty, so it does not "
                "attend to the tokens of that call; fill a cache after model.eval(), and train "
                "with use_cache=False",
            )

    def _stock_forward(self, **given: Any) -> Any:
        return self.stock.forward(self, **given)

    def _checkpointed(self, reason: Reason, given: Mapping[str, Any]) -> Any:
        """The stock forward; under transformers' own checkpoint if that was asked for.

        Not under a checkpoint where it writes to a cache, which a replay would do again.
        """
        asked = self.training and bool(self.__dict__.get("gradient_checkpointing"))
        if self._why_cached(given) is not None:
            warn(self, f"runs {self._owner} forward: {reason.text}")
            return self._stock_forward(**given)
        if not asked:
            return super()._checkpointed(reason, given)
        warn(self, f"runs transformers' own forward under its checkpoint: {reason.text}")
        first, *_ = self.arguments
        rest = {name: value for name, value in given.items() if name != first}
        return self._gradient_checkpointing_func(  # type: ignore[operator]
            lambda x: self._stock_forward(**{first: x}, **rest), given[first]
        )


def class_of(
    stock: type[nn.Module],
    base: type[Converted],
    made: dict[type[nn.Module], type[Converted]],
    **more: Any,
) -> type[Converted]:
    """The subclass of `base` and `stock` that stands in for `stock`, with attributes `more`.

    `made`: those that there are already.
    """
    if stock not in made:
        forward = inspect.signature(stock.forward)
        params = [*forward.parameters.values()][1:]
        names = [p.name for p in params if p.kind is p.POSITIONAL_OR_KEYWORD]
        by_name = all(p.kind is not p.POSITIONAL_ONLY for p in params)
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "stock": stock,
            "arguments": tuple(names) if by_name else (),
            "forward": _forward(stock),
            **more,
        }
        new: Any = type(stock.__name__, (base, stock), namespace)
        new._has_own_forward = False
        return made.setdefault(stock, new)  # of two threads, the first one's
    return made[stock]


def _forward(stock: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(stock.forward)
    def forward(self: ConvertedLayer, *args: Any, **kwargs: Any) -> Any:
        named = self._named(args, kwargs)
        if named is None:
            return self.stock.forward(self, *args, **kwargs)  # which raises TypeError
        given = self._without_idle_cache(named)
        cache = named.get("past_key_values")
        if cache is not None:
            self._check_unfilled(cache, "past_key_values" not in given)
        return self._call(**given)

    return forward


def _is_empty(cache: Any, index: int) -> bool:
    count = getattr(cache, "get_seq_length", None)
    length = None if count is None else count(index)
    # A static cache's length is a tensor, whose value is not worth waiting for.
    return isinstance(length, int) and length == 0


def _runs_forward() -> bool:
    """False while a layer is compiled, or called again in backward by a checkpoint around it."""
    return not torch.compiler.is_compiling() and torch._C._current_graph_task_id() == -1


def _warn_of_dropped(layer: str, names: tuple[str, ...]) -> None:
    from transformers.utils import logging

    dropped = ", ".join(f"`{name}=None`" for name in names)
    logging.get_logger("transformers.fused_remat").warning_once(
        f"Caching is incompatible with rebuilding activations in {layer}. Setting {dropped}. "
        "The model returns an empty cache; pass `use_cache=False`."
    )
