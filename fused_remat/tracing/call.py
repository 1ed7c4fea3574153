"""A call of a layer as the block that was read from it, and the reading of its first call."""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.autograd import run_block
from fused_remat.execution.prepare import pieces_of
from fused_remat.graph.graph import Graph
from fused_remat.layers.fallback import generator_states, set_generator_states
from fused_remat.steps.replay import At
from fused_remat.tracing.again import Again, modules_of, precision_of
from fused_remat.tracing.apart import renumbered, replica
from fused_remat.tracing.join import Pair
from fused_remat.tracing.program import Opaque, Program, given_to, run_op
from fused_remat.tracing.prove import difference
from fused_remat.tracing.read import Reader
from fused_remat.tracing.reading import Reading
from fused_remat.tracing.record import without_dropout
from fused_remat.tracing.samples import INDICES, Arguments, constants, leaf_of, vary
from fused_remat.tracing.values import (
    SHIFT,
    STREAM,
    SideEffect,
    Size,
    Unreadable,
    leaves,
    map_tree,
)

#: Sizes of the two recordings and of the two proofs, of different remainders by small numbers.
_SIZES = ({"B": 3, "S": 7, "M": 5}, {"B": 2, "S": 10, "M": 12})
_PROOFS = ({"B": 3, "S": 13, "M": 6}, {"B": 2, "S": 17, "M": 9})
#: The sizes of the two proofs of a layer that is traced at the call's own length.
_LONG_PROOFS = ({"B": 2}, {"B": 2})
#: The dtypes of the first recording and of the proofs, of the second recording, and of its
#: parameters. The last two are for layers that ATen cannot run in float64 (experts as one grouped
#: product), and for those that convert some parameters themselves.
_DTYPES = (
    (torch.float64, torch.float32, torch.float32),
    (torch.float32, torch.bfloat16, torch.bfloat16),
    (torch.float32, torch.bfloat16, torch.float32),
)
#: Tokens of a piece in the proofs, at most a sequence, so that groups and tiles are proved too.
_PIECE = 12
_MOST_PIECES = 24
#: Values that are no activations and have as many elements are made again in backward.
_LARGE = 1 << 9
#: How the reason begins of a layer that raises at the sizes of the recordings.
CANNOT_RUN = "its forward cannot run at another"


