"""One line of English per important event or decision, for the progress display and the report."""

from __future__ import annotations

from functools import singledispatchmethod
from typing import Literal, NamedTuple

from planaria.common.printing import printable
from planaria.config.names import replicas, stages
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord, cached
from planaria.report.phrases import format_count, join_names
from planaria.report.run.naming import Naming, naming_of
from planaria.report.run.repeats import Repeats
from planaria.report.run.round_history import RoundHistory, Rounds
from planaria.report.run.slowness_lines import differing_replicas, slowness_line
from planaria.report.worker_assignments import WorkerAssignments

Tone = Literal["fault", "slow", "loss", "recovery", "rollback", "relink", "note"]
SIGNS: dict[Tone, str] = {
    "fault": "⚡", "slow": "≋", "loss": "✗", "recovery": "✓", "rollback": "↺", "relink": "⇄", "note": "·",
}  # fmt: skip
SLOWNESS: dict[str, Tone] = {
    "slow_part_found": "slow",
    "hand_over_slow_stage": "relink",
    "reroute": "relink",
    "cleared": "note",
}
CAUSES = {
    "connection": "connection closed",
    "exit": "process ended",
    "heartbeat": "no heartbeat",
    "stuck": "stuck",
    "controller": "lost with the controller",
}


class EventLine(NamedTuple):
    """One occurrence during ``step``."""

    step: int
    tone: Tone
    text: str

    def __str__(self) -> str:
        return f"step {self.step}  {SIGNS[self.tone]} {self.text}"


