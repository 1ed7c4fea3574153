"""A model of transformers with random weights, and its data: what a model's step is measured on."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import case
from bench.measure.case import DTYPES, graph_of, perturb
from bench.measure.registry import Absent
from bench.subjects.configs import MODELS, Published, tiny

Inputs = dict[str, Tensor]
Around = Callable[[], AbstractContextManager[None]]

#: Of the tokens, how many a masked language model has to tell: as in Devlin et al. 2018.
_MASKED = 0.15
#: A parameter, its gradient and AdamW's two moments.
_COPIES = 4


@dataclass(frozen=True)
class Case(case.Case):
    """A model and the size of its step.

    lora: the rank of adapters on every linear of the layers, whose base weights are frozen; 0:
    every parameter is trained.
    """

    model: str  # a key of `MODELS`
    layers: int  # of the model's; all the rest is at its full width
    batch: int
    seq_len: int
    dtype: str  # of parameters and activations, a key of `DTYPES`
    lora: int = 0
    tiny: bool = False  # in sizes that show nothing but whether it runs

    def __post_init__(self) -> None:
        if min(self.layers, self.batch, self.seq_len) < 1 or self.lora < 0:
            raise ValueError(f"sizes must be positive, the rank at least 0: {self}")
        layers = self.published.layers
        if self.layers > layers:
            raise ValueError(f"{self.model} has {layers} layers, got {self.layers}")

    @property
    def published(self) -> Published:
        return tiny(MODELS[self.model]) if self.tiny else MODELS[self.model]

    def subject(self, device: torch.device | str, published: Published | None = None) -> Subject:
        """Return the model with random weights, of another configuration if one is given."""
        published = published or self.published
        self.seed()
        model = build(published, self.layers, DTYPES[self.dtype], device, self.lora)
        subject = Subject(model, {}, case=self, published=published)
        subject.x = subject.inputs(self.batch)
        return subject


def build(
    published: Published, layers: int, dtype: torch.dtype, device: torch.device | str, lora: int
) -> nn.Module:
    """Return a model of transformers in training mode, with adapters if a rank is given."""
    try:
        import transformers
    except ImportError as error:
        raise Absent("transformers is not installed") from error
    values = published.values | {"num_hidden_layers": layers}
    config = getattr(transformers, published.config)(**values)
    config.use_cache = False
    with torch.device(device):
        model = getattr(transformers, published.task)._from_config(config, dtype=dtype)
        model = adapted(model, lora) if lora else model
        perturb(model)
    return model.train()


def adapted(model: nn.Module, rank: int) -> nn.Module:
    """With PEFT's adapters on every linear of the layers; both of their matrices are random.

    As they begin, one of them zero, the other's gradient would be zero, and show nothing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise Absent("peft is not installed") from error
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of names in transformers that PEFT uses
        return get_peft_model(model, config)


@dataclass(frozen=True)
class Loss:
    """A loss whose backward runs in what its forward ran in: a checkpoint's replay reads it too."""

    value: Tensor
    around: Around

    def backward(self, dy: None = None) -> None:
        with self.around():
            self.value.backward(dy)

    def detach(self) -> Tensor:
        return self.value.detach()


@dataclass(frozen=True)
class Forward:
    """A model that computes its own loss, from its inputs."""

    model: nn.Module  # of the way's own, on the subject's parameters
    around: Around = contextlib.nullcontext  # what forward and backward run in

    def __call__(self, x: Inputs) -> Loss:
        with self.around():
            return Loss(self.model(**x).loss, self.around)

    def below_head(self, x: Inputs) -> Any:
        """Return the autograd node of the head's input, which holds all that is kept up to it."""
        adapted = getattr(self.model, "get_base_model", None)
        model: Any = self.model if adapted is None else adapted()
        given = {name: t for name, t in x.items() if name != "labels"}
        with self.around():
            return graph_of(model.base_model(**given).last_hidden_state)


@dataclass
class Subject(case.Subject):
    """A model, its inputs by name, and where more of them come from."""

    stock: Callable[[nn.Module], Forward] = Forward
    case: Case = field(kw_only=True)
    published: Published = field(kw_only=True)
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def inputs(self, batch: int) -> Inputs:
        """Return fresh random tokens, with their own labels."""
        config, shape = self.published.values, (batch, self.case.seq_len)
        tokens = self._integers(config["vocab_size"], shape)
        if self.published.task.endswith("ForCausalLM"):
            return {"input_ids": tokens, "labels": tokens.clone()}
        hidden = torch.rand(shape, generator=self.generator).to(self.device) < _MASKED
        hidden[:, 0] = True  # somewhere, however short
        return {"input_ids": tokens, "labels": tokens.masked_fill(~hidden, -100)}

    def _integers(self, below: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def shared(self) -> Any:
        """Return a copy of the modules on the same parameters and buffers, for one way."""
        same = {id(t): t for t in (*self.module.parameters(), *self.module.buffers())}
        return copy.deepcopy(self.module, same)


def fixed_bytes(model: nn.Module) -> int:
    """Parameters, gradients of those that are trained, and AdamW's two moments of them."""
    every = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return every + (_COPIES - 1) * trained