class Known:
    """A reading, and how a call runs it."""

    def __init__(self, reading: Reading, call: Arguments, narrow: bool) -> None:
        self.reading, self.places = reading, call.places
        #: Whether the layer computes in float32 where its input is in float64.
        self.narrow = narrow
        #: Names of the layer's tensors, and leaves of the arguments, of other values than whose the
        #: layer is another block.
        self.fixed: set[str | int] = {*reading.fixed}
        self.names, self.axes = tuple(call.sizes), call.axes
        #: What the dimensions of the arguments are (`Arguments.dims`).
        self.dims = call.dims
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        #: The same without dropout; and without dtypes of adapters' own, too.
        self.plain = self.proved = self

    @property
    def graph(self) -> Graph:
        """The block."""
        return self.reading.graph

    def bind(
        self,
        layer: nn.Module,
        named: Mapping[str, Tensor] | None,
        given: Mapping[str, Any],
        random: bool = True,
    ) -> tuple[dict[str, Tensor | None], dict[str, Callable[..., Tensor]], Callable[[Tensor], Any]]:
        """The block's tensors and functions, and what makes the layer's result of the block's.

        `named`: the layer's parameters and buffers, None for its own. Not `random`: dropout of any
        probability does nothing.

        Raises: Unreadable if the block would be wrong for these arguments.
        """
        reading, found = self.reading, leaves(given)
        values: dict[int, Any] = {}
        number: int | None
        for number, name in reading.sources.items():
            own = None if named is None else named.get(name)
            values[number] = attribute(layer, name) if own is None else own
        for number, leaf in zip(reading.given, found, strict=True):
            if number is not None:
                values[number] = leaf
        sizes = self.sizes(found)
        x = found[self.places[0]]
        for number, (shape, dtype) in reading.stand_ins.items():
            size = [n.of(sizes) if isinstance(n, Size) else n for n in shape]
            like = x.dtype if dtype is STREAM else dtype
            values[number] = torch.zeros((), dtype=like, device=x.device).expand(size)
        roots, tensors = {**values}, dict[str, Tensor | None]()
        plan = reading.plan(frozenset(n for n, t in roots.items() if _needs_grad(t)), _LARGE)
        if plan.outs:
            again = Again(plan.again, plan.outs, roots, layer, sizes, x)
            values.update(zip(plan.outs, again.attached(), strict=True))
        for op, unread in zip(plan.rest, plan.unread, strict=True):
            run_op(op, values, layer.get_submodule, sizes, x.dtype)
            for number in unread:
                del values[number]
        self._check_masks(values, found)
        for name, (number, layout) in reading.inputs.items():
            value = values[number]
            if value.dim() != 3 or layout.tokens != (0, 1):
                batch = sizes.get("B", 1)
                value = layout.matrix(value, sizes).view(batch, -1, layout.width)
            tensors[name] = value
        for name, number in reading.values.items():
            value = values[number]
            tensors[name] = value.t() if name in reading.transposed else value
        functions: dict[str, Callable[..., Tensor]] = {
            name: _Run(program, layer, sizes, x, random).run
            for name, program in reading.programs.items()
        }
        for name, number in reading.values.items():
            value, ops = values[number], reading.chain(number)
            free = number in plan.outs or not value.requires_grad
            if ops and value.numel() >= _LARGE and free:
                again = Again(ops, (number,), roots, layer, sizes, x)
                if not again.shares(value):
                    flipped = name in reading.transposed
                    functions[name] = functools.partial(again.run_again, flipped)

        def result(out: Tensor) -> Any:
            number, layout = reading.out
            plain = layout.factors == (("B",), ("S",), (out.shape[-1],))  # a segment knows it then
            y = out if plain else layout.value(out.reshape(-1, layout.width), sizes)
            made = {**values, number: y}
            return map_tree(reading.result, lambda leaf: given_to(leaf, made, sizes, x.dtype))

        return tensors, functions, result

    def _check_masks(self, values: Mapping[int, Any], found: Sequence[Any]) -> None:
        """Raise Unreadable if a mask hides all keys from a query where the block would be wrong
        then. Layers of one kind have the same masks: the device is asked for those of the first."""
        if not self.reading.fills:
            return
        given = [t for i, t in enumerate(found) if isinstance(t, Tensor) and i not in self.places]
        pairs = zip(self._seen, given, strict=False)
        same = all(ref() is t and version == t._version for (ref, version), t in pairs)
        if same and len(self._seen) == len(given):
            return
        for number, fill in self.reading.fills.items():
            if bool((values[number] <= 0.99 * fill).all(-1).any()):
                raise Unreadable("its mask hides all keys from a query")
        self._seen = [(weakref.ref(t), t._version) for t in given]

    def run(self, layer: nn.Module, named: Mapping[str, Tensor], given: Mapping[str, Any]) -> Any:
        """The layer's result, by the block, in small pieces and without dropout; for the proof."""
        tensors, functions, result = self.bind(layer, named, given, random=False)
        x = leaves(given)[self.places[0]]
        tokens = x.shape[:-1].numel() // self.sizes(leaves(given)).get("B", 1)
        with pieces_of(min(_PIECE, tokens)):  # no less than a sequence
            return result(run_block(self.graph, "full", tensors, functions=functions))

    def sizes(self, found: Sequence[Any]) -> dict[str, int]:
        """The sizes of a call with these leaves of arguments."""
        sizes = dict(zip(self.axes, found[self.places[0]].shape, strict=False))
        if self.places[1] is not None:
            sizes["M"] = found[self.places[1]].shape[self.axes.index("S")]
        return {name: n for name, n in sizes.items() if name in self.names}


