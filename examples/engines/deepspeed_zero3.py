"""Train a small language model with DeepSpeed's ZeRO-3: parameters sharded between processes.

ZeRO-3 gathers a module's parameters by hooks on it, around its forward and its backward. A fused
layer reads the parameters of its submodules without calling them, so that the layer has to be the
unit: `set_z3_leaf_modules`. (Without it the submodules have hooks, and the layer runs in ordinary
operations under checkpoint, with a `FusedRematWarning`: right, but slower.) The backward that
rebuilds reads what ZeRO-3 gathered for it again.

    torchrun --nproc-per-node 2 examples/engines/deepspeed_zero3.py --out build/deepspeed
    torchrun --nproc-per-node 2 examples/engines/deepspeed_zero3.py --resume build/deepspeed/own-10

`own-10` is DeepSpeed's checkpoint; `dcp-10` holds weights and optimizer state by their names,
whole, for `torch.distributed.checkpoint`: to resume from, or for other engines and stock models.
Data and dropout are those of titan_loop.py, and the losses differ from its by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import deepspeed
import tiny_lm
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    set_z3_leaf_modules,
)
from tiny_lm import Batches, Losses, RandomState, TinyLM, loss_of

from fused_remat import FusedRematCausalLayer

MOMENTS = ("exp_avg", "exp_avg_sq")
CONFIG = {
    "train_micro_batch_size_per_gpu": tiny_lm.BATCH,
    "gradient_clipping": tiny_lm.CLIP,
    # Small parameters would stay whole by default; here, all are sharded.
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
    "zero_allow_untested_optimizer": True,  # torch's AdamW; DeepSpeed compiles its own when used
}


def build(policy: str) -> Any:
    """DeepSpeed's engine around the model, whose layers are each gathered at once."""
    tiny_lm.seed_all()
    model = TinyLM(policy)
    set_z3_leaf_modules(model, [FusedRematCausalLayer])
    optimizer = tiny_lm.adamw(model)
    schedule = tiny_lm.warmup(optimizer)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=CONFIG
    )
    return engine


class ZeroState:
    """What the DCP checkpoint has, `Stateful`: whole fp32 weights and moments by parameters' names.

    Every rank passes all of them; DCP writes each once. `others`, in this rank's own state, are
    what DeepSpeed's own checkpoint has as well (its `client_state`).
    """

    def __init__(self, engine: Any, others: OwnState) -> None:
        self.engine, self.others = engine, others

    def state_dict(self) -> dict[str, Any]:
        for flat, adam in self._adam_states():
            if not adam:  # AdamW makes moments at its first step; a checkpoint is loaded before
                fresh = {key: torch.zeros_like(flat) for key in MOMENTS}
                adam |= {"step": torch.tensor(0.0), **fresh}
        named = dict(self.engine.module.named_parameters())
        moments = {
            name: {key: safe_get_full_optimizer_state(p, key) for key in MOMENTS}
            for name, p in named.items()
        }
        return {
            "model": {name: safe_get_full_fp32_param(p) for name, p in named.items()},
            "optimizer": {"state": moments},
            "schedule": self.engine.lr_scheduler.state_dict(),
            f"rank{dist.get_rank()}": self.others.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, p in self.engine.module.named_parameters():
            safe_set_full_fp32_param(p, state["model"][name])  # what the optimizer steps
            with deepspeed.zero.GatheredParameters(p, modifier_rank=0), torch.no_grad():
                p.copy_(state["model"][name])  # what forward reads until then
            for key in MOMENTS:
                safe_set_full_optimizer_state(p, state["optimizer"]["state"][name][key], key)
        self.others.load_state_dict(state[f"rank{dist.get_rank()}"])
        for _, adam in self._adam_states():
            adam["step"].fill_(self.others.batches.taken)
        schedule, adamw = self.engine.lr_scheduler, self.engine.optimizer.optimizer
        schedule.load_state_dict(state["schedule"])
        for group, rate in zip(adamw.param_groups, schedule.get_last_lr(), strict=True):
            group["lr"] = rate

    def _adam_states(self) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
        """This rank's flat parameters and AdamW's state of each."""
        zero = self.engine.optimizer
        return [(flat, zero.optimizer.state[flat]) for flat in zero.fp32_partitioned_groups_flat]


class OwnState:
    """This rank's place in the data and random state, which DeepSpeed does not save."""

    def __init__(self) -> None:
        self.batches, self.random = Batches(dist.get_rank(), dist.get_world_size()), RandomState()

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches.state_dict(), "random": self.random.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches.load_state_dict(state["batches"])
        self.random.load_state_dict(state["random"])


def main(argv: Sequence[str] | None = None) -> None:
    """Build, resume if requested, train."""
    args = tiny_lm.parse(__doc__, argv)
    device = tiny_lm.join()
    deepspeed.init_distributed(dist.get_backend())
    engine, own = build(args.policy), OwnState()
    tiny_lm.seed_rank()
    state = {"train": ZeroState(engine, own)}
    if args.resume is not None and (args.resume / ".metadata").exists():
        dcp.load(state, checkpoint_id=args.resume)
    elif args.resume is not None:
        _, client_state = engine.load_checkpoint(str(args.resume.parent), args.resume.name)
        own.load_state_dict(client_state)
    first = own.batches.taken
    losses = Losses(args.out, first)
    for step, windows in zip(range(first + 1, args.steps + 1), own.batches, strict=False):
        loss = loss_of(engine, windows.to(device))
        engine.backward(loss)
        engine.step()
        losses.note(step, loss)
        if step == args.save_at:
            engine.save_checkpoint(str(args.out), f"own-{step}", own.state_dict())
            dcp.save(state, checkpoint_id=args.out / f"dcp-{step}")


if __name__ == "__main__":
    main()
    tiny_lm.leave()
