"""What `convert` made of the layers of a model: which are blocks, and which are left, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from torch import nn

from fused_remat.layers.converted import ConvertedLayer
from fused_remat.layers.eligibility import Reason
from fused_remat.layers.fused_layer import FusedLayer
from fused_remat.recognition.find import repeated_layers
from fused_remat.recognition.layer import ReadLayer
from fused_remat.recognition.read import Piece


@dataclass(frozen=True)
class LayerKind:
    """Layers of one class of which the same is to be said.

    Attributes:
        name, count: of the class, and how many layers of it there are.
        state: "converted", "left", "not called" (a layer without a row is read at the first call
            that trains) or "stock" (`convert` did not take it).
        pieces: submodules that are replayed in backward, and why they are no steps of a block.
        reason: why the layers are left as they are.
    """

    name: str
    count: int
    state: str
    pieces: tuple[Piece, ...] = ()
    reason: str = ""

    def __str__(self) -> str:
        layers = f"{self.count} × {self.name}"
        if self.state == "left":
            advice = "torch.utils.checkpoint around it saves what it keeps"
            return f"left {layers} as it is: {self.reason}; {advice}"
        if self.state == "not called":
            return f"{layers}: read at the first call that trains"
        if self.state == "stock":
            return f"{layers}: not converted"
        if not self.pieces:
            return f"converted {layers}"
        named = "; ".join(f"{name} ({why})" for name, why in self.pieces)
        many = "piece" if len(self.pieces) == 1 else "pieces"
        return (
            f"converted {layers} with {len(self.pieces)} replayed {many}, which backward runs "
            f"again: {named}"
        )


class Conversion(list[LayerKind]):
    """All kinds of layers of a model; prints as text."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))

    __repr__ = __str__


def conversion(model: nn.Module) -> Conversion:
    """What `convert` made of the layers of `model`.

    A layer that has no row is read at the first call that trains, so ask after it.

    >>> from fused_remat import convert
    >>> layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4) for _ in range(4))
    >>> conversion(convert(layers, every=2))
    converted 2 × FusedRematLayer
    2 × TransformerEncoderLayer: not converted
    """
    layers = [m for m in model.modules() if isinstance(m, FusedLayer)]
    found = Counter(map(_kind, layers))
    stock = Counter(type(layer).__name__ for layer in repeated_layers(model))
    stock += Counter(
        type(m).__name__
        for m in model.modules()
        if type(m) in (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
    )
    kinds = [replace(kind, count=count) for kind, count in found.items()]
    return Conversion([*kinds, *[LayerKind(name, n, "stock") for name, n in stock.items()]])


def _kind(layer: FusedLayer) -> LayerKind:
    stock = layer.stock if isinstance(layer, ConvertedLayer) else type(layer)
    if not isinstance(layer, ReadLayer):
        return LayerKind(stock.__name__, 0, "converted")
    last = layer.read_as
    if last is None:
        return LayerKind(stock.__name__, 0, "not called")
    if isinstance(last, Reason):
        return LayerKind(stock.__name__, 0, "left", reason=last.text)
    return LayerKind(stock.__name__, 0, "converted", last.reading.pieces)
