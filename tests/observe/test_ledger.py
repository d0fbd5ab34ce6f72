from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from synthetic_run import Synthesis

from planaria.config import RunConfig
from planaria.decisions import Commit, Decision, Finish, Form
from planaria.events import Event, RunStarted
from planaria.observe.ledger import LedgerLine, prove_exactly_once, sample_ledger
from planaria.observe.logs import RunRecord, read_run

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
def test_whatever_dies_every_sample_counts_once(facts: list[Event | Decision]) -> None:
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


def test_the_synthetic_run_holds(tmp_path: Path) -> None:
    folder = Synthesis(tmp_path, deaths={12: 2, 27: 3}, rollbacks={27: 20}).write()
    assert prove_exactly_once(read_run(folder)) == []
