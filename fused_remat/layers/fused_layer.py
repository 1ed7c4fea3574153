"""`FusedLayer`: a layer whose forward is a block. Its options, its one door, and its warnings."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fused_remat.autograd import accumulate, run_block
from fused_remat.autograd.shards import is_dtensor
from fused_remat.execution.choose import check_name
from fused_remat.graph.build import block_graph
from fused_remat.graph.graph import Graph
from fused_remat.graph.precision import mixed_precision
from fused_remat.layers import fallback
from fused_remat.layers.eligibility import Reason
from fused_remat.layers.read import LayerCall, LayerMap, read_block
from fused_remat.layers.tensor_parallel import TensorParallel, local_call
from fused_remat.policies import Policy, draws, kept_names
from fused_remat.spec import BlockSpec
from fused_remat.steps.operations import FusedRematWarning

Layer = TypeVar("Layer", bound="FusedLayer")

TRACED = Reason("the call is exported, transformed or traced", quiet=True)
#: Called with the layer and the reason when a call does not take the fused path; usually empty.
DECISIONS: list[Callable[[nn.Module, str], None]] = []


class FusedLayer(nn.Module):
    """A layer whose forward is a block. Mixed in before the class that it stands in for.

    A subclass has a `forward` that hands its arguments to `_call` by name, and says in `_map` how
    its class is laid out.

    Attributes:
        stock: the class that it stands in for.
    """

    stock: ClassVar[type[nn.Module]]
    #: Whose forward runs where the fused path does not, in warnings.
    _owner: ClassVar[str] = "PyTorch's"
    # Class attributes serve layers that were unpickled or re-classed from the stock one.
    _policy: str | Policy = "full"
    _backend: str = "auto"
    _accumulate_into: str | None = None
    #: How the layer is divided among ranks (`fused_remat.parallel`); None if it is not.
    _tensor_parallel: TensorParallel | None = None

    @property
    def policy(self) -> str | Policy:
        """What the layer keeps for backward; it may be set at any time, for later calls."""
        return self._policy

    @policy.setter
    def policy(self, policy: str | Policy) -> None:
        kept_names(policy, self._example())
        self._policy = policy

    @property
    def backend(self) -> str:
        """What computes the layer: "auto" or a registered name."""
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

    def _set_options(self, policy: str | Policy, backend: str, accumulate_into: str | None) -> None:
        self.policy, self.backend, self.accumulate_into = policy, backend, accumulate_into

    def extra_repr(self) -> str:
        shown = f"policy={self._policy!r}, backend={self._backend!r}"
        target = self._accumulate_into
        return shown if target is None else f"{shown}, accumulate_into={target!r}"

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
        new._set_options(policy, backend, accumulate_into)
        return new

    # What a class of layers says of itself.

    @property
    def _map(self) -> LayerMap:
        """Where the layer has the parts of its block."""
        raise NotImplementedError

    def _example_spec(self) -> BlockSpec:
        """A spec whose graph has the kind and the names of the layer's."""
        raise NotImplementedError

    def _heads(self) -> dict[str, int]:
        """How many heads the attentions have, by what they are called."""
        raise NotImplementedError

    def _tokens_dim(self, x: Tensor) -> int:
        """The dimension of the input that has the tokens of a sequence."""
        return 1

    def _example(self) -> Graph:
        return block_graph(self._example_spec())

    # The door.

    def _call(self, **given: Any) -> Any:
        """`forward(**given)`: the block, or the stock forward where the fused path cannot serve."""
        compiling = torch.compiler.is_compiling()
        parallel = self._tensor_parallel
        if parallel is not None and compiling:
            from fused_remat.autograd import graph_break

            return graph_break.eagerly(self._call, **given)
        if is_traced():
            call: LayerCall | Reason = TRACED
        elif parallel is None:
            call = self._read(**given)
        else:
            call = self._read_on_rank(parallel, given)
        if isinstance(call, Reason):
            return self._fall_back(call, compiling, given)
        graph, tensors, policy = block_graph(call.spec), call.tensors, self._policy
        if call.precision is not None:
            x: Any = tensors["input"]
            tensors = {**tensors, "input": x.to(call.precision.stream)}
            if call.precision.compute is not None:
                graph = mixed_precision(graph, call.precision.compute)
        if not isinstance(policy, str) and policy.segment is not None:
            policy = self._policy_of_segment(policy, compiling)
        accumulation = None
        if self._accumulate_into is not None:
            accumulation = self._accumulation(graph, compiling)
        if call.warnings and not compiling:
            for text in call.warnings:
                warnings.warn(text, stacklevel=user_stacklevel())
        out = run_block(
            graph,
            policy,
            tensors,
            backend=self._backend,
            seq_first=call.seq_first,
            preserve_strides=call.spec.branches[-1].placement != "post",
            functions=call.functions,
            accumulation=accumulation,
            tell=self._warn_of_kept_input,
        )
        if call.unbatched:
            out = out.squeeze(0)
        if parallel is not None and parallel.joins:
            out = parallel.joined(out, self._tokens_dim(out))
        return out

    def _read(self, **given: Any) -> LayerCall | Reason:
        """The block of a call, or why the fused path cannot serve it."""
        return read_block(self, self._map, given)

    def _read_on_rank(
        self, parallel: TensorParallel, given: Mapping[str, Any]
    ) -> LayerCall | Reason:
        """This rank's part of a call, whose input is replaced by this rank's tokens.

        Raises: ValueError, RuntimeError for an input that cannot be divided, or is a DTensor.
        """
        kind, name = type(self).__name__, self._map.input
        for value in given.values():
            if is_dtensor(value):
                raise RuntimeError(
                    f"fused_remat: a tensor-parallel {kind} takes this rank's local tensor, got a "
                    f"DTensor of shape {tuple(value.shape)}; set use_local_output=True in the plan "
                    "of the module that makes it"
                )
        x = given[name]
        if not isinstance(x, Tensor) or x.is_nested or x.dim() not in (2, 3):
            raise ValueError(
                f"{name} must be a tensor of 2 or 3 dimensions, got {type(x).__name__}"
            )
        dim = self._tokens_dim(x)
        x = parallel.entered(x, dim)
        call = self._read(**{**given, name: parallel.whole(x, dim)})
        if isinstance(call, Reason):
            return call
        if self._accumulate_into is not None:
            return Reason("accumulate_into is set, and gradients are DTensors")
        local = x.unsqueeze(0) if call.unbatched else x
        return local_call(call, local, parallel.place, draws(self._policy))

    def _why_not(self, **given: Any) -> str | None:
        """Why a call would not take the fused path, or None if it would."""
        parallel, name = self._tensor_parallel, self._map.input
        if parallel is not None and not parallel.splits and isinstance(given.get(name), Tensor):
            x = given[name]
            given = {**given, name: parallel.whole(x, self._tokens_dim(x))}
        call = TRACED if is_traced() else self._read(**given)
        return call.text if isinstance(call, Reason) else None

    # Where the fused path cannot serve.

    def _fall_back(self, reason: Reason, compiling: bool, given: Mapping[str, Any]) -> Any:
        """The stock forward; under checkpoint, and with a warning, where gradients are wanted."""
        if self._tensor_parallel is not None:
            raise RuntimeError(
                f"fused_remat: a tensor-parallel {type(self).__name__} cannot run PyTorch's own "
                f"forward, which does not know its shards: {reason.text}"
            )
        if reason is TRACED or (compiling and reason.quiet):
            self._refuse_to_accumulate(TRACED.text)
            return self.stock.forward(self, **given)
        wanted = not reason.quiet and wants_grad(*given.values(), *self.parameters())
        if wanted:
            self._refuse_to_accumulate(reason.text)
        if compiling:
            if wanted:
                warn_compiled(type(self).__name__, reason.text)
            return self.stock.forward(self, **given)
        self._refuse_dtensors(given)
        for observe in DECISIONS:
            observe(self, reason.text)
        return self._checkpointed(reason, given) if wanted else self._stock_forward(**given)

    def _stock_forward(self, **given: Any) -> Any:
        """The stock forward through the submodules, in evaluation too."""
        with fallback.without_inference_kernels():
            return self.stock.forward(self, **given)

    def _checkpointed(self, reason: Reason, given: Mapping[str, Any]) -> Any:
        """The stock forward under checkpoint, unless the policy keeps everything."""
        own = f"runs {self._owner} own forward"
        if self._policy == "none":
            out = self._stock_forward(**given)
            warn(self, f"{own}: {reason.text}")
        else:
            out = fallback.checkpointed(self, self._stock_forward, given)
            warn(self, f"{own} under torch.utils.checkpoint: {reason.text}")
        return out

    def _refuse_dtensors(self, given: Mapping[str, Any]) -> None:
        """Raise RuntimeError if a DTensor meets plain parameters: PyTorch would, less clearly."""
        for name, value in given.items():
            if is_dtensor(value) and not any(map(is_dtensor, self.parameters())):
                raise RuntimeError(
                    f"fused_remat: {name} is a DTensor of shape {tuple(value.shape)}, and this "
                    f"{type(self).__name__} is not divided over ranks; use to_local() or "
                    "full_tensor(), or divide the layer with "
                    "fused_remat.parallel.tensor_parallel_plan"
                )

    # Gradients that are accumulated, and segments.

    def _accumulation(self, graph: Graph, compiling: bool) -> accumulate.Accumulation:
        self._refuse_to_accumulate(
            "the call is compiled" if compiling else accumulate.why_not_engine(self)
        )
        names = frozenset([name for name in graph.params if "." in name])  # no mask has a dot
        return accumulate.Accumulation(str(self._accumulate_into), names)

    def _refuse_to_accumulate(self, reason: str | None) -> None:
        """Raise RuntimeError if gradients were to be accumulated, and `reason` forbids it."""
        target = self._accumulate_into
        if target is not None and reason is not None and wants_grad(*self.parameters()):
            raise accumulate.refusal(target, reason)

    def _policy_of_segment(self, policy: Policy, compiling: bool) -> Policy:
        """`policy`, without its segment where the layers before may be gone in backward."""
        if compiling:
            if policy.segment == "inner":
                warn_compiled_segment(type(self).__name__)
            return Policy(offload=policy.offload)
        sharded_by = accumulate.sharded_by(self)
        if sharded_by is None:
            return policy
        if policy.segment == "inner":
            self._warn_of_kept_input(
                f"{sharded_by} manages its parameters, and frees them before the next layer's "
                "backward"
            )
        return Policy(offload=policy.offload)

    def _warn_of_kept_input(self, reason: str) -> None:
        warn(self, f"runs outside its segment, and keeps its input: {reason}")


