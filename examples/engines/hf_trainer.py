"""Train a converted Llama, attention dropout on, with Hugging Face's `Trainer`: DDP, or FSDP2.

`Trainer`'s own checkpoint, `checkpoint-10`, has weights, optimizer state, schedule, the place in
the data and every rank's random state. In it, `dcp` is one of `torch.distributed.checkpoint`:
resuming from that takes weights, optimizer state and schedule from there, the rest from around it.

    torchrun --nproc-per-node 2 examples/engines/hf_trainer.py --out build/trainer
    torchrun --nproc-per-node 2 examples/engines/hf_trainer.py --resume build/trainer/checkpoint-10
    torchrun --nproc-per-node 2 examples/engines/hf_trainer.py \\
        --resume build/trainer/checkpoint-10/dcp

`--fsdp` shards layers by FSDP2. Accelerate takes it to GPUs only; `shard_on_cpus` is for trying it
without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tiny_lm
import torch
from accelerate import FullyShardedDataParallelPlugin
from accelerate_loop import shard_on_cpus
from tiny_lm import Losses, TrainState, Windows
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from fused_remat.integrations.transformers import FusedRematCallback

#: The callback switches off what would run blocks a second time.
FSDP2 = {"state_dict_type": "SHARDED_STATE_DICT", "activation_checkpointing": True}


def llama() -> nn.Module:
    """A Llama over bytes."""
    tiny_lm.seed_all()
    config = LlamaConfig(
        vocab_size=tiny_lm.VOCABULARY, hidden_size=tiny_lm.WIDTH, num_hidden_layers=tiny_lm.LAYERS,
        intermediate_size=2 * tiny_lm.WIDTH, num_attention_heads=tiny_lm.HEADS,
        num_key_value_heads=tiny_lm.HEADS // 2, attention_dropout=0.1, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


class DcpTrainer(Trainer):
    """Trainer that notes every loss, and that saves to and loads from DCP as well."""

    dcp: Path | None = None  #: what to resume from, instead of Trainer's own files
    losses: Losses

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        if self.args.fsdp and self.args.use_cpu:
            plugin = FullyShardedDataParallelPlugin(**self.args.fsdp_plugin_args)
            shard_on_cpus(plugin)
            self.is_fsdp_enabled = True

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        self.losses.note(self.state.global_step + 1, loss)
        return loss

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        super()._save_checkpoint(*args, **kwargs)
        folder = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        self._train_state().save(folder / "dcp")

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.dcp is None:
            super()._load_from_checkpoint(*args, **kwargs)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if self.dcp is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        else:
            self._train_state().load(self.dcp)

    def _train_state(self) -> TrainState:
        return TrainState(self.model, [self.optimizer.optimizer], schedule=self.lr_scheduler)


def collate(windows: list[Tensor]) -> dict[str, Tensor]:
    """The labels are the tokens: the model shifts."""
    tokens = torch.stack(windows)
    return {"input_ids": tokens, "labels": tokens}


def main(argv: Sequence[str] | None = None) -> None:
    """Build, resume if requested, train."""
    fsdp = {"action": "store_true", "help": "shard layers by FSDP2"}
    args = tiny_lm.parse(__doc__, argv, fsdp=fsdp)
    device = tiny_lm.join()
    settings = TrainingArguments(
        output_dir=str(args.out), max_steps=args.steps, save_steps=args.save_at, seed=tiny_lm.SEED,
        per_device_train_batch_size=tiny_lm.BATCH, learning_rate=tiny_lm.LEARNING_RATE,
        warmup_steps=tiny_lm.WARMUP_STEPS, max_grad_norm=tiny_lm.CLIP, report_to=[],
        use_cpu=device.type == "cpu", ddp_find_unused_parameters=False, disable_tqdm=True,
        dataloader_pin_memory=False, fsdp=args.fsdp or None,
        fsdp_config=FSDP2 if args.fsdp else None,
    )  # fmt: skip
    trainer = DcpTrainer(
        llama(), settings, train_dataset=Windows(), data_collator=collate,
        callbacks=[FusedRematCallback(args.policy)],
    )  # fmt: skip
    own, first = args.resume, 0
    if own is not None:
        trainer.dcp, own = (own, own.parent) if own.name == "dcp" else (None, own)
        first = int(own.name.removeprefix("checkpoint-"))
    trainer.losses = Losses(args.out, first)
    tiny_lm.seed_rank()
    trainer.train(resume_from_checkpoint=own and str(own))


if __name__ == "__main__":
    main()
    tiny_lm.leave()
