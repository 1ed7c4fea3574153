"""Blocks as operators, for `torch.compile` and selective checkpointing.

The compiler would trace a block's autograd Function and decide itself what is kept. So each kind of
block is an operator of its own, `torch.ops.fused_remat.<kind>` (`encoder_prenorm`, `mlp`,
`attention`, ...), with another one for its backward:

    <kind>(Tensor[] tensors, str call) -> Tensor[]            the output, then what is kept
    <kind>_backward(Tensor[] saved, SymInt[] sizes, Tensor dy, str call) -> Tensor[]

`call` is text that describes everything else, so that a compiled program refers to no object. Both
run the executor's two functions, as eager mode does. An operator returns a fixed number of tensors,
so it keeps one tensor per name rather than one per group and tile. Offloaded tensors are returned
on the host, an offloaded input last, and fetched when the backward operator begins.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_remat import random
from fused_remat.autograd.gradients import NO_DOUBLE_BACKWARD, round_vectors
from fused_remat.autograd.offload import TRANSFERS, fetched, hold, start_out
from fused_remat.execution import executor
from fused_remat.execution.observe import is_checked
from fused_remat.execution.prepare import BlockConfig, Execution, prepare
from fused_remat.graph.graph import Graph, sizes
from fused_remat.graph.schedule import Schedule, schedule
from fused_remat.graph.text import graph_of
from fused_remat.policies import Policy, kept_names
from fused_remat.spec import KINDS
from fused_remat.steps.operations import warn
from fused_remat.version import __version__


def run(
    graph: Graph, policy: str | Policy, tensors: Mapping[str, Tensor | None], **options: Any
) -> Tensor:
    """Run a block through its operator, as `run_block` does in eager mode; Dynamo may trace it.

    `options` are other fields of the `BlockConfig`.

    Raises: ValueError for a graph that no function marked `graph.text.block` has built.
    """
    if not graph.text:
        raise ValueError(
            f"fused_remat: the graph of {graph.kind!r} has no text: build it in a function marked "
            "fused_remat.graph.text.block"
        )
    compiling = torch.compiler.is_compiling()
    if not compiling and graph_of(graph.text).digest != graph.digest:
        raise RuntimeError(
            f"fused_remat: the function that builds {graph.text} was defined again: give each "
            "definition a name of its own"
        )
    if isinstance(policy, str):
        names: str | tuple[str, ...] = policy
        offload: tuple[str, ...] = ()
    else:
        # Segments exist in eager mode only: here their blocks keep inputs. Selective checkpointing
        # may drop an operator's results, so it offloads nothing.
        names = tuple(policy.save) if policy.segment is None else ()
        offload = tuple(policy.offload) if compiling else ()
    given = {name: t for name, t in tensors.items() if t is not None}
    needs_grad = [name for name, t in given.items() if torch.is_grad_enabled() and t.requires_grad]
    if "seed" not in given and _draws_seed(graph.text, compiling and bool(needs_grad)):
        given["seed"] = random.draw_seed(given["input"].device)
    dtypes = tuple([t.dtype for t in given.values()])
    call = _serialize_call(
        graph.text, names, tuple(given), dtypes, tuple(needs_grad), offload, **options
    )
    operator = getattr(torch.ops.fused_remat, _registered(graph.text))
    out: Tensor = operator(list(given.values()), call)[0]
    return out


# --- a call as text. Dynamo does not trace these functions, it calls them while compiling:
# constants in, constants out.


@dataclass(frozen=True)
class ParsedConfig:
    """The text of a call, parsed."""

    call: BlockConfig
    dtypes: Mapping[str, torch.dtype]  # of the call's tensors, in their order

    @functools.cached_property
    def plan(self) -> Schedule:
        return schedule(self.call.graph, self.call.save, self.call.needs_grad, tiled=False)

    @functools.cached_property
    def saved(self) -> tuple[str, ...]:
        """Tensors of the call that backward reads again."""
        rereads = {*self.plan.kept_inputs, *self.plan.saved_params}
        return tuple(name for name in self.dtypes if name in rereads)

    @functools.cached_property
    def asked(self) -> tuple[str, ...]:
        """Tensors of the call that need a gradient."""
        return tuple(name for name in self.dtypes if name in self.call.needs_grad)

    def moved(self, device: torch.device) -> frozenset[str]:
        """Return the kept names, and the input, that are returned on the host."""
        names = (*self.plan.kept, *(n for n in self.saved if n in self.call.graph.inputs))
        return self.call.offload.intersection(names if device.type in TRANSFERS else ())

    def aligned(self, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """Return `values` of `names` in the order of the graph's tensors; None for the others."""
        named = dict(zip(names, values, strict=True))
        return [named.get(name) for name in self.call.graph.tensors]


