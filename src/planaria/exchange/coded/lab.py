"""All workers of a scheme in one place: what they compute, keep and send in given rounds, and what is decoded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planaria.exchange.coded.base import History, Scheme

Gradient = Callable[[int, int], Any]
"""of a job's chunk: a tensor or array, or any number"""


def decoded(scheme: Scheme, n: int, jobs: int, history: History, gradient: Gradient) -> list[Any]:
    """Of each job that ``history`` reaches the deadline of, the sum of its chunks' gradients, or None if undecodable.

    A late worker's additions of the round are dropped; what it kept from earlier rounds stays.
    """
    kept: dict[tuple[int, int, int], Any] = {}
    sent: dict[tuple[int, int, int, int], Any] = {}
    for now, late in enumerate(history):
        for worker, own in enumerate(scheme.tasks(n, jobs, history[:now])):
            for task in own if worker not in late else ():
                vector = (task.job, worker, task.vector)
                added = [weight * gradient(task.job, chunk) for chunk, weight in scheme.parts(n, worker, task)]
                kept[vector] = sum(added[1:], added[0]) + kept.get(vector, 0)
                if task.sent:
                    sent[*vector, now] = kept.pop(vector)
    found = []
    for job in range(min(jobs, len(history) - scheme.delay())):
        shares = scheme.decode(n, history[: job + scheme.delay() + 1], job)
        parts = [s.coefficient * sent[job, s.worker, s.vector, s.round] for s in shares or ()]
        found.append(sum(parts[1:], parts[0]) if shares is not None else None)
    return found
