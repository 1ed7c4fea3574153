"""Models of transformers with random weights: sizes, data, and the ways to train them.

Nothing is downloaded. A way takes a subject and returns its forward; all share parameters and
gradients.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import importlib
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from bench.measure import case
from bench.measure.case import DTYPES, graph_of, perturb
from bench.measure.registry import Absent, Registry
from fused_remat import convert
from fused_remat.execution.prepare import chunks_of
from fused_remat.policies import EXACT_PRESETS
from fused_remat.scale.shapes import MODELS as SIZES
from fused_remat.scale.shapes import Model
from fused_remat.tracing.discovery import repeated_layers


@dataclass(frozen=True)
class Published:
    """A model of transformers in published sizes."""

    config: str  # the class of the values
    task: str  # the class of the model, which computes its loss
    values: dict[str, Any]

    @property
    def layers(self) -> int:
        return self.values["num_hidden_layers"]

    @property
    def longest(self) -> int:
        return self.values["max_position_embeddings"]


def _causal(kind: str, sizes: Model, longest: int | None = None) -> Published:
    return Published(f"{kind}Config", f"{kind}ForCausalLM", {
        "hidden_size": sizes.d_model, "intermediate_size": sizes.d_ff,
        "num_hidden_layers": sizes.layers, "num_attention_heads": sizes.nhead,
        "num_key_value_heads": sizes.kv_heads, "vocab_size": sizes.vocab,
        "max_position_embeddings": longest or sizes.seq_len, "tie_word_embeddings": sizes.tied,
        "bos_token_id": 0, "eos_token_id": 0,
    })  # fmt: skip


def _scaled(kind: str, d_ff: int, *heads: int, **more: Any) -> Published:
    """Return a small model 512 wide, near the proportions of its family's smallest; not published.

    heads: of queries, of keys, and their width.
    """
    sizes = Model(
        kind, 512, *heads, d_ff, "", "", True, False, True, 2048, True, 4096, 2, False, False
    )  # fmt: skip
    published = _causal(kind, sizes)
    values = {"head_dim": heads[-1], "pad_token_id": 0, **more}
    return dataclasses.replace(published, values=published.values | values)


_BERT = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
    "num_attention_heads": 12, "vocab_size": 30522, "max_position_embeddings": 512,
    "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
}  # fmt: skip
#: Not published: a small Llama for a CPU.
_SMALL = dataclasses.replace(
    SIZES["llama3-8b"], d_model=512, d_ff=1408, layers=8, nhead=8, kv_heads=2, vocab=4096
)
MODELS: dict[str, Published] = {
    "smollm-135m": _causal("Llama", SIZES["smollm-135m"]),
    "qwen2-1.5b": _causal("Qwen2", SIZES["qwen2-1.5b"], 131072),
    "llama3-8b": _causal("Llama", SIZES["llama3-8b"]),
    "llama-512": _causal("Llama", _SMALL),
    "qwen3-512": _scaled("Qwen3", 1536, 8, 4, 128, tie_word_embeddings=True),
    "phi3-512": _scaled("Phi3", 1408, 8, 8, 64),
    "gemma2-512": _scaled("Gemma2", 2048, 4, 2, 128, tie_word_embeddings=True),
    "glm4-512": _scaled("Glm4", 1728, 8, 2, 64, attention_bias=True),
    "olmo2-512": _scaled("Olmo2", 2048, 4, 4, 128),
    "bert-base": Published("BertConfig", "BertForMaskedLM", _BERT),
}
#: What has trained low-rank updates: a model's linear layers, or those of bitsandbytes.
ADAPTERS = ("lora", "dora", "nf4", "int8")


def tiny(model: Published) -> Published:
    """Return the same kind of model in sizes that show only whether it runs."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "head_dim": 8,
    }  # fmt: skip
    small = {key: value for key, value in sizes.items() if key in model.values}
    return dataclasses.replace(model, values=model.values | small)


def dropout_free(model: Published) -> Published:
    zeros = {key: 0.0 for key in model.values if "dropout" in key}
    return dataclasses.replace(model, values=model.values | zeros)


Inputs = dict[str, Tensor]
Around = Callable[[], AbstractContextManager[None]]

#: Share of the tokens that a masked language model predicts (Devlin et al. 2018).
_MASKED = 0.15
#: A parameter, its gradient and AdamW's two moments.
_COPIES = 4


