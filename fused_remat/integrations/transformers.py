"""A callback for transformers' `Trainer` and what is built on it, such as TRL's trainers."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from accelerate.state import AcceleratorState
from torch import nn
from transformers import TrainerCallback, TrainingArguments
from transformers.integrations import is_deepspeed_zero3_enabled
from transformers.utils import logging

from fused_remat.autograd.engine import current_pass
from fused_remat.convert import check_loss, conversion, convert, fused_layers
from fused_remat.execution.observe import OBSERVERS, BlockRun
from fused_remat.layers import FusedRematLayer
from fused_remat.policies import Policy
from fused_remat.report.units import human
from fused_remat.steps.operations import warn

_logger = logging.get_logger("transformers.fused_remat")


class FusedRematCallback(TrainerCallback):  # type: ignore[misc]
    """Converts a Trainer's model before the first step, and logs once what its layers keep.

        Trainer(model, args, train_dataset=data, callbacks=[FusedRematCallback("lean")]).train()

    The Trainer's constructor converts the model, so that DDP, FSDP2, DeepSpeed and torch.compile
    see converted layers; of a model that `model_init` builds, or with `add_callback`, `train()`
    does, after they have. Converted layers replace `gradient_checkpointing=True` and FSDP's
    `activation_checkpointing`, which is switched off with a warning. Under ZeRO-3 each layer
    becomes a leaf module. After the first step a warning of the logger "transformers.fused_remat"
    describes what the layers ran as, and the bytes that they keep.

    Args:
        policy, loss: as in `convert`.

    Raises: ValueError or TypeError for an unknown policy or loss; the Trainer's constructor raises
        the errors of `convert`.

    >>> FusedRematCallback("leen")
    Traceback (most recent call last):
    ...
    ValueError: unknown policy 'leen'; valid presets: full, lean, balanced, fast, none
    """

    def __init__(
        self, policy: str | Policy = "full", loss: bool | Literal["grad_in_forward"] = False
    ) -> None:
        if not isinstance(policy, Policy):
            FusedRematLayer(2, 1, 2, policy=policy)
        check_loss(loss)
        self.policy, self.loss = policy, loss
        self._is_logged = False

    def on_init_end(
        self, args: TrainingArguments, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Convert the model of the constructor."""
        if fused_layers(model):
            warn(
                f"{type(model).__name__} was converted before, so that policy and loss of "
                "FusedRematCallback have no effect; leave out convert(model)"
            )
        self.on_train_begin(args, state, control, model)

    def on_train_begin(
        self, args: TrainingArguments, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Convert a model that the constructor did not have."""
        if not fused_layers(model):
            convert(model, self.policy, loss=self.loss)
        plugin = getattr(AcceleratorState(), "fsdp_plugin", None)
        if plugin is not None and plugin.activation_checkpointing:
            plugin.activation_checkpointing = False
            _logger.warning(
                "FusedRematCallback sets `activation_checkpointing` of FSDP to False: it would run "
                "the forward of converted layers a second time."
            )
        if is_deepspeed_zero3_enabled():
            from deepspeed.utils import set_z3_leaf_modules

            set_z3_leaf_modules(model, list({*map(type, fused_layers(model).values())}))

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Observe the blocks of the first step."""
        if not self._is_logged:
            self._kept = self._inputs = self._stock = 0  # bytes of the first batch
            if self._observe not in OBSERVERS:  # a step that failed leaves it
                OBSERVERS.append(self._observe)

    def _observe(self, run: BlockRun) -> None:
        x, call = run.tensors[0], run.call
        is_layer = call.graph.kind != "linear_cross_entropy"
        if is_layer and current_pass() == -1 and x is not None:  # not a replay in backward
            every = dataclasses.replace(call, save=frozenset(call.graph.names))
            self._kept += sum(call.kept_bytes(run.tensors).values())
            self._stock += sum(every.kept_bytes(run.tensors).values())
            self._inputs += x.nbytes

    def on_substep_end(
        self, args: TrainingArguments, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Log what the first batch of the first step kept."""
        if self._is_logged:
            return
        self._is_logged = True
        OBSERVERS.remove(self._observe)
        lines = [f"FusedRemat with policy {self.policy!r}, first batch:"]
        if args.torch_compile:
            lines.append("the model is compiled, and calls of compiled layers are not counted")
        else:
            lines += str(conversion(model)).splitlines()
        if self._kept:
            lines.append(
                f"blocks keep {human(self._kept)} for backward; checkpointing would keep "
                f"{human(self._inputs)}, the stock layers at least {human(self._stock)}"
            )
        if state.is_world_process_zero:
            _logger.warning("\n  ".join(lines))

    on_step_end = on_substep_end
