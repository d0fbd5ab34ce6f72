"""Trainings as jobs: a job whose process dies is resumed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.lab.experts.training import Training, train_all, with_changes
from planaria.trials.jobs import JobSettings

pytestmark = pytest.mark.timeout(300)

STEPS = 300
ONE = JobSettings(workers=1)


class Killer:
    """A watcher that kills a training's process once it has saved something."""

    def __init__(self, training: Training) -> None:
        self._training, self.lines, self.saved = training, list[str](), 0

    def print_note(self, line: str) -> None:
        self.lines.append(line)

    def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
        if not self.saved and 0 < reached < STEPS:
            found = subprocess.run(["pgrep", "-f", f"planaria train {self._training.recipe}"], capture_output=True)
            (pid,) = map(int, found.stdout.split())
            os.kill(pid, signal.SIGKILL)
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
            self.saved = self._training.job().reached()


@pytest.fixture
def training(tmp_path: Path) -> Training:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    tables = {
        "name": "one", "out": str(tmp_path), "engine": "inline", "train": {"steps": STEPS, "eval_every": 0},
        "model": {"vocab": 257, "dim": 16, "layers": 1, "heads": 2, "context": 16},
        "pipeline": {"stages": 1, "microbatches": 1, "microbatch_size": 2}, "checkpoint": {"every": 10},
        "data": {"source": str(tmp_path / "text.txt"), "tokenizer": "bytes", "cache": str(tmp_path / "cache")},
    }  # fmt: skip
    return Training(with_changes(RunConfig(), tables))


@pytest.mark.slow
def test_a_killed_training_resumes_and_a_finished_one_is_only_exported(training: Training) -> None:
    killer = Killer(training)
    assert train_all("one", [training], ONE, 1, killer) == []
    assert 0 < killer.saved < STEPS
    assert killer.lines[0].startswith("one: killed by SIGKILL") and killer.lines[0].endswith("; resumed")
    assert killer.lines[1:] == ["1/1 one: one"]
    steps = [metric.step for metric in read_run(training.folder).metrics if metric.loss is not None]
    assert steps.count(0) == 1, "it did not start over"
    assert steps[killer.saved - STEPS :] == list(range(killer.saved, STEPS))

    before = (training.folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(training.model)
    assert not training.done
    assert train_all("one", [training], ONE, 0, killer) == []
    assert training.done and (training.folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_a_training_without_checkpoints_has_a_pulse(training: Training) -> None:
    unsaved = Training(with_changes(training.config, {"train": {"steps": 40}, "checkpoint": {"every": 0}}))
    job, pulses = unsaved.job(), list[object]()

    class Feels(Killer):
        def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
            pulses.append(job.pulse())

    assert train_all("one", [unsaved], ONE, 0, Feels(unsaved)) == []
    pulses.append(job.pulse())
    assert len({str(pulse) for pulse in pulses}) > 1


@pytest.mark.slow
def test_recipes_of_waiting_trainings_exist_from_the_start(training: Training) -> None:
    first = Training(with_changes(training.config, {"train": {"steps": 2}}))
    waiting = Training(with_changes(training.config, {"name": "two", "train": {"steps": 2}}))

    class Looks(Killer):
        def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
            self.saved += list(running) == ["one"] and waiting.recipe.is_file()

    looks = Looks(first)
    assert train_all("both", [first, waiting], ONE, 0, looks) == []
    assert looks.saved and waiting.done
