"""Who holds what: a model's parameters, divided among the devices of a mesh.

As `fused_remat.parallel` and FSDP2's `fully_shard` divide them: tensor parallel first (`q`, `k`,
`v`, `gate` and `up` by rows, `proj` and `down` by columns, the head by its vocabulary), then every
local shard by rows among the data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.scale import models
from fused_remat.scale.shapes import Model

#: The dimension of a layer's weights, and biases, that is divided among tensor-parallel ranks.
_ROWS, _COLUMNS = ("q", "k", "v", "gate", "up"), ("proj", "down")


@dataclass(frozen=True)
class Mesh:
    """Devices in a grid: `data` (FSDP2) by `tensor` (tensor parallel)."""

    data: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"{self.data}x{self.tensor}"


def mesh_of(text: str) -> Mesh:
    """A mesh as it is written: "8x4" is 8 data-parallel by 4 tensor-parallel ranks, "8" is "8x1".

    Raises: ValueError for other text, with it.

    >>> mesh_of("8x4").devices, mesh_of("16")
    (32, Mesh(data=16, tensor=1))
    """
    sizes = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text.strip())
    if sizes is None:
        raise ValueError(
            f"a mesh is DATAxTENSOR, as 8x8, or DATA alone, each at least 1 (pipeline stages are "
            f"not modelled); got {text!r}"
        )
    return Mesh(int(sizes[1]), int(sizes[2] or 1))


@dataclass(frozen=True)
class Layout:
    """A mesh, and whether the residual stream is divided by tokens among its tensor ranks."""

    mesh: Mesh
    sequence: bool = True

    @property
    def stream(self) -> int:
        """Among how many ranks the tokens of the residual stream are divided."""
        return self.mesh.tensor if self.sequence else 1


def check(model: Model, layout: Layout, seq: int) -> None:
    """Raises: ValueError if the mesh does not divide heads, feed-forward or tokens evenly."""
    tensor = layout.mesh.tensor
    for what, count in (
        ("query heads", model.nhead),
        ("key and value heads", model.kv_heads),
        ("units of the feed-forward", model.d_ff),
    ):
        if count % tensor:
            raise ValueError(
                f"{model.name} has {count} {what}, which {tensor} tensor-parallel ranks (of mesh "
                f"{layout.mesh}) do not divide evenly"
            )
    if seq % layout.stream:
        raise ValueError(
            f"sequence parallel: {seq} tokens of a sequence cannot be divided evenly among "
            f"{layout.stream} ranks"
        )


def padded(model: Model, mesh: Mesh) -> Model:
    """The model with rows added to its vocabulary until tensor-parallel ranks divide it evenly.

    >>> from fused_remat.scale.shapes import LARGE
    >>> padded(LARGE["gpt3-175b"], Mesh(1, 8)).vocab
    50264
    """
    return dataclasses.replace(model, vocab=-(-model.vocab // mesh.tensor) * mesh.tensor)


def rows_of(count: int, ranks: int, rank: int) -> int:
    """Rows that a rank has of `count`, as `torch.chunk` divides them: the last may have fewer.

    >>> [rows_of(10, 4, rank) for rank in range(4)]
    [3, 3, 3, 1]
    """
    most = -(-count // ranks)
    return max(0, min(most, count - rank * most))


@dataclass(frozen=True)
class Parameter:
    """A parameter, and how it is divided.

    Attributes:
        name: in its layer ("q.weight"), or in the model.
        shape: whole.
        split: the dimension that is divided among tensor-parallel ranks; None: each has all of it.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None

    def gathered(self, layout: Layout) -> tuple[int, ...]:
        """What a tensor-parallel rank computes with: its shard, gathered over data ranks."""
        sizes = list(self.shape)
        if self.split is not None:
            sizes[self.split] //= layout.mesh.tensor
        return tuple(sizes)

    def shard(self, layout: Layout, data_rank: int = 0) -> tuple[int, ...]:
        """What a rank holds between steps: its rows of `gathered`."""
        first, *rest = self.gathered(layout)
        return (rows_of(first, layout.mesh.data, data_rank), *rest)


