from __future__ import annotations

import time
from itertools import count
from pathlib import Path

import pytest
from test_decide import fleet, work_until

from planaria.common.errors import UserError
from planaria.control.log.state_file import PROGRESS_S, SHARE, StateWriter, describe, read_state


def test_the_state_file_lists_the_holders(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no live run here"):
        read_state(tmp_path)
    made = fleet()
    work_until(made, "run", 1)
    StateWriter(tmp_path / "state.json", time.monotonic).write(made.run)
    read = read_state(tmp_path)
    assert read == describe(made.run)
    assert {w.worker: w.stage for w in read.workers if w.stage is not None} == {
        worker: stage for stage, worker in made.state.holders.items()
    }
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state.json: damaged"):
        read_state(tmp_path)


def test_a_new_generation_is_written_at_once_and_other_changes_later(tmp_path: Path) -> None:
    made, clock = fleet(), count(100.0, 0.01)
    writer = StateWriter(tmp_path / "state.json", lambda: next(clock))
    assert writer.due(made.run) < 0
    writer.write(made.run)
    ended = next(clock) - 0.01
    assert writer.due(made.run) > 1e9, "nothing new"
    made.work(made.pending()[0])
    assert writer.due(made.run) == pytest.approx(ended + 0.01 / SHARE), "a worker has joined"
    work_until(made, "link", 0)
    assert writer.due(made.run) < 0, "a generation"
    work_until(made, "run", 0)
    writer.write(made.run)
    ended = next(clock) - 0.01
    work_until(made, "commit", 0)
    assert writer.due(made.run) == pytest.approx(ended + PROGRESS_S), "only steps"
    made.lose_node(2)
    writer.write(made.run)
    made.stop()
    made.behave()
    assert writer.due(made.run) < 0, "the end"
