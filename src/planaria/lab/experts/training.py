"""Trainings that know nothing of one another: each a recipe of its own and a process of its own, ``planaria train``.

One that dies is taken up again where its last checkpoint was; one that cannot be trained is given up, and the others go
on. The recipes lie in the run's folder and name what is in it from where they lie, so any of them can be trained on
another machine instead, wherever a copy of that folder is there.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomli_w

from planaria.common import atomic
from planaria.config import consent, recipe
from planaria.config.schema import RunConfig
from planaria.control.logs import METRICS
from planaria.lab.experts.manifest import WEIGHTS
from planaria.lab.trials.jobs import Job, Processes, Watcher, run_jobs
from planaria.runtime.checkpoint.store import CheckpointStore


@dataclass(frozen=True)
class Training:
    """One model to be trained into ``folder``."""

    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.out) / self.config.name

    @property
    def recipe(self) -> Path:
        """The file that it is trained by."""
        return self.folder.with_name(f"{self.config.name}.toml")

    @property
    def log(self) -> Path:
        """What its process said."""
        return self.folder.with_name(f"{self.config.name}.log")

    @property
    def model(self) -> Path:
        """The exported model, which is there when the training is done."""
        return self.folder / "model"

    @property
    def done(self) -> bool:
        return (self.model / WEIGHTS).is_file()

    def job(self) -> Job:
        """Its steps are those that need not be made again."""
        steps, checkpoints = self.config.train.steps, CheckpointStore(self.folder / "checkpoints")
        growing = (self.folder / METRICS, self.log)
        return Job(
            name=self.config.name,
            steps=steps,
            log=self.log,
            done=lambda: self.done,
            reached=lambda: steps if self.done else checkpoints.reached(),
            pulse=lambda: [file.stat().st_size if file.is_file() else 0 for file in growing],
            command=lambda: ["-m", "planaria", *self._words(), *consent.flags()],
        )

    def _words(self) -> list[str]:
        """To begin, to go on where the last checkpoint was, or to export what is trained."""
        begin = ["train", str(self.recipe), "--quiet", "--out", self.config.out]
        if self.config.data.cache is not None:
            begin += ["--data.cache", self.config.data.cache]
        if not self.folder.exists():
            return begin
        saved = CheckpointStore(self.folder / "checkpoints").newest(whole_only=True)
        if saved is None:  # it died before its first checkpoint: nothing is lost with it
            self.folder.rename(self.folder.with_name(f".{self.folder.name}.{time.time_ns()}"))
            return begin
        if saved.step < self.config.train.steps:
            return ["train", "--resume", str(self.folder), "--quiet", *self._texts()]
        shutil.rmtree(self.model, ignore_errors=True)
        return ["export", str(self.folder), "--to", str(self.model)]

    def _texts(self) -> list[str]:
        """Flags that say where its text lies here: what was begun elsewhere may have had it at another path."""
        mixture = self.config.data.mixture
        places = {f"data.mixture.{name}.source": one.source for name, one in mixture.items()}
        places = places or {"data.source": self.config.data.source}
        return [word for name, place in places.items() for word in (f"--{name}", place)]


def portable(config: RunConfig, folder: Path) -> str:
    """The recipe of a training, to lie in ``folder``: all of the run is named from there, and it trains into it.

    The cache of tokens is each machine's own.
    """
    tree = recipe.moved(config.model_dump(mode="json", exclude_none=True), lambda name: _from(folder, name))
    tree["data"].pop("cache", None)
    return tomli_w.dumps(tree | {"out": "."})


def _from(folder: Path, name: str) -> str:
    """A full path as one from ``folder``; other names as they are."""
    if not Path(name).is_absolute():
        return name
    path = os.path.relpath(name, folder.absolute())
    return path if path.startswith("..") else f"./{path}"


def configured(base: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """``base`` with the tables ``changes`` laid over it, checked as a recipe is."""
    return RunConfig.model_validate_json(json.dumps(recipe.overlaid(base.model_dump(mode="json"), changes)))


def train_all(
    title: str, trainings: Sequence[Training], processes: Processes, retries: int, watcher: Watcher
) -> list[str]:
    """Train what is not done yet; the names of those that were given up.

    All recipes are there from the beginning, so that any that waits can be trained elsewhere.
    """
    for one in trainings:
        if not one.done:
            one.recipe.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(one.recipe, portable(one.config, one.recipe.parent))
    lost = list[str]()
    run_jobs(
        title, [one.job() for one in trainings], processes, watcher, lambda job, how: lost.append(job.name), retries
    )
    return lost
