"""What becomes of a cache of keys and values that a layer is called with while it trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

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
