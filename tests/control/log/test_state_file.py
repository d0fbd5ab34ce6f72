from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest

from planaria.common.errors import UserError
from planaria.control.log.state_file import MAX_WRITE_SHARE, PROGRESS_S, StateWriter, describe, read_state
from support.control.scenarios import fleet, work_until


def test_the_state_file_lists_the_holders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no live run here"):
        read_state(tmp_path)
    simulation = fleet()
    work_until(simulation, "run", 1)
    StateWriter(tmp_path / "state.json", time.monotonic).write(simulation.run)
    read = read_state(tmp_path)
    assert read == describe(simulation.run)
    assert {w.worker: w.stage for w in read.workers if w.stage is not None} == {
        worker: stage for stage, worker in simulation.state.holders.items()
    }
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state.json: damaged"):
        read_state(tmp_path)


def test_a_new_generation_is_written_at_once_and_other_changes_later(tmp_path: Path) -> None:
    simulation, clock = fleet(), count(100.0, 0.01)
    writer = StateWriter(tmp_path / "state.json", lambda: next(clock))
    assert writer.due(simulation.run) < 0
    writer.write(simulation.run)
    ended = next(clock) - 0.01
    assert writer.due(simulation.run) > 1e9, "nothing new"
    simulation.work(simulation.pending()[0])
    assert writer.due(simulation.run) == pytest.approx(ended + 0.01 / MAX_WRITE_SHARE), "a worker has joined"
    work_until(simulation, "link", 0)
    assert writer.due(simulation.run) < 0, "a generation"
    work_until(simulation, "run", 0)
    writer.write(simulation.run)
    ended = next(clock) - 0.01
    work_until(simulation, "commit", 0)
    assert writer.due(simulation.run) == pytest.approx(ended + PROGRESS_S), "only steps"
    simulation.lose_node(2)
    writer.write(simulation.run)
    simulation.stop()
    simulation.behave()
    assert writer.due(simulation.run) < 0, "the end"