_warned: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
_LEAF = (
    "; under DeepSpeed ZeRO-3, deepspeed.utils.set_z3_leaf_modules(model, [type(layer)]) before "
    "deepspeed.initialize makes it gather the layer as a whole"
)


def warn(layer: nn.Module, message: str) -> None:
    """Warn, at the user's line, that `layer` does `message`; once for each layer and message."""
    seen = _warned.setdefault(layer, set())
    if message in seen:
        return
    # ZeRO-3 gathers by hooks on the modules inside a layer, unless that is a leaf module.
    is_leaf = getattr(layer, "_z3_leaf", False)
    hint = _LEAF if not is_leaf and accumulate.sharded_by(layer) == "ZeRO-3" else ""
    text = f"fused_remat: {type(layer).__name__} {message}{hint}"
    warnings.warn(text, FusedRematWarning, stacklevel=user_stacklevel())
    seen.add(message)


def user_stacklevel() -> int:
    """The `stacklevel` for the caller's warning of the nearest frame that is the user's.

    Frames of this package and of torch are skipped, however many they are.
    """
    frame: FrameType | None = sys._getframe(1)
    level = 1
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("fused_remat", "torch"):
            return level
        frame, level = frame.f_back, level + 1
    return level


def warn_compiled(layer: str, reason: str) -> None:
    """Warn while compiling. What PyTorch's forward keeps is then the compiler's choice."""
    warnings.warn(
        f"fused_remat: {layer}, compiled, runs PyTorch's own forward and saves no memory: {reason}",
        FusedRematWarning,
        stacklevel=2,
    )


def warn_compiled_segment(layer: str) -> None:
    """Warn while compiling that a layer inside a segment keeps its input."""
    warnings.warn(
        f"fused_remat: {layer}, compiled, keeps its input: segments work in eager mode only",
        FusedRematWarning,
        stacklevel=2,
    )


# Not traced by the compiler, but called.
warn_compiled_segment._dynamo_marked_constant = True  # type: ignore[attr-defined]
warn_compiled._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_traced() -> bool:
    """Whether the call is exported, transformed or traced: the stock forward serves those."""
    return (
        torch.compiler.is_exporting()
        or torch._C._are_functorch_transforms_active()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def wants_grad(*values: Any) -> bool:
    """Whether grad mode is on and one of `values` is a tensor that requires a gradient."""
    return torch.is_grad_enabled() and any(
        isinstance(value, Tensor) and value.requires_grad for value in values
    )
