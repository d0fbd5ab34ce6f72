"""A worker's part of a checkpoint: the file has the state at the time of the order."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from planaria.config.schema import RunConfig
from planaria.control.facts import events as e
from planaria.models.packing import pack
from planaria.models.state import StageState
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.worker import checkpoint_writer
from planaria.runtime.worker.checkpoint_writer import Buffer, CheckpointPart, Saver, StageFiles
from planaria.runtime.worker.setup import Setup
from support.waiting import until

FILES = StageFiles(Setup(RunConfig(), Path("run"), Path("data"), "127.0.0.1"), "w3")
"""of a worker that sees the run's folder"""


class ControlLink:
    """Records a saver's reports."""

    def __init__(self) -> None:
        self.reported: list[e.Fact] = []
        self.activities: list[tuple[str, bool]] = []
        self.writing: tuple[int, float] | None = None

    def report(self, fact: e.Fact) -> None:
        self.reported.append(fact)

    def set_activity(self, doing: str, step: int = -1) -> None:
        self.activities.append((doing, threading.current_thread() is threading.main_thread()))

    def inject_in_background(self, doing: str) -> None:
        self.set_activity(doing)

    def wait(self, count: int) -> list[str]:
        until(lambda: len(self.reported) >= count and self.writing is None, 30.0)
        return [type(fact).__name__ for fact in self.reported]


def state(seed: int = 1) -> StageState:
    made = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    weights = {"w": some(7, 3), "b": some(3)}
    moments = {name: {"exp_avg": some(*w.shape), "exp_avg_sq": some(*w.shape).abs()} for name, w in weights.items()}
    outer = {"rounds": torch.tensor(3), "momentum.w": some(7, 3)}
    generators = {"cpu": torch.get_rng_state()}
    return StageState(weights, moments, {"w": 4, "b": 5}, 1.1, 0.5, None, generators, outer, {"b": 2.0})


def part(folder: Path, step: int = 8) -> CheckpointPart:
    return CheckpointPart(folder, 2, "w3", 2, 5, step)


def spoil(of: StageState) -> None:
    """Change a state as training would."""
    moments = [t for pair in of.moments.values() for t in pair.values()]
    for tensor in (*of.weights.values(), *moments, *of.outer.values()):
        tensor.fill_(0)
    of.clocks.clear()


def test_the_copy_is_whole_and_of_the_time_of_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control_link, own, go = ControlLink(), state(), threading.Event()
    write = checkpoint_writer.write_stage

    def slow(*given: Any) -> object:
        assert go.wait(30)
        return write(*given)

    monkeypatch.setattr(checkpoint_writer, "write_stage", slow)
    expected = pack(own).numpy().tobytes()
    span = Saver(control_link, FILES).save_in_background(part(tmp_path), own)
    assert span.action == "save" and control_link.writing is not None and control_link.writing[0] == 8
    assert [type(fact).__name__ for fact in control_link.reported] == ["StageCopied"], "the file is not written yet"
    spoil(own)
    go.set()
    assert control_link.wait(3) == ["StageCopied", "StageSaved", "WorkReport"]
    assert control_link.activities == [("copy", True), ("write", False)]
    assert pack(read_stage(tmp_path, 2, 8)).numpy().tobytes() == expected
    saved, worked = control_link.reported[1:]
    assert isinstance(saved, e.StageSaved) and isinstance(worked, e.WorkReport)
    assert (saved.worker, saved.stage, saved.generation, saved.step) == ("w3", 2, 5, 8)
    assert saved.file == "stage-0002.safetensors" and saved.seconds > 0 and worked.spans[0].action == "write"


def test_memory_is_reused_unless_the_state_has_another_shape() -> None:
    buffer = Buffer()
    first = buffer.copy(state(1))
    second = buffer.copy(state(2))
    assert second.weights["w"].data_ptr() == first.weights["w"].data_ptr()
    assert pack(second).equal(pack(state(2)))
    other = state(3)
    other.weights["w"], other.outer = torch.ones(2, 2), {}
    assert pack(buffer.copy(other)).equal(pack(other))


def test_a_part_waits_until_the_last_one_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    control_link, running = ControlLink(), []
    write = checkpoint_writer.write_stage

    def slow(folder: Path, *given: Any) -> object:
        running.append(folder)
        assert len(running) == 1, "two at a time"
        time.sleep(0.05)
        running.clear()
        return write(folder, *given)

    monkeypatch.setattr(checkpoint_writer, "write_stage", slow)
    one = Saver(control_link, FILES)
    one.save_in_background(part(tmp_path / "a"), state(1))
    one.save_in_background(part(tmp_path / "b", 9), state(2))
    one.save(part(tmp_path / "c", 10), state(3))
    for name, seed, step in (("a", 1, 8), ("b", 2, 9), ("c", 3, 10)):
        assert pack(read_stage(tmp_path / name, 2, step)).equal(pack(state(seed)))


@pytest.mark.parametrize(("error", "reported"), [(OSError("full"), "SaveFailed"), (KeyError("x"), "WorkerFailed")])
def test_an_error_of_the_thread_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reported: str
) -> None:
    def fail(*given: Any) -> object:
        raise error

    control_link = ControlLink()
    monkeypatch.setattr(checkpoint_writer, "write_stage", fail)
    Saver(control_link, FILES).save_in_background(part(tmp_path), state())
    assert control_link.wait(2)[1] == reported


def test_too_little_memory_for_a_copy_costs_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*given: Any, **options: Any) -> torch.Tensor:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    control_link, one = ControlLink(), state()
    monkeypatch.setattr(checkpoint_writer.torch, "empty", none)
    Saver(control_link, FILES).save_in_background(part(tmp_path), one)
    (failed,) = control_link.reported
    assert isinstance(failed, e.SaveFailed) and "no memory for a copy of stage 2" in failed.detail
    assert control_link.writing is None and not list(tmp_path.iterdir())
