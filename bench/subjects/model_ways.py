"""The ways to train a Hugging Face model that are compared: decorated builders in a registry.

A way takes a subject and returns its forward. Each has modules of its own, all of them on the very
same parameters and gradients. A preset's name is the model converted at that policy; with "_loss"
the head and the loss are fused too.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from typing import Any

import torch

from bench.measure.admission import Absent
from bench.measure.registry import Registry
from bench.subjects.forwards import Forward, patched, unchanged
from bench.subjects.models import Subject
from fused_remat import convert
from fused_remat.policies import EXACT_PRESETS

Build = Callable[[Subject], Forward]

#: In the order of the tables. Traits: `group`, by which ways are asked for; `compiled`, whether
#: it is for one batch alone, so that the largest cannot be searched for.
WAYS: Registry[Build] = Registry("model ways")
BASELINE = "eager"
#: What is measured unless asked otherwise: compiling a whole model takes minutes.
DEFAULT = ("stock", "peers", "ours", "loss")
LOSS_PRESETS = ("full", "lean", "fast")


def _way(name: str, group: str, **rest: Any) -> Any:
    return WAYS.provider(name, group=group, **({"compiled": False} | rest))


# --- Hugging Face's own


@_way(BASELINE, "stock", baseline=True)
def eager(subject: Subject) -> Forward:
    """The model as transformers makes it, attention by PyTorch's own."""
    return Forward(subject.shared())


@_way("checkpoint", "stock", baseline=True)
def checkpointed(subject: Subject) -> Forward:
    """Gradient checkpointing of every layer, as transformers enables it by default."""
    return with_checkpoints(Forward(subject.shared()), subject, reentrant=False)


@_way("checkpoint_reentrant", "stock")
def checkpointed_reentrant(subject: Subject) -> Forward:
    """The older kind."""
    return with_checkpoints(Forward(subject.shared()), subject, reentrant=True)


def with_checkpoints(forward: Forward, subject: Subject, reentrant: bool) -> Forward:
    """With transformers' gradient checkpointing on.

    Where the embeddings are frozen their output is made to want a gradient, as PEFT does it: the
    older kind would otherwise give the layers none.
    """
    model: Any = forward.model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in older versions
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if subject.case.lora:
        model.enable_input_require_grads()
    return forward


# --- Liger


@_way("liger", "peers", module="liger_kernel", needs="cuda")
def liger(subject: Subject) -> Forward:
    """Liger's kernels, its fused head and loss included.

    Its patch also replaces names in transformers' module, for good: here, while the way runs.
    """
    from liger_kernel.transformers import monkey_patch

    model: Any = subject.shared()
    stock = model.get_base_model() if subject.case.lora else model
    kind = stock.config.model_type
    patches = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN
    if kind not in patches:
        raise Absent(f"has no kernels for {kind}")
    module = importlib.import_module(type(stock).__module__)
    with unchanged(module) as names:
        patches[kind](model=stock)
    return Forward(model, functools.partial(patched, module, names))


@_way("liger_checkpoint", "peers", module="liger_kernel", needs="cuda")
def liger_checkpointed(subject: Subject) -> Forward:
    """Both."""
    return with_checkpoints(liger(subject), subject, reentrant=False)


# --- ours


def _preset(subject: Subject, preset: str, **rest: Any) -> Forward:
    return Forward(convert(subject.shared(), policy=preset, backend=subject.backend, **rest))


def _preset_with_loss(subject: Subject, preset: str) -> Forward:
    if not subject.published.task.endswith("ForCausalLM"):
        raise Absent("the fused loss is for causal language models")
    return _preset(subject, preset, loss=True)


for _name in EXACT_PRESETS:
    _way(_name, "ours")(functools.partial(_preset, preset=_name))
for _name in LOSS_PRESETS:
    _way(f"{_name}_loss", "loss")(functools.partial(_preset_with_loss, preset=_name))


# --- compiled


@_way("compile", "compiled", compiled=True)
def compiled(subject: Subject) -> Forward:
    """`torch.compile` of the whole model, static shapes."""
    model = torch.compile(subject.shared(), backend=subject.compiler, dynamic=False)
    return Forward(model)  # type: ignore[arg-type]
