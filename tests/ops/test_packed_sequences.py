"""Attention over packed sequences and padded ones of their own lengths: results, routes, memory."""

import pytest
import torch
from block_inputs import heads, results
from op_cases import PACKS, packed
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fused_remat import explain, ops

OPTIONS = [{}, {"is_causal": True}, {"dropout_p": 0.3, "seed": 7, "window": (7, 2), "softcap": 1.5}]


# --- packed sequences


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("policy", ["full", "lean"])
@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_of_no_sequence_are_zero_and_never_read(options, policy):
    qkv = heads(1, q_len=12, kv_len=13, dtype=torch.float32)
    insides = slice(2, 9), slice(1, 10), slice(1, 10)
    with torch.no_grad():
        for t, inside in zip(qkv, insides, strict=True):
            kept = t[:, :, inside].clone()
            t.fill_(torch.nan)[:, :, inside] = kept
    given = {**options, **packed(*PACKS["tokens of none"][:2]), "policy": policy}
    found = results(lambda: ops.attention(*qkv, **given), qkv)
    for t, inside in zip(found, (insides[0], *insides), strict=True):
        assert t[:, :, inside].isfinite().all() and t[:, :, inside].any()
        t[:, :, inside] = 0.0
        assert torch.equal(t, torch.zeros_like(t))


# --- routes


class Flash(TorchDispatchMode):
    """Counts calls of ATen's flash kernel."""

    def __init__(self):
        super().__init__()
        self.calls = {"forward": 0, "backward": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if "flash_attention_for_cpu" in name:
            self.calls["backward" if "backward" in name else "forward"] += 1
        return func(*args, **(kwargs or {}))


class Attend(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.options = options

    def forward(self, q, k, v):
        return ops.attention(q, k, v, **self.options)


FLASH, PACKED = "ATen's flash kernel for CPUs", "variable-length sequences, one at a time: "
BLOCKS = "blocks of query rows: causal with S_q other than S_k"
EMPTY = "blocks of query rows: there are no queries or no keys"
BOUNDS = packed([0, 9, 18, 24, 24, 30], [0, 9, 18, 28, 28, 34])
LENGTHS = {"key_lengths": torch.tensor([34, 0, 5])}


@pytest.mark.parametrize(
    ("batch", "options", "calls", "said"),
    [
        (1, BOUNDS, 4, f"{PACKED}{FLASH}; {EMPTY}"),
        # Causal: where queries are as many as keys.
        (1, BOUNDS | {"is_causal": True}, 3, f"{PACKED}{FLASH}; {BLOCKS}; {EMPTY}"),
        (1, packed([0], [9]), 0, PACKED + "none"),
        (3, LENGTHS, 1, FLASH),
        (3, LENGTHS | {"is_causal": True}, 0, f"{BLOCKS} with a mask or key lengths"),
    ],
)
def test_the_flash_kernel_runs_where_it_can_and_explain_says_why(batch, options, calls, said):
    """Backward is a call for each of two query heads that share a key head; so is forward where
    there is more than one sequence, or a mask."""
    qkv = heads(batch, q_len=30, kv_len=34)
    with Flash() as flash:
        results(lambda: ops.attention(*qkv, **options), qkv)
    assert flash.calls == {"forward": calls if batch == 1 else 2 * calls, "backward": 2 * calls}
    (block,) = explain(Attend(options), *qkv)
    assert dict(block.forward)["output"] == said
