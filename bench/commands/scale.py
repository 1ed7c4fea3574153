"""What `python -m fused_remat scale` says, beside runs of one, two and four processes on a CPU.

    python -m bench scale                # with nothing beside it
    python -m bench scale --no-times     # memory alone

A small language model is sharded (FSDP2), divided (tensor and sequence parallel), and both. Of
every rank: the bytes of its shards, gradients, optimizer states and kept activations, which are to
be as predicted; and the most that a step takes, of which the prediction is an upper bound. A step
is forward, backward and AdamW; its time is predicted from this machine's ceilings, measured by one
process before, and shared by as many processes as there are for each core. Written to the folder:
scale-cpu.json.
"""

from __future__ import annotations

import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from bench.measure.machine import environment
from bench.measure.options import Parser
from bench.measure.results import ResultsFile, Row
from bench.pages import scale as report
from fused_remat.convert import set_policy
from fused_remat.parallel import tensor_parallel_plan
from fused_remat.planner import chain as chains
from fused_remat.planner.chain import Choice
from fused_remat.planner.options import kept_by_name
from fused_remat.policies import kept_names
from fused_remat.report.allocations import AllocationTrace, SavedBytes
from fused_remat.scale import models
from fused_remat.scale.costs import HARDWARE, Costs, of_this_machine
from fused_remat.scale.estimate import step_seconds, way_of
from fused_remat.scale.layout import Layout, Mesh, gathered
from fused_remat.scale.memory import Setup, chain_of, state_bytes, weight_bytes
from fused_remat.scale.shapes import LARGE, MODELS

POLICIES = ("full", "fast", "none")
#: Tokens of each of two sequences.
SEQ = 512
#: Data by tensor, and whether the stream is divided.
LAYOUTS = (
    Layout(Mesh(1, 1)),
    Layout(Mesh(2, 1)),
    Layout(Mesh(1, 2), sequence=False),
    Layout(Mesh(1, 2)),
    Layout(Mesh(2, 2)),
)


def main(arguments: Sequence[str]) -> int:
    """Run all layouts and policies; 1 if a rank's bytes are not as predicted."""
    parser = Parser("scale", __doc__, "rounds out", rounds=10)
    parser.add("--no-times", action="store_true", help="memory alone")
    args = parser.parse(arguments)
    rounds = 0 if args.no_times else args.rounds
    results = ResultsFile(args.out / "scale-cpu.json", environment("cpu"), {"rounds": rounds})
    ceilings = (1, of_this_machine, torch.float32, HARDWARE["h100"])
    costs = _in_processes(*ceilings)[0] if rounds else None
    model = dataclasses.replace(
        LARGE["llama3-70b"], name="tiny", d_model=256, nhead=8, kv_heads=2, head_dim=32, d_ff=768,
        layers=4, vocab=4096, seq_len=SEQ,
    )  # fmt: skip
    for layout in LAYOUTS:
        for row in measured(Setup(model, layout, 2, SEQ, torch.float32), costs, rounds):
            results.put(row)
            print(report.line(row), flush=True)
    print(f"\n{report.table(results.data)}\n\n{results.path}")
    wrong = [row for row in results.rows if not report.is_right(row)]
    if wrong:
        print(f"{len(wrong)} rows are not as predicted", file=sys.stderr)
    return int(bool(wrong))


# --- what a rank of a run holds, and how long its step is


def tiny(name: str, data: int, tensor: int, sequence: bool = True, low: bool = False) -> Setup:
    """A tiny model of the same kind, of widths that two data ranks do not divide evenly.

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


def divided(setup: Setup, policy: str) -> tuple[nn.Module, tuple[Tensor, ...], int]:
    """The model, its inputs, and this rank's place in the data-parallel dimension."""
    torch.manual_seed(0)
    mesh = setup.layout.mesh
    model, inputs = models.build(setup.model, setup.batch, setup.seq, dtype=setup.param_dtype)
    set_policy(model, "*", policy)
    if mesh.devices == 1 and not setup.fsdp:
        return model, inputs, 0
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
    return model, inputs, grid["data"].get_local_rank()


