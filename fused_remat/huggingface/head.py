"""Language models of transformers whose loss is computed without whole logits.

A model class is swapped as a layer's is: same object, same name. Where a call trains and has
labels, the head's product and the loss are `ops.cross_entropy`, and `logits` of what is
returned is None; every other call, generation and evaluation among them, is transformers' own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fused_remat.layers.fused_layer import (
    DECISIONS,
    TRACED,
    is_traced,
    wants_grad,
    warn_compiled,
    warn_once,
)
from fused_remat.layers.linears import LinearParts, read_linear
from fused_remat.layers.tensor_parallel import VocabularyParallelLinear
from fused_remat.ops.activation import has_hooks
from fused_remat.ops.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Head:
    """A model class: where its body and its head are, and what it returns.

    Attributes:
        package, model: the module and the name of the class.
        body, head: names of submodules.
        output: the class in `transformers.modeling_outputs` that it returns.
        fields: of the body's output, handed on besides `past_key_values`.
        softcap: the attribute of the config that has the logits', "" for none.
    """

    package: str
    model: str
    body: str = "model"
    head: str = "lm_head"
    output: str = "CausalLMOutputWithPast"
    fields: tuple[str, ...] = ("hidden_states", "attentions")
    softcap: str = ""


def _row(name: str, model: str = "", **differences: Any) -> Head:
    package = f"transformers.models.{name}.modeling_{name}"
    return Head(package, model, **differences)


#: By the module and the name of the model's class.
HEADS: dict[tuple[str, str], Head] = {
    (row.package, row.model): row
    for row in (
        _row("llama", "LlamaForCausalLM"),
        _row("mistral", "MistralForCausalLM"),
        _row("qwen2", "Qwen2ForCausalLM"),
        _row("qwen3", "Qwen3ForCausalLM"),
        _row("smollm3", "SmolLM3ForCausalLM"),
        _row("gemma2", "Gemma2ForCausalLM", softcap="final_logit_softcapping"),
        _row("gemma3", "Gemma3ForCausalLM", softcap="final_logit_softcapping"),
        _row(
            "gpt2",
            "GPT2LMHeadModel",
            body="transformer",
            output="CausalLMOutputWithCrossAttentions",
            fields=("hidden_states", "attentions", "cross_attentions"),
        ),
    )
}

_IDLE = "the model does not train"
_UNFIT = "its arguments do not fit"  # of which the stock forward complains
_UNLABELLED = "it has no labels"
#: Why a call has nothing that the fused loss could have saved it.
_QUIET = (_IDLE, TRACED, _UNFIT, _UNLABELLED)


class HuggingFaceHead(nn.Module):
    """Mixed in before a model class of transformers by `head_class`.

    Attributes:
        stock: the class of transformers that it stands in for.
        row: its row.
        signature: of the stock forward.
    """

    stock: ClassVar[type[nn.Module]]
    row: ClassVar[Head]
    signature: ClassVar[inspect.Signature]

    loss_backend: str = "auto"

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced = super().__reduce_ex__(protocol)
        if FUSED_HEADS.get(type(self).__dict__.get("stock")) is not type(self):  # type: ignore[arg-type]
            return reduced
        # By its stock class: this one's name is that of the stock one.
        return (_new, (self.stock,), *reduced[2:])

    def _serve(self, *args: Any, **kwargs: Any) -> Any:
        reason = self._why_not(args, kwargs)
        if reason is None:
            return self._fused(args, kwargs)
        for observe in DECISIONS:
            observe(self, reason)
        if reason not in _QUIET:
            self._warn(reason)
        return self.stock.forward(self, *args, **kwargs)

    def _warn(self, reason: str) -> None:
        if torch.compiler.is_compiling():
            warn_compiled(type(self).__name__, reason)
        else:
            warn_once(self, f"its own head and loss, with whole logits: {reason}", stacklevel=7)

    def _named(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments by name, those of **kwargs among them."""
        bound = self.signature.bind(self, *args, **kwargs).arguments
        extra = bound.pop("kwargs", {})
        return {**dict(list(bound.items())[1:]), **extra}

    def _why_not(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Why transformers' own loss serves a call, or None."""
        if not self.training or not wants_grad(*self.parameters()):
            return _IDLE
        if is_traced():
            return TRACED
        try:
            given = self._named(args, kwargs)
        except TypeError:
            return _UNFIT
        if not isinstance(given.get("labels"), Tensor):
            return _UNLABELLED
        keeps = given.get("logits_to_keep", 0)
        if not isinstance(keeps, int) or keeps != 0:
            return "it is asked for a part of the logits"
        if given.get("return_dict") is False or not getattr(self.config, "return_dict", True):
            return "it is asked for a tuple"
        if given.get("shift_labels") is not None:
            return "it has shift_labels"
        return self._why_not_loss() or _why_not_head(self._modules.get(self.row.head))

    def _why_not_loss(self) -> str | None:
        from transformers.loss.loss_utils import ForCausalLMLoss

        loss = self.loss_function
        name = getattr(loss, "__name__", type(loss).__name__)
        return None if loss is ForCausalLMLoss else f"its loss is {name}"

    def _fused(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        from transformers import modeling_outputs

        given = self._named(args, kwargs)
        labels = given.pop("labels")
        given.pop("logits_to_keep", None)
        body: Any = self._modules[self.row.body]
        outputs = body(**given)
        loss = self._loss(outputs[0], labels, given)
        made = getattr(modeling_outputs, self.row.output)
        rest = {name: getattr(outputs, name, None) for name in self.row.fields}
        return made(loss=loss, past_key_values=outputs.past_key_values, **rest)

    def _loss(self, hidden: Tensor, labels: Tensor, given: Mapping[str, Any]) -> Tensor:
        """transformers' ForCausalLMLoss of the head's logits."""
        parts = _parts(self._modules[self.row.head])
        assert isinstance(parts, LinearParts)
        count = given.get("num_items_in_batch")
        softcap = getattr(self.config, self.row.softcap) if self.row.softcap else None
        loss = linear_cross_entropy(
            hidden,
            parts.weight,
            labels.to(hidden.device),
            parts.bias,
            ignore_index=given.get("ignore_index", -100),
            softcap=float(softcap or 0.0),
            reduction="mean" if count is None else "sum",
            shift=True,
            backend=self.loss_backend,
        )
        if count is None:
            return loss
        return loss / (count.to(loss.device) if isinstance(count, Tensor) else count)


def _parts(head: Any) -> LinearParts | str:
    if type(head) is VocabularyParallelLinear and not has_hooks(head):
        return LinearParts(head.weight, head.bias)
    return read_linear(head)


def _why_not_head(head: Any) -> str | None:
    parts = _parts(head)
    if isinstance(parts, str):
        return f"its head {parts}"
    return "its head has low-rank updates" if parts.updates else None


#: By the stock class.
FUSED_HEADS: dict[type[nn.Module], type[HuggingFaceHead]] = {}


def head_class(stock: type[nn.Module]) -> type[HuggingFaceHead] | None:
    """The class that stands in for a model class of transformers, one object each; None for others.

    >>> head_class(nn.Linear) is None
    True
    """
    row = HEADS.get((stock.__module__, stock.__qualname__))
    if row is None or issubclass(stock, HuggingFaceHead):
        return None
    if stock not in FUSED_HEADS:
        namespace = {
            "__module__": stock.__module__,
            "__qualname__": stock.__qualname__,
            "__doc__": stock.__doc__,
            "stock": stock,
            "row": row,
            "signature": inspect.signature(stock.forward),
            "forward": _forward(stock),
        }
        made = type(stock.__name__, (HuggingFaceHead, stock), namespace)
        return FUSED_HEADS.setdefault(stock, made)  # of two threads, the first one's
    return FUSED_HEADS[stock]


def supported_heads() -> str:
    """The model classes that there are, as messages list them.

    >>> "LlamaForCausalLM" in supported_heads()
    True
    """
    return ", ".join(row.model for row in HEADS.values())


def _forward(stock: type[nn.Module]) -> Callable[..., Any]:
    @functools.wraps(stock.forward)
    def forward(self: HuggingFaceHead, *args: Any, **kwargs: Any) -> Any:
        return self._serve(*args, **kwargs)

    return forward


def _new(stock: type[nn.Module]) -> nn.Module:
    """An empty model of the class that stands in for `stock`; for unpickling."""
    cls = head_class(stock)
    assert cls is not None
    return cls.__new__(cls)
