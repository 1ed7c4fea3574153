"""The form in which layers call their blocks: everything was checked already."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from fused_remat.accumulation import Accumulation
from fused_remat.autograd import run_block, warn_of_kept_input
from fused_remat.blocks.mixed import mixed
from fused_remat.blocks.program import Graph
from fused_remat.policies import Policy

#: Names of the params that are no weights, in any block of a layer.
NOT_WEIGHTS = (
    "mask", "padding", "memory_mask", "memory_padding", "seed", "cos", "sin", "lengths", "cu_q",
    "cu_k",
)  # fmt: skip


def run_layer(
    graph: Graph,
    tensors: Mapping[str, Tensor | None],
    *,
    policy: str | Policy = "full",
    backend: str = "auto",
    seq_first: bool = False,
    preserve_strides: bool = True,
    functions: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
    accumulate_into: str | None = None,
    compute: torch.dtype | None = None,
    tell: Callable[[str], None] = warn_of_kept_input,
) -> Tensor:
    """Run a layer's block on `tensors`, by the names of `graph.tensors`.

    Shapes: inputs (B, S, D), or (S, B, D) if `seq_first`; masks (S, S), (B*H, S, S) or four
        dimensions, paddings (B, S).
    compute: the dtype of what is not in the residual stream (`blocks.mixed`); None for the input's.
    tell: as in `run_block`.
    """
    if compute is not None:
        graph = mixed(graph, compute)
    accumulation = None
    if accumulate_into is not None:
        names = frozenset(graph.params).difference(NOT_WEIGHTS)
        accumulation = Accumulation(accumulate_into, names)
    return run_block(
        graph,
        policy,
        tensors,
        backend=backend,
        seq_first=seq_first,
        preserve_strides=preserve_strides,
        functions=functions,
        accumulation=accumulation,
        tell=tell,
    )
