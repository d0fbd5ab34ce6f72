"""What workers tell of their work and their well-being: it has no influence on the state of the run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from planaria.record.started import Fact

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

    Kept in ``spans.jsonl``, thinned (``record/sample.py``); it has no influence on the run.
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
