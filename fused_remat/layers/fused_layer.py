"""What fused layers share: their options, warnings, and who is told of decisions."""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fused_remat.autograd import accumulate
from fused_remat.autograd.shards import is_dtensor
from fused_remat.execution.choose import check_name
from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.layers import fallback, tensor_parallel
from fused_remat.layers.fallback import checkpointed
from fused_remat.layers.read import LayerCall, Place, batched
from fused_remat.layers.tensor_parallel import TensorParallel, stand_in
from fused_remat.ops.blocks import run_layer
from fused_remat.policies import Policy, draws, kept_names
from fused_remat.steps.operations import FusedRematWarning


class FusedLayer(nn.Module):
    """A layer whose forward is a block; mixed in before the class that it stands in for."""

    # Class attributes serve layers unpickled, or re-classed, from the stock one.
    _policy: str | Policy = "full"
    _backend: str = "auto"
    _accumulate_into: str | None = None
    #: How the layer is divided among ranks (`fused_remat.parallel`); None if it is not.
    _division: TensorParallel | None = None

    @property
    def policy(self) -> str | Policy:
        """What the layer keeps; may be set at any time, for the calls from then on."""
        return self._policy

    @policy.setter
    def policy(self, policy: str | Policy) -> None:
        kept_names(policy, self._example())
        self._policy = policy

    @property
    def backend(self) -> str:
        """Who does the arithmetic: "auto" or a registered name."""
        return self._backend

    @backend.setter
    def backend(self, backend: str) -> None:
        self._backend = check_name(backend)

    @property
    def accumulate_into(self) -> str | None:
        """Where backward adds weight gradients: None (autograd's way), "grad" or "main_grad"."""
        return self._accumulate_into

    @accumulate_into.setter
    def accumulate_into(self, target: str | None) -> None:
        self._accumulate_into = accumulate.check_target(target)

    def extra_repr(self) -> str:
        shown = f"policy={self._policy!r}, backend={self._backend!r}"
        target = self._accumulate_into
        return shown if target is None else f"{shown}, accumulate_into={target!r}"

    def _example(self) -> Graph:
        """A graph with the kind and the names of this layer's."""
        raise NotImplementedError

    def _places(self) -> tuple[Place, ...]:
        """Where the layer has its block's weights."""
        raise NotImplementedError

    def _heads(self) -> dict[str, int]:
        """How many heads its attentions have, by what they are called."""
        raise NotImplementedError

    def _fused(self, call: LayerCall) -> Tensor:
        if self._accumulate_into is not None:
            compiled = "the call is compiled" if torch.compiler.is_compiling() else None
            self._refuse_to_accumulate(compiled or accumulate.why_not_engine(self))
        compute, tensors = None, call.tensors
        if call.precision is not None:
            x = tensors["input"]
            assert x is not None
            tensors = {**tensors, "input": x.to(call.precision.stream)}
            compute = call.precision.compute
        out = run_layer(
            block_graph(call.spec),
            tensors,
            policy=self._policy_now(),
            backend=self._backend,
            seq_first=call.seq_first,
            preserve_strides=call.spec.branches[-1].placement != "post",
            functions=call.functions,
            accumulate_into=self._accumulate_into,
            compute=compute,
            tell=self._warn_of_kept_input,
        )
        return out.squeeze(0) if call.unbatched else out

    def _divided(
        self,
        choose: Callable[[Mapping[str, Any]], LayerCall | str],
        inputs: Mapping[str, Tensor],
        dim: int,
    ) -> Tensor:
        """A call of a layer that is divided among ranks.

        `choose` is given what stands for `inputs`, the block's by name, of which "input" has its
        tokens in dimension `dim`.

        Raises: RuntimeError where the block cannot serve it: nothing else knows its shards.
        """
        division = self._division
        assert division is not None
        x, name = inputs["input"], type(self).__name__
        for given in inputs.values():
            if is_dtensor(given):
                raise RuntimeError(
                    f"fused_remat: a tensor-parallel {name} takes this rank's local tensor, got a "
                    f"DTensor of shape {tuple(given.shape)}: use_local_output=True in the plan of "
                    "what makes it"
                )
        x = division.entered(x, dim)
        named = {**inputs, "input": x}
        call = choose(self._stand_ins(named, dim, divided=True))
        if self._accumulate_into is not None:
            call = "accumulate_into: gradients belong to DTensors"
        if isinstance(call, str):
            raise RuntimeError(f"fused_remat: a tensor-parallel {name} cannot run: {call}")
        local = {name: batched(t, call.unbatched) for name, t in named.items()}
        seeded = draws(self._policy)
        out = self._fused(tensor_parallel.local_call(call, local, division.parallel, seeded))
        return tensor_parallel.join_tokens(out, dim, division.parallel) if division.joins else out

    def _stand_ins(
        self, inputs: Mapping[str, Any], dim: int, divided: bool = False
    ) -> dict[str, Any]:
        """What a call of a divided layer is chosen by: inputs of whole sequences.

        `divided`: "input" is this rank's tokens, though forward's may be whole.
        """
        division = self._division
        assert division is not None
        if division.splits and not tensor_parallel:
            return dict(inputs)
        return {**inputs, "input": stand_in(inputs["input"], dim, division.parallel)}

    def _policy_now(self) -> str | Policy:
        """The policy of a call: without a segment where what runs a layer again may be gone."""
        policy = self._policy
        if isinstance(policy, str) or policy.segment is None:
            return policy
        compiling = torch.compiler.is_compiling()
        sharded_by = None if compiling else accumulate.sharded_by(self)
        if not compiling and sharded_by is None:
            return policy
        if policy.segment == "inner" and compiling:
            warn_compiled_segment(type(self).__name__)
        elif policy.segment == "inner":
            warn_once(self, f"{_KEEPS_INPUT}: {sharded_by} {_FREES}", stacklevel=8)
        return Policy(offload=policy.offload)

    def _warn_of_kept_input(self, reason: str) -> None:
        warn_once(self, f"{_KEEPS_INPUT}: {reason}", stacklevel=10)

    def _refuse_dtensors(self, given: Iterable[Any]) -> None:
        """Raise RuntimeError if a DTensor meets plain parameters: PyTorch would, less clearly."""
        for value in filter(is_dtensor, given):
            if not any(map(is_dtensor, self.parameters())):
                raise RuntimeError(
                    f"fused_remat: a {type(self).__name__} that is not divided over ranks is given "
                    f"a DTensor of shape {tuple(value.shape)}: use to_local() or full_tensor(), or "
                    "divide the layer with fused_remat.parallel.tensor_parallel_plan"
                )

    def _refuse_to_accumulate(self, reason: str | None) -> None:
        """Raise RuntimeError if gradients were to be accumulated, and `reason` forbids it."""
        target = self._accumulate_into
        if target is not None and reason is not None and wants_grad(*self.parameters()):
            raise accumulate.refusal(target, reason)


