"""The ways to train a Hugging Face model that are compared: decorated builders in a registry.

A way takes a subject and returns its forward; all share parameters and gradients.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from bench.measure.registry import Absent, Registry
from bench.subjects.models import Forward, Subject
from fused_remat import convert
from fused_remat.policies import EXACT_PRESETS

Build = Callable[[Subject], Forward]

#: In the order of the tables. Traits: `group`, by which ways are asked for; `compiled`, whether
#: it is for one batch alone, so that the largest cannot be searched for; and as of layers' ways,
#: where nobody has dropout of its own.
WAYS: Registry[Build] = Registry("model ways", group="stock", draws="stock", compiled=False)
BASELINE = "eager"
#: What is measured unless asked otherwise: compiling a whole model takes minutes.
DEFAULT = ("stock", "peers", "ours", "loss")
LOSS_PRESETS = ("full", "lean", "fast")


# --- Hugging Face's own


@WAYS.provider(BASELINE, baseline=True)
def eager(subject: Subject) -> Forward:
    return Forward(subject.shared())


def with_checkpoints(build: Build) -> Build:
    """Turn on transformers' gradient checkpointing of every layer, as its Trainer does."""

    def built(subject: Subject) -> Forward:
        forward = build(subject)
        model: Any = forward.model
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its new name is not in older versions
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if subject.case.lora:
            model.enable_input_require_grads()
        return forward

    return built


WAYS.provider("checkpoint", baseline=True)(with_checkpoints(eager))


# --- Liger


_peer = functools.partial(WAYS.provider, group="peers", module="liger_kernel", needs="cuda")


@_peer("liger")
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
    names = undone(module, lambda: patches[kind](model=stock))
    return Forward(model, functools.partial(mock.patch.multiple, module, **names))


def undone(module: ModuleType, change: Callable[[], Any]) -> dict[str, Any]:
    """Return the names of a module that a call changes, which are restored afterwards."""
    before, names = dict(vars(module)), {}
    try:
        change()
    finally:
        names |= {name: v for name, v in vars(module).items() if before.get(name) is not v}
        vars(module).update((name, before[name]) for name in names)
    return names


_peer("liger_checkpoint")(with_checkpoints(liger))


# --- ours


def _preset(subject: Subject, preset: str, loss: bool = False) -> Forward:
    if loss and not subject.published.task.endswith("ForCausalLM"):
        raise Absent("the fused loss is for causal language models")
    model = subject.shared()
    return Forward(convert(model, policy=preset, backend=subject.backend, loss=loss))


for _name in EXACT_PRESETS:
    WAYS.provider(_name, group="ours")(functools.partial(_preset, preset=_name))
for _name in LOSS_PRESETS:
    _build = functools.partial(_preset, preset=_name, loss=True)
    WAYS.provider(f"{_name}_loss", group="loss")(_build)


# --- compiled


@WAYS.provider("compile", group="compiled", compiled=True)
def compiled(subject: Subject) -> Forward:
    model = torch.compile(subject.shared(), backend=subject.compiler, dynamic=False)
    return Forward(model)  # type: ignore[arg-type]
