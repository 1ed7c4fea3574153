"""Runs of a layer with other tensors, without dropout or effects."""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import pickle
import random
import re
import sys
import types
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import is_
from types import SimpleNamespace
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fused_remat.layers.eligibility import parameters_of
from fused_remat.layers.expert_stacks import functional
from fused_remat.layers.fallback import run_with
from fused_remat.layers.record import NOTES, listed
from fused_remat.tracing.state import get, parts_of, shared_by
from fused_remat.tracing.values import SHIFT, SideEffect, Untraceable, attributes, leaves, map_tree

_HOLDERS = (list, dict, set, deque)
_LIBRARIES = {*sys.stdlib_module_names, "torch", "numpy"} - {"__main__", "types"}


def replica(module: nn.Module, deep: bool = False) -> Any:
    """Return a module with the same tensors and attributes, whose tensors may be replaced.

    Threads that call the module do not see it. `deep`: tensor attributes may also be changed in
    place, and not the notes of the conversion.
    """
    # Not by calling the class: FSDP's returns another one. PEFT's changes its parameters.
    copies: dict[nn.Module, Any] = {
        old: object.__new__(functional(type(old))) for old in module.modules()
    }
    for old, new in copies.items():
        params = parameters_of(old, recurse=False) if deep else {}
        for name, value in old.__dict__.items():
            is_note = deep and name in NOTES
            if name not in old._parameters and not is_note:  # FSDP1 has some in both
                new.__dict__[name] = value if name in params else _copied(value, copies, deep)
        modules = {n: None if m is None else copies[m] for n, m in old._modules.items()}
        tensors = {"_parameters": {**old._parameters}, "_buffers": {**old._buffers}}
        new.__dict__.update(tensors, _modules=modules)
    return copies[module]


def _copied(value: Any, copies: Mapping[nn.Module, Any], deep: bool) -> Any:
    kind = type(value)
    copy = functools.partial(_copied, copies=copies, deep=deep)
    if isinstance(value, nn.Module):
        return copies.get(value, value)
    if kind is types.MethodType:
        return types.MethodType(value.__func__, copy(value.__self__))
    if kind is functools.partial:
        return functools.partial(copy(value.func), *copy(value.args), **copy(value.keywords))
    if kind is dict:
        return {key: copy(part) for key, part in value.items()}
    if kind in (list, tuple, set):
        return kind(map(copy, value))
    if deep and kind is Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)
    return value