_KEEPS_INPUT = "outside its segment, and keeps its input"
_FREES = "manages its parameters, and frees them before the next layer's backward"
_LEAF = (
    "; under DeepSpeed ZeRO-3, deepspeed.utils.set_z3_leaf_modules(model, [type(layer)]) before "
    "deepspeed.initialize makes it gather the layer as a whole"
)

TRACED = "the call is exported, transformed or traced"

#: Called with the layer and the reason when a call does not take the fused path; usually empty.
DECISIONS: list[Callable[[nn.Module, str], None]] = []

_warned: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()


def warn_once(layer: nn.Module, message: str, stacklevel: int = 6) -> None:
    """Warn of a fallback, once for each layer and reason."""
    seen = _warned.setdefault(layer, set())
    if message not in seen:
        hint = _LEAF if _is_gathered_in_parts(layer) else ""
        text = f"{type(layer).__name__} runs {message}{hint}"
        warnings.warn(text, FusedRematWarning, stacklevel=stacklevel)
        seen.add(message)


def _is_gathered_in_parts(layer: nn.Module) -> bool:
    """Whether ZeRO-3 gathers parameters by hooks on modules inside `layer`."""
    leaf = getattr(layer, "_z3_leaf", False)
    return not leaf and accumulate.sharded_by(layer) == "ZeRO-3"


