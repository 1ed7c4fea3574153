"""Attention's kernels in every configuration they can launch with, for `bench.audit.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_remat.spec import AttentionSpec
from fused_remat.steps.attention_call import AttentionArgs
from fused_remat.triton import attention
from fused_remat.triton.launch import Launch, Target

_B, _H, _S = 8, 16, 4096  # every multiprocessor has programs, but of "few programs"
_UNEVEN = 2001  # rows of a mask are then not aligned
#: Kernels that compute products, which should be the tensor cores'.
PRODUCTS = frozenset(f"attention_{n}" for n in ("fwd", "dkdv_bwd", "dq_bwd", "mask_bwd"))
#: Calls that need the most registers each; the tiles of all widths should hold them.
DEFAULTS = (
    "causal", "causal dropout", "mask padding dropout", "softcap window", "lengths",
    "uneven mask", "everything",
)  # fmt: skip
#: Width of a head -> calls; 80 is padded to 128.
CALLS: dict[int, tuple[str, ...]] = {
    64: (*DEFAULTS, "few programs"),
    128: (
        *DEFAULTS, "full", "packed", "shared heads", "shared softcap window", "few programs",
    ),
    256: (*DEFAULTS, "shared softcap window"),
    80: ("causal", "mask padding dropout"),
}  # fmt: skip

# Kernel -> what it depends on, where that is not everything.
_DEPENDS_ON: dict[str, tuple[str, ...]] = {
    "attention_bounds_fwd": (),
    "attention_delta_bwd": ("width",),
    "attention_sum_bwd": ("width",),
    "attention_shift_fwd": ("call",),
    "attention_blocks_fwd": ("call", "tile", "side"),
}


class Case(NamedTuple):
    """One launch to compile."""

    name: str  # kernel, sizes and what is special
    launch: Launch
    default: bool  # whether ordinary tensors lead to it
    product: bool  # whether it is a matrix product


def meta(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def variants(dtype: torch.dtype) -> dict[str, dict[str, Any]]:
    """Return the options of each kind of call, by name; the rest is as in `call_of`."""
    causal, dropout = {"right": 0}, {"p": 0.1, "site_key": meta(torch.int64)}
    cu = meta(torch.int32, 9)
    mask, padding = meta(dtype, _B, 1, _S, _S), meta(torch.bool, _B, _S)
    lengths = {"lengths": meta(torch.int32, _B)}
    uneven = {"q_len": _UNEVEN, "kv_len": _UNEVEN, "mask": meta(dtype, _B, 1, _UNEVEN, _UNEVEN)}
    return {
        "full": {},
        "causal": causal,
        "causal dropout": causal | dropout,
        "mask padding dropout": {
            "mask": mask, "padding": padding, **dropout, "mask_grad": True,
            "dmask": meta(torch.float32, *mask.shape),
        },
        "softcap window": causal | {"softcap": 30.0, "left": 512},
        "lengths": causal | lengths,
        "packed": causal | {"cu_q": cu, "cu_k": cu, "batch": 1},
        "shared heads": causal | {"kv_heads": _H // 4},
        "shared softcap window": causal | {"softcap": 30.0, "left": 512, "kv_heads": _H // 4},
        "few programs": causal | {"batch": 1, "heads": 2, "kv_heads": 1},
        "uneven mask": uneven,
        "everything": uneven | causal | dropout | lengths | {"softcap": 30.0, "kv_heads": _H // 4},
    }  # fmt: skip


def call_of(width: int, given: dict[str, Any]) -> AttentionArgs:
    """Return a call without masks, but for the given options."""
    rest = {"batch": _B, "q_len": _S, "kv_len": _S} | given
    window, heads = (rest.pop("left", -1), rest.pop("right", -1)), rest.pop("heads", _H)
    spec = AttentionSpec(
        num_heads=heads, num_kv_heads=rest.pop("kv_heads", heads), head_dim=width,
        scale=width**-0.5, window=window, softcap=rest.pop("softcap", 0.0),
        dropout=rest.pop("p", 0.0), true_means="exclude",
    )  # fmt: skip
    return AttentionArgs(spec, **rest)


def _heads(call: AttentionArgs, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Return q, k and v, views of one packed projection."""
    heads, kv_heads, width = call.spec.num_heads, call.spec.num_kv_heads, call.spec.head_dim
    counts = heads, kv_heads, kv_heads
    packed = meta(dtype, call.batch, call.q_len, sum(counts), width)
    return packed.transpose(1, 2).split_with_sizes(counts, 1)


def launches_of(
    width: int, given: dict[str, Any], at: Target, dtype: torch.dtype
) -> Iterator[tuple[str, Launch]]:
    """Yield the launches of a forward and a backward by their kernels' names and results."""
    call = call_of(width, given)
    heads, gradients = _heads(call, dtype), _heads(call, dtype)
    out = meta(dtype, call.batch * call.q_len, call.spec.num_heads * width)
    lse = meta(torch.float32, call.batch, call.spec.num_heads, call.q_len)
    found = list(attention.forward(*heads, call, out, lse, at))
    found += attention.backward(out, *heads, out, lse, call, gradients, at)
    for launch in found:
        names = dict(zip(launch.kernel.arg_names, launch.args, strict=False))
        wanted = [w for w in ("dk", "dv") if names.get(w) is not None]
        part = f" {wanted[0]}" if len(wanted) == 1 else ""
        yield launch.kernel.fn.__name__.removesuffix("_kernel") + part, launch


def case_name(kernel: str, width: int, variant: str, launch: Launch) -> str:
    """Return the name of a case; the same name is the same kernel."""
    constants = launch.constants
    words = {
        "width": str(width),
        "call": variant,
        "tile": f"{constants['BLOCK_M']}x{constants.get('BLOCK_N')}",
        "how": f"w{launch.num_warps} s{launch.num_stages}",
        "side": "by keys" if constants.get("BY_KEYS") else "by queries",
    }
    depends = _DEPENDS_ON.get(kernel, ("width", "call", "tile", "how"))
    return " ".join((kernel, *(words[word] for word in depends)))


def attention_cases(at: Target, dtype: torch.dtype) -> Iterator[Case]:
    """Yield every width with the calls of `CALLS`: each kernel of a forward and a backward once.

    For 16 bits: the kernels are not launched in float32.
    """
    found: dict[str, Case] = {}
    for width, names in CALLS.items():
        for variant in names:
            default = variant in (*DEFAULTS, "few programs") and width != 80
            for kernel, launch in launches_of(width, variants(dtype)[variant], at, dtype):
                name = case_name(kernel, width, variant, launch)
                found.setdefault(name, Case(name, launch, default, kernel.split()[0] in PRODUCTS))
    yield from found.values()
