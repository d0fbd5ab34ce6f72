"""New plans of routes during a run, computed in a thread of the controller's process."""

from __future__ import annotations

import threading
import time
from queue import Empty, SimpleQueue

from planaria.control.facts.decisions import Replan
from planaria.control.facts.events import Replanned
from planaria.planner.problem import PlanningProblem, Solution
from planaria.planner.replan import replan, with_measured_links
from planaria.planner.schedule import Schedule


class Replanner:
    """Answers each :class:`Replan` with a :class:`Replanned`, in order."""

    def __init__(self, schedule: Schedule, seed: int) -> None:
        """Start the thread, which compiles the planner before its first request."""
        self._requests: SimpleQueue[Replan] = SimpleQueue()
        self._answers: SimpleQueue[Replanned | BaseException] = SimpleQueue()
        self._problem, self._solution = schedule.problem, schedule.solution
        self._seed = seed
        threading.Thread(target=self._work, name="replanner", daemon=True).start()

    def ask(self, request: Replan) -> None:
        self._requests.put(request)

    def answer(self) -> Replanned | None:
        """Return a finished answer, or None; raise the exception of a failed one."""
        try:
            answer = self._answers.get_nowait()
        except Empty:
            return None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _work(self) -> None:
        try:
            _plan(self._problem, self._solution, list(range(self._problem.nodes)), self._seed)
            while True:
                request = self._requests.get()
                problem = with_measured_links(
                    self._problem, {(link.source, link.target): link.seconds for link in request.links}
                )
                self._answers.put(_plan(problem, self._solution, request.nodes, self._seed))
        except BaseException as error:  # otherwise the run would wait forever
            self._answers.put(error)


def _plan(problem: PlanningProblem, solution: Solution, nodes: list[int], seed: int) -> Replanned:
    began = time.monotonic()
    replanned, step_s, before_s = replan(problem, solution, nodes, seed)
    return Replanned(
        nodes=nodes,
        routes=[list(route) for route in replanned.routes],
        step_s=step_s,
        before_s=before_s,
        seconds=time.monotonic() - began,
    )
