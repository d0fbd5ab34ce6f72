"""The state from which a standby continues a run, folded from its log. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from planaria.control.apply import apply
from planaria.control.facts.decisions import Commit, Decision, Finish, Replan, Settle, is_decision
from planaria.control.facts.events import ControllerEnd, Event, LeaderStarted, RunStarted, StageCommitted
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
    """time at which its loss was noticed, monotonic seconds"""
    has_checkpoint: bool = True
    """whether this machine has the run's newest checkpoint"""
    unsupervised: bool = False
    """whether no supervisor kept the orders and reports of a controller of this machine"""

    @property
    def elsewhere(self) -> bool:
        """Whether the former controller led on another machine."""
        return self.cause == "silent"

    @property
    def orders_lost(self) -> bool:
        """Whether orders and reports in flight are lost."""
        return self.elsewhere or self.unsupervised

    @property
    def finish(self) -> Finish | None:
        """The decision that ended the run, if the controller was lost after it."""
        return next((decision for decision in self.repeat if isinstance(decision, Finish)), None)


class FailoverFold:
    """Folds a growing log into the state from which a standby continues the run."""

    def __init__(self) -> None:
        self._state: RunState | None = None
        self._last: Decision | None = None
        self._replan: Replan | None = None
        self._durable = dict[int, Commit | Settle]()
        """replica → its last commit or settle decision, which workers carry out even if the controller is lost"""
        self._failed_controllers = 0
        self.last_t = 0.0
        """time of the last line"""

    @property
    def begun(self) -> bool:
        """Whether the run has started."""
        return self._state is not None

    def take(self, t: float, fact: Event | Decision) -> None:
        """Fold the next line.

        :raises ValueError: if the log does not begin with the start of a run.
        """
        self.last_t = t
        if isinstance(fact, RunStarted):
            self._state, self._last, self._replan, self._durable = RunState.start(fact), None, None, {}
            return
        if self._state is None:
            raise ValueError("the log does not begin with run_started")
        self._state = apply(fact, self._state)
        if isinstance(fact, LeaderStarted):
            self._failed_controllers += 1
        elif isinstance(fact, StageCommitted):
            self._failed_controllers = 0
        if is_decision(fact):
            self._record_decision(fact)

    def state(self, notice: int = 0) -> FailoverState:
        """Return the state at the end of the log.

        :param notice: number of the supervisor's last notice in the log
        :raises ValueError: if the log is empty.
        """
        if self._state is None:
            raise ValueError("the log is empty")
        repeat = [] if self._last is None else [self._last]
        if (replan := self._unanswered_replan(self._state)) is not None and replan is not self._last:
            repeat.append(replan)
        unfinished: list[Commit | Settle] = []
        for number, replica in self._state.live.items():
            if replica.phase in ("commit", "settle") and self._durable[number] not in unfinished:
                unfinished.append(self._durable[number])
        return FailoverState(
            self._state, tuple(repeat), self.last_t, tuple(unfinished), notice, self._failed_controllers
        )

    def _unanswered_replan(self, state: RunState) -> Replan | None:
        return self._replan if self._replan and state.replicas[self._replan.replica].phase == "replan" else None

    def _record_decision(self, decision: Decision) -> None:
        self._last = decision
        if isinstance(decision, Replan):
            self._replan = decision
        elif isinstance(decision, Commit):
            self._durable[decision.replica] = decision
        elif isinstance(decision, Settle):
            self._durable |= dict.fromkeys(decision.members, decision)
