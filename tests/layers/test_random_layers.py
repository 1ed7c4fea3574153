"""Random configurations of the encoder layer against PyTorch's own.

Output and every gradient must be within 1.5 times PyTorch's own error against float64, plus a few
roundings. Ten thousand configurations: `FUSED_REMAT_MORE_EXAMPLES=100`.
"""

import random
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from layer_kinds import FORMS, TORCH_NN, check_errors
from reference import EXACT_PRESETS
from tiers import MORE
from torch import nn

from fused_remat import Policy

FIRST, COUNT, AT_ONCE = 100_000, 110 * MORE, 22
DTYPES = [torch.float64, torch.float32] * 2 + [torch.bfloat16, torch.float16]
#: In 16 bits whether a value falls on the other side of a kink is chance.
SMOOTH = ["gelu", nn.GELU(approximate="tanh"), F.silu, torch.tanh, torch.sin]
WITH_KINKS = [*SMOOTH, "relu", nn.ELU()]
NAMES = ("qkv", "attn", "mid", "up", "act")

pytestmark = [
    pytest.mark.usefixtures("served"),
    pytest.mark.filterwarnings("ignore:Support for mismatched"),
]


def check(seed, monkeypatch):
    r = random.Random(seed)
    nhead, dtype, frozen = r.randint(1, 4), r.choice(DTYPES), r.choice((0.0, 0.0, 0.3, 1.0))
    # A norm over few elements is nearly constant, its gradient all cancellation; in 16 bits the
    # error of a sum of few terms is a matter of chance.
    few, least = (1, 4) if dtype.itemsize > 2 else (12, 12)
    options = {
        "d_model": nhead * r.randint(-(-least // nhead), 12), "nhead": nhead,
        "dim_feedforward": r.randint(few, 70), "layer_norm_eps": r.choice((1e-5, 1e-3)),
        "activation": r.choice(WITH_KINKS if dtype.itemsize > 2 else SMOOTH),
        "bias": r.random() < 0.8, "norm_first": r.random() < 0.5, "batch_first": r.random() < 0.5,
    }  # fmt: skip
    kind = replace(TORCH_NN["encoder, pre-norm"], options=options)
    some = Policy(save=[name for name in NAMES if r.random() < 0.4])
    stock, fused = kind.pair(r.choice((*EXACT_PRESETS, some)), seed, dtype=dtype)
    evaluates = r.random() < 0.2
    for layer in (stock, fused):
        for i, p in enumerate(layer.parameters()):
            p.requires_grad_(random.Random(seed + i).random() >= frozen)
        layer.train(not evaluates)
    seq, batch = r.randint(1, 40), r.randint(1, 5)
    form = r.choice([form for form in FORMS if not form.endswith("without keys")])
    tensors, given = kind.data(dtype, seq, batch=batch), kind.given(form, dtype, seq, batch=batch)
    if not options["batch_first"]:
        tensors = [t.transpose(0, 1) for t in tensors]
    tokens = r.choice((1, 7, 16, 64, 512))
    monkeypatch.setattr("fused_remat.execution.choose.chunk_tokens", lambda *_: tokens)
    monkeypatch.setattr(
        "fused_remat.steps.attention_blocked._BLOCK", r.choice((1, 1 << 10, 1 << 20))
    )
    check_errors(kind, stock, fused, *tensors, **given)


@pytest.mark.parametrize("first", range(FIRST, FIRST + COUNT, AT_ONCE))
def test_random_configurations_agree_with_the_stock_layer(first, monkeypatch):
    for seed in range(first, first + AT_ONCE):
        try:
            check(seed, monkeypatch)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
