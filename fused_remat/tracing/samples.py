"""Small calls of a layer with random tensors of other sizes, in which to record and prove it."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.layers.eligibility import parameters_of
from fused_remat.layers.packed import unpacked_parameters
from fused_remat.tracing.isolation import tensors_of
from fused_remat.tracing.sizes import JOINT, LENGTHS, Size, Sizes, size_of
from fused_remat.tracing.state import exact, may_change
from fused_remat.tracing.values import Sample, Untraceable, leaves, map_tree

_MASKS = ("mask", "bias", "alibi")
_MEMORY = ("encoder_hidden_states", "memory", "context", "encoder_output", "key_value_states", "xa")
#: Number of random numbers drawn for a tensor: a prime, larger than most widths.
_DRAWN = 65537
#: Elements between the first ones of two large parameters: 16 times a prime. Smaller parameters
#: are not large.
_WINDOW = 16 * 257
#: Smallest number of tokens in a sequence of a sample.
_SMALLEST = 5

#: The dimensions of each leaf of a call's arguments: names of sizes, with a factor before, or
#: numbers; none if it is no tensor.
Dims = tuple[tuple[str | int, ...], ...]


class Arguments:
    """The arguments of a call by name, with the meaning of their dimensions.

    Leaves of the arguments are known by their indices: the residual stream's input `x`, the
    `memory` and the `bounds` of sequences of variable length, if any, integer tensors (`whole`),
    and all that are the `same` as x. `axes` are the names of x's first dimensions.
    `records`: submodules whose router logits the call returns, too, by path, and their index in the
    result of each.
    """

    def __init__(
        self,
        given: Mapping[str, Any],
        vary: Sequence[str],
        records: tuple[tuple[str, int], ...] = (),
    ) -> None:
        self.given, self.leaves, self.records = given, leaves(given), records
        self.names = [name for name, value in given.items() for _ in leaves(value)]
        tensors = [(i, t) for i, t in enumerate(self.leaves) if isinstance(t, Tensor)]
        floats = [i for i, t in tensors if t.is_floating_point()]
        if not floats:
            raise Untraceable("it has no floating-point argument")
        for name, value in zip(self.names, self.leaves, strict=True):
            if may_change(value):
                raise Untraceable(f"{name} is an iterator, or a function that may change something")
        self.x, x = floats[0], self.leaves[floats[0]]
        if x.dim() not in (2, 3, 4):
            raise Untraceable(f"its input has shape {tuple(x.shape)}")
        memories = (
            i for i in floats[1:]
            if self.names[i] in _MEMORY and self.leaves[i].dim() == 3 == x.dim()
            and self.leaves[i] is not x
        )  # fmt: skip
        self.memory = next(memories, None)
        self.same = [i for i, t in enumerate(self.leaves) if t is x]
        self.axes = ("S",) if x.dim() == 2 else ("S", "B") if vary[0] == "S" else ("B", "S")
        sizes = dict(zip(self.axes, x.shape, strict=False))
        self.batch = sizes.get("B", 1)
        self.tokens = x.shape[:-1].numel() // max(self.batch, 1)
        if self.tokens == 1 and vary[0] == "B":
            raise Untraceable("a sequence of one token does not show how tokens are mixed")
        if self.memory is not None:
            sizes["M"] = self.leaves[self.memory].shape[self.axes.index("S")]
        if x.dim() == 4:
            sizes = {"B": self.batch}
        if vary[0] == "S" and x.dim() != 3:
            sizes = {}
        self.sizes = {name: n for name, n in sizes.items() if name in vary}
        self.active = [i in (self.x, self.memory) for i in range(len(self.leaves))]
        self.whole = [i for i, t in tensors if _is_whole(t)]
        packed = (
            i for i, t in tensors if "cu_seq" in self.names[i] and t.dim() == 1 and x.dim() == 2
        )
        self.bounds = next(packed, None)
        self._options = [self._options_of(i, t) for i, t in enumerate(self.leaves)]
        self.dims: Dims = tuple([tuple([n for n, *_ in dims]) for dims in self._options])

    def _options_of(self, i: int, t: Any) -> list[list[str | int]]:
        if not isinstance(t, Tensor):
            return []
        name, is_memory = self.names[i], i == self.memory
        options = _options(
            t.shape, t.is_floating_point(), any(word in name for word in _MASKS),
            "encoder" in name or is_memory, self.axes == ("S", "B"), tuple(self.sizes.items()),
        )  # fmt: skip
        return [dims[:1] for dims in options] if i in self.same or is_memory else options

    def others(self) -> Iterator[Arguments]:
        """Yield the call with other meanings of dimensions, where sizes are the same."""
        changes = [
            (i, j, n)
            for i, options in enumerate(self._options)
            for j, (_, *rest) in enumerate(options)
            for n in rest
        ]
        changes.sort(key=lambda change: isinstance(change[-1], int))  # names of sizes first
        pairs = [p for p in itertools.combinations(changes, 2) if p[0][:2] != p[1][:2]]
        for several in (*[(change,) for change in changes], *pairs):
            call, dims = copy.copy(self), [[*each] for each in self.dims]
            for i, j, n in several:
                dims[i][j] = n
            call.dims = tuple(map(tuple, dims))
            yield call

    def fits(self, dims: Dims) -> bool:
        """Return whether the dimensions of another call may be those of this one."""
        return all(
            _size_of(size, self.sizes) == n
            for t, d in zip(self.leaves, dims, strict=True)
            for size, n in zip(d, t.shape if d else (), strict=True)
        )

    @property
    def is_too_long(self) -> bool:
        """Whether a trace at the call's own length takes more memory than a step.

        The proof holds the activations of two sequences in float64, where checkpointing holds
        those of the call; and any trace may take 12 bytes for each parameter, or a MiB. A layer of
        width D has about 12 D² parameters, and 72 D activations for each token.
        """
        x = self.leaves[self.x]
        width = x.shape[-1]
        more = 72 * width * self.tokens * (2 * 8 - x.itemsize * self.batch)
        return "S" not in self.sizes and more > max(12 * 12 * width**2, 1 << 20)

    def key(self, free: bool) -> tuple[Any, ...]:
        """Return a key of what a trace depends on other than `dims`; if `free`, not of integers."""
        parts: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, Tensor):
                low = leaf.is_floating_point() and leaf.dtype != torch.float64
                kind = "float" if low else leaf.dtype
                parts.append((leaf.dim(), kind, leaf.device.type))
            else:
                parts.append(int if type(leaf) is int and free else exact(leaf, {}))
        tree = map_tree(self.given, lambda leaf: None)
        return (*parts, repr(tree), tuple(self.sizes), self.axes, *self.same, self.records)

    def own(self, layer: nn.Module, most: int, widens: bool) -> Sample:
        """Return the call itself, of at `most` so many sequences; in float32 if it `widens`."""
        known: dict[int, Any] = {}  # a tensor that is several arguments stays one
        dims = iter(self.dims)

        def own(leaf: Any) -> Any:
            names = next(dims)
            if isinstance(leaf, Tensor) and id(leaf) not in known:
                known[id(leaf)] = _first(leaf, names, most, widens)
            return known.get(id(leaf), leaf)

        arguments = map_tree(dict(self.given), own)
        x = leaves(arguments)[self.x]
        params = unpacked_parameters(layer)
        of = {n: p for n, p in params.items() if p.requires_grad}
        named = {**params, **dict(layer.named_buffers())}
        named = {n: _widened(t.detach(), widens).requires_grad_(n in of) for n, t in named.items()}
        return Sample(self.sizes, x.dtype, named, arguments, self.active)

    def sample(
        self,
        layer: nn.Module,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        seed: int,
        recorded: bool = False,
        shift: int = 0,  # added to integers
        params: torch.dtype | None = None,  # the dtype of parameters, if it is another
        varies: bool = True,  # whether integer tensors are random
        named: Mapping[str, Tensor] | None = None,  # the layer's tensors, if of another sample
        scale: float = 1.0,  # of every other token of activations
        others: Sequence[Sizes] = (),  # choices of sizes at which a recording finds formulas
    ) -> Sample:
        """Return a call of other sizes, with random activations, masks and parameters, in `dtype`.

        If it is `recorded`, packed tokens are one sequence, not two, and other arguments get other
        values, equal where these were equal.
        """
        generator = torch.Generator().manual_seed(seed)
        random = functools.partial(_random, generator, dtype)
        sizes = {name: sizes[name] for name in self.sizes}
        indices, streams = itertools.count(), list[Tensor]()

        def value(leaf: Any) -> Any:
            i = next(indices)
            dims, name = self.dims[i], self.names[i]
            if i in self.same and streams:
                return streams[0]
            if not isinstance(leaf, Tensor):
                return leaf + shift if type(leaf) is int else leaf
            if i == self.bounds:
                n = sizes["S"]
                ends = [0, n] if recorded else [0, n // 3, n]
                return torch.tensor(ends, dtype=leaf.dtype, device=leaf.device)
            shape = [_size_of(n, sizes) for n in dims]
            if self.active[i] or (leaf.is_floating_point() and leaf.requires_grad):
                stream = random(shape, leaf.device).detach()
                stream[..., ::2, :] *= scale
                streams.append(stream.requires_grad_())
                return streams[-1]
            t = leaf.detach()
            for dim, n in enumerate(shape):
                if n != t.shape[dim]:
                    order = torch.arange(n, device=t.device) % max(t.shape[dim], 1)
                    if dims[dim] == JOINT:  # tokens of both streams
                        order = torch.arange(n, device=t.device) * t.shape[dim] // n
                    t = t.index_select(dim, order)
            is_mask = any(word in name for word in _MASKS)
            if t.dtype == torch.bool or (is_mask and _is_whole(t)):
                return _choices(t, generator)
            if _is_whole(t):
                return _numbers(t, generator) if varies and "cu_seq" not in name else t.clone()
            t = _cast(t, dtype)
            lengths = sum(n in LENGTHS for n in dims)
            is_binary = t.dim() and (is_mask or lengths) and bool(((leaf == 0) | (leaf == 1)).all())
            if (is_mask or is_binary or lengths == 2) and not t.is_complex():
                noise = torch.randn(t.shape, generator=generator, dtype=dtype).to(t.device)
                noisy = torch.where(t < -1.0, t, t + 0.3 * noise)
                if is_binary:  # may be compared with 0 or 1, or added
                    noisy[..., 1::3], noisy[..., 2::3] = 0.0, 1.0
                return noisy
            return t + 0.25 * torch.sin(3.0 * t + 1.0) if recorded else t

        if named is None:
            named = _tensors(layer, random, params or dtype)
        arguments = map_tree(dict(self.given), value)
        others = [{name: each[name] for name in self.sizes} for each in others]
        dims = [[_size(n) for n in dims] for dims in self.dims]
        return Sample(sizes, dtype, named, arguments, self.active, self.bounds, dims, others)


@functools.lru_cache(1024)
def _options(
    shape: Sequence[int],
    is_float: bool,
    is_mask: bool,
    of_memory: bool,
    swapped: bool,
    lengths: tuple[tuple[str, int], ...],
) -> list[list[str | int]]:
    """Return what each dimension of an argument may be, the likeliest first."""
    sizes, last = dict(lengths), len(shape) - 1
    of_pairs = last == 3 and shape[2] > 1  # not a table (1, S, 1, E)
    batch, is_mask = sizes.get("B", 0), is_mask or of_pairs
    features = is_float and last > 0 and not is_mask
    swapped = swapped and features and last > 1
    options: list[list[str | int]] = []
    for i, n in enumerate(shape):
        queries = is_mask and last > 1 and i == last - 1
        order: tuple[str | int, ...] = ("M", "S") if of_memory and not queries else ("S", "M")
        order = (*order, JOINT)
        if (features and i == last) or (of_pairs and i == 1 and n in shape[2:]):
            order = (n, *order)  # a width, or heads, as many as tokens
        elif swapped and i == 1:
            order = ("B",)
        elif i == 0 and "B" in sizes and not swapped:
            heads = (f"{n // max(batch, 1)}B",) if last == 2 and n > batch else ()
            order = ("B", *order, *((n,) if batch == 1 else ()), *heads)
        options.append([*dict.fromkeys(s for s in (*order, n) if _size_of(s, sizes) == n)])
    return options


def _size_of(dim: str | int, sizes: Mapping[str, int]) -> int:
    """Return the size of a dimension (`Arguments.dims`), or -1 for a length the call lacks."""
    if dim == JOINT:
        return size_of(JOINT, sizes) if sizes.keys() >= {"S", "M"} else -1
    return dim if isinstance(dim, int) else sizes.get(dim[-1], -1) * int(dim[:-1] or 1)


def _first(t: Tensor, dims: Sequence[str | int], most: int, widens: bool) -> Tensor:
    first = t.detach()
    for i, dim in enumerate(dims):
        if isinstance(dim, str) and dim[-1] == "B":
            first = first.narrow(i, 0, min(most * int(dim[:-1] or 1), first.shape[i]))
    return _widened(first, widens).requires_grad_(t.requires_grad)


def _widened(t: Tensor, widens: bool) -> Tensor:
    return t.float() if widens and t.is_floating_point() and t.itemsize < 4 else t


def _size(dim: str | int) -> int | Size:
    if dim == JOINT:
        return Size(1, ("S", "M"), 0, "(S + M)")
    return dim if isinstance(dim, int) else Size(int(dim[:-1] or 1), (dim[-1],))


def _random(
    generator: torch.Generator, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> Tensor:
    count = math.prod(shape)
    t = torch.randn(min(count, _DRAWN), generator=generator, dtype=dtype).to(device)
    if count > _DRAWN:  # the same numbers again, never at the same index of a row
        t = t.repeat(-(-count // _DRAWN))[:count]
    return t.view(tuple(shape)).requires_grad_()


def _tensors(
    layer: nn.Module, random: Callable[..., Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return random parameters, large ones as windows of one storage, and the buffers."""
    named: dict[str, Tensor] = {}
    params = parameters_of(layer)
    large = [p for p in params.values() if p.dim() > 1 and p.numel() > _WINDOW]
    if large:
        scale = math.prod([p.shape[-1] ** (-0.5 / len(large)) for p in large])
        count = max(p.numel() for p in large) + _WINDOW * len(large)
        shared = random((count,), large[0].device).detach().mul_(0.6 * scale).to(dtype)
    starts = itertools.count(0, _WINDOW)
    for name, p in params.items():
        if p.dim() > 1 and p.numel() > _WINDOW:
            first = next(starts)
            t = shared[first : first + p.numel()].view(p.shape).detach()
        else:
            t = random(p.shape, p.device).detach()
            if p.dim() == 1 and "bias" not in name:
                t = t.abs_().add_(0.5)
            else:
                t.mul_(0.6 * p.shape[-1] ** -0.5 if p.dim() > 1 else 0.2)
        named[name] = t.to(p.device, dtype).requires_grad_(p.is_floating_point())
    for name, b in layer.named_buffers():
        named[name] = b.detach().to(dtype if b.is_floating_point() else b.dtype, copy=True)
    return named


