"""Tiny real runs for tests: trained and signalled as real processes, checked, and read back as a record."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import planaria
from planaria.cli.commands import train as command
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord
from planaria.control.replay import replay
from planaria.faults.trace import Fault, Trace
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.packing import pack
from planaria.models.state import StageState
from planaria.report import page
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.run_observer import RunObserver
from planaria.report.run import report
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.checkpoint.stage_file import read_stage
from planaria.runtime.checkpoint.store import CheckpointStore, SealedCheckpoint, read_manifest
from planaria.runtime.engine.train_prepared import train_prepared
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import prepare as prepare_run
from planaria.runtime.worker.runner import StageRunner
from support.observer import train_inline
from support.processes import Command
from support.waiting import until

WORKER_LOCATION: dict[str, Any] = {}
"""fields of the recipe's section ``fleet`` that place the workers of tiny runs (set by fixtures)"""
STORE = {"object_store_memory": 80 << 20}
"""options of a Ray node: about the smallest object store that Ray allows"""
LEFTOVER_TIMEOUT_S = 15.0
"""seconds within which all workers of a finished run must exit"""
REPORTED: set[str] = set()
"""kinds of facts for which a report was already built"""


def tiny(folder: Path, stages: int = 4, steps: int = 16, **sections: dict[str, Any]) -> RunConfig:
    """Return a run in ``folder`` that takes milliseconds a step; ``sections`` change single fields, as a recipe would.

    The silence limit is long because test machines are busy; tests of silence lower it.
    """
    folder.mkdir(exist_ok=True)
    corpus = folder / "corpus.txt"
    if not corpus.exists():
        rng = random.Random(34107)
        words = ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(200)]
        corpus.write_text(" ".join(rng.choices(words, k=8000)))
    plain: dict[str, Any] = {
        "name": "run",
        "out": str(folder / "runs"),
        "model": {"vocab": 260, "dim": 32, "layers": stages, "heads": 2, "hidden": 64, "context": 32},
        "pipeline": {"stages": stages, "microbatches": 4, "microbatch_size": 2},
        "data": {"source": str(corpus), "tokenizer": "bytes", "validation": 0.1, "cache": str(folder / "cache")},
        "optim": {"lr": 5e-3},
        "train": {"steps": steps, "eval_every": 0, "eval_microbatches": 2},
        "fleet": {"missed_heartbeats": 40, **WORKER_LOCATION},
        "checkpoint": {"every": 0},
    }
    for name, fields in sections.items():
        plain[name] = {**plain.get(name, {}), **fields}
    return RunConfig.model_validate(plain)


def folder_of(config: RunConfig) -> Path:
    return Path(config.out) / config.name


# ---- a fleet under a controller in this process


@dataclass
class LiveWorkers:
    """The worker processes of a live run and their nodes, for tests that inject faults which no trace can describe."""

    folder: Path
    pids: dict[str, int] = field(default_factory=dict)
    holders: dict[int, str] = field(default_factory=dict)

    def signal(self, number: signal.Signals, stage: int | None) -> int:
        """Signal the worker at the node ``stage``, or a spare; return its process id."""
        spare = next((worker for worker in self.pids if worker not in self.holders.values()), "")
        pid = self.pids[spare if stage is None else self.holders[stage]]
        os.kill(pid, number)
        return pid


Hook = Callable[[d.Decision, LiveWorkers], None]
"""called with every decision before its orders go out"""


def signal_once(when: Callable[[d.Decision], bool], number: signal.Signals, stage: int | None) -> Hook:
    """Return a hook that signals the worker of ``stage`` at the first decision that meets ``when``."""
    signalled: list[int] = []

    def hook(decision: d.Decision, workers: LiveWorkers) -> None:
        if not signalled and when(decision):
            signalled.append(workers.signal(number, stage))

    return hook


class HookedObserver(RunObserver):
    """An observer that records the run and calls a test's hook with every decision."""

    def __init__(self, config: RunConfig, hook: Hook | None) -> None:
        super().__init__(folder_of(config), config.samples * config.model.context, NoProgress())
        self._hook, self._workers = hook, LiveWorkers(folder_of(config))

    def on_event(self, t: float, event: e.Event, notice: int = 0) -> None:
        super().on_event(t, event, notice)
        if isinstance(event, e.WorkerJoined):
            self._workers.pids[event.worker] = event.pid

    def on_decision(self, t: float, decision: d.Decision) -> None:
        super().on_decision(t, decision)
        if isinstance(decision, d.Form):
            self._workers.holders |= {m.node: m.worker for m in decision.members}
        if self._hook is not None:
            self._hook(decision, self._workers)


