"""Records one forward of a layer as operations on numbered values.

Two recordings, at two sizes and in two dtypes, are joined to one `Recording`: a number, a dtype or
a limit of a dtype that differs between them becomes a function of the call. Where the two do not
agree inside of a submodule, that submodule is one opaque operation.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import random
import threading
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fused_remat.spec import NormSpec
from fused_remat.steps.activation import ACTIVATIONS

Sizes = Mapping[str, int]
#: What is added to whole numbers on which a layer should not depend: no size of a call explains it.
SHIFT = 1009


class Unreadable(Exception):
    """The operations of a layer cannot be read as a block. The text is the reason."""


class Mismatch(Unreadable):
    """The two recordings differ in what no size and no dtype explains."""


@dataclass(frozen=True)
class Ref:
    """A recorded value, by its number."""

    index: int


@dataclass(frozen=True)
class Size:
    """A number that follows from the sizes of a call: factor * product of `names` + offset."""

    factor: int
    names: tuple[str, ...]
    offset: int = 0

    def of(self, sizes: Sizes) -> int:
        n = self.factor
        for name in self.names:
            n *= sizes[name]
        return n + self.offset


class _StreamDtype:
    """The dtype of the residual stream."""

    def __repr__(self) -> str:
        return "the stream's dtype"


STREAM = _StreamDtype()


class Limit(NamedTuple):
    """An attribute of `torch.finfo` of the residual stream's dtype."""

    name: str
    sign: float


