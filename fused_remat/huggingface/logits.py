"""Logits that are computed only if something other than a cross-entropy reads them.

In a training call a head returns `DeferredLogits`: hidden states, and the scale and soft-cap that
the model's own code applies afterwards. `F.cross_entropy` of them is `ops.linear_cross_entropy`.
Everything else calls the head and continues with its logits, so nothing has to be known about the
code of a model or of a loss.
"""

from __future__ import annotations

import contextlib
import math
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

from fused_remat.layers.eligibility import (
    Unsupported,
    is_readable,
    parameters_of,
    qualified,
    wants_grad,
)
from fused_remat.layers.fallback import attributes_as, flags_of
from fused_remat.layers.modules import active_module, read_linear
from fused_remat.layers.packed import Packed
from fused_remat.layers.tensor_parallel import VocabularyParallelLinear
from fused_remat.ops.activation import has_hooks
from fused_remat.ops.cross_entropy import linear_cross_entropy

#: Packages and classes whose linear layers compute each token apart and have no state.
_PACKAGES = ("peft", "bitsandbytes", "hqq")
_CLASSES = (
    nn.Linear, nn.Dropout, nn.Identity, nn.ModuleDict, nn.ModuleList, nn.ParameterDict,
    nn.ParameterList,
)  # fmt: skip
#: Least number of tokens, and number of logits on a CPU and elsewhere, in a call of such a head.
_TOKENS, _LOGITS = 256, (2**20, 2**27)
#: The weight and bias of a head, and its number of words.
Parts = tuple[Tensor | None, Tensor | None, int]