@dataclass(frozen=True)
class Case(case.Case):
    """A model and the size of its step.

    lora: the rank of adapters on every linear of the layers, whose base weights are frozen; 0:
    every parameter is trained. adapter: their kind, of `ADAPTERS`, "lora" if empty.
    """

    model: str  # a key of `MODELS`
    layers: int  # of the model's; all the rest is at its full width
    batch: int
    seq_len: int
    dtype: str  # of parameters and activations, a key of `DTYPES`
    lora: int = 0
    adapter: str = ""
    tiny: bool = False  # in sizes that show nothing but whether it runs

    def __post_init__(self) -> None:
        if min(self.layers, self.batch, self.seq_len) < 1 or self.lora < bool(self.adapter):
            raise ValueError(f"sizes must be positive, a rank too if there are adapters: {self}")
        layers = self.published.layers
        if self.layers > layers:
            raise ValueError(f"{self.model} has {layers} layers, got {self.layers}")

    @property
    def published(self) -> Published:
        return tiny(MODELS[self.model]) if self.tiny else MODELS[self.model]

    def subject(self, device: torch.device | str, published: Published | None = None) -> Subject:
        """Return the model with random weights, by default of the case's configuration."""
        published = published or self.published
        self.seed()
        kind = self.lora, self.adapter
        model = build(published, self.layers, DTYPES[self.dtype], device, *kind)
        subject = Subject(model, {}, case=self, published=published)
        subject.x = subject.inputs()
        return subject


def build(
    published: Published, layers: int, dtype: torch.dtype, device: torch.device | str,
    lora: int = 0, adapter: str = "",
) -> nn.Module:  # fmt: skip
    """Return a model of transformers in training mode, with adapters unless the rank is 0."""
    try:
        import transformers
    except ImportError as error:
        raise Absent("transformers is not installed") from error
    values = published.values | {"num_hidden_layers": layers}
    config = getattr(transformers, published.config)(**values)
    config.use_cache = False
    with torch.device(device):
        model = getattr(transformers, published.task)._from_config(config, dtype=dtype)
        if adapter in ("nf4", "int8"):
            quantize(model, adapter)
        model = adapted(model, lora, adapter == "dora") if lora else model
        perturb(model)
    return model.train()


def quantize(model: nn.Module, kind: str) -> None:
    """Replace the linear layers of a model's layers by bitsandbytes' of "nf4" or "int8"."""
    try:
        bnb: Any = importlib.import_module("bitsandbytes").nn
    except ImportError as error:
        raise Absent("bitsandbytes is not installed") from error

    def quantized(linear: nn.Linear) -> nn.Module:
        sizes, weight = (linear.in_features, linear.out_features), linear.weight.detach()
        if kind == "nf4":
            new = bnb.Linear4bit(*sizes, False, weight.dtype, quant_type="nf4")
            new.weight = bnb.Params4bit(weight, False, quant_type="nf4", module=new)
        else:
            new = bnb.Linear8bitLt(*sizes, False, has_fp16_weights=False)
            new.weight = bnb.Int8Params(weight, requires_grad=False)
        new.bias = linear.bias
        new = new.to(weight.device)
        if kind == "int8":  # at the first call one of several copies would take this from the rest
            new.init_8bit_state()
        return new  # type: ignore[no-any-return]

    for layer in repeated_layers(model.requires_grad_(False)):
        for module in list(layer.modules()):
            for name, linear in list(module.named_children()):
                if type(linear) is nn.Linear:
                    setattr(module, name, quantized(linear))


def _dense(linear: Any, dtype: torch.dtype) -> nn.Linear:
    """Return a quantized layer in float64, with the weight of its products in `dtype`."""
    bias, linear.bias = linear.bias, None
    new = nn.Linear(linear.in_features, linear.out_features, bias is not None, dtype=torch.float64)
    with torch.no_grad():
        unit = torch.eye(linear.in_features, dtype=dtype, device=linear.weight.device)
        new.weight = nn.Parameter(linear(unit).T.double(), requires_grad=False)
    if bias is not None:
        new.bias = nn.Parameter(bias.detach().double(), requires_grad=bias.requires_grad)
    linear.bias = bias
    return new


def adapted(model: nn.Module, rank: int, dora: bool = False) -> nn.Module:
    """Add PEFT's adapters to every linear of the layers; both of their matrices are random.

    As they begin, one of them zero, the other's gradient would be zero, and show nothing.
    """
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise Absent("peft is not installed") from error
    config = LoraConfig(
        r=rank, lora_alpha=2 * rank, target_modules="all-linear", init_lora_weights=False,
        use_dora=dora,
    )  # fmt: skip
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
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments in addition to the inputs

    def __call__(self, x: Inputs) -> Loss:
        with self.around():
            return Loss(self.model(**x, **self.options).loss, self.around)

    def below_head(self, x: Inputs) -> Any:
        """Return the autograd node of the head's input, which holds all that is kept up to it."""
        adapted = getattr(self.model, "get_base_model", None)
        model: Any = self.model if adapted is None else adapted()
        given = {name: t for name, t in x.items() if name != "labels"}
        with self.around():
            return graph_of(model.base_model(**given).last_hidden_state)