def _serialize_call(
    text: str,
    policy: str | tuple[str, ...],
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    needs_grad: tuple[str, ...],
    offload: tuple[str, ...],
    **options: Any,
) -> str:
    """Return a call as text; `names` and `dtypes` are those of its tensors.

    It holds a digest of the graph and the version, so that a compiler's cache on disk does not
    outlive either.

    Raises: ValueError, TypeError for a policy that does not fit the block.
    """
    graph = graph_of(text)
    what = policy if isinstance(policy, str) else Policy(save=policy, offload=offload)
    fields = {
        "graph": text,
        "of": [graph.digest, __version__],
        "save": sorted(kept_names(what, graph)),
        "offload": sorted(offload),
        "needs_grad": sorted(needs_grad),
        "dtypes": {n: str(d).removeprefix("torch.") for n, d in zip(names, dtypes, strict=True)},
    }
    return json.dumps(fields | options)


@functools.lru_cache(maxsize=4096)
def parse_call(text: str) -> ParsedConfig:
    """Read what `_serialize_call` wrote.

    Raises: RuntimeError if the text names a graph that has changed since.
    """
    fields = json.loads(text)
    name, of, dtypes = [fields.pop(key) for key in ("graph", "of", "dtypes")]
    graph = graph_of(name)
    if [graph.digest, __version__] != of:
        raise RuntimeError(
            f"fused_remat: {name} is not the graph that this program was compiled with: the "
            "function that builds it, or fused_remat itself, has changed; compile again"
        )
    sets: dict[str, Any] = {
        key: frozenset(fields.pop(key)) for key in ("save", "needs_grad", "offload")
    }
    call = BlockConfig(graph, **sets, **fields)
    return ParsedConfig(call, {name: getattr(torch, dtype) for name, dtype in dtypes.items()})


#: Settings of the compiler under which it rebuilds no more than it must.
_HARMLESS = {"activation_memory_budget": 1.0, "aggressive_recomputation": False}


def _draws_seed(text: str, compiled_backward: bool) -> bool:
    """Return whether a block needs a seed.

    Raises: RuntimeError where the compiler's backward pass would draw it again.
    """
    if not graph_of(text).uses_seed:
        return False
    for name, harmless in _HARMLESS.items() if compiled_backward else ():
        value = getattr(torch._functorch.config, name)
        if value != harmless:
            raise RuntimeError(
                f"fused_remat: with torch._functorch.config.{name} = {value}, torch.compile lets "
                "dropout be drawn again in backward, and gradients would be wrong; set it to "
                f"{harmless}, or pass seed="
            )
    return True


def _registered(text: str) -> str:
    """Return the kind of a block, and register its operators."""
    kind = graph_of(text).kind
    operators(kind)
    return kind


for _constant in (_serialize_call, _draws_seed, _registered):
    vars(_constant)["_dynamo_marked_constant"] = True


