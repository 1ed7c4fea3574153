"""Recordings of a forward: PyTorch's functions, in-place operations and submodule calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fused_remat.layers.eligibility import parameters_of
from fused_remat.layers.fallback import generator_states, next_node
from fused_remat.tracing.isolation import (
    attention_without_dropout,
    in_float64,
    is_dropout,
    multi_head_attention,
    replica,
    sum_with_product,
    tensors_of,
)
from fused_remat.tracing.metas import Metas
from fused_remat.tracing.sizes import Number, Real, Size, Space, plain, shape_at
from fused_remat.tracing.values import (
    EXACT,
    SHAPES,
    STREAM,
    Op,
    Ref,
    Sample,
    Span,
    Untraceable,
    leaves,
    limit,
    map_tree,
    refs,
)

#: Functions that read a tensor's values in Python.
_READS = (
    "__bool__", "item", "tolist", "__int__", "__float__", "__index__", "nonzero", "__contains__",
    "numpy", "__array__", "unique", "masked_select", "argwhere", "bincount", "equal", "allclose",
    "is_nonzero",
)  # fmt: skip
_IN_PLACE = (
    "__setitem__", "__iadd__", "__imul__", "__isub__", "__itruediv__", "__iand__", "__ior__",
)  # fmt: skip
_SHAPES = (Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement)  # type: ignore[attr-defined]
_SETTERS = ("__set__", "requires_grad_", "retain_grad", "backward", "__delete__")
#: Results with more elements are not held, unless an operation on activations reads them.
_SMALL = 1 << 12
_OWN_BACKWARD = "it runs an autograd.Function, whose backward is its own"


class Recorder(TorchFunctionMode):
    """A mode that records the operations of a layer while it is active."""

    def __init__(self, layer: nn.Module, sample: Sample) -> None:
        super().__init__()
        self.layer, self.sample = layer, sample
        arguments = leaves(sample.arguments)
        self.device = next(leaf.device for leaf in arguments if isinstance(leaf, Tensor))
        self.start, self.is_paused = next_node(), False
        self.foreign = ""  # why not even a replayed submodule may hold a tensor that is read
        self.values: list[Tensor] = []  # hollow if they depend on activations or are large
        self.numbers: dict[int, int] = {}  # by id; -1 if the tensor's present value is unknown
        self.results: dict[int, weakref.ref[Tensor]] = {}  # hollow ones that are still in use
        self.sources: dict[int, str] = {}  # names of the layer's tensors
        self.live: set[int] = set()  # values that depend on activations
        #: Names of the layer's tensors, "argument" and "random", from which a value is computed.
        self.roots: dict[int, frozenset[str]] = {}
        self.owned: set[int] = set()  # ids of results of submodules that run an autograd.Function
        self.fixed: set[str] = set()  # tensors whose values decide which operations run
        self.params = {*parameters_of(layer)}
        #: By id of a view, its base, the steps to it, and the arguments of these.
        self.views: dict[int, tuple[Tensor, list[Any], list[Any]]] = {}
        self.root = Span("")
        self.stack = [self.root]
        self.space = Space([sample.sizes, *sample.others])
        self.metas = Metas(self.space, self.device)
        self.paths = {module: name for name, module in layer.named_modules()}
        for name, tensor in tensors_of(layer, sample.named).items():
            number = self.new(tensor)
            self.sources[number], self.roots[number] = name, frozenset((name,))
            self.metas.known[number] = [tensor.to("meta")] * len(sample.others)
        strided = [t for t in self.values if t.layout is torch.strided]
        self.memory = set(map(_pointer, strided))
        self.result: Any = None  # of the layer, with `Ref`s
        self.inputs: list[int | None] = []  # numbers of the arguments by leaf
        for i, (leaf, is_active) in enumerate(zip(arguments, sample.active, strict=True)):
            if not isinstance(leaf, Tensor):
                self.inputs.append(None)
                continue
            number = self.numbers[id(leaf)] if id(leaf) in self.numbers else self.new(leaf)
            self.inputs.append(number)
            if i == sample.bounds:  # of one sequence, whose length may be read
                ends = [[0, sizes["S"]] for sizes in sample.others]
                self.metas.known[number] = [torch.tensor(end, dtype=leaf.dtype) for end in ends]
            else:
                self.roots[number] = frozenset(("argument",))
                self.metas.known[number] = [
                    leaf.new_empty(shape_at(sample.shapes[i], sizes), device="meta")
                    for sizes in sample.others
                ]
            if is_active:
                self.live.add(number)

    def new(self, tensor: Tensor) -> int:
        self.numbers[id(tensor)] = len(self.values)
        self.values.append(tensor)  # which keeps the id
        return len(self.values) - 1

    def number(self, tensor: Tensor) -> int:
        number = self.numbers.get(id(tensor))
        if _has_own_backward(tensor) and id(tensor) not in self.owned:
            self.trouble(_OWN_BACKWARD)
        if number is None:
            computed = "it computes with a tensor that was created outside of PyTorch's functions"
            held = "it reads a tensor that is no parameter, buffer, attribute or argument"
            self.trouble(computed if tensor.requires_grad else held)
            with torch._C.DisableTorchFunction():
                node = tensor.grad_fn
            is_older = node is None or node._sequence_nr() < self.start  # than the recording
            self.foreign = self.foreign or (held if is_older else "")
            number = self.new(tensor)
            if tensor.requires_grad:
                self.live.add(number)
        elif number < 0:
            self.trouble("it changes a tensor in place through one of several views")
            number = self.new(tensor)
            self.live.add(number)
        return number

    def trouble(self, reason: str) -> None:
        """Note why the innermost submodule cannot be traced."""
        self.stack[-1].trouble = self.stack[-1].trouble or reason

    def encoded(self, tree: Any) -> Any:
        def leaf(a: Any) -> Any:
            if isinstance(a, Tensor):
                return Ref(self.number(a))
            if isinstance(a, Number | Real):
                return a.size
            return STREAM if a is EXACT else limit(a) if type(a) is float else a

        return map_tree(tree, leaf)

    def add(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, result: Any, **more: Any
    ) -> None:
        op = Op(name, run, args, kwargs, [], self.stack[-1].path, **more)
        read = refs((args, kwargs))
        is_live = name not in SHAPES and not self.live.isdisjoint(read)
        roots = frozenset[str]().union(*[self.roots.get(n, frozenset()) for n in read])
        roots |= {"random"} if op.random else set()
        for span in self.stack if op.random or op.p else ():
            span.random = True
        for leaf in leaves(result):
            number = self.new(leaf) if isinstance(leaf, Tensor) else None
            op.outs.append(number)
            if number is None:
                continue
            self.roots[number] = roots
            if is_live:
                self.live.add(number)
            is_large = leaf.numel() > _SMALL and _pointer(leaf) not in self.memory  # as DoRA's
            if is_live or is_large:
                self.values[number] = hollow(leaf)
                forget = functools.partial(self._forget, id(leaf))
                self.results[number] = weakref.ref(leaf, forget)
        for n in self.results.keys() & read if is_live else ():  # the tracer looks at its values
            tensor = None if n in self.live else self.results[n]()
            self.values[n] = self.values[n] if tensor is None else tensor
        self.stack[-1].inner.append(op)
        if matter := self.metas.run(op):
            self.trouble(matter)

    def _forget(self, key: int, _: weakref.ref[Tensor]) -> None:
        """Forget a tensor that is freed, since a new one may get its id."""
        self.numbers.pop(key, None)
        self.views.pop(key, None)
        self.owned.discard(key)

    def _sharing(self, tensor: Tensor) -> list[Tensor]:
        """Return the known tensors that share memory with another one."""
        held = [ref() for ref in self.results.values()]
        known = {id(t): t for t in [*self.values, *held] if t is not None}
        strided = [t for t in known.values() if t.layout is torch.strided]
        return [t for t in strided if _pointer(t) == _pointer(tensor)]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name in _SETTERS or self.is_paused:
            return func(*args, **kwargs)
        if func in _SHAPES and not kwargs:
            return self.metas.read(func, self.numbers.get(id(args[0]), -1), args)
        if is_dropout(func):
            return self._dropout(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention(*args, **kwargs)
        if name == "baddbmm" and kwargs.get("out") is None:
            with self:
                return sum_with_product(*args, **kwargs)
        func = in_float64(func)
        if func is torch._native_multi_head_attention:
            self.trouble("it runs a fused kernel for inference")
        if name in _READS and args and isinstance(args[0], Tensor):
            self._read(name.strip("_"), self.number(args[0]))
            if name in ("item", "tolist"):
                return self.metas.read(func, self.numbers.get(id(args[0]), -1), args)
        if name == "register_hook":
            self.trouble("it registers a hook on a tensor")
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        if name == "type_as" and self.number(args[0]) not in self.live:
            func, name, args = torch.Tensor.to, "to", (args[0], args[1].dtype)
        if kwargs.get("out") is not None:
            self.trouble("it writes to a tensor that is passed as `out`")
        encoded, before = (self.encoded(args), self.encoded(kwargs)), generator_states(self.device)
        args, kwargs = map_tree((args, kwargs), plain)
        if func is F.scaled_dot_product_attention:
            result = attention_without_dropout(*args, **kwargs)
            draws = bool(kwargs.get("dropout_p", [*args[4:], 0.0][0]))
        else:
            result = func(*args, **kwargs)
            pairs = zip(before, generator_states(self.device), strict=True)
            draws = not all(torch.equal(a, b) for a, b in pairs)
        is_in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
        if is_in_place and args and isinstance(args[0], Tensor):
            self._change(name, func, args[0], *encoded, draws)
            return result
        if isinstance(result, Tensor) and any(a is result for a in leaves((args, kwargs))):
            result = result.view_as(result)
        if any(isinstance(t, Tensor) for t in leaves(result)):
            self._note_views(func, args, *encoded, result)
            self.add(name, func, *encoded, result, random=draws)
        return result

    def _read(self, name: str, number: int) -> None:
        """Note that values decide what the layer runs; those of its own tensors may do so."""
        roots = self.roots.get(number, frozenset())
        owner = (
            "an activation" if number in self.live
            else "a random number" if "random" in roots
            else "an argument" if "argument" in roots
            else "a parameter" if not roots.isdisjoint(self.params)
            else ""
        )  # fmt: skip
        if owner:
            self.trouble(f"it reads values of {owner} ({name})")
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
            for t in self._sharing(out):
                if t is not out:
                    self.numbers[id(t)] = -1  # another view of the elements that are dropped
            self.numbers[id(input)] = self.numbers[id(out)]
        return out

    def _note_views(self, func: Any, args: Any, encoded: Any, kwargs: Any, result: Any) -> None:
        """Remember which results are views of the first argument."""
        first = args[0] if args and isinstance(args[0], Tensor) else None
        if first is None or not first.numel():
            return
        base, steps, more = self.views.get(id(first), (first, [], []))
        for i, leaf in enumerate(leaves(result)):
            if isinstance(leaf, Tensor) and _pointer(leaf) == _pointer(first):
                self.views[id(leaf)] = base, [*steps, (func, i)], [*more, (encoded[1:], kwargs)]

    def _change(
        self, name: str, func: Any, changed: Tensor, args: Any, kwargs: Any, draws: bool
    ) -> None:
        """Record an in-place operation: new values of a tensor, its base and all other views."""
        base, steps, more = self.views.get(id(changed), (changed, [], []))

        def changes(target: Tensor, view_args: Any, rest: Any, named: Any) -> Tensor:
            result = target.clone()
            func(_view(steps, result, view_args), *rest, **named)
            return result

        encoded = Ref(self.number(base)), more, args[1:], kwargs
        self.add(name, changes, encoded, {}, base, random=draws)
        for t in self._sharing(base):
            view_base, view_steps, view_args = self.views.get(id(t), (None, [], []))
            if view_base is base:
                run = functools.partial(_view, view_steps)
                self.add("view", run, (Ref(self.numbers[id(base)]), view_args), {}, t)
            elif t is not base and t.numel():
                self.numbers[id(t)] = -1  # a view of unknown origin

    def call(self, path: str, run: Any, args: Any, kwargs: Any, function: Any = None) -> Any:
        """Run a submodule, or a function of the submodule that runs now, and note the call."""
        span = Span(path, self.encoded(args), self.encoded(kwargs), function=function)
        versions = [(t, t._version) for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.stack[-1].inner.append(span)
        self.stack.append(span)
        counts, lost = self.space.counts, self.space.lost
        known = len(counts)
        try:
            result = run(*args, **kwargs)
        finally:
            self.stack.pop()
        if any(t._version != version for t, version in versions):
            span.fixed = f"{path} changes its arguments in place"
            if function is None:
                self.trouble(span.fixed)
        for t in leaves(result):
            number = self.numbers.get(id(t), -1) if isinstance(t, Tensor) else -1
            span.outs.append(number if number >= 0 else None)
            if isinstance(t, Tensor) and _has_own_backward(t):
                span.trouble = span.trouble or _OWN_BACKWARD
                self.owned.add(id(t))  # the trouble is the submodule's, not its readers'
        if loops := counts[known:]:
            span.trouble = span.trouble or "its operations depend on the size"
            self.space.lost = lost  # where the loop has other numbers of steps
        if loops or not self.metas.known.keys() >= {n for n in span.outs if n is not None}:
            self._run_again(span, loops)
        if not self.space.lost:
            del counts[known:]
        return result

    def _run_again(self, span: Span, loops: list[Size]) -> None:
        run, args, kwargs = span.function, span.args, span.kwargs
        self.is_paused = True
        try:
            if run is None:
                run = functools.partial(call_replica, self.layer.get_submodule(span.path))
                args, kwargs = (self.tensors_of(span.path), args, kwargs), {}
            op = Op(span.label, run, args, kwargs, span.outs, span.path)
            self.metas.run_again(op, loops)
        except Untraceable as reason:
            self.space.lost = str(reason)
        finally:
            self.is_paused = False

    def tensors_of(self, path: str) -> dict[str, Ref]:
        """Return the parameters and buffers of a submodule by name."""
        prefix, module, tensors = f"{path}.", self.layer.get_submodule(path), dict[str, Ref]()
        held = {*parameters_of(module), *[n for n, _ in module.named_buffers()]}
        for i, name in self.sources.items():
            own = name.removeprefix(prefix)
            if own != name and own in held:
                tensors[own] = Ref(i)
            elif own != name and self.values[i].requires_grad:
                raise Untraceable(f"{path} has a tensor with a gradient that is no parameter")
        return tensors


def hollow(t: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that takes no memory."""
    return t.detach().new_zeros(()).expand(t.shape)


def _has_own_backward(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # which would record this
        return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)


def _pointer(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def call_replica(module: nn.Module, *arguments: Any) -> Any:
    """Run a submodule with tensors that replace its own, of the first argument."""
    return functional_call(replica(module), *arguments)


def _view(steps: list[Any], base: Tensor, arguments: list[Any]) -> Tensor:
    for (func, index), (args, kwargs) in zip(steps, arguments, strict=True):
        base = leaves(func(base, *args, **kwargs))[index]
    return base
