"""A run resumes from snapshots in memory only on the history in its log, whichever processes die."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from planaria.control.facts.decisions import Commit, Form
from planaria.control.facts.run_started import RunStarted, SnapshotLabel
from planaria.control.log.reader import StepBoundary, SurvivingSteps

STAGES = 3
SLICES = 2
"""steps over which a snapshot is sent"""


@dataclass(frozen=True)
class State:
    """A state of the whole pipeline, with everything that led to it: equal only to itself."""

    step: int
    serial: int
    before: State | None

    def came_from(self, other: State) -> bool:
        now: State | None = self
        while now is not None and now.step >= other.step:
            if now == other:
                return True
            now = now.before
        return False


@dataclass(frozen=True)
class Snapshot:
    """A stage's part of a snapshot in a worker's writing thread, and the state in it."""

    stage: int
    label: SnapshotLabel
    holds: State


def started(part: int, generation: int, state: State, recalled: SnapshotLabel | None) -> RunStarted:
    return RunStarted(
        name="x", part=f"{part:x}", seed=1, stages=STAGES - 1, steps=10**6, first_step=state.step,
        first_generation=generation, samples_per_step=1, wall_time=0.0,
        snapshot_step=-1 if recalled is None else recalled.step, recalled_from=recalled,
    )  # fmt: skip


class Histories(RuleBasedStateMachine):
    """A controller that commits, rolls back and dies, and workers whose threads write as late as they like."""

    @initialize()
    def begin(self) -> None:
        self.serials, self.parts = count(1), count(1)
        self.log: list[StepBoundary] = []
        self.written: dict[tuple[SnapshotLabel, int], State] = {}
        """snapshots in memory with their true contents, hidden from the code under test"""
        self.writing: list[Snapshot] = []
        """handed to writing threads, of processes that may be frozen for as long as they like"""
        self.saved = State(0, 0, None)
        """the newest checkpoint"""
        self.generation = 0
        self._start(self.saved, None)

    def _start(self, state: State, recalled: SnapshotLabel | None) -> None:
        self.part = next(self.parts)
        if recalled is None:
            self.written.clear()
        else:
            self.written = {key: held for key, held in self.written.items() if key[0] == recalled}
        self.log.append(started(self.part, self.generation, state, recalled))
        self.now = state
        self._form(state)

    def _form(self, state: State) -> None:
        """Start a generation; the log has it before any worker receives it."""
        self.generation += 1
        outcome = "started" if state == self.now else "rolled back"
        self.log.append(
            Form(generation=self.generation, step=state.step, outcome=outcome, members=[], links=[])  # type: ignore[arg-type]
        )
        self.now, self.begun = state, None

    @rule(stages=st.sets(st.integers(0, STAGES - 1)))
    def commit(self, stages: set[int]) -> None:
        """A step; these stages' workers get as far as to hand over a snapshot that it completes."""
        self.begun = self.begun or self.now
        self.log.append(Commit(generation=self.generation, step=self.now.step, progress=self.now.step))
        self.now = State(self.now.step + 1, next(self.serials), self.now)
        if self.now.step - self.begun.step < SLICES:
            return
        label = SnapshotLabel(part=f"{self.part:x}", generation=self.generation, step=self.begun.step)
        self.writing += [Snapshot(stage, label, self.begun) for stage in stages]
        self.retained, self.begun = self.begun, None

    @precondition(lambda self: self.writing)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        """Some thread gets to the end of its write."""
        done = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        self.written[done.label, done.stage] = done.holds

    @precondition(lambda self: self.writing)
    @rule()
    def write_all(self) -> None:
        self.written |= {(done.label, done.stage): done.holds for done in self.writing}
        self.writing.clear()

    @rule()
    def recover(self) -> None:
        """A stage is rebuilt as it was: another generation at the same step."""
        self._form(self.now)

    @rule()
    def save(self) -> None:
        self.saved = self.now

    @rule()
    def roll_back(self) -> None:
        """To the checkpoint."""
        self._form(self.saved)

    retained: State | None = None

    @precondition(lambda self: self.retained is not None and self.now.came_from(self.retained))
    @rule(handed=st.booleans())
    def recall(self, handed: bool) -> None:
        """To what all remember; they may write that again under the new generation."""
        assert self.retained is not None
        if self.retained.step < self.saved.step:
            return
        self._form(self.retained)
        if handed:
            label = SnapshotLabel(part=f"{self.part:x}", generation=self.generation, step=self.retained.step)
            self.writing += [Snapshot(stage, label, self.retained) for stage in range(STAGES)]

    @rule(elsewhere=st.booleans(), explicit=st.booleans())
    def die_and_resume(self, elsewhere: bool, explicit: bool) -> None:
        """The controller is killed; the run resumes from memory, or from the checkpoint (``explicit``, or inline)."""
        found = None if explicit else self._newest()
        self.retained = None
        if found is None or elsewhere:
            self._start(self.saved, None)
            return
        label, state = found
        assert self.now.came_from(state), "resumed from a history that was undone"
        self._start(state, label)
        self.retained = state

    def _newest(self) -> tuple[SnapshotLabel, State] | None:
        """Return the snapshot that the code under test would resume from: two of three stages suffice."""
        surviving = SurvivingSteps.of(self.log)
        labels = {label for label, _ in self.written}
        for label in sorted(labels, key=lambda label: (label.step, label.generation), reverse=True):
            parts = [self.written[label, stage] for stage in range(STAGES) if (label, stage) in self.written]
            if label.step > self.saved.step and surviving.has(label) and len(parts) >= STAGES - 1:
                assert len(set(parts)) == 1, "the parts of a snapshot are of several histories"
                return label, parts[0]
        return None

    @invariant()
    def the_newest_true_one_is_found(self) -> None:
        """Judged by what files truly hold: the newest that is enough and of the surviving history."""
        true: dict[tuple[SnapshotLabel, State], int] = {}
        for (label, _), state in self.written.items():
            if self.now.came_from(state) and state.step > self.saved.step:
                true[label, state] = true.get((label, state), 0) + 1
        best = max((state.step for (_, state), parts in true.items() if parts >= STAGES - 1), default=-1)
        found = self._newest()
        assert (-1 if found is None else found[1].step) == best

    @invariant()
    def the_last_commit_of_a_row_is_enough(self) -> None:
        """As the log is read for this: of commits in a row, only the last one."""
        brief = [turn for turn, after in zip(self.log, [*self.log[1:], None], strict=True)
                 if not (isinstance(turn, Commit) and isinstance(after, Commit))]  # fmt: skip
        assert SurvivingSteps.of(brief) == SurvivingSteps.of(self.log)


TestHistories = Histories.TestCase


def test_a_label_of_another_run_or_of_steps_that_the_log_lacks_is_rejected() -> None:
    """As when the run's folder was replaced, or restored from an older copy."""
    log: list[StepBoundary] = [started(1, 0, State(0, 0, None), None)]
    log.append(Form(generation=1, step=0, outcome="started", members=[], links=[]))
    log += [Commit(generation=1, step=step, progress=step) for step in range(5)]
    label = SnapshotLabel(part="1", generation=1, step=5)
    assert SurvivingSteps.of(log).has(label)
    for change in ({"part": "2"}, {"generation": 2}, {"step": 6}):
        assert not SurvivingSteps.of(log).has(label.model_copy(update=change))
    assert not SurvivingSteps.of(log[:-1]).has(label)
