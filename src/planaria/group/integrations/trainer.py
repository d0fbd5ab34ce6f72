"""Members whose loop is a ``Trainer`` of Hugging Face, or a trainer derived from it, such as TRL's ``SFTTrainer``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from planaria.group.group import Group
from planaria.group.shard import Shard


class _Batches:
    """A member's batches as a trainer's epochs: each continues where the last one ended."""

    def __init__(self, shard: Shard, epochs: int) -> None:
        self._shard, self._epochs = shard, epochs
        self._left: Iterator[Any] | None = None

    def __len__(self) -> int:
        return math.ceil(len(self._shard) / self._epochs)

    def __iter__(self) -> Iterator[Any]:
        self._left = self._left or iter(self._shard)
        return self._left


class GroupCallback(TrainerCallback):
    """Makes a trainer a member of a group: its samples, its optimizer and its learning rate follow the group.

    ``num_train_epochs``, or ``max_steps``, then count the data and steps of all members together. Each member writes
    its own checkpoints and logs.
    """

    def __init__(self, group: Group, trainer: Trainer, **exchange: Any) -> None:
        """:param exchange: arguments of :meth:`planaria.Group.wrap`."""
        self._group, self._exchange = group, exchange
        self._original, self._trainer = trainer.get_train_dataloader, trainer
        trainer.get_train_dataloader = self._shard  # type: ignore[method-assign]

    def _shard(self) -> Any:
        """Return the member's batches, from the trainer's dataset and collator."""
        whole, arguments = self._original(), self._trainer.args
        loader: DataLoader[Any] = DataLoader(
            whole.dataset,
            batch_size=self._trainer._train_batch_size,
            shuffle=True,
            collate_fn=whole.collate_fn,
            drop_last=arguments.dataloader_drop_last,
        )
        steps = arguments.max_steps if arguments.max_steps > 0 else None
        epochs = math.ceil(arguments.num_train_epochs)
        shard = self._group.shard(loader, epochs=epochs, steps=steps, accumulate=arguments.gradient_accumulation_steps)
        return _Batches(shard, 1 if steps else epochs)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any
    ) -> None:
        """Wrap the trainer's optimizer; the accelerator's wrapper around it stays."""
        accelerated, scheduler = given["optimizer"], given["lr_scheduler"]
        accelerated.optimizer = self._group.wrap(
            accelerated.optimizer, given["model"], also={"scheduler": scheduler}, **self._exchange
        )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Let the learning rate follow the steps of all members."""
        scheduler = given["lr_scheduler"]
        while scheduler.last_epoch < self._group.progress:
            scheduler.step()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Report the loss to the group."""
        if (loss := (given.get("logs") or {}).get("loss")) is not None:
            self._group.log(float(loss))

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """End with the group."""
        control.should_training_stop = self._group.ended

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **given: Any) -> None:
        """Leave the group, if it still runs."""
        self._group.leave()
