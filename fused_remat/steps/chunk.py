"""The activations and gradients of one group, or of one tile, on which a block's nodes work.

Tensors are matrices (tokens, width); token t of the call is (b, s) = divmod(t, S), whatever the
layout of the caller's tensors. Inputs may also be heads (sequences, heads, tokens, width).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.steps.operations import Operations

#: (start, stop, rows): the rows from `start` to `stop` of a tensor that has `rows`.
Part = tuple[int, int, int]


def spans(size: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield start and stop of the parts of `size`, each of `step`; the last may be shorter."""
    for first in range(0, size, step):
        yield first, min(first + step, size)


@dataclass(frozen=True)
class Chunks:
    """Sizes of one call: B sequences of S tokens, `group` sequences and `tile` tokens at a time.

    S is that of the first input; `Execution.lengths` has those of the others.
    """

    batch: int
    seq_len: int
    group: int
    tile: int

    @classmethod
    def of(cls, batch: int, seq_len: int, limit: int, longest: int = 0) -> Chunks:
        """Return groups and tiles of about `limit` tokens; a group has at least one sequence.

        `longest`: tokens of a sequence in the block's longest activation.
        """
        if batch * seq_len == 0:
            return cls(0, seq_len, 1, 1)
        groups = -(-batch // max(1, limit // max(seq_len, longest)))
        group = -(-batch // groups)
        rows = group * seq_len
        return cls(batch, seq_len, group, -(-rows // -(-rows // limit)))

    @functools.cached_property
    def tiled(self) -> bool:
        return self.tile < self.group * self.seq_len

    @functools.cached_property
    def count(self) -> int:
        """Number of groups, or tiles of groups, at most."""
        return -(-self.batch // self.group) * -(-self.group * self.seq_len // self.tile)

    @functools.cached_property
    def groups(self) -> tuple[tuple[int, int], ...]:
        """The first sequence of every group, and that after its last."""
        return tuple(spans(self.batch, self.group))


@dataclass(frozen=True, eq=False)
class Layout:
    """Shapes, dtypes and operations of one call, as its steps see them."""

    ops: Operations  # the operations of the backend
    chunks: Chunks  # in which the call is computed
    needs_grad: frozenset[str]  # inputs and params whose gradients are needed
    widths: Mapping[str, int]  # elements per token of every activation and statistic
    lengths: Mapping[str, int]  # tokens of a sequence of every input, activation and statistic
    dtypes: Mapping[str, torch.dtype]  # of every input, activation and statistic
    # under autocast, the dtype outside the residual stream; None for the input's
    compute: torch.dtype | None
    # activations of linear layers whose gradient's columns are summed for a bias, and of rotations
    # whose gradient attention may leave as heads: those to which one step gives a gradient; of
    # backends with a faster `pack_heads` or sums
    summed: frozenset[str]
    loose: frozenset[str]


class Pass:
    """One forward or backward pass of one call: what all its chunks share.

    `tensors` are the block's inputs, batch first, and params by name; absent or None where the
    block has none, or where backward does not read it. `functions` are the caller's own, `like` has
    the dtype and device of the block's input. `watch` is called after every step that computes an
    activation. Gradients of params are added to the buffers `sink`, in at least float32 throughout.
    """

    def __init__(
        self,
        execution: Layout,
        tensors: Mapping[str, Tensor | None],
        functions: Mapping[str, Callable[..., Tensor]],
        like: Tensor,
        watch: Callable[[Any, Chunk], None] | None = None,
        sink: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.execution, self.tensors, self.functions = execution, tensors, functions
        self.ops, self.chunks = execution.ops, execution.chunks
        self.needs_grad, self.widths = execution.needs_grad, execution.widths
        self.dtype, self.device = like.dtype, like.device
        # On a CPU the sum of two products takes no float32: it is rounded once in either case.
        self.partial = self.chunks.count > (2 if like.is_cpu else 1)
        self.exact = sink is not None
        self.param_grads: dict[str, Tensor] = {} if sink is None else dict(sink)
        self.joint_grads: dict[tuple[str, ...], Tensor] = {}
        self.watch = watch
        self.site_keys: dict[int, tuple[Tensor, ...]] = {}  # by the first site (`site_key`)
        self.scales: dict[str, tuple[Tensor, Tensor]] = {}  # of DoRA, by the update's product

    def take_grads(self, names: Collection[str]) -> dict[str, Tensor]:
        """Remove and return gradients that are complete."""
        for joint in [joint for joint in self.joint_grads if not set(names).isdisjoint(joint)]:
            del self.joint_grads[joint]
        return {name: self.param_grads.pop(name) for name in names if name in self.param_grads}


class Chunk(dict[str, Tensor]):
    """The activations of one group of sequences, or of one tile of a group, by name; and gradients.

    A tile has its rows of what is the group's. A dict, because steps read and write little else,
    and a small block's time is that of its Python. Dropout masks are in it too, as `DropoutMask`.
    """

    __slots__ = (
        "freeing", "grads", "heads", "lo", "ops", "owner", "param", "parent", "rows", "seqs",
        "sums", "token0",
    )  # fmt: skip

    #: put(name, value): a rebuild computes kept statistics again. The bits are equal; the kept
    #: ones stay.
    put = dict.setdefault

    def __init__(
        self, owner: Pass, seqs: tuple[int, int], span: tuple[int, int], parent: Chunk | None = None
    ) -> None:
        self.owner, self.ops, self.seqs, self.parent = owner, owner.ops, seqs, parent
        self.lo, hi = span
        self.rows = hi - self.lo
        self.token0 = seqs[0] * owner.chunks.seq_len + self.lo
        self.param = owner.tensors.get  # a tensor of the block that is no activation, or None
        #: Gradients of activations, and whether each may be overwritten.
        self.grads: dict[str, tuple[Tensor, bool]] = {}
        #: Of complete gradients: sums of their columns, and heads not packed into them yet.
        self.sums: dict[str, Tensor] = {}
        self.heads: dict[str, Any] = {}
        self.freeing: tuple[str, ...] = ()  # names that no step after the present one reads

    def __missing__(self, name: str) -> Tensor:
        assert self.parent is not None, f"{name} is neither kept nor rebuilt"
        whole: Any = self.parent[name]
        if isinstance(whole, random.DropoutMask):
            value: Any = whole.of_rows(self.lo, self.rows)
        else:
            value = whole[self.lo : self.lo + self.rows]
        self[name] = value
        return value  # type: ignore[no-any-return]

    def rows_of(self, name: str) -> int:
        """Return the number of tokens of an activation in this chunk."""
        return self.rows * self.owner.execution.lengths[name] // self.owner.chunks.seq_len

    def first_row(self, name: str) -> int:
        """Return the number of an activation's first token here, among all of the call."""
        return self.token0 * self.owner.execution.lengths[name] // self.owner.chunks.seq_len

    def empty(self, name: str) -> Tensor:
        """Return an uninitialized matrix like the activation `name`, which need not exist."""
        owner = self.owner
        shape = (self.rows_of(name), owner.widths[name])
        return torch.empty(shape, dtype=self.dtype_of(name), device=owner.device)

    def last(self, name: str) -> Tensor:
        """Return `self[name]` for this step's last use; free it if no later step reads it."""
        value = self[name]
        if name in self.freeing:
            del self[name]
        return value

    def mask(self, name: str) -> random.DropoutMask | None:
        """Return the dropout multiplier `name`, or None for ""."""
        return self[name] if name else None  # type: ignore[return-value]

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of an activation, which need not exist."""
        return self.owner.execution.dtypes[name]

    def add_grad(self, name: str, grad: Tensor, owned: bool, total: Tensor | None = None) -> None:
        """Add to the gradient of an activation. `owned`: `grad` may be overwritten later.

        `total`: the sum of its columns, of names in `Layout.summed`.
        """
        if total is not None:
            self.sums[name] = total
        have = self.grads.get(name)
        if have is None:
            self.grads[name] = (grad, owned)
        elif have[1]:
            have[0].add_(grad)
        elif owned:
            self.grads[name] = (grad.add_(have[0]), True)
        else:
            self.grads[name] = (have[0] + grad, True)

    def sum_of_grads(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Remove an activation's gradient, if there is one in `dtype`, to add to it in place."""
        have = self.grads.get(name)
        if have is None or have[0].dtype != dtype:
            return None
        grad, owned = self.grads.pop(name)
        return grad if owned else grad.clone()

    def add_param_grad(self, name: str, grad: Tensor, part: Part | None = None) -> None:
        grads = self.owner.param_grads
        if part is not None:
            self.part_of_grad(name, part, grad.shape[1:], grad.dtype).add_(grad)
        elif name in grads:
            grads[name].add_(grad)
        else:
            grads[name] = grad

    def part_of_grad(
        self, name: str, part: Part, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """Return the rows of a parameter's gradient that belong to a layer, zero at first."""
        grads = self.owner.param_grads
        if name not in grads:
            grads[name] = torch.zeros((part[2], *shape), dtype=dtype, device=self.owner.device)
        return grads[name][part[0] : part[1]]