class DeferredHead:
    """The head of a model in one call.

    Attributes:
        losses: number of losses that were computed without logits.
        reason: why logits were computed; "" if they were not.
        nbytes: their bytes in float32.
        is_idle: whether the head was called without gradients, and so by itself.
    """

    def __init__(self, head: nn.Module, path: str, backend: str, grad_in_forward: bool) -> None:
        self._head, self._path = head, path
        self._options = {"backend": backend, "grad_in_forward": grad_in_forward}
        self.losses, self.reason, self.nbytes, self.is_idle = 0, "", 0, False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._head, name)

    def __call__(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:  # as nn.Linear names it
        is_idle = not wants_grad(input, *parameters_of(self._head).values())
        self.is_idle |= is_idle
        if is_idle or args or kwargs:
            return self._head(input, *args, **kwargs)
        try:
            parts = _parts(self._head, self._path, input)
        except Unsupported as reason:
            return self._logits(input, str(reason))
        return DeferredLogits(self, parts, input, lambda reason: self._logits(input, reason))

    def _logits(self, hidden: Tensor, reason: str) -> Tensor:
        logits: Tensor = self._head(hidden)
        self.reason, self.nbytes = self.reason or reason, self.nbytes + 4 * logits.numel()
        return logits

    def loss(self, logits: DeferredLogits, parts: Parts, target: Any, **options: Any) -> Any:
        """Return the cross-entropy; None where `F.cross_entropy` has to compute or refuse it."""
        hidden, known = logits.hidden, ("ignore_index", "reduction", "label_smoothing")
        if any(value is not None for name, value in options.items() if name not in known):
            return None
        fits = hidden.dim() == 2 and isinstance(target, Tensor) and target.dtype == torch.int64
        if self.reason or not fits or target.shape != hidden.shape[:1]:
            return None
        self.losses += 1
        options = {name: options[name] for name in known if name in options}
        weight, bias, _ = parts
        if weight is None:
            return self._loss_in_parts(logits, target, **options)
        options |= {**self._options, **logits.scaling()}
        options["grad_in_forward"] &= options.get("reduction") != "none"
        return linear_cross_entropy(hidden, weight, target, bias, **options)

    def _loss_in_parts(
        self, logits: DeferredLogits, target: Tensor, reduction: str = "mean", **options: Any
    ) -> Tensor:
        """Return the cross-entropy of a head that is called, again in backward, on some tokens."""
        head, scaling = self._head, logits.scaling()
        scale, cap, flags = scaling["logit_scale"], scaling["softcap"], flags_of(head)
        flags += [(p, "requires_grad", p.requires_grad) for p in head.parameters()]

        def loss_of(x: Tensor, labels: Tensor) -> Tensor:
            with attributes_as(flags):
                y = head(x)
            y = y.to(torch.promote_types(y.dtype, torch.float32))
            y = y * scale if scale != 1.0 else y
            y = cap * torch.tanh(y / cap) if cap else y
            return F.cross_entropy(y, labels, reduction="none", **options)

        count = max(_TOKENS, _LOGITS[not target.is_cpu] // logits.shape[-1])
        parts = zip(logits.hidden.split(count), target.split(count), strict=True)
        loss = torch.cat([checkpoint(loss_of, *part, use_reentrant=False) for part in parts])
        if reduction == "none":
            return loss
        total = loss.sum()
        ignored = options.get("ignore_index", -100)
        return total if reduction == "sum" else total / (target != ignored).sum()


def _parts(head: Any, path: str, hidden: Tensor) -> Parts:
    """Return the weight and bias of a head, and its number of words.

    The weight is None where the head has to be called, on some tokens at a time. Raises
    `Unsupported` for a head that has to be called on all tokens.
    """
    if type(head) is VocabularyParallelLinear and not has_hooks(head):
        return head.weight, head.bias, len(head.weight)
    try:
        weight, bias, updates = read_linear(head, path)
        if isinstance(weight, Packed) or not is_readable(weight):
            raise Unsupported(f"{path}.weight is {qualified(type(weight))}")
        if weight.shape[1:] != hidden.shape[-1:]:
            raise Unsupported(f"{path}.weight has shape {tuple(weight.shape)}")
        if not updates:
            return weight, bias, len(weight)
        raise Unsupported(f"{path} has low-rank updates")
    except Unsupported:
        layer = active_module(head, path)
        size = getattr(layer, "out_features", None)
        known = all(map(_is_called_apart, layer.modules()))
        if torch.compiler.is_compiling() or not (known and isinstance(size, int)):
            raise
        return None, None, size


def _is_called_apart(module: nn.Module) -> bool:
    known = type(module) in _CLASSES or type(module).__module__.partition(".")[0] in _PACKAGES
    return known and not has_hooks(module) and "forward" not in vars(module)


class DeferredLogits:
    """Logits cap(logit_scale · head(hidden)), or what reads them. No Tensor, but used as one.

    Attributes:
        hidden: (..., D), with the leading dimensions of the logits.
        shape, dtype, device: of the logits.
    """

    def __init__(
        self, head: DeferredHead, parts: Parts, hidden: Tensor, compute: Callable[[str], Tensor]
    ) -> None:
        self.hidden, self._head, self._parts, self._compute = hidden, head, parts, compute
        self._autocast = enabled, low = _autocast(hidden)
        self.dtype = low if enabled else hidden.dtype
        self._scale, self._cap = 1.0, 0.0
        self._logits: Tensor | None = None

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self._parts[2]))

    @property
    def device(self) -> torch.device:
        return self.hidden.device

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.hidden.dim()

    ndim = property(dim)

    def scaling(self) -> dict[str, float]:
        """Return the options of `linear_cross_entropy` for what was done to the logits."""
        scale = self._scale * (self._cap or 1.0)
        exact = math.isclose(scale, 1.0, rel_tol=1e-15)  # a soft-cap divides, and multiplies
        return {"logit_scale": 1.0 if exact else scale, "softcap": self._cap}

    def logits(self, reason: str) -> Tensor:
        """Return the logits, computed at the first call."""
        if self._logits is None:
            with self._as_called(), torch.enable_grad():
                self._logits = self._compute(reason)
        return self._logits

    def is_computed(self) -> bool:
        """Return whether the logits were computed."""
        return self._logits is not None

    def _as_called(self) -> Any:
        """Return autocast as it was when the head was called.

        Raises: TypeError in an autograd.Function, whose gradient would not reach the logits.
        """
        traced = torch.compiler.is_compiling()
        if not (traced or torch.is_grad_enabled()) and _is_in_function():
            raise TypeError(
                "loss=True: an autograd.Function (a kernel for the loss, or reentrant "
                "checkpointing of it) reads logits, to which it would pass no gradient; compute "
                "the loss by F.cross_entropy, or convert(model, loss=False)"
            )
        if _autocast(self.hidden) == self._autocast:
            return contextlib.nullcontext()
        enabled, low = self._autocast
        return torch.autocast(self.device.type, low, enabled)

    def _then(self, name: str, *args: Any, hidden: Tensor | None = None) -> DeferredLogits:
        """Return the result of a method, whose logits have these hidden states."""

        def compute(reason: str) -> Tensor:
            result: Tensor = getattr(self.logits(reason), name)(*args)
            return result

        hidden = self.hidden if hidden is None else hidden
        new = DeferredLogits(self._head, self._parts, hidden, compute)
        new._autocast, new.dtype = self._autocast, self.dtype
        new._scale, new._cap = self._scale, self._cap
        return new

    def _method(self, name: str, *args: Any, **kwargs: Any) -> Any:
        logits = self.logits(f"its loss uses Tensor.{name}")
        return getattr(logits, name)(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.logits(f"its loss uses Tensor.{name}"), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first, *rest = args or (None,)
        if func is F.cross_entropy and isinstance(first, DeferredLogits) and len(rest) == 1:
            with first._as_called():
                loss = first._head.loss(first, first._parts, *rest, **kwargs or {})
            if loss is not None:
                return loss
        if func is torch.tanh and isinstance(first, DeferredLogits) and not kwargs:
            return first.tanh()
        reason = f"its loss uses {getattr(func, '__name__', func)}"
        args, kwargs = tree_map(
            lambda x: x.logits(reason) if isinstance(x, DeferredLogits) else x,
            (tuple(args), kwargs or {}),
        )
        return func(*args, **kwargs)

    # What a loss does to logits first.

    def _scaled(self, name: str, number: Any, power: int) -> Any:
        if type(number) not in (int, float) or not 0 < number < math.inf:
            return self._method(name, number)
        new = self._then(name, number)
        if self._cap:
            new._cap *= number**power
        else:
            new._scale *= number**power
        return new

    def __mul__(self, factor: Any) -> Any:
        return self._scaled("__mul__", factor, 1)

    def __truediv__(self, divisor: Any) -> Any:
        return self._scaled("__truediv__", divisor, -1)

    __rmul__ = __mul__

    def tanh(self) -> Any:
        if self._cap:
            return self._method("tanh")
        new = self._then("tanh")
        new._cap = 1.0
        return new

    def to(self, *args: Any, **kwargs: Any) -> Any:
        dtype = self.dtype
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.dtype) and value.is_floating_point:
                dtype = value
            elif value != self.device:
                return self._method("to", *args, **kwargs)
        new = self._then("to", dtype)
        new.dtype = dtype
        return new

    def float(self) -> Any:
        return self.to(torch.float32)

    def contiguous(self) -> DeferredLogits:
        return self._then("contiguous")

    def view(self, *shape: Any) -> Any:
        *leading, size = shape[0] if isinstance(shape[0], (tuple, list)) else shape
        count = math.prod(self.hidden.shape[:-1])
        known = size == self._parts[2] and -1 in leading
        if not known and (size not in (-1, self._parts[2]) or math.prod(leading) != count):
            return self._method("view", *shape)
        hidden = self.hidden.reshape(*leading, self.hidden.shape[-1])
        return self._then("reshape", *shape, hidden=hidden)

    reshape = view

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if end_dim % self.dim() == self.dim() - 1:
            return self._method("flatten", start_dim, end_dim)
        hidden = self.hidden.flatten(start_dim, end_dim)
        return self._then("flatten", start_dim, end_dim, hidden=hidden)

    def __getitem__(self, index: Any) -> Any:
        items = index if isinstance(index, tuple) and index else (index,)
        dims = [x.dim() if isinstance(x, Tensor) and x.dtype == torch.bool else 1 for x in items]
        from_the_end = any(item is Ellipsis for item in items[:-1])
        is_all = isinstance(items[-1], slice) and items[-1] == slice(None)
        if not is_all and (from_the_end or sum(dims) >= self.dim()):
            return self._method("__getitem__", index)
        return self._then("__getitem__", index, hidden=self.hidden[index])


def _is_in_function() -> bool:
    apply = torch.autograd.Function.apply.__func__.__code__  # type: ignore[attr-defined]
    return any(frame.f_code is apply for frame, _ in traceback.walk_stack(None))


def _autocast(x: Tensor) -> tuple[bool, torch.dtype]:
    kind = x.device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


#: Operators of tensors that compute logits.
_OPERATORS = """abs add and array bool contains eq float floordiv ge gt iadd imul index int invert
    isub iter itruediv le len lt matmul mod ne neg or pos pow radd rmatmul rpow rsub rtruediv
    setitem sub xor"""


def _computing(name: str) -> Any:
    return lambda self, *args: self._method(name, *args)


for _name in _OPERATORS.split():
    setattr(DeferredLogits, f"__{_name}__", _computing(f"__{_name}__"))
DeferredLogits.__hash__ = object.__hash__  # type: ignore[method-assign]
