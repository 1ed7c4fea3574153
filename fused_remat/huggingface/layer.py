"""Layers of transformers whose forward is a block: their class, and the choice of path."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.huggingface.call import call_of, example_spec
from fused_remat.huggingface.rows import Architecture, architecture_of, at
from fused_remat.layers.fallback import checkpointed
from fused_remat.layers.fused_layer import (
    DECISIONS,
    TRACED,
    FusedLayer,
    is_traced,
    wants_grad,
    warn_compiled,
    warn_once,
)
from fused_remat.layers.read import LayerCall, Place, in_module


class HuggingFaceLayer(FusedLayer):
    """Mixed in before a layer class of transformers by `fused_class`.

    Attributes:
        stock: the class of transformers that it stands in for.
        architecture: its row.
        arguments: names of the positional arguments of its forward.
    """

    stock: ClassVar[type[nn.Module]]
    architecture: ClassVar[Architecture]
    arguments: ClassVar[tuple[str, ...]]

    @property
    def gradient_checkpointing(self) -> bool:
        """False, so that transformers does not rebuild around a block, which rebuilds itself.

        What transformers sets is kept, and rules where the block does not serve a call.
        """
        return False

    @gradient_checkpointing.setter
    def gradient_checkpointing(self, asked: bool) -> None:
        self.__dict__["gradient_checkpointing"] = asked

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if FUSED.get(type(self).__dict__.get("stock")) is not type(self):  # type: ignore[arg-type]
            return reduced
        # By its stock class: this one's name is that of the stock one.
        return (_new, (self.stock,), *reduced[2:])

    def why_not_fused(self, *args: Any, **kwargs: Any) -> str | None:
        """Why this call of `forward` would not take the fused path, or None if it would.

        Calls without gradients and without dropout never do: they are transformers' own.
        """
        given = self._named(args, kwargs)
        if is_traced() or given is None:
            return TRACED if given is not None else "its arguments do not fit"
        if not self._may_differ(given):
            return "no gradients are wanted"
        if self._division is not None:
            inputs = self._stand_ins({"input": given["hidden_states"]}, 1)
            given = {**given, "hidden_states": inputs["input"]}
        call = self._choose(given)[0]
        return call if isinstance(call, str) else None

    def _example(self) -> Graph:
        return block_graph(example_spec(self, self.architecture))

    def _places(self) -> tuple[Place, ...]:
        row = self.architecture
        return tuple(
            in_module(name, *path.split("."))
            for part in (row.linears, row.norms, row.head_norms)
            for name, path in part.items()
        )

    def _heads(self) -> dict[str, int]:
        row = self.architecture
        width = int(getattr(at(self, row.attention), row.head_dim))
        kinds = {"heads": "q", "key and value heads": "k"}
        return {
            what: at(self, row.linears[name]).weight.shape[0] // width
            for what, name in kinds.items()
            if name in row.linears
        }

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
        """The arguments by name; None if they do not fit, of which the stock forward complains."""
        if len(args) > len(self.arguments):
            return None
        given = dict(zip(self.arguments, args, strict=False))
        named = {**given, **kwargs}
        fits = "hidden_states" in named and len(named) == len(given) + len(kwargs)
        return named if fits else None

    def _choose(self, given: dict[str, Any]) -> tuple[LayerCall | str, dict[str, Any], bool]:
        """The block that serves a call, or why none does; the arguments; whether with a cache."""
        given, cached = self._without_cache(given)
        return cached or call_of(self, self.architecture, given), given, cached is not None

    def _without_cache(self, given: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """The arguments without a cache that nobody needs; or as they are, and why they need it."""
        index = getattr(at(self, self.architecture.attention), "layer_idx", None)
        return without_cache(self, given, index or 0)

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        """`forward(*args, **kwargs)`: the block, or transformers' own forward."""
        if self._division is not None:
            return self._serve_divided(*args, **kwargs)
        if is_traced():
            self._refuse_to_accumulate(TRACED)
            return self.stock.forward(self, *args, **kwargs)
        given = self._named(args, kwargs)
        if given is None:
            return self.stock.forward(self, *args, **kwargs)
        if not self._may_differ(given):
            # Of a frozen layer in training, too: the trained ones above it fill no cache.
            given = self._without_cache(given)[0] if torch.is_grad_enabled() else given
            return self.stock.forward(self, **given)
        call, given, cached = self._choose(given)
        if isinstance(call, LayerCall):
            return self._fused(call)
        self._refuse_to_accumulate(call)
        if torch.compiler.is_compiling():
            warn_compiled(type(self).__name__, call)
            return self.stock.forward(self, **given)
        self._refuse_dtensors(given.values())
        for observe in DECISIONS:
            observe(self, call)
        return self._fallback(call, given, cached)

    def _serve_divided(self, *args: Any, **kwargs: Any) -> Any:
        """`_serve` of a layer that is divided among ranks."""
        if torch.compiler.is_compiling():
            from fused_remat.autograd import graph_break

            return graph_break.eagerly(self._serve_divided, *args, **kwargs)
        given = self._named(args, kwargs)
        if is_traced() or given is None:
            reason = TRACED if given is not None else "its arguments do not fit"
            raise RuntimeError(f"fused_remat: a tensor-parallel layer cannot run: {reason}")

        def choose(inputs: Mapping[str, Any]) -> LayerCall | str:
            call, _, cached = self._choose({**given, "hidden_states": inputs["input"]})
            return f"{call}: pass use_cache=False" if cached and isinstance(call, str) else call

        return self._divided(choose, {"input": given["hidden_states"]}, 1)

    def _may_differ(self, given: Mapping[str, Any]) -> bool:
        """Whether a call may be a block's; else it is transformers' own, bit for bit.

        Without gradients only one that draws dropout may be: it may be the first run of a
        reentrant checkpoint, whose replay, with gradients, has to draw the same.
        """
        if torch.is_grad_enabled():
            return wants_grad(*given.values()) or wants_grad(*self.parameters())
        if not self.training or torch.is_inference_mode_enabled():
            return False
        call = None if has_cache(given) else call_of(self, self.architecture, given)
        return isinstance(call, LayerCall) and block_graph(call.spec).uses_seed

    def _fallback(self, reason: str, given: dict[str, Any], cached: bool) -> Any:
        """transformers' own forward, under checkpoint unless it writes to a cache."""
        names = tuple(given)

        def forward(*values: Any) -> Any:
            return self.stock.forward(self, **dict(zip(names, values, strict=True)))

        if cached or (self._policy == "none" and not self._checkpoints):
            warn_once(self, f"its own forward: {reason}")
            return forward(*given.values())
        if self._checkpoints:
            warn_once(self, f"its own forward under transformers' checkpoint: {reason}")
            rest = {name: given[name] for name in names if name != "hidden_states"}
            rebuild = functools.partial(self.stock.forward, self, **rest)
            return self._gradient_checkpointing_func(rebuild, given["hidden_states"])  # type: ignore[operator]
        warn_once(self, f"its own forward under torch.utils.checkpoint: {reason}")
        return checkpointed(self, functools.partial(self.stock.forward, self), given)

    @property
    def _checkpoints(self) -> bool:
        """Whether transformers was asked to rebuild this layer, and would now."""
        return self.training and bool(self.__dict__.get("gradient_checkpointing"))