def map_tree(tree: Any, leaf: Callable[[Any], Any]) -> Any:
    """`tree` with every leaf of its tuples, lists, dicts and slices replaced by `leaf` of it."""
    if isinstance(tree, tuple) and not isinstance(tree, Limit):
        parts = [map_tree(part, leaf) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    if isinstance(tree, list):
        return [map_tree(part, leaf) for part in tree]
    if isinstance(tree, dict):
        return {key: map_tree(value, leaf) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(*[map_tree(n, leaf) for n in (tree.start, tree.stop, tree.step)])
    return leaf(tree)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a tree, in order."""
    found: list[Any] = []
    map_tree(tree, found.append)
    return found


def refs(tree: Any) -> list[int]:
    """The numbers of the values in a tree."""
    return [leaf.index for leaf in leaves(tree) if isinstance(leaf, Ref)]


@dataclass(eq=False)
class Op:
    """One operation.

    Attributes:
        name: of the function.
        run: called with the arguments, it returns a result with the outputs as its leaves. It
            changes no argument. That of an opaque submodule takes the submodule first.
        args, kwargs: with `Ref`s in the places of tensors.
        outs: the numbers of the tensors among the result's leaves; None for other leaves.
        p: of dropout: the probability, if it is active.
        random: whether it draws random numbers.
        path: of an opaque submodule, its path.
        inside: the path of the submodule that runs it.
        info: of a norm, its `NormSpec`; of an activation, its name; of an opaque submodule, why it
            was not read.
    """

    name: str
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: list[int | None]
    inside: str
    p: float | None = None
    random: bool = False
    path: str | None = None
    info: Any = None


@dataclass(eq=False)
class Span:
    """A submodule's call: what ran inside of it, its arguments and its result."""

    path: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    outs: list[int | None] = field(default_factory=list)
    inner: list[Op | Span] = field(default_factory=list)
    trouble: str = ""

    def ops(self) -> Iterator[Op]:
        for part in self.inner:
            if isinstance(part, Span):
                yield from part.ops()
            else:
                yield part


_READS = (
    "__bool__", "item", "tolist", "__int__", "__float__", "__index__", "nonzero", "__contains__",
    "numpy", "unique", "masked_select", "argwhere", "bincount", "equal", "allclose", "is_nonzero",
)  # fmt: skip
#: They read the shape of their first argument, not its values.
SHAPES = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_zeros",
    "new_ones", "new_empty", "new_full", "new_tensor", "randint_like",
)  # fmt: skip
_IN_PLACE = (
    "__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__iand__", "__ior__",
)  # fmt: skip
_SETTERS = ("__set__", "requires_grad_", "retain_grad", "backward", "__delete__")


_OWN_BACKWARD = "it runs an autograd.Function, whose backward is its own"


def _is_own(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # which would record the look
        return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)


def _in_place(name: str) -> bool:
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


def _is_dropout(func: Any) -> bool:
    """Whether a function drops single elements; others, such as `F.dropout2d`, just draw."""
    name = getattr(func, "__name__", "")
    return func in (F.dropout, torch.dropout, torch.dropout_) or name in ("dropout", "dropout_")


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the generators from which operations on a device draw."""
    own = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return [torch.random.get_rng_state(), *own]


def multi_head_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    embed_dim: int,
    num_heads: int,
    weight: Tensor | None,
    bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_weight: Tensor,
    out_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """`F.multi_head_attention_forward` in linear layers and one attention, without weights."""
    if not (bias_k is bias_v is static_k is static_v is None) or add_zero_attn:
        raise Unreadable("nn.MultiheadAttention with bias_k, add_zero_attn or static keys")
    weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
    if not use_separate_proj_weight and weight is not None:
        weights = weight.chunk(3)
    biases: Any = (None, None, None) if bias is None else bias.chunk(3)
    batch, width = query.shape[1], embed_dim // num_heads
    heads = [
        F.linear(x, w, b).view(x.shape[0], batch, num_heads, width).permute(1, 2, 0, 3)
        for x, w, b in zip((query, key, value), weights, biases, strict=True)
    ]
    if attn_mask is not None and attn_mask.dim() == 3:
        attn_mask = attn_mask.view(batch, num_heads, *attn_mask.shape[1:])
    if key_padding_mask is not None:
        padding = key_padding_mask.view(batch, 1, 1, -1)
        if padding.dtype == torch.bool:
            padding = torch.zeros_like(padding, dtype=query.dtype).masked_fill(padding, -torch.inf)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(
                attn_mask, -torch.inf
            )
        attn_mask = padding if attn_mask is None else padding + attn_mask
    elif attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = attn_mask.logical_not()
    p = dropout_p if training else 0.0
    q, k, v = heads
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=attn_mask, dropout_p=p)
    out = out.permute(2, 0, 1, 3).reshape(query.shape[0], batch, embed_dim)
    return F.linear(out, out_weight, out_bias), None


class _Recorder(TorchFunctionMode):
    """Records while it is active; `named` are the layer's parameters and buffers."""

    def __init__(self, layer: nn.Module, named: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.layer, self.device = layer, device
        self.autocast = False
        self.values: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # by the tensor's id: its present value
        self.sources: dict[int, str] = {}  # parameters, buffers and attributes, by number
        self.live: set[int] = set()
        #: What a value is made of: names of the layer's tensors, "argument" and "random".
        self.roots: dict[int, frozenset[str]] = {}
        self.owned: set[int] = set()  # results of submodules that run an autograd.Function
        self.fixed: set[str] = set()  # buffers and attributes whose values decide what it runs
        self.params = {name for name, _ in layer.named_parameters()}
        #: By a view's id: its base, and the steps from there.
        self.views: dict[int, tuple[Tensor, list[Any]]] = {}
        self.root = Span("")
        self.stack = [self.root]
        self.paths = {module: name for name, module in layer.named_modules()}
        for name, tensor in named.items():
            self.source(tensor, name)
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, Tensor) and id(value) not in self.numbers:
                    self.source(value, f"{path}.{name}" if path else name)

    def new(self, tensor: Tensor) -> int:
        self.numbers[id(tensor)] = len(self.values)
        self.values.append(tensor)  # which keeps the id
        return len(self.values) - 1

    def source(self, tensor: Tensor, name: str) -> None:
        """Take a tensor of the layer as a value."""
        number = self.new(tensor)
        self.sources[number], self.roots[number] = name, frozenset((name,))

    def number(self, tensor: Tensor) -> int:
        """The number of a tensor that is read."""
        found = self.numbers.get(id(tensor))
        if _is_own(tensor) and id(tensor) not in self.owned:
            self.trouble(_OWN_BACKWARD)
        if found is None:
            self.trouble(
                "it computes with a tensor that was made outside of PyTorch's functions"
                if tensor.requires_grad
                else "it reads a tensor that is no parameter, buffer, attribute or argument"
            )
            found = self.new(tensor)
            if tensor.requires_grad:
                self.live.add(found)
        elif found < 0:
            self.trouble("it changes a tensor in place through one of several views")
            found = self.new(tensor)
            self.live.add(found)
        return found

    def trouble(self, reason: str) -> None:
        """Note on the innermost submodule that it cannot be read."""
        self.stack[-1].trouble = self.stack[-1].trouble or reason

    def encoded(self, tree: Any) -> Any:
        return map_tree(tree, lambda a: Ref(self.number(a)) if isinstance(a, Tensor) else a)

    def add(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, result: Any, **more: Any
    ) -> None:
        """Add an operation on encoded arguments."""
        op = Op(name, run, args, kwargs, [], self.stack[-1].path, **more)
        read = refs((args, kwargs))
        is_live = name not in SHAPES and not self.live.isdisjoint(read)
        roots = frozenset[str]().union(*[self.roots.get(n, frozenset()) for n in read])
        roots |= {"random"} if op.random else set()
        for leaf in leaves(result):
            number = self.new(leaf) if isinstance(leaf, Tensor) else None
            op.outs.append(number)
            if number is not None:
                self.roots[number] = roots
            if number is not None and is_live:
                self.live.add(number)
        self.stack[-1].inner.append(op)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _SETTERS:
            return func(*args, **kwargs)
        if _is_dropout(func):
            return self._dropout(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention(*args, **kwargs)
        if func is torch._native_multi_head_attention:
            self.trouble("it runs a fused kernel for inference")
        if name in _READS and args and isinstance(args[0], Tensor):
            self._read(name.strip("_"), self.number(args[0]))
        if name == "register_hook":
            self.trouble("it registers a hook on a tensor")
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        if kwargs.get("out") is not None:
            self.trouble("it writes to a tensor that is passed as `out`")
        encoded, before = (self.encoded(args), self.encoded(kwargs)), generator_states(self.device)
        if func is F.scaled_dot_product_attention:
            result, draws = _without_dropout(*args, **kwargs), _drops(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
            pairs = zip(before, generator_states(self.device), strict=True)
            draws = not all(torch.equal(a, b) for a, b in pairs)
        more = {"random": draws}
        if _in_place(name) and args and isinstance(args[0], Tensor):
            self._change(name, func, args[0], *encoded, more)
            return result
        given = {id(a) for a in leaves((args, kwargs)) if isinstance(a, Tensor)}
        if isinstance(result, Tensor) and id(result) in given:
            result = result.view_as(result)
        if any(isinstance(t, Tensor) for t in leaves(result)):
            self._note_views(func, args, *encoded, result)
            self.add(name, func, *encoded, result, **more)
        return result

    def _read(self, name: str, number: int) -> None:
        """Values decide what the layer runs; those of buffers and attributes are part of it."""
        roots = self.roots.get(number, frozenset())
        what = (
            "an activation" if number in self.live
            else "a random number" if "random" in roots
            else "an argument" if "argument" in roots
            else "a parameter" if not roots.isdisjoint(self.params)
            else ""
        )  # fmt: skip
        if what:
            self.trouble(f"it reads values of {what} ({name})")
        else:
            self.fixed |= roots

    def _dropout(
        self, input: Tensor, p: float = 0.5, training: bool = True, *_: Any, **__: Any
    ) -> Tensor:
        args = self.encoded((input,))
        out = input.view_as(input)
        self._note_views(torch.Tensor.view_as, (input,), (*args, *args), {}, out)
        self.add("dropout", lambda x: x, args, {}, out, p=float(p) if training else 0.0)
        return out

    def _note_views(self, func: Any, args: Any, encoded: Any, kwargs: Any, result: Any) -> None:
        """Remember which results are views of the first argument."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.numel():
            return
        pointer = first.untyped_storage().data_ptr()
        base, steps = self.views.get(id(first), (first, []))
        for i, leaf in enumerate(leaves(result)):
            if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() == pointer:
                self.views[id(leaf)] = base, [*steps, (func, i, encoded[1:], kwargs)]

    def _change(
        self, name: str, func: Any, changed: Tensor, args: Any, kwargs: Any, more: Any
    ) -> None:
        """An in-place operation: new values of the tensor, of its base, and of all other views."""
        base, steps = self.views.get(id(changed), (changed, []))

        def changes(target: Tensor, how: Any, rest: Any, named: Any) -> Tensor:
            mine = target.clone()
            func(_view(steps, mine, how), *rest, **named)
            return mine

        before = Ref(self.number(base))
        self.add(name, changes, (before, _given(steps), args[1:], kwargs), {}, base, **more)
        pointer = base.untyped_storage().data_ptr()
        for t in list({id(t): t for t in self.values}.values()):
            of, views = self.views.get(id(t), (None, []))
            if of is base:
                run = functools.partial(_view, views)
                now = Ref(self.numbers[id(base)])
                self.add("view", run, (now, _given(views)), {}, t)
            elif t is not base and t.numel() and t.untyped_storage().data_ptr() == pointer:
                self.numbers[id(t)] = -1  # a view of which it is not known how it was made

    # --- submodules

    def module(self, module: nn.Module, call: Any, args: Any, kwargs: Any) -> Any:
        span = Span(self.paths[module], self.encoded(args), self.encoded(kwargs))
        versions = [(t, t._version) for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.stack[-1].inner.append(span)
        self.stack.append(span)
        try:
            result = call(module, *args, **kwargs)
        finally:
            self.stack.pop()
        if any(t._version != version for t, version in versions):
            self.trouble(f"{span.path} changes its arguments in place")
        own = [t for t in leaves(result) if isinstance(t, Tensor) and _is_own(t)]
        if own:
            span.trouble = span.trouble or _OWN_BACKWARD
            self.owned.update(map(id, own))  # the submodule's trouble, not that of who reads them
        span.outs = [
            self.numbers.get(id(leaf)) if isinstance(leaf, Tensor) else None
            for leaf in leaves(result)
        ]
        span.outs = [n if n is None or n >= 0 else None for n in span.outs]
        return result


def _given(steps: list[Any]) -> list[Any]:
    """The arguments of the steps to a view, which may depend on the sizes of a call."""
    return [(args, kwargs) for _, _, args, kwargs in steps]


def _view(steps: list[Any], base: Tensor, how: list[Any]) -> Tensor:
    """A view of `base`: the same steps, with the arguments `how`."""
    for (func, place, *_), (args, kwargs) in zip(steps, how, strict=True):
        base = leaves(func(base, *args, **kwargs))[place]
    return base


def _without_dropout(*args: Any, **kwargs: Any) -> Tensor:
    if len(args) > 4:
        args = (*args[:4], 0.0, *args[5:])
    if "dropout_p" in kwargs:
        kwargs = {**kwargs, "dropout_p": 0.0}
    return F.scaled_dot_product_attention(*args, **kwargs)


def _drops(*args: Any, **kwargs: Any) -> bool:
    """Whether attention has dropout."""
    return bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0))


_ACTIVE = threading.local()
_CALL = nn.Module.__call__
_ENTER, _EXIT, _ENABLED = (
    torch.autocast.__enter__, torch.autocast.__exit__, torch.is_autocast_enabled
)  # fmt: skip
_patch = threading.Lock()


def _call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    recorder = getattr(_ACTIVE, "recorder", None)
    if recorder is None or module not in recorder.paths or module is recorder.layer:
        return _CALL(module, *args, **kwargs)
    return recorder.module(module, _CALL, args, kwargs)


def _enter(self: torch.autocast) -> Any:
    recorder = getattr(_ACTIVE, "recorder", None)
    if recorder is None:
        return _ENTER(self)
    if self.device == recorder.device.type:
        recorder.trouble("it switches autocast")
    return self


def _exit(self: torch.autocast, *raised: Any) -> Any:
    return _EXIT(self, *raised) if getattr(_ACTIVE, "recorder", None) is None else False


def _is_enabled(*device: str) -> bool:
    """In the second recording autocast seems to be on, so that what asks for it is found."""
    recorder = getattr(_ACTIVE, "recorder", None)
    return _ENABLED(*device) if recorder is None else recorder.autocast


@contextlib.contextmanager
def _recording(recorder: _Recorder) -> Iterator[None]:
    pairs = (
        (nn.Module, "__call__", _CALL, _call),
        (torch, "is_autocast_enabled", _ENABLED, _is_enabled),
        (torch.autocast, "__enter__", _ENTER, _enter), (torch.autocast, "__exit__", _EXIT, _exit),
    )  # fmt: skip
    with _patch:
        _ACTIVE.recorder = recorder
        for owner, name, _, new in pairs:
            setattr(owner, name, new)
        try:
            with recorder:
                yield
        finally:
            _ACTIVE.recorder = None
            for owner, name, old, _ in pairs:
                setattr(owner, name, old)


class _WithoutDropout(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if _is_dropout(func):
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            return _without_dropout(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention(*args, **kwargs)
        return func(*args, **kwargs)


#: A context in which dropout of any probability does nothing, as while recording.
without_dropout = _WithoutDropout


@dataclass(eq=False)
class Recording:
    """Two recordings of a layer, joined.

    Attributes:
        values: of the first recording, by number.
        shapes: of every value, with `Size`s; None where the two recordings do not agree.
        dtypes: of every value; `STREAM` for the residual stream's.
        ops: all operations, in order; an opaque submodule is one.
        producers: by number of a value, the operation that makes it.
        sources: parameters, buffers and attributes of the layer by number.
        inputs: the numbers of the tensors among the leaves of the arguments; None for others.
        live: the values that depend on the activations among the arguments.
        result: the layer's result, with `Ref`s.
        sizes: of the first recording.
        exact: the dtype in which its operations are tried.
        fixed: names of the layer's tensors whose values decide what it runs.
    """

    values: list[Tensor]
    shapes: list[tuple[Any, ...] | None]
    dtypes: list[Any]
    ops: list[Op]
    producers: dict[int, Op]
    sources: dict[int, str]
    inputs: list[int | None]
    live: set[int]
    result: Any
    sizes: Sizes
    exact: torch.dtype
    fixed: set[str]


def _record(
    layer: nn.Module,
    forward: Callable[..., Any],
    named: Mapping[str, Tensor],
    given: Mapping[str, Any],
    active: list[bool],
    bounds: int | None,
    autocast: bool,
) -> tuple[_Recorder, list[int | None], Any]:
    """One recording: the recorder, the numbers of the arguments, and the result."""
    device = next(leaf.device for leaf in leaves(given) if isinstance(leaf, Tensor))
    recorder = _Recorder(layer, named, device)
    recorder.autocast = autocast
    numbers: list[int | None] = []
    for i, (leaf, is_active) in enumerate(zip(leaves(given), active, strict=True)):
        numbers.append(recorder.new(leaf) if isinstance(leaf, Tensor) else None)
        number = numbers[-1]
        if number is not None and i != bounds:
            recorder.roots[number] = frozenset(("argument",))
        if number is not None and is_active:
            recorder.live.add(number)

    def watched(**given: Any) -> Any:
        with _unchanged([*map(vars, layer.modules()), given], recorder):
            return forward(**given)

    with _recording(recorder), torch.enable_grad():
        result = run_with(layer, watched, named, given)
    return recorder, numbers, recorder.encoded(result)


@contextlib.contextmanager
def _unchanged(roots: list[Any], recorder: _Recorder) -> Iterator[None]:
    """Raise Unreadable if a layer changes what it or its arguments hold; put that back."""
    tensors = [(name, recorder.values[i]) for i, name in recorder.sources.items()]
    versions = [t._version for _, t in tensors]
    holders = _holders(roots)
    state = random.getstate(), numpy.random.get_state(legacy=False)
    changed = list[str]()
    try:
        yield
    finally:
        for holder, before in holders:
            changed += _put_back(holder, before)
    pairs = zip(tensors, versions, strict=True)
    changed += [name for (name, t), version in pairs if t._version != version]
    if changed:
        raise Unreadable(f"it changes {', '.join(dict.fromkeys(changed))} in forward")
    if repr((random.getstate(), numpy.random.get_state(legacy=False))) != repr(state):
        raise Unreadable("it draws random numbers outside of PyTorch")


def _holders(roots: list[Any]) -> list[tuple[Any, list[Any]]]:
    """All lists, dicts and sets that can be reached, also by attributes, and what they hold."""
    found, seen, todo = list[tuple[Any, list[Any]]](), set[int](), [*roots]
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, (Tensor, type, types.ModuleType)):
            continue
        seen.add(id(value))
        if isinstance(value, (list, dict, set)):
            found.append((value, _items(value)))
            todo += found[-1][1]
        elif isinstance(value, tuple):
            todo += value
        elif hasattr(value, "__dict__"):
            todo.append(vars(value))
    return found


def _items(holder: Any) -> list[Any]:
    items = holder.items() if isinstance(holder, dict) else holder
    return [*itertools.chain(*items)] if isinstance(holder, dict) else [*items]


def _put_back(holder: Any, before: list[Any]) -> list[str]:
    """What of a list, dict or set is not as it was: the keys, or its class."""
    now = _items(holder)
    if len(now) == len(before) and all(a is b for a, b in zip(now, before, strict=True)):
        return []
    names = [type(holder).__name__]
    if isinstance(holder, dict):
        old, new = (dict(zip(i[::2], i[1::2], strict=True)) for i in (before, now))
        names = [str(k) for k in {**old, **new} if old.get(k, holder) is not new.get(k, holder)]
        holder.clear()
        holder.update(old)
    elif isinstance(holder, list):
        holder[:] = before
    else:
        holder.clear()
        holder.update(before)
    return names


class _Caller(nn.Module):
    """Gives `functional_call` a module whose forward is `forward`, over the layer's tensors."""

    def __init__(self, layer: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.layer, self._forward = layer, forward

    def forward(self, *args: Any, **given: Any) -> Any:
        return self._forward(*args, **given)


def _prefixed(named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"layer.{name}": tensor for name, tensor in named.items()}


def replica(module: nn.Module, deep: bool = False) -> Any:
    """A module with the same tensors and attributes, whose tensors may be replaced: threads that
    call the module do not see it. `deep`: tensor attributes may be changed in place, too.
    """
    # Not by the class: FSDP's makes another one.
    made: dict[nn.Module, Any] = {old: object.__new__(type(old)) for old in module.modules()}
    for old, new in made.items():
        new.__dict__.update({n: _copied(v, made, deep) for n, v in old.__dict__.items()})
        modules = {n: None if m is None else made[m] for n, m in old._modules.items()}
        tensors = {"_parameters": {**old._parameters}, "_buffers": {**old._buffers}}
        new.__dict__.update(tensors, _modules=modules)
    return made[module]


def _copied(value: Any, made: Mapping[nn.Module, Any], deep: bool) -> Any:
    """An attribute for a replica, of whose modules it speaks then; other objects are the same."""
    kind = type(value)
    if isinstance(value, nn.Module):
        return made.get(value, value)
    if kind is types.MethodType:
        return types.MethodType(value.__func__, _copied(value.__self__, made, deep))
    if kind is functools.partial:
        args, named = (_copied(part, made, deep) for part in (value.args, value.keywords))
        return functools.partial(_copied(value.func, made, deep), *args, **named)
    if kind is dict:
        return {key: _copied(part, made, deep) for key, part in value.items()}
    if kind in (list, tuple):
        return kind([_copied(part, made, deep) for part in value])
    if kind is set:
        return {*value}
    return value.detach().clone() if deep and kind is Tensor else value


def call_with(
    module: nn.Module, tensors: dict[str, Tensor], args: Any, kwargs: dict[str, Any]
) -> Any:
    """The module on arguments, with these tensors as its own."""
    return torch.func.functional_call(replica(module), tensors, args, kwargs)


def run_with(
    layer: nn.Module,
    forward: Callable[..., Any],
    named: Mapping[str, Tensor],
    given: Mapping[str, Any],
) -> Any:
    """`forward(**given)`, a method of `layer`, with the tensors `named` as its own."""
    return torch.func.functional_call(_Caller(layer, forward), _prefixed(named), (), dict(given))


class Sample(NamedTuple):
    """What a layer is recorded with: sizes, the layer's tensors, and the arguments of a call.

    Attributes:
        dtype: the residual stream's.
        active: for each leaf of the arguments, whether it is an activation.
        bounds: the place among these leaves of the bounds of packed sequences, if there are any.
    """

    sizes: Sizes
    dtype: torch.dtype
    named: Mapping[str, Tensor]
    given: Mapping[str, Any]
    active: list[bool]
    bounds: int | None = None


class Pair:
    """Two recordings of `forward`, a method of `layer`, with two samples.

    The samples differ in every size, and in the dtype of what is in the residual stream's.

    Args:
        leaf: `leaf(module)` says what a submodule is as a whole: a `NormSpec`, the name of an
            activation, or None.
        numbers: attributes of modules that are another number in the second recording, so that what
            depends on them is found.
    """

    def __init__(
        self,
        layer: nn.Module,
        forward: Callable[..., Any],
        first: Sample,
        second: Sample,
        leaf: Callable[[nn.Module], Any],
        numbers: Collection[str] = (),
    ) -> None:
        self.layer, self.sizes, self.other = layer, first.sizes, second.sizes
        self.dtypes = first.dtype, second.dtype
        self.one, self.numbers, self.out = _record(layer, forward, *first[2:], autocast=False)
        with renumbered(layer, numbers):
            self.two, _, self.other_out = _record(layer, forward, *second[2:], autocast=True)
        self.fixed = self.one.fixed | self.two.fixed
        self.leaves = {path: leaf(module) for path, module in layer.named_modules() if path}

    def join(self, opaque: Collection[str] = ()) -> Recording:
        """The two as one; submodules at the paths `opaque` are one operation each.

        Raises: Unreadable if the operations of the layer itself do not agree.
        """
        return _Join(self, opaque).joined()


@contextlib.contextmanager
def renumbered(layer: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Attributes of these names that are whole numbers are larger inside, by `SHIFT`."""
    found = [
        (module.__dict__, name, module.__dict__[name])
        for module in layer.modules()
        for name in names
        if type(module.__dict__.get(name)) is int
    ]
    try:
        for own, name, number in found:
            own[name] = number + SHIFT
        yield
    finally:
        for own, name, number in found:
            own[name] = number


class _Join:
    """Joins two recordings."""

    def __init__(self, pair: Pair, opaque: Collection[str]) -> None:
        self.one, self.two, self.sizes, self.other = pair.one, pair.two, pair.sizes, pair.other
        self.from_pair, self.opaque = pair, opaque
        groups = range(1, len(self.sizes) + 1)
        self.products = [c for n in groups for c in itertools.combinations(self.sizes, n)]
        self.ops: list[Op] = []
        self.pair: dict[int, int] = {}  # the number in the second recording

    def joined(self) -> Recording:
        one, two, numbers = self.one, self.two, self.from_pair.numbers
        self.pair = {i: i for i in (*one.sources, *(n for n in numbers if n is not None))}
        self._span(one.root, two.root)
        producers = {n: op for op in self.ops for n in op.outs if n is not None}
        shapes: list[Any] = [None] * len(one.values)
        dtypes: list[Any] = [t.dtype for t in one.values]
        for i, j in self.pair.items():
            t, u = one.values[i], two.values[j]
            with contextlib.suppress(Mismatch):
                dtypes[i] = self.leaf(t.dtype, u.dtype)
                if t.dim() == u.dim():
                    sizes = zip(t.shape, u.shape, strict=True)
                    shapes[i] = tuple([self.size(a, b) for a, b in sizes])
        result = self.tree(self.from_pair.out, self.from_pair.other_out)
        live = {n for n in one.live if n in producers or n in numbers}
        return Recording(
            one.values, shapes, dtypes, self.ops, producers, one.sources, numbers, live, result,
            self.sizes, max(self.from_pair.dtypes, key=lambda d: d.itemsize),
            {*self.from_pair.fixed},
        )  # fmt: skip

    def _span(self, one: Span, two: Span) -> None:
        """Join the insides of two calls of a submodule."""
        trouble = one.trouble or two.trouble
        if trouble:
            raise Mismatch(trouble)
        if [_kind(part) for part in one.inner] != [_kind(part) for part in two.inner]:
            raise Mismatch("its operations depend on the size or on the dtype")
        for a, b in zip(one.inner, two.inner, strict=True):
            if isinstance(a, Span) and isinstance(b, Span):
                self._module(a, b)
            elif isinstance(a, Op) and isinstance(b, Op):
                self._op(a, b)

    def _module(self, a: Span, b: Span) -> None:
        """Join two calls of a submodule: as a norm or an activation, as what it runs, or as one."""
        leaf = self.from_pair.leaves[a.path]
        if leaf is not None and len(a.args) == 1 and not a.kwargs and a.outs[:1] != [None]:
            self._leaf(a, b, leaf)
            return
        before, known = len(self.ops), dict(self.pair)
        try:
            if a.path in self.opaque:
                raise Mismatch("it is no step of a block")
            self._span(a, b)
        except Mismatch as reason:
            del self.ops[before:]
            self.pair = known
            self._opaque(a, b, str(reason))

    def _leaf(self, a: Span, b: Span, leaf: Any) -> None:
        args = self.tree(a.args, b.args)
        module = self.from_pair.layer.get_submodule(a.path)
        own = {n: i for i, n in self.one.sources.items() if n.rpartition(".")[0] == a.path}
        params = [Ref(own[f"{a.path}.{n}"]) for n, _ in module.named_parameters(recurse=False)]
        name = "act" if isinstance(leaf, str) else "norm"
        run = _activation(leaf) if isinstance(leaf, str) else norm_of(leaf)
        self._outs(a.outs, b.outs)
        self.ops.append(Op(name, run, (*args, *params), {}, list(a.outs), a.path, info=leaf))

    def _op(self, a: Op, b: Op) -> None:
        if (a.p, len(a.outs)) != (b.p, len(b.outs)):
            raise Mismatch(f"the results of {a.name} differ")
        args, kwargs = self.tree(a.args, b.args), self.tree(a.kwargs, b.kwargs)
        self._outs(a.outs, b.outs)
        self.ops.append(replace(a, args=args, kwargs=kwargs))

    def _opaque(self, a: Span, b: Span, reason: str) -> None:
        """One operation that calls a submodule."""
        try:
            args, kwargs = self.tree(a.args, b.args), self.tree(a.kwargs, b.kwargs)
        except Mismatch:
            raise Mismatch(f"{a.path}: {reason}") from None
        prefix, module = f"{a.path}.", self.from_pair.layer.get_submodule(a.path)
        held = {n for n, _ in (*module.named_parameters(), *module.named_buffers())}
        tensors = {
            name.removeprefix(prefix): Ref(i)
            for i, name in self.one.sources.items()
            if name.startswith(prefix) and name.removeprefix(prefix) in held
        }
        given = refs((args, kwargs))
        outs = [n if n not in given else None for n in a.outs]
        op = Op(
            a.path.rpartition(".")[2], call_with, (tensors, args, kwargs), {},
            outs, a.path,
            path=a.path, info=reason, random=any(inner.random or inner.p for inner in a.ops()),
        )  # fmt: skip
        self._outs(a.outs, b.outs)
        self.ops.append(op)

    def _outs(self, mine: list[int | None], other: list[int | None]) -> None:
        if [n is None for n in mine] != [n is None for n in other]:
            raise Mismatch("the results differ")
        for i, j in zip(mine, other, strict=True):
            if i is not None and j is not None:
                self.pair.setdefault(i, j)

    def tree(self, one: Any, two: Any) -> Any:
        """Two trees of arguments as one."""
        a, b = leaves(one), leaves(two)
        if len(a) != len(b):
            raise Mismatch("the arguments of an operation differ")
        joined = iter([self.leaf(x, y) for x, y in zip(a, b, strict=True)])
        return map_tree(one, lambda _: next(joined))

    def leaf(self, a: Any, b: Any) -> Any:
        """A leaf of the first recording and the same one of the second, as one."""
        if isinstance(a, Ref) and isinstance(b, Ref):
            if self.pair.get(a.index) != b.index:
                raise Mismatch("operations read different values")
            return a
        if type(a) is type(b) is int:
            return self.size(a, b)
        if isinstance(a, torch.dtype) and a != b:
            return STREAM
        if isinstance(a, float) and isinstance(b, float) and a != b:
            for name in ("min", "max", "eps", "tiny"):
                low, high = (getattr(torch.finfo(d), name) for d in self.from_pair.dtypes)
                if (abs(a), abs(b)) == (abs(low), abs(high)):
                    return Limit(name, a / low)
            if math.isclose(a, b, rel_tol=1e-6):  # read from a buffer: the one with more digits
                one, two = self.from_pair.dtypes
                return a if one.itemsize > two.itemsize else b
            if not (a != a and b != b):
                raise Mismatch(f"a number is {a} and then {b}")
            return a
        if type(a) is not type(b) or (isinstance(a, (int, str, bool)) and a != b):
            raise Mismatch(f"an argument is {a!r} and then {b!r}")
        return a

    def size(self, a: int, b: int) -> int | Size:
        if a == b:
            return a
        for names in self.products:
            p, q = 1, 1
            for name in names:
                p, q = p * self.sizes[name], q * self.other[name]
            if a % p == 0 and b % q == 0 and a // p == b // q:
                return Size(a // p, names)
        for name in self.sizes:
            if a - self.sizes[name] == b - self.other[name]:
                return Size(1, (name,), a - self.sizes[name])
        raise Mismatch(f"a number is {a} and then {b}, which no size of the call explains")


def _kind(part: Op | Span) -> tuple[str, str]:
    return ("module", part.path) if isinstance(part, Span) else ("op", part.name)


def _activation(name: str) -> Callable[..., Tensor]:
    return lambda x: ACTIVATIONS[name].fwd(x)


def norm_of(spec: NormSpec) -> Callable[..., Tensor]:
    """The norm of a submodule, of its input and its parameters."""

    def run(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if spec.kind == "layer_norm":
            y = F.layer_norm(wide, x.shape[-1:], None, None, spec.eps)
        else:
            y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + spec.eps)
        if weight is not None:
            y = y * (weight.to(wide.dtype) + spec.offset)
        y = y if bias is None else y + bias
        return y.to(x.dtype)

    return run
