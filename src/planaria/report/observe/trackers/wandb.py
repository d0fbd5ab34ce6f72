"""Weights & Biases, online or offline into the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from pydantic import PrivateAttr

from planaria.common.errors import UserError
from planaria.report.observe.tracker import Tracker, require_library

_AXIS = "step"


class WandB(Tracker):
    """One W&B run per run, also when resumed; its id is the run's identity.

    The library reads the key (``wandb login``, ``WANDB_API_KEY``); recipes never hold it.
    """

    project: str = "planaria"
    """project of the run"""
    entity: str = ""
    """user or team that the project belongs to; the user's default if empty"""
    mode: Literal["online", "offline"] = "online"
    """offline: files in the run's wandb/, for `wandb sync`"""
    _run: Any = PrivateAttr()

    def require(self) -> None:
        require_library("wandb", "wandb", "wandb")
        if self.mode == "online" and not import_module("wandb").login(prompt=False, verify=False):
            raise UserError(
                "observe.trackers: 'wandb' has no key; run `wandb login`, or --observe.options.wandb.mode offline"
            )

    def open(self, folder: Path) -> None:
        wandb: Any = import_module("wandb")
        self._run = wandb.init(
            project=self.project,
            entity=self.entity or None,
            mode=self.mode,
            id=self._identity,
            name=folder.name,
            resume="allow",
            dir=str(folder),
            config=dict(self._settings),
            allow_val_change=True,
            reinit="create_new",
            save_code=False,
            # planaria owns the terminal and reports nothing about the machine.
            settings=wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True),
        )
        # W&B's own steps cannot repeat after a rollback; a custom axis can.
        self._run.define_metric("*", step_metric=_AXIS)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({_AXIS: step, **values})

    def close(self) -> None:
        self._run.finish()
