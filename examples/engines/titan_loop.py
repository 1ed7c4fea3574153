"""Train a small language model in a loop of torchtitan's kind: plain PyTorch, nothing around it.

A DeviceMesh, `fully_shard` of every layer and of the model, gradient clipping, a schedule of the
learning rate, and a `Stateful` train state that `torch.distributed.checkpoint` saves and loads.

    torchrun --nproc-per-node 2 examples/engines/titan_loop.py --out build/titan
    torchrun --nproc-per-node 2 examples/engines/titan_loop.py --resume build/titan/dcp-10

The second start prints the losses of steps 11 to 20 of the first. `--compile` compiles the layers;
`--tensor 2` divides each among two ranks, with sequence parallel (tensor by data, a 2-D mesh).
"""

from __future__ import annotations

from collections.abc import Sequence

import tiny_lm
import torch
import torch.distributed as dist
from tiny_lm import Batches, Losses, TinyLM, TrainState, loss_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fused_remat.parallel import tensor_parallel_plan


def parallelize(model: TinyLM, mesh: DeviceMesh, compiles: bool) -> TinyLM:
    """Each layer a unit that is gathered for its forward, and again for its backward.

    What is gathered is a rank's part of the heads and of the MLP, if the mesh has a second rank for
    the others.
    """
    if mesh["tensor"].size() > 1:
        parallelize_module(model, mesh["tensor"], tensor_parallel_plan(model, sequence=True))
    for layer in model.layers:
        if compiles:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Build, resume if requested, train."""
    compiles = {"action": "store_true", "help": "compile each layer"}
    args = tiny_lm.parse(__doc__, argv, compile=compiles, tensor={"type": int, "default": 1})
    device = tiny_lm.join()
    shape = (dist.get_world_size() // args.tensor, args.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    tiny_lm.seed_all()
    model = parallelize(TinyLM(args.policy).to(device), mesh, args.compile)
    optimizer = tiny_lm.adamw(model)
    schedule = tiny_lm.warmup(optimizer)
    batches = Batches(mesh["data"].get_local_rank(), mesh["data"].size())
    tiny_lm.seed_rank()
    state = TrainState(model, [optimizer], schedule=schedule, batches=batches)
    if args.resume is not None:
        state.load(args.resume)
    first = batches.taken
    losses = Losses(args.out, first)
    for step, windows in zip(range(first + 1, args.steps + 1), batches, strict=False):
        loss = loss_of(model, windows.to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), tiny_lm.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.note(step, loss)
        if step == args.save_at:
            state.save(args.out / f"dcp-{step}")


if __name__ == "__main__":
    main()
    tiny_lm.leave()
