"""Silent relays: reported, avoided while there is another, and waited for like missing machines."""

from __future__ import annotations

import pytest

from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.run_deadlines import RunDeadlines, StartDeadlines
from planaria.runtime.controller.relay_watch import ProbeResult, RelayWatch
from support.control.scenarios import decision_kinds, fleet, last, work_until
from support.control.simulated_fleet import SimulatedFleet

REFUSED = "127.0.0.1:7: Connection refused"
FRESH_S = 120.0


def lose_relay(simulation: SimulatedFleet) -> None:
    """Break an edge because relay "a" does not answer, and let its grace expire."""
    simulation.break_edge((1, 2), detail="no edge", cause=REFUSED, relay="a")
    simulation.expire_grace()


def test_no_generation_is_formed_while_no_relay_answers() -> None:
    simulation = fleet(relays={"a": 1.0})
    work_until(simulation, "run", 2)
    forms = decision_kinds(simulation).count("form")
    lose_relay(simulation)
    assert decision_kinds(simulation).count("form") == forms and simulation.state.phase == "idle"
    waits = RunDeadlines(RunConfig())
    trouble = waits.update(5.0, simulation.run)
    assert trouble is not None
    assert trouble.detail == f"no relay answers: a ({REFUSED}); waiting for 600 s (fleet.join_s)"
    assert waits.update(6.0, simulation.run) is None and waits.due and 605.0 in waits.due, (
        "reported once, ended by the clock"
    )
    simulation.happened(e.RelayAnswers(relay="a"))
    assert last(simulation, d.Form).outcome == "relinked" and simulation.state.phase == "link"
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_a_run_that_gives_up_its_relays_names_them() -> None:
    simulation = fleet(relays={"a": 1.0})
    work_until(simulation, "run", 2)
    lose_relay(simulation)
    waits = RunDeadlines(RunConfig())
    waits.update(0.0, simulation.run)
    assert not list(waits.expired(599.0, lambda: simulation.run))
    (event,) = waits.expired(600.0, lambda: simulation.run)
    simulation.happened(event)
    simulation.behave()
    assert simulation.ending is not None and simulation.ending.outcome == "cannot"
    assert simulation.ending.reason == f"no relay has answered for as long as fleet.join_s allows: a ({REFUSED})"
    assert any(isinstance(fact, d.Seal) and not fact.partial for fact in simulation.history), (
        "all stages are there, and saved"
    )


def test_only_edges_of_a_silent_relay_move_to_another() -> None:
    simulation = fleet(relays={"a": 1.0, "b": 1.0})
    work_until(simulation, "run", 2)
    before = {(link.low, link.high): (link.id, link.relay) for link in last(simulation, d.Form).links}
    simulation.happened(e.RelaySilent(relay="a", detail=REFUSED))
    after = {(link.low, link.high): (link.id, link.relay) for link in last(simulation, d.Form).links}
    assert {over for _, over in before.values()} == {"a", "b"} and {over for _, over in after.values()} == {"b"}
    assert all(after[pair] == known for pair, known in before.items() if known[1] == "b")
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


def test_working_edges_stay_although_the_only_relay_seems_silent() -> None:
    simulation = fleet(relays={"a": 1.0})
    work_until(simulation, "run", 2)
    simulation.happened(e.RelaySilent(relay="a", detail=REFUSED))
    assert simulation.state.phase == "run"
    simulation.behave()
    assert simulation.ending == d.Finish(outcome="finished")


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
    simulation, starts = fleet(), StartDeadlines(FRESH_S)
    starts.update(0.0, simulation.run)
    reports = {t: report for t in range(200) if (report := starts.report(float(t), simulation.run))}
    assert sorted(reports) == [10, 30, 70, 130, 190]
    workers = [f"w{n}" for n in range(6)]
    assert reports[10] == e.WorkersStarting(workers=workers, ready=0, waited_s=10.0, limit_s=FRESH_S)
    simulation.work("w1")
    starts.update(200.0, simulation.run)
    workers.remove("w1")
    assert starts.report(300.0, simulation.run) == e.WorkersStarting(
        workers=workers, ready=1, waited_s=300.0, limit_s=FRESH_S
    )
    work_until(simulation, "run", 0)
    starts.update(301.0, simulation.run)
    assert starts.report(1000.0, simulation.run) is None, "the run trains"


@pytest.mark.parametrize("phase", ["run", "link"])
def test_a_stop_waits_for_no_relay(phase: str) -> None:
    simulation = fleet(relays={"a": 1.0})
    work_until(simulation, "run", 2)
    if phase == "link":
        lose_relay(simulation)
    simulation.stop(skip_repairs=True)
    simulation.expire_stop()
    simulation.behave()
    assert simulation.ending is not None and simulation.ending.outcome == "stopped"
