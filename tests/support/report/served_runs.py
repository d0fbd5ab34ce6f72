"""Runs that the live page shows."""

from __future__ import annotations

from pathlib import Path

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import CONFIG
from planaria.control.log.run_record import StepMetric
from planaria.control.log.writer import RunLog

STARTED = e.RunStarted(
    name="run", seed=1, stages=2, steps=9, first_step=0, samples_per_step=2, wall_time=0.0, routes=[[0, 1, 2, 0]]
)


def run_in(path: Path) -> Path:
    """A run's folder in which one step was made."""
    log = RunLog(folder(path))
    log.event(50.0, STARTED)
    for number in range(3):
        log.decision(50.1, d.Spawn(worker=f"w{number}", incarnation=1))
        log.event(51.0, e.WorkerJoined(worker=f"w{number}", incarnation=1, pid=4000 + number))
    members = [d.Member(node=n, stage=n, worker=f"w{n}", source=d.Fresh()) for n in range(3)]
    log.decision(52.0, d.Form(generation=1, step=0, outcome="started", members=members, links=[]))
    for number in range(3):
        log.event(52.5, e.Linked(worker=f"w{number}", node=number, stage=number, generation=1, link_s=0.1))
    log.decision(53.0, d.RunStep(generation=1, step=0))
    log.decision(54.0, d.Commit(generation=1, step=0, progress=0))
    log.metric(StepMetric(t=54.0, step=0, loss=2.5, tokens_per_s=10.0, grad_norm={}))
    log.close()
    return path


CONFIGURED = '{"name": "run", "model": {"vocab": 300}, "data": {"source": "none"}, "pipeline": {"stages": 2}}'


def folder(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / CONFIG).write_text(CONFIGURED)
    return path
