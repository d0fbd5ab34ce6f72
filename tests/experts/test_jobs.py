"""Trainings as processes: where one that dies is taken up again."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from planaria.config import RunConfig
from planaria.experts.jobs import Training, configured, train_all
from planaria.record.logs import read_run

pytestmark = pytest.mark.timeout(300)

STEPS = 300


class Killer:
    """A watcher that kills the first process it sees once that has saved something."""

    def __init__(self, training: Training) -> None:
        self._training, self.lines, self.saved = training, list[str](), 0

    def said(self, line: str) -> None:
        self.lines.append(line)

    def training(self, title: str, saved: int, steps: int, running: Sequence[str]) -> None:
        if not self.saved and 0 < saved < STEPS:
            assert self._training.process is not None
            self._training.process.kill()
            self._training.process.wait()
            self.saved = self._training.saved


@pytest.fixture
def training(tmp_path: Path) -> Training:
    (tmp_path / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 300)
    tables = {
        "name": "one", "out": str(tmp_path), "engine": "inline", "train": {"steps": STEPS, "eval_every": 0},
        "model": {"vocab": 257, "dim": 16, "layers": 1, "heads": 2, "context": 16},
        "pipeline": {"stages": 1, "microbatches": 1, "microbatch_size": 2}, "checkpoint": {"every": 10},
        "data": {"source": str(tmp_path / "text.txt"), "tokenizer": "bytes", "cache": str(tmp_path / "cache")},
    }  # fmt: skip
    return Training(configured(RunConfig(), tables))


def test_what_dies_goes_on_where_it_had_saved_and_what_is_trained_is_only_exported(training: Training) -> None:
    killer = Killer(training)
    assert train_all("one", [training], 1, 1, killer) == []
    assert 0 < killer.saved < STEPS and training.attempts == 2
    assert killer.lines[0].startswith("one: killed by signal 9") and killer.lines[-1] == "one: trained"
    steps = [metric.step for metric in read_run(training.folder).trained]
    assert steps.count(0) == 1, "it began anew"
    assert steps[killer.saved - STEPS :] == list(range(killer.saved, STEPS))

    before = (training.folder / "metrics.jsonl").read_bytes()
    shutil.rmtree(training.model)
    assert not training.done
    assert train_all("one", [training], 1, 0, killer) == []
    assert training.done and (training.folder / "metrics.jsonl").read_bytes() == before


def test_recipes_of_those_who_wait_are_there_from_the_beginning(training: Training, tmp_path: Path) -> None:
    waiting = Training(configured(training.config, {"name": "two", "train": {"steps": 2}}))

    class Looks(Killer):
        def training(self, title: str, saved: int, steps: int, running: Sequence[str]) -> None:
            self.saved += running == ["one"] and waiting.recipe.is_file()

    looks = Looks(training)
    training.config = configured(training.config, {"train": {"steps": 2}})
    assert train_all("both", [training, waiting], 1, 0, looks) == []
    assert looks.saved and waiting.done
