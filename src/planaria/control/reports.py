"""Reports of workers to the controller; those of their work and health do not change the state of the run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from planaria.config.names import STAGE_FILE
from planaria.control.feature_facts import Reported
from planaria.control.gauges import Gauged
from planaria.control.offers import MessageCompressed, OfferHeard, OfferRefused, OffersCounted, RoundMade
from planaria.control.started import Fact

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]

SpanKind = Literal["forward", "backward", "exchange", "optimizer", "rebuild", "save", "write", "copy"]
"""save: as long as training stands still for it; write: a file that is written meanwhile; copy: what others keep of the
stage is made and handed over"""


class Span(Fact):
    """One action of one worker, for the Gantt chart."""

    action: SpanKind
    microbatch: int = -1
    hop: int = -1
    start: float
    end: float


class Worked(Fact):
    """What a worker did in one (finished or dropped) step, and the payload bytes it sent to each neighbour.

    Kept in ``spans.jsonl``, thinned (``report/live/watch.py``); it has no influence on the run.
    """

    kind: Literal["worked"] = "worked"
    worker: str
    node: int
    stage: int
    """-1: all of them, in one process"""
    generation: int
    step: int
    dropped: bool = False
    spans: list[Span]
    sent_bytes: dict[int, int]
    """by the node at the other end"""
    peak_bytes: Bytes = 0
    """the most memory that the worker's process has held since it began; 0 in logs of an older planaria"""
    device_peak_bytes: Bytes = 0
    """the most that its tensors have held on a CUDA device; 0 on CPUs"""


class Heartbeat(Fact):
    """A worker is alive, and where its main thread is. Never logged."""

    kind: Literal["heartbeat"] = "heartbeat"
    doing: str = "orders"
    """the kind of order or action that the main thread is in; 'orders' when it has none"""
    step: int = -1
    microbatch: int = -1
    waiting: bool = True
    """does it wait for something to arrive?"""
    trouble: str = ""
    """why an edge that is being opened has not opened yet"""
    for_s: float = 0.0
    """seconds that it has been at this, or since it last took something in"""
    cpu_s: float = 0.0
    """seconds of a processor that it used meanwhile"""
    writing: int = -1
    """step of the checkpoint for which another thread writes; -1: none"""
    writing_s: float = 0.0
    """seconds that it has been at that"""


CONTROLLER = "controller"
"""in place of a worker"""
Mode = Literal["train", "evaluate"]


class WorkerJoined(Fact):
    """A worker has everything imported and waits for orders."""

    kind: Literal["worker_joined"] = "worker_joined"
    worker: str
    incarnation: int
    pid: int
    at: str = ""
    """HOST:PORT, where others call for edges to it"""
    device: str = ""
    """the CUDA device that it sees, as its machine names it; empty on CPUs"""
    memory: int = 0
    """bytes of that device; 0 on CPUs"""
    layer_s: float = 0.0
    """seconds that a decoder layer's passes of one microbatch take there, where stages are unlike; 0: not timed"""


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
    waited_s: float = 0.0
    """that a message from there was waited for; 0 where the connection itself is gone"""
    since_s: float = 0.0
    """seconds after the step began for this worker that it began to wait"""
    cause: str = ""
    """why, such as the operating system's error; empty in logs of an older planaria"""
    relay: str = ""
    """the name of the relay that did not answer; empty if that is not why"""


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
    heard: dict[int, str] = Field(default_factory=dict)
    """replica → digest of its gradient as it was heard here, where members tell that; its own as it was said"""


class StageCommitted(Fact):
    """A stage has applied the step's update."""

    kind: Literal["stage_committed"] = "stage_committed"
    worker: str
    stage: int
    generation: int
    step: int


class StageCopied(Fact):
    """A worker has a copy of its stage for a checkpoint, which it writes from now on while it trains."""

    kind: Literal["stage_copied"] = "stage_copied"
    worker: str
    stage: int
    generation: int
    step: int
    seconds: float = 0.0
    """that training stood still for it"""


class StageSaved(Fact):
    """A stage's state lies in the checkpoint's unfinished folder."""

    kind: Literal["stage_saved"] = "stage_saved"
    worker: str
    stage: int
    generation: int
    step: int
    bytes: int
    file: Annotated[str, Field(pattern=f"^({STAGE_FILE})?$")] = ""
    """its name; the stage's number in logs of an older planaria"""
    sha256: str = ""
    """of the file; empty in logs of an older planaria"""
    seconds: float = 0.0
    """that writing took; 0 in logs of an older planaria"""
    node: int = -1
    weights: str = ""
    """digest of the weights alone; empty in logs of an older planaria, and where none were there"""


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


class WorkerFailed(Fact):
    """A worker met an error that is not a neighbour's: out of memory, a non-finite loss. The run must stop."""

    kind: Literal["worker_failed"] = "worker_failed"
    worker: str
    stage: int
    generation: int
    detail: str
    leaves: bool = False
    """the run can go on without it: it ends itself, and its end is a loss like any other"""


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


Report = Annotated[
    WorkerJoined
    | Linked
    | EdgeBroken
    | StageReady
    | Reported
    | StageCommitted
    | StageCopied
    | StageSaved
    | SaveFailed
    | OfferHeard
    | OfferRefused
    | OffersCounted
    | MessageCompressed
    | RoundMade
    | WorkerFailed
    | FaultInjected
    | Gauged
    | Worked
    | Heartbeat,
    Field(discriminator="kind"),
]
"""What a worker may say to the controller."""

REPORT: TypeAdapter[Report] = TypeAdapter(Report)
