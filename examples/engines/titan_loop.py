"""Train a small language model in a loop of torchtitan's kind: plain PyTorch, nothing around it.

A DeviceMesh, `fully_shard` of every layer and of the model, gradient clipping, a schedule of the
learning rate, and a `Stateful` train state that `torch.distributed.checkpoint` saves and loads.

    torchrun --nproc-per-node 2 examples/engines/titan_loop.py --out build/titan
    torchrun --nproc-per-node 2 examples/engines/titan_loop.py --resume build/titan/dcp-10

The second start prints the losses of steps 11 to 20 of the first. `--compile` compiles the layers;
`--tensor 2` divides each among two ranks, with sequence parallel (tensor by data, a 2-D mesh).
`--model llama3` trains two converted layers of torchtitan's own Llama 3, if it is installed.
"""

from __future__ import annotations

from collections.abc import Sequence

import tiny_lm
import torch
import torch.distributed as dist
from tiny_lm import Batches, Losses, TinyLM, TrainState, loss_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import parallelize_module

from fused_remat import convert
from fused_remat.parallel import tensor_parallel_plan


def titan_llama(policy: str) -> nn.Module:
    """Build torchtitan's smallest Llama 3, with PyTorch's attention, since its own needs masks.

    Projections are separate: packed ones have other names in a state dict, which DCP refuses.
    """
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.common.config_utils import make_gqa_config
    from torchtitan.models.llama3 import llama3_configs

    config = llama3_configs["debugmodel"](attn_backend="varlen")
    del config.layers[tiny_lm.LAYERS :]
    for layer in config.layers:
        init, given = layer.attention.wo.param_init, layer.attention
        layer.attention = make_gqa_config(
            dim=config.dim, n_heads=given.n_heads, rope=given.rope, wqkv_param_init=init,
            wo_param_init=init, inner_attention=ScaledDotProductAttention.Config(),
        )  # fmt: skip
    model = config.build()
    model.init_states()
    return convert(model, policy=policy)


def parallelize(model: nn.Module, mesh: DeviceMesh, compiles: bool) -> nn.Module:
    """Each layer a unit that is gathered for its forward, and again for its backward.

    What is gathered is a rank's part of the heads and of the MLP, if the mesh has a second rank for
    the others.
    """
    if mesh["tensor"].size() > 1:
        parallelize_module(model, mesh["tensor"], tensor_parallel_plan(model, sequence=True))
    for layer in model.layers.children():
        if compiles:
            layer.compile(fullgraph=True)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


def main(argv: Sequence[str] | None = None) -> None:
    """Build, resume if requested, train."""
    compiles = {"action": "store_true", "help": "compile each layer"}
    models = {"choices": ("tiny", "llama3"), "default": "tiny"}
    tensor = {"type": int, "default": 1}
    args = tiny_lm.parse(__doc__, argv, compile=compiles, tensor=tensor, model=models)
    device = tiny_lm.join()
    shape = (dist.get_world_size() // args.tensor, args.tensor)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "tensor"))
    tiny_lm.seed_all()
    build = TinyLM if args.model == "tiny" else titan_llama
    model = parallelize(build(args.policy).to(device), mesh, args.compile)
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
