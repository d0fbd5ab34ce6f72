from __future__ import annotations

from pathlib import Path

import pytest
from test_decide import fleet, work_until

from planaria.errors import UserError
from planaria.record.statefile import describe, read_state, write_state


def test_the_state_file_tells_who_holds_what(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no live run here"):
        read_state(tmp_path)
    made = fleet()
    work_until(made, "run", 1)
    write_state(tmp_path / "state.json", made.run)
    read = read_state(tmp_path)
    assert read == describe(made.run)
    assert {w.worker: w.stage for w in read.workers if w.stage is not None} == {
        worker: stage for stage, worker in made.state.holders.items()
    }
    assert [file.name for file in tmp_path.iterdir()] == ["state.json"]
    (tmp_path / "state.json").write_text("{")
    with pytest.raises(UserError, match=r"state.json: damaged"):
        read_state(tmp_path)
