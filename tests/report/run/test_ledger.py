from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import RunConfig
from planaria.control.facts.decisions import Commit, Decision, Disband, Finish, Form, ReplicaRestarted, RunStep, Seal
from planaria.control.facts.events import Event, ReplicaPosition, RunStarted
from planaria.control.log.run_record import RunRecord
from planaria.report.run.sample_ledger import LedgerLine, prove_exactly_once, sample_ledger

SAMPLES = 4


def record(facts: list[Event | Decision]) -> RunRecord:
    return RunRecord(Path("x"), RunConfig(), [(float(t), fact) for t, fact in enumerate(facts)], [], [])


def started(steps: int, first: int = 0) -> RunStarted:
    return RunStarted(
        name="x", seed=1, stages=2, steps=steps, first_step=first, samples_per_step=SAMPLES, wall_time=0.0
    )


def form(outcome: str, step: int) -> Form:
    return Form(generation=2, step=step, outcome=outcome, members=[], links=[])  # type: ignore[arg-type]


def commit(step: int) -> Commit:
    return Commit(generation=1, step=step, progress=step)


@st.composite
def runs(draw: st.DrawFn) -> list[Event | Decision]:
    """Histories of a right controller: deaths, rollbacks and resumptions at any time, then the end."""
    steps = draw(st.integers(1, 8))
    facts: list[Event | Decision] = [started(steps), form("started", 0)]
    step = 0
    for move in draw(st.lists(st.sampled_from(["commit", "commit", "recover", "roll back", "resume"]), max_size=20)):
        if move == "commit" and step < steps:
            facts.append(commit(step))
            step += 1
        elif move == "recover":
            facts.append(form("recovered", step))
        elif move == "roll back":
            step = draw(st.integers(0, step))
            facts.append(form("rolled back", step))
        elif move == "resume":
            step = draw(st.integers(0, step))
            facts += [started(steps, step), form("started", step)]
    return [*facts, *(commit(s) for s in range(step, steps)), Finish(outcome="finished")]


@given(runs())
def test_every_sample_counts_once_after_any_failures(facts: list[Event | Decision]) -> None:
    steps = facts[0].steps  # type: ignore[union-attr]
    assert sorted(sample_ledger(record(facts))) == [LedgerLine(k, k * SAMPLES, SAMPLES) for k in range(steps)]
    assert prove_exactly_once(record(facts)) == []


@given(runs(), st.data())
def test_a_lost_or_doubled_commit_is_found(facts: list[Event | Decision], data: st.DataObject) -> None:
    final = {line.step for line in sample_ledger(record(facts))}
    step = data.draw(st.sampled_from(sorted(final)))
    place = max(i for i, fact in enumerate(facts) if isinstance(fact, Commit) and fact.step == step)
    first, last = step * SAMPLES, (step + 1) * SAMPLES - 1
    without = [*facts[:place], *facts[place + 1 :]]
    assert prove_exactly_once(record(without)) == [f"samples {first} to {last} are missing"]
    doubled = [*facts[: place + 1], *facts[place:]]
    assert prove_exactly_once(record(doubled)) == [f"samples {first} to {last} were used twice"]


def test_a_stopped_run_is_proved_up_to_its_last_commit() -> None:
    facts = [started(9), commit(0), commit(1), Finish(outcome="stopped")]
    assert prove_exactly_once(record(facts)) == []
    assert prove_exactly_once(record([*facts[:-1], Finish(outcome="finished")])) == ["samples 8 to 35 are missing"]
    assert prove_exactly_once(record([])) == ["the run never started"]


def test_a_late_seal_counts_for_its_step_and_later_samples_are_used_again() -> None:
    """It was written during training."""
    sealed = [started(4), commit(0), commit(1), commit(2), Seal(step=1, folder="step-00000001", stages=[0, 1, 2])]
    resumed = started(4, 1).model_copy(update={"load": dict.fromkeys(range(3), "step-00000001")})
    facts = [*sealed, resumed, commit(1), commit(2), commit(3), Finish(outcome="finished")]
    assert [line.step for line in sample_ledger(record(facts))] == [0, 1, 2, 3]
    assert prove_exactly_once(record(facts)) == []


