"""Independent trainings, each with its own recipe and ``planaria train`` process.

A training whose process dies resumes from its last checkpoint; one that keeps failing is given up, and the others
continue. Recipes in the run's folder use relative paths, so a training can run on another machine with a copy of it.
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
from planaria.control.log.reader import METRICS
from planaria.lab.experts.manifest import WEIGHTS
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.trials.jobs import Job, JobSettings, Watcher, run_jobs


@dataclass(frozen=True)
class Training:
    """One model to train into ``folder``."""

    config: RunConfig

    @property
    def folder(self) -> Path:
        return Path(self.config.out) / self.config.name

    @property
    def recipe(self) -> Path:
        """The file that describes the training."""
        return self.folder.with_name(f"{self.config.name}.toml")

    @property
    def log(self) -> Path:
        """Output of its process."""
        return self.folder.with_name(f"{self.config.name}.log")

    @property
    def model(self) -> Path:
        """The exported model, present when the training is done."""
        return self.folder / "model"

    @property
    def done(self) -> bool:
        return (self.model / WEIGHTS).is_file()

    def job(self) -> Job:
        """Return the training as a job whose steps reached are those of its checkpoints."""
        steps, checkpoints = self.config.train.steps, CheckpointStore(self.folder / "checkpoints")
        growing = (self.folder / METRICS, self.log)
        return Job(
            name=self.config.name,
            steps=steps,
            log=self.log,
            done=lambda: self.done,
            reached=lambda: steps if self.done else checkpoints.newest_step_by_name(),
            pulse=lambda: [file.stat().st_size if file.is_file() else 0 for file in growing],
            command=lambda: ["-m", "planaria", *self._arguments(), *consent.flags()],
        )

    def _arguments(self) -> list[str]:
        """Return the arguments to start, resume or export."""
        begin = ["train", str(self.recipe), "--quiet", "--out", self.config.out]
        if self.config.data.cache is not None:
            begin += ["--data.cache", self.config.data.cache]
        if not self.folder.exists():
            return begin
        saved = CheckpointStore(self.folder / "checkpoints").newest(whole_only=True)
        if saved is None:  # it died before its first checkpoint: there is nothing to resume
            self.folder.rename(self.folder.with_name(f".{self.folder.name}.{time.time_ns()}"))
            return begin
        if saved.step < self.config.train.steps:
            return ["train", "--resume", str(self.folder), "--quiet", *self._text_flags()]
        shutil.rmtree(self.model, ignore_errors=True)
        return ["export", str(self.folder), "--to", str(self.model)]

    def _text_flags(self) -> list[str]:
        """Return flags with the local path of its text, which may differ from where it was begun."""
        mixture = self.config.data.mixture
        paths = {f"data.mixture.{name}.source": config.source for name, config in mixture.items()}
        paths = paths or {"data.source": self.config.data.source}
        return [word for name, location in paths.items() for word in (f"--{name}", location)]


def portable_recipe(config: RunConfig, folder: Path) -> str:
    """Return the recipe of a training in ``folder``, with paths relative to it and without the token cache."""
    tree = recipe.map_paths(
        config.model_dump(mode="json", exclude_none=True), lambda name: _relative_path(folder, name)
    )
    tree["data"].pop("cache", None)
    return tomli_w.dumps(tree | {"out": "."})


def _relative_path(folder: Path, name: str) -> str:
    """Make an absolute path relative to ``folder``; leave other names unchanged."""
    if not Path(name).is_absolute():
        return name
    path = os.path.relpath(name, folder.absolute())
    return path if path.startswith("..") else f"./{path}"


def with_changes(base: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """Return ``base`` with the tables ``changes`` applied, validated like a recipe."""
    tree = recipe.merge_tables(base.model_dump(mode="json"), changes, RunConfig)
    return RunConfig.model_validate_json(json.dumps(tree))


def train_all(
    title: str, trainings: Sequence[Training], processes: JobSettings, retries: int, watcher: Watcher
) -> list[str]:
    """Train what is not done, and return the names of the trainings given up.

    All recipes are written first, so any waiting training can run elsewhere.
    """
    for training in trainings:
        if not training.done:
            training.recipe.parent.mkdir(parents=True, exist_ok=True)
            atomic.write_text(training.recipe, portable_recipe(training.config, training.recipe.parent))
    lost = list[str]()
    run_jobs(
        title,
        [training.job() for training in trainings],
        processes,
        watcher,
        lambda job, how: lost.append(job.name),
        retries,
    )
    return lost
