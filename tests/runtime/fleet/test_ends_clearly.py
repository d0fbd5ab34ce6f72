"""What ends a run that nobody killed: one clear line, whole logs, nobody left."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from harness import ending, facts, folder_of, reason, tiny, train

from planaria.common.errors import UserError
from planaria.control import decisions as d
from planaria.control import events as e


def test_a_port_that_is_taken_is_refused_before_any_worker_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = tiny(tmp_path, fleet={"port": port})
        with pytest.raises(UserError, match=rf"fleet\.port = {port}: cannot listen there .*; choose another port"):
            train(config)
    assert not (folder_of(config) / "workers").exists()


def test_a_loss_that_is_not_a_number_ends_the_run_before_it_is_committed(tmp_path: Path) -> None:
    record = train(tiny(tmp_path, optim={"lr": 1e30}))
    assert ending(record).outcome == "failed" and "optim.lr" in reason(record)
    failed = facts(record, e.WorkerFailed)[0]
    assert all(commit.step < 16 for commit in facts(record, d.Commit)) and failed.stage >= 0
