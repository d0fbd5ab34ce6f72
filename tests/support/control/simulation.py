"""The common part of the simulations without processes: the controller's event loop, the disk and stop requests."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from planaria.control.apply import apply
from planaria.control.apply_base import mark_decided
from planaria.control.checkpoint_decisions import save_awaiting_retry
from planaria.control.decide import decide
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.facts.orders import Order
from planaria.control.state.run import RunState
from planaria.control.stop_reasons import stop_blockers
from support.control.full_decide import decide_checked

DISK = "/disk"
"""suffix of a worker's name: its thread that writes checkpoints"""
DECISIONS = d.Decision.__args__[0].__args__  # type: ignore[attr-defined]


@dataclass
class Worker:
    """One incarnation of a worker. It obeys its orders one after the other."""

    name: str
    incarnation: int
    host: str = ""
    """a machine that has joined; empty for the run's own"""
    joined: bool = False
    node: int = -1
    stage: int = -1
    replica: int = 0
    generation: int = 0
    orders: deque[Order] = field(default_factory=deque)


class Simulation:
    """Feeds ``apply`` and ``decide`` with events and checks every decision against the workers' true states."""

    most_decisions: int
    """maximum number of decisions in a row between two events; starting all workers needs the most"""
    alive: Mapping[str, Worker]

    def __init__(self, started: e.RunStarted) -> None:
        self.run, self.started = RunState.start(started), started
        self.history: list[e.Event | d.Decision] = []
        self.leaving: set[str] = set()
        """workers whose departure was announced"""
        self.room = self.full = 0
        """number of files (stages and manifests) that can still be written; number of failures after these"""
        self.sound = True
        """no check has failed"""
        self.happened(started)

    def happened(self, event: e.Event) -> None:
        """Process an event as the controller's loop does."""
        self.sound = False
        self.history.append(event)
        self.run = apply(event, self.run)
        self.on_event(event)
        for _ in range(self.most_decisions):
            decision = decide_checked(self.run)
            if decision is None:
                self.on_idle()
                self.sound, self.run = True, mark_decided(self.run)
                return
            self.before, self.run = self.run, apply(decision, self.run)
            self.history.append(decision)
            assert decide(self.run) != decision, "the same decision twice"
            self.validate(decision, self.before)
            self.carry_out(decision)
        raise AssertionError(f"endless decisions: {self.history[-self.most_decisions :]}")

    def on_event(self, event: e.Event) -> None:
        """React to an event that has been applied, before anything is decided."""

    def on_idle(self) -> None:
        """Check the state once nothing is left to decide."""

    def validate(self, decision: d.Decision, before: RunState) -> None:
        """Check a decision against the truth."""
        raise NotImplementedError

    def carry_out(self, decision: d.Decision) -> None:
        """Deliver orders, or start a worker."""
        raise NotImplementedError

    def report(self, me: Worker, kind: type[e.Fact], **values: object) -> None:
        """Send the controller a fact, with the fields by which a worker identifies itself."""
        own = {"worker": me.name, "node": me.node, "stage": me.stage, "generation": me.generation}
        facts = {"replica": me.replica} | own | values
        self.happened(kind.model_validate({name: facts[name] for name in facts.keys() & kind.model_fields.keys()}))  # type: ignore[arg-type]

    def workers_of(self, host: str) -> list[str]:
        """Return the living workers on a machine; on the run's own machines if the name is empty."""
        return [name for name, worker in self.alive.items() if worker.host == host]

    def drain(self, worker: str) -> None:
        """Announce that a worker's machine will leave."""
        if worker in self.alive and not self.run.over:
            self.leaving.add(worker)
            incarnation = self.alive[worker].incarnation
            self.happened(e.WorkerLeaving(worker=worker, incarnation=incarnation, detail="drained"))

    def is_full(self) -> bool:
        """Use up one file's room; True if the file cannot be written."""
        if self.room or not self.full:
            self.room -= self.room > 0
            return False
        self.full -= 1
        return True

    def report_seal_failed(self, seal: d.Seal) -> None:
        """Report that the disk was full when a checkpoint was sealed."""
        origin = {"worker": e.CONTROLLER, "stage": -1, "generation": -1, "step": seal.step}
        self.happened(e.SaveFailed.model_validate(origin | {"detail": "disk full"}))

    def retry_save(self) -> None:
        """Let the pause after the last failed save elapse."""
        step = save_awaiting_retry(self.run)
        assert step is not None
        self.happened(e.RetryDue(step=step))

    def stop(self, skip_repairs: bool = False) -> None:
        self.happened(e.StopRequested(reason="someone asked", skip_repairs=skip_repairs))

    def expire_stop(self) -> None:
        """Let ``fleet.stop_s`` elapse after the stop request."""
        if detail := stop_blockers(self.run):
            self.happened(e.StopOverdue(detail=detail))
