"""Train a small language model with Hugging Face Accelerate, sharded by FSDP2.

With `SHARDED_STATE_DICT` Accelerate's own checkpoint, `own-10`, has parameters and optimizer state
as two of `torch.distributed.checkpoint`, next to the schedule and each rank's random state.
`dcp-10` is one of everything, as titan_loop.py writes it.

    torchrun --nproc-per-node 2 examples/engines/accelerate_loop.py --out build/accelerate
    torchrun --nproc-per-node 2 examples/engines/accelerate_loop.py --resume build/accelerate/own-10

Accelerate takes an FSDP plugin to GPUs only; `shard_on_cpus` is for trying this without one.
"""

from __future__ import annotations

from collections.abc import Sequence

import tiny_lm
import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from tiny_lm import BATCH, Losses, TinyLM, TrainState, Windows, loss_of
from torch.utils.data import DataLoader


def fsdp2() -> FullyShardedDataParallelPlugin:
    """Every fused layer a unit."""
    return FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", reshard_after_forward=True,
        auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=["FusedRematCausalLayer"],
    )  # fmt: skip


def shard_on_cpus(plugin: FullyShardedDataParallelPlugin) -> None:
    """What Accelerate (1.15) does with the plugin where it finds GPUs, and else leaves out."""
    for state in (PartialState, AcceleratorState):
        state._shared_state["distributed_type"] = DistributedType.FSDP
    AcceleratorState._shared_state["fsdp_plugin"] = plugin


def main(argv: Sequence[str] | None = None) -> None:
    """Build, resume if requested, train."""
    args = tiny_lm.parse(__doc__, argv)
    device, plugin = tiny_lm.join(), fsdp2()
    accelerator = Accelerator(cpu=device.type == "cpu", fsdp_plugin=plugin)
    if device.type == "cpu":
        shard_on_cpus(plugin)
    tiny_lm.seed_all()
    model = TinyLM(args.policy)
    optimizer = tiny_lm.adamw(model)
    order = torch.Generator().manual_seed(tiny_lm.SEED)  # the default one is dropout's
    loader = DataLoader(Windows(), BATCH, shuffle=True, drop_last=True, generator=order)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # Not prepared: Accelerate would step a schedule once for each process.
    schedule = tiny_lm.warmup(optimizer.optimizer)
    accelerator.register_for_checkpointing(schedule)
    tiny_lm.seed_rank()
    state = TrainState(model, [optimizer.optimizer], schedule=schedule)
    if args.resume is not None and (args.resume / ".metadata").exists():
        state.load(args.resume)
    elif args.resume is not None:
        accelerator.load_state(str(args.resume))
    first = schedule.last_epoch  # the place in the data follows from it
    losses = Losses(args.out, first)
    batches = accelerator.skip_first_batches(loader, first)
    for step, windows in zip(range(first + 1, args.steps + 1), batches, strict=False):
        loss = loss_of(model, windows)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), tiny_lm.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.note(step, loss)
        if step == args.save_at:
            accelerator.save_state(str(args.out / f"own-{step}"))
            state.save(args.out / f"dcp-{step}")


if __name__ == "__main__":
    main()
    tiny_lm.leave()