#: By the stock class.
FUSED: dict[type[nn.Module], type[HuggingFaceLayer]] = {}


def fused_class(stock: type[nn.Module]) -> type[HuggingFaceLayer] | None:
    """The class that stands in for a layer class of transformers, one object each; None for others.

    It has the stock class's name, by which wrap lists (`_no_split_modules`) know it, and is a
    subclass, by which transformers' recorders do.

    >>> fused_class(nn.Linear) is None
    True
    """
    row = architecture_of(stock)
    if row is None:
        return None
    if stock not in FUSED:
        forward = inspect.signature(stock.forward)
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        names = [name for name, p in forward.parameters.items() if p.kind in kinds]
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "stock": stock,
            "architecture": row,
            "arguments": tuple(names[1:]),
            "forward": _forward(stock),
        }
        made = type(stock.__name__, (HuggingFaceLayer, stock), namespace)
        return FUSED.setdefault(stock, made)  # of two threads, the first one's
    return FUSED[stock]


def _forward(stock: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(stock.forward)
    def forward(self: HuggingFaceLayer, *args: Any, **kwargs: Any) -> Any:
        return self._serve(*args, **kwargs)

    return forward


def _new(stock: type[nn.Module]) -> nn.Module:
    """An empty layer of the class that stands in for `stock`; for unpickling."""
    cls = fused_class(stock)
    assert cls is not None
    return cls.__new__(cls)


#: Names that layers have had for it.
_NAMES = ("past_key_values", "past_key_value", "layer_past")


def has_cache(given: Mapping[str, Any]) -> bool:
    """Whether there is one among the arguments."""
    return any(given.get(name) is not None for name in _NAMES)


def without_cache(
    layer: torch.nn.Module, given: Mapping[str, Any], index: int = 0
) -> tuple[dict[str, Any], str | None]:
    """The arguments without a cache, and None; or as they are, and why the cache has to be there.

    `index` is the layer's in the cache: other layers, not converted, may fill their own parts.

    Models hand their layers an empty cache by default, in training, too, where nobody reads it. It
    is dropped then with transformers' own warning, as under its gradient checkpointing. One that
    holds tokens takes part in attention (prefix tuning), and one that is to be filled in evaluation
    is the caller's.

    >>> without_cache(torch.nn.Identity(), {"past_key_values": None, "use_cache": True})
    ({'use_cache': True}, None)
    """
    caches = {name: given[name] for name in _NAMES if given.get(name) is not None}
    kept = {name: value for name, value in given.items() if name not in _NAMES}
    if not caches:
        return kept, None
    if not layer.training:
        return dict(given), "it fills a cache in evaluation"
    if not all(_is_empty(cache, index) for cache in caches.values()):
        return dict(given), "its cache holds tokens"
    if not torch.compiler.is_compiling():
        _warn(type(layer).__name__, tuple(caches))
    return {**kept, "use_cache": False} if "use_cache" in given else kept, None


def _is_empty(cache: Any, index: int) -> bool:
    count = getattr(cache, "get_seq_length", None)
    length = None if count is None else count(index)
    # A static cache's is a tensor, whose value is not worth waiting for.
    return isinstance(length, int) and length == 0


def _warn(layer: str, names: tuple[str, ...]) -> None:
    from transformers.utils import logging

    dropped = ", ".join(f"`{name}=None`" for name in names)
    logging.get_logger("transformers.fused_remat").warning_once(
        f"Caching is incompatible with rebuilding activations in {layer}. Setting {dropped}."
    )
