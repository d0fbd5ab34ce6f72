"""The state from which a standby continues a run, folded from its log. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from planaria.control.apply import apply
from planaria.control.facts.decisions import Commit, Decision, Finish, Replan, Settle, is_decision
from planaria.control.facts.events import ControllerEnd, LeaderStarted, RunStarted, StageCommitted
from planaria.control.log.run_record import Timed
from planaria.control.state.run import RunState

MAX_FAILED_CONTROLLERS = 20
"""number of controllers in a row that may be lost within one step before the run stops"""


@dataclass(frozen=True)
class FailoverState:
    """State of a run whose controller was lost, from its log."""

    state: RunState
    repeat: tuple[Decision, ...]
    """decisions to repeat: the last one in the log, whose orders may not all have been sent; and an unanswered request
    for a plan, since the planner ended with the controller"""
    silent_since: float
    """time of the last line, monotonic seconds"""
    unfinished: tuple[Commit | Settle, ...] = ()
    """commits and settled rounds that some workers have not reported"""
    notice: int = 0
    """number of the supervisor's last notice in the log"""
    failed_controllers: int = 0
    """controllers that were lost since the last committed step"""
    cause: ControllerEnd = "exited"
    """end of the controller"""
    noticed: float = 0.0
    """when its loss was noticed, monotonic seconds"""
    has_checkpoint: bool = True
    """whether this machine has the run's newest checkpoint"""

    @property
    def elsewhere(self) -> bool:
        """Whether the former controller led on another machine."""
        return self.cause == "machine"

    @property
    def finish(self) -> Finish | None:
        """How the run ended, if the controller was lost after that."""
        return next((decision for decision in self.repeat if isinstance(decision, Finish)), None)


def failover_state(history: Iterable[Timed], notice: int = 0) -> FailoverState:
    """Return the state at the end of a log.

    :raises ValueError: if it does not begin with the start of a run.
    """
    state: RunState | None = None
    failed_controllers = 0
    last: Decision | None = None
    replan: Replan | None = None
    durable: dict[int, Commit | Settle] = {}
    until = 0.0
    for t, fact in history:
        until = t
        if isinstance(fact, RunStarted):
            state, last, replan = RunState.start(fact), None, None
            durable = {}
            continue
        if state is None:
            raise ValueError("the log does not begin with run_started")
        state = apply(fact, state)
        if isinstance(fact, LeaderStarted):
            failed_controllers += 1
        elif isinstance(fact, StageCommitted):
            failed_controllers = 0
        if is_decision(fact):
            last = fact
            replan = fact if isinstance(fact, Replan) else replan
            if isinstance(fact, Commit):
                durable[fact.replica] = fact
            elif isinstance(fact, Settle):
                durable |= dict.fromkeys(fact.members, fact)
    if state is None:
        raise ValueError("the log is empty")
    repeat = [] if last is None else [last]
    if replan is not None and replan is not last and state.replicas[replan.replica].phase == "replan":
        repeat.append(replan)
    unfinished: list[Commit | Settle] = []
    for number, replica in state.live.items():
        if replica.phase in ("commit", "settle") and not any(durable[number] is decision for decision in unfinished):
            unfinished.append(durable[number])
    return FailoverState(state, tuple(repeat), until, tuple(unfinished), notice, failed_controllers)
