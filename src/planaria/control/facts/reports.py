"""Reports of workers to the controller; those about work and health do not change the run's state."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter

from planaria.config.names import STAGE_FILE
from planaria.control.facts.measurements import WorkerMeasurements
from planaria.control.facts.run_started import Fact
from planaria.control.facts.update_reports import (
    MessageCompressed,
    RoundApplied,
    UpdateReceived,
    UpdateRejected,
    UpdatesWeighted,
)
from planaria.exchange.coded.coded_facts import ResultsSent

Bytes = Annotated[int, Field(ge=0, lt=1 << 63)]

SpanKind = Literal["forward", "backward", "exchange", "optimizer", "rebuild", "save", "write", "copy"]
"""save: pause of training; write: background write of a file; copy: creation and transfer of the stage's copy
"""


class Span(Fact):
    """One action of one worker, for the Gantt chart."""

    action: SpanKind
    microbatch: int = -1
    hop: int = -1
    start: float
    end: float


class WorkReport(Fact):
    """A worker's actions in one finished or dropped step, and the payload bytes sent to each neighbour.

    Kept in ``spans.jsonl``, thinned (``report/observe/run_observer.py``); no influence on the run.
    """

    kind: Literal["worked"] = "worked"
    worker: str
    node: int
    stage: int
    """-1: all stages in one process"""
    generation: int
    step: int
    dropped: bool = False
    spans: list[Span]
    sent_bytes: dict[int, int]
    """bytes sent to each node"""
    peak_bytes: Bytes = 0
    """peak memory of the worker's process since its start; 0 in logs of older versions"""
    device_peak_bytes: Bytes = 0
    """peak memory of its tensors on a CUDA device; 0 on CPUs"""


class Heartbeat(Fact):
    """A heartbeat with the current action of the worker's main thread. It is never logged."""

    kind: Literal["heartbeat"] = "heartbeat"
    doing: str = "orders"
    """the kind of order or action in progress; 'orders' if there is none"""
    step: int = -1
    microbatch: int = -1
    waiting: bool = True
    """whether it waits for a message"""
    trouble: str = ""
    """why an edge that is being opened has not opened yet"""
    action_s: float = 0.0
    """seconds since it began this, or since the last message arrived"""
    cpu_s: float = 0.0
    """processor seconds used in that time"""
    checkpoint_being_written: int = -1
    """step of the checkpoint that another thread writes; -1: none"""
    writing_s: float = 0.0
    """seconds since that write began"""


CONTROLLER = "controller"
"""sender name of the controller, where others are workers"""
Mode = Literal["train", "evaluate"]


class WorkerJoined(Fact):
    """A worker has completed its imports and waits for orders."""

    kind: Literal["worker_joined"] = "worker_joined"
    worker: str
    incarnation: int
    pid: int
    at: str = ""
    """HOST:PORT for edges to it"""
    device: str = ""
    """its CUDA device, as named by its machine; empty on CPUs"""
    memory: int = 0
    """bytes of that device; 0 on CPUs"""
    layer_s: float = 0.0
    """seconds of a decoder layer's passes of one microbatch there, if stages differ; 0: not measured"""


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
    """A neighbour was unreachable or did not deliver in time; ``detail`` names peer, stage, step and generation."""

    kind: Literal["edge_broken"] = "edge_broken"
    worker: str
    node: int
    peer: int
    """node at the other end"""
    generation: int
    detail: str
    waited_s: float = 0.0
    """seconds waited for a message; 0 if the connection itself broke"""
    wait_began_s: float = 0.0
    """seconds from the start of the worker's step to the start of the wait"""
    cause: str = ""
    """such as the operating system's error; empty in logs of older versions"""
    relay: str = ""
    """name of the relay that did not answer, if that is the cause"""
    invalid: bool = False
    """whether the peer sent an invalid message"""


class StageReport(Fact):
    """Base of reports on a worker's stage in a step."""

    kind: str
    worker: str
    stage: int
    generation: int
    step: int


class StageReady(StageReport):
    """A stage has finished its part of a step and holds the complete gradient, not yet applied."""

    kind: Literal["stage_ready"] = "stage_ready"
    mode: Mode = "train"
    """kind of the step; missing in logs of older versions"""
    loss: float | None = None
    replica: int = 0
    grad_norm: float | None = None
    """L2 norm of the stage's gradient before clipping, or None in a validation"""
    received: dict[int, str] = Field(default_factory=dict)
    """replica → digest of its received gradient, if members report them; its own as sent"""


class StageCommitted(StageReport):
    """A stage has applied the step's update."""

    kind: Literal["stage_committed"] = "stage_committed"


class StageCopied(StageReport):
    """A worker holds a copy of its stage for a checkpoint, and writes it in the background."""

    kind: Literal["stage_copied"] = "stage_copied"
    seconds: float = 0.0
    """seconds that training paused for it"""


class StageSaved(StageReport):
    """A stage's state is in the checkpoint's unfinished folder."""

    kind: Literal["stage_saved"] = "stage_saved"
    bytes: int
    file: Annotated[str, Field(pattern=f"^({STAGE_FILE})?$")] = ""
    """its name; the stage's number in logs of older versions"""
    sha256: str = ""
    """SHA-256 of the file; empty in logs of older versions"""
    seconds: float = 0.0
    """duration of the write; 0 in logs of older versions"""
    node: int = -1
    weights: str = ""
    """digest of the weights alone; empty in logs of older versions, and without weights"""


class SaveFailed(StageReport):
    """A part of the checkpoint ``step`` could not be written, or the controller could not seal it: it is cancelled."""

    kind: Literal["save_failed"] = "save_failed"
    detail: str
    """names the file"""


class WorkerFailed(Fact):
    """A worker failed by its own error, such as a lack of memory or a non-finite loss. The run must stop."""

    kind: Literal["worker_failed"] = "worker_failed"
    worker: str
    stage: int
    generation: int
    detail: str
    leaves: bool = False
    """the run can continue without it: it exits, which counts as a loss"""


class FaultInjected(Fact):
    """A fault was injected into the worker at ``node``. A worker that injects its own reports it just before."""

    kind: Literal["fault_injected"] = "fault_injected"
    worker: str
    node: int
    signal: Annotated[str, AfterValidator(lambda name: "corrupt_update" if name == "lie" else name)]
    """SIGKILL, SIGSTOP, or another kind of fault (``faults.trace.Fault``); ``lie`` in logs of older versions"""
    step: int
    moment: str
    number: int = -1
    """number of the fault in its trace"""


Report = Annotated[
    WorkerJoined
    | Linked
    | EdgeBroken
    | StageReady
    | ResultsSent
    | StageCommitted
    | StageCopied
    | StageSaved
    | SaveFailed
    | UpdateReceived
    | UpdateRejected
    | UpdatesWeighted
    | MessageCompressed
    | RoundApplied
    | WorkerFailed
    | FaultInjected
    | WorkerMeasurements
    | WorkReport
    | Heartbeat,
    Field(discriminator="kind"),
]
"""any report of a worker to the controller"""

REPORT: TypeAdapter[Report] = TypeAdapter(Report)