def warn_compiled(layer: str, reason: str) -> None:
    """The same while compiling; what PyTorch's forward keeps is then the compiler's choice."""
    warnings.warn(
        f"{layer}, compiled, runs PyTorch's own forward and saves no memory: {reason}",
        FusedRematWarning,
        stacklevel=2,
    )


def warn_compiled_segment(layer: str) -> None:
    """While compiling: what stays and what goes is in the graph that the compiler has."""
    warnings.warn(
        f"{layer}, compiled, keeps its input: segments are eager mode's",
        FusedRematWarning,
        stacklevel=2,
    )


warn_compiled_segment._dynamo_marked_constant = True  # type: ignore[attr-defined]
warn_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]  # not traced, but called


def is_traced() -> bool:
    """Whether the call is exported, transformed or traced: PyTorch's own forward serves those."""
    return (
        torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def wants_grad(*values: Any) -> bool:
    """Whether autograd watches one of `values`."""
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )


Layer = TypeVar("Layer", bound="DropInLayer")


class DropInLayer(FusedLayer):
    """A layer of `torch.nn` whose forward is a block; mixed in before the stock class.

    A subclass has `_choose` and `_example`, and a `forward` that calls `_serve`.

    Attributes:
        stock: the class of `torch.nn` that it stands in for.
    """

    stock: ClassVar[type[nn.Module]]
    #: Pairs of masks that PyTorch wants of one dtype, as (name, index in forward), (name, index).
    _mask_pairs: ClassVar[tuple[tuple[tuple[str, int], tuple[str, int]], ...]] = ()
    #: What `_choose` says where PyTorch's own forward is what is wanted.
    _quiet: ClassVar[tuple[str, ...]] = ()
    #: The block's inputs, the first arguments of forward.
    _inputs: ClassVar[tuple[str, ...]] = ("input",)

    @classmethod
    def from_layer(
        cls: type[Layer],
        layer: nn.Module,
        policy: str | Policy = "full",
        backend: str = "auto",
        accumulate_into: str | None = None,
    ) -> Layer:
        """A fused layer with the submodules of `layer`: same parameters, mode and hooks.

        Raises: TypeError if `layer` is not of the stock class, or is of a subclass (whose
            behaviour would be lost).

        >>> from fused_remat import FusedRematLayer
        >>> stock = nn.TransformerEncoderLayer(64, 4)
        >>> fused = FusedRematLayer.from_layer(stock, policy="balanced")
        >>> fused.linear1.weight is stock.linear1.weight
        True
        """
        if type(layer) is not cls.stock and not isinstance(layer, cls):
            name = cls.stock.__name__
            wanted = f"an nn.{name}" if cls.stock.__module__.startswith("torch.") else f"a {name}"
            raise TypeError(f"from_layer takes {wanted}, got {type(layer).__name__}")
        new = cls.__new__(cls)
        new.__dict__ = {
            k: dict(v) if type(v) is dict else v.copy() if hasattr(v, "copy") else v
            for k, v in layer.__dict__.items()
        }
        new.policy = policy
        new.backend = backend
        new.accumulate_into = accumulate_into
        return new

    def _choose(self, *args: Any) -> LayerCall | str:
        """The block that serves a call of forward, or why none does."""
        raise NotImplementedError

    def _why_not(self, *args: Any) -> str | None:
        """Why this call of `forward` would not take the fused path, or None if it would."""
        if is_traced():
            return TRACED
        if self._division is None:
            call = self._choose(*args)
        else:
            inputs, dim = self._divided_inputs(args)
            call = self._choose_by(args, self._stand_ins(inputs, dim))
        return call if isinstance(call, str) else None

    def _serve(self, *args: Any) -> Tensor:
        """`forward(*args)`: the block, or PyTorch's own forward."""
        if self._division is not None:
            return self._serve_divided(*args)
        if is_traced():
            self._refuse_to_accumulate(TRACED)
            return super().forward(*args)  # type: ignore[no-any-return]
        call = self._choose(*args)
        if isinstance(call, LayerCall):
            if not torch.compiler.is_compiling():
                _warn_mismatch(self._mask_pairs, args)
            return self._fused(call)
        if torch.compiler.is_compiling():
            if call not in self._quiet and wants_grad(*args, *self.parameters()):
                warn_compiled(type(self).__name__, call)
            return super().forward(*args)  # type: ignore[no-any-return]
        self._refuse_dtensors(args)
        for observe in DECISIONS:
            observe(self, call)
        return self._quietly(call, *args) if call in self._quiet else self._fallback(call, *args)

    def _serve_divided(self, *args: Any) -> Tensor:
        """`_serve` of a layer that is divided among ranks."""
        if torch.compiler.is_compiling():
            from fused_remat.autograd import graph_break

            return graph_break.eagerly(self._serve_divided, *args)  # type: ignore[no-any-return]
        if is_traced():
            raise RuntimeError(f"fused_remat: a tensor-parallel layer cannot run: {TRACED}")
        inputs, dim = self._divided_inputs(args)
        return self._divided(functools.partial(self._choose_by, args), inputs, dim)

    def _divided_inputs(self, args: tuple[Any, ...]) -> tuple[dict[str, Any], int]:
        """The block's inputs by name, and the dimension that the tokens are in."""
        x, attn = args[0], getattr(self, "self_attn", None)
        if not isinstance(x, Tensor) or x.is_nested or x.dim() not in (2, 3):
            raise ValueError(f"expected a Tensor of 2 or 3 dimensions, got {_shown(x)}")
        dim = 0 if x.dim() == 2 or not getattr(attn, "batch_first", True) else 1
        return dict(zip(self._inputs, args, strict=False)), dim

    def _choose_by(self, args: tuple[Any, ...], inputs: Mapping[str, Any]) -> LayerCall | str:
        """`_choose(*args)` with `inputs` in the place of the first."""
        names = self._inputs
        return self._choose(*[inputs[name] for name in names], *args[len(names) :])

    def _quietly(self, reason: str, *args: Any) -> Tensor:
        """What serves a call that `_choose` gave one of `_quiet` for."""
        raise NotImplementedError

    def _unfused(self, *args: Any) -> Tensor:
        """PyTorch's forward through the submodules, also in eval."""
        with fallback.without_inference_kernels():
            return super().forward(*args)  # type: ignore[no-any-return]

    def _fallback(self, reason: str, *args: Any) -> Tensor:
        """The same, under checkpoint where gradients are wanted, and with a warning then."""
        if not wants_grad(*args, *self.parameters()):
            return self._unfused(*args)
        self._refuse_to_accumulate(reason)
        if self._policy == "none":
            out = self._unfused(*args)
            warn_once(self, f"PyTorch's own forward: {reason}", stacklevel=7)
        else:
            given = {f"argument {i}": value for i, value in enumerate(args)}
            out = checkpointed(self, lambda **given: self._unfused(*given.values()), given)
            warn_once(
                self, f"PyTorch's own forward under torch.utils.checkpoint: {reason}", stacklevel=7
            )
        return out


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return "a nested one" if value.is_nested else f"shape {tuple(value.shape)}"


def _warn_mismatch(
    pairs: tuple[tuple[tuple[str, int], tuple[str, int]], ...], args: tuple[Any, ...]
) -> None:
    for (name, i), (other, j) in pairs:
        mask, padding = args[i], args[j]
        if mask is not None and padding is not None and mask.dtype != padding.dtype:
            warnings.warn(
                f"Support for mismatched {other} ({padding.dtype}) and {name} "
                f"({mask.dtype}) is deprecated. Use same type for both instead.",
                stacklevel=6,
            )
