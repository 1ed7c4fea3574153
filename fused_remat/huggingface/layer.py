"""Layers of transformers that have an entry: their blocks need no trace."""

from __future__ import annotations

from torch import nn

from fused_remat.huggingface.call import example_spec
from fused_remat.huggingface.rows import architecture_of
from fused_remat.layers.converted import ConvertedLayer, class_of
from fused_remat.spec import BlockSpec


class HuggingFaceLayer(ConvertedLayer):
    """Mixed in before a layer class of transformers by `fused_class`."""

    _owner = "transformers' own"

    @staticmethod
    def _new(stock: type[nn.Module]) -> nn.Module:
        cls = fused_class(stock)
        assert cls is not None
        return cls.__new__(cls)

    def _example_spec(self) -> BlockSpec:
        return example_spec(self, self._map)

    def _heads(self) -> dict[str, int]:
        layer_map = self._map
        modules = layer_map.modules(self)
        width = int(getattr(modules[layer_map.attention], layer_map.numbers["head_dim"]))
        kinds = {"heads": "q", "key and value heads": "k"}
        return {
            what: modules[layer_map.linears[name]].weight.shape[0] // width
            for what, name in kinds.items()
            if name in layer_map.linears
        }

    def _layer_index(self) -> int:
        attention = self._map.modules(self)[self._map.attention]
        return getattr(attention, "layer_idx", None) or 0


#: By the stock class.
FUSED: dict[type[nn.Module], type[HuggingFaceLayer]] = {}


def fused_class(stock: type[nn.Module]) -> type[HuggingFaceLayer] | None:
    """Return the class that replaces a layer class of transformers, always the same; or None.

    It has the stock class's name, for wrap lists (`_no_split_modules`), and is a subclass, for
    transformers' recorders.
    """
    layer_map = architecture_of(stock)
    if layer_map is None:
        return None
    return class_of(stock, HuggingFaceLayer, FUSED, _map=layer_map)
