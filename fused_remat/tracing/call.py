"""A call of a layer as the block that was traced from it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from fused_remat.autograd import run_block
from fused_remat.autograd.gradients import not_differentiable
from fused_remat.layers.eligibility import Reason, unrecorded_outputs
from fused_remat.layers.fallback import generator_states, set_generator_states
from fused_remat.layers.packed import Packed
from fused_remat.layers.record import record_of, warn
from fused_remat.steps.replay import At
from fused_remat.tracing.isolation import replica
from fused_remat.tracing.program import Context, Operations, Program, TracedBlock, leaf_value
from fused_remat.tracing.quantized import packed_at
from fused_remat.tracing.results import Returned
from fused_remat.tracing.samples import Arguments
from fused_remat.tracing.sizes import Size, Sizes, meets
from fused_remat.tracing.state import record
from fused_remat.tracing.values import STREAM, Op, Untraceable, leaves, map_tree

#: Values that are no activations and have at least as many elements are rebuilt in backward.
_LARGE = 1 << 9


class Trace:
    """A traced block, and how a call runs it."""

    def __init__(self, block: TracedBlock, call: Arguments) -> None:
        self.block, self.graph, self.dims = block, block.graph, call.dims
        self.x, self.memory, self.axes, self.names = call.x, call.memory, call.axes, {*call.sizes}
        #: Names of the layer's tensors, and indices of leaves of the arguments, with other values
        #: of which the layer is another block.
        self.fixed: set[str | int] = {*block.fixed}
        #: Conditions on the sizes of a call, with their outcomes where this trace applies.
        self.conditions: Mapping[str, bool] = {}
        #: By the dtypes of an input and of autocast, alone and with a call's sizes, why a block
        #: was not equal to its layer.
        self.compared: dict[Any, Reason | None] = {}
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []
        #: Names of the classes of objects that the layer makes and returns.
        self.objects = [r.kind.__name__ for r in leaves(block.result) if isinstance(r, Returned)]
        results = [getattr(leaf, "index", -1) for leaf in leaves(block.result)]
        live = {block.out[0], *dict(block.streams)}
        #: Indices of leaves of the result that the block computes.
        self.outs = {results.index(n) for n in live}
        #: The same without dropout, and also without the adapters' own dtypes.
        self.plain = self.proved = self

    def holds(self, sizes: Sizes) -> bool:
        """Return whether the layer takes the recorded branches at these sizes."""
        return meets(sizes, self.conditions)

    def bind(
        self,
        layer: nn.Module,
        named: Mapping[str, Tensor],
        arguments: Mapping[str, Any],
        mode: Callable[[], Any] = contextlib.nullcontext,
        rerun: Callable[[str], Any] | None = None,
    ) -> tuple[dict[str, Tensor | None], dict[str, Callable[..., Tensor]], Callable[..., Any]]:
        """Return what the block reads, and a function of its output; or raise Untraceable.

        `mode`: makes a context in which recorded operations run. `rerun`: returns the result of
        the layer's own forward, for an object in it of which the given field is read.
        """
        block, given = self.block, leaves(arguments)
        sizes, x = self.sizes(given), given[self.x]
        roots, packed = dict[int, Any](), dict[str, Packed]()
        for name, spec in block.formats.items():
            own = packed_at(layer, name, x)
            if own is None or own.spec != spec:
                raise Untraceable(f"the format of {name} has changed since the layer was traced")
            packed[name] = own
        for number, name in block.sources.items():
            if name in packed:
                roots[number] = packed[name].tensors[0]
            else:
                roots[number] = named[name] if name in named else attrgetter(name)(layer)
        roots |= {n: t for n, t in zip(block.arguments, given, strict=True) if n is not None}
        for number, (shape, dtype) in block.stand_ins.items():
            size = [n.of(sizes) if isinstance(n, Size) else n for n in shape]
            like = x.dtype if dtype is STREAM else dtype
            roots[number] = torch.zeros((), dtype=like, device=x.device).expand(size)
        values, tensors = {**roots}, dict[str, Tensor | None]()
        context = Context(layer.get_submodule, sizes, x.dtype, x.device, mode)
        rebuild = functools.partial(Rebuild, values=roots, layer=layer, context=context)
        grads = torch.is_grad_enabled()
        live = [n for n, t in roots.items() if grads and isinstance(t, Tensor) and t.requires_grad]
        rebuilt, rest = block.plan(frozenset(live), _LARGE)
        if rebuilt.outs:
            attached = rebuild(rebuilt)
            tensors_again = _Attached.apply(attached, *attached.roots.values())
            values.update(zip(rebuilt.outs, tensors_again, strict=True))
        rest.run(values, context)
        self._check_masks(values, given)
        for name, (number, layout) in block.inputs.items():
            value = values[number]
            if value.dim() != 3 or layout.tokens != (0, 1):
                value = layout.matrix(value, sizes, (sizes.get("B", 1), -1))
            tensors[name] = value
        functions: dict[str, Callable[..., Tensor]] = {
            name: _replay(program, layer, context) for name, program in block.programs.items()
        }
        for name, own in packed.items():
            tensors.update(zip(own.spec.names(name), own.tensors, strict=True))
        again = dict[str, int]()
        for name, number in block.values.items():
            value, chain = values[number], block.chains[number]
            tensors[name] = value.t() if name in block.transposed else value
            free = number in rebuilt.outs or not value.requires_grad
            if not (chain.ops and free and value.numel() >= _LARGE):
                continue
            if not _shares(value, [roots[n] for n in chain.roots]):
                again[name] = number
        if again:
            few = 2 * sum(values[n].numel() for n in again.values()) <= x.numel()
            if few and {*again.values()} == {*rebuilt.outs} and block.is_of_batch(rebuilt):
                together, attached.keeps_graph = attached, True
            else:
                together = rebuild(block.together(frozenset(again.values())))
            for name, number in again.items():
                transposed = name in block.transposed
                functions[name] = functools.partial(together.in_backward, number, transposed)

        known = layer, x, values, context, rerun
        return tensors, functions, functools.partial(self._result, *known)

    def _result(
        self,
        layer: nn.Module,
        x: Tensor,
        values: Mapping[int, Any],
        context: Context,
        rerun: Callable[[str], Any] | None,
        out: Tensor,
        *sides: Tensor,
    ) -> Any:
        """Return the result of the layer from the block's outputs."""
        block, sizes, (number, layout) = self.block, context.sizes, self.block.out
        count, known = len(block.records), {**values}
        for (path, of), side in zip(block.records.items(), sides[:count], strict=True):
            logits = of.value(side.reshape(-1, of.width), sizes)
            record(layer.get_submodule(path), x, logits)
        for (n, of), side in zip(block.streams, sides[count:], strict=True):
            known[n] = of.value(side.reshape(-1, of.width), sizes)
        plain = layout.factors == (("B",), ("S",), (out.shape[-1],))  # a segment knows it then
        y = out if plain else layout.value(out.reshape(-1, layout.width), sizes)
        known[number], positions = y, itertools.count()

        def part(leaf: Any) -> Any:
            i = next(positions)
            if isinstance(leaf, Returned):
                return leaf.like(rerun and (lambda name: leaves(rerun(name))[i]))
            return leaf_value(leaf, known, context)

        return map_tree(block.result, part)

    def _check_masks(self, values: Mapping[int, Any], given: Sequence[Any]) -> None:
        """Raise Untraceable if a mask that is a fill hides all keys from a query."""
        if not self.block.fills:
            return
        # Layers of one kind have the same masks: those of the first alone are copied from a GPU.
        inputs = (self.x, self.memory)
        others = [t for i, t in enumerate(given) if isinstance(t, Tensor) and i not in inputs]
        pairs = zip(self._seen, others, strict=False)
        same = all(ref() is t and version == t._version for (ref, version), t in pairs)
        if same and len(self._seen) == len(others):
            return
        for number, fill in self.block.fills.items():
            if bool((values[number] <= 0.99 * fill).all(-1).any()):
                raise Untraceable("its mask hides all keys from a query")
        self._seen = [(weakref.ref(t), t._version) for t in others]

    def run(self, *call: Any, **more: Any) -> Any:
        """Return the layer's result by the block, for what `bind` takes."""
        tensors, functions, result = self.bind(*call, **more)
        out = run_block(self.graph, "full", tensors, functions=functions)
        return result(*out if self.graph.side_outputs else (out,))

    def sizes(self, given: Sequence[Any]) -> dict[str, int]:
        sizes = dict(zip(self.axes, given[self.x].shape, strict=False))
        if self.memory is not None:
            sizes["M"] = given[self.memory].shape[self.axes.index("S")]
        return {name: n for name, n in sizes.items() if name in self.names}