class Narrator:
    """Converts events and decisions to lines; ``members`` holds the current assignments."""

    def __init__(self) -> None:
        self.members = WorkerAssignments()
        self._t = 0.0
        self._vacated: list[int] = []
        """nodes that the present fact leaves without a worker"""
        self._rounds = Rounds(self.members)
        self._lost_at: dict[int, float] = {}
        self._broken: set[tuple[int, int]] = set()
        self._rebuilding: dict[int, d.Rebuild | d.Handover] = {}
        self._rejected: set[tuple[int, int, str]] = set()
        """(replica, stage, reason) of rejected gradients, each shown once"""
        self._relinked: dict[int, tuple[set[str], str]] = {}
        """replica → workers whose new edges are not open yet, and the line to show once all are"""
        self._silent: set[str] = set()
        """relays that do not answer"""
        self._repeats = Repeats()
        self._unequal: set[str] = set()
        """lines on differing weights, each shown once, although every save finds them"""
        self._copies: dict[int, str] = {}
        """replica that is copied as a whole → text to show when that is done"""
        self._steps: dict[int, int] = {}
        """replica → its committed steps, once it has made one"""
        self._donor_step: dict[int, int] = {}
        """node that receives another replica's state → committed steps of the donor"""

    def describe(self, t: float, fact: e.Event | d.Decision) -> EventLine | None:
        """Process a fact; return its line, if any."""
        self._t = t
        self._vacated = self.members.apply(fact)
        history = self._rounds.apply(t, fact, self._vacated)
        return self._line_of(fact) if history is None else self._round_line(history)

    @property
    def _naming(self) -> Naming:
        return self.members.naming

    @singledispatchmethod
    def _line_of(self, fact: e.Event | d.Decision) -> EventLine | None:
        """Return the line of a fact, if any; kinds that are not registered below need no state."""
        parts = _stateless_line(fact)
        return None if parts is None else self._line(*parts)

    @_line_of.register
    def _on_run_started(self, _: e.RunStarted) -> None:
        self._lost_at.clear()

    @_line_of.register
    def _on_finish(self, _: d.Finish) -> EventLine | None:
        return self._line("note", rest) if (rest := self._repeats.suppressed()) else None

    @_line_of.register
    def _on_edge_broken(self, broken: e.EdgeBroken) -> EventLine | None:
        """Return a line for an edge that could not be reopened; a break is shown once the edge is replaced."""
        edge = (min(broken.node, broken.peer), max(broken.node, broken.peer))
        replica = self._naming.replica(broken.node)
        self._broken.add(edge)
        if broken.relay:
            return self._relay_line(broken.relay, broken.cause)
        current = broken.generation == self.members.generation.get(replica)
        if replica not in self._relinked or not broken.cause or not current:
            return None
        whose = f" of replica {replica}" if self._naming.several else ""
        text = f"edge {self._naming.edge(*edge)}{whose} still broken: {broken.cause}"
        text_to_show = self._repeats.limit(self._t, f"broken edges{whose}", text)
        return None if text_to_show is None else self._line("loss", text_to_show, replica)

    def _relay_line(self, relay: str, error: str) -> EventLine | None:
        """Return a line for a relay that does not answer, once."""
        if relay in self._silent:
            return None
        self._silent.add(relay)
        return self._line("loss", f"relay {relay} does not answer: {error}")

    @_line_of.register
    def _on_verdict(self, verdict: d.SlowPartFound | d.Cleared) -> EventLine | None:
        """Return a line for a verdict, unless verdicts of its kind repeat."""
        text_to_show = self._repeats.limit(self._t, f"{verdict.fault}: verdicts", slowness_line(verdict, self._naming))
        return None if text_to_show is None else self._line(SLOWNESS[verdict.kind], text_to_show, verdict.replica)

    @_line_of.register
    def _on_remedy(self, decision: d.HandOverSlowStage | d.Reroute) -> EventLine:
        return self._line(SLOWNESS[decision.kind], slowness_line(decision, self._naming), decision.replica)

    @_line_of.register
    def _on_worker_lost(self, lost: e.WorkerLost) -> EventLine | None:
        if lost.worker in self.members.unstarted:
            return None
        if lost.worker in self.members.released:
            return self._line("note", f"worker {lost.worker} left")
        self._lost_at |= dict.fromkeys(self._vacated, self._t)
        node = self._vacated[0] if self._vacated else None
        detail = f" ({lost.detail})" if lost.detail else ""
        text = f"worker {lost.worker} ({self._role(node)}) lost: {CAUSES[lost.cause]}{detail}"
        return self._line("loss", text, self._replica_of(node))

    @_line_of.register
    def _on_commit(self, commit: d.Commit) -> None:
        self._steps[commit.replica] = commit.step + 1

    @_line_of.register
    def _on_form(self, form: d.Form) -> EventLine | None:
        replica = form.replica
        self._drop_pending(replica)
        rebuilt = {m.node: m.source for m in form.members if isinstance(m.source, d.Rebuild)}
        for node, source in rebuilt.items():
            donor = next(map(self._naming.replica, source.donors), replica)
            if donor != replica and donor in self._steps:
                self._donor_step[node] = self._steps[donor]
        if replica in self._steps:  # it may roll back
            self._steps[replica] = form.step
        self._rebuilding |= rebuilt | {m.node: m.source for m in form.members if isinstance(m.source, d.Handover)}
        donor_replicas = {self._naming.replica(donor) for source in rebuilt.values() for donor in source.donors}
        if len(rebuilt) == len(form.members) and replica not in donor_replicas:
            partly = any(isinstance(source, d.CatchUp) for source in rebuilt.values())
            manner = "received the rounds it missed from" if partly else "rebuilt as a copy of"
            self._copies[replica] = f"{manner} {replicas(donor_replicas)}"
        broken = sorted(edge for edge in self._broken if replica in map(self._naming.replica, edge))
        self._broken.difference_update(broken)
        whose = f" of replica {replica}" if self._naming.several else ""
        prefix = f"replica {replica} " if self._naming.several else ""
        if form.outcome == "rolled back":
            return self._line("rollback", f"{prefix}rolled back to step {form.step}", replica)
        if form.outcome == "recalled":
            return self._line("rollback", f"{prefix}rolled back to the snapshot of step {form.step}", replica)
        if form.outcome == "skipping":
            vacant = self._naming.name(self.members.vacant(replica))
            return self._line("relink", f"no worker for {vacant}: training continues without it")
        if form.outcome == "relinked":
            edges = ", ".join(self._naming.edge(low, high) for low, high in broken)
            text = f"broken edge {edges}{whose} replaced" if edges else f"edges{whose} opened again"
            self._relinked[replica] = {member.worker for member in form.members}, text
        return None

    def _drop_pending(self, replica: int) -> None:
        """Forget the replica's pending recoveries."""
        self._rebuilding = {
            node: source for node, source in self._rebuilding.items() if self._naming.replica(node) != replica
        }
        self._donor_step = {
            node: step for node, step in self._donor_step.items() if self._naming.replica(node) != replica
        }
        self._copies.pop(replica, None)
        self._relinked.pop(replica, None)

    @_line_of.register
    def _on_linked(self, linked: e.Linked) -> EventLine | None:
        replica = self._naming.replica(linked.node)
        if linked.generation != self.members.generation.get(replica, 0):
            return None
        if replica in self._relinked:
            waiting, text = self._relinked[replica]
            waiting.discard(linked.worker)
            if waiting:
                return None
            del self._relinked[replica]
            return self._line("relink", text, replica)
        if linked.node not in self._rebuilding:
            return None
        source = self._rebuilding.pop(linked.node)
        lost_at = self._lost_at.pop(linked.node, None)
        if isinstance(source, d.Handover):
            text = f"{self._naming.name([linked.node])} handed over unchanged by {source.worker} to {linked.worker}"
            return self._line("recovery", text, replica)
        if replica in self._copies:
            left = self._naming.nodes(replica) & self._rebuilding.keys()
            return None if left else self._line("recovery", f"replica {replica} {self._copies.pop(replica)}", replica)
        after = "" if lost_at is None else f" in {self._t - lost_at:.2f} s"
        origin = self._source_clause(replica, source)
        if (step := self._donor_step.pop(linked.node, None)) is not None:
            origin += f" (at step {step})"
        text = f"{self._naming.name([linked.node])} rebuilt in {linked.worker} {origin}{after}"
        return self._line("recovery", text, replica)

    def _source_clause(self, replica: int, source: d.Rebuild) -> str:
        others = {self._naming.replica(donor) for donor in source.donors} - {replica}
        if source.by == d.PEER and others:
            return f"from {replicas(others)}"
        return f"from {self._naming.name(source.donors)} ({source.by})" if source.donors else f"by {source.by}"

    def _round_line(self, history: RoundHistory) -> EventLine | None:
        """Return a line for a round with missing members; a replica drawn alone gets none."""
        if not history.missing:
            return None
        members, missing = replicas(history.contributors), replicas(history.missing)
        why = "late or not received" if history.timed_out else "absent"
        if history.rejected:
            why = f"invalid update: {'; '.join(history.rejected.values())}"
        manner = "alone" if history.alone else "together"
        text = f"round {history.round}: {members} continued {manner} without {missing} ({why})"
        return self._line("relink", text, history.members[0])

    @_line_of.register
    def _on_disband(self, disband: d.Disband) -> EventLine:
        self._drop_pending(disband.replica)
        spares = ", ".join(disband.workers) if disband.workers else "none"
        text = f"replica {disband.replica} disbanded: {disband.reason}; spares now: {spares}"
        return self._line("loss", text, disband.replica)

    @_line_of.register
    def _on_fault_injected(self, fault: e.FaultInjected) -> EventLine:
        when = f", {fault.moment}" if fault.moment not in ("", "any") else ""
        text = f"{fault.signal} sent to worker {fault.worker} ({self._role(fault.node)}){when}"
        return self._line("fault", text, self._replica_of(fault.node))

    @_line_of.register
    def _on_worker_failed(self, failed: e.WorkerFailed) -> EventLine:
        role = self._role(failed.stage if failed.stage < 0 else self.members.node_of.get(failed.worker))
        return self._line("loss", f"worker {failed.worker} ({role}) failed: {failed.detail}")

    @_line_of.register
    def _on_unrecoverable(self, loss: d.Unrecoverable) -> EventLine:
        whose = f" of replica {loss.replica}" if self._naming.several else ""
        lost = f"{stages(loss.lost)}{whose} cannot be rebuilt" if loss.lost else f"the run{whose} cannot continue"
        return self._line("loss", f"{lost}: {loss.reason}", loss.replica)

    @_line_of.register
    def _on_relay_silent(self, silent: e.RelaySilent) -> EventLine | None:
        return self._relay_line(silent.relay, silent.detail)

    @_line_of.register
    def _on_relay_answers(self, answers: e.RelayAnswers) -> EventLine:
        self._silent.discard(answers.relay)
        return self._line("relink", f"relay {answers.relay} answers again")

    @_line_of.register
    def _on_seal(self, seal: d.Seal) -> EventLine | None:
        """Return a line for a partial checkpoint, or one whose replicas should be equal but differ."""
        left = [f"the remaining {stages(seal.stages)} were saved in {seal.folder}"] if seal.partial else []
        differ = [text for text in map(differing_replicas, seal.unequal) if text not in self._unequal]
        self._unequal.update(differ)
        text = "; ".join([*differ, *left])
        return self._line("fault" if differ else "note", text) if text else None

    @_line_of.register
    def _on_update_rejected(self, fact: e.UpdateRejected) -> EventLine | None:
        """Return a line for a rejected gradient, once; rejections in rounds are shown when these are settled."""
        rejection = fact.replica, fact.stage, fact.reason
        if self._naming.several or rejection in self._rejected:
            return None
        self._rejected.add(rejection)
        text = f"invalid update of replica {fact.replica} for {stages([fact.stage])} ({fact.reason})"
        return self._line("relink", text)

    def _role(self, node: int | None) -> str:
        return "spare" if node is None or node < 0 else self._naming.name([node])

    def _replica_of(self, node: int | None) -> int | None:
        return None if node is None or node < 0 else self._naming.replica(node)

    def _line(self, tone: Tone, text: str, replica: int | None = None) -> EventLine:
        """Return a line about one replica at its current step, or about the whole run."""
        step = self.members.run_step(replica if self._naming.several else 0)
        return EventLine(step, tone, printable(text))


