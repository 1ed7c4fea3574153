"""Records one forward of a layer as operations on numbered values."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fused_remat.layers.eligibility import parameters_of
from fused_remat.layers.fallback import generator_states
from fused_remat.tracing.apart import forward_only, run_with, unchanged
from fused_remat.tracing.state import shared_by
from fused_remat.tracing.values import (
    SHAPES,
    Op,
    Ref,
    Span,
    Unkept,
    Unreadable,
    attributes,
    leaves,
    map_tree,
    refs,
)

_READS = (
    "__bool__", "item", "tolist", "__int__", "__float__", "__index__", "nonzero", "__contains__",
    "numpy", "__array__", "unique", "masked_select", "argwhere", "bincount", "equal", "allclose",
    "is_nonzero",
)  # fmt: skip
_IN_PLACE = (
    "__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__iand__", "__ior__",
)  # fmt: skip
#: A result with more elements is not held, unless an operation on activations reads it.
_SMALL = 1 << 12
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
) -> tuple[Tensor, Tensor | None]:
    """`F.multi_head_attention_forward` in linear layers, one attention, and weights beside it."""
    if not (bias_k is bias_v is static_k is static_v is None) or add_zero_attn:
        raise Unreadable("nn.MultiheadAttention with bias_k, add_zero_attn or static keys")
    batch, width = query.shape[1], embed_dim // num_heads
    if query is key is value and not use_separate_proj_weight and weight is not None:
        made: Any = F.linear(query, weight, bias).chunk(3, -1)
    else:
        weights: Any = (q_proj_weight, k_proj_weight, v_proj_weight)
        if not use_separate_proj_weight and weight is not None:
            weights = weight.chunk(3)
        biases: Any = (None, None, None) if bias is None else bias.chunk(3)
        made = map(F.linear, (query, key, value), weights, biases)
    heads = [x.reshape(-1, batch, num_heads, width).permute(1, 2, 0, 3) for x in made]
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
    y = F.linear(out, out_weight, out_bias)
    if not need_weights:
        return y, None
    scores = q @ k.transpose(-1, -2) * width**-0.5
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, -torch.inf)
    weights = (scores if attn_mask is None else scores + attn_mask).softmax(-1)
    return y, weights.mean(1) if average_attn_weights else weights


class Recorder(TorchFunctionMode):
    """Records while it is active; `named` are the layer's parameters and buffers."""

    def __init__(self, layer: nn.Module, named: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.layer, self.device = layer, device
        self.autocast = False
        made = torch.zeros((), requires_grad=True).clone().grad_fn
        self.start = made._sequence_nr() if made is not None else 0
        self.foreign = ""  # why not even a piece may hold a tensor that it reads
        #: By number. Results that depend on activations, and large ones, are hollow.
        self.values: list[Tensor] = []
        self.numbers: dict[int, int] = {}  # by the tensor's id: its present value
        self.results: dict[int, weakref.ref[Tensor]] = {}  # those that are hollow, by number
        self.sources: dict[int, str] = {}  # parameters, buffers and attributes, by number
        self.live: set[int] = set()
        #: What a value is made of: names of the layer's tensors, "argument" and "random".
        self.roots: dict[int, frozenset[str]] = {}
        self.owned: set[int] = set()  # results of submodules that run an autograd.Function
        self.fixed: set[str] = set()  # buffers and attributes whose values decide what it runs
        self.params = {*parameters_of(layer)}
        #: By a view's id: its base, and the steps from there.
        self.views: dict[int, tuple[Tensor, list[Any]]] = {}
        self.root = Span("")
        self.stack = [self.root]
        self.paths = {module: name for name, module in layer.named_modules()}
        for name, tensor in named.items():
            self.source(tensor, name)
        for path, module in layer.named_modules():
            for name, value in vars(module).items():
                name = f"{path}.{name}" if path else name
                if isinstance(value, Tensor) and not (name in named or id(value) in self.numbers):
                    self.source(value, name)
        #: The storages of the layer's tensors.
        strided = [t for t in self.values if t.layout is torch.strided]
        self.memory = {t.untyped_storage().data_ptr() for t in strided}

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
            made = "it computes with a tensor that was made outside of PyTorch's functions"
            held = "it reads a tensor that is no parameter, buffer, attribute or argument"
            self.trouble(made if tensor.requires_grad else held)
            self.foreign = self.foreign or (held if self._is_older(tensor) else "")
            found = self.new(tensor)
            if tensor.requires_grad:
                self.live.add(found)
        elif found < 0:
            self.trouble("it changes a tensor in place through one of several views")
            found = self.new(tensor)
            self.live.add(found)
        return found

    def _is_older(self, tensor: Tensor) -> bool:
        """Whether a tensor was made before the recording, not by a function in it."""
        with torch._C.DisableTorchFunction():
            made = tensor.grad_fn
        return made is None or made._sequence_nr() < self.start

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
            if number is not None and (is_live or self._is_large(leaf)):
                self.values[number] = hollow(leaf)
                forget = functools.partial(self._forget, id(leaf))
                self.results[number] = weakref.ref(leaf, forget)
        for n in self.results.keys() & read if is_live else ():  # the reader looks at its numbers
            made = None if n in self.live else self.results[n]()
            self.values[n] = self.values[n] if made is None else made
        self.stack[-1].inner.append(op)

    def _is_large(self, t: Tensor) -> bool:
        """Whether a value takes memory of its own, as the matrices that DoRA computes do."""
        return t.numel() > _SMALL and t.untyped_storage().data_ptr() not in self.memory

    def _forget(self, key: int, _: weakref.ref[Tensor]) -> None:
        """Forget a tensor that is freed, since a new one may get its id."""
        self.numbers.pop(key, None)
        self.views.pop(key, None)
        self.owned.discard(key)

    def _tensors(self) -> list[Tensor]:
        """Return the tensors among the values, and the results that are still in use."""
        found = [ref() for ref in self.results.values()]
        return [*self.values, *(t for t in found if t is not None)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _SETTERS:
            return func(*args, **kwargs)
        if _is_dropout(func):
            return self._dropout(func, *args, **kwargs)
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
        self,
        func: Any,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        **_: Any,
    ) -> Tensor:
        args = self.encoded((input,))
        out = input.view_as(input)
        self._note_views(torch.Tensor.view_as, (input,), (*args, *args), {}, out)
        self.add("dropout", lambda x: x, args, {}, out, p=float(p) if training else 0.0)
        if inplace or func is torch.dropout_:
            pointer = out.untyped_storage().data_ptr()
            for t in self._tensors():
                if t is not out and t.untyped_storage().data_ptr() == pointer:
                    self.numbers[id(t)] = -1  # another view of the elements that are dropped
            self.numbers[id(input)] = self.numbers[id(out)]
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
        for t in {id(t): t for t in self._tensors()}.values():
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
def _recording(recorder: Recorder) -> Iterator[None]:
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
            recorder.results.clear()  # whose callbacks hold the recorder
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


def record(
    layer: nn.Module,
    forward: Callable[..., Any],
    named: Mapping[str, Tensor],
    given: Mapping[str, Any],
    active: list[bool],
    bounds: int | None,
    autocast: bool,
) -> tuple[Recorder, list[int | None], Any]:
    """One recording: the recorder, the numbers of the arguments, and the result."""
    device = next(leaf.device for leaf in leaves(given) if isinstance(leaf, Tensor))
    recorder = Recorder(layer, named, device)
    recorder.autocast = autocast
    numbers: list[int | None] = []
    for i, (leaf, is_active) in enumerate(zip(leaves(given), active, strict=True)):
        number = recorder.numbers.get(id(leaf)) if isinstance(leaf, Tensor) else None
        if number is None and isinstance(leaf, Tensor):
            number = recorder.new(leaf)
        numbers.append(number)
        if number is not None and i != bounds:
            recorder.roots[number] = frozenset(("argument",))
        if number is not None and is_active:
            recorder.live.add(number)

    def watched(**given: Any) -> Any:
        tensors = {name: recorder.values[i] for i, name in recorder.sources.items()}
        with unchanged([*map(vars, layer.modules()), given], shared_by(layer), tensors):
            return forward(**given)

    with _recording(recorder), forward_only():
        result = run_with(layer, watched, named, given)
    if recorder.foreign:
        raise Unreadable(recorder.foreign)
    if type(map_tree(result, lambda leaf: leaf)) is not type(result):
        raise Unreadable(f"it returns {type(result).__name__}")
    known = {id(leaf) for leaf in leaves(given)}
    result = map_tree(result, lambda leaf: leaf if id(leaf) in known else _as_result(leaf))
    encoded = recorder.encoded(result)
    for number in recorder.live:
        recorder.values[number] = hollow(recorder.values[number])
    recorder.views.clear()
    return recorder, numbers, encoded


def hollow(t: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that takes no memory."""
    return t.detach().new_zeros(()).expand(t.shape)


def _as_result(leaf: Any) -> Any:
    """A leaf of a result; of an object, what a block can make of it."""
    own = {} if isinstance(leaf, (Tensor, nn.Module, type)) or callable(leaf) else attributes(leaf)
    if not own:
        return leaf
    numbers = {n: v for n, v in own.items() if isinstance(v, (int, float, str, type(None)))}
    return Unkept(type(leaf), tuple(numbers.items()), tuple([n for n in own if n not in numbers]))
