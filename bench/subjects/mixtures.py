"""Decoder layers with experts, of transformers' models with random weights, and ways to train them.

A layer is run by a model of that one layer, without embeddings and a norm at its end.
"""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from bench.measure import case
from bench.measure.case import DTYPES, Forward, Subject, perturb
from bench.measure.registry import Absent, Registry
from bench.subjects.models import shared
from fused_remat import convert
from fused_remat.policies import EXACT_PRESETS


@dataclass(frozen=True)
class Mixture:
    """Sizes of a published model's layers."""

    kind: str  # of transformers' classes
    d_model: int
    expert: int  # width of an expert
    experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    names: tuple[str, str]  # of an expert's width and of the number of experts, in configurations
    more: dict[str, Any]


MIXTURES = {
    "qwen3-30b-a3b": Mixture(
        "Qwen3Moe", 2048, 768, 128, 8, 32, 4, 128, ("moe_intermediate_size", "num_experts"),
        {"norm_topk_prob": True},
    ),
    "gpt-oss-20b": Mixture(
        "GptOss", 2880, 2880, 32, 4, 64, 8, 64, ("intermediate_size", "num_local_experts"), {},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Case(case.Case):
    """A layer and its input.

    Widths and numbers of heads, of which two remain, are the published model's divided by `part`.
    """

    model: str  # a key of `MIXTURES`
    part: int
    batch: int
    seq_len: int
    dtype: str

    def __post_init__(self) -> None:
        self.sizes_fit(self.width, 1, 0.0, self.batch, self.seq_len, self.part)

    @property
    def sizes(self) -> Mixture:
        return MIXTURES[self.model]

    @property
    def width(self) -> int:
        return self.sizes.d_model // self.part

    def config(self) -> Any:
        """Return the configuration of a model of one layer."""
        s, transformers = self.sizes, importlib.import_module("transformers")
        return getattr(transformers, f"{s.kind}Config")(
            hidden_size=self.width, num_attention_heads=max(2, s.heads // self.part),
            num_key_value_heads=max(2, s.kv_heads // self.part), head_dim=s.head_dim,
            num_experts_per_tok=s.top_k, num_hidden_layers=1, vocab_size=8, use_cache=False,
            **dict(zip(s.names, (s.expert // self.part, s.experts), strict=True)), **s.more,
        )  # fmt: skip

    def subject(self, device: torch.device | str) -> Subject:
        """Return the layer with random parameters, biases and norms included, and random data."""
        self.seed()
        config = self.config()
        model_class = getattr(importlib.import_module("transformers"), f"{self.sizes.kind}Model")
        with torch.device(device):
            model = model_class(config)
            model.norm, model.embed_tokens = nn.Identity(), nn.Identity()
            with torch.no_grad():
                for p in model.parameters():  # experts and routers are not initialized by all
                    if p.dim() > 1:
                        p.normal_(0.0, 0.02 if p.dim() == 3 else self.width**-0.5)
            perturb(model)
            x, dy = (torch.randn(self.batch, self.seq_len, self.width) for _ in range(2))
        dtype = DTYPES[self.dtype]
        return Subject(model.to(dtype).train(), x.to(dtype), dy.to(dtype), stock=forward_of)


def forward_of(model: Any) -> Forward:
    def forward(x: Tensor) -> Tensor:
        if x.dtype == torch.float64:  # which grouped products do not have
            model.config._experts_implementation = "eager"
        hidden: Tensor = model(inputs_embeds=x, use_cache=False).last_hidden_state
        return hidden

    return forward


#: In the order of the tables. Traits as of `layers.WAYS`; bytes are the allocator's.
WAYS: Registry[Callable[[Subject], Forward]] = Registry(
    group="stock", draws="stock", kept_by="allocator", compiled=False
)
BASELINE = "eager"
DEFAULT = ("stock", "ours")


@WAYS.provider(BASELINE, baseline=True)
def eager(subject: Subject) -> Forward:
    """Run transformers' layer with its default implementation of experts, grouped products."""
    return forward_of(shared(subject.module))


@WAYS.provider("checkpoint", baseline=True)
def checkpointed(subject: Subject) -> Forward:
    """Turn on transformers' gradient checkpointing, as its Trainer does."""
    model: Any = shared(subject.module)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # its new name is not in older versions
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return forward_of(model)


def _implementation(subject: Subject, experts: str) -> Forward:
    model: Any = shared(subject.module)
    model.config._experts_implementation = experts
    if experts == "batched_mm":
        pairs = subject.x[..., 0].numel() * model.config.num_experts_per_tok
        matrices = [p for p in model.parameters() if p.dim() == 3]
        copies = sum(pairs * p[0].nbytes for p in matrices)
        if copies > 1 << 30:
            raise Absent(f"it copies the matrices of every pair: {copies / 2**30:.0f} GiB")
    return forward_of(model)


for _name in ("eager", "batched_mm"):  # the former takes 30 times as long with 128 experts
    _build = functools.partial(_implementation, experts=_name)
    WAYS.provider(f"experts_{_name}", group="experts")(_build)


def _preset(subject: Subject, preset: str) -> Forward:
    return forward_of(convert(shared(subject.module), policy=preset, backend=subject.backend))


for _name in EXACT_PRESETS:
    WAYS.provider(_name, group="ours", draws="ours")(functools.partial(_preset, preset=_name))