def own_result(layer: Any, arguments: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a function that runs the layer's own forward, in this call and all later ones.

    It takes what is read and no block computes.
    """
    held = [leaves(arguments), *layer.parameters(), *layer.buffers()]
    tensors = [t for t in leaves(held) if isinstance(t, Tensor)]
    versions, autocast = [t._version for t in tensors], _autocast(tensors[0].device.type)

    def run(name: str) -> Any:
        if [t._version for t in tensors] != versions:
            raise RuntimeError(
                f"fused_remat: {name} is read after an argument or a parameter of "
                f"{type(layer).__name__} was modified; read it before, or call the layer again"
            )
        how, checkpointed = layer._checkpointing()
        record = record_of(layer)
        record.failure = f"its caller reads {name}, which a block does not compute"
        warn(layer, f"runs its own forward under {how} from now on: {record.failure}")
        with torch.enable_grad(), autocast():
            return checkpointed(layer._stock_forward, arguments)

    return run


def _replay(program: Program, layer: nn.Module, context: Context) -> Callable[..., Tensor]:
    """Return a program in one call, with the same random numbers in forward and backward."""
    context, known = context._replace(modules=_modules(program.ops, layer)), dict[int, Any]()
    device, autocast = context.device, _autocast(context.device.type)
    runs_modules = any(op.path is not None for op in program.ops)
    hidden: Any = unrecorded_outputs if runs_modules else contextlib.nullcontext

    def run(at: At, xs: Sequence[Tensor], tensors: Sequence[Tensor | None], *more: Any) -> Any:
        state: Any = contextlib.nullcontext()
        if program.draws and at.first in known:
            state = torch.random.fork_rng([device] if device.type == "cuda" else [])
        with state, autocast(), hidden():
            if program.draws:
                set_generator_states(known.setdefault(at.first, generator_states(device)), device)
            return program.run(context, at, xs, tensors, *more)

    run.program = program  # type: ignore[attr-defined]  # by which the planner compares layers
    return run


class Rebuild:
    """Operations that run in forward and again in backward."""

    def __init__(
        self, operations: Operations, values: Mapping[int, Any], layer: nn.Module, context: Context
    ) -> None:
        self.operations, self.autocast = operations, _autocast(context.device.type)
        self.context = context._replace(modules=_modules(operations.ops, layer))
        self.roots = {n: values[n] for n in operations.roots}
        self.needs = [t.requires_grad for t in self.roots.values()]
        self.versions = [t._version for t in self.roots.values()]
        self.made = dict[int, Tensor]()  # in the present pass, and not taken yet
        #: Whether values of backward are computed under autograd, and roots and values that were,
        #: until their gradients are there.
        self.keeps_graph, self.graph = False, list[list[Tensor]]()

    def under_autograd(self) -> list[list[Tensor]]:
        """Return roots, detached, and the values that the operations compute from them."""
        pairs = zip(self.roots.values(), self.needs, strict=True)
        roots = [t.detach().requires_grad_(need) for t, need in pairs]
        with torch.enable_grad():
            return [roots, self.run(dict(zip(self.roots, roots, strict=True)))]

    def run(self, roots: Mapping[int, Any]) -> list[Tensor]:
        """Return the values that the operations compute."""
        values = {**roots}
        with self.autocast():
            self.operations.run(values, self.context)
        return [values[n] for n in self.operations.outs]

    def in_backward(self, number: int, transposed: bool = False) -> Tensor:
        """Return a value, or raise if a root was modified since forward.

        All values are computed when the first one is taken, as parts of one tensor may be.
        """
        if [t._version for t in self.roots.values()] != self.versions:
            raise RuntimeError(
                "fused_remat: an argument or a buffer from which a layer computes its mask was "
                "modified by an inplace operation between forward and backward"
            )
        if number not in self.made:
            graph = self.under_autograd() if self.keeps_graph else []
            with torch.no_grad():
                values = graph[1] if graph else self.run(self.roots)
            self.graph = graph
            pairs = zip(self.operations.outs, values, strict=True)
            self.made = {n: t.detach() for n, t in pairs}
        value = self.made.pop(number)
        return value.t() if transposed else value


def _shares(value: Tensor, roots: Sequence[Any]) -> bool:
    """Return whether a value is a view of a root, so that a rebuild saves nothing."""
    pointer = value.untyped_storage().data_ptr()
    return any(t.untyped_storage().data_ptr() == pointer for t in roots)


class _Attached(torch.autograd.Function):
    """The values of a `Rebuild`, differentiable in its roots, which alone are kept."""

    @staticmethod
    def forward(ctx: Any, rebuild: Rebuild, *roots: Tensor) -> tuple[Tensor, ...]:
        ctx.rebuild = rebuild
        ctx.save_for_backward(*roots)
        ctx.set_materialize_grads(False)
        return tuple([t.detach() for t in rebuild.run(rebuild.roots)])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        creates_graph = torch.is_grad_enabled()
        rebuild, needs, _ = ctx.rebuild, ctx.needs_input_grad[1:], ctx.saved_tensors  # checks them
        graph, rebuild.graph = rebuild.graph, []
        roots, values = graph or rebuild.under_autograd()
        pairs = zip(values, grads, strict=True)
        outs = [(t, g) for t, g in pairs if g is not None and t.requires_grad]
        if not outs:
            return (None,) * (1 + len(roots))
        ys, dys = zip(*outs, strict=True)
        inputs = [t for t, need in zip(roots, needs, strict=True) if need]
        root_grads = iter(torch.autograd.grad(ys, inputs, dys, allow_unused=True))
        result = [next(root_grads) if need else None for need in needs]
        return (None, *(not_differentiable(result) if creates_graph else result))


def _modules(ops: Sequence[Op], layer: nn.Module) -> Callable[[str], nn.Module]:
    paths = [op.module for op in ops if op.module is not None]
    return {path: replica(layer.get_submodule(path)) for path in paths}.__getitem__


def _autocast(device: str) -> Callable[[], Any]:
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return functools.partial(torch.autocast, device, dtype=torch.get_autocast_dtype(device))
    return contextlib.nullcontext