def train(
    config: RunConfig,
    faults: Sequence[Fault] = (),
    hook: Hook | None = None,
    engine: Callable[..., object] = train_prepared,
) -> RunRecord:
    """Train ``config`` to its end under a controller in this process; return the checked record of the run."""
    folder, prepared = folder_of(config), prepare_run(config, trace=Trace(faults=tuple(faults)))
    folder.mkdir(parents=True)
    run_folders.write_config(folder, config)
    watch = HookedObserver(config, hook)
    try:
        engine(prepared, folder, watch)
    finally:
        watch.close()
        assert_no_orphans(folder)
    return read_run(folder) if engine is train_inline else checked(folder)


def resume(folder: Path, **flags: str) -> RunRecord:
    """Run ``planaria train --resume folder`` in this process; return the record of the whole run, checked."""
    try:
        assert (
            command.resume_run(folder, {name.replace("__", "."): text for name, text in flags.items()}, quiet=True) == 0
        )
    finally:
        assert_no_orphans(folder)
    return checked(folder)


def in_one_process(config: RunConfig, faults: Sequence[Fault] = (), name: str = "inline") -> RunRecord:
    """Train the same run on the inline engine, in the folder ``name``."""
    return train(config.model_copy(update={"engine": "inline", "name": name}), faults, engine=train_inline)


# ---- a controller in a separate process


