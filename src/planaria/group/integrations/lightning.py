"""Members whose loop is a ``Trainer`` of Lightning, with automatic or manual optimization."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from planaria.group.group import Group


class GroupCallback(Callback):  # type: ignore[misc]
    """Makes a trainer a member of a group: ``Trainer(callbacks=[GroupCallback(group)])``.

    Give ``fit`` the data of this member: ``trainer.fit(module, group.shard(loader))``. One epoch of the trainer is then
    all that the group trains, so set ``max_epochs=1`` and count epochs in ``shard``.
    """

    def __init__(self, group: Group, **exchange: Any) -> None:
        """:param exchange: arguments of :meth:`planaria.Group.wrap`."""
        self._group, self._exchange = group, exchange

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wrap the optimizer before the first batch is read."""
        (original,) = trainer.optimizers
        also = {f"scheduler{n}": config.scheduler for n, config in enumerate(trainer.lr_scheduler_configs)}
        trainer.optimizers = [self._group.wrap(original, pl_module, also=also, **self._exchange)]

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Report the loss to the group."""
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if loss is not None:
            self._group.log(float(loss))

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the group, if it still runs."""
        self._group.leave()
