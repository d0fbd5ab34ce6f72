"""Runs of the real fleet: a small recipe, its faults, and the record of its logs."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import RUNS, Flag, run_config
from planaria.common.errors import RunStopped
from planaria.config.schema import DataConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e

if TYPE_CHECKING:
    from planaria.control.log.run_record import RunRecord
    from planaria.control.log.state_file import LiveWorker
    from planaria.control.protocols import Observer
    from planaria.faults.trace import Fault

VOCAB = 512  # rows of the embedding table; ids of bytes need fewer


def bytes_data(kilobytes: int = 512, folder: Path = RUNS) -> DataConfig:
    """Return a corpus of numbered lines, one id per byte, equal on every machine."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"lines-{kilobytes}k.txt"
    if not path.exists():
        line = "line {0} of many; its square is {1}\n".format
        made = "".join(line(n, n * n) for n in range(kilobytes * 24))
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(made[: kilobytes * 1024])
        unfinished.replace(path)
    return DataConfig(source=str(path), tokenizer="bytes", cache=str(folder / "cache"))


def small_run(name: str, steps: int, stages: int = 1, **sections: Any) -> RunConfig:
    """A tiny model, one layer and one microbatch, without validations, spares and checkpoints but for ``sections``."""
    plain: dict[str, Any] = {
        "model": {"vocab": VOCAB, "dim": 32, "layers": stages, "heads": 2, "hidden": 64, "context": 16},
        "pipeline": {"stages": stages, "microbatches": 1, "microbatch_size": 1},
        "train": {"steps": steps, "eval_every": 0},
        "fleet": {"spares": 0},
        "checkpoint": {"every": 0},
    }
    changed = {key: plain[key] | given if key in plain else given for key, given in sections.items()}
    if "data" not in sections:
        plain["data"] = bytes_data()
    return run_config(name, **{**plain, **changed})


def sleeping(forward_s: float, **more: Any) -> dict[str, Any]:
    """Return the network section of stages that sleep ``forward_s``, and twice that in the backward pass."""
    return {"emulate": True, "forward_s": [forward_s], "backward_s": [2 * forward_s], **more}


MODEL_FLAGS = {
    "stages": Flag(4, "block stages of one layer each; faults hit the middle ones"),
    "microbatches": Flag(8),
    "dim": Flag(256, "width of the model; 256 is a million parameters a stage"),
    "context": Flag(64, "tokens in a microbatch, which is one sample"),
}
"""the sizes of :func:`real_stages`"""


