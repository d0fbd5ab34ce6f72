"""Facts of a run that several controllers led."""

from __future__ import annotations

from pathlib import Path

from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Commit, Decision
from planaria.control.facts.events import Event, LeaderStarted, RunStarted
from planaria.control.log.run_record import RunRecord

STARTED = RunStarted(name="x", seed=1, stages=2, steps=9, first_step=0, samples_per_step=4, wall_time=0.0)


def record(*history: tuple[float, Event | Decision]) -> RunRecord:
    return RunRecord(Path("x"), RunConfig(), [(0.0, STARTED), *history], [], [])


def led(term: int, cause: str = "exited", silent_s: float = 0.5, lost_s: float = 0.2) -> LeaderStarted:
    return LeaderStarted.model_validate(
        {"term": term, "pid": 1, "cause": cause, "silent_s": silent_s, "lost_s": lost_s, "wall_time": 0.0}
    )


def commit(number: int, replica: int = 0) -> Commit:
    return Commit.model_validate({"generation": 1, "step": number, "replica": replica, "progress": number + 1})
