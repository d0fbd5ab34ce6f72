"""Relays that fall silent: named, avoided while there is another, waited for like missing machines."""

from __future__ import annotations

import pytest
from test_decide import fleet, last, told, work_until

from planaria.config.schema import RunConfig
from planaria.control import decisions as d
from planaria.control import events as e
from planaria.control.relay_watch import Probed, RelayWatch
from planaria.control.waits import Starts, Waits

REFUSED = "127.0.0.1:7: Connection refused"
FRESH_S = 120.0


def not_answered(made: object, relay: str = "a", pair: tuple[int, int] = (1, 2)) -> e.EdgeBroken:
    state = made.state  # type: ignore[attr-defined]
    about = {"worker": state.holders[pair[0]], "node": pair[0], "peer": pair[1], "generation": state.generation}
    return e.EdgeBroken.model_validate(about | {"detail": "no edge", "cause": REFUSED, "relay": relay})


def test_without_a_relay_that_answers_no_generation_is_formed_in_vain() -> None:
    made = fleet(relays={"a": 1.0})
    work_until(made, "run", 2)
    forms = told(made).count("form")
    made.happened(not_answered(made))
    made.expire_grace()
    assert told(made).count("form") == forms and made.state.phase == "idle"
    waits = Waits(RunConfig())
    trouble = waits.note(5.0, made.run)
    assert trouble is not None
    assert trouble.detail == f"no relay answers: a ({REFUSED}); waiting for 600 s (fleet.join_s)"
    assert waits.note(6.0, made.run) is None and waits.due and 605.0 in waits.due, "reported once, ended by the clock"
    made.happened(e.RelayAnswers(relay="a"))
    assert last(made, d.Form).outcome == "relinked" and made.state.phase == "link"
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_a_run_whose_relays_are_given_up_names_them() -> None:
    made = fleet(relays={"a": 1.0})
    work_until(made, "run", 2)
    made.happened(not_answered(made))
    made.expire_grace()
    waits = Waits(RunConfig())
    waits.note(0.0, made.run)
    assert not list(waits.over(599.0, lambda: made.run))
    (event,) = waits.over(600.0, lambda: made.run)
    made.happened(event)
    made.behave()
    assert made.ending is not None and made.ending.outcome == "cannot"
    assert made.ending.reason == f"no relay has answered for as long as fleet.join_s allows: a ({REFUSED})"
    assert any(isinstance(fact, d.Seal) and not fact.partial for fact in made.history), (
        "all stages are there, and saved"
    )


def test_edges_of_a_silent_relay_move_to_another_at_once_and_all_others_stay() -> None:
    made = fleet(relays={"a": 1.0, "b": 1.0})
    work_until(made, "run", 2)
    before = {(link.low, link.high): (link.id, link.over) for link in last(made, d.Form).links}
    made.happened(e.RelaySilent(relay="a", detail=REFUSED))
    after = {(link.low, link.high): (link.id, link.over) for link in last(made, d.Form).links}
    assert {over for _, over in before.values()} == {"a", "b"} and {over for _, over in after.values()} == {"b"}
    assert all(after[pair] == known for pair, known in before.items() if known[1] == "b")
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_edges_that_work_stay_although_the_only_relay_seems_silent() -> None:
    made = fleet(relays={"a": 1.0})
    work_until(made, "run", 2)
    made.happened(e.RelaySilent(relay="a", detail=REFUSED))
    assert made.state.phase == "run"
    made.behave()
    assert made.ending == d.Finish(outcome="finished")


def test_a_relay_is_silent_after_three_probes_in_a_row_and_answers_with_the_first() -> None:
    watch = RelayWatch({"a": "127.0.0.1:7"}, str)
    found = [
        watch.judge(Probed("a", float(t), error)) for t, error in enumerate(["no", "no", "", "no", "no", "no", "no"])
    ]
    assert found == [*[None] * 5, e.RelaySilent(relay="a", detail="127.0.0.1:7: no"), None]
    assert watch.judge(Probed("a", 7.0, "")) == e.RelayAnswers(relay="a")
    assert list(watch.news(10.0, {"a": REFUSED})) == []
    assert watch.judge(Probed("a", 9.0, "")) is None, "a worker found it silent while this probe was under way"
    assert watch.judge(Probed("a", 10.5, "")) == e.RelayAnswers(relay="a")


def test_workers_that_take_long_to_start_are_told_of_again_and_again_but_not_often() -> None:
    made, starts = fleet(), Starts(FRESH_S)
    starts.note(0.0, made.run)
    reports = {t: told for t in range(200) if (told := starts.report(float(t), made.run))}
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
        made.happened(not_answered(made))
        made.expire_grace()
    made.stop(prompt=True)
    made.stop_waits_no_longer()
    made.behave()
    assert made.ending is not None and made.ending.outcome == "stopped"
