"""What a block's nodes work on: the activations and gradients of one group, or of one tile.

Tensors are matrices (tokens, width); token t of the call is (b, s) = divmod(t, S), whatever the
layout of the caller's tensors. Inputs may also be heads (sequences, heads, tokens, width).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.backends.base import Backend

if TYPE_CHECKING:
    from fused_remat.blocks.program import Programs, Step


@dataclass(frozen=True)
class Chunks:
    """Sizes of one call: B sequences of S tokens, `group` sequences and `tile` tokens at a time."""

    batch: int
    seq_len: int
    group: int
    tile: int

    @classmethod
    def of(cls, batch: int, seq_len: int, limit: int) -> Chunks:
        """Groups and tiles of about `limit` tokens, as even as they come; a group holds at least
        one sequence."""
        if batch * seq_len == 0:
            return cls(0, seq_len, 1, 1)
        groups = -(-batch // max(1, limit // seq_len))
        group = -(-batch // groups)
        rows = group * seq_len
        return cls(batch, seq_len, group, -(-rows // -(-rows // limit)))

    @property
    def tiled(self) -> bool:
        return self.tile < self.group * self.seq_len

    def groups(self) -> Iterator[tuple[int, int]]:
        for start in range(0, self.batch, self.group):
            yield start, min(start + self.group, self.batch)

    def tiles(self, rows: int) -> Iterator[tuple[int, int]]:
        for start in range(0, rows, self.tile):
            yield start, min(start + self.tile, rows)


@dataclass(frozen=True, eq=False)
class Prepared:
    """What forward and backward of one call share, worked out from shapes alone.

    Attributes:
        backend, chunks, plan: who computes, in which pieces, by which programs.
        kind: the block's name, for explanations.
        wants: inputs and params whose gradients are wanted.
        widths: elements per token of every activation and statistic.
        dtypes: of every input, activation and statistic.
        compute: the dtype of what is not in the residual stream; None for the input's.
        casts: the dtypes that params are converted to before a pass; usually empty.
        shapes: of the inputs, batch first.
        given: shapes of all tensors of the call, in its order, as they were given.
        rereads: of all tensors of the call, whether backward reads their values again.
    """

    backend: Backend
    chunks: Chunks
    plan: Programs
    kind: str
    wants: frozenset[str]
    widths: Mapping[str, int]
    dtypes: Mapping[str, torch.dtype]
    compute: torch.dtype | None
    casts: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]
    given: tuple[torch.Size | None, ...]
    rereads: tuple[bool, ...]


#: Called with each step before it runs, and its frame; for explanations. Usually empty.
TRACERS: list[Callable[[object, Frame], None]] = []


#: Sees a step that computes once it has, and its frame.
Watch = Callable[["Step", "Frame"], None]


class Run:
    """One forward or backward pass of one block call: what all its frames share.

    Args:
        prepared: what was worked out about the call.
        tensors: the block's inputs, batch first, and params by name; absent or None where the
            block has none, or where backward does not read it.
        functions: the caller's own functions by name.
        like: a tensor with the dtype and device of the block's input.
        watch: called after every step that computes; for the replay check.
        into: buffers of params, to which their gradients are added.
    """

    def __init__(
        self,
        prepared: Prepared,
        tensors: Mapping[str, Tensor | None],
        functions: Mapping[str, Callable[[Tensor], Tensor]],
        like: Tensor,
        watch: Watch | None = None,
        into: Mapping[str, Tensor] | None = None,
    ) -> None:
        if prepared.casts:
            tensors = _cast(tensors, prepared.casts)
        self.prepared, self.tensors, self.functions = prepared, tensors, functions
        self.backend, self.chunks = prepared.backend, prepared.chunks
        self.wants, self.widths = prepared.wants, prepared.widths
        self.dtype, self.device = like.dtype, like.device
        self.partial = self.chunks.group < self.chunks.batch or self.chunks.tiled
        self.exact = into is not None
        self.param_grads: dict[str, Tensor] = {} if into is None else dict(into)
        self.watch = watch
        self.observed: bool = watch is not None or torch._C._autograd._profiler_enabled()
        self._site_keys: tuple[Tensor, ...] | None = None

    def site_key(self, site: int) -> Tensor:
        if self._site_keys is None:
            seed = self.tensors["seed"]
            assert seed is not None
            self._site_keys = random.site_keys(seed)
        return self._site_keys[site]


def _cast(
    tensors: Mapping[str, Tensor | None], dtypes: Mapping[str, torch.dtype]
) -> Mapping[str, Tensor | None]:
    """`tensors` with those in `dtypes` converted, for the time of one pass: no copy is kept."""
    given = {name: t for name in dtypes if (t := tensors.get(name)) is not None}
    return {**tensors, **{name: t.to(dtypes[name]) for name, t in given.items()}}


class Frame:
    """The named activations and gradients of one group of sequences, or of one tile of a group."""

    __slots__ = (
        "backend", "freeing", "grads", "keeps", "lo", "parent", "rows", "run", "seqs", "token0",
        "values",
    )  # fmt: skip

    def __init__(
        self, run: Run, seqs: tuple[int, int], span: tuple[int, int], parent: Frame | None = None
    ) -> None:
        self.run, self.backend, self.seqs, self.parent = run, run.backend, seqs, parent
        self.lo, hi = span
        self.rows = hi - self.lo
        self.token0 = seqs[0] * run.chunks.seq_len + self.lo
        self.values: dict[str, Tensor] = {}
        self.keeps: dict[str, random.Keep] = {}
        self.grads: dict[str, tuple[Tensor, bool]] = {}
        self.freeing: tuple[str, ...] = ()  # names that the present step uses for the last time

    def __getitem__(self, name: str) -> Tensor:
        value = self.values.get(name)
        if value is None:
            assert self.parent is not None, f"{name} is neither kept nor rebuilt"
            value = self.parent[name][self.lo : self.lo + self.rows]
            self.values[name] = value
        return value

    def last(self, name: str) -> Tensor:
        """`self[name]`, which the step will not read again: freed at once if nobody else will."""
        value = self[name]
        if name in self.freeing:
            del self.values[name]
        return value

    def put(self, name: str, value: Tensor) -> None:
        # A rebuild also yields the statistics again; the kept ones, equal bit for bit, stay.
        self.values.setdefault(name, value)

    def keep(self, name: str) -> random.Keep | None:
        """The dropout multiplier `name`; None for ""."""
        if not name:
            return None
        found = self.keeps.get(name)
        if found is None:
            assert self.parent is not None, f"{name} is not there"
            whole = self.parent.keep(name)
            assert whole is not None
            found = self.keeps[name] = whole.of_rows(self.lo, self.rows)
        return found

    def free(self, names: tuple[str, ...]) -> None:
        pop = self.values.pop
        for name in names:
            pop(name, None)
        if self.keeps:
            for name in names:
                self.keeps.pop(name, None)

    def param(self, name: str) -> Tensor | None:
        return self.run.tensors.get(name)

    def add_grad(self, name: str, grad: Tensor, owned: bool) -> None:
        """Add to the gradient of an activation; `owned`: `grad` may be overwritten from now on."""
        have = self.grads.get(name)
        if have is None:
            self.grads[name] = (grad, owned)
        elif have[1]:
            have[0].add_(grad)
        elif owned:
            self.grads[name] = (grad.add_(have[0]), True)
        else:
            self.grads[name] = (have[0] + grad, True)

    def take_grad(self, name: str) -> tuple[Tensor | None, bool]:
        return self.grads.pop(name, (None, False))

    def add_param_grad(self, name: str, grad: Tensor) -> None:
        have = self.run.param_grads.get(name)
        if have is None:
            self.run.param_grads[name] = grad
        else:
            have.add_(grad)

    def add_weight_grad(self, name: str, dy: Tensor, x: Tensor) -> None:
        run, grads = self.run, self.run.param_grads
        grads[name] = self.backend.linear_dw(dy, x, grads.get(name), run.partial, run.exact)