def _stateless_line(fact: e.Event | d.Decision) -> tuple[Tone, str, int | None] | None:
    """Return tone, text and replica of a line that depends on its fact alone; None for kinds without a line."""
    replica = None
    match fact:
        case d.ExcludeMember():
            text = f"{fact.subject} excluded: {fact.reason}; workers that leave: {', '.join(fact.workers)}"
            tone: Tone = "loss"
        case d.Adopt():
            tone, text = "rollback", f"replica {fact.replica} catches up with another: {fact.reason}"
            replica = fact.replica
        case d.ReplicaRestarted():
            tone, text = "recovery", f"replica {fact.replica} starts as a copy of another"
            replica = fact.replica
        case d.RemoveMachine():
            tone, text = "loss", f"machine {fact.host} rejected: {fact.reason}"
        case e.Replanned():
            nodes = format_count(len(fact.nodes), "node")
            tone, text = "relink", f"new plan for {nodes}, found in {fact.seconds:.2f} s"
        case e.Trouble():
            tone, text = "note", fact.detail
        case e.SaveFailed():
            tone, text = "loss", f"checkpoint {fact.step} was not saved: {fact.detail}"
        case e.WorkersStarting():
            waiting = f"waiting for {join_names(fact.workers, 6)} to start, for {fact.waited_s:.0f} s"
            limit = f"a start may take {fact.limit_s:g} s (fleet.start_timeout_s)"
            tone, text = "note", f"{waiting}; {fact.ready} others are ready; {limit}"
        case e.ZombieIgnored():
            tone, text = "note", f"worker {fact.worker} (incarnation {fact.incarnation}) woke up and was ignored"
        case e.StopRequested():
            tone, text = "note", f"will stop at the next whole step: {fact.reason}"
        case e.StopOverdue():
            tone, text = "loss", f"the stop request timed out: {fact.detail}"
        case e.LeaderStarted():
            after = f"continuing as term {fact.term} after {fact.leaderless_s:.2f} s"
            tone, text = "recovery", f"controller lost ({fact.cause}); {after}"
        case e.HostJoined():
            workers = format_count(fact.workers, "worker")
            tone, text = "note", f"machine {fact.host} ({fact.detail}) joined with {workers}"
        case e.HostLeft():
            tone, text = "note", f"machine {fact.host} takes no more workers: {fact.detail}"
        case _:
            return None
    return tone, text, replica


@cached
def timed_lines(record: RunRecord) -> list[tuple[float, EventLine]]:
    """Return all lines of a run with their times, in order."""
    narrator = Narrator()
    # Reports of single stages are only needed for the rounds of several replicas.
    facts = record.history if naming_of(record).several else record.turns
    lines = ((t, narrator.describe(t, fact)) for t, fact in facts)
    return [(t, event_line) for t, event_line in lines if event_line is not None]
