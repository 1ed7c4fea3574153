"""Plain functions on tensors: thin calls of the graph machinery, for layers and research code."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fused_remat.autograd import run_block
from fused_remat.blocks.encoder import EncoderConfig, encoder_graph
from fused_remat.policies import Policy, kept_names


def encoder_block(
    x: Tensor,
    tensors: Mapping[str, Tensor | None],
    config: EncoderConfig,
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
    seq_first: bool = False,
) -> Tensor:
    """A whole transformer encoder block, pre- or post-norm, keeping what `policy` names.

    Shapes: x (B, S, D), or (S, B, D) if `seq_first`; returns the same, in x.dtype. `tensors` maps
        the names of `blocks.encoder.PARAMS`: "qkv.weight" (3D, D), "proj.weight" (D, D),
        "fc1.weight" (F, D), "fc2.weight" (D, F), "norm1.weight" and "norm2.weight" (D,), each
        with a ".bias"; "mask" (S, S) or (B*H, S, S) and "padding" (B, S), bool (True = excluded)
        or float (added to the scores); "seed" () int64, drawn when dropout needs it. Absent or
        None: the block has none. All but masks and seed share x's dtype and device.
    Units: bytes kept = 2·D (full, 16-bit) to 22·D (none) per token, plus statistics.
    Raises: ValueError for an unknown policy, activation name in a Policy, or backend, when x is
        empty or not 3-D, and when `config` and `tensors` disagree on whether there is a mask.
    Source: Vaswani et al. 2017; pre-norm after Xiong et al. 2020.

    >>> import torch
    >>> d, f = 8, 16
    >>> shapes = {"qkv": (3 * d, d), "proj": (d, d), "fc1": (f, d), "fc2": (d, f)}
    >>> tensors = {f"{k}.weight": torch.randn(s, requires_grad=True) for k, s in shapes.items()}
    >>> tensors |= {f"{n}.weight": torch.ones(d) for n in ("norm1", "norm2")}
    >>> config = EncoderConfig(True, nhead=2, head_dim=4, activation="gelu", eps1=1e-5, eps2=1e-5)
    >>> y = encoder_block(torch.randn(3, 5, d), tensors, config, policy="lean")
    >>> y.sum().backward(); y.shape, tensors["fc1.weight"].grad.shape
    (torch.Size([3, 5, 8]), torch.Size([16, 8]))
    """
    if x.dim() != 3 or x.numel() == 0:
        raise ValueError(f"x must be (B, S, D) and not empty, got shape {tuple(x.shape)}")
    for name, has in (("mask", config.has_mask), ("padding", config.has_padding)):
        if has != (tensors.get(name) is not None):
            raise ValueError(f"config.has_{name} is {has}, tensors[{name!r}] says otherwise")
    graph = encoder_graph(config)
    return run_block(
        graph,
        kept_names(policy, graph.kind, graph.names),
        x,
        tensors,
        backend=backend,
        seq_first=seq_first,
        preserve_strides=config.norm_first,
    )