class Live:
    """``planaria train`` as a process, with the whole of its terminal's process group."""

    def __init__(self, folder: Path, process: Command | subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process

    def wait_until(self, condition: Callable[[RunRecord], bool], seconds: float = 60.0) -> RunRecord:
        """Poll the run's record until it meets ``condition``, at intervals that leave the processor to the run."""
        deadline, ended = time.monotonic() + seconds, False
        while time.monotonic() < deadline and not ended:
            begun, ended = time.monotonic(), self.process.poll() is not None  # its last events are read too
            if (self.folder / "events.jsonl").exists() and condition(record := read_run(self.folder)):
                return record
            time.sleep(max(0.05, 3 * (time.monotonic() - begun)))
        raise AssertionError(f"not reached; exit code {self.process.poll()}")

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        """Wait for the process; return its exit code and stderr. All workers must have exited."""
        _, errors = self.process.communicate(timeout=seconds)
        assert_no_orphans(self.folder)
        return self.process.returncode, errors


@contextmanager
def live(config: RunConfig, prefix: Sequence[str] = (), flags: Sequence[str] = ()) -> Iterator[Live]:
    """Start the run by a command with ``flags`` after ``prefix``; kill its remaining processes at the end."""
    file = Path(config.out).parent / f"{config.name}.toml"
    file.write_text(recipe.dump(config))
    with training(folder_of(config), str(file), *flags, prefix=prefix) as run:
        yield run


@contextmanager
def training(folder: Path, *arguments: str, prefix: Sequence[str] = ()) -> Iterator[Live]:
    """Run ``planaria train`` with these arguments for the run in ``folder``, as a command after ``prefix``."""
    words = ["train", *arguments, "--quiet"]
    process = Command(*words) if not prefix else subprocess.Popen(
        [*prefix, sys.executable, "-m", "planaria", *words],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        yield Live(folder, process)
    finally:
        if process.poll() is None or living(folder):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


# ---- checks of every run


def checked(folder: Path) -> RunRecord:
    """Return the record of a finished run; its log must explain every decision, and every sample must be used once."""
    record = read_run(folder)
    assert replay(fact for _, fact in record.history).problems == []
    assert prove_exactly_once(record) == []
    reported(record)
    return record


def reported(record: RunRecord) -> None:
    """Build the run's report through the page, if the run has a kind of fact that no report of this process had yet."""
    kinds = {fact.kind for _, fact in record.history}
    if kinds - REPORTED:
        page.build_parts(report.body(record))
        REPORTED.update(kinds)


def living(folder: Path) -> set[int]:
    """Return processes that write to a worker's log of this run, whether they ever joined or not."""
    logs, found = str(folder / "workers"), set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "fd" / "1").readlink().is_relative_to(logs):
                found.add(int(process.name))
        except OSError:  # ended meanwhile, or another user's
            continue
    return found


def assert_no_orphans(folder: Path) -> None:
    until(lambda: not living(folder), LEFTOVER_TIMEOUT_S, shown=f"workers of {folder} are still running")


# ---- reading a record


def facts(record: RunRecord, kind: type[Any]) -> list[Any]:
    """Return the run's events or decisions of one kind, in order."""
    return [fact for _, fact in record.history if isinstance(fact, kind)]


def ending(record: RunRecord) -> d.Finish:
    """Return how the run ended; a resumed run: how it ended last."""
    finish: d.Finish = facts(record, d.Finish)[-1]
    return finish


def reason(record: RunRecord) -> str:
    return ending(record).reason


def outcomes(record: RunRecord) -> list[str]:
    """Return the outcome of each formation of a replica."""
    return [form.outcome for form in facts(record, d.Form)]


def losses(record: RunRecord) -> dict[int, float]:
    """Return step → training loss of its last commit."""
    return {m.step: m.loss for m in record.trained}


def validation_losses(record: RunRecord) -> dict[int, float]:
    return {m.step: m.val_loss for m in record.validated}


def mean_losses(record: RunRecord) -> dict[int, float]:
    """Return step → mean training loss of the replicas."""
    found: dict[int, dict[int, float]] = {}
    for ready in facts(record, e.StageReady):
        if ready.loss is not None and ready.mode == "train":
            found.setdefault(ready.step, {})[ready.replica] = ready.loss
    return {step: fmean(of.values()) for step, of in sorted(found.items())}


def steps(record: RunRecord) -> int:
    """Return the number of steps with a training loss."""
    return len(losses(record))


def commits(record: RunRecord, replica: int | None = None) -> int:
    """Count the commits of one replica, or of all."""
    return sum(replica in (None, commit.replica) for commit in facts(record, d.Commit))


def rounds(record: RunRecord, replica: int) -> int:
    """Count the rounds of the exchange in which ``replica`` met another."""
    return sum(replica in settle.members and len(settle.members) > 1 for settle in facts(record, d.Settle))


def pids(record: RunRecord) -> dict[str, int]:
    """Return worker → process id of its latest incarnation."""
    return {fact.worker: fact.pid for fact in facts(record, e.WorkerJoined)}


def rebuilt(record: RunRecord) -> list[Any]:
    """Return the members of all formations whose state was rebuilt, in order."""
    return [m for form in facts(record, d.Form) for m in form.members if isinstance(m.source, d.Rebuild)]


# ---- reading checkpoints


def newest(folder: Path) -> SealedCheckpoint:
    """Return the newest checkpoint of the run in ``folder``."""
    saved = CheckpointStore(folder / "checkpoints").newest()
    assert saved is not None
    return saved


def digests(folder: Path, step: int) -> list[str]:
    """Return the SHA-256 of each stage in the whole checkpoint of ``step``, without generators (one per process)."""
    saved = folder / "checkpoints" / f"step-{step:08d}"
    states = [replace(read_stage(saved, stage, step), generators={}) for stage in read_manifest(saved).stages]
    return [hashlib.sha256(pack(state).numpy().tobytes()).hexdigest() for state in states]


# ---- the same run without processes


def inline(record: RunRecord) -> tuple[dict[int, float], dict[int, float]]:
    """Return the training and validation losses by step of a reference engine that repeats the log of ``record``.

    It loads and loses the same stages at the same steps. Stages of a generation that broke up before it was complete
    are lost and rebuilt again in the next.
    """
    trained, validated, _ = inline_too(record)
    return trained, validated


def inline_losses(config: RunConfig, steps: int | None = None) -> dict[int, float]:
    """Return step → loss of an undisturbed run in one process, over the steps of the recipe or the first ``steps``."""
    engine = ReferenceEngine(config, *planaria.streams(config))
    return {result.step: result.loss for result in (engine.train_step() for _ in range(steps or config.train.steps))}


def inline_too(record: RunRecord) -> tuple[dict[int, float], dict[int, float], ReferenceEngine]:
    """Return the same, and the engine at its end."""
    config, checkpoints = record.config, record.folder / "checkpoints"
    trained, validated = {}, {}
    for _, fact in record.history:
        match fact:
            case e.RunStarted():
                engine = ReferenceEngine(config, *planaria.streams(config))
            case d.Form():
                engine.step = fact.step
                engine.skip(engine.stage.keys() - {m.node for m in fact.members})
                engine.detour = fact.routes
                sources = {m.node: m.source for m in fact.members}
                engine.load_states(
                    {
                        node: _state(config, checkpoints, engine.stage[node], source)
                        for node, source in sources.items()
                        if _known(source)
                    }
                )
                lost = {node: source for node, source in sources.items() if isinstance(source, d.Rebuild)}
                done = engine.lose(list(lost)).rebuilt
                assert done == {
                    engine.stage[node]: (source.by, tuple(engine.stage[donor] for donor in source.donors))
                    for node, source in lost.items()
                    if source.by != d.PEER
                }
            case e.StageReady(stage=0, mode="evaluate"):
                if fact.step not in validated:
                    validated[fact.step] = engine.evaluate()
            case d.Commit():
                result = engine.train_step()
                assert result.step == fact.step
                trained[fact.step] = result.loss
    return trained, validated, engine


def _known(source: d.Source) -> bool:
    return isinstance(source, d.Fresh | d.Load)


def _state(config: RunConfig, checkpoints: Path, stage: int, source: d.Source) -> StageState:
    """Return a stage's state from a checkpoint or from the seed."""
    if isinstance(source, d.Load):
        return read_stage(checkpoints / source.folder, stage, read_manifest(checkpoints / source.folder).step)
    return StageRunner(config, stage).state()


def apart(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest relative difference of two series of losses over the same steps."""
    assert one.keys() == other.keys() and one, f"steps differ: {sorted(one.keys() ^ other.keys())}"
    return max(abs(one[step] - other[step]) / abs(other[step]) for step in one)
