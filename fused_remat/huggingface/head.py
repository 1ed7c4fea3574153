"""Language models of transformers whose loss is computed without the full logits.

A model's class is swapped as a layer's is: same object, same name. Where a call trains and has
labels, the head's product and the loss are `ops.linear_cross_entropy`, and the `logits` of the
output are None. Every other call, generation and evaluation among them, is transformers' own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fused_remat.execution.observe import DECISIONS
from fused_remat.layers.converted import Replaced, class_of
from fused_remat.layers.eligibility import (
    Reason,
    Unsupported,
    is_readable,
    parameters_of,
    qualified,
    wants_grad,
)
from fused_remat.layers.fused_layer import TRACED, is_traced
from fused_remat.layers.modules import read_linear
from fused_remat.layers.packed import Packed
from fused_remat.layers.record import NOTES, record_of, warn, warn_compiled
from fused_remat.layers.tensor_parallel import VocabularyParallelLinear
from fused_remat.ops.activation import has_hooks
from fused_remat.ops.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class Head:
    """Layout of a model class."""

    package: str  # module of the class, and its name
    model: str
    body: str = "model"  # body, head: names of submodules
    head: str = "lm_head"
    output: str = "CausalLMOutputWithPast"  # its class in `transformers.modeling_outputs`
    #: Fields of the body's output that are returned, in addition to `past_key_values`.
    fields: tuple[str, ...] = ("hidden_states", "attentions")
    softcap: str = ""  # attribute of the config with the soft-cap of the logits, if any


_MODELS = "transformers.models"
#: Each stands for all model classes of transformers whose forward has the same code.
HEADS = (
    Head(f"{_MODELS}.llama.modeling_llama", "LlamaForCausalLM"),
    Head(
        f"{_MODELS}.gemma2.modeling_gemma2", "Gemma2ForCausalLM", softcap="final_logit_softcapping"
    ),
    Head(
        f"{_MODELS}.gpt2.modeling_gpt2",
        "GPT2LMHeadModel",
        body="transformer",
        output="CausalLMOutputWithCrossAttentions",
        fields=("hidden_states", "attentions", "cross_attentions"),
    ),
)


@functools.cache
def head_layout(stock: Any) -> Head | None:
    """Return the entry of a model class; None without one.

    Most language models of transformers have a copy of another model's forward, so they are
    recognized by its code, without strings.
    """
    if not stock.__module__.startswith("transformers.models."):
        return None
    for layout in HEADS:
        if (layout.package, layout.model) == (stock.__module__, stock.__qualname__):
            return layout
    if not stock.__name__.endswith("ForCausalLM"):
        return None
    from transformers.models.gemma2.modeling_gemma2 import Gemma2ForCausalLM
    from transformers.models.llama.modeling_llama import LlamaForCausalLM

    for layout, reference in zip(HEADS, (LlamaForCausalLM, Gemma2ForCausalLM), strict=False):
        if _code(stock) == _code(reference):
            return layout
    return None


def _code(model: Any) -> tuple[Any, ...]:
    code = inspect.unwrap(model.forward).__code__
    numbers = tuple([value for value in code.co_consts if not isinstance(value, str)])
    return code.co_code, code.co_names, code.co_varnames, numbers


_IDLE = Reason("the model does not train", quiet=True)
_UNFIT = Reason("its arguments do not fit", quiet=True)  # so that the stock forward raises
_UNLABELLED = Reason("the call has no labels", quiet=True)
_NO_LOGITS = (
    "returns logits=None where it trains: convert(model, loss=True) computes the loss without "
    "them; convert with loss=False if your training code reads outputs.logits"
)


class HuggingFaceHead(Replaced):
    """Mixed in before a model class of transformers by `head_class`."""

    layout: ClassVar[Head]
    signature: ClassVar[inspect.Signature]  # of the stock forward

    loss_backend: str = "auto"
    loss_grad_in_forward: bool = False  # as in `ops.linear_cross_entropy`

    def __getstate__(self) -> dict[str, Any]:
        state: Any = super().__getstate__()
        return {n: value for n, value in state.items() if n not in NOTES}

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        """Run `forward(*args, **kwargs)`: with the fused loss, or transformers' own."""
        inputs, compiling = self._read(args, kwargs), torch.compiler.is_compiling()
        if not isinstance(inputs, Reason):
            result = self._with_fused_loss(*inputs)
            if not compiling:
                warn(self, _NO_LOGITS, UserWarning)  # nothing is slower
                record_of(self).note("block")
            return result
        for observe in DECISIONS:
            observe(self, inputs.text)
        if not inputs.quiet and compiling:
            warn_compiled(type(self).__name__, inputs.text)
        elif not inputs.quiet:
            warn(self, f"runs its own head and loss, with full logits: {inputs.text}")
        result = self.stock.forward(self, *args, **kwargs)
        if not compiling and inputs not in (_IDLE, TRACED):
            record_of(self).note("plain", inputs.text)
        return result

    def _read(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], Tensor, Tensor | None] | Reason:
        """Return the arguments, and the head's weight and bias; or why transformers' loss runs."""
        if not self.training or not wants_grad(*parameters_of(self).values()):
            return _IDLE
        if is_traced():
            return TRACED
        try:
            bound = self.signature.bind(self, *args, **kwargs).arguments
        except TypeError:
            return _UNFIT
        extra = bound.pop("kwargs", {})
        arguments = {**dict(list(bound.items())[1:]), **extra}
        if not isinstance(arguments.get("labels"), Tensor):
            return _UNLABELLED
        try:
            self._check(arguments)
            return arguments, *self._head()
        except Unsupported as reason:
            return Reason(str(reason))

    def _check(self, arguments: Mapping[str, Any]) -> None:
        """Raise `Unsupported` for a call or a loss that needs the full logits."""
        from transformers.loss.loss_utils import ForCausalLMLoss

        keeps = arguments.get("logits_to_keep", 0)
        if not isinstance(keeps, int) or keeps != 0:
            raise Unsupported("the call requests a part of the logits")
        if arguments.get("return_dict") is False or not getattr(self.config, "return_dict", True):
            raise Unsupported("the call requests a tuple")
        if arguments.get("shift_labels") is not None:
            raise Unsupported("the call passes shift_labels")
        if self.loss_function is not ForCausalLMLoss:
            name = getattr(self.loss_function, "__name__", type(self.loss_function).__name__)
            raise Unsupported(f"the loss function is {name}")

    def _head(self) -> tuple[Tensor, Tensor | None]:
        path = self.layout.head
        head: Any = self._modules.get(path)
        if type(head) is VocabularyParallelLinear and not has_hooks(head):
            return head.weight, head.bias
        weight, bias, updates = read_linear(head, path)
        if updates:
            raise Unsupported(f"{path} has low-rank updates")
        if isinstance(weight, Packed) or not is_readable(weight):
            raise Unsupported(f"{path}.weight is {qualified(type(weight))}")
        return weight, bias

    def _with_fused_loss(
        self, arguments: dict[str, Any], weight: Tensor, bias: Tensor | None
    ) -> Any:
        """Return the output of the stock forward, without logits."""
        from transformers import modeling_outputs

        labels = arguments.pop("labels")
        arguments.pop("logits_to_keep", None)
        body: Any = self._modules[self.layout.body]
        outputs = body(**arguments)
        hidden, count = outputs[0], arguments.get("num_items_in_batch")
        softcap = getattr(self.config, self.layout.softcap) if self.layout.softcap else None
        loss = linear_cross_entropy(
            hidden,
            weight,
            labels.to(hidden.device),
            bias,
            ignore_index=arguments.get("ignore_index", -100),
            softcap=float(softcap or 0.0),
            reduction="mean" if count is None else "sum",
            shift=True,
            grad_in_forward=self.loss_grad_in_forward,
            backend=self.loss_backend,
        )
        if count is not None:
            loss = loss / (count.to(loss.device) if isinstance(count, Tensor) else count)
        kind = getattr(modeling_outputs, self.layout.output)
        rest = {name: getattr(outputs, name, None) for name in self.layout.fields}
        return kind(loss=loss, past_key_values=outputs.past_key_values, **rest)


def head_class(stock: type[nn.Module]) -> type[HuggingFaceHead] | None:
    """Return the class that replaces a model class of transformers; None where there is none."""
    layout = None if issubclass(stock, HuggingFaceHead) else head_layout(stock)  # type: ignore[arg-type]
    if layout is None:
        return None
    signature = inspect.signature(stock.forward)
    forward = functools.wraps(stock.forward)(lambda self, *args, **kw: self._call(*args, **kw))
    more = {"layout": layout, "signature": signature, "forward": forward}
    return class_of(stock, HuggingFaceHead, _class_for=staticmethod(head_class), **more)