def _joined(names: Sequence[str], execution: Execution, chunks: list[Tensor]) -> dict[str, Tensor]:
    """Join what groups and tiles kept: a matrix (tokens, width) for each of `names`."""
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    chunks.reverse()
    for name, rows in execution.kept_chunks():
        parts[name].append(chunks.pop().reshape(rows, execution.widths[name]))
    result = {}
    for name in names:
        shape, dtype = (0, execution.widths[name]), execution.dtypes[name]  # without sequences
        own = parts.pop(name) or [torch.empty(shape, dtype=dtype, device=execution.device)]
        result[name] = own[0].contiguous() if len(own) == 1 else torch.cat(own)
    return result


def _split(execution: Execution, whole: Mapping[str, Tensor]) -> list[Tensor]:
    """Split what `_joined` joined, as views."""
    at = dict.fromkeys(whole, 0)
    chunks = []
    for name, rows in execution.kept_chunks():
        chunks.append(whole[name][at[name] : at[name] + rows])
        at[name] += rows
    return chunks


def _shapes(flat: Sequence[int]) -> list[torch.Size]:
    """Return shapes from one list of ranks and sizes."""
    shapes, at = [], 0
    while at < len(flat):
        rank = int(flat[at])
        shapes.append(torch.Size(flat[at + 1 : at + 1 + rank]))
        at += 1 + rank
    return shapes


def _forward(tensors: list[Tensor], call: str) -> list[Tensor]:
    if is_checked():
        warn(
            "the replay check does not cover blocks under torch.compile or selective "
            "checkpointing; run it without them"
        )
    this = parse_call(call)
    given = this.aligned(tuple(this.dtypes), tensors)
    execution = this.call.prepare(given)
    x = given[0]
    assert x is not None
    moved = this.moved(x.device)
    # The input may be overwritten once the operator is done: it is copied while the block runs.
    inputs, leaving = start_out([x]) if "input" in moved else ([], None)
    out, chunks = executor.forward(execution, given)
    joined = _joined(this.plan.kept, execution, chunks)
    if leaving is not None:
        leaving.settle()
    if this.call.offload:
        names = [name for name in joined if name in moved]
        hosts, copies = start_out([joined[name] for name in names]) if names else ([], None)
        joined.update(zip(names, hosts, strict=True))
        hold(copies, x.device)
    return [out, *joined.values(), *inputs]


def _fake_forward(tensors: list[Tensor], call: str) -> list[Tensor]:
    this = parse_call(call)  # sizes of `tensors` may be symbols
    given = this.aligned(tuple(this.dtypes), tensors)
    x, graph = given[0], this.call.graph
    assert x is not None
    named = this.call.named_shapes([None if t is None else t.shape for t in given])
    batch, lengths, widths = sizes(named["input"])[0], graph.lengths(named), graph.widths(named)
    dtypes, moved = graph.dtypes(x.dtype), this.moved(x.device)
    out = executor.empty_output(this.call, widths["output"], dtypes["output"], x)
    kept = {
        name: x.new_empty((batch * lengths[name], widths[name]), dtype=dtypes[name])
        for name in this.plan.kept
    }
    for name in moved.intersection(kept):
        kept[name] = torch.empty_like(kept[name], device="cpu")
    inputs = [torch.empty_like(x, device="cpu")] if "input" in moved else []
    return [out, *kept.values(), *inputs]


