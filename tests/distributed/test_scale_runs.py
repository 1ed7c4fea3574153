"""Bytes of a rank in runs of two and four processes, and as `fused_remat.scale` predicts them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fused_remat.convert import set_policy
from fused_remat.parallel import tensor_parallel_plan
from fused_remat.planner.options import kept_by_name
from fused_remat.policies import kept_names
from fused_remat.report.allocations import SavedBytes
from fused_remat.scale import models
from fused_remat.scale.layout import Layout, Mesh, gathered
from fused_remat.scale.memory import Setup, state_bytes, weight_bytes
from fused_remat.scale.shapes import LARGE, MODELS


def tiny(name: str, data: int, tensor: int, sequence: bool = True, low: bool = False) -> Setup:
    """Return a tiny model of the same kind, of widths that two data ranks do not divide evenly.

    low: computed in bfloat16.
    """
    model = {**MODELS, **LARGE}[name]
    kv = 4 if model.kv_heads == model.nhead else 2
    small = dataclasses.replace(
        model, d_model=30, nhead=4, kv_heads=kv, head_dim=8, d_ff=42, layers=3, vocab=50, seq_len=11
    )
    layout = Layout(Mesh(data, tensor), sequence)
    return Setup(small, layout, 2, 8, torch.bfloat16 if low else torch.float32)


class Held(NamedTuple):
    """A part of a rank's memory in bytes: measured in a step, and on paper."""

    measured: int
    on_paper: int


def _local(t: Any) -> Tensor:
    return t.to_local() if hasattr(t, "to_local") else t


def _nbytes(tensors: Iterable[Any]) -> int:
    return sum(_local(t).nbytes for t in tensors)


def divided(setup: Setup, policy: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Return the model and its inputs."""
    torch.manual_seed(0)
    mesh = setup.layout.mesh
    model, inputs = models.build(setup.model, setup.batch, setup.seq, dtype=setup.param_dtype)
    set_policy(model, "*", policy)
    grid = init_device_mesh("cpu", (mesh.data, mesh.tensor), mesh_dim_names=("data", "tensor"))
    if mesh.tensor > 1:
        plan = tensor_parallel_plan(model, sequence=setup.layout.sequence, head="head")
        parallelize_module(model, grid["tensor"], plan)
    if setup.fsdp:
        precision = MixedPrecisionPolicy(
            param_dtype=setup.dtype,
            reduce_dtype=setup.param_dtype,
            cast_forward_inputs=False,  # else every layer keeps 16-bit copies of the tables
        )
        layers: Any = model.layers
        for part in (*layers, model):
            fully_shard(part, mesh=grid["data"], mp_policy=precision)
    return model, inputs


def held(setup: Setup, policy: str) -> dict[str, Held]:
    """Return this rank's bytes by part, in a step of a model whose layers all have `policy`."""
    model, inputs = divided(setup, policy)
    optimizer = torch.optim.AdamW(model.parameters())
    tables = [t for t in model.buffers() if t is not None]
    kept: list[SavedBytes] = []
    whole: list[int] = []

    def enter(layer: nn.Module, args: Any) -> None:  # after FSDP2's own hooks, which gather
        whole.append(_nbytes(layer.parameters()))
        kept.append(SavedBytes([*map(_local, layer.parameters()), *tables]))
        kept[-1].__enter__()

    def leave(layer: nn.Module, args: Any, output: Any) -> None:
        kept[-1].__exit__(None, None, None)

    layers: Any = model.layers
    for layer in layers:
        layer.register_forward_pre_hook(enter)
        layer.register_forward_hook(leave)
    weights = _nbytes(model.parameters())
    model(*inputs).backward()
    gradients = _nbytes(p.grad for p in model.parameters())
    optimizer.step()
    named = kept_by_name(setup.example, kept_names(policy, setup.example.call.graph))
    gathers = gathered(setup.parameters.layer, setup.layout) * setup.dtype.itemsize
    states = [t for of in optimizer.state.values() for t in of.values()]
    predicted = weight_bytes(setup)
    keeps = setup.model.layers * sum(named.values())
    return {
        "weights": Held(weights, predicted),
        "a layer, gathered": Held(whole[0], gathers),
        "kept by layers": Held(sum(saved.total for saved in kept), keeps),
        "gradients": Held(gradients, predicted),
        "optimizer states": Held(_nbytes(states), state_bytes(setup)),
    }


#: The model, its mesh (data by tensor) and options, and the policy.
RUNS = [
    *((n, (2, 1), {}, p) for n in ("llama3-70b", "gpt3-175b") for p in ("full", "fast", "none")),
    ("llama3-70b", (2, 1), {"low": True}, "balanced"),
    *(
        ("llama3-70b", (1, 2), {"sequence": sequence}, policy)
        for sequence in (True, False)
        for policy in ("full", "lean", "none")
    ),
    *((name, (2, 2), {}, "fast") for name in ("llama3-70b", "qwen3-32b", "gpt3-175b")),
]


@pytest.mark.parametrize("name, mesh, options, policy", RUNS, ids=str)
def test_every_part_to_the_byte(request, name, mesh, options, policy):
    processes = request.getfixturevalue("four_processes" if mesh == (2, 2) else "two_processes")
    for rank, parts in enumerate(processes.run(held, tiny(name, *mesh, **options), policy)):
        assert len(parts) == 5
        for part, held_ in parts.items():
            most = held_.on_paper  # exact for the first data-parallel ranks
            assert 0 < held_.measured <= most, f"rank {rank}, {part}: {held_}"
            assert held_.measured == most or rank >= mesh[1], f"rank {rank}, {part}: {held_}"
