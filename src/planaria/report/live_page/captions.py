"""Captions of the live page: one sentence per event for readers new to the subject."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from planaria.config.names import replicas
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.recovery import RECOVERIES
from planaria.recovery.base import Recovery
from planaria.report.run.event_lines import CAUSES, SLOWNESS, EventLine
from planaria.report.run.naming import Naming
from planaria.report.run.slowness_lines import slowness_line
from planaria.report.worker_assignments import WorkerAssignments


class Caption(NamedTuple):
    """A sentence; ``tone`` is calm for routine events."""

    tone: str
    text: str


FAULT_CAPTIONS = {
    "SIGKILL": "was killed: its process and the stage's weights in its memory are lost",
    "SIGSTOP": "was frozen: it still has its weights, but does not compute or answer",
    "SIGCONT": "was thawed",
    "kill": "was killed: its process and the stage's weights in its memory are lost",
    "stop": "was frozen: it still has its weights, but does not compute or answer",
    "stuck": "hangs: it sends heartbeats, but computes nothing",
    "slow": "was slowed down: its passes take several times as long",
    "slow_host": "was slowed down, like all workers of its machine",
    "slow_data": "receives its batches late from now on",
    "delay": "receives all messages late from now on",
    "reset": "lost its connection to a neighbour",
    "cut": "was cut off from all its neighbours",
    "disk_full": "cannot write: its disk is full",
    "disk_slow": "waits for its disk",
    "flip": "has a flipped bit in its newest checkpoint",
    "corrupt_update": "starts to send corrupted updates",
}


class Captions:
    """Finds captions for facts; ``members`` must process each fact first.

    A fact without its own caption has its line of the log as caption, if any.
    """

    def __init__(self, members: WorkerAssignments, microbatches: int) -> None:
        self._members, self._microbatches = members, microbatches
        self._sources: dict[int, d.Source] = {}
        """node that waits for a state → its source"""
        self._restarted: set[int] = set()
        """replicas that were formed again and have not started a step since"""

    def caption(
        self, fact: e.Event | d.Decision, left: Iterable[int] = (), line: EventLine | None = None
    ) -> Caption | None:
        """Return a fact's caption, if it has one; ``left``: nodes that lost their holder; ``line``: its line."""
        own = self._own_caption(fact, left)
        return own if own or line is None else Caption(line.tone, f"{_capitalise(line.text)}.")

    def _own_caption(self, fact: e.Event | d.Decision, left: Iterable[int]) -> Caption | None:
        match fact:
            case e.RunStarted():
                self._sources = {}
                self._restarted = set()
                return Caption("calm", "The workers are starting: one for each stage of the model, and the spares.")
            case d.Form():
                return self._form_caption(fact)
            case e.Linked():
                return self._linked_caption(fact)
            case e.FaultInjected():
                label = FAULT_CAPTIONS.get(fact.signal, f"was hit by a fault ({fact.signal})")
                subject = "A spare" if fact.node < 0 else f"The worker of {self._name([fact.node])}"
                return Caption("fault", f"{subject}, {fact.worker}, {label}.")
            case e.WorkerLost() if fact.worker not in self._members.unstarted:
                return self._loss_caption(fact, list(left))
            case d.RunStep():
                return self._step_caption(fact)
            case _:
                return self._other_caption(fact)

    @property
    def _naming(self) -> Naming:
        return self._members.naming

    def _name(self, nodes: Iterable[int]) -> str:
        return self._naming.name(nodes)

    def _loss_caption(self, lost: e.WorkerLost, left: list[int]) -> Caption:
        why = CAUSES[lost.cause]
        if lost.worker in self._members.released:
            return Caption("note", f"Worker {lost.worker} has left.")
        if not left:
            return Caption("loss", f"The spare {lost.worker} is dead ({why}). No weights are lost.")
        rest = "The other stages stop and keep their weights"
        return Caption("loss", f"{_capitalise(self._name(left))} is dead: {why}. {rest}.")

    def _form_caption(self, form: d.Form) -> Caption | None:
        self._sources = {n: s for n, s in self._sources.items() if self._naming.replica(n) != form.replica}
        self._sources |= {m.node: m.source for m in form.members if not isinstance(m.source, d.Keep)}
        self._restarted.add(form.replica)
        rebuilt = {m.node: m for m in form.members if isinstance(m.source, d.Rebuild)}
        if form.outcome == "started":
            return Caption("calm", "Every worker takes its stage in the ring and connects to its neighbours.")
        if form.is_rollback:
            return Caption(
                "rollback", f"All stages go back to step {form.step}, {_rollback_target(form)}: later steps are undone."
            )
        if any(isinstance(member.source, d.CatchUp) for member in rebuilt.values()):
            return Caption("recovery", f"Replica {form.replica} receives the rounds that it missed from another one.")
        if rebuilt:
            return Caption("recovery", " ".join(self._rebuild_sentence(member) for member in rebuilt.values()))
        if form.outcome == "relinked":
            return Caption(
                "relink", "A connection broke, but no worker died: it is replaced, and the step starts again."
            )
        if form.outcome == "handed over":
            return Caption("relink", "A stage moves to another worker with its state unchanged: nothing is lost.")
        if form.outcome == "skipping":
            return Caption("relink", "No worker is available for a lost stage: training continues without it.")
        return Caption("recovery", "The ring closes again.")

    def _rebuild_sentence(self, member: d.Member) -> str:
        source = member.source
        assert isinstance(source, d.Rebuild)
        stage, donors = self._name([member.node]), self._name(source.donors)
        how = _rebuild_caption(source.by).format(donors=donors, stage=stage, strategy=source.by)
        return f"Worker {member.worker} takes over {stage}: {how}."

    def _linked_caption(self, linked: e.Linked) -> Caption | None:
        replica = self._naming.replica(linked.node)
        if linked.generation != self._members.generation.get(replica):
            return None
        source = self._sources.pop(linked.node, None)
        if not isinstance(source, d.Rebuild | d.Handover):
            return None
        return Caption("recovery", f"{_capitalise(self._name([linked.node]))} is rebuilt in worker {linked.worker}.")

    def _step_caption(self, run: d.RunStep) -> Caption:
        restarted = run.replica in self._restarted
        self._restarted.discard(run.replica)
        subject = f"Replica {run.replica}: step" if self._naming.several else "Step"
        if run.mode == "evaluate":
            return Caption("calm", f"After step {run.step} the model is evaluated on text that it does not train on.")
        if restarted and self._members.generation.get(run.replica, 1) > 1:
            return Caption("recovery", f"{subject} {run.step} starts again with all stages.")
        sent = f"{self._microbatches} microbatches pass" if self._microbatches > 1 else "one microbatch passes"
        return Caption("calm", f"{subject} {run.step}: {sent} through the ring and back; then all stages update.")

    def _is_current(self, fact: e.EdgeBroken) -> bool:
        return fact.generation == self._members.generation.get(self._members.replica(fact.node))

    def _other_caption(self, fact: e.Event | d.Decision) -> Caption | None:
        match fact:
            case e.EdgeBroken() if self._is_current(fact):
                ends = self._naming.edge(*sorted((fact.node, fact.peer)))
                return Caption("fault", f"The connection {ends} is broken. It is unknown whether a worker died.")
            case d.SlowPartFound() | d.HandOverSlowStage() | d.Reroute() | d.Cleared():
                text = slowness_line(fact, self._naming)
                if isinstance(fact, d.SlowPartFound):  # a panel shows its evidence
                    text = text.partition(": ")[0]
                return Caption(SLOWNESS[fact.kind], f"{_capitalise(text)}.")
            case d.BeginRound():
                return Caption(
                    "calm", f"{_capitalise(replicas(fact.members))} meet: each stage exchanges updates with its copies."
                )
            case d.Save() if not fact.background:
                return Caption("calm", f"Every stage writes its weights to disk: checkpoint {fact.step}.")
            case d.Finish():
                how = {"finished": "All steps are done.", "stopped": f"The run was stopped: {fact.reason}."}
                return Caption("note", how.get(fact.outcome, f"The run has ended: {fact.reason}."))
        return None


def _rebuild_caption(strategy: str) -> str:
    """Return the template of a clause about how ``strategy``, or a stage's peer, rebuilds a stage.

    A log must not choose what is imported, so ``module:Class`` has the caption of the base class.
    """
    if strategy == d.PEER:
        return "{donors} has the same stage, and sends a copy"
    return RECOVERIES.find(strategy).caption if strategy in RECOVERIES.names else Recovery.caption


def _rollback_target(form: d.Form) -> str:
    origins = {member.source.origin for member in form.members}
    if "recall" in origins:
        return "to the snapshot in memory"
    return "to the checkpoint on disk" if "load" in origins else "to the weights that the seed gives"


def _capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]