def vary(layer: nn.Module) -> None:
    """Replace the buffers and attributes of a replica that hold one number (`constants`)."""
    generator = torch.Generator().manual_seed(0)
    for path, constant in constants(layer).items():
        path, _, name = path.rpartition(".")
        module, t = layer.get_submodule(path), constant.detach()
        if t.is_floating_point():
            steps = torch.sin(1.0 + torch.arange(t.numel(), device=t.device))
            t = (t + 0.25 * steps.view(t.shape)).to(t.dtype)
        else:
            t = _choices(t, generator)
        owner = module._buffers if name in module._buffers else module.__dict__
        owner[name] = t.requires_grad_(constant.requires_grad)


def constants(layer: nn.Module) -> dict[str, Tensor]:
    """Return buffers and attributes that hold one number, which may hide what a layer computes."""
    params, tensors = parameters_of(layer), tensors_of(layer, dict(layer.named_buffers()))
    return {
        n: t
        for n, t in tensors.items()
        if n not in params
        and (t.numel() and (t.is_floating_point() or t.dtype == torch.bool))
        and bool((t == t.reshape(-1)[0]).all())
    }


def _choices(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return random zeros and ones; the first of each last dimension is one, the second zero."""
    chosen = torch.rand(t.shape, generator=generator) < 0.7
    if t.dim():
        chosen[..., :1], chosen[..., 1:2] = True, False
    return chosen.to(t)


def _numbers(t: Tensor, generator: torch.Generator) -> Tensor:
    """Return random integers, no larger than those of `t` and than any size of a sample."""
    most = int(t.max()) if t.numel() else 0
    if most < 2 or int(t.min()) < 0:
        return _choices(t, generator) if most in (0, 1) else t.clone()
    return torch.randint(1, min(most, _SMALLEST) + 1, t.shape, generator=generator).to(t)


def _is_whole(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a mask or table in another dtype, in which its finite numbers stay finite."""
    if t.is_complex():
        return t.clone()
    limit = min(torch.finfo(dtype).max, torch.finfo(t.dtype).max)
    return torch.where(t.isinf(), t, t.clamp(-limit, limit)).to(dtype)
