"""Machines that join a live run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from planaria.control.facts import decisions as d
from planaria.control.log.run_record import RunRecord
from support.live.harness import (
    Live,
    checked,
    facts,
)
from support.processes import Command

FOREVER = 10_000

PACE: dict[str, Any] = {"emulate": "links", "latency_s": 0.02}
"""Slow steps: a machine takes seconds to import what it needs, and a test reads the whole log many times."""


@contextmanager
def joined_machine(folder: Path, workers: int = 2, patience: float = 30.0) -> Iterator[Command]:
    """``planaria join`` as a process; killed at the end if it is still there."""
    process = Command("join", folder, f"--workers={workers}", f"--patience={patience:g}")
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def stopped(run: Live) -> RunRecord:
    """Stop the run; return its record."""
    run.process.send_signal(signal.SIGTERM)
    code, errors = run.end()
    assert code == 1, errors
    return checked(run.folder)


def holders(record: RunRecord) -> dict[int, str]:
    """Return node → worker since the last formation."""
    return dict(facts(record, d.Form)[-1].holders)


def since(record: RunRecord) -> int:
    """Steps commits since the last formation."""
    latest = [type(fact) for _, fact in reversed(record.history)]
    return latest[: latest.index(d.Form)].count(d.Commit)
