"""What happened, told: one line of English for each event or decision that a reader of the run must know of.

The progress display prints these lines while the run goes on; the report shows the same ones afterwards.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from planaria.decisions import Cannot, Decision, Form, Rebuild, RunStep, Seal
from planaria.events import (
    EdgeBroken,
    Event,
    FaultInjected,
    Linked,
    Replanned,
    RunStarted,
    StopRequested,
    WorkerFailed,
    WorkerJoined,
    WorkerLost,
    ZombieIgnored,
)
from planaria.observe.logs import RunRecord
from planaria.observe.places import Places, stages

Tone = Literal["fault", "loss", "rebirth", "rollback", "relink", "note"]
SIGNS: dict[Tone, str] = {"fault": "⚡", "loss": "✗", "rebirth": "✓", "rollback": "↺", "relink": "⇄", "note": "·"}
CAUSES = {"connection": "connection closed", "exit": "process ended", "heartbeat": "no heartbeat"}


class Line(NamedTuple):
    """One thing that happened while ``step`` was under way."""

    step: int
    tone: Tone
    text: str

    def __str__(self) -> str:
        return f"step {self.step}  {SIGNS[self.tone]} {self.text}"


class Narrator:
    """Folds events and decisions into lines, and knows who is alive at the moment."""

    def __init__(self) -> None:
        self.step = 0
        self.alive: set[str] = set()
        self.holders: dict[str, int] = {}
        """living member → the node at which it stands"""
        self._places = Places()
        self._nodes: set[int] = set()
        self._lost_at: dict[int, float] = {}
        self._broken: set[tuple[int, int]] = set()
        self._generation = 0
        self._reborn: dict[int, Rebuild] = {}

    @property
    def spares(self) -> int:
        """Living workers that hold no stage."""
        return len(self.alive - self.holders.keys())

    def tell(self, t: float, fact: Event | Decision) -> Line | None:
        """Takes in one fact; the line that it is worth, if any."""
        if isinstance(fact, RunStep):
            self.step = fact.step
        elif isinstance(fact, RunStarted):
            self.step, self.alive, self.holders = fact.first_step, set(), {}
            self._places, self._nodes = Places(fact), set(fact.stage_of)
            self._lost_at.clear()
        elif isinstance(fact, EdgeBroken):
            self._broken.add((min(fact.node, fact.peer), max(fact.node, fact.peer)))
        elif isinstance(fact, WorkerJoined):
            self.alive.add(fact.worker)
        elif isinstance(fact, WorkerLost):
            return self._lost(t, fact)
        elif isinstance(fact, Form):
            return self._formed(fact)
        elif isinstance(fact, Linked):
            return self._linked(t, fact)
        else:
            return self._other(fact)
        return None

    def _lost(self, t: float, lost: WorkerLost) -> Line:
        self.alive.discard(lost.worker)
        node = self.holders.pop(lost.worker, None)
        if node is not None:
            self._lost_at[node] = t
        detail = f" ({lost.detail})" if lost.detail else ""
        return self._line("loss", f"worker {lost.worker} ({self._role(node)}) lost: {CAUSES[lost.cause]}{detail}")

    def _formed(self, form: Form) -> Line | None:
        self._generation = form.generation
        self.holders = {member.worker: member.node for member in form.members}
        self._reborn = {m.node: m.source for m in form.members if isinstance(m.source, Rebuild)}
        broken, self._broken = sorted(self._broken), set()
        if form.outcome == "rolled back":
            return self._line("rollback", f"rolled back to step {form.step}")
        if form.outcome == "skipping":
            left_out = self._places.name(self._nodes - set(self.holders.values()))
            return self._line("relink", f"no worker for {left_out} yet: training on without")
        if form.outcome == "relinked":
            edges = ", ".join(f"{low}–{high}" for low, high in broken)
            return self._line("relink", f"broken edge {edges} replaced" if edges else "edges replaced")
        return None

    def _linked(self, t: float, linked: Linked) -> Line | None:
        if linked.generation != self._generation or linked.node not in self._reborn:
            return None
        source = self._reborn.pop(linked.node)
        lost_at = self._lost_at.pop(linked.node, None)
        after = "" if lost_at is None else f" in {t - lost_at:.2f} s"
        donors = self._places.name(source.donors)
        origin = f"from {donors} ({source.by})" if source.donors else f"anew ({source.by})"
        return self._line("rebirth", f"{self._places.name([linked.node])} reborn in {linked.worker} {origin}{after}")

    def _other(self, fact: Event | Decision) -> Line | None:
        if isinstance(fact, FaultInjected):
            when = f", {fact.moment}" if fact.moment else ""
            return self._line("fault", f"{fact.signal} sent to worker {fact.worker} ({self._role(fact.node)}){when}")
        if isinstance(fact, Replanned):
            return self._line("relink", f"new plan for {len(fact.nodes)} nodes, found in {fact.seconds:.2f} s")
        if isinstance(fact, WorkerFailed):
            role = self._role(fact.stage if fact.stage < 0 else self.holders.get(fact.worker))
            return self._line("loss", f"worker {fact.worker} ({role}) failed: {fact.detail}")
        if isinstance(fact, Cannot):
            return self._line("loss", f"{stages(fact.lost)} cannot be rebuilt: {fact.reason}")
        if isinstance(fact, ZombieIgnored):
            return self._line("note", f"worker {fact.worker} (incarnation {fact.incarnation}) woke up and was ignored")
        if isinstance(fact, StopRequested):
            return self._line("note", f"will stop at the next whole step: {fact.reason}")
        if isinstance(fact, Seal) and fact.partial:
            return self._line("note", f"what is left was saved in {fact.folder}: {stages(fact.stages)}")
        return None

    def _role(self, node: int | None) -> str:
        return "spare" if node is None or node < 0 else self._places.name([node])

    def _line(self, tone: Tone, text: str) -> Line:
        # Details come from operating systems and strangers: nothing in them may move a terminal's cursor.
        return Line(self.step, tone, "".join(c if c.isprintable() else " " for c in text))


def story(record: RunRecord) -> list[tuple[float, Line]]:
    """All lines of a run with their times, in order."""
    narrator = Narrator()
    told = ((t, narrator.tell(t, fact)) for t, fact in record.history)
    return [(t, line) for t, line in told if line is not None]
