"""A model's parameters, divided among the devices of a mesh.

They are divided as `fused_remat.parallel` and FSDP2's `fully_shard` do it: first among the ranks of
tensor parallelism (`q`, `k`, `v`, `gate` and `up` by rows, `proj` and `down` by columns, the head
by its vocabulary), then every local shard by rows among the data-parallel ranks.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from dataclasses import dataclass

import torch

from fused_remat.scale import models
from fused_remat.scale.shapes import Model

#: Linear layers whose weights are divided by rows (with their biases), and by columns.
_ROWS, _COLUMNS = ("q", "k", "v", "gate", "up"), ("proj", "down")


@dataclass(frozen=True)
class Mesh:
    """A grid of devices: `data` ranks (FSDP2) by `tensor` ranks (tensor parallel)."""

    data: int
    tensor: int

    @property
    def devices(self) -> int:
        return self.data * self.tensor


def mesh_of(text: str) -> Mesh:
    """Read a mesh: "8x4" is 8 data-parallel by 4 tensor-parallel ranks, "8" is the same as "8x1".

    Raises: ValueError for any other text.

    >>> mesh_of("8x4").devices, mesh_of("16")
    (32, Mesh(data=16, tensor=1))
    """
    sizes = re.fullmatch(r"([1-9][0-9]*)(?:x([1-9][0-9]*))?", text.strip())
    if sizes is None:
        raise ValueError(
            "a mesh is DATAxTENSOR, such as 8x8, or DATA alone, each at least 1 (pipeline stages "
            f"are not supported); got {text!r}"
        )
    return Mesh(int(sizes[1]), int(sizes[2] or 1))


@dataclass(frozen=True)
class Layout:
    """A mesh, and whether its tensor-parallel ranks divide the residual stream by tokens."""

    mesh: Mesh
    sequence: bool = True

    @property
    def stream(self) -> int:
        """Number of ranks that divide the tokens of the residual stream."""
        return self.mesh.tensor if self.sequence else 1


def check(model: Model, layout: Layout, seq: int) -> None:
    """Raise a ValueError if the mesh does not divide heads, feed-forward or tokens evenly."""
    data, tensor = layout.mesh.data, layout.mesh.tensor
    for what, count in (
        ("query heads", model.nhead),
        ("key and value heads", model.kv_heads),
        ("units of the feed-forward", model.d_ff),
    ):
        if count % tensor:
            raise ValueError(
                f"{model.name} has {count} {what}, which {tensor} tensor-parallel ranks (of mesh "
                f"{data}x{tensor}) do not divide evenly"
            )
    if seq % layout.stream:
        raise ValueError(
            f"sequence parallelism cannot divide {seq} tokens evenly among {layout.stream} ranks; "
            "choose another sequence length, or turn sequence parallelism off"
        )


@dataclass(frozen=True)
class Parameter:
    """A parameter, and how it is divided."""

    name: str  # in the layer ("q.weight"), or in the model
    shape: tuple[int, ...]  # undivided
    split: int | None  # the dimension that tensor-parallel ranks divide; None if each has all of it

    def gathered(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape that a tensor-parallel rank computes with, gathered over data ranks."""
        sizes = list(self.shape)
        if self.split is not None:
            sizes[self.split] //= layout.mesh.tensor
        return tuple(sizes)

    def shard(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape that data rank 0, which has the most rows, holds between steps."""
        first, *rest = self.gathered(layout)
        return (-(-first // layout.mesh.data), *rest)


@dataclass(frozen=True)
class Parameters:
    """The parameters of one of `layers` equal layers, and those of the root: everything else."""

    layer: tuple[Parameter, ...]
    root: tuple[Parameter, ...]
    layers: int

    def count(self) -> int:
        """Return the number of elements in the entire model."""
        root, layer = (sum(math.prod(p.shape) for p in of) for of in (self.root, self.layer))
        return root + self.layers * layer


def gathered(parameters: tuple[Parameter, ...], layout: Layout) -> int:
    """Return the number of elements of a tensor-parallel rank, gathered over data ranks."""
    return sum(math.prod(p.gathered(layout)) for p in parameters)


def sharded(parameters: tuple[Parameter, ...], layout: Layout) -> int:
    """Return the number of elements in a device's shards; those of data rank 0 are the largest."""
    return sum(math.prod(p.shard(layout)) for p in parameters)


@functools.lru_cache(maxsize=64)
def on_meta(model: Model, seq: int, dtype: torch.dtype) -> models.LanguageModel:
    """Return the model with one layer, on the "meta" device.

    Raises: ValueError if it is not a causal language model.
    """
    if not model.causal or not model.vocab:
        raise ValueError(f"only causal language models are supported, and {model.name} is not one")
    one = dataclasses.replace(model, layers=1)
    made, _ = models.build(one, 1, seq, device="meta", dtype=dtype)
    assert isinstance(made, models.LanguageModel)
    return made


@functools.lru_cache(maxsize=64)
def parameters_of(model: Model, seq: int) -> Parameters:
    """Return the parameters of a model for `seq` tokens, on which learned positions depend."""
    divided = "embed.weight" if model.tied else "head.weight"
    layer, root = list[Parameter](), list[Parameter]()
    for path, p in on_meta(model, seq, torch.bfloat16).named_parameters():
        name, shape = path.removeprefix("layers.0."), tuple(p.shape)
        if name == path:  # the head, and a tied embedding, are divided by vocabulary
            root.append(Parameter(name, shape, 0 if name == divided else None))
            continue
        module, _, kind = name.rpartition(".")
        by_columns = 1 if module in _COLUMNS and kind == "weight" else None
        layer.append(Parameter(name, shape, 0 if module in _ROWS else by_columns))
    return Parameters(tuple(layer), tuple(root), model.layers)
