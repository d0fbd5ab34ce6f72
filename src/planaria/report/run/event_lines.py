"""One line of English per important event or decision, for the progress display and the report.

Repeated lines are rate-limited.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from planaria.common.printing import printable
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.report.membership import Membership
from planaria.report.phrases import counted, listed
from planaria.report.run.naming import Naming, naming_of, replicas, stages
from planaria.report.run.round_history import RoundHistory, Rounds
from planaria.report.run.verdict_lines import differing_replicas, line

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
    """Folds events and decisions into lines; ``members`` holds the current assignments."""

    def __init__(self) -> None:
        self.members = Membership()
        self._rounds = Rounds(self.members)
        self._naming = Naming()
        self._lost_at: dict[int, float] = {}
        self._broken: set[tuple[int, int]] = set()
        self._rebuilding: dict[int, d.Rebuild | d.Handover] = {}
        self._refused: set[tuple[int, int, str]] = set()
        """(replica, stage, reason) of rejected gradients, each shown once"""
        self._relinked: dict[int, tuple[set[str], str]] = {}
        """replica → workers whose new edges are not open yet, and the line to show once all are"""
        self._silent: set[str] = set()
        """relays that do not answer"""
        self._repeats = Repeats()
        self._unequal: set[str] = set()
        """lines on differing weights, each shown once although every save finds them"""
        self._copies: dict[int, str] = {}
        """replica that is copied as a whole → text to show when that is done"""

    def describe(self, t: float, fact: e.Event | d.Decision) -> EventLine | None:
        """Process a fact; return its line, if any."""
        left = self.members.take(fact)
        history = self._rounds.take(t, fact, left)
        if history is not None:
            return self._round(history)
        if isinstance(fact, e.RunStarted):
            self._naming = Naming(fact)
            self._lost_at.clear()
        elif isinstance(fact, e.EdgeBroken):
            return self._edge(t, fact)
        elif isinstance(fact, e.WorkerLost):
            return None if fact.worker in self.members.unstarted else self._lost(t, fact, left)
        elif isinstance(fact, d.Form):
            return self._formed(fact)
        elif isinstance(fact, e.Linked):
            return self._linked(t, fact)
        elif isinstance(fact, d.Adopt | d.Disband | d.ReplicaRestarted | d.ExcludeMember):
            return self._replica(fact)
        elif isinstance(fact, d.SlowPartFound | d.HandOverSlowStage | d.Reroute | d.Cleared):
            return self._slowness(t, fact)
        elif isinstance(fact, d.Finish):
            return self._line("note", rest) if (rest := self._repeats.rest()) else None
        else:
            return self._other(fact)
        return None

    def _edge(self, t: float, broken: e.EdgeBroken) -> EventLine | None:
        """Return a line for an edge that could not be reopened; a break is shown once the edge is replaced."""
        edge = (min(broken.node, broken.peer), max(broken.node, broken.peer))
        replica = self._naming.replica(broken.node)
        self._broken.add(edge)
        if broken.relay:
            return self._relay(broken.relay, broken.cause)
        current = broken.generation == self.members.generation.get(replica)
        if replica not in self._relinked or not broken.cause or not current:
            return None
        whose = f" of replica {replica}" if self._naming.several else ""
        text = f"edge {self._naming.edge(*edge)}{whose} still broken: {broken.cause}"
        shown = self._repeats.limit(t, f"broken edges{whose}", text)
        return None if shown is None else self._line("loss", shown, replica)

    def _relay(self, relay: str, error: str) -> EventLine | None:
        """Return a line for a relay that does not answer, once."""
        if relay in self._silent:
            return None
        self._silent.add(relay)
        return self._line("loss", f"relay {relay} does not answer: {error}")

    def _slowness(
        self, t: float, fact: d.SlowPartFound | d.HandOverSlowStage | d.Reroute | d.Cleared
    ) -> EventLine | None:
        """Return a line for a verdict, unless verdicts of its kind repeat."""
        text = line(fact, self._naming)
        if isinstance(fact, d.SlowPartFound | d.Cleared):
            shown = self._repeats.limit(t, f"{fact.fault}: verdicts", text)
            return None if shown is None else self._line(SLOWNESS[fact.kind], shown, fact.replica)
        return self._line(SLOWNESS[fact.kind], text, fact.replica)

    def _lost(self, t: float, lost: e.WorkerLost, left: list[int]) -> EventLine:
        if lost.worker in self.members.released:
            return self._line("note", f"worker {lost.worker} left")
        self._lost_at |= dict.fromkeys(left, t)
        node = left[0] if left else None
        detail = f" ({lost.detail})" if lost.detail else ""
        text = f"worker {lost.worker} ({self._role(node)}) lost: {CAUSES[lost.cause]}{detail}"
        return self._line("loss", text, self._of(node))

    def _formed(self, form: d.Form) -> EventLine | None:
        replica = form.replica
        self._dismiss(replica)
        rebuilt = {m.node: m.source for m in form.members if isinstance(m.source, d.Rebuild)}
        self._rebuilding |= rebuilt | {m.node: m.source for m in form.members if isinstance(m.source, d.Handover)}
        donor_replicas = {self._naming.replica(donor) for source in rebuilt.values() for donor in source.donors}
        if len(rebuilt) == len(form.members) and replica not in donor_replicas:
            partly = any(isinstance(source, d.CatchUp) for source in rebuilt.values())
            how = "received the rounds it missed from" if partly else "rebuilt as a copy of"
            self._copies[replica] = f"{how} {replicas(donor_replicas)}"
        broken = sorted(edge for edge in self._broken if replica in map(self._naming.replica, edge))
        self._broken.difference_update(broken)
        whose = f" of replica {replica}" if self._naming.several else ""
        if form.outcome == "rolled back":
            prefix = f"replica {replica} " if self._naming.several else ""
            return self._line("rollback", f"{prefix}rolled back to step {form.step}", replica)
        if form.outcome == "recalled":
            return self._line("rollback", f"all went back to their snapshot of step {form.step}", replica)
        if form.outcome == "skipping":
            left_out = self._naming.name(self.members.vacant(replica))
            return self._line("relink", f"no worker for {left_out} yet: training continues without")
        if form.outcome == "relinked":
            edges = ", ".join(self._naming.edge(low, high) for low, high in broken)
            text = f"broken edge {edges}{whose} replaced" if edges else f"edges{whose} replaced"
            self._relinked[replica] = {member.worker for member in form.members}, text
        return None

    def _dismiss(self, replica: int) -> None:
        """Forget the replica's pending recoveries."""
        self._rebuilding = {
            node: source for node, source in self._rebuilding.items() if self._naming.replica(node) != replica
        }
        self._copies.pop(replica, None)
        self._relinked.pop(replica, None)

    def _linked(self, t: float, linked: e.Linked) -> EventLine | None:
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
        after = "" if lost_at is None else f" in {t - lost_at:.2f} s"
        text = f"{self._naming.name([linked.node])} rebuilt in {linked.worker} {self._origin(replica, source)}{after}"
        return self._line("recovery", text, replica)

    def _origin(self, replica: int, source: d.Rebuild) -> str:
        others = {self._naming.replica(donor) for donor in source.donors} - {replica}
        if source.by == d.PEER and others:
            return f"from {replicas(others)}"
        return f"from {self._naming.name(source.donors)} ({source.by})" if source.donors else f"anew ({source.by})"

    def _round(self, history: RoundHistory) -> EventLine | None:
        """Return a line for a round with missing members; a replica drawn alone gets none."""
        if not history.missing:
            return None
        members, missing = replicas(history.contributors), replicas(history.missing)
        why = "late or not received" if history.impatient else "absent"
        if history.refused:
            why = f"invalid update: {'; '.join(history.refused.values())}"
        how = "alone" if history.alone else "together"
        text = f"round {history.round}: {members} continued {how} without {missing} ({why})"
        return self._line("relink", text, history.members[0])

    def _replica(self, fact: d.Adopt | d.Disband | d.ReplicaRestarted | d.ExcludeMember) -> EventLine:
        if isinstance(fact, d.ExcludeMember):
            lost = ", ".join(fact.workers)
            return self._line("loss", f"replica {fact.member} excluded: {fact.reason}; workers that leave: {lost}")
        prefix = f"replica {fact.replica}"
        if isinstance(fact, d.Adopt):
            return self._line("rollback", f"{prefix} catches up with another: {fact.reason}", fact.replica)
        if isinstance(fact, d.ReplicaRestarted):
            return self._line("recovery", f"{prefix} starts again as a copy of another", fact.replica)
        self._dismiss(fact.replica)
        spares = ", ".join(fact.workers) if fact.workers else "none"
        return self._line("loss", f"{prefix} disbanded: {fact.reason}; spares now: {spares}", fact.replica)

    def _other(self, fact: e.Event | d.Decision) -> EventLine | None:
        if isinstance(fact, e.FaultInjected):
            when = f", {fact.moment}" if fact.moment not in ("", "any") else ""
            text = f"{fact.signal} sent to worker {fact.worker} ({self._role(fact.node)}){when}"
            return self._line("fault", text, self._of(fact.node))
        if isinstance(fact, e.UpdateRejected):
            return self._refusal(fact)
        if isinstance(fact, e.Replanned):
            return self._line(
                "relink", f"new plan for {counted(len(fact.nodes), 'node')}, found in {fact.seconds:.2f} s"
            )
        if isinstance(fact, e.WorkerFailed):
            role = self._role(fact.stage if fact.stage < 0 else self.members.node_of.get(fact.worker))
            return self._line("loss", f"worker {fact.worker} ({role}) failed: {fact.detail}")
        if isinstance(fact, e.Trouble):
            return self._line("note", fact.detail)
        if isinstance(fact, e.SaveFailed):
            return self._line("loss", f"checkpoint {fact.step} was not saved: {fact.detail}")
        if isinstance(fact, d.Unrecoverable):
            whose = f" of replica {fact.replica}" if self._naming.several else ""
            lost = f"{stages(fact.lost)}{whose} cannot be rebuilt" if fact.lost else f"the run{whose} cannot continue"
            return self._line("loss", f"{lost}: {fact.reason}", fact.replica)
        if isinstance(fact, e.WorkersStarting):
            names = listed(fact.workers, 6)
            waiting = f"waiting for {names} to start, for {fact.waited_s:.0f} s; {fact.ready} others are ready"
            return self._line("note", f"{waiting}; a start may take {fact.limit_s:g} s (fleet.start_timeout_s)")
        if isinstance(fact, e.ZombieIgnored):
            return self._line("note", f"worker {fact.worker} (incarnation {fact.incarnation}) woke up and was ignored")
        if isinstance(fact, e.StopRequested):
            return self._line("note", f"will stop at the next whole step: {fact.reason}")
        if isinstance(fact, e.LeaderStarted):
            text = f"controller lost ({fact.cause}); continuing as term {fact.term} after {fact.unled_s:.2f} s"
            return self._line("recovery", text)
        if isinstance(fact, e.StopOverdue):
            return self._line("loss", f"the stop request timed out: {fact.detail}")
        return self._sealed(fact) if isinstance(fact, d.Seal) else self._machine(fact)

    def _machine(self, fact: e.Event | d.Decision) -> EventLine | None:
        """Return a line for a relay or machine that joins, leaves or falls silent."""
        if isinstance(fact, e.RelaySilent):
            return self._relay(fact.relay, fact.detail)
        if isinstance(fact, e.RelayAnswers):
            self._silent.discard(fact.relay)
            return self._line("relink", f"relay {fact.relay} answers again")
        if isinstance(fact, e.HostJoined):
            workers = counted(fact.workers, "worker")
            return self._line("note", f"machine {fact.host} ({fact.detail}) joined with {workers}")
        if isinstance(fact, e.HostLeft):
            return self._line("note", f"machine {fact.host} takes no more workers: {fact.detail}")
        if isinstance(fact, d.RemoveMachine):
            return self._line("loss", f"machine {fact.host} rejected: {fact.reason}")
        return None

    def _sealed(self, seal: d.Seal) -> EventLine | None:
        """Return a line for a partial checkpoint, or one whose replicas should be equal but differ."""
        left = [f"the remaining {stages(seal.stages)} were saved in {seal.folder}"] if seal.partial else []
        differ = [text for text in map(differing_replicas, seal.unequal) if text not in self._unequal]
        self._unequal.update(differ)
        text = "; ".join([*differ, *left])
        return self._line("fault" if differ else "note", text) if text else None

    def _refusal(self, fact: e.UpdateRejected) -> EventLine | None:
        """Return a line for a rejected gradient, once; rejections in rounds are shown when these are settled."""
        refusal = fact.replica, fact.stage, fact.reason
        if self._naming.several or refusal in self._refused:
            return None
        self._refused.add(refusal)
        text = f"invalid update of replica {fact.replica} for {stages([fact.stage])} ({fact.reason})"
        return self._line("relink", text)

    def _role(self, node: int | None) -> str:
        return "spare" if node is None or node < 0 else self._naming.name([node])

    def _of(self, node: int | None) -> int | None:
        """Return the replica of a node, if any."""
        return None if node is None or node < 0 else self._naming.replica(node)

    def _line(self, tone: Tone, text: str, replica: int | None = None) -> EventLine:
        """Return a line about one replica at its current step, or about the whole run."""
        step = self.members.run_step(replica if self._naming.several else 0)
        return EventLine(step, tone, printable(text))


