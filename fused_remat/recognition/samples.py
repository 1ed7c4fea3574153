"""Small calls of a layer on random tensors of other sizes; and what submodules are, by trying."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.layers.record import NOTES as RECORD
from fused_remat.recognition.join import norm_of
from fused_remat.recognition.state import exact, held_by, is_mutable
from fused_remat.recognition.values import Sample, Unreadable, leaves, map_tree
from fused_remat.spec import NormSpec
from fused_remat.steps.activation import ACTIVATIONS

_MEMORY = ("encoder_hidden_states", "memory", "context", "encoder_output", "key_value_states", "xa")


#: Attributes of a layer that is read: what it was read as, and what is noted of it.
NOTES = (*RECORD, "_last", "_notes")
#: Attributes that number a layer of a model.
INDICES = ("layer_idx", "layer_id", "layer_number", "layer_index", "block_idx")

#: How many random numbers are drawn for a tensor: a prime, larger than most widths.
_DRAWN = 65537
#: No sample has fewer tokens in a sequence.
_SMALLEST = 5


class Call:
    """The arguments of a call by name, and what their dimensions are.

    Attributes:
        given: the arguments.
        dims: for each tensor among their leaves, the names of its dimensions' sizes, or numbers.
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
            del sizes["S"]
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
        self.dims = [
            self._dims(t, names[i], i == self.places[1]) if isinstance(t, Tensor) else None
            for i, t in enumerate(found)
        ]

    def _dims(self, t: Tensor, name: str, is_memory: bool) -> tuple[str | int, ...]:
        sizes = self.sizes
        dims: list[str | int] = list(t.shape)
        first = ["B"] if "B" in sizes else []
        lengths = [
            n for n in (("M", "S") if "encoder" in name or is_memory else ("S", "M")) if n in sizes
        ]
        is_mask = t.dim() == 4 or any(word in name for word in ("mask", "bias", "alibi"))
        features = t.is_floating_point() and t.dim() > 1 and not is_mask
        swapped = self.axes == ("S", "B") and features and t.dim() > 2
        for i, n in enumerate(t.shape[:-1] if features else t.shape):
            if swapped and i < 2:
                names = ["B"] if i == 1 else lengths
                dims[i] = next((s for s in names if sizes.get(s) == n), n)
            elif i == 0 and first and n == sizes["B"] and (n > 1 or t.dim() != 4):
                dims[i] = "B"
            elif i == 0 and first and t.dim() == 3 and n % sizes["B"] == 0 and sizes["B"] > 1:
                dims[i] = f"{n // sizes['B']}B"  # heads inside of the batch
            elif i > 0 or not first or t.dim() in (1, 2):
                dims[i] = next((s for s in lengths if sizes[s] == n), n)
        return tuple(dims)

    def key(self, free: bool) -> tuple[Any, ...]:
        """What the reading depends on; `free`: not on whole numbers."""
        found: list[Any] = []
        for leaf, dims in zip(leaves(self.given), self.dims, strict=True):
            if isinstance(leaf, Tensor):
                low = leaf.is_floating_point() and leaf.dtype != torch.float64
                kind = "float" if low else leaf.dtype
                found.append((dims, kind, leaf.device.type))
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
    ) -> Sample:
        """A call of other sizes, with random activations and parameters, in `dtype`.

        Masks have random values, so that no mask seems to do nothing. `whole`: packed tokens are
        one sequence, else two. `shift`: added to whole numbers. `params`: the dtype of parameters,
        if it is another. `tables`: other arguments keep their values; else equal ones become
        others, which are equal. `varies`: tensors of whole numbers are random.
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
            shape = [n if isinstance(n, int) else sizes[n[-1]] * int(n[:-1] or 1) for n in dims]
            if is_active or (leaf.is_floating_point() and leaf.requires_grad):
                made = random(shape, leaf.device)
                stream.append(made)
                return made
            made = leaf.detach()
            for i, n in enumerate(shape):
                if n != made.shape[i]:
                    order = torch.arange(n, device=made.device) % max(made.shape[i], 1)
                    made = made.index_select(i, order)
            is_mask = any(word in name for word in ("mask", "bias", "alibi"))
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

        named = _tensors(layer, random, params or dtype)
        return Sample(
            sizes, dtype, named, map_tree(dict(self.given), given), self.active, self.bounds
        )


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
    """Random parameters of a layer, and its buffers, in `dtype`."""
    named: dict[str, Tensor] = {}
    for name, p in layer.named_parameters():
        t = random(p.shape, p.device).detach()
        if p.dim() == 1 and "bias" not in name:
            t = t.abs_().add_(0.5)
        elif p.dim() > 1:
            t.mul_(0.6 * p.shape[-1] ** -0.5)
        else:
            t.mul_(0.2)
        named[name] = t.to(dtype).requires_grad_(p.is_floating_point())
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
    kinds = {n: t for n, t in tensors.items() if t.is_floating_point() or t.dtype == torch.bool}
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
    params = dict(module.named_parameters(recurse=False))
    if any(True for _ in module.children()) or len(params) > 2:
        return None
    if type(module) in (nn.Dropout, nn.Identity, nn.Linear):
        return None
    tensors = [*module.buffers(), *[v for v in vars(module).values() if isinstance(v, Tensor)]]
    if any(p.dim() != 1 for p in params.values()) or tensors:
        return None
    if not params and not hasattr(module, "normalized_shape"):
        small, large = torch.linspace(-9.0, 9.0, 1001), torch.logspace(1.0, 5.0, 9)
        x = torch.cat([small, large, -large]).double()
        y = _tried(module, {}, x.clone())
        if y is None:
            return None
        rows = ACTIVATIONS.items()
        slope = _slope(module, x)
        name = next(
            (
                n
                for n, a in rows
                if torch.allclose(a.fwd(x), y, 1e-9, 1e-9)
                and slope is not None
                and torch.allclose(a.bwd(torch.ones_like(x), x, None), slope, 1e-7, 1e-7)
            ),
            None,
        )
        return name or _norm_kind(module, params, dtype)
    return _norm_kind(module, params, dtype)


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


def _slope(module: nn.Module, x: Tensor) -> Tensor | None:
    """The derivative of a module at x, which may be one with a backward of its own."""
    x = x.clone().requires_grad_()
    with torch.enable_grad():
        y = module(x.clone())  # which it may change
    return torch.autograd.grad(y.sum(), x)[0] if y.requires_grad else None


def _tried(module: nn.Module, named: Mapping[str, Tensor], x: Tensor) -> Tensor | None:
    """The module on x, with parameters `named`; None if it raises or returns something else."""
    try:
        with torch.no_grad():
            y = torch.func.functional_call(module, dict(named), (x,))
    except Exception:  # whatever it is, it is no norm and no activation
        return None
    return y if isinstance(y, Tensor) and y.shape == x.shape else None
