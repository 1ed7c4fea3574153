"""Forty layers, once drawn at random: what each keeps for backward, and the bits it computes.

`layers.json` has them. This file calls public names only, so that the record outlives any change
inside the library.
"""

from __future__ import annotations

import hashlib
import os
import platform
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fused_remat as fr

KINDS = {
    "encoder": fr.FusedRematLayer, "decoder": fr.FusedRematDecoderLayer,
    "causal": fr.FusedRematCausalLayer,
}  # fmt: skip
PRESETS = ("full", "lean", "balanced", "fast", "none", "balanced8", "fast8")
#: "sin" is a function that the library has no name for.
FUNCTIONS = {"relu": F.relu, "gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh, "sin": torch.sin}
#: Environment variables that choose the arithmetic of oneDNN and MKL.
SETTINGS = ("ONEDNN_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE", "MKL_CBWR",
            "MKL_ENABLE_INSTRUCTIONS", "FUSED_REMAT_TEST_SEED")  # fmt: skip

Drawn = dict[str, Any]


def build(drawn: Drawn, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """The layer, every parameter random, a third of them frozen in some; its call's arguments."""
    torch.manual_seed(seed)
    options, policy = dict(drawn["options"]), drawn["policy"]
    if drawn["kind"] != "causal":
        options["activation"] = FUNCTIONS[options["activation"]]
    layer = KINDS[drawn["kind"]](
        drawn["d_model"], drawn["nhead"], drawn["dim_feedforward"], drawn["dropout"],
        policy=policy if policy in PRESETS else fr.Policy(save=policy.split()),
        dtype=getattr(torch, drawn["dtype"]), **options,
    )  # fmt: skip
    with torch.no_grad():
        for i, p in enumerate(layer.parameters()):
            p.add_(torch.randn_like(p), alpha=0.1)
            p.requires_grad_(i % 3 > 0 or not drawn["frozen"])
    return layer.train(drawn["train"]), _inputs(drawn)


def _inputs(drawn: Drawn) -> dict[str, Any]:
    """The arguments of a call by name; masks hide no sequence's first key."""
    batch, seq, width = drawn["batch"], drawn["seq"], drawn["d_model"]
    dtype, masked = getattr(torch, drawn["dtype"]), drawn["masked"]
    causal = drawn["kind"] == "causal"

    def tokens(length: int) -> Tensor:
        lead = (batch, length) if drawn["options"].get("batch_first", True) else (length, batch)
        return torch.randn(*lead, width).to(dtype).requires_grad_()

    def mask(*shape: int, true_attends: bool = False) -> Tensor:
        hidden = torch.rand(shape) < 0.3
        hidden[..., 0] = False
        if not drawn["float_mask"]:
            return hidden ^ true_attends
        return torch.randn(shape).masked_fill(hidden, -torch.inf).to(dtype).requires_grad_()

    if causal:
        rotated = round(width // drawn["nhead"] * drawn["rotated"]) // 2 * 2
        angles = 3.0 * torch.randn(seq, rotated // 2)
        given: dict[str, Any] = {"x": tokens(seq)}
        given["rope"] = (angles.cos(), angles.sin()) if rotated else None
        first, named = "", {"mask": "attn_mask", "padding": "key_padding_mask"}
        if masked == "lengths":
            given["key_lengths"] = torch.randint(1, seq + 1, (batch,))
        if masked == "packed":
            given["cu_seqlens"] = torch.tensor([0, 3, 3, seq])
    else:
        first = "src" if drawn["kind"] == "encoder" else "tgt"
        given = {first: tokens(seq)} | ({"memory": tokens(seq - 2)} if first == "tgt" else {})
        named = {"mask": f"{first}_mask", "padding": f"{first}_key_padding_mask"}
    if "mask" in masked:
        shape = (batch, 1, seq, seq) if causal else (seq, seq)
        given[named["mask"]] = mask(*shape, true_attends=causal)
    if "padding" in masked:
        given[named["padding"]] = mask(batch, seq)
    if masked == "causal":
        given[named["mask"]] = torch.ones(seq, seq, dtype=torch.bool).triu(1)
        given["is_causal" if first == "src" else "tgt_is_causal"] = True
    elif first == "tgt" and masked != "none":
        given["memory_mask"] = mask(seq, seq - 2)
    return given


def _call(drawn: Drawn, layer: nn.Module, given: dict[str, Any]) -> Any:
    """A call, under autocast where that was drawn; one off the fused path is an error."""
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=drawn["autocast"])
    with warnings.catch_warnings(), autocast:
        warnings.simplefilter("error", fr.FusedRematWarning)
        return layer(**given)


class _Every(nn.Module):
    """Layers, each with a call: one report of all takes a tenth of the time."""

    def __init__(self, drawn: dict[str, Drawn]) -> None:
        super().__init__()
        self.calls = [(row, *build(row, int(seed))) for seed, row in drawn.items()]
        self.layers = nn.ModuleList(layer for _, layer, _ in self.calls)

    def forward(self) -> list[Tensor]:
        return [_call(*call) for call in self.calls]


def kept(drawn: dict[str, Drawn]) -> dict[str, dict[str, int]]:
    """Of layers by their seeds the bytes kept for backward, by name."""
    rows = fr.memory_report(_Every(drawn), layers=["layers.*"]).layers
    named = [{a.name: a.bytes for a in row.activations} for row in rows if row.kind]
    return dict(zip(drawn, named, strict=True))


def bits(drawn: Drawn, seed: int) -> dict[str, str]:
    """A hash of the bits of the output and of every gradient of a step on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        layer, given = build(drawn, seed)
        y = _call(drawn, layer, given)
        y.backward(torch.randn(y.shape).to(y.dtype))
    finally:
        torch.set_num_threads(threads)
    leaves = {**given, **dict(layer.named_parameters())}
    grads = {name: t.grad for name, t in leaves.items() if isinstance(t, Tensor)}
    return {n: _hash(t) for n, t in {"output": y.detach(), **grads}.items() if t is not None}


def _hash(t: Tensor) -> str:
    return hashlib.sha256(t.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()[:8]


def cpu() -> str:
    """What decides the bits, as a file's name: torch, the CPU and the settings that it runs under.

    The CPU's name ends in a hash of its instructions for arithmetic and of the size of its cache.
    """
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    about = {name.strip(): value.strip() for name, _, value in (s.partition(":") for s in lines)}
    arithmetic = ("sse", "avx", "fma", "amx")
    flags = [s for s in about.get("flags", "").split() if s.startswith(arithmetic)]
    digest = hashlib.sha256(" ".join((*sorted(flags), about.get("cache size", ""))).encode())
    parts = [f"torch-{torch.__version__}", "-".join(platform.libc_ver())]
    parts += [torch.backends.cpu.get_cpu_capability().replace(" ", "")]
    parts += [about.get(name, "unknown") for name in ("vendor_id", "cpu family", "model")]
    parts += [digest.hexdigest()[:6]]
    parts += [f"{name}={os.environ[name]}" for name in SETTINGS if name in os.environ]
    return "_".join(parts).replace(os.sep, "-")
