"""A worker that is busy with one torch operation of seconds, for the test of heartbeats."""

from __future__ import annotations

import time
from multiprocessing.connection import Connection

import torch

from planaria.control.facts.events import Span, WorkReport
from planaria.runtime.worker.control_link import ControlLink

HEARTBEAT_S, BUSY_S = 0.25, 2.0


def main(connection: Connection, worker: str, incarnation: int) -> None:
    """Send heartbeats while one operation computes for at least ``BUSY_S`` seconds; report its start and end."""
    torch.set_num_threads(1)
    control_link = ControlLink(connection, HEARTBEAT_S)
    control_link.open()
    width, span = 64, Span(action="forward", start=0.0, end=0.0)
    while span.end - span.start < BUSY_S:  # the machine's speed is unknown
        points = torch.ones(1000, width)
        start = time.monotonic()
        torch.cdist(points, points, p=3.0)
        span = Span(action="forward", start=start, end=time.monotonic())
        width = int(width * max(1.5, 1.2 * BUSY_S / (span.end - span.start)))
    control_link.report(WorkReport(worker=worker, node=1, stage=1, generation=1, step=0, spans=[span], sent_bytes={}))
    control_link.next()
