"""Small calls of a layer on random tensors of other sizes; and what submodules are, by trying."""

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
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import ACTIVATIONS
from fused_remat.tracing.join import norm_of
from fused_remat.tracing.state import exact, held_by, is_mutable
from fused_remat.tracing.values import Sample, Unreadable, leaves, map_tree

_MASKS = ("mask", "bias", "alibi")
_MEMORY = ("encoder_hidden_states", "memory", "context", "encoder_output", "key_value_states", "xa")


#: Attributes that number a layer of a model.
INDICES = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")

#: How many random numbers are drawn for a tensor: a prime, larger than most widths.
_DRAWN = 65537
#: How many elements are between the first ones of large parameters: 16 times a prime. Smaller
#: parameters are not large.
_WINDOW = 16 * 257
#: No sample has fewer tokens in a sequence.
_SMALLEST = 5
#: How many other meanings of the dimensions of a call are tried.
_MOST_OTHERS = 8

#: For each leaf of a call's arguments that is a tensor, its dimensions: names of sizes, with a
#: factor before, or numbers.
Dims = tuple[tuple[str | int, ...] | None, ...]


class Arguments:
    """The arguments of a call by name, and what their dimensions are.

    Attributes:
        given: the arguments.
        dims: what the dimensions of the arguments are.
        active: for each leaf, whether it is an activation.
        sizes: of the call, by name.
        places: among the leaves, of the residual stream's input, and of the memory if any.
    """

    def __init__(self, given: Mapping[str, Any], vary: Sequence[str]) -> None:
        self.given, found = given, leaves(given)
        names = [name for name, value in given.items() for _ in leaves(value)]
        #: Of the arguments, by their leaves.
        self.names = names
        tensors = [
            i for i, t in enumerate(found) if isinstance(t, Tensor) and t.is_floating_point()
        ]
        if not tensors:
            raise Unreadable("it has no floating-point argument")
        for name, value in zip(names, found, strict=True):
            if hasattr(value, "__next__") or any(map(is_mutable, held_by(value))):
                raise Unreadable(f"{name} is an iterator, or a function that may change something")
        x = found[tensors[0]]
        if x.dim() not in (2, 3, 4):
            raise Unreadable(f"its input has shape {tuple(x.shape)}")
        memory = [
            i for i in tensors[1:]
            if names[i] in _MEMORY and found[i].dim() == 3 == x.dim() and found[i] is not x
        ]  # fmt: skip
        #: Among the leaves, the stream's input, wherever it is given.
        self.same = [i for i, t in enumerate(found) if t is x]
        #: The names of the first dimensions of the stream's input.
        self.axes = ("S",) if x.dim() == 2 else ("S", "B") if vary[0] == "S" else ("B", "S")
        sizes = dict(zip(self.axes, x.shape, strict=False))
        self.batch = sizes.get("B", 1)
        self.tokens = x.shape[:-1].numel() // max(self.batch, 1)
        if self.tokens == 1 and vary[0] == "B":
            raise Unreadable("a sequence of one token does not show how tokens are mixed")
        if memory:
            sizes["M"] = found[memory[0]].shape[self.axes.index("S")]
        if x.dim() == 4:
            sizes = {"B": self.batch}
        if vary[0] == "S" and x.dim() != 3:
            sizes = {}
        self.sizes = {name: n for name, n in sizes.items() if name in vary}
        self.places = (tensors[0], memory[0] if memory else None)
        self.active = [i in self.places for i in range(len(found))]
        #: Among the leaves, tensors of whole numbers.
        self.whole = [
            i for i, t in enumerate(found) if isinstance(t, Tensor) and _is_whole(t)
        ]  # fmt: skip
        #: Among the leaves, the bounds of sequences of variable length.
        self.bounds = next(
            (
                i for i, t in enumerate(found)
                if isinstance(t, Tensor) and "cu_seq" in names[i] and t.dim() == 1 and x.dim() == 2
            ),
            None,
        )  # fmt: skip
        swapped, lengths = self.axes == ("S", "B"), tuple(self.sizes.items())
        self._options = [
            _options(
                t.shape, t.is_floating_point(), any(word in names[i] for word in _MASKS),
                "encoder" in names[i] or i == self.places[1], swapped,
                i in self.same or i == self.places[1], lengths,
            )
            if isinstance(t, Tensor) else None
            for i, t in enumerate(found)
        ]  # fmt: skip
        self.dims: Dims = tuple([o if o is None else o[0] for o in self._options])

    def others(self) -> Iterator[Arguments]:
        """Yield the call with other meanings of dimensions, where sizes are the same."""
        numbers = {1, *[n for dims in self.dims for n in dims or () if isinstance(n, int)]}
        found = [
            (leaf, i, other)
            for leaf, options in enumerate(self._options)
            for i, others in enumerate(options[1] if options else ())
            for other in others
            if isinstance(other, str) or other in numbers
        ]
        single = [(change,) for change in found]
        double = [p for p in itertools.combinations(found, 2) if p[0][:2] != p[1][:2]]
        for changes in [*single, *double][:_MOST_OTHERS]:
            dims = [None if d is None else [*d] for d in self.dims]
            for leaf, i, other in changes:
                dims[leaf][i] = other  # type: ignore[index]
            call = copy.copy(self)
            call.dims = tuple([None if d is None else tuple(d) for d in dims])
            yield call

    def fits(self, dims: Dims) -> bool:
        """Return whether the dimensions of another call may be those of this one."""
        tensors = leaves(self.given)
        return all(
            d is None or all(_size_of(s, self.sizes) == n for s, n in zip(d, t.shape, strict=True))
            for t, d in zip(tensors, dims, strict=True)
        )

    @property
    def is_too_long(self) -> bool:
        """Whether a trace at the call's own length takes more memory than a step.

        The proof holds the activations of two sequences in float64, where checkpointing holds
        those of the call; and any trace may take 12 bytes for each parameter, or a MiB. A layer of
        width D has about 12 D² parameters, and 72 D activations for each token.
        """
        x = leaves(self.given)[self.places[0]]
        width = x.shape[-1]
        more = 72 * width * self.tokens * (2 * 8 - x.itemsize * self.batch)
        return "S" not in self.sizes and more > max(12 * 12 * width**2, 1 << 20)

    def key(self, free: bool) -> tuple[Any, ...]:
        """What the reading depends on besides `dims`; `free`: not on whole numbers."""
        found: list[Any] = []
        for leaf in leaves(self.given):
            if isinstance(leaf, Tensor):
                low = leaf.is_floating_point() and leaf.dtype != torch.float64
                kind = "float" if low else leaf.dtype
                found.append((leaf.dim(), kind, leaf.device.type))
            else:
                found.append(int if type(leaf) is int and free else exact(leaf, {}))
        shape = map_tree(self.given, lambda leaf: None)
        return (*found, repr(shape), tuple(self.sizes), self.axes, *self.same)

    def sample(
        self,
        layer: nn.Module,
        sizes: Mapping[str, int],
        dtype: torch.dtype,
        seed: int,
        whole: bool = True,
        shift: int = 0,
        params: torch.dtype | None = None,
        tables: bool = True,
        varies: bool = True,
        named: Mapping[str, Tensor] | None = None,
    ) -> Sample:
        """A call of other sizes, with random activations and parameters, in `dtype`.

        Masks have random values, so that no mask seems to do nothing. `whole`: packed tokens are
        one sequence, else two. `shift`: added to whole numbers. `params`: the dtype of parameters,
        if it is another. `tables`: other arguments keep their values; else equal ones become
        others, which are equal. `varies`: tensors of whole numbers are random. `named`: the
        layer's tensors, if there are some of another sample.
        """
        generator = torch.Generator().manual_seed(seed)
        random = functools.partial(_random, generator, dtype)
        sizes = {name: sizes[name] for name in self.sizes}
        bounds = None if self.bounds is None else leaves(self.given)[self.bounds]
        places = iter(zip(self.dims, self.active, self.names, strict=True))
        x, stream = leaves(self.given)[self.places[0]], list[Tensor]()

        def given(leaf: Any) -> Any:
            dims, is_active, name = next(places)
            if leaf is x and stream:
                return stream[0]
            if not isinstance(leaf, Tensor) or dims is None:
                return leaf + shift if type(leaf) is int else leaf
            if bounds is not None and leaf is bounds:
                n = sizes["S"]
                ends = [0, n] if whole else [0, n // 3, n]
                return torch.tensor(ends, dtype=leaf.dtype, device=leaf.device)
            shape = [_size_of(n, sizes) for n in dims]
            if is_active or (leaf.is_floating_point() and leaf.requires_grad):
                made = random(shape, leaf.device)
                stream.append(made)
                return made
            made = leaf.detach()
            for i, n in enumerate(shape):
                if n != made.shape[i]:
                    order = torch.arange(n, device=made.device) % max(made.shape[i], 1)
                    made = made.index_select(i, order)
            is_mask = any(word in name for word in _MASKS)
            if made.dtype == torch.bool or (is_mask and _is_whole(made)):
                return _choices(made, generator)
            if _is_whole(made):
                varied = varies and "cu_seq" not in name
                return _numbers(made, generator) if varied else made.clone()
            made = _cast(made, dtype)
            is_square = sum(n in ("S", "M") for n in dims) == 2
            if (is_mask or is_square) and not made.is_complex():
                noise = torch.randn(made.shape, generator=generator, dtype=dtype).to(made.device)
                return torch.where(made < -1.0, made, made + 0.3 * noise)
            return made if tables else made + 0.25 * torch.sin(3.0 * made + 1.0)

        if named is None:
            named = _tensors(layer, random, params or dtype)
        return Sample(
            sizes, dtype, named, map_tree(dict(self.given), given), self.active, self.bounds
        )


@functools.lru_cache(1024)
def _options(
    shape: Sequence[int],
    is_float: bool,
    is_mask: bool,
    of_memory: bool,
    swapped: bool,
    is_known: bool,
    lengths: tuple[tuple[str, int], ...],
) -> tuple[tuple[str | int, ...], list[list[str | int]]]:
    """Return what the dimensions of an argument likely are, and what else each may be."""
    sizes, last = dict(lengths), len(shape) - 1
    batch, is_mask = sizes.get("B", 0), is_mask or last == 3
    features = is_float and last > 0 and not is_mask
    swapped = swapped and features and last > 1
    found: list[list[str | int]] = []
    for i, n in enumerate(shape):
        queries = is_mask and last > 1 and i == last - 1
        names = ("M", "S") if of_memory and not queries else ("S", "M")
        order: tuple[str | int, ...] = names
        if (features and i == last) or (last == 3 and i == 1 and n in shape[2:]):
            order = (n, *names)  # a width, or heads, as many as tokens
        elif swapped and i == 1:
            order = ("B",)
        elif i == 0 and "B" in sizes and not swapped:
            heads = (f"{n // max(batch, 1)}B",) if last == 2 and n > batch else ()
            other = (n, *heads) if batch == 1 else (*heads, n)
            order = ("B", *names) if last < 2 else ("B", *other, *names)
        same = [s for s in (*order, n) if isinstance(s, int) or _size_of(s, sizes) == n]
        found.append([*dict.fromkeys(same)])
    likeliest = tuple([n for n, *_ in found])
    return likeliest, [] if is_known else [others for _, *others in found]


def _size_of(dim: str | int, sizes: Mapping[str, int]) -> int:
    """Return the size of a dimension (`Arguments.dims`), or -1 for a length the call lacks."""
    return dim if isinstance(dim, int) else sizes.get(dim[-1], -1) * int(dim[:-1] or 1)


def _random(
    generator: torch.Generator, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> Tensor:
    """Normal random numbers, with a gradient."""
    count = math.prod(shape)
    made = torch.randn(min(count, _DRAWN), generator=generator, dtype=dtype).to(device)
    if count > _DRAWN:  # the same numbers again, never in the same place of a row
        made = made.repeat(-(-count // _DRAWN))[:count]
    return made.view(tuple(shape)).requires_grad_()


def _tensors(
    layer: nn.Module, random: Callable[..., Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Return random parameters of a layer, and its buffers, in `dtype`.

    Large parameters are windows of one storage, each from another element on.
    """
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
            elif p.dim() > 1:
                t.mul_(0.6 * p.shape[-1] ** -0.5)
            else:
                t.mul_(0.2)
        named[name] = t.to(p.device, dtype).requires_grad_(p.is_floating_point())
    for name, b in layer.named_buffers():
        named[name] = b.detach().to(dtype if b.is_floating_point() else b.dtype, copy=True)
    return named


def vary(layer: nn.Module) -> None:
    """Give a replica's buffers and attributes of one number (`constants`) other numbers."""
    generator = torch.Generator().manual_seed(0)
    for path, t in constants(layer).items():
        path, _, name = path.rpartition(".")
        module, made = layer.get_submodule(path), t.detach()
        if made.is_floating_point():
            steps = torch.sin(1.0 + torch.arange(made.numel(), device=made.device))
            made = (made + 0.25 * steps.view(made.shape)).to(made.dtype)
        else:
            made = _choices(made, generator)
        owner = module._buffers if name in module._buffers else module.__dict__
        owner[name] = made.requires_grad_(t.requires_grad)


def constants(layer: nn.Module) -> dict[str, Tensor]:
    """Buffers and attributes whose values are all one number, which may hide what a layer does."""
    tensors = {name: b for name, b in layer.named_buffers() if b.numel()}
    for path, module in layer.named_modules():
        own = {n: v for n, v in vars(module).items() if type(v) is Tensor and v.numel()}
        tensors.update({f"{path}.{n}" if path else n: v for n, v in own.items()})
    params = parameters_of(layer)
    kinds = {
        n: t
        for n, t in tensors.items()
        if n not in params and (t.is_floating_point() or t.dtype == torch.bool)
    }
    return {n: t for n, t in kinds.items() if bool((t == t.reshape(-1)[0]).all())}


def _choices(t: Tensor, generator: torch.Generator) -> Tensor:
    """Random zeros and ones; of each row the first is one and the second zero."""
    made = torch.rand(t.shape, generator=generator) < 0.7
    if t.dim():
        made[..., :1], made[..., 1:2] = True, False
    return made.to(t)


def _numbers(t: Tensor, generator: torch.Generator) -> Tensor:
    """Random whole numbers, no larger than those of `t` and than any size of a sample."""
    most = int(t.max()) if t.numel() else 0
    if most < 2 or int(t.min()) < 0:
        return _choices(t, generator) if most in (0, 1) else t.clone()
    return torch.randint(1, min(most, _SMALLEST) + 1, t.shape, generator=generator).to(t)


def _is_whole(t: Tensor) -> bool:
    """Return whether a tensor has whole numbers."""
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask or table in another dtype; the lowest number of its dtype does not become infinite."""
    if t.is_complex():
        return t.clone()
    limit = min(torch.finfo(dtype).max, torch.finfo(t.dtype).max)
    return torch.where(t.isinf(), t, t.clamp(-limit, limit)).to(dtype)


def leaf_of(module: nn.Module, dtype: torch.dtype = torch.float32) -> NormSpec | str | None:
    """What a submodule computes as a whole: a norm, or an activation by its name; found by trying.

    `dtype`: of its input, by which some norms choose their eps.

    >>> leaf_of(nn.LayerNorm(8)), leaf_of(nn.GELU(approximate="tanh")), leaf_of(nn.Linear(2, 2))
    (NormSpec(kind='layer_norm', eps=1e-05, offset=0.0), 'gelu_tanh', None)
    """
    params = parameters_of(module, recurse=False)
    if any(True for _ in module.children()) or len(params) > 2:
        return None
    if type(module) in (nn.Dropout, nn.Identity, nn.Linear):
        return None
    own = [v for n, v in vars(module).items() if isinstance(v, Tensor) and n not in params]
    if any(p.dim() != 1 for p in params.values()) or own or any(True for _ in module.buffers()):
        return None
    if not params and not hasattr(module, "normalized_shape"):
        x = torch.zeros(1, 1024, dtype=torch.float64)
        return activation_of(module, x) or _norm_kind(module, params, dtype)
    return _norm_kind(module, params, dtype)


def activation_of(run: Callable[[Tensor], Tensor], like: Tensor) -> str | None:
    """Return the entry of `ACTIVATIONS` that a function computes, or None.

    It is tried on a matrix of the shape and dtype of `like`.

    >>> activation_of(lambda x: x * torch.sigmoid(x), torch.zeros(2, 64, dtype=torch.float64))
    'silu'
    """
    size, generator = like.numel(), torch.Generator().manual_seed(0)
    tiny, large = torch.logspace(-8.0, -1.0, 29), torch.logspace(1.0, 30.0, 30)
    some = torch.cat([torch.linspace(-9.0, 9.0, 1001), torch.randn(400, generator=generator)])
    x = torch.cat([tiny, -tiny, large, -large, some, some.new_zeros(1)]).double()
    limits = x.new_tensor([math.inf, -math.inf, math.nan])
    try:
        pairs = [_slope(run, part, like) for part in _filled(x, size)]
        y, slope = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        ends = torch.cat([_slope(run, part, like)[0] for part in _filled(limits, size)])
    except Exception:  # whatever it is, it is no activation
        return None
    x, limits = torch.cat(_filled(x, size)), torch.cat(_filled(limits, size))
    loose = 1.0 if y.dtype == torch.float64 else 1e3  # digits of float32
    x, limits = x.to(like), limits.to(like)
    for name, known in ACTIVATIONS.items():
        if not torch.allclose(known.fwd(x), y, 1e-9 * loose, 1e-9 * loose):
            continue
        dx = known.bwd(torch.ones_like(x), x, None)
        same = torch.allclose(dx, slope, 1e-7 * loose, 1e-7 * loose)
        if same and torch.allclose(known.fwd(limits), ends, equal_nan=True):
            return name
    return None


def _filled(values: Tensor, size: int) -> list[Tensor]:
    """Return the values, repeated to parts of `size`."""
    count = -(-len(values) // size) * size
    return [*values.repeat(-(-count // len(values)))[:count].split(size)]


def _slope(run: Callable[[Tensor], Tensor], x: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return a function of a matrix like `like`, and its derivative, also if that is its own."""
    x = x.to(like).view(like.shape).requires_grad_()
    with torch.enable_grad():
        y = run(x.clone())  # which it may change
    if y.shape != x.shape:
        raise ValueError(f"it makes shape {tuple(y.shape)} of {tuple(x.shape)}")
    (slope,) = torch.autograd.grad(y.sum(), x)
    return y.detach().reshape(-1), slope.reshape(-1)


def _norm_kind(
    module: nn.Module, params: Mapping[str, Tensor], dtype: torch.dtype
) -> NormSpec | None:
    shapes = {p.shape[0] for p in params.values()}
    width = shapes.pop() if shapes else getattr(module, "normalized_shape", (16,))[-1]
    if shapes:
        return None
    generator = torch.Generator().manual_seed(0)
    dtype = torch.promote_types(dtype, torch.float32)
    x = torch.randn(3, 4, width, generator=generator, dtype=dtype)
    x[0, :, 0] = 1e4  # its result is as large as any can be
    signs = torch.randn(2, width, generator=generator, dtype=dtype)
    weights = (signs + 0.5 * signs.sign())[: len(params)]
    numbers = {v for v in vars(module).values() if isinstance(v, float) and 0.0 < v < 1e-2}
    for kind in ("layer_norm", "rms_norm"):
        for offset in (0.0, 1.0) if params else (0.0,):
            found = _eps(module, params, kind, offset, x, weights)
            if found is None or not 0.0 < found < 1.0:
                continue
            known = (*numbers, 1e-5, 1e-6, 1e-8, 1e-12, torch.finfo(dtype).eps)
            eps = next((n for n in known if math.isclose(n, found, rel_tol=1e-4)), found)
            run = norm_of(NormSpec(kind=kind, eps=eps, offset=offset))
            scales = ((1.0, 1.0), (1.0, 1e3), (1e-3, 1.0), (eps**0.5, 1.0), (1e5, 1.0))
            tried = [
                (run(a * x, *(b * weights)), _tried(module, _named(params, b * weights), a * x))
                for a, b in scales
            ]
            if all(y is not None and (z - y).abs().max() <= 1e-5 * z.abs().max() for z, y in tried):
                return NormSpec(kind=kind, eps=eps, offset=offset)
    return None


def _named(params: Mapping[str, Tensor], values: Tensor) -> dict[str, Tensor]:
    return dict(zip(params, values, strict=True))


def _eps(
    module: nn.Module,
    params: Mapping[str, Tensor],
    kind: str,
    offset: float,
    x: Tensor,
    weights: Tensor,
) -> float | None:
    """What a norm adds to the variance: of tiny numbers it is all that there is."""
    x = x * 1e-16
    weights = weights * torch.tensor([[1.0], [0.0]])[: len(weights)].to(x)  # no bias
    y = _tried(module, _named(params, weights), x)
    if y is None:
        return None
    scale = weights[0] + offset if len(weights) else 1.0
    centred = x - x.mean(-1, keepdim=True) if kind == "layer_norm" else x
    return float((centred * scale / y).square().median())


def _tried(module: nn.Module, named: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """The module on x, with parameters `named`; None if it raises or returns something else."""
    try:
        with torch.no_grad():
            y = torch.func.functional_call(module, dict(named), (x,))
    except Exception:  # whatever it is, it is no norm and no activation
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape else None