@dataclass
class Subject(case.Subject):
    """A model, and its inputs by name."""

    stock: Callable[[nn.Module], Forward] = Forward
    case: Case = field(kw_only=True)
    published: Published = field(kw_only=True)

    def inputs(self) -> Inputs:
        """Return random tokens, with their own labels."""
        generator, shape = torch.Generator().manual_seed(7), (self.case.batch, self.case.seq_len)
        words = self.published.values["vocab_size"]
        tokens = torch.randint(words, shape, generator=generator).to(self.device)
        if self.published.task.endswith("ForCausalLM"):
            return {"input_ids": tokens, "labels": tokens.clone()}
        hidden = torch.rand(shape, generator=generator).to(self.device) < _MASKED
        hidden[:, 0] = True  # somewhere, however short
        return {"input_ids": tokens, "labels": tokens.masked_fill(~hidden, -100)}

    def double(self) -> Subject:
        exact: Any = super().double()
        for path, linear in list(self.module.named_modules()):
            if type(linear).__module__ == "bitsandbytes.nn.modules":
                exact.module.set_submodule(path, _dense(linear, self.dtype))
        return exact  # type: ignore[no-any-return]

    def shared(self) -> Any:
        return shared(self.module)


def shared(module: nn.Module) -> Any:
    """Return a copy of the modules on the same parameters and buffers, for one way."""
    same: Any = {id(t): t for t in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, same)


def fixed_bytes(model: nn.Module) -> int:
    """Return bytes of parameters, and of gradients and AdamW's moments of the trained ones."""
    every = sum(p.nbytes for p in model.parameters())
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    return every + (_COPIES - 1) * trained


Build = Callable[[Subject], Forward]

#: In the order of the tables. Traits: `group`, by which ways are requested; and as of layers'
#: ways, where nobody has dropout of its own.
WAYS: Registry[Build] = Registry(group="stock", draws="stock", compiled=False)
BASELINE = "eager"
#: Measured by default: compiling a model takes minutes.
DEFAULT = ("stock", "peers", "ours", "loss")
LOSS_PRESETS = ("full", "lean", "fast")
#: Tokens of a chunk, as `full_loss_chunk_16384`.
CHUNKS = (16384, 65536, 131072)


# --- Hugging Face's own


@WAYS.provider(BASELINE, baseline=True)
def eager(subject: Subject) -> Forward:
    return Forward(subject.shared())


def with_checkpoints(build: Build, **options: Any) -> Build:
    """Turn on transformers' gradient checkpointing of every layer, as its Trainer does."""

    def built(subject: Subject) -> Forward:
        forward = build(subject)
        model: Any = forward.model
        if options and not hasattr(model, "activation_checkpointing_enable"):
            raise Absent(f"this version of transformers does not have {', '.join(options)}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # its new name is not in older versions
            model.gradient_checkpointing_enable({"use_reentrant": False}, **options)
        if subject.case.lora:
            model.enable_input_require_grads()
        return forward

    return built


WAYS.provider("checkpoint", baseline=True)(with_checkpoints(eager))
_more = functools.partial(WAYS.provider, group="peers")
_more("checkpoint_every_2")(with_checkpoints(eager, every_n_layers=2))
_more("checkpoint_offload", needs="cuda")(with_checkpoints(eager, offload=True))


@_more("save_on_cpu", needs="cuda")
def saved_on_cpu(subject: Subject) -> Forward:
    """Move everything that autograd saves to pinned memory, by PyTorch's own hooks."""
    pinned = subject.device.type == "cuda"
    around = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)
    return Forward(subject.shared(), around)


# --- TRL


@_more("trl", module="trl")
def trl(subject: Subject) -> Forward:
    """Run TRL's head, which computes log-probabilities from one block of logits after another."""
    if not subject.published.task.endswith("ForCausalLM"):
        raise Absent("its head is for causal language models")
    try:
        from trl.trainer.utils import add_fused_lm_head
    except ImportError as error:
        raise Absent(f"this installation of trl lacks its head or a dependency: {error}") from error
    model: Any = subject.shared()
    add_fused_lm_head(model.get_base_model() if subject.case.lora else model)
    return Forward(model, options={"fused_lm_head": True})


_more("trl_checkpoint", module="trl")(with_checkpoints(trl))


# --- Liger


_peer = functools.partial(_more, module="liger_kernel", needs="cuda")


@_peer("liger")
def liger(subject: Subject) -> Forward:
    """Run Liger's kernels, its fused head and loss included.

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


def _preset(
    subject: Subject, preset: str, loss: bool = False, around: Around = contextlib.nullcontext
) -> Forward:
    if loss and not subject.published.task.endswith("ForCausalLM"):
        raise Absent("the fused loss is for causal language models")
    model = subject.shared()
    return Forward(convert(model, policy=preset, backend=subject.backend, loss=loss), around)


for _name in EXACT_PRESETS:
    WAYS.provider(_name, group="ours")(functools.partial(_preset, preset=_name))
for _name in LOSS_PRESETS:
    _build = functools.partial(_preset, preset=_name, loss=True)
    WAYS.provider(f"{_name}_loss", group="loss")(_build)
for _tokens in CHUNKS:
    _around = functools.partial(chunks_of, _tokens)
    _build = functools.partial(_preset, preset="full", loss=True, around=_around)
    WAYS.provider(f"full_loss_chunk_{_tokens}", group="chunks")(_build)


# --- compiled


@WAYS.provider("compile", group="compiled", compiled=True)
def compiled(subject: Subject) -> Forward:
    model = torch.compile(subject.shared(), backend=subject.compiler, dynamic=False)
    return Forward(model)  # type: ignore[arg-type]
