"""Training over relays, one of which dies: its edges move to another, nothing else does, and no step is lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.report.run.event_lines import timed_lines
from support.live.harness import LiveWorkers, ending, facts, folder_of, inline, losses, outcomes, tiny, train


@contextmanager
def started(key: Path, names: str, port: str = "0") -> Iterator[dict[str, tuple[int, str]]]:
    """Relays as processes: name → process id, and HOST:PORT."""
    command = [sys.executable, "-m", "planaria", "network", "relay", "--key-file", str(key), "--port", port]
    with ExitStack() as open_:
        found = {}
        for name in names:
            found[name] = open_.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            open_.callback(found[name].kill)
        yield {name: (process.pid, _printed(process)) for name, process in found.items()}


def _printed(process: subprocess.Popen[str]) -> str:
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
    before, after = ({(k.low, k.high): (k.id, k.relay) for k in form.links} for form in facts(record, d.Form))
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


@pytest.mark.slow
def test_a_dead_only_relay_is_named_and_waited_for(tmp_path: Path) -> None:
    """No further formation is tried meanwhile, and no edge is called replaced before it is."""
    with ExitStack() as open_:
        (pid, at) = open_.enter_context(started(tmp_path / "key", "a"))["a"]
        config = tiny(tmp_path, steps=12, fleet=over({"a": (pid, at)}, tmp_path))
        log = folder_of(config) / "events.jsonl"

        def start_again() -> None:
            while '"relay":"a"' not in log.read_text():
                time.sleep(0.05)
            open_.enter_context(started(tmp_path / "key", "a", at.rpartition(":")[2]))

        restart = Thread(target=start_again, daemon=True)

        def hook(decision: d.Decision, workers: LiveWorkers) -> None:
            if isinstance(decision, d.RunStep) and decision.step == 6 and restart.ident is None:
                os.kill(pid, signal.SIGKILL)
                restart.start()

        record = train(config, hook=hook)
        restart.join()
    assert ending(record).outcome == "finished" and losses(record) == inline(record)[0]
    assert len(facts(record, d.Form)) <= 4, "at the start, in vain, and once it answered (twice if its port was slow)"
    lines = [line.text for _, line in timed_lines(record)]
    first = next(n for n, line in enumerate(lines) if line.startswith("relay a does not answer: could not be opened"))
    assert lines[first + 1].startswith("no relay answers: a (") and "fleet.join_s" in lines[first + 1]
    assert not any("replaced" in line for line in lines[: lines.index("relay a answers again")])
    assert "replaced" in lines[-1]


@pytest.mark.slow
def test_a_relay_that_does_not_answer_is_named_before_any_worker_starts(tmp_path: Path) -> None:
    with started(tmp_path / "key", "a") as found:
        (_, at) = found["a"]
        fleet = {"key": str(tmp_path / "key"), "relays": {"here": {"at": at}, "away": {"at": "127.0.0.1:1"}}}
        config = tiny(tmp_path, steps=2, fleet=fleet)
        with pytest.raises(UserError, match=r"fleet\.relays\.away\.at = '127\.0\.0\.1:1': no relay with the run's key"):
            train(config)