def real_stages(args: Namespace, name: str, steps: int, spares: int, save_every: int) -> RunConfig:
    """A small model whose stages compute; a loss that CheckFree cannot repair rolls back to the last checkpoint."""
    model = {"vocab": VOCAB, "layers": args.stages, "hidden": args.dim * 15 // 4}
    return run_config(
        name,
        model={**model, "dim": args.dim, "context": args.context},
        pipeline={"stages": args.stages, "microbatches": args.microbatches, "microbatch_size": 1},
        data=bytes_data(),
        train={"steps": steps, "eval_every": 0},
        recovery={"strategy": "checkfree, checkpoint"},
        fleet={"spares": spares},
        checkpoint={"every": save_every},
    )


def run_fleet(
    config: RunConfig,
    faults: tuple[Fault, ...] = (),
    around: Callable[[Observer, Path], Observer] | None = None,
    tracked: bool = False,
) -> RunRecord:
    """Train ``config`` on the fleet, as ``planaria train`` would, in a new folder below runs/benchmarks.

    ``around`` may wrap the observer of the run in this folder. The recipe's trackers observe the run if ``tracked``.
    """
    from planaria.control.log.reader import read_run
    from planaria.faults.trace import Trace
    from planaria.report.observe.progress import NoProgress
    from planaria.report.observe.run_observer import RunObserver
    from planaria.report.observe.trackers import trackers
    from planaria.runtime.engine.train_prepared import train_prepared
    from planaria.runtime.preparation import run_folders
    from planaria.runtime.preparation.prepare import prepare

    prepared = prepare(config, trace=Trace(faults=faults))
    folder = run_folders.create(config)
    shutil.copyfile(prepared.dataset.tokenizer_file, folder / "tokenizer.json")
    observers = trackers(config.observe) if tracked else {}
    watch = RunObserver(folder, config.pipeline.samples * config.model.context, NoProgress(), observers)
    observer: Observer = around(watch, folder) if around else watch
    try:
        with run_folders.lock_for_training(folder):
            train_prepared(prepared, folder, observer)
    finally:
        watch.close()
    return read_run(folder)


def ending(record: RunRecord) -> str:
    finish = next((f for _, f in reversed(record.history) if isinstance(f, d.Finish)), None)
    return "died" if finish is None else f"{finish.outcome} {finish.reason}".strip()


def require_finished(record: RunRecord) -> None:
    """:raises RunStopped: if the run did not finish."""
    if ending(record) != "finished":
        raise RunStopped(
            f"{record.folder}: the run {ending(record)}; its workers' logs are in {record.folder / 'workers'}"
        )


def finished(
    config: RunConfig,
    faults: tuple[Fault, ...] = (),
    around: Callable[[Observer, Path], Observer] | None = None,
    tracked: bool = False,
) -> RunRecord:
    """:func:`run_fleet` for runs that must reach their last step."""
    record = run_fleet(config, faults, around, tracked)
    require_finished(record)
    return record


def step_seconds(record: RunRecord, skip: int) -> list[float]:
    """Return the seconds from the order of each step to its commit, without the first ``skip`` steps."""
    began, lengths = 0.0, []
    for t, fact in record.history:
        if isinstance(fact, d.RunStep) and fact.mode == "train":
            began = t
        elif isinstance(fact, d.Commit) and fact.step >= skip:
            lengths.append(t - began)
    return lengths


def losses_by_step(record: RunRecord) -> dict[int, float]:
    """Return the training loss of each step in nats; the last one of a repeated step."""
    return {metric.step: metric.loss for metric in sorted(record.trained, key=lambda metric: metric.step)}


def first_step_t(record: RunRecord) -> float:
    """Return when the first step was ordered; monotonic seconds."""
    return next(t for t, fact in record.history if isinstance(fact, d.RunStep))


def last_commit_t(record: RunRecord) -> float:
    """Return when the last step was committed; monotonic seconds."""
    return max(t for t, fact in record.history if isinstance(fact, d.Commit))


def thaw_later(worker: LiveWorker, seconds: float) -> None:
    """Send SIGCONT after ``seconds``, unless the process has exited and its number was reused."""

    def thaw() -> None:
        from planaria.control.log import state_file

        if worker.start_ticks is not None and state_file.start_ticks(worker.pid) == worker.start_ticks:
            os.kill(worker.pid, signal.SIGCONT)

    timer = threading.Timer(seconds, thaw)
    timer.daemon = True
    timer.start()


class Relay:
    """An observer that forwards to another; ``run_fleet(config, around=relay.attach)`` inserts it."""

    _inner: Observer

    def attach(self, inner: Observer, folder: Path) -> Relay:
        self._inner = inner
        return self

    @property
    def trouble(self) -> str:
        return self._inner.trouble

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        self._inner.on_event(t, event, notice)

    def on_worked(self, t: float, worked: e.WorkReport) -> None:
        self._inner.on_worked(t, worked)

    def on_decision(self, t: float, decision: d.Decision) -> None:
        self._inner.on_decision(t, decision)

    def secure(self) -> None:
        self._inner.secure()

    def check(self) -> None:
        self._inner.check()

    def when_lost(self, disconnect: Callable[[], object]) -> None:
        self._inner.when_lost(disconnect)


class Once(Relay):
    """Call ``do``, which must be quick, at the first decision of a kind."""

    def __init__(self, kind: type[d.RunStep | d.Disband], do: Callable[[], None]) -> None:
        self._kind, self._do, self._done = kind, do, False

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if not self._done and isinstance(decision, self._kind):
            self._done = True
            self._do()


class StopAfter(Relay):
    """Interrupt the run (SIGINT) after ``seconds`` of training."""

    def __init__(self, seconds: float, on_start: Callable[[], None]) -> None:
        self._seconds, self._on_start = seconds, on_start
        self._began: float | None = None
        self._pressed = False

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if not isinstance(decision, d.RunStep):
            return
        if self._began is None:
            self._began = time.monotonic()
            self._on_start()
        elif not self._pressed and t - self._began >= self._seconds:
            self._pressed = True
            os.kill(os.getpid(), signal.SIGINT)