@dataclass(frozen=True)
class Parameters:
    """Of one layer, of which there are `layers` equal ones; and of the rest: the root."""

    layer: tuple[Parameter, ...]
    root: tuple[Parameter, ...]
    layers: int

    def count(self) -> int:
        """Of the whole model.

        >>> from fused_remat.scale.shapes import LARGE
        >>> parameters_of(LARGE["llama3-70b"], 8192).count()
        70553706496
        """
        return elements(self.root) + self.layers * elements(self.layer)


def elements(parameters: tuple[Parameter, ...]) -> int:
    """Numbers in whole parameters."""
    return sum(math.prod(p.shape) for p in parameters)


def gathered(parameters: tuple[Parameter, ...], layout: Layout) -> int:
    """Numbers in one tensor rank's, gathered over data ranks."""
    return sum(math.prod(p.gathered(layout)) for p in parameters)


def sharded(parameters: tuple[Parameter, ...], layout: Layout, data_rank: int = 0) -> int:
    """Numbers in one device's shards; those of data rank 0 are the largest."""
    return sum(math.prod(p.shard(layout, data_rank)) for p in parameters)


@functools.lru_cache(maxsize=64)
def on_meta(model: Model, seq: int, dtype: torch.dtype) -> models.LanguageModel:
    """The model with one of its layers, without memory.

    Raises: ValueError for a model that is no causal language model.
    """
    if not model.causal or not model.vocab:
        raise ValueError(f"{model.name} is no causal language model, which is what is modelled")
    one = dataclasses.replace(model, layers=1)
    made, _ = models.build(one, 1, seq, device="meta", dtype=dtype)
    assert isinstance(made, models.LanguageModel)
    return made


@functools.lru_cache(maxsize=64)
def parameters_of(model: Model, seq: int) -> Parameters:
    """Those of a model for sequences of `seq` tokens (learned positions may be more for longer)."""
    made = on_meta(model, seq, torch.bfloat16)
    prefix = "layers.0."
    found = {name: tuple(p.shape) for name, p in made.named_parameters()}
    layer = tuple(
        Parameter(name.removeprefix(prefix), shape, _split(name.removeprefix(prefix)))
        for name, shape in found.items()
        if name.startswith(prefix)
    )
    return Parameters(layer, tuple(_root(model, found, prefix)), model.layers)


def _split(name: str) -> int | None:
    module, _, kind = name.rpartition(".")
    if module in _ROWS:
        return 0
    return 1 if module in _COLUMNS and kind == "weight" else None


def _root(model: Model, found: dict[str, tuple[int, ...]], prefix: str) -> Iterator[Parameter]:
    """The head is divided by its vocabulary, and with it the embedding, if they share a weight."""
    divided = "embed.weight" if model.tied else "head.weight"
    for name, shape in found.items():
        if not name.startswith(prefix):
            yield Parameter(name, shape, 0 if name == divided else None)


def divides_head(parameters: Parameters, layout: Layout) -> bool:
    """Whether the loss is of a divided vocabulary.

    Raises: ValueError for a vocabulary that cannot be divided evenly.
    """
    split = [p for p in parameters.root if p.split is not None]
    for p in split:
        if p.shape[0] % layout.mesh.tensor:
            raise ValueError(
                f"a vocabulary of {p.shape[0]} cannot be divided evenly among "
                f"{layout.mesh.tensor} tensor-parallel ranks: pad it"
            )
    return bool(split) and layout.mesh.tensor > 1


def layer_module(model: Model, seq: int, dtype: torch.dtype) -> nn.Module:
    """The layer of `on_meta`."""
    return on_meta(model, seq, dtype).layers[0]


def tables_of(model: Model, seq: int, dtype: torch.dtype) -> tuple[Tensor | None, Tensor | None]:
    """The rotary tables of `on_meta`, or None twice."""
    made: Any = on_meta(model, seq, dtype)
    return made.cos, made.sin
