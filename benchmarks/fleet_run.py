"""Runs of the real fleet for benchmarks: a small recipe, its faults, and the record that its logs leave."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import RUNS
from planaria.common.errors import RunStopped
from planaria.config.schema import (
    CheckpointConfig,
    DataConfig,
    FleetConfig,
    ModelConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control import decisions as d
from planaria.control import events as e

if TYPE_CHECKING:
    from planaria.control.logs import RunRecord
    from planaria.control.protocols import Observer
    from planaria.control.statefile import LiveWorker
    from planaria.faults.trace import Fault

VOCAB = 512
"""rows of the embedding table that ids of bytes need, and some"""


def bytes_data(kilobytes: int = 512, folder: Path = RUNS) -> DataConfig:
    """A corpus of numbered lines, one id a byte: made in a moment, and the same on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lines-{kilobytes}k.txt"
    if not path.exists():
        line = "line {0} of many; its square is {1}\n".format
        made = "".join(line(n, n * n) for n in range(kilobytes * 24))
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(made[: kilobytes * 1024])
        unfinished.replace(path)
    return DataConfig(source=str(path), tokenizer="bytes", cache=str(folder / "cache"))


def add_model_flags(flags: argparse.ArgumentParser) -> None:
    """The size of :func:`real_stages`; ``--dim`` 256 is a million parameters a stage."""
    flags.add_argument(
        "--stages", type=int, default=4, help="block stages of one layer each; the middle ones are struck"
    )
    flags.add_argument("--microbatches", type=int, default=8)
    flags.add_argument("--dim", type=int, default=256, help="width of the model; 256 is a million parameters a stage")
    flags.add_argument("--context", type=int, default=64, help="tokens in a microbatch, which is one sample")


def real_stages(given: argparse.Namespace, name: str, steps: int, spares: int, save_every: int) -> RunConfig:
    """A small model whose stages really compute, for runs that are struck.

    What CheckFree cannot repair rolls the run back to its last checkpoint.
    """
    return RunConfig(
        name=name,
        out=str(RUNS),
        model=ModelConfig(
            vocab=VOCAB, dim=given.dim, layers=given.stages, hidden=given.dim * 15 // 4, context=given.context
        ),
        pipeline=PipelineConfig(stages=given.stages, microbatches=given.microbatches, microbatch_size=1),
        data=bytes_data(),
        train=TrainConfig(steps=steps, eval_every=0),
        recovery=RecoveryConfig(strategy="checkfree, checkpoint"),
        fleet=FleetConfig(spares=spares),
        checkpoint=CheckpointConfig(every=save_every),
    )


def run_fleet(
    config: RunConfig,
    faults: tuple[Fault, ...] = (),
    around: Callable[[Observer, Path], Observer] | None = None,
    tracked: bool = False,
) -> RunRecord:
    """Train ``config`` on the fleet, as ``planaria train`` would, in a new folder below runs/benchmarks.

    ``around`` may wrap the observer; it is given the run's folder, and its observer is told everything. The recipe's
    trackers hear of the run only where it is ``tracked``.
    """
    from planaria.control.logs import read_run
    from planaria.faults.trace import Trace
    from planaria.report.live.progress import Quiet
    from planaria.report.live.trackers import trackers
    from planaria.report.live.watch import Watch
    from planaria.runtime.engine import fleet, runs
    from planaria.runtime.engine.prepare import prepare

    prepared = prepare(config, trace=Trace(faults=faults))
    folder = runs.create(config)
    shutil.copyfile(prepared.dataset.tokenizer_file, folder / "tokenizer.json")
    told_too = trackers(config.observe) if tracked else {}
    watch = Watch(folder, config.pipeline.samples * config.model.context, Quiet(), told_too)
    observer: Observer = around(watch, folder) if around else watch
    try:
        with runs.held(folder):
            fleet.train(prepared, folder, observer)
    finally:
        watch.close()
    return read_run(folder)


def ending(record: RunRecord) -> str:
    """How a run ended, in a word and a reason."""
    finish = next((f for _, f in reversed(record.history) if isinstance(f, d.Finish)), None)
    return "died" if finish is None else f"{finish.outcome} {finish.reason}".strip()


def require_finished(record: RunRecord) -> None:
    """A run that no fault should have ended went to its last step.

    :raises RunStopped: naming how it ended instead, and where its logs are.
    """
    if ending(record) != "finished":
        raise RunStopped(
            f"{record.folder}: the run {ending(record)}; its workers' logs are in {record.folder / 'workers'}"
        )


def step_seconds(record: RunRecord, skip: int) -> list[float]:
    """From the order to run a step to the order to commit it, for all committed steps but the first ``skip``."""
    began, lengths = 0.0, []
    for t, fact in record.history:
        if isinstance(fact, d.RunStep) and fact.mode == "train":
            began = t
        elif isinstance(fact, d.Commit) and fact.step >= skip:
            lengths.append(t - began)
    return lengths


def first_step_t(record: RunRecord) -> float:
    """When the first step was ordered; monotonic seconds."""
    return next(t for t, fact in record.history if isinstance(fact, d.RunStep))


def thaw_later(worker: LiveWorker, seconds: float) -> None:
    """SIGCONT after so many seconds, unless the process is gone by then and its number is another's."""

    def thaw() -> None:
        from planaria.control import statefile

        if worker.born is not None and statefile.born(worker.pid) == worker.born:
            os.kill(worker.pid, signal.SIGCONT)

    timer = threading.Timer(seconds, thaw)
    timer.daemon = True
    timer.start()


class Relay:
    """Observes for another."""

    def __init__(self, inner: Observer) -> None:
        self._inner = inner

    @property
    def trouble(self) -> str:
        return self._inner.trouble

    def on_event(self, t: float, event: e.Event) -> None:
        self._inner.on_event(t, event)

    def on_worked(self, t: float, worked: e.Worked) -> None:
        self._inner.on_worked(t, worked)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self._inner.on_decision(t, decision)


class Once(Relay):
    """Observes for another, and does something at the first decision of a kind; it must not take long."""

    def __init__(self, inner: Observer, kind: type[d.RunStep | d.Disband], do: Callable[[], None]) -> None:
        super().__init__(inner)
        self._kind, self._do, self._done = kind, do, False

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if not self._done and isinstance(decision, self._kind):
            self._done = True
            self._do()


class StopAfter(Relay):
    """Observes for another, and presses Ctrl-C when the run has trained for ``seconds``."""

    def __init__(self, inner: Observer, seconds: float, on_start: Callable[[], None]) -> None:
        super().__init__(inner)
        self._seconds, self._on_start = seconds, on_start
        self._began: float | None = None
        self._pressed = False

    def on_decision(self, t: float, decision: d.Decision) -> None:
        """Start the clock at the first step; the last step is the one that is under way when it runs out."""
        super().on_decision(t, decision)
        if not isinstance(decision, d.RunStep):
            return
        if self._began is None:
            self._began = time.monotonic()
            self._on_start()
        elif not self._pressed and t - self._began >= self._seconds:
            self._pressed = True
            os.kill(os.getpid(), signal.SIGINT)
