"""The report on machines that joined and left."""

from __future__ import annotations

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.report.run.event_lines import Narrator
from planaria.report.run.stage_holders import MachineStay, machine_section, machine_stays
from support.report import synthetic_replicas as r
from support.report.holder_facts import HERE

FOUNDED: r.Facts = [
    (13.0, d.ReplicaRestarted(replica=3)),
    (13.0, r.form(3, "gh", 2, "recovered", rebuilt={0: [0], 1: [1]})),
]
LEAVES: r.Facts = [
    (20.0, e.HostLeft(host="g1", detail="leaves (SIGTERM)")),
    (20.0, e.WorkerLeaving(worker="g", incarnation=1, detail="SIGTERM")),
    (20.0, e.WorkerLeaving(worker="h", incarnation=1, detail="SIGTERM")),
]


def handed(worker: str, by: str) -> d.Form:
    """Stage 0 of replica 0 changes hands."""
    form = r.form(0, f"{worker}b", 3, "handed over")
    first = form.members[0].model_copy(update={"source": d.Handover(worker=by)})
    return form.model_copy(update={"members": [first, form.members[1]]})


def test_a_stay_from_its_beginning_to_its_end() -> None:
    over: r.Facts = [
        (20.1, d.Disband(replica=3, workers=["g", "h"], reason="the machine of its workers leaves")),
        (20.1, d.Release(worker="g")),
        (20.1, d.Release(worker="h")),
        (20.2, r.lost("g")),
        (20.2, r.lost("h")),
    ]
    record = r.record(HERE + FOUNDED + LEAVES + over)
    (stay,) = machine_stays(record)
    assert stay == MachineStay("g1", "lab, pid 7", 2, 12.0, 20.0, "leaves (SIGTERM)", {6, 7}, handed_over=0, lost=0)
    (section,) = machine_section(record)
    assert "lab, pid 7" in section and "stages 0, 1 of replica 3" in section and ">10.0<" in section


def test_handed_over_and_lost_stages_are_counted_separately() -> None:
    facts: r.Facts = [
        (14.0, r.lost("a")),
        (14.1, r.form(0, "gb", 2, "recovered", rebuilt={0: [2]})),
        (15.0, r.lost("h")),
        *LEAVES,
        (20.1, handed("a", by="g")),
    ]
    (stay,) = machine_stays(r.record(HERE + facts))
    assert (stay.held, stay.handed_over, stay.lost) == ({0}, 1, 0), "h had no stage to lose"
    (stay,) = machine_stays(r.record(HERE + FOUNDED + [(15.0, r.lost("h"))]))
    assert (stay.held, stay.handed_over, stay.lost, stay.until) == ({6, 7}, 0, 1, None)


def test_a_resumed_run_counts_its_machines_again() -> None:
    record = r.record(HERE + [(30.0 + t, fact) for t, fact in HERE])
    assert [(stay.host, stay.since) for stay in machine_stays(record)] == [("g1", 12.0), ("g1", 42.0)]


def test_a_run_without_joined_machines_has_no_section() -> None:
    record = r.record(HERE[:9])
    assert list(machine_section(record)) == []


def test_joining_and_leaving_machines_have_lines() -> None:
    away: r.Facts = [
        (20.1, handed("f", by="a")),
        (20.2, r.linked(0, 0, "f", 3)),
        (20.3, d.Release(worker="g")),
        (20.4, r.lost("g")),
        (20.5, d.RemoveMachine(host="g1", reason="its disk is full")),
    ]
    narrator = Narrator()
    reported = [line.text for t, fact in HERE + LEAVES + away if (line := narrator.describe(t, fact)) is not None]
    assert reported == [
        "machine g1 (lab, pid 7) joined with 2 workers",
        "machine g1 takes no more workers: leaves (SIGTERM)",
        "stage 0 of replica 0 handed over unchanged by a to f",
        "worker g left",
        "machine g1 rejected: its disk is full",
    ]
