"""What the tests of reports share: models, inputs, and what saving hooks count."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fused_remat.report.allocations import SavedBytes

B, S, D, H = 3, 40, 32, 4
TOKENS = B * S


def encoder(layers=2, dropout=0.0, norm_first=True, width=D, **kwargs):
    layer = nn.TransformerEncoderLayer(
        width, H, kwargs.pop("dim_feedforward", 4 * width), dropout,
        norm_first=norm_first, batch_first=True, **kwargs,
    )  # fmt: skip
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def data(dtype=torch.float32, requires_grad=False):
    return torch.randn(B, S, D, dtype=dtype, requires_grad=requires_grad)


def saved_bytes(model, *args, **kwargs):
    with SavedBytes(exclude=[*model.parameters(), *model.buffers()]) as saved:
        model(*args, **kwargs)
    return saved.total


class Model(nn.Module):
    """Children, parameters and buffers by name, and a forward that is a function of the model."""

    def __init__(self, forward, **named):
        super().__init__()
        self._forward = forward
        for name, value in named.items():
            setattr(self, name, value)

    def forward(self, *args, **kwargs):
        return self._forward(self, *args, **kwargs)


class LanguageModel(nn.Module):
    """Ids to logits, as Hugging Face's: blocks in a ModuleList, a dict of outputs."""

    def __init__(self, layers=2, checkpointed=False, wrap="direct"):
        super().__init__()
        self.embed = nn.Embedding(50, D)
        self.layers = nn.ModuleList(encoder(1).layers[0] for _ in range(layers))
        self.head = nn.Linear(D, 50)
        self.checkpointed, self.wrap = checkpointed, wrap

    def forward(self, ids, scale=None):
        x = self.embed(ids)
        for layer in self.layers:
            if not self.checkpointed:
                x = layer(x)
            elif self.wrap == "direct":
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = checkpoint(lambda t, layer=layer: layer(t), x, use_reentrant=False)
        return {"logits": self.head(x if scale is None else x * scale), "ids": ids}


class TracedLayer(nn.Module):
    """A layer of an unknown class, which is traced at its first call that trains."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.out = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.up, self.down = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, H, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def traced(hooked=()):
    """Return three layers that are traced; those in `hooked` run under checkpointing."""
    torch.manual_seed(0)
    model = nn.Sequential(*(TracedLayer() for _ in range(3)))
    for i in hooked:
        model[i].up.register_forward_hook(lambda *_: None)
    return model


def ids():
    return torch.randint(0, 50, (B, S))
