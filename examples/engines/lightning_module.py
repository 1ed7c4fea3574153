"""Train a small language model with Lightning: FSDP2 by its `ModelParallelStrategy`.

Its checkpoint is of `torch.distributed.checkpoint`: one folder is both, the engine's own and DCP.
Lightning saves no random state, so the module adds every rank's.

    torchrun --nproc-per-node 2 examples/engines/lightning_module.py --out build/lightning
    torchrun --nproc-per-node 2 examples/engines/lightning_module.py \\
        --resume build/lightning/own-10
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import tiny_lm
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback
from pytorch_lightning.strategies import ModelParallelStrategy
from tiny_lm import Batches, Losses, RandomState, TinyLM, loss_of
from torch import Tensor
from torch.distributed.fsdp import fully_shard


class Language(pl.LightningModule):
    """The model, its optimizer and schedule; notes the losses."""

    def __init__(self, args: Any) -> None:
        super().__init__()
        self.args = args
        tiny_lm.seed_all()
        self.model = TinyLM(args.policy)
        self.random = RandomState()

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = tiny_lm.adamw(self.model)
        schedule = {"scheduler": tiny_lm.warmup(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def train_dataloader(self) -> Batches:
        return Batches(dist.get_rank(), dist.get_world_size())

    def on_train_start(self) -> None:
        self.losses = Losses(self.args.out, self.global_step)
        if self.args.resume is None:
            tiny_lm.seed_rank()
        else:
            self.random.load_state_dict(self.loaded)

    def training_step(self, windows: Tensor, index: int) -> Tensor:
        loss = loss_of(self.model, windows)
        self.losses.note(self.global_step + 1, loss)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        every = [None] * dist.get_world_size()
        dist.all_gather_object(every, self.random.state_dict())
        checkpoint["random"] = every

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.loaded = checkpoint["random"][dist.get_rank()]


class SaveAt(Callback):
    """Write one checkpoint, after the requested step; `ModelCheckpoint` is for many."""

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, *rest: Any) -> None:
        args = module.args
        if trainer.global_step == args.save_at:
            trainer.save_checkpoint(args.out / f"own-{args.save_at}")


def main(argv: Sequence[str] | None = None) -> None:
    """Build, resume if requested, train."""
    args = tiny_lm.parse(__doc__, argv)
    device = tiny_lm.join()
    world = dist.get_world_size()
    trainer = pl.Trainer(
        accelerator=device.type if device.type == "cpu" else "gpu", devices=world,
        strategy=ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1),
        max_steps=args.steps, gradient_clip_val=tiny_lm.CLIP, callbacks=[SaveAt()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Language(args), ckpt_path=args.resume)


if __name__ == "__main__":
    main()
    tiny_lm.leave()