def tensors_of(layer: nn.Module, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors `named` and those that a layer has as plain attributes, by path."""
    tensors, seen = dict(named), set(map(id, named.values()))
    for path, module in layer.named_modules():
        for name, value in vars(module).items():
            name = f"{path}.{name}" if path else name
            if isinstance(value, Tensor) and not (name in named or id(value) in seen):
                tensors[name] = value
                seen.add(id(value))
    return tensors


def run_unchanged(
    layer: nn.Module,
    forward: Callable[..., Any],
    named: Mapping[str, Tensor],
    arguments: Mapping[str, Any],
) -> Any:
    """Run as `run_with`, in training mode, and keep nothing for a backward pass.

    Raises: SideEffect if the forward changes more than its result; Untraceable if it changes
        parameters alone, or runs a backward pass.
    """
    tensors = tensors_of(layer, named)

    def watched(**arguments: Any) -> Any:
        with _unchanged(layer, arguments, tensors):
            return forward(**arguments)

    hooks = torch.autograd.graph.saved_tensors_hooks(lambda _: None, _no_backward)
    with torch.enable_grad(), hooks:
        return run_with(layer, watched, named, arguments)


def _no_backward(_: Any) -> Tensor:
    raise Untraceable("its forward runs a backward pass")


@contextlib.contextmanager
def renumbered(layer: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Add `SHIFT` to the integers among attributes of these names inside the context.

    Not by `setattr`: a layer's class may not let its index be set.
    """
    pairs = itertools.product(map(vars, layer.modules()), names)
    numbers = [(own, name, own[name]) for own, name in pairs if type(own.get(name)) is int]
    try:
        for own, name, number in numbers:
            own[name] = number + SHIFT
        yield
    finally:
        for own, name, number in numbers:
            own[name] = number


def check_effects(
    layer: nn.Module, forward: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Raise SideEffect if a call, on a replica and copies, changes more than its result."""
    copy = replica(layer, deep=True)
    params = parameters_of(layer)
    named = {name: p.detach().requires_grad_(p.requires_grad) for name, p in params.items()}
    named |= {name: _cloned(b) for name, b in layer.named_buffers()}
    copies = map_tree(dict(arguments), _cloned)
    try:
        run_unchanged(copy, types.MethodType(forward, copy), named, copies)
    except SideEffect:
        raise
    except Exception:  # which the layer's own forward then raises
        pass


def _cloned(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad).clone()


@contextlib.contextmanager
def _unchanged(
    layer: nn.Module, arguments: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Iterator[None]:
    """Raise, as `run_unchanged` does, if code inside has effects; undo those on objects.

    No object may change that can be reached from the layer's modules or the arguments, no name of
    their classes and Python modules that the layer reads, and none of the `tensors` in place.
    """
    params = {id(module._parameters) for module in layer.modules()}
    versions = [t._version for t in tensors.values()]
    bound = [(owner, name, get(owner, name)) for owner, name in shared_by(layer)]
    held = [value for *_, value in bound]
    held += [v for value in held if _is_object(value) for v in attributes(value).values()]
    reached, generators = _reachable([*map(vars, layer.modules()), arguments])
    held = [*reached, *[h for h in held if isinstance(h, _HOLDERS) or _is_object(h)]]
    holders = [(holder, parts_of(holder)) for holder in held]
    states = [(g, _generators()[type(g)][0](g)) for g in generators]
    changed, swapped = list[str](), list[str]()
    try:
        yield
    finally:
        for holder, before in holders:
            names = swapped if id(holder) in params else changed
            names += _restore(holder, before)
        for owner, name, value in bound:
            if get(owner, name) is not value:
                changed.append(name)
                if isinstance(owner, dict):
                    owner[name] = value
                else:
                    setattr(owner, name, value)
        drew = _restore_generators(states)
    for (name, t), version in zip(tensors.items(), versions, strict=True):
        if t._version != version:
            (swapped if t.requires_grad else changed).append(name)
    changed = [name for name in changed if name not in swapped]  # a parameter, and then a buffer
    if changed:
        text = listed([*dict.fromkeys(changed)])
        raise SideEffect(f"its forward changes {text}, which a block would not repeat")
    if swapped:
        raise Untraceable(f"its forward changes parameters ({listed([*dict.fromkeys(swapped)])})")
    if drew:
        raise SideEffect("it draws random numbers outside of PyTorch's default generator")


@functools.cache
def _generators() -> dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]]:
    """Return by the class of a random generator how to get and set its state."""
    old, new = numpy.random.RandomState, numpy.random.Generator  # numpy loads them on access
    return {
        random.Random: (random.Random.getstate, random.Random.setstate),
        torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
        old: (old.get_state, old.set_state),
        new: (lambda g: g.bit_generator.state, lambda g, s: setattr(g.bit_generator, "state", s)),
    }


def _restore_generators(before: list[tuple[Any, Any]]) -> bool:
    """Return whether random generators have another state than before, which is restored."""
    changed = [pickle.dumps(_generators()[type(g)][0](g)) != pickle.dumps(s) for g, s in before]
    for generator, state in itertools.compress(before, changed):
        _generators()[type(generator)][1](generator, state)
    return any(changed)


def _reachable(roots: list[Any]) -> tuple[list[Any], list[Any]]:
    """Return the containers and objects with slots that can be reached, and the generators."""
    generators: list[Any] = [random._inst, numpy.random.mtrand._rand]
    holders, seen, todo = list[Any](), set[int](), [*roots]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (Tensor, type, types.ModuleType)):
            continue
        seen.add(id(value))
        if type(value) in _generators():
            generators.append(value)
        elif isinstance(value, tuple):
            todo += value
        elif hasattr(value, "__dict__") and not isinstance(value, _HOLDERS):
            todo.append(vars(value))
        elif isinstance(value, _HOLDERS) or _is_object(value):
            holders.append(value)
            todo += parts_of(value)
    return holders, generators


def _is_object(value: Any) -> bool:
    """Return whether a value has attributes, and belongs to no library's own machinery."""
    package = type(value).__module__.partition(".")[0]
    return package not in _LIBRARIES and bool(attributes(value))


def _restore(holder: Any, before: list[Any]) -> list[str]:
    """Restore a container or object; return the keys that had changed, or its class's name."""
    now = parts_of(holder)
    if len(now) == len(before) and all(map(is_, now, before)):
        return []
    if isinstance(holder, _HOLDERS) and not isinstance(holder, dict):
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(before)
        return [type(holder).__name__]
    old, new = (dict(zip(i[::2], i[1::2], strict=True)) for i in (before, now))
    if isinstance(holder, dict):
        holder.clear()
        holder.update(old)
        return [str(k) for k in {**old, **new} if old.get(k, holder) is not new.get(k, holder)]
    changed = [name for name in old if new.get(name, holder) is not old[name]]
    for name in changed:
        setattr(holder, name, old[name])
    return changed


_MULTI_HEAD = inspect.signature(F.multi_head_attention_forward)


#: Dtypes that stand in for others in an exact trial.
_WIDE = {torch.float32: torch.float64, torch.complex64: torch.complex128}


class Trial(TorchFunctionMode):
    """A context in which dropout does nothing; if it is `exact`, float32 is float64."""

    def __init__(self, exact: bool) -> None:
        super().__init__()
        self.exact = exact

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if is_dropout(func):
            return args[0] if args else kwargs["input"]
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention(*args, **kwargs)
        if self.exact:
            args, kwargs = map_tree((args, kwargs), _wide)
            func = Tensor.double if func is Tensor.float else func
        if func is F.scaled_dot_product_attention:
            return attention_without_dropout(*args, **kwargs)
        result = in_float64(func)(*args, **kwargs)
        narrow = self.exact and any(_widened(leaf) is not leaf for leaf in leaves(result))
        return map_tree(result, _widened) if narrow else result  # else of its own class


def _wide(leaf: Any) -> Any:
    return _WIDE.get(leaf, leaf) if type(leaf) is torch.dtype else leaf


def _widened(leaf: Any) -> Any:
    return leaf.to(_WIDE[leaf.dtype]) if isinstance(leaf, Tensor) and leaf.dtype in _WIDE else leaf


def is_dropout(func: Any) -> bool:
    """Return whether a function drops single elements; `F.dropout2d` is a random operation."""
    name = getattr(func, "__name__", "")
    return func in (F.dropout, torch.dropout, torch.dropout_) or name in ("dropout", "dropout_")


def attention_without_dropout(*args: Any, **kwargs: Any) -> Tensor:
    zero = {"dropout_p": 0.0} if "dropout_p" in kwargs else {}
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    return F.scaled_dot_product_attention(*args, **{**kwargs, **zero})


def multi_head_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Compute `F.multi_head_attention_forward` by linear layers and one call of attention."""
    bound = _MULTI_HEAD.bind(*args, **kwargs)
    bound.apply_defaults()
    call = SimpleNamespace(**bound.arguments)
    if not (call.bias_k is call.bias_v is call.static_k is call.static_v is None) or (
        call.add_zero_attn
    ):
        raise Untraceable("nn.MultiheadAttention with bias_k, add_zero_attn or static keys")
    query, packed, bias = call.query, call.in_proj_weight, call.in_proj_bias
    tokens, batch, width = query.shape
    head_dim = width // call.num_heads
    if query is call.key is call.value and not call.use_separate_proj_weight:
        heads: Any = F.linear(query, packed, bias).chunk(3, -1)
    else:
        weights = (call.q_proj_weight, call.k_proj_weight, call.v_proj_weight)
        if not call.use_separate_proj_weight:
            weights = packed.chunk(3)
        biases = (None, None, None) if bias is None else bias.chunk(3)
        heads = map(F.linear, (query, call.key, call.value), weights, biases)
    q, k, v = (x.reshape(-1, batch, call.num_heads, head_dim).permute(1, 2, 0, 3) for x in heads)
    mask = call.attn_mask
    if mask is not None and mask.dim() == 3:
        mask = mask.view(batch, call.num_heads, *mask.shape[1:])
    if call.key_padding_mask is not None:
        padding = _added(call.key_padding_mask.view(batch, 1, 1, -1), query)
        mask = padding if mask is None else padding + _added(mask, query)
    elif mask is not None and mask.dtype == torch.bool:
        mask = mask.logical_not()
    p = call.dropout_p if call.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=p)
    out = out.permute(2, 0, 1, 3).reshape(tokens, batch, width)
    y = F.linear(out, call.out_proj_weight, call.out_proj_bias)
    if not call.need_weights:
        return y, None
    scores = q @ k.transpose(-1, -2) * head_dim**-0.5
    if mask is not None:
        scores = scores + _added(~mask if mask.dtype == torch.bool else mask, q)
    probabilities = scores.softmax(-1)
    return y, probabilities.mean(1) if call.average_attn_weights else probabilities


def sum_with_product(
    input: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """Compute `torch.baddbmm` by a product, factors and a sum."""
    product = torch.bmm(batch1, batch2)
    product = product if alpha == 1 else product * alpha
    if beta == 0:  # of which `input` may be uninitialized
        return product
    return product + (input if beta == 1 else input * beta)


#: Equations of `torch.einsum` that are products of (B, H, M, K) with (B, H, N, K), (B, H, K, N).
_PRODUCTS = (
    (True, re.compile(r"(\w\w)(\w)(\w),\1(\w)\3->\1\2\4")),
    (False, re.compile(r"(\w\w)(\w)(\w),\1\3(\w)->\1\2\4")),
)


def product_of(equation: Any, *operands: Any) -> Callable[[], Tensor] | None:
    """Return a function that computes an einsum as one product of matrices, or None."""
    text = str(equation).replace(" ", "")
    for transposed, pattern in _PRODUCTS:
        if pattern.fullmatch(text) and len(set(text) - {*",->"}) == 5 and len(operands) == 2:
            x, y = operands
            return lambda: x @ (y.mT if transposed else y)
    return None


def in_float64(func: Any) -> Any:
    """Return a function that also runs in float64, in which ATen has no grouped product."""
    is_grouped = getattr(func, "__name__", "") in ("grouped_mm", "_grouped_mm")
    return functools.partial(_grouped_product, func) if is_grouped else func


def _grouped_product(func: Any, x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Compute a product of rows with the matrix of their group, one group after the other."""
    offs, *more = (kwargs.get("offs"), *args) if "offs" in kwargs else (*args, None)
    more += [value for name, value in kwargs.items() if name != "offs"]
    is_plain = (x.dim(), weight.dim()) == (2, 3) and offs is not None
    if x.dtype != torch.float64 or not is_plain or any(value is not None for value in more):
        result: Tensor = func(x, weight, *args, **kwargs)
        return result
    if x.is_meta:
        return x.new_empty(len(x), weight.shape[2])
    y: Tensor = _GroupedProduct.apply(x, weight, offs.tolist())
    return y.clone()  # in which no recording sees a backward of its own


class _GroupedProduct(torch.autograd.Function):
    """Products of rows with the matrix of their group; backward makes one gradient of all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ends: list[int]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.groups = [slice(a, b) for a, b in itertools.pairwise((0, *ends))]
        y = x.new_zeros(len(x), weight.shape[2])
        for rows, matrix in zip(ctx.groups, weight, strict=True):
            y[rows] = x[rows] @ matrix
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dx, dw = torch.zeros_like(x), torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for i, rows in enumerate(ctx.groups):
            dx[rows] = dy[rows] @ weight[i].mT
            if dw is not None:
                dw[i] = x[rows].mT @ dy[rows]
        return dx, dw, None


def _added(hidden: Tensor, like: Tensor) -> Tensor:
    if hidden.dtype != torch.bool:
        return hidden
    return torch.zeros_like(hidden, dtype=like.dtype).masked_fill(hidden, -torch.inf)