def held(setup: Setup, policy: str) -> dict[str, Held]:
    """This rank's bytes by part, in a step of a model whose layers all have `policy`."""
    model, inputs, place = divided(setup, policy)
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
    predicted = weight_bytes(setup, place)
    keeps = setup.model.layers * sum(named.values())
    return {
        "weights": Held(weights, predicted),
        "a layer, gathered": Held(whole[0], gathers),
        "kept by layers": Held(sum(saved.total for saved in kept), keeps),
        "gradients": Held(gradients, predicted),
        "optimizer states": Held(_nbytes(states), state_bytes(setup, place)),
    }


def taken(setup: Setup, policy: str) -> int:
    """Most bytes at a time that a second step's forward and backward take, above what rests."""
    model, inputs, _ = divided(setup, policy)
    model(*inputs).backward()
    model.zero_grad()
    with AllocationTrace() as trace:
        model(*inputs).backward()
    return max(span.peak for span in trace.spans)


def timed(setup: Setup, policy: str, rounds: int) -> float:
    """Seconds of a step, forward, backward and AdamW: the median of some, all ranks together."""
    model, inputs, _ = divided(setup, policy)
    optimizer = torch.optim.AdamW(model.parameters())
    together = dist.barrier if dist.is_initialized() else lambda: None
    found = []
    for _ in range(rounds + 1):
        together()
        begin = time.perf_counter()
        model(*inputs).backward()
        optimizer.step()
        optimizer.zero_grad()
        together()
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def everything(setup: Setup, policies: tuple[str, ...], rounds: int) -> dict[str, Any]:
    """By policy: this rank's bytes, the most that a step takes, and its time (None: no rounds)."""
    return {
        policy: {
            "held": {name: part._asdict() for name, part in held(setup, policy).items()},
            "taken": taken(setup, policy),
            "seconds": timed(setup, policy, rounds) if rounds else None,
        }
        for policy in policies
    }


# --- runs


def measured(setup: Setup, costs: Costs | None, rounds: int) -> Iterator[Row]:
    """A row for every policy: each rank's bytes, the most that a step takes, and its time."""
    layout, model = setup.layout, setup.model
    world = layout.mesh.devices
    ranks = _in_processes(world, everything, setup, POLICIES, rounds)
    crowd = max(1.0, world / (os.cpu_count() or 1))  # processes take turns beyond the cores
    for policy in POLICIES:
        found = [rank[policy] for rank in ranks]
        way = way_of(setup, costs or HARDWARE["h100"], policy)
        chain = chain_of(setup, [way.option])
        between = ("weights", "optimizer states", "tokens and tables")
        peak = chains.peak(chain, Choice((0,) * model.layers))
        alone = sum(step_seconds(setup, costs, [(way, model.layers)]).values()) if costs else None
        yield {
            "case": {
                "data": layout.mesh.data, "tensor": layout.mesh.tensor,
                "sequence": layout.stream > 1, "policy": policy, "width": model.d_model,
                "layers": model.layers, "seq": setup.seq,
            },
            "ranks": [rank["held"] for rank in found],
            "taken": max(rank["taken"] for rank in found),
            "bound": peak - sum(chain.resting[name] for name in between),
            "seconds": max(rank["seconds"] for rank in found) if rounds else None,
            "predicted_seconds": alone and crowd * alone,
        }  # fmt: skip


def _in_processes(world: int, fn: Callable[..., Any], *args: Any) -> list[Any]:
    """What `fn` returns in every rank of a new group, each of one thread."""
    with tempfile.TemporaryDirectory() as folder:
        given = (world, folder, fn, args)
        processes.spawn(_rank, given, nprocs=world)  # type: ignore[no-untyped-call]
        files = [Path(folder) / str(rank) for rank in range(world)]
        return [torch.load(path, weights_only=False) for path in files]


def _rank(rank: int, world: int, folder: str, fn: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    if world > 1:
        file = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=file, rank=rank, world_size=world)
    torch.save(fn(*args), Path(folder) / str(rank))
    if world > 1:
        dist.barrier()  # gloo's threads let go of the last tensors now: at exit they would abort
        dist.destroy_process_group()