def story(record: RunRecord) -> list[tuple[float, EventLine]]:
    """Return all lines of a run with their times, in order."""
    return list(record.cached(_story))


def _story(record: RunRecord) -> list[tuple[float, EventLine]]:
    narrator = Narrator()
    # Reports of single stages are only needed for the rounds of several replicas.
    facts = record.history if naming_of(record).several else record.turns
    lines = ((t, narrator.describe(t, fact)) for t, fact in facts)
    return [(t, event_line) for t, event_line in lines if event_line is not None]


@dataclass
class _Window:
    began: float
    lasts_s: float
    shown: int = 0
    held_back: int = 0

    def __str__(self) -> str:
        return f"{self.held_back} more in {self.lasts_s:g} s not shown"


class Repeats:
    """Shows the first ``shown`` lines of a subject in each window of time and counts the others.

    The next line that is shown states how many were held back. A subject with lines held back gets a window twice as
    long next, up to ``longest_s``. Times are given, in seconds.
    """

    def __init__(self, shown: int = 3, window_s: float = 60.0, longest_s: float = 600.0) -> None:
        self._max_shown = shown
        self._window_s = window_s
        self._longest_s = longest_s
        self._windows: dict[Hashable, _Window] = {}

    def limit(self, t: float, subject: Hashable, text: str) -> str | None:
        """Return the line to show at ``t``, or None if it is held back."""
        before = self._windows.get(subject)
        if before is None or t >= before.began + before.lasts_s:
            longer = before is not None and before.held_back > 0
            lasts_s = min(2 * before.lasts_s, self._longest_s) if before is not None and longer else self._window_s
            self._windows[subject] = _Window(t, lasts_s, shown=1)
            return text if before is None or not longer else f"{text} ({before})"
        if before.shown < self._max_shown:
            before.shown += 1
            return text
        before.held_back += 1
        return None

    def rest(self) -> str:
        """Return how many lines are held back at present, by subject; empty if none are."""
        return "; ".join(f"{subject}: {window}" for subject, window in self._windows.items() if window.held_back)
