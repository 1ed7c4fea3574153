"""Recordings of a forward: PyTorch's functions, in-place operations and submodule calls."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fused_remat.layers.eligibility import parameters_of
from fused_remat.layers.fallback import generator_states, next_node
from fused_remat.tracing.isolation import (
    attention_without_dropout,
    in_float64,
    is_dropout,
    multi_head_attention,
    product_of,
    sum_with_product,
    tensors_of,
)
from fused_remat.tracing.sizes import Number, Real, Size, Sizes, Space, plain
from fused_remat.tracing.values import (
    ADD,
    MOVES,
    MULTIPLY,
    SHAPES,
    Op,
    Ref,
    Sample,
    Span,
    leaves,
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
SWITCHES = "it switches autocast"
#: Operations for which autocast makes no difference.
_SAME_IN_AUTOCAST = MOVES | ADD | MULTIPLY | {"sub", "subtract", "rsub", "neg", "cos", "sin"}


class Recorder(TorchFunctionMode):
    """A mode that records the operations of a layer while it is active."""

    def __init__(self, layer: nn.Module, sample: Sample, autocast: bool) -> None:
        super().__init__()
        self.layer, self.sample = layer, sample
        self.autocast = autocast  # whether it seems on, so that code that tests for it is noticed
        arguments = leaves(sample.arguments)
        self.device = next(leaf.device for leaf in arguments if isinstance(leaf, Tensor))
        self.start = next_node()
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
        self.uncast: list[Span] = []  # the calls that have switched autocast off
        #: Formulas of sizes, if they are looked for; by number, tensors on "meta" at other sizes.
        self.space = Space([sample.sizes, *sample.others]) if sample.others else None
        self.metas: dict[int, list[Tensor]] = {}
        self.paths = {module: name for name, module in layer.named_modules()}
        for name, tensor in tensors_of(layer, sample.named).items():
            number = self.new(tensor)
            self.sources[number], self.roots[number] = name, frozenset((name,))
            self.metas[number] = [torch.empty_like(tensor, device="meta")] * len(sample.others)
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
            shapes = [
                [n.of(sizes) if isinstance(n, Size) else n for n in sample.shapes[i]]
                for sizes in sample.others
            ]
            self.metas[number] = [leaf.new_empty(shape, device="meta") for shape in shapes]
            if i != sample.bounds:
                self.roots[number] = frozenset(("argument",))
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

    def trouble(self, reason: str, span: Span | None = None) -> None:
        """Note why a call, that of the innermost submodule by default, cannot be traced."""
        span = span or self.stack[-1]
        span.trouble = span.trouble or reason

    def encoded(self, tree: Any) -> Any:
        def leaf(a: Any) -> Any:
            if isinstance(a, Tensor):
                return Ref(self.number(a))
            return a.size if isinstance(a, Number | Real) else a

        return map_tree(tree, leaf)

    def shape(self, number: int) -> list[Any] | None:
        """Return the sizes of a value, with a `Size` where one follows from the call's; or None."""
        shapes = [t.shape for t in (self.values[number], *self.metas.get(number, ()))]
        if self.space is None or len(shapes) == 1 or len({*map(len, shapes)}) > 1:
            return None
        return [self.space.size(at) for at in zip(*shapes, strict=True)]

    def _sizes(self, func: Any, args: Any) -> Any:
        """Return the result of a function that reads a tensor's shape, with known formulas."""
        number, result = self.numbers.get(id(args[0]), -1), func(*args)
        metas = self.metas.get(number)
        if self.space is None or not metas:
            return result
        pairs = zip(*map(leaves, (result, *[func(t, *args[1:]) for t in metas])), strict=True)
        numbers = [self.space.number(at) for at in pairs]
        return torch.Size(numbers) if isinstance(result, torch.Size) else numbers[0]

    def _run_on_meta(self, op: Op) -> None:
        """Note an operation's results at other sizes, if all that it reads is known there."""
        space = self.space
        if space is None or not all(n in self.metas for n in op.reads):
            return
        found: list[list[Tensor]] = [[] for _ in op.outs]
        for i, sizes in enumerate(space.choices[1:]):

            def value(leaf: Any, i: int = i, sizes: Sizes = sizes) -> Any:
                if isinstance(leaf, Ref):
                    return self.metas[leaf.index][i]
                if isinstance(leaf, torch.device):
                    return torch.device("meta")
                return leaf.of(sizes) if isinstance(leaf, Size) else leaf

            args, kwargs = map_tree((op.args, op.kwargs), value)
            try:
                with torch.device("meta"), torch.no_grad():
                    results = leaves(op.run(*args, **kwargs))
            except Exception:  # no meta kernel, or sizes that the operation refuses
                space.lost = space.lost or op.name
                return
            if len(results) != len(op.outs):
                self.trouble(f"the size decides how many results {op.name} has")
                return
            for metas, t in zip(found, results, strict=False):
                metas.append(t)
        for number, metas in zip(op.outs, found, strict=True):
            if number is not None and len(metas) == len(space.choices) - 1:
                self.metas[number] = [t.to("meta") for t in metas]

    def add(
        self, name: str, run: Callable[..., Any], args: Any, kwargs: Any, result: Any, **more: Any
    ) -> None:
        op = Op(name, run, args, kwargs, [], self.stack[-1].path, **more)
        if self.uncast and op.kind not in _SAME_IN_AUTOCAST:
            self.trouble(SWITCHES, self.uncast[0])
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
        self._run_on_meta(op)

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
        if name in _SETTERS:
            return func(*args, **kwargs)
        if func in _SHAPES and not kwargs:
            return self._sizes(func, args)
        if is_dropout(func):
            return self._dropout(func, *args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention(*args, **kwargs)
        if name == "baddbmm" and kwargs.get("out") is None:
            with self:
                return sum_with_product(*args, **kwargs)
        if name == "einsum" and (product := product_of(*args)) is not None:
            with self:
                return product()
        func = in_float64(func)
        if func is torch._native_multi_head_attention:
            self.trouble("it runs a fused kernel for inference")
        if name in _READS and args and isinstance(args[0], Tensor):
            self._read(name.strip("_"), self.number(args[0]))
        if name == "register_hook":
            self.trouble("it registers a hook on a tensor")
        if kwargs.get("inplace"):
            kwargs = {**kwargs, "inplace": False}
        if name == "type_as":
            func, name, args = torch.Tensor.to, "to", (args[0], args[1].dtype)
        if kwargs.get("out") is not None:
            self.trouble("it writes to a tensor that is passed as `out`")
        encoded, before = (self.encoded(args), self.encoded(kwargs)), generator_states(self.device)
        if self.space is not None:
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
        if self.uncast:  # outside of which it would run again
            span.fixed = SWITCHES
            if function is None:
                self.trouble(SWITCHES, self.uncast[0])
        versions = [(t, t._version) for t in leaves((args, kwargs)) if isinstance(t, Tensor)]
        self.stack[-1].inner.append(span)
        self.stack.append(span)
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
        return result


def hollow(t: Tensor) -> Tensor:
    """Return a tensor of the same shape and dtype that takes no memory."""
    return t.detach().new_zeros(()).expand(t.shape)


def _has_own_backward(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunction():  # which would record this
        return isinstance(tensor.grad_fn, torch.autograd.function.BackwardCFunction)


def _pointer(t: Tensor) -> int:
    return t.untyped_storage().data_ptr()


def _view(steps: list[Any], base: Tensor, arguments: list[Any]) -> Tensor:
    for (func, index), (args, kwargs) in zip(steps, arguments, strict=True):
        base = leaves(func(base, *args, **kwargs))[index]
    return base
