"""Training over relays, one of which dies: its edges move to another, nothing else does, and no step is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import LiveWorkers, ending, facts, inline, losses, outcomes, tiny, train

from planaria.errors import UserError
from planaria.record import decisions as d
from planaria.record import events as e


@contextmanager
def started(key: Path, names: str) -> Iterator[dict[str, tuple[int, str]]]:
    """Relays as processes: name → process id, and HOST:PORT."""
    command = [sys.executable, "-m", "planaria", "relay", "--key-file", str(key)]
    with ExitStack() as open_:
        found = {}
        for name in names:
            found[name] = open_.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            open_.callback(found[name].kill)
        yield {name: (process.pid, _printed(process)) for name, process in found.items()}


def _printed(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().split()[1]


@pytest.fixture
def relays(tmp_path: Path) -> Iterator[dict[str, tuple[int, str]]]:
    with started(tmp_path / "key", "abc") as found:
        yield found


def over(relays: dict[str, tuple[int, str]], folder: Path) -> dict[str, Any]:
    return {"key": str(folder / "key"), "relays": {name: {"at": at} for name, (_, at) in relays.items()}}


def test_a_relay_dies_and_only_its_edges_move(tmp_path: Path, relays: dict[str, tuple[int, str]]) -> None:
    config = tiny(tmp_path, steps=16, fleet=over(relays, tmp_path))
    killed: list[str] = []

    def hook(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.RunStep) and decision.step == 6 and not killed:
            killed.append("a")
            os.kill(relays["a"][0], signal.SIGKILL)

    record = train(config, hook=hook)
    assert ending(record).outcome == "finished" and outcomes(record) == ["started", "relinked"]
    before, after = ({(k.low, k.high): (k.id, k.over) for k in form.links} for form in facts(record, d.Form))
    assert {name for _, name in before.values()} == {"a", "b", "c"} and before.keys() == after.keys()
    for pair, (link, name) in before.items():
        if name == "a":
            assert after[pair][0] != link and after[pair][1] in ("b", "c")
        else:
            assert after[pair] == (link, name)
    assert {tuple(sorted((b.node, b.peer))) for b in facts(record, e.EdgeBroken)} == {
        pair for pair, (_, name) in before.items() if name == "a"
    }
    assert facts(record, d.Form)[1].step == 6
    assert losses(record) == inline(record)[0]


def test_a_relay_that_does_not_answer_is_named_before_any_worker_starts(tmp_path: Path) -> None:
    with started(tmp_path / "key", "a") as found:
        (_, at) = found["a"]
        fleet = {"key": str(tmp_path / "key"), "relays": {"here": {"at": at}, "away": {"at": "127.0.0.1:1"}}}
        config = tiny(tmp_path, steps=2, fleet=fleet)
        with pytest.raises(UserError, match=r"fleet\.relays\.away\.at = '127\.0\.0\.1:1': nobody with the run's key"):
            train(config)
