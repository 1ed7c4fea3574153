"""Language models of transformers whose loss is computed without the full logits.

A model's class is swapped as a layer's is: same object, same name. In a training call the stock
forward runs with a head whose logits are deferred (`huggingface.logits`): where the model's loss is
a cross-entropy, the head's product and the loss are `ops.linear_cross_entropy`, and the `logits` of
the output are None. Every other call, generation and evaluation among them, is transformers' own.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fused_remat.execution.observe import DECISIONS
from fused_remat.huggingface.logits import DeferredHead, DeferredLogits
from fused_remat.layers.converted import Replaced, class_of
from fused_remat.layers.eligibility import Reason
from fused_remat.layers.fused_layer import TRACED, is_traced
from fused_remat.layers.record import NOTES, record_of, warn, warn_compiled

_IDLE = Reason("the model does not train", quiet=True)
_UNREAD = "the call computes no loss from them"
_ADVICE = (
    "; pass labels, and set model.loss_function instead of computing a loss from outputs.logits "
    "(as Trainer's label_smoothing_factor does); run TRL's trainers in "
    "fused_remat.integrations.trl.fused_lm_head()"
)
_NO_LOGITS = (
    "returns logits=None where it trains: convert(model, loss=True) computes the loss without "
    "them; convert with loss=False if your training code reads outputs.logits"
)
_BYPASSED = (
    "is bypassed, and loss=True has no effect: a training step called layers of {} without it, and "
    "computes the loss itself. Call the model with labels; convert it before "
    "accelerator.prepare(model); run TRL's trainers in "
    "fused_remat.integrations.trl.fused_lm_head()"
)
_calls = threading.local()


class HuggingFaceHead(Replaced):
    """Mixed in before a model class of transformers by `head_class`."""

    loss_head: str = "lm_head"  # path of the head
    loss_backend: str = "auto"
    loss_grad_in_forward: bool = False  # as in `ops.linear_cross_entropy`

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {n: value for n, value in state.items() if n not in NOTES}

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward(*args, **kwargs)`, in training with a head whose logits are deferred."""
        compiling = torch.compiler.is_compiling()
        with contextlib.nullcontext() if compiling else loss_computed():
            reason = self._stock_reason(compiling)
            if reason is None:
                return self._run(compiling, args, kwargs)
            result = self.stock.forward(self, *args, **kwargs)
        for observe in DECISIONS:
            observe(self, reason.text)
        if not reason.quiet:
            record_of(self).note("plain", reason.text)
        return result

    def _stock_reason(self, compiling: bool) -> Reason | None:
        if not (self.training and torch.is_grad_enabled()):
            return _IDLE
        if is_traced():
            return TRACED
        failure = "" if compiling else record_of(self).failure
        return Reason(failure) if failure else None

    def _run(self, compiling: bool, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        path, before = self.loss_head, dict(self.__dict__)
        head = DeferredHead(
            self.get_submodule(path), path, self.loss_backend, self.loss_grad_in_forward
        )
        replica = _replica(self, path, head)
        result = _finished(self.stock.forward(replica, *args, **kwargs), head)
        reason = head.reason or ("" if head.losses else f"it does not call {path}")
        if head.is_idle and not (head.reason or head.losses):
            reason = _IDLE.text
        if compiling:
            if reason not in ("", _IDLE.text):
                warn_compiled(type(self).__name__, reason, "computes full logits")
            return result
        for name, value in replica.__dict__.items():  # what the forward has set
            if name != path.partition(".")[0] and before.get(name, _calls) is not value:
                self.__dict__[name] = value
        self._note(head, reason)
        return result

    def _note(self, head: DeferredHead, reason: str) -> None:
        """Note, and warn of, what a call did; `reason` is why it computed logits."""
        record = record_of(self)
        if not reason:
            warn(self, _NO_LOGITS, UserWarning)  # nothing is slower
            record.note("block")
            return
        for observe in DECISIONS:
            observe(self, reason)
        if reason == _IDLE.text:
            return
        size = f" ({head.nbytes / 2**20:.1f} MiB in float32)" if head.nbytes else ""
        advice = _ADVICE if reason == _UNREAD else ""
        warn(self, f"runs its own head and loss, with full logits{size}: {reason}{advice}")
        record.note("plain", reason)
        if head.losses:  # the logits were computed again after a loss
            record.failure = reason


def _replica(module: nn.Module, path: str, head: Any) -> Any:
    """Return a shallow copy of `module` whose submodule at `path` is `head`."""
    name, _, rest = path.partition(".")
    replica: Any = object.__new__(type(module))
    replica.__dict__.update(module.__dict__)
    inner: Any = module._modules[name]
    replica.__dict__[name] = _replica(inner, rest, head) if rest else head
    return replica


def _finished(output: Any, head: DeferredHead) -> Any:
    """Return the output of a forward, without logits or with computed ones."""
    if isinstance(output, DeferredLogits):
        is_read = head.losses and not output.is_computed()
        return None if is_read else output.logits(_UNREAD)
    if type(output) is tuple:
        return tuple([_finished(value, head) for value in output])
    if isinstance(output, Mapping):
        return type(output)(**{key: _finished(value, head) for key, value in output.items()})
    return output


@contextlib.contextmanager
def loss_computed() -> Iterator[None]:
    """Let this thread call the layers of a model inside without a warning that it is bypassed."""
    before, _calls.inside = getattr(_calls, "inside", False), True
    try:
        yield
    finally:
        _calls.inside = before


def warn_if_bypassed(model: HuggingFaceHead) -> None:
    """Warn if a layer of `model` that trains is not called by it."""
    if not getattr(_calls, "inside", False):
        warn(model, _BYPASSED.format(type(model).__name__))


def language_models(model: nn.Module) -> dict[nn.Module, str]:
    """Return the models of transformers in `model` that compute a loss, with paths of their heads.

    Models within them, such as the language model of one that sees images, are not among them.
    """
    found: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for module in model.modules():
        path = "" if module in inside else _head_path(module)
        if path:
            found[module] = path
            inside.update(module.modules())
    return found


def _head_path(model: Any) -> str:
    if isinstance(model, HuggingFaceHead):
        return model.loss_head
    kind: Any = type(model)
    if not _takes_labels(kind):
        return ""
    head = model.get_output_embeddings()
    return next((path for path, module in model.named_modules() if module is head), "")


@functools.cache
def _takes_labels(kind: type[nn.Module]) -> bool:
    names = [(base.__module__, base.__name__) for base in kind.__mro__]
    if ("transformers.modeling_utils", "PreTrainedModel") not in names:
        return False
    return "labels" in inspect.signature(kind.forward).parameters


def head_class(stock: type[nn.Module]) -> type[HuggingFaceHead]:
    """Return the class that replaces a model class of transformers."""
    forward = functools.wraps(stock.forward)(lambda self, *args, **kw: self._call(*args, **kw))
    return class_of(stock, HuggingFaceHead, _class_for=staticmethod(head_class), forward=forward)
