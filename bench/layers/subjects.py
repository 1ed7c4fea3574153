"""What a training step is measured on: a module, its data, and how its forwards are built."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fused_remat import FusedRematLayer, ops

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NORMS = {"pre": True, "post": False}
ACTIVATIONS = ("gelu", "relu")

Forward = Callable[[Tensor], Tensor]


@dataclass
class Sample:
    """What a step works on: a module, its input x, and dy, the gradient of its output.

    Attributes:
        dropout: the module's dropout probability.
    """

    layer: nn.Module
    x: Tensor
    dy: Tensor
    dropout: float

    def __post_init__(self) -> None:
        self.x.requires_grad_()
        for leaf in self.leaves().values():
            leaf.grad = torch.zeros_like(leaf)

    def leaves(self) -> dict[str, Tensor]:
        """The tensors that want a gradient."""
        return {"x": self.x, **dict(self.layer.named_parameters())}

    def double(self) -> Sample:
        """A copy in float64."""
        x, dy = self.x.detach().double(), self.dy.double()
        return Sample(copy.deepcopy(self.layer).double(), x, dy, self.dropout)


@dataclass
class Subject:
    """A sample, and how forwards of its module are built.

    Attributes:
        stock: PyTorch's own forward of a module like the sample's.
        fused: (module, policy, backend) -> ours, on the same parameters.
        causal: every token sees itself and what is before it.
        masks: the caller's own tensors, which no way is said to keep.
        backend: what a preset runs on where its name says nothing.
        compiler: `torch.compile`'s backend.
        captured: steps are to be captured as CUDA graphs.
    """

    sample: Sample
    stock: Callable[[nn.Module], Forward]
    fused: Callable[[nn.Module, str, str], Forward]
    causal: bool = False
    masks: tuple[Tensor, ...] = ()
    backend: str = "auto"
    compiler: str = "inductor"
    captured: bool = False

    @property
    def device(self) -> torch.device:
        return self.sample.x.device


@dataclass(frozen=True)
class Case:
    """An encoder layer and its input: a point of the grid.

    Attributes:
        dtype, norm, activation: keys of `DTYPES` and `NORMS`, one of `ACTIVATIONS`.
        attention_dropout: of the probabilities; None: as everywhere else.

    Raises: ValueError for what is not among those, or a d_model that nhead does not divide.
    """

    dtype: str
    norm: str
    dropout: float
    batch: int
    seq_len: int
    d_model: int
    nhead: int
    activation: str = "gelu"
    causal: bool = False
    attention_dropout: float | None = None

    def __post_init__(self) -> None:
        known = {"dtype": DTYPES, "norm": NORMS, "activation": ACTIVATIONS}
        for name, values in known.items():
            if getattr(self, name) not in values:
                valid = ", ".join(values)
                raise ValueError(f"unknown {name} {getattr(self, name)!r}; valid: {valid}")
        sizes = (self.batch, self.seq_len, self.d_model, self.nhead)
        if min(sizes) < 1 or self.d_model % self.nhead:
            raise ValueError(f"(B, S, D, H) must be positive, and D a multiple of H: {sizes}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout must be at least 0 and below 1, got {self.dropout}")

    def subject(self, device: torch.device | str) -> Subject:
        """A layer with random parameters, biases and norms included, and random data."""
        torch.manual_seed(zlib.crc32(repr(self).encode()))
        dtype = DTYPES[self.dtype]
        with torch.device(device):
            layer = nn.TransformerEncoderLayer(
                self.d_model, self.nhead, 4 * self.d_model, self.dropout, self.activation,
                batch_first=True, norm_first=NORMS[self.norm],
            )  # fmt: skip
            if self.attention_dropout is not None:
                layer.self_attn.dropout = self.attention_dropout
            perturb(layer)
            x, dy = torch.randn(2, self.batch, self.seq_len, self.d_model).unbind()
        layer.to(dtype)
        # clone: of their own, not halves of one storage, whose bytes would be counted twice
        sample = Sample(layer, x.to(dtype).clone(), dy.to(dtype).clone(), self.dropout)
        return causal(sample) if self.causal else Subject(sample, lambda module: module, _fused)


def _fused(module: nn.Module, policy: str, backend: str) -> Forward:
    assert isinstance(module, nn.TransformerEncoderLayer)
    return FusedRematLayer.from_layer(module, policy, backend)  # the module's own submodules


def causal(sample: Sample) -> Subject:
    """A layer that is called with a causal mask."""
    x = sample.x
    # In the layer's dtype: of a bool mask the stock layer would make such a one at every call.
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], x.device, x.dtype)

    def stock(module: nn.Module) -> Forward:
        return lambda x: module(x, mask.to(x.dtype), is_causal=True)

    def fused(module: nn.Module, policy: str, backend: str) -> Forward:
        return stock(_fused(module, policy, backend))  # type: ignore[arg-type]

    return Subject(sample, stock, fused, causal=True, masks=(mask,))


def mlp(sizes: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Subject:
    """Linear, GELU, linear, of (tokens, width, hidden width)."""
    tokens, width, hidden = sizes
    with torch.device(device):
        module = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        perturb(module)
        x, dy = (torch.randn(tokens, width).to(dtype) for _ in range(2))
    module.to(dtype)

    def fused(module: nn.Module, policy: str, backend: str) -> Forward:
        assert isinstance(module, nn.Sequential)
        first, _, last = module
        weights = first.weight, first.bias, last.weight, last.bias
        return lambda x: ops.mlp(x, *weights, "gelu", policy=policy, backend=backend)

    return Subject(Sample(module, x, dy, 0.0), lambda module: module, fused)


def perturb(module: nn.Module) -> None:
    """Random biases and norms, which are constants at first."""
    with torch.no_grad():
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(0.1 * torch.randn_like(p))
