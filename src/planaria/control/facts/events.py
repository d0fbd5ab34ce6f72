"""Events of a run, as typed records in the order in which the controller received them.

Workers report most of them over their control connection; the controller adds its own observations.
``runs/NAME/events.jsonl``, with its segments, keeps all of them. ``control.apply`` folds them into the state of the
run; reports draw them. Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from planaria.control.facts.measurements import WorkerMeasurements as WorkerMeasurements
from planaria.control.facts.reports import CONTROLLER as CONTROLLER
from planaria.control.facts.reports import REPORT as REPORT
from planaria.control.facts.reports import EdgeBroken as EdgeBroken
from planaria.control.facts.reports import FaultInjected as FaultInjected
from planaria.control.facts.reports import Heartbeat as Heartbeat
from planaria.control.facts.reports import Linked as Linked
from planaria.control.facts.reports import Mode as Mode
from planaria.control.facts.reports import Report as Report
from planaria.control.facts.reports import SaveFailed as SaveFailed
from planaria.control.facts.reports import Span as Span
from planaria.control.facts.reports import SpanKind as SpanKind
from planaria.control.facts.reports import StageCommitted as StageCommitted
from planaria.control.facts.reports import StageCopied as StageCopied
from planaria.control.facts.reports import StageReady as StageReady
from planaria.control.facts.reports import StageSaved as StageSaved
from planaria.control.facts.reports import WorkerFailed as WorkerFailed
from planaria.control.facts.reports import WorkerJoined as WorkerJoined
from planaria.control.facts.reports import WorkReport as WorkReport
from planaria.control.facts.run_started import Fact as Fact
from planaria.control.facts.run_started import Recut as Recut
from planaria.control.facts.run_started import ReplicaPosition as ReplicaPosition
from planaria.control.facts.run_started import RunShape as RunShape
from planaria.control.facts.run_started import RunStarted as RunStarted
from planaria.control.facts.update_reports import MessageCompressed as MessageCompressed
from planaria.control.facts.update_reports import RoundApplied as RoundApplied
from planaria.control.facts.update_reports import UpdateReceived as UpdateReceived
from planaria.control.facts.update_reports import UpdateRejected as UpdateRejected
from planaria.control.facts.update_reports import UpdatesWeighted as UpdatesWeighted
from planaria.exchange.coded.coded_facts import ResultsSent, RoundLate


class WorkerLost(Fact):
    """A worker counts as dead. A frozen one (``heartbeat``) may wake up later and is ignored.

    A ``stuck`` one still sends heartbeats while its main thread makes no progress; it is killed.
    """

    kind: Literal["worker_lost"] = "worker_lost"
    worker: str
    incarnation: int
    cause: Literal["connection", "exit", "heartbeat", "stuck", "controller"]
    """``controller``: lost with the run's controller"""
    detail: str


class WorkerLeaving(Fact):
    """A worker's machine is about to leave: others take over its states."""

    kind: Literal["worker_leaving"] = "worker_leaving"
    worker: str
    incarnation: int
    detail: str


class HostJoined(Fact):
    """A machine offers room for this many more workers."""

    kind: Literal["host_joined"] = "host_joined"
    host: str
    workers: int
    detail: str


class HostLeft(Fact):
    """A machine takes no more workers. Its present workers are reported separately."""

    kind: Literal["host_left"] = "host_left"
    host: str
    detail: str


class GraceExpired(Fact):
    """Neither end of a broken edge turned out to be dead: the edge itself must be replaced."""

    kind: Literal["grace_expired"] = "grace_expired"
    replica: int = 0
    generation: int


class RoundWaitExpired(Fact):
    """A replica has waited ``exchange.patience_s`` for its group to arrive or, if ``in_round``, for its updates."""

    kind: Literal["round_wait_expired"] = "round_wait_expired"
    replica: int
    round: int
    in_round: bool


class WorkersStarting(Fact):
    """The run has waited for workers to start; reported again at growing intervals."""

    kind: Literal["workers_starting"] = "workers_starting"
    workers: list[str]
    """workers that have not reported that they are ready"""
    ready: int
    waited_s: float
    limit_s: float
    """``fleet.start_timeout_s``"""


class RelaySilent(Fact):
    """A relay does not answer the controller: edges use the others."""

    kind: Literal["relay_silent"] = "relay_silent"
    relay: str
    """the relay's name"""
    detail: str
    """its address and the error"""


class RelayAnswers(Fact):
    """A relay that was silent answers again."""

    kind: Literal["relay_answers"] = "relay_answers"
    relay: str


class RelaysGivenUp(Fact):
    """No relay has answered for the time that the run waits for machines (``fleet.join_s``)."""

    kind: Literal["relays_given_up"] = "relays_given_up"


class JoinTimedOut(Fact):
    """The run lacks workers, and the wait for machines to join timed out."""

    kind: Literal["join_timed_out"] = "join_timed_out"
    missing_workers: int
    """number of workers that the run still needs"""


