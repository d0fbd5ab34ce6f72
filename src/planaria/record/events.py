"""What happened: the typed facts a run is made of, in the order the controller learned them.

Workers report most of these over their control connection, the controller adds what it sees itself, and
``runs/NAME/events.jsonl``, with its segments, keeps all of them. ``record.apply`` folds them into the state of the
run; ``observe`` draws them. Times are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from planaria.record.started import Fact as Fact
from planaria.record.started import RunStarted as RunStarted
from planaria.record.started import Standing as Standing
from planaria.record.telemetry import Heartbeat as Heartbeat
from planaria.record.telemetry import Span as Span
from planaria.record.telemetry import Worked as Worked


class WorkerJoined(Fact):
    """A worker has everything imported and waits for orders."""

    kind: Literal["worker_joined"] = "worker_joined"
    worker: str
    incarnation: int
    pid: int
    at: str = ""
    """HOST:PORT, where others call for edges to it"""


class WorkerLost(Fact):
    """A worker counts as dead. A frozen one (``heartbeat``) may wake up later; nobody will listen.

    One that is ``stuck`` beats on while its main thread gets no further; it is killed.
    """

    kind: Literal["worker_lost"] = "worker_lost"
    worker: str
    incarnation: int
    cause: Literal["connection", "exit", "heartbeat", "stuck"]
    detail: str


class WorkerLeaving(Fact):
    """A worker's machine is about to go: others are to take over what it has."""

    kind: Literal["worker_leaving"] = "worker_leaving"
    worker: str
    incarnation: int
    detail: str


class HostJoined(Fact):
    """A machine has room for so many workers more."""

    kind: Literal["host_joined"] = "host_joined"
    host: str
    workers: int
    detail: str


class HostLeft(Fact):
    """A machine takes no more workers. What becomes of those that it has is told of each."""

    kind: Literal["host_left"] = "host_left"
    host: str
    detail: str


class Linked(Fact):
    """A worker holds its stage's state and all its edges of this generation."""

    kind: Literal["linked"] = "linked"
    worker: str
    node: int
    stage: int
    generation: int
    link_s: float
    transfer_s: float = 0.0
    transfer_bytes: int = 0
    rebuild_s: float = 0.0


class EdgeBroken(Fact):
    """A neighbour could not be reached, or did not deliver in time; ``detail`` names peer, stage, step, generation."""

    kind: Literal["edge_broken"] = "edge_broken"
    worker: str
    node: int
    peer: int
    """the node at the other end"""
    generation: int
    detail: str


class GraceExpired(Fact):
    """Nobody at the ends of a broken edge turned out to be dead: the edge itself is to be replaced."""

    kind: Literal["grace_expired"] = "grace_expired"
    replica: int = 0
    generation: int


class PatienceOver(Fact):
    """A replica has waited for its group as long as ``exchange.patience_s``: to come or, ``meeting``, to be heard."""

    kind: Literal["patience_over"] = "patience_over"
    replica: int
    round: int
    meeting: bool


class OfferHeard(Fact):
    """A worker has all that another replica has to say about its stage in this round."""

    kind: Literal["offer_heard"] = "offer_heard"
    worker: str
    node: int
    generation: int
    round: int
    replica: int
    """the other one"""


class OfferRefused(Fact):
    """What another replica says about a worker's stage in this round is of no use: it counts as not said."""

    kind: Literal["offer_refused"] = "offer_refused"
    worker: str
    node: int
    generation: int
    round: int
    replica: int
    """the other one"""
    reason: str


class RoundMade(Fact):
    """A worker has settled a round: its stage goes on with what came of it."""

    kind: Literal["round_made"] = "round_made"
    worker: str
    node: int
    stage: int
    generation: int
    round: int
    blocking_bytes: int
    """sent by this worker, that somebody waited for"""
    prefetched_bytes: int
    apart: float
    """RMS distance of the members' fast weights, as far as heard, from their mean; corrected for how few they are"""


Mode = Literal["train", "evaluate"]


class StageReady(Fact):
    """A stage has finished its part of a step and holds the step's whole gradient, not yet applied."""

    kind: Literal["stage_ready"] = "stage_ready"
    worker: str
    stage: int
    generation: int
    step: int
    mode: Mode = "train"
    """what the step was; logs of an older planaria do not tell"""
    loss: float | None = None
    replica: int = 0
    grad_norm: float | None = None
    """L2 norm of the stage's gradient before clipping; absent in an evaluation"""


class StageCommitted(Fact):
    """A stage has applied the step's update."""

    kind: Literal["stage_committed"] = "stage_committed"
    worker: str
    stage: int
    generation: int
    step: int


