"""Finds new routes while the controller goes on listening: a thread, since the search leaves the interpreter alone."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

from planaria.control.decisions import Replan
from planaria.control.events import Replanned
from planaria.planner.problem import Problem, Solution
from planaria.planner.replan import measured, replan
from planaria.planner.schedule import Schedule


class Replanner:
    """Answers :class:`Replan` with :class:`Replanned`, one after the other."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        """Begins to warm up: what is compiled on first use takes seconds that a broken run does not have."""
        self._asked: SimpleQueue[Replan] = SimpleQueue()
        self._found: SimpleQueue[Replanned | BaseException] = SimpleQueue()
        self._problem, self._solution, self._seed = schedule.problem, schedule.solution, seed
        threading.Thread(target=self._work, name="replanner", daemon=True).start()

    def ask(self, request: Replan) -> None:
        self._asked.put(request)

    def answer(self) -> Replanned | None:
        """An answer that is ready and was not given yet; raises what went wrong while it was looked for."""
        try:
            found = self._found.get_nowait()
        except Empty:
            return None
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        try:
            _plan(self._problem, self._solution, list(range(self._problem.nodes)), self._seed)
            while True:
                asked = self._asked.get()
                problem = measured(self._problem, {(way.source, way.target): way.seconds for way in asked.ways})
                self._found.put(_plan(problem, self._solution, asked.nodes, self._seed))
        except BaseException as error:  # a thread's death would leave the run waiting for ever
            self._found.put(error)


def _plan(problem: Problem, solution: Solution, nodes: list[int], seed: int) -> Replanned:
    began = time.monotonic()
    found, step_s, before_s = replan(problem, solution, nodes, seed)
    return Replanned(
        nodes=nodes,
        routes=[list(route) for route in found.routes],
        step_s=step_s,
        before_s=before_s,
        seconds=time.monotonic() - began,
    )
