"""What `python -m fused_remat scale` says, beside runs of one, two and four processes on a CPU.

    python -m bench scale                # with nothing beside it
    python -m bench scale --no-times     # memory alone, which nothing beside it changes

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
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from bench.measure.machine import environment
from bench.measure.options import Parser
from bench.measure.results import ResultsFile, Row
from bench.pages import scale as report
from bench.scale import runs
from fused_remat.planner import chain as chains
from fused_remat.planner.chain import Choice
from fused_remat.scale.costs import HARDWARE, Costs, of_this_machine
from fused_remat.scale.estimate import step_seconds, way_of
from fused_remat.scale.layout import Layout, Mesh
from fused_remat.scale.memory import Setup, chain_of
from fused_remat.scale.shapes import LARGE

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


def measured(setup: Setup, costs: Costs | None, rounds: int) -> Iterator[Row]:
    """A row for every policy: each rank's bytes, the most that a step takes, and its time."""
    layout, model = setup.layout, setup.model
    world = layout.mesh.devices
    ranks = _in_processes(world, runs.everything, setup, POLICIES, rounds)
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
