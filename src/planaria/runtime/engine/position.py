"""Where a worker stands: a node of the run and its stage, in a generation of its replica, at a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from planaria.control import events as e
from planaria.control.decisions import BEFORE, Form, Introduce, Meet, Settle
from planaria.control.events import Fact
from planaria.runtime.engine.resolved import ResolvedRun

_TOLD = ("worker", "node", "stage", "replica", "generation", "step")


class Position:
    """A worker's position, and its reports, which begin with it."""

    def __init__(self, worker: str, resolved: ResolvedRun, tell: Callable[[Fact], None]) -> None:
        """``tell`` takes a report to the controller."""
        self.worker, self.node, self.stage = worker, -1, -1
        self.replica, self.generation, self.step = 0, 0, 0
        self.present = resolved.arrangement
        """the nodes of the present generation"""
        self.absent: set[int] = set()
        """nodes that the present generation does without"""
        self._everywhere, self._resolved, self._tell = resolved.arrangement, resolved, tell

    def move(self, node: int, form: Form) -> None:
        """Stand at ``node``, as ``form`` says."""
        self.node, self.stage = node, self._everywhere.stage[node]
        self.replica, self.generation, self.step = form.replica, form.generation, form.step
        own = self._resolved.column(form.replica)
        self.present = own.of([member.node for member in form.members])
        self.absent = own.stage.keys() - self.present.stage.keys()

    def is_ours(self, order: Introduce | Meet | Settle) -> bool:
        """Is the order for the present generation of this worker's replica?"""
        return dict(zip(order.members, order.generations, strict=True)).get(self.replica) == self.generation

    def stage_of(self, node: int) -> int:
        """The stage that a node of the run holds."""
        return self.stage if node == BEFORE else self._everywhere.stage[node]

    @property
    def number(self) -> int:
        """Which of the nodes of its stage this one is, over all replicas."""
        return self._everywhere.peers(self.node).index(self.node)

    def name_of(self, node: int) -> str:
        """A node, for people."""
        if node == BEFORE:
            return f"{self.name_of(self.node)} before"
        stage = self._everywhere.stage.get(node, node)
        if self._resolved.replicas > 1:
            return f"stage {stage} of replica {self._resolved.replica_of(node)}"
        return f"stage {stage}" if stage == node else f"node {node} of stage {stage}"

    def report(self, kind: type[Fact], **said: Any) -> None:
        """Report an event of this ``kind``: what is ``said``, and of the position all else that such an event tells."""
        own = {name: getattr(self, name) for name in _TOLD if name in kind.model_fields}
        self._tell(kind.model_validate(own | said))

    def report_broken(
        self, peer: int, detail: str, waited_s: float = 0.0, since_s: float = 0.0, relay: str = ""
    ) -> None:
        """Report that the edge to node ``peer`` is broken, and why.

        ``waited_s``: seconds that a message was awaited in vain, from ``since_s`` after the step's start; ``relay``:
        the name of the relay that did not answer.
        """
        when = f"at step {self.step}, generation {self.generation}"
        ends = f"worker {self.worker} ({self.name_of(self.node)}) and {self.name_of(peer)}"
        told = {"cause": detail, "waited_s": waited_s, "since_s": since_s, "relay": relay}
        self.report(e.EdgeBroken, peer=peer, detail=f"{ends}: {detail} {when}", **told)
