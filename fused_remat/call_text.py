"""A call of a block as text: what an operator is told besides tensors.

    {"graph": "norm_graph(NormSpec(kind='rms_norm'))", "wants": ["input"], "backend": "auto", ...}

It holds everything, so that a compiled program refers to no object, and a digest of the graph and
the version, so that a compiler's cache on disk does not outlive either.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fused_remat.blocks.program import Programs, programs
from fused_remat.blocks.recipe import graph_of
from fused_remat.calls import BlockCall
from fused_remat.offload import moved_names
from fused_remat.policies import Policy, kept_names, offload_of
from fused_remat.version import __version__


@dataclass(frozen=True)
class Described:
    """The text of a call, read.

    Attributes:
        call: what is computed.
        dtypes: of the tensors given, by name, in the order in which they are given.
    """

    call: BlockCall
    dtypes: Mapping[str, torch.dtype]

    @functools.cached_property
    def plan(self) -> Programs:
        return programs(self.call.graph, self.call.save, self.call.wants, tiled=False)

    @functools.cached_property
    def saved(self) -> tuple[str, ...]:
        """Those of the given tensors that backward reads again."""
        rereads = {*self.plan.kept_inputs, *self.plan.saved_params}
        return tuple(name for name in self.dtypes if name in rereads)

    @functools.cached_property
    def wanted(self) -> tuple[str, ...]:
        return tuple(name for name in self.dtypes if name in self.call.wants)

    def moved(self, device: torch.device) -> frozenset[str]:
        """What of it is returned on the host instead of `device`: kept names, and the input."""
        names = (*self.plan.kept, *(n for n in self.saved if n in self.call.graph.inputs))
        return moved_names(self.call.offload, names, device)

    def aligned(self, names: Sequence[str], values: Sequence[Any]) -> list[Any]:
        """`values`, of `names`, in the order of the graph's tensors; None for the others."""
        named = dict(zip(names, values, strict=True))
        return [named.get(name) for name in self.call.graph.tensors]


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


@functools.lru_cache(maxsize=4096)
def described(text: str) -> Described:
    """Read what `describe` wrote.

    Raises: RuntimeError if the text names a graph that is another now.
    """
    fields = json.loads(text)
    graph = graph_of(fields["graph"])
    if [graph.digest, __version__] != fields["of"]:
        raise RuntimeError(
            f"fused_remat: {fields['graph']} is not what it was when this was compiled: the "
            "builder was changed, or fused_remat was"
        )
    call = BlockCall(
        graph=graph,
        save=frozenset(fields["save"]),
        wants=frozenset(fields["wants"]),
        backend=fields["backend"],
        seq_first=fields["seq_first"],
        preserve_strides=fields["preserve_strides"],
        offload=frozenset(fields["offload"]),
    )
    return Described(call, {name: _dtype(dtype) for name, dtype in fields["dtypes"].items()})


def describe(
    recipe: str,
    policy: str | tuple[str, ...],
    names: tuple[str, ...],
    dtypes: tuple[torch.dtype, ...],
    wants: tuple[str, ...],
    backend: str,
    seq_first: bool,
    preserve_strides: bool,
    offload: tuple[str, ...] = (),
) -> str:
    """The text of a call; `names` and `dtypes` are those of the tensors given.

    Raises: ValueError, TypeError for a policy that does not fit the block.
    """
    graph = graph_of(recipe)
    what = policy if isinstance(policy, str) else Policy(save=policy, offload=offload)
    return json.dumps(
        {
            "graph": recipe,
            "of": [graph.digest, __version__],
            "save": sorted(kept_names(what, graph)),
            "offload": sorted(offload_of(what)),
            "wants": sorted(wants),
            "backend": backend,
            "seq_first": seq_first,
            "preserve_strides": preserve_strides,
            "dtypes": {
                n: str(d).removeprefix("torch.") for n, d in zip(names, dtypes, strict=True)
            },
        }
    )
