"""Races as jobs: run once, and again when their inputs change."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest

from planaria.common.errors import RunStopped
from planaria.config.schema import RecoveryConfig
from planaria.data.shards import Dataset, tokenise_corpus
from planaria.faults.trace import Fault, Trace, digest
from planaria.lab.compare.race import ArmCourse, race
from planaria.lab.compare.race_job import Race, run_races
from planaria.trials.jobs import JobSettings
from support.race_jobs import config, one

pytestmark = pytest.mark.timeout(300)


class Watcher:
    def __init__(self) -> None:
        self.lines = list[str]()

    def print_note(self, line: str) -> None:
        self.lines.append(line)

    def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
        assert 0 <= reached <= steps


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """Yield a custom module that the races' processes can import."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "noisy_arm.py").write_text("class Mine:\n    noise = 0.1\n")
    monkeypatch.syspath_prepend(tmp_path / "own")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'own'}:{':'.join(filter(None, sys.path))}")
    yield importlib.import_module("noisy_arm")
    del sys.modules["noisy_arm"]


@pytest.mark.slow
def test_a_race_in_a_process_equals_one_in_this_process_and_runs_once(tmp_path: Path, dataset: Dataset) -> None:
    races = [one(tmp_path, dataset, arm) for arm in ("free", "echo")]
    watcher = Watcher()
    courses = run_races(races, tmp_path / "races", JobSettings(workers=1), watcher)
    assert watcher.lines == ["1/2 runs: free, seed 0", "2/2 runs: echo, seed 0"]
    assert courses == [race(races[0].config, dataset, faults, lambda tick, loss: None) for faults in ({}, {3: [1]})]
    assert sorted(path.name for path in (tmp_path / "races").iterdir()) == ["echo.0.json", "free.0.json"]

    (tmp_path / "races").rename(tmp_path / "elsewhere")
    moved = [one(tmp_path, dataset, arm, out="there", name="other") for arm in ("free", "echo")]
    assert again(moved, tmp_path / "elsewhere") == (courses, ["2/2 runs: kept from before"])


@pytest.mark.slow
def test_a_race_supports_mixtures(tmp_path: Path, dataset: Dataset) -> None:
    (tmp_path / "other.txt").write_text("0123456789 " * 300)
    sources = {
        name: {"source": str(tmp_path / f"{name}.txt"), "weight": weight}
        for name, weight in (("text", 3), ("other", 1))
    }
    plain = config(tmp_path).data.model_dump(exclude={"source"}) | {"mixture": sources}
    data = type(config(tmp_path).data).model_validate(plain)
    mixed = tokenise_corpus(data, 257)
    given = one(tmp_path, dataset, data=data).model_copy(update={"dataset": str(mixed.folder)})
    (course,) = run_races([given], tmp_path / "races", JobSettings(workers=1), Watcher())
    assert course == race(given.config, mixed, {3: [1]}, lambda tick, loss: None)
    assert course.points != race(given.config, dataset, {3: [1]}, lambda tick, loss: None).points
    assert given.identity() != one(tmp_path, dataset, data=data).identity()


def again(races: list[Race], folder: Path, *code: type) -> tuple[list[ArmCourse], list[str]]:
    watcher = Watcher()
    return run_races(races, folder, JobSettings(workers=1), watcher, lambda config: code), watcher.lines


@pytest.mark.slow
def test_another_trace_repeats_all_arms_with_failures(tmp_path: Path, dataset: Dataset) -> None:
    races = [one(tmp_path, dataset, arm) for arm in ("free", "echo")]
    again(races, tmp_path)
    other = Trace(faults=(Fault(step=4, stage=1),))
    assert digest(other) != digest(races[0].trace)
    courses, lines = again([race.model_copy(update={"trace": other}) for race in races], tmp_path)
    assert lines == [
        "echo, seed 0: run again, it was made with a different recipe",
        "1/2 runs: kept from before",
        "2/2 runs: echo, seed 0",
    ]
    assert courses[1].loss_events[0].tick == 4


@pytest.mark.slow
def test_editing_an_arm_s_code_makes_its_result_stale(tmp_path: Path, dataset: Dataset, mine: ModuleType) -> None:
    races = [one(tmp_path, dataset)]
    again(races, tmp_path, mine.Mine)
    assert again(races, tmp_path, mine.Mine)[1] == ["1/1 runs: kept from before"]
    (tmp_path / "own" / "noisy_arm.py").write_text("class Mine:\n    noise = 0.2\n")
    assert again(races, tmp_path, mine.Mine)[1] == [
        "echo, seed 0: run again, the code of noisy_arm has changed since",
        "1/1 runs: echo, seed 0",
    ]
    assert again(races, tmp_path, mine.Mine)[1] == ["1/1 runs: kept from before"]


@pytest.mark.slow
def test_a_result_is_not_kept_if_its_code_changed_meanwhile(tmp_path: Path, dataset: Dataset, mine: ModuleType) -> None:
    class Edits(Watcher):
        def on_progress(self, title: str, reached: int, steps: int, running: Mapping[str, tuple[int, int]]) -> None:
            (tmp_path / "own" / "noisy_arm.py").write_text("class Mine:\n    noise = 0.3\n")

    watcher = Edits()
    with pytest.raises(RunStopped, match=r"echo, seed 0: stopped with exit code .*noisy_arm.py changed during a trial"):
        run_races([one(tmp_path, dataset)], tmp_path, JobSettings(), watcher, lambda config: [mine.Mine])
    assert not (tmp_path / "echo.0.json").exists() and (tmp_path / "echo.0.log").is_file()


@pytest.mark.slow
def test_a_failed_race_is_reported_with_its_log_and_others_are_kept(tmp_path: Path, dataset: Dataset) -> None:
    whole, broken = (
        one(tmp_path, dataset, "free"),
        one(tmp_path, dataset, "broken", recovery=RecoveryConfig(strategy="prayer")),
    )
    with pytest.raises(RunStopped) as stopped:
        run_races([whole, broken], tmp_path / "races", JobSettings(workers=1), Watcher())
    assert str(stopped.value).startswith("broken, seed 0: stopped with exit code 1 (")
    assert str(tmp_path / "races" / "broken.0.log") in str(stopped.value)
    assert again([whole], tmp_path / "races")[1] == ["1/1 runs: kept from before"]