class Fleet:
    """A right controller of several replicas, as far as samples go; it keeps its own books and writes the facts."""

    def __init__(self, replicas: int, steps: int) -> None:
        self.replicas, self.total, self.steps = replicas, replicas * steps, steps
        self.step = dict.fromkeys(range(replicas), 0)
        self.used: dict[int, tuple[int, int]] = {}
        """block → replica that committed it and its own step; -1 for earlier parts of the run"""
        self.out: dict[int, int] = {}
        self.removed: set[int] = set()
        self.saved: dict[int, int] = {}
        self.durable: tuple[dict[int, tuple[int, int]], dict[int, int], str] = ({}, dict(self.step), "")
        self.facts: list[Event | Decision] = [self._started(0, {}, 0, [])]

    def _started(self, first: int, positions: dict[int, ReplicaPosition], floor: int, ahead: list[int]) -> RunStarted:
        folder = self.durable[2]
        return RunStarted(
            name="x", seed=1, stages=1, steps=self.steps, first_step=first, samples_per_step=SAMPLES * self.replicas,
            wall_time=0.0, replicas=self.replicas, nodes_by_replica=[[2 * r, 2 * r + 1] for r in range(self.replicas)],
            positions=positions, first_block=floor, blocks_ahead=ahead,
            checkpoint_of_stage={0: folder, 1: folder} if folder else {},
        )  # fmt: skip

    @property
    def free(self) -> list[int]:
        return [b for b in range(self.total) if b not in self.used and b not in self.out.values()]

    @property
    def live(self) -> list[int]:
        return [r for r in range(self.replicas) if r not in self.removed]

    def begin(self, replica: int, block: int) -> None:
        self.out[replica] = block
        self.facts.append(RunStep(replica=replica, generation=1, step=self.step[replica], block=block))

    def commit(self, replica: int) -> None:
        step, block = self.step[replica], self.out.pop(replica)
        self.facts.append(Commit(replica=replica, generation=1, step=step, progress=block // self.replicas))
        self.used[block] = replica, step
        self.step[replica] += 1

    def form(self, replica: int, outcome: str, step: int) -> None:
        self.facts.append(Form(replica=replica, generation=2, step=step, outcome=outcome, members=[], links=[]))  # type: ignore[arg-type]

    def roll_back(self, replica: int) -> None:
        back = self.durable[1][replica]
        self.out.pop(replica, None)
        self.used = {b: (r, s) for b, (r, s) in self.used.items() if r != replica or s < back}
        self.step[replica] = back
        self.saved.clear()
        self.form(replica, "rolled back", back)

    def disband(self, replica: int) -> None:
        self.out.pop(replica, None)
        self.removed.add(replica)
        self.facts.append(Disband(replica=replica, workers=[], reason=""))

    def found(self, replica: int) -> None:
        self.removed.discard(replica)
        self.facts.append(ReplicaRestarted(replica=replica))
        self.form(replica, "recovered", self.step[replica])

    def save(self, replica: int) -> None:
        self.saved[replica] = self.step[replica]
        if not set(self.live) <= set(self.saved):
            return
        used = {b: (r, s) for b, (r, s) in self.used.items() if s < self.saved.get(r, s + 1)}
        floor = next(b for b in range(self.total + 1) if b not in used)
        ahead = sorted(b for b in used if b > floor)
        positions = {r: ReplicaPosition(step=s) for r, s in self.saved.items()}
        name = f"step-{len(self.facts)}"
        self.facts.append(
            Seal(step=len(used) // self.replicas, folder=name, stages=[0, 1], positions=positions, first_block=floor,
                 blocks_ahead=ahead)
        )  # fmt: skip
        self.durable = used, dict(self.saved), name
        self.saved.clear()

    def resume(self) -> None:
        used, positions, name = self.durable
        first = len(used) // self.replicas
        floor = next(b for b in range(self.total + 1) if b not in used)
        ahead = sorted(b for b in used if b > floor)
        self.facts.append(
            self._started(first, {r: ReplicaPosition(step=s) for r, s in positions.items()}, floor, ahead)
        )
        self.used = dict.fromkeys(used, (-1, 0))
        self.step = {r: positions.get(r, first) for r in range(self.replicas)}
        self.durable = dict(self.used), dict(self.step), name
        self.out, self.removed, self.saved = {}, set(), {}


MOVES = ("begin", "begin", "commit", "commit", "commit", "save", "save", "roll back", "recover", "disband", "found",
         "resume")  # fmt: skip


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Runs of several replicas to their end: any of them may do anything at any time."""
    fleet = Fleet(draw(st.integers(2, 4)), draw(st.integers(1, 4)))
    for move in draw(st.lists(st.sampled_from(MOVES), max_size=50)):
        replica = draw(st.sampled_from(fleet.live))
        under_way = replica in fleet.out
        if move == "begin" and not under_way and fleet.free:
            fleet.begin(replica, draw(st.sampled_from(fleet.free)))
        elif move == "commit" and under_way:
            fleet.commit(replica)
        elif move == "save" and not under_way:
            fleet.save(replica)
        elif move == "roll back" and replica in fleet.durable[1]:
            fleet.roll_back(replica)
        elif move == "recover" and under_way:  # it continues with the same block
            fleet.form(replica, "recovered", fleet.step[replica])
            fleet.begin(replica, fleet.out[replica])
        elif move == "disband" and len(fleet.live) > 1:
            fleet.disband(replica)
        elif move == "found" and fleet.removed:
            fleet.found(min(fleet.removed))
        elif move == "resume":
            fleet.resume()
    return fleet


def to_the_end(fleet: Fleet) -> list[Event | Decision]:
    for replica in [*fleet.out]:
        fleet.commit(replica)
    while fleet.free:
        fleet.begin(fleet.live[0], fleet.free[0])
        fleet.commit(fleet.live[0])
    return [*fleet.facts, Finish(outcome="finished")]


@given(fleets())
def test_every_sample_counts_once_for_any_order_of_replicas(fleet: Fleet) -> None:
    assert prove_exactly_once(record(fleet.facts)) == [], "before the end, some are ahead of others"
    facts = to_the_end(fleet)
    assert prove_exactly_once(record(facts)) == []
    firsts = sorted(line.first for line in sample_ledger(record(facts)))
    assert firsts == [SAMPLES * block for block in range(fleet.total)]


@given(fleets())
def test_the_ledger_has_the_replica_of_each_block(fleet: Fleet) -> None:
    lines = {line.first // SAMPLES: (line.replica, line.step) for line in sample_ledger(record(fleet.facts))}
    assert lines.keys() == fleet.used.keys()
    assert all(who in (lines[block], (-1, 0)) for block, who in fleet.used.items())


def begun_at(facts: list[Event | Decision], line: LedgerLine) -> int:
    """Where the step of this line was last begun. A resumed replica may count steps again, with other blocks."""
    wanted = (line.replica, line.step, line.first // SAMPLES)
    return max(i for i, f in enumerate(facts) if isinstance(f, RunStep) and (f.replica, f.step, f.block) == wanted)


@given(fleets(), st.data())
def test_a_commit_that_one_replica_lost_or_made_twice_is_found(fleet: Fleet, data: st.DataObject) -> None:
    facts = to_the_end(fleet)
    line = data.draw(st.sampled_from(sample_ledger(record(facts))))
    begun = begun_at(facts, line)
    place = next(i for i, f in enumerate(facts) if i > begun and isinstance(f, Commit) and f.replica == line.replica)
    missing = f"samples {line.first} to {line.first + SAMPLES - 1} are missing"
    assert missing in prove_exactly_once(record([*facts[:place], *facts[place + 1 :]]))
    problem = f"replica {line.replica} committed step {line.step} without starting it"
    assert prove_exactly_once(record([*facts[: place + 1], *facts[place:]])) == [problem]


@given(fleets(), st.data())
def test_a_block_that_two_replicas_used_is_found(fleet: Fleet, data: st.DataObject) -> None:
    facts = to_the_end(fleet)
    lines = sample_ledger(record(facts))
    one, other = data.draw(st.sampled_from(lines)), data.draw(st.sampled_from(lines))
    place = begun_at(facts, one)
    facts[place] = facts[place].model_copy(update={"block": other.first // SAMPLES})
    problems = prove_exactly_once(record(facts))
    twice = f"samples {other.first} to {other.first + SAMPLES - 1} were used twice"
    assert (twice in problems and any("missing" in text for text in problems)) or one == other


def test_steps_undone_by_a_rollback_must_be_repeated() -> None:
    fleet = Fleet(2, 3)
    for block in (0, 2):
        fleet.begin(0, block)
        fleet.commit(0)
    fleet.begin(1, 1)
    fleet.commit(1)
    fleet.roll_back(0)
    assert sample_ledger(record(fleet.facts)) == [LedgerLine(0, SAMPLES, SAMPLES, 1)]
    place = len(fleet.facts) - 1
    facts = to_the_end(fleet)
    assert prove_exactly_once(record(facts)) == []
    facts[place] = facts[place].model_copy(update={"outcome": "recovered"})
    assert prove_exactly_once(record(facts)) == ["samples 0 to 3 were used twice", "samples 8 to 11 were used twice"]
    as_if_another = facts[place].model_copy(update={"outcome": "rolled back", "replica": 1})
    facts[place] = as_if_another
    assert "samples 4 to 7 are missing" in prove_exactly_once(record(facts))


def test_a_run_resumed_too_far_ahead_has_lost_samples() -> None:
    fleet = Fleet(2, 3)
    for replica in (0, 1):
        fleet.begin(replica, replica)
        fleet.commit(replica)
    fleet.save(0)
    fleet.begin(0, 2)
    fleet.commit(0)
    fleet.save(1)
    fleet.resume()
    assert fleet.free == [2, 3, 4, 5]
    assert prove_exactly_once(record(to_the_end(fleet))) == []
    wrong = Fleet(2, 3)
    wrong.facts, wrong.durable = fleet.facts[:9], fleet.durable
    wrong.resume()
    wrong.used[2] = (-1, 0)  # it believes what the checkpoint does not have
    assert prove_exactly_once(record(to_the_end(wrong))) == ["samples 8 to 11 are missing"]


def test_a_checkpoint_with_too_many_or_too_few_samples_is_detected_before_the_end() -> None:
    fleet = Fleet(2, 3)
    for replica in (1, 0):
        fleet.begin(replica, 2 * replica)
        fleet.commit(replica)
    fleet.save(0)
    fleet.save(1)
    assert prove_exactly_once(record(fleet.facts)) == []
    seal = fleet.facts[-1]
    assert isinstance(seal, Seal)
    more = seal.model_copy(update={"first_block": 2})
    assert prove_exactly_once(record([*fleet.facts[:-1], more])) == [
        f"{more.folder} records samples 4 to 7 as used; they were not"
    ]
    less = seal.model_copy(update={"blocks_ahead": []})
    assert prove_exactly_once(record([*fleet.facts[:-1], less])) == [
        f"{less.folder} does not record samples 8 to 11 as used"
    ]


def test_a_run_may_resume_with_another_number_of_replicas() -> None:
    fleet = Fleet(2, 6)
    for replica in (0, 1, 0):
        fleet.begin(replica, len(fleet.used))
        fleet.commit(replica)
    fleet.save(0)
    fleet.save(1)
    fleet.begin(1, 3)
    fleet.commit(1)  # lost with what came after the checkpoint
    folder = fleet.durable[2]
    alone = RunStarted(
        name="x", seed=1, stages=1, steps=4, first_step=1, samples_per_step=SAMPLES, wall_time=0.0, first_sample=8,
        first_block=3, checkpoint_of_stage={0: folder, 1: folder},
    )  # fmt: skip
    rest = [(RunStep(generation=1, step=s, block=s + 2), commit(s)) for s in range(1, 3)]
    facts = [*fleet.facts, alone, *(fact for pair in rest for fact in pair)]
    assert prove_exactly_once(record([*facts, Finish(outcome="finished")])) == []
    facts.append(form("rolled back", 1))
    assert [line.first for line in sample_ledger(record(facts))] == [0, 4, 8]