def _backward(saved: list[Tensor], sizes: list[int], dy: Tensor, call: str) -> list[Tensor]:
    this = parse_call(call)
    if this.call.offload:
        saved = _on_device(this, saved, dy.device)
    names = tuple(this.dtypes)
    shapes = dict(zip(names, _shapes(sizes), strict=True))
    dtype = this.dtypes[this.call.graph.inputs[0]]
    execution = prepare(this.call, dy, this.aligned(names, list(shapes.values())), dtype=dtype)
    count = len(this.saved)
    out = saved[count] if this.plan.keeps_output else None
    whole = dict(zip(this.plan.kept, saved[count + this.plan.keeps_output :], strict=True))
    was = [shapes[name] for name in this.saved]
    dtypes = [this.dtypes[name] for name in this.saved]
    executor.check_unchanged(this.saved, was, dtypes, saved[:count], dy)
    tensors = this.aligned(this.saved, saved[:count])
    grads = executor.backward(execution, tensors, _split(execution, whole), out, dy)
    if dtype.itemsize == 2:
        round_vectors(grads, dtype, [this.dtypes.get(name) for name in this.call.graph.tensors])
    named = dict(zip(this.call.graph.tensors, grads, strict=True))
    result = []
    for name in this.asked:
        grad, dtype = named[name], this.dtypes[name]
        if grad is None:  # of an empty input, or without influence
            result.append(dy.new_zeros(shapes[name], dtype=dtype))
        else:
            grad = grad.to(dtype).contiguous()
            # Results of an operator share no memory; rows of a joint weight gradient do, and dy.
            storage = grad.untyped_storage()
            shared = storage.nbytes() > grad.nbytes or storage._cdata == dy.untyped_storage()._cdata
            result.append(grad.clone() if shared else grad)
    return result


def _on_device(this: ParsedConfig, saved: list[Tensor], device: torch.device) -> list[Tensor]:
    """Return what forward's operator kept, with what it moved fetched."""
    moved, result = this.moved(device), list(saved)
    names = (*this.saved, *(("output",) if this.plan.keeps_output else ()), *this.plan.kept)
    indices = [i for i, name in enumerate(names) if name in moved]
    hold(None, device)
    for index, t in zip(indices, fetched([saved[i] for i in indices], device), strict=True):
        result[index] = t
    return result


def _fake_backward(saved: list[Tensor], sizes: list[int], dy: Tensor, call: str) -> list[Tensor]:
    this = parse_call(call)
    shapes = dict(zip(this.dtypes, _shapes(sizes), strict=True))
    return [dy.new_empty(shapes[name], dtype=this.dtypes[name]) for name in this.asked]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, ctx.call = inputs
    this = parse_call(ctx.call)
    named = dict(zip(this.dtypes, tensors, strict=True))
    out, *kept = output
    if "input" in this.moved(out.device):
        named["input"] = output[-1]
    ctx.sizes = [size for t in tensors for size in (t.dim(), *t.shape)]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*kept)
    again = [named[name] for name in this.saved]
    kept = kept[: len(this.plan.kept)]
    ctx.save_for_backward(*again, *([out] if this.plan.keeps_output else []), *kept)


def _autograd(kind: str, ctx: Any, grads: list[Tensor | None]) -> tuple[Any, None]:
    this = parse_call(ctx.call)
    dy = grads[0]
    if dy is None:
        return [None] * len(this.dtypes), None
    grads = operators(kind)[1](list(ctx.saved_tensors), ctx.sizes, dy, ctx.call)
    named = dict(zip(this.asked, grads, strict=True))
    return [named.get(name) for name in this.dtypes], None


@functools.cache
def operators(kind: str) -> tuple[Any, Any]:
    """Return the two operators of a kind of block, registered at the first call.

    Raises: ValueError for a kind that is no name for an operator.
    """
    if not kind.isidentifier() or kind.endswith("_backward"):
        raise ValueError(
            "a block's kind must be an identifier that does not end in _backward, since it names "
            f"an operator; got {kind!r}"
        )

    def no_double_backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError(NO_DOUBLE_BACKWARD)

    operator: Any = functools.partial(torch.library.custom_op, mutates_args=())
    schema = "(Tensor[] tensors, str call) -> Tensor[]"
    forward = operator(f"fused_remat::{kind}", _forward, schema=schema)
    schema = "(Tensor[] saved, SymInt[] sizes, Tensor dy, str call) -> Tensor[]"
    backward = operator(f"fused_remat::{kind}_backward", _backward, schema=schema)
    forward.register_fake(_fake_forward)
    backward.register_fake(_fake_backward)
    backward.register_autograd(no_double_backward)
    forward.register_autograd(functools.partial(_autograd, kind), setup_context=_setup_context)
    return forward, backward


for _kind in KINDS:
    operators(_kind)
