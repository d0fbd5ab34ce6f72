"""Silent relays: reported, avoided while there is another, and waited for like missing machines."""

from __future__ import annotations

import pytest
from simulated_fleet import SimulatedFleet
from test_decide import decision_kinds, fleet, last, work_until

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.wait_deadlines import RoundWaits, StartDeadlines
from planaria.runtime.controller.relay_watch import ProbeResult, RelayWatch

REFUSED = "127.0.0.1:7: Connection refused"
FRESH_S = 120.0


def lose_relay(made: SimulatedFleet) -> None:
    """Break an edge because relay "a" does not answer, and let its grace expire."""
    made.break_edge((1, 2), detail="no edge", cause=REFUSED, relay="a")
    made.expire_grace()


def test_no_generation_is_formed_while_no_relay_answers() -> None:
    made = fleet(relays={"a": 1.0})
    work_until(made, "run", 2)
    forms = decision_kinds(made).count("form")
    lose_relay(made)
    assert decision_kinds(made).count("form") == forms and made.state.phase == "idle"
    waits = RoundWaits(RunConfig())
    trouble = waits.note(5.0, made.run)
    assert trouble is not None
    assert trouble.detail == f"no relay answers: a ({REFUSED}); waiting for 600 s (fleet.join_s)"
    assert waits.note(6.0, made.run) is None and waits.due and 605.0 in waits.due, "reported once, ended by the clock"
    made.happened(e.RelayAnswers(relay="a"))
    assert last(made, d.Form).outcome == "relinked" and made.state.phase == "link"
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_a_run_that_gives_up_its_relays_names_them() -> None:
    made = fleet(relays={"a": 1.0})
    work_until(made, "run", 2)
    lose_relay(made)
    waits = RoundWaits(RunConfig())
    waits.note(0.0, made.run)
    assert not list(waits.expired(599.0, lambda: made.run))
    (event,) = waits.expired(600.0, lambda: made.run)
    made.happened(event)
    made.behave()
    assert made.ending is not None and made.ending.outcome == "cannot"
    assert made.ending.reason == f"no relay has answered for as long as fleet.join_s allows: a ({REFUSED})"
    assert any(isinstance(fact, d.Seal) and not fact.partial for fact in made.history), (
        "all stages are there, and saved"
    )


def test_only_edges_of_a_silent_relay_move_to_another() -> None:
    made = fleet(relays={"a": 1.0, "b": 1.0})
    work_until(made, "run", 2)
    before = {(link.low, link.high): (link.id, link.relay) for link in last(made, d.Form).links}
    made.happened(e.RelaySilent(relay="a", detail=REFUSED))
    after = {(link.low, link.high): (link.id, link.relay) for link in last(made, d.Form).links}
    assert {over for _, over in before.values()} == {"a", "b"} and {over for _, over in after.values()} == {"b"}
    assert all(after[pair] == known for pair, known in before.items() if known[1] == "b")
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_working_edges_stay_although_the_only_relay_seems_silent() -> None:
    made = fleet(relays={"a": 1.0})
    work_until(made, "run", 2)
    made.happened(e.RelaySilent(relay="a", detail=REFUSED))
    assert made.state.phase == "run"
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_a_relay_is_silent_after_three_failed_probes_and_back_after_one() -> None:
    watch = RelayWatch({"a": "127.0.0.1:7"}, str)
    found = [
        watch.state_change(ProbeResult("a", float(t), error))
        for t, error in enumerate(["no", "no", "", "no", "no", "no", "no"])
    ]
    assert found == [*[None] * 5, e.RelaySilent(relay="a", detail="127.0.0.1:7: no"), None]
    assert watch.state_change(ProbeResult("a", 7.0, "")) == e.RelayAnswers(relay="a")
    assert list(watch.changes(10.0, {"a": REFUSED})) == []
    assert watch.state_change(ProbeResult("a", 9.0, "")) is None, "a worker found it silent during this probe"
    assert watch.state_change(ProbeResult("a", 10.5, "")) == e.RelayAnswers(relay="a")


def test_slow_starts_are_reported_repeatedly_at_growing_intervals() -> None:
    made, starts = fleet(), StartDeadlines(FRESH_S)
    starts.note(0.0, made.run)
    reports = {t: report for t in range(200) if (report := starts.report(float(t), made.run))}
    assert sorted(reports) == [10, 30, 70, 130, 190]
    workers = [f"w{n}" for n in range(6)]
    assert reports[10] == e.WorkersStarting(workers=workers, ready=0, waited_s=10.0, limit_s=FRESH_S)
    made.work("w1")
    starts.note(200.0, made.run)
    workers.remove("w1")
    assert starts.report(300.0, made.run) == e.WorkersStarting(
        workers=workers, ready=1, waited_s=300.0, limit_s=FRESH_S
    )
    work_until(made, "run", 0)
    starts.note(301.0, made.run)
    assert starts.report(1000.0, made.run) is None, "the run trains"


@pytest.mark.parametrize("phase", ["run", "link"])
def test_a_stop_waits_for_no_relay(phase: str) -> None:
    made = fleet(relays={"a": 1.0})
    work_until(made, "run", 2)
    if phase == "link":
        lose_relay(made)
    made.stop(prompt=True)
    made.expire_stop()
    made.behave()
    assert made.ending is not None and made.ending.outcome == "stopped"
