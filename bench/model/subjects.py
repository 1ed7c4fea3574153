"""What a model's training step is measured on: the model with random weights, and its data."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from bench.layers.subjects import DTYPES, perturb
from bench.measure.registry import Absent
from bench.model.configs import MODELS, Published, tiny

Inputs = dict[str, Tensor]

#: Of the tokens, how many a masked language model has to tell: as in Devlin et al. 2018.
_MASKED = 0.15
#: A parameter, its gradient and AdamW's two moments.
_COPIES = 4
#: Of the memory that is there: the rest is for activations, for checks, and for other programs.
_SHARE = 0.5


@dataclass(frozen=True)
class Case:
    """A model and the size of its step.

    Attributes:
        model: a key of `MODELS`.
        layers: of the model's; all the rest is at its full width.
        dtype: of parameters and activations, a key of `DTYPES`.
        lora: the rank of adapters on every linear of the layers, whose base weights are frozen;
            0: every parameter is trained.
        tiny: in sizes that show nothing but whether it runs.

    Raises: ValueError for what is not among those, or does not fit the model.
    """

    model: str
    layers: int
    batch: int
    seq_len: int
    dtype: str
    lora: int = 0
    tiny: bool = False

    def __post_init__(self) -> None:
        for name, values in {"model": MODELS, "dtype": DTYPES}.items():
            if getattr(self, name) not in values:
                valid = ", ".join(values)
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; valid: {valid}")
        if min(self.layers, self.batch, self.seq_len) < 1 or self.lora < 0:
            raise ValueError(f"sizes must be positive, the rank at least 0: {self}")
        published = self.published
        if self.layers > published.layers:
            raise ValueError(f"{self.model} has {published.layers} layers, got {self.layers}")
        if self.seq_len > published.longest:
            raise ValueError(
                f"{self.model} takes {published.longest} tokens at most, got {self.seq_len}"
            )

    @property
    def published(self) -> Published:
        """The model's configuration."""
        return tiny(MODELS[self.model]) if self.tiny else MODELS[self.model]

    def subject(self, device: torch.device | str, published: Published | None = None) -> Subject:
        """The model with random weights, biases and norms included; of another configuration if
        one is given."""
        published = published or self.published
        torch.manual_seed(zlib.crc32(repr(self).encode()))
        model = build(published, self.layers, DTYPES[self.dtype], device, self.lora)
        subject = Subject(self, published, Sample(model, {}), torch.device(device))
        subject.sample.x = subject.inputs(self.batch)
        subject.sample.zero()
        return subject


def build(
    published: Published, layers: int, dtype: torch.dtype, device: torch.device | str, lora: int
) -> nn.Module:
    """A model of transformers in training mode, with adapters if a rank is given.

    Its cache of keys and values is off, as transformers' Trainer has it.

    Raises: Absent without transformers, or without peft where adapters are asked for.
    """
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


@dataclass
class Sample:
    """A model and what its step is given.

    Attributes:
        dy: of the loss; None as in training.
    """

    model: nn.Module
    x: Inputs
    dy: None = None

    def leaves(self) -> dict[str, Tensor]:
        """The parameters that are trained."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def zero(self) -> None:
        """A gradient of zeros for every one of them."""
        for leaf in self.leaves().values():
            leaf.grad = torch.zeros_like(leaf)


@dataclass
class Subject:
    """A sample, where it is, and how a way is to compute it.

    Attributes:
        backend: of ours. compiler: `torch.compile`'s backend.
    """

    case: Case
    published: Published
    sample: Sample
    device: torch.device
    backend: str = "auto"
    compiler: str = "inductor"
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(7))

    def inputs(self, batch: int) -> Inputs:
        """Fresh random data: tokens with their own labels, or images with a class each."""
        config, shape = self.published.values, (batch, self.case.seq_len)
        if self.published.image_tokens:
            size = batch, config["num_channels"], config["image_size"], config["image_size"]
            images = torch.randn(size, generator=self.generator).to(DTYPES[self.case.dtype])
            labels = self._integers(config["num_labels"], (batch,))
            return {"pixel_values": images.to(self.device), "labels": labels}
        tokens = self._integers(config["vocab_size"], shape)
        if self.published.task.endswith("ForCausalLM"):
            return {"input_ids": tokens, "labels": tokens.clone()}
        hidden = torch.rand(shape, generator=self.generator).to(self.device) < _MASKED
        hidden[:, 0] = True  # somewhere, however short
        return {"input_ids": tokens, "labels": tokens.masked_fill(~hidden, -100)}

    def _integers(self, below: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(below, shape, generator=self.generator).to(self.device)

    def double(self) -> Subject:
        """A copy in float64."""
        model = copy.deepcopy(self.sample.model).double()
        x = {k: t.double() if t.is_floating_point() else t for k, t in self.sample.x.items()}
        return dataclasses.replace(self, sample=Sample(model, x))

    def shared(self) -> nn.Module:
        """A copy of the modules alone, on the very same parameters and buffers: a way's own."""
        model = self.sample.model
        same = {id(t): t for t in (*model.parameters(), *model.buffers())}
        return copy.deepcopy(model, same)  # type: ignore[arg-type]

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return self.case.seq_len

    def fixed_bytes(self) -> int:
        """Parameters, gradients of those that are trained, and AdamW's two moments of them."""
        every = sum(p.nbytes for p in self.sample.model.parameters())
        trained = sum(p.nbytes for p in self.sample.leaves().values())
        return every + (_COPIES - 1) * trained


def parameters(model: nn.Module) -> int:
    """How many numbers a model is made of."""
    return sum(p.numel() for p in model.parameters())


def memory_of(device: torch.device | str) -> int:
    """Bytes that are free on a device."""
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def affordable_layers(name: str, dtype: str, lora: int, free: int) -> int:
    """As many layers of a model as half of this memory can train; at least one.

    >>> affordable_layers("smollm-135m", "float32", 0, 20 << 30)
    30
    """
    published = MODELS[name]
    sizes = []
    for layers in (1, 2):
        sample = Sample(build(published, layers, DTYPES[dtype], "meta", lora), {})
        case = Case(name, layers, 1, 1, dtype, lora)
        sizes.append(Subject(case, published, sample, torch.device("meta")).fixed_bytes())
    one, two = sizes
    return max(1, min(published.layers, 1 + int((_SHARE * free - one) // (two - one))))
