"""Trainings that know nothing of one another: each a recipe of its own and a process of its own, ``planaria train``.

One that dies is taken up again where its last checkpoint was; one that cannot be trained is given up, and the others go
on. The recipes lie in the run's folder, so any of them can be trained on another machine instead.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from planaria import atomic, recipe
from planaria.checkpoint.store import CheckpointStore
from planaria.config import RunConfig
from planaria.experts.manifest import WEIGHTS
from planaria.fleet.birth import die_with_parent

POLL_S = 0.2


class Watcher(Protocol):
    """Who is told how it goes."""

    def said(self, line: str) -> None:
        """Something happened to one of them."""

    def training(self, title: str, saved: int, steps: int, running: Sequence[str]) -> None:
        """Of all ``steps``, ``saved`` are done and would outlive a crash; these are ``running``."""


@dataclass
class Training:
    """One model to be trained into ``folder``."""

    config: RunConfig
    attempts: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

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

    @property
    def saved(self) -> int:
        """Steps that need not be made again; may be asked while the process is at work."""
        return self.config.train.steps if self.done else CheckpointStore(self.folder / "checkpoints").reached()


def configured(base: RunConfig, changes: Mapping[str, Any]) -> RunConfig:
    """``base`` with the tables ``changes`` laid over it, checked as a recipe is."""
    return RunConfig.model_validate_json(json.dumps(recipe.overlaid(base.model_dump(mode="json"), changes)))


def train_all(title: str, trainings: Sequence[Training], workers: int, retries: int, watcher: Watcher) -> list[str]:
    """Train what is not done yet, so many at a time; the names of those that were given up.

    The processes end with this one, however it ends. All recipes are there from the beginning, so that whichever waits
    can be trained elsewhere.
    """
    waiting, running, lost = [one for one in trainings if not one.done], list[Training](), list[str]()
    for one in waiting:
        one.recipe.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(one.recipe, recipe.dump(one.config))
    steps = sum(one.config.train.steps for one in trainings)
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                running.append(_start(waiting.pop(0)))
            watcher.training(title, sum(one.saved for one in trainings), steps, [one.config.name for one in running])
            time.sleep(POLL_S)
            for one in [one for one in running if one.process is not None and one.process.poll() is not None]:
                running.remove(one)
                if one.done:
                    watcher.said(f"{one.config.name}: trained")
                elif one.attempts <= retries:
                    watcher.said(f"{one.config.name}: {_ending(one)}; taken up again")
                    waiting.insert(0, one)
                else:
                    watcher.said(f"{one.config.name}: {_ending(one)}; given up after {one.attempts} attempts")
                    lost.append(one.config.name)
    finally:
        for one in running:
            assert one.process is not None
            one.process.terminate()
        for one in running:
            assert one.process is not None
            one.process.wait()
    return lost


def _start(one: Training) -> Training:
    """Begin, or go on where the last checkpoint was."""
    one.attempts += 1
    with one.log.open("ab") as log:
        one.process = subprocess.Popen(
            [sys.executable, "-m", "planaria", *_words(one)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            preexec_fn=die_with_parent,
            process_group=0,  # a terminal's Ctrl-C is for this process, which asks them once: twice would be at once
        )
    return one


def _words(one: Training) -> list[str]:
    """What the process is told: to begin, to go on where the last checkpoint was, or to export what is trained."""
    if not one.folder.exists():
        return ["train", str(one.recipe), "--quiet"]
    saved = CheckpointStore(one.folder / "checkpoints").newest(whole_only=True)
    if saved is None:  # it died before its first checkpoint: nothing is lost with it
        one.folder.rename(one.folder.with_name(f".{one.folder.name}.{time.time_ns()}"))
        return ["train", str(one.recipe), "--quiet"]
    if saved.step < one.config.train.steps:
        return ["train", "--resume", str(one.folder), "--quiet"]
    shutil.rmtree(one.model, ignore_errors=True)
    return ["export", str(one.folder), "--to", str(one.model)]


def _ending(one: Training) -> str:
    """How the process ended, with the last line that it said."""
    assert one.process is not None
    code = one.process.returncode
    how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
    lines = one.log.read_text(errors="replace").strip().splitlines()
    return f"{how} ({lines[-1]})" if lines else how