def _needs_grad(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and torch.is_grad_enabled()


def attribute(layer: nn.Module, path: str) -> Any:
    """An attribute of a layer's submodule, by its path."""
    module, _, name = path.rpartition(".")
    return getattr(layer.get_submodule(module), name)


class _Run:
    """A program of one call, with the random numbers of forward in backward too."""

    def __init__(
        self, program: Program, layer: nn.Module, sizes: Mapping[str, int], x: Tensor, random: bool
    ) -> None:
        self.program, self.sizes, self.dtype = program, sizes, x.dtype
        self.modules, self.precision = modules_of(program.ops, layer), precision_of(x.device.type)
        self.drops, self.device = random, x.device
        self.states: dict[int, list[Tensor]] = {}

    def run(self, at: At, xs: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
        drops = contextlib.nullcontext() if self.drops else without_dropout()
        with drops, self._random(at.first), self.precision():
            return self.program.run(self.modules, self.sizes, self.dtype, at, xs, tensors)

    @contextlib.contextmanager
    def _random(self, first: int) -> Iterator[None]:
        if not self.program.draws:
            yield
        elif first not in self.states:
            self.states[first] = generator_states(self.device)
            yield
        else:
            with torch.random.fork_rng([self.device] if self.device.type == "cuda" else []):
                set_generator_states(self.states[first], self.device)
                yield


def read_call(
    layer: nn.Module, forward: Callable[..., Any], call: Arguments, free: bool = False
) -> Known:
    """Return the block of a call of `forward`, the function of a layer's class, proved.

    The layer stays as it is: a replica of it is run. `free`: it must not depend on whole numbers
    among the arguments, nor on the layer's place in the model. Where dimensions of the arguments
    have the same size, the layer is traced with each meaning of them until it runs.

    Raises: Unreadable with the reason, if there is none.
    """
    try:
        return _read_one(layer, forward, call, free)
    except _CannotRun:
        for other in call.others():
            with contextlib.suppress(Unreadable):
                return _read_one(layer, forward, other, free)
        raise


class _CannotRun(Unreadable):
    """The layer raises in a recording; `at_once`: in the first, so that no other dtype helps."""

    def __init__(self, call: Arguments, error: Exception, at_once: bool) -> None:
        what = "batch size or length" if "S" in call.sizes else "batch size"
        super().__init__(f"{CANNOT_RUN} {what} ({type(error).__name__})")
        self.at_once = at_once


def _read_one(layer: nn.Module, forward: Callable[..., Any], call: Arguments, free: bool) -> Known:
    """Return the block of a call whose dimensions are those of `call.dims`."""
    reasons, fixed = list[Unreadable](), set[str | int]((*constants(layer), *call.whole))
    for varies in (True, False) if fixed else (True,):
        for dtypes in _DTYPES if call.sizes else ():
            try:
                mine = replica(layer, deep=True)
                if varies:
                    vary(mine)
                method = types.MethodType(forward, mine)
                known = _read_call(mine, method, call, *dtypes, free, varies)
                if varies and not fixed.isdisjoint(known.fixed):  # the block is that of others
                    break
                if not varies:
                    known.fixed |= fixed
                return known
            except (torch.OutOfMemoryError, SideEffect):
                raise
            except Unreadable as reason:
                reason.__cause__ = reason.__context__ = None  # whose frames hold the recordings
                reasons.append(reason.with_traceback(None))
                if not isinstance(reason, _CannotRun) or reason.at_once:
                    break
            except Exception as error:  # of the layer's own code, at another size
                text = f"its block raises {type(error).__name__} in a trial: {error}"
                reasons.append(Unreadable(text))
                break
    # One that a trial meets later says more than that another one cannot run.
    reasons.sort(key=lambda reason: not isinstance(reason, _CannotRun))
    last = reasons[-1] if reasons else Unreadable("its input has no tokens")
    try:
        raise last
    finally:
        del last, reasons  # whose traceback holds this frame, and the callers'


def _read_call(
    layer: nn.Module,
    forward: Callable[..., Any],
    call: Arguments,
    exact: torch.dtype,
    other: torch.dtype,
    params: torch.dtype,
    free: bool,
    varies: bool,
) -> Known:
    """The block of a call, recorded and proved in the dtype `exact`, and recorded in `other`."""
    shift = SHIFT * free
    sample = functools.partial(call.sample, layer, varies=varies)
    own = leaves(call.given)[call.places[0]].dtype
    leaf = functools.partial(leaf_of, dtype=own)
    at_once = exact == torch.float32
    try:
        first = sample(_SIZES[0], exact, 0, tables=False)
        one = Pair(layer, forward, first, leaf, INDICES if free else ())
        at_once = False
        second = functools.partial(sample, _SIZES[1], seed=1, shift=shift, tables=False)
        pair = one.with_second(second(dtype=other, params=params))
    except (Unreadable, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever the layer raises at these sizes
        raise _CannotRun(call, error, at_once) from error
    pairs = [pair]
    if own.itemsize < 4 and own != other:  # for which the layer may have operations of their own
        with contextlib.suppress(RuntimeError):  # parameters of several dtypes
            pairs.append(one.with_second(second(dtype=own)))
    opaque = dict[str, str]()
    while True:
        try:
            known = _known(layer, pair, call, opaque)
            for other_pair in pairs[1:]:
                other_pair.join(opaque)
            fused = functools.partial(known.proved.run, layer)
            for i, sizes in enumerate(_PROOFS if "S" in call.sizes else _LONG_PROOFS):
                # With the same parameters: they are as large as the layer's.
                given = sample(sizes, exact, i + 2, whole=False, shift=i * shift, named=first.named)
                with renumbered(layer, INDICES if free and i else ()):
                    found = difference(layer, forward, fused, given, known.narrow)
                if found is not None:
                    raise Unreadable(f"the traced block does not compute the same: {found}")
            return known
        except Opaque as reason:
            path = reason.path.rpartition(".")[0] if reason.path in opaque else reason.path
            while path in opaque:
                path = path.rpartition(".")[0]
            if not path or len(opaque) >= _MOST_PIECES:
                raise Unreadable(str(reason)) from None
            opaque[path] = reason.reason if path == reason.path else str(reason)


def _known(layer: nn.Module, pair: Pair, call: Arguments, opaque: Mapping[str, str]) -> Known:
    """The block of two recordings, and the same without dropout; not proved yet."""

    def reading_of(drops: bool, mixes: bool) -> Reading:
        recording = pair.join(opaque)
        places = (*call.places, call.bounds)
        x, memory, bounds = (None if i is None else recording.inputs[i] for i in places)
        assert x is not None
        tokens = pair.sizes.get("S", call.tokens)
        dtype = leaves(call.given)[call.places[0]].dtype
        reader = Reader(
            recording, layer, x, memory, bounds, tokens, dtype, call.names, drops, mixes
        )
        return reader.reading(f"read_{type(layer).__name__}")

    known = Known(reading_of(True, True), call, pair.narrow)
    if known.reading.draws:
        known.plain = known.proved = Known(reading_of(False, True), call, pair.narrow)
    if known.reading.mixes:
        known.proved = Known(reading_of(False, False), call, pair.narrow)
    return known