class RetryDue(Fact):
    """The pause after a failed last save is over; the save can be retried."""

    kind: Literal["retry_due"] = "retry_due"
    step: int
    """the checkpoint's name"""


class Trouble(Fact):
    """A problem outside training: the display, the state file, too many stages on one machine. The run continues."""

    kind: Literal["trouble"] = "trouble"
    detail: str


class StopRequested(Fact):
    """A stop of the run was requested (Ctrl-C, SIGTERM)."""

    kind: Literal["stop_requested"] = "stop_requested"
    reason: str
    skip_repairs: bool = False
    """a replica whose stages are all held is saved without repairs; false in logs of an older planaria"""


class StopOverdue(Fact):
    """The current step or repair has not ended within ``fleet.stop_s`` of the stop request: it is dropped."""

    kind: Literal["stop_overdue"] = "stop_overdue"
    detail: str
    """actions that did not end, and the underlying error if it is known"""


class IntervalChosen(Fact):
    """From now on a checkpoint is made every ``steps`` steps, which minimises expected loss by the measured times."""

    kind: Literal["interval_chosen"] = "interval_chosen"
    steps: int
    step_s: float
    save_s: float
    """seconds that training pauses for one"""
    write_s: float = 0.0
    """seconds to write one in the background; the next cannot start earlier"""


class Replanned(Fact):
    """Routes for these nodes were found."""

    kind: Literal["replanned"] = "replanned"
    nodes: list[int]
    routes: list[list[int]]
    """the nodes that each microbatch visits"""
    step_s: float
    """the simulated step"""
    seconds: float
    """duration of the search"""
    before_s: float = 0.0
    """simulated step on the current routes, repaired if nodes are missing, s; with slow links"""


class RoundSettled(Fact):
    """A round of the exchange in a log of an older version, where one process trained all replicas."""

    kind: Literal["round_settled"] = "round_settled"
    step: int
    """number of committed steps"""
    number: int
    groups: list[list[int]]
    blocking_bytes: int
    """sent by all replicas together on the critical path"""
    prefetched_bytes: int
    spread: float
    """RMS distance of the replicas' weights from their mean, after the round"""


class ReplicasEvaluated(Fact):
    """Validation losses of each replica and of their mean, in nats, in a log like that of :class:`RoundSettled`."""

    kind: Literal["replicas_evaluated"] = "replicas_evaluated"
    step: int
    losses: list[float]
    consensus: float
    spread: float


class ZombieIgnored(Fact):
    """A worker that counts as dead reported again; the report was dropped and the worker was ordered to leave."""

    kind: Literal["zombie_ignored"] = "zombie_ignored"
    worker: str
    incarnation: int
    report: str


ControllerEnd = Literal["exited", "stopped", "silent"]
"""how a controller was lost; ``silent`` in the shared log: its machine was lost or cut off, or it was stopped"""


class LeaderStarted(Fact):
    """A standby leads the run after its controller was lost.

    If a supervisor kept the workers, they, the stages and the current step are unaffected. If orders were lost, what is
    durable is completed, and all else of the current step is void.
    """

    kind: Literal["leader_started"] = "leader_started"
    term: int
    """counts the controllers of a part of the run; the first one's is 1"""
    pid: int
    cause: ControllerEnd
    """end of the former controller; a stopped one was killed"""
    orders_lost: bool = False
    """whether orders and reports in flight are lost, since no supervisor kept them; older logs lack the field, and
    ``silent`` implies it"""
    has_checkpoint: bool = True
    """whether this machine has the run's newest checkpoint"""
    silent_s: float
    """seconds from the former controller's last log line to this event"""
    lost_s: float
    """seconds from the detection of the loss to this event"""
    wall_time: float
    """seconds since 1970, UTC"""

    @property
    def leaderless_s(self) -> float:
        """Seconds without a controller: from its loss, or from the last sign of a stopped or unreachable one."""
        return self.lost_s if self.cause == "exited" else self.silent_s


Event = Annotated[
    RunStarted
    | LeaderStarted
    | WorkerJoined
    | WorkerLost
    | WorkerLeaving
    | HostJoined
    | HostLeft
    | Linked
    | EdgeBroken
    | GraceExpired
    | StageReady
    | ResultsSent
    | RoundLate
    | StageCommitted
    | StageCopied
    | StageSaved
    | SaveFailed
    | WorkersStarting
    | RelaySilent
    | RelayAnswers
    | RelaysGivenUp
    | JoinTimedOut
    | RetryDue
    | Trouble
    | WorkerFailed
    | StopRequested
    | StopOverdue
    | IntervalChosen
    | Replanned
    | RoundSettled
    | ReplicasEvaluated
    | RoundWaitExpired
    | UpdateReceived
    | UpdateRejected
    | UpdatesWeighted
    | MessageCompressed
    | RoundApplied
    | FaultInjected
    | WorkerMeasurements
    | ZombieIgnored,
    Field(discriminator="kind"),
]
"""any event, distinguished by ``kind``"""


EVENT: TypeAdapter[Event] = TypeAdapter(Event)
