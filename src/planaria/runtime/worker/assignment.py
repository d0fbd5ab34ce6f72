"""The assignment of a worker (its node and stage, the generation of its replica, the step) and its reports."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from planaria.control.facts import events as e
from planaria.control.facts.decisions import PREDECESSOR, BeginRound, Commit, Form, OpenPrefetchLinks, Settle
from planaria.control.facts.events import Fact
from planaria.runtime.resolved_run import ResolvedRun

log = logging.getLogger(__name__)
_COMMON_FIELDS = ("worker", "node", "stage", "replica", "generation", "step")


class Assignment:
    """The assignment of a worker, and its reports, which include it."""

    def __init__(self, worker: str, resolved: ResolvedRun, send: Callable[[Fact], None]) -> None:
        """``send``: sends an event to the controller."""
        self.worker = worker
        self.node = self.stage = -1
        self.replica = self.generation = self.step = 0
        self.present = resolved.arrangement
        """the nodes of the current generation"""
        self.absent: set[int] = set()
        """nodes that the current generation lacks"""
        self._all_nodes = resolved.arrangement
        self._resolved = resolved
        self._send = send

    def move(self, node: int, form: Form) -> None:
        """Take the assignment to ``node`` from ``form``."""
        self.node = node
        self.stage = self._all_nodes.stage[node]
        self.replica = form.replica
        self.generation = form.generation
        self.step = form.step
        of_replica = self._resolved.column(form.replica)
        self.present = of_replica.of([member.node for member in form.members])
        self.absent = of_replica.stage.keys() - self.present.stage.keys()

    def is_ours(self, order: OpenPrefetchLinks | BeginRound | Settle) -> bool:
        """Return whether an order is for the current generation of this worker's replica."""
        return dict(zip(order.members, order.generations, strict=True)).get(self.replica) == self.generation

    def stage_of(self, node: int) -> int:
        """Return the stage of a node."""
        return self.stage if node == PREDECESSOR else self._all_nodes.stage[node]

    @property
    def number(self) -> int:
        """Index of this node among all nodes of its stage."""
        return self._all_nodes.peers(self.node).index(self.node)

    def name_of(self, node: int) -> str:
        """Return the name of a node for messages."""
        if node == PREDECESSOR:
            return f"{self.name_of(self.node)} before"
        stage = self._all_nodes.stage.get(node, node)
        if self._resolved.replicas_step_independently:
            return f"stage {stage} of replica {self._resolved.replica_of(node)}"
        return f"stage {stage}" if stage == node else f"node {node} of stage {stage}"

    def log_fields(self) -> dict[str, object]:
        """Return the assignment as context of log messages."""
        fields: dict[str, object] = {"worker": self.worker}
        if self.node >= 0:
            fields |= {name: getattr(self, name) for name in ("replica", "stage", "generation", "step")}
        return fields

    def report(self, kind: type[Fact], **fields: Any) -> None:
        """Send an event of this ``kind`` with these ``fields`` and the assignment."""
        common = {name: getattr(self, name) for name in _COMMON_FIELDS if name in kind.model_fields}
        self._send(kind.model_validate(common | fields))

    def report_broken(
        self,
        peer: int,
        detail: str,
        waited_s: float = 0.0,
        since_s: float = 0.0,
        relay: str = "",
        invalid: bool = False,
    ) -> None:
        """Report a broken edge to the node ``peer``.

        :param waited_s: seconds waited for a message, from ``since_s`` after the step's start
        :param relay: name of the relay that did not answer
        :param invalid: the peer sent an invalid message
        """
        when = f"at step {self.step}, generation {self.generation}"
        ends = f"worker {self.worker} ({self.name_of(self.node)}) and {self.name_of(peer)}"
        fields = {"cause": detail, "waited_s": waited_s, "wait_began_s": since_s, "relay": relay, "invalid": invalid}
        log.info("edge to %s broken%s: %s", self.name_of(peer), f" (relay {relay})" if relay else "", detail)
        self.report(e.EdgeBroken, peer=peer, detail=f"{ends}: {detail} {when}", **fields)


class RepeatedOrders:
    """A worker's last commit and settled round, whose orders the controller of another machine repeats."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._committed = -1, -1
        """generation and step of the last commit"""
        self._round: dict[str, Any] = {}
        """report of the last settled round"""

    def report_commit(self, order: Commit) -> None:
        """Report a commit that was carried out."""
        self._committed = order.generation, order.step
        self._assignment.report(e.StageCommitted, step=order.step)

    def report_round(self, **fields: Any) -> None:
        """Report a settled round by the fields of ``RoundApplied``."""
        self._round = fields
        self._assignment.report(e.RoundApplied, **fields)

    def is_done(self, order: Commit | Settle) -> bool:
        """Return whether this worker has carried out the order."""
        if isinstance(order, Commit):
            return (order.generation, order.step) == self._committed
        return self._assignment.is_ours(order) and order.round == self._round.get("round")

    def answer(self, order: Commit | Settle) -> None:
        """Repeat the report of an order that was carried out; do nothing for another one."""
        if not self.is_done(order):
            return
        if isinstance(order, Commit):
            self._assignment.report(e.StageCommitted, step=order.step)
        else:
            self._assignment.report(e.RoundApplied, **self._round)
