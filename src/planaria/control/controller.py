"""The controller's loop: hear, fold, decide, carry out. All that is not pure about control, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from planaria import decisions as d
from planaria import events as e
from planaria.checkpoint.store import CheckpointStore, Manifest
from planaria.config import RunConfig
from planaria.control.apply import apply
from planaria.control.cadence import Cadence
from planaria.control.decide import decide
from planaria.control.state import RunState
from planaria.control.statefile import write_state
from planaria.fleet.base import Fleet, Gone, Said

GRACE_S = 0.5
"""After a broken edge, how long a death notice for one of its ends may take before the edge itself is blamed."""


PLANNING_S = 0.02
"""between two looks whether new routes have been found"""


class Observer(Protocol):
    """Is told everything, in order; has no influence."""

    def on_event(self, t: float, event: e.Event) -> None: ...

    def on_decision(self, t: float, decision: d.Decision) -> None: ...

    def on_worked(self, t: float, worked: e.Worked) -> None: ...


class FaultSource(Protocol):
    """Chaos: looks at decisions and the clock, strikes workers, and tells what it did."""

    def on_decision(self, t: float, decision: d.Decision) -> None: ...

    def strike(self, t: float, state: RunState) -> list[e.FaultInjected]: ...

    def next_due(self) -> float | None: ...


class Planner(Protocol):
    """Finds routes for the nodes that are left, in its own time."""

    def ask(self, request: d.Replan) -> None: ...

    def answer(self) -> e.Replanned | None: ...


class Controller:
    """The one authority of a run."""

    def __init__(
        self,
        config: RunConfig,
        started: e.RunStarted,
        fleet: Fleet,
        folder: Path,
        observer: Observer,
        chaos: FaultSource,
        planner: Planner | None = None,
    ) -> None:
        """``planner`` is for runs on a schedule, which need new routes when nodes go."""
        self.state = RunState.start(started)
        self._config, self._fleet, self._folder = config, fleet, folder
        self._observer, self._chaos, self._planner = observer, chaos, planner
        self._store = CheckpointStore(folder / "checkpoints")
        measure = config.checkpoint.every == "best"
        self._cadence = Cadence(config.network.hourly, len(self.state.arrangement.stage)) if measure else None
        self._ending: d.Finish | None = None
        self._grace: tuple[float, int] | None = None
        self._zombies: set[tuple[str, int]] = set()

    def run(self, stop_asked: Callable[[], str]) -> d.Finish:
        """Lead the run to its end and tell how it ended; ``stop_asked`` gives a reason once someone wants a stop."""
        self._happened(self.state.settings)
        while self.state.phase != "over":
            for notice in self._fleet.poll(self._patience()):
                self._hear(notice)
            now = time.monotonic()
            for fault in self._chaos.strike(now, self.state):
                self._happened(fault)
            if self._planner is not None and (answer := self._planner.answer()):
                self._happened(answer)
            if self._grace and now >= self._grace[0]:
                (_, generation), self._grace = self._grace, None
                if generation == self.state.generation:
                    self._happened(e.GraceExpired(generation=generation))
            if not self.state.stopping and stop_asked():
                self._happened(e.StopRequested(reason=stop_asked()))
        write_state(self._folder / "state.json", self.state)
        assert self._ending is not None
        return self._ending

    def _patience(self) -> float:
        """How long to listen: until the next thing that is due by the clock."""
        due = [t for t in (self._chaos.next_due(), self._grace[0] if self._grace else None) if t is not None]
        until_due = min(due) - time.monotonic() if due else self._config.fleet.heartbeat_s
        longest = PLANNING_S if self.state.phase == "replan" else self._config.fleet.heartbeat_s
        return min(max(0.0, until_due), longest)

    def _hear(self, notice: Said | Gone) -> None:
        worker = self.state.workers.get(notice.worker)
        current = worker is not None and worker.incarnation == notice.incarnation and worker.status != "dead"
        if isinstance(notice, Gone):
            if current:
                lost = e.WorkerLost(
                    worker=notice.worker, incarnation=notice.incarnation, cause=notice.cause, detail=notice.detail
                )
                self._happened(lost)
        elif current:
            report = e.REPORT.validate_json(notice.text)
            if isinstance(report, e.Worked):
                self._observer.on_worked(time.monotonic(), report)
            elif not isinstance(report, e.Heartbeat):
                self._happened(report)
        else:
            self._turn_away(notice)

    def _turn_away(self, said: Said) -> None:
        """A worker that counts as dead speaks: it was frozen, its stage has a new holder, its words are void."""
        self._fleet.dismiss(said.worker, said.incarnation, d.Leave().model_dump_json().encode())
        if (said.worker, said.incarnation) not in self._zombies:
            self._zombies.add((said.worker, said.incarnation))
            kind = e.REPORT.validate_json(said.text).kind
            self._happened(e.ZombieIgnored(worker=said.worker, incarnation=said.incarnation, said=kind))

    def _happened(self, event: e.Event) -> None:
        """Fold an event in, then decide and carry out until there is nothing more to do."""
        t, step = time.monotonic(), self.state.step
        self._observer.on_event(t, event)
        self.state = apply(event, self.state)
        if isinstance(event, e.EdgeBroken) and self.state.suspects and not self._in_grace():
            self._grace = (t + GRACE_S, self.state.generation)
        chosen: e.IntervalChosen | None = None
        while (decision := decide(self.state)) is not None:
            t = time.monotonic()
            self.state = apply(decision, self.state)
            self._observer.on_decision(t, decision)
            self._carry_out(decision)
            self._chaos.on_decision(t, decision)
            if self._cadence is not None:
                chosen = chosen or self._cadence.on_decision(time.monotonic(), decision)
        if chosen:
            self._happened(chosen)
        if isinstance(event, e.WorkerJoined | e.WorkerLost | e.Linked | e.RunStarted) or self.state.step != step:
            write_state(self._folder / "state.json", self.state)

    def _in_grace(self) -> bool:
        return self._grace is not None and self._grace[1] == self.state.generation

    def _carry_out(self, decision: d.Decision) -> None:
        match decision:
            case d.Spawn():
                self._fleet.spawn(decision.worker, decision.incarnation)
            case d.Form() | d.RunStep() | d.Commit() | d.Save():
                text = decision.model_dump_json().encode()
                for worker in self.state.waiting:
                    self._fleet.send(worker, text)
            case d.Replan():
                assert self._planner is not None, "only runs on a schedule are planned anew"
                self._planner.ask(decision)
            case d.Seal():
                try:
                    self._seal(decision)
                except OSError as error:
                    self._happened(
                        e.WorkerFailed(
                            worker="controller",
                            stage=-1,
                            generation=self.state.generation,
                            detail=f"cannot save {self._store.folder / decision.folder}: {error.strerror}",
                        )
                    )
            case d.Finish():
                self._ending = decision
                for worker in (w for w, s in self.state.workers.items() if s.status != "dead"):
                    self._fleet.send(worker, d.Leave().model_dump_json().encode())

    def _seal(self, seal: d.Seal) -> None:
        manifest = Manifest(
            step=seal.step,
            stages=seal.stages,
            pipeline_stages=self._config.pipeline.stages,
            samples=self.state.settings.samples_before(seal.step),
            model=self._config.model,
        )
        self._store.seal(seal.folder, manifest, self._config.checkpoint.keep, self.state.generation)