class StageSaved(Fact):
    """A stage's state lies in the checkpoint's unfinished folder."""

    kind: Literal["stage_saved"] = "stage_saved"
    worker: str
    stage: int
    generation: int
    step: int
    bytes: int
    file: str = ""
    """its name; the stage's number in logs of an older planaria"""
    sha256: str = ""
    """of the file; empty in logs of an older planaria"""


CONTROLLER = "controller"
"""in place of a worker"""


class SaveFailed(Fact):
    """A part of the checkpoint ``step`` could not be written, or the whole not be sealed: it is given up."""

    kind: Literal["save_failed"] = "save_failed"
    worker: str
    """or the controller, which seals"""
    stage: int
    generation: int
    step: int
    detail: str
    """names the file"""


class RetryDue(Fact):
    """A last save has failed, and a while ago: it may be tried again."""

    kind: Literal["retry_due"] = "retry_due"
    step: int
    """the checkpoint's name"""


class Trouble(Fact):
    """Something beside the training went wrong: the display, the state file. The run goes on without it."""

    kind: Literal["trouble"] = "trouble"
    detail: str


class WorkerFailed(Fact):
    """A worker met an error that is not a neighbour's: out of memory, a non-finite loss. The run must stop."""

    kind: Literal["worker_failed"] = "worker_failed"
    worker: str
    stage: int
    generation: int
    detail: str


class StopRequested(Fact):
    """Someone asked the run to stop at the next whole step (Ctrl-C)."""

    kind: Literal["stop_requested"] = "stop_requested"
    reason: str


class IntervalChosen(Fact):
    """From now on a checkpoint is made every ``steps`` steps: that loses least, by what steps and saves took."""

    kind: Literal["interval_chosen"] = "interval_chosen"
    steps: int
    step_s: float
    save_s: float


class Replanned(Fact):
    """There are routes for these nodes."""

    kind: Literal["replanned"] = "replanned"
    nodes: list[int]
    routes: list[list[int]]
    """the nodes that each microbatch visits"""
    step_s: float
    """the simulated step"""
    seconds: float
    """that it took to find them"""


class RoundSettled(Fact):
    """Replicas met: one round of their exchange, over all stages."""

    kind: Literal["round_settled"] = "round_settled"
    step: int
    """steps committed"""
    number: int
    groups: list[list[int]]
    blocking_bytes: int
    """sent by all together, that somebody waited for"""
    prefetched_bytes: int
    spread: float
    """RMS distance of the replicas' weights from their mean, afterwards"""


class ReplicasEvaluated(Fact):
    """What every replica's model is worth, and that of their mean; nats."""

    kind: Literal["replicas_evaluated"] = "replicas_evaluated"
    step: int
    losses: list[float]
    consensus: float
    spread: float


class FaultInjected(Fact):
    """Chaos struck the worker at ``node``. A worker that strikes itself says so just before."""

    kind: Literal["fault_injected"] = "fault_injected"
    worker: str
    node: int
    signal: str
    """SIGKILL, SIGSTOP, or another kind of fault (``chaos.trace.Fault``)"""
    step: int
    moment: str
    number: int = -1
    """of the fault in its trace"""


class ZombieIgnored(Fact):
    """A worker that counts as dead spoke again; its words were dropped and it was told to leave."""

    kind: Literal["zombie_ignored"] = "zombie_ignored"
    worker: str
    incarnation: int
    said: str


Event = Annotated[
    RunStarted
    | WorkerJoined
    | WorkerLost
    | WorkerLeaving
    | HostJoined
    | HostLeft
    | Linked
    | EdgeBroken
    | GraceExpired
    | StageReady
    | StageCommitted
    | StageSaved
    | SaveFailed
    | RetryDue
    | Trouble
    | WorkerFailed
    | StopRequested
    | IntervalChosen
    | Replanned
    | RoundSettled
    | ReplicasEvaluated
    | PatienceOver
    | OfferHeard
    | OfferRefused
    | RoundMade
    | FaultInjected
    | ZombieIgnored,
    Field(discriminator="kind"),
]
"""Any event, told apart by ``kind``."""


Report = Annotated[
    WorkerJoined
    | Linked
    | EdgeBroken
    | StageReady
    | StageCommitted
    | StageSaved
    | SaveFailed
    | OfferHeard
    | OfferRefused
    | RoundMade
    | WorkerFailed
    | FaultInjected
    | Worked
    | Heartbeat,
    Field(discriminator="kind"),
]
"""What a worker may say to the controller."""

EVENT: TypeAdapter[Event] = TypeAdapter(Event)
REPORT: TypeAdapter[Report] = TypeAdapter(Report)
