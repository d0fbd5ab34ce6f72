from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.facts.decisions import (
    Cleared,
    Finish,
    Form,
    Keep,
    Member,
    RunStep,
    Seal,
    SlowPartFound,
    Spawn,
    Unrecoverable,
)
from planaria.control.facts.events import (
    EdgeBroken,
    FaultInjected,
    HostLeft,
    Linked,
    RelayAnswers,
    RelaySilent,
    StopOverdue,
    StopRequested,
    WorkerFailed,
    WorkerJoined,
    WorkerLost,
    WorkersStarting,
    ZombieIgnored,
)
from planaria.control.log.reader import read_run
from planaria.control.log.run_record import RunRecord, ValidationMetric
from planaria.report.observe.progress import NoProgress, Progress
from planaria.report.observe.tally import RunTally
from planaria.report.run.event_lines import Narrator
from planaria.report.run.repeats import Repeats
from support.command_line import Terminal
from support.report.synthetic_run import Synthesis


def replay(record: RunRecord, progress: NoProgress) -> None:
    """The run as the controller would have shown it: decisions, events and metrics in time order."""
    metrics = [(metric.t, metric) for metric in record.metrics]
    progress.start(record.config.train.steps, 0)
    for t, fact in record.history:
        while metrics and metrics[0][0] <= t:
            progress.on_metric(metrics.pop(0)[1])
        progress.on_fact(t, fact)
    for _, metric in metrics:
        progress.on_metric(metric)
    progress.stop()


def test_plain_lines(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    record = read_run(Synthesis(tmp_path).write())
    validations = [metric for metric in record.metrics if isinstance(metric, ValidationMetric)]
    replay(record, Progress(stream))
    stream.seek(0)
    lines = stream.read().splitlines()
    assert all(line.isprintable() for line in lines)
    assert [line.split()[1] for line in lines if "/40" in line] == [f"{n}/40" for n in range(4, 41, 4)]
    faults = [line for line in lines if "/40" not in line]
    assert faults == [
        "step 12  ⚡ SIGKILL sent to worker w2 (stage 2), during a forward",
        "step 12  ✗ worker w2 (stage 2) lost: connection closed (reset by peer)",
        "step 12  ✓ stage 2 rebuilt in w5 from stages 1, 3 (checkfree) in 0.14 s",
        "step 27  ⚡ SIGKILL sent to worker w3 (stage 3), during a forward",
        "step 27  ✗ worker w3 (stage 3) lost: connection closed (reset by peer)",
        "step 27  ✓ stage 3 rebuilt in w6 from stages 2, 4 (checkfree) in 0.14 s",
    ]
    assert "tokens/s" in lines[-1] and "5 workers, 1 spare" in lines[-1]
    steps = [re.search(r"validation \d\.\d+ \(step (\d+)\)", line) for line in lines if "/40" in line]
    reported = {step[1] for step in steps if step}
    assert steps[-1] and len(reported) > 1 and reported <= {str(metric.step) for metric in validations}


def test_tenths_are_reported_again_after_a_rollback(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    replay(read_run(Synthesis(tmp_path, deaths={27: 3}, rollbacks={27: 20}).write()), Progress(stream))
    stream.seek(0)
    reported = [line.split()[1] for line in stream.read().splitlines() if "/40" in line]
    assert reported == [f"{n}/40" for n in (4, 8, 12, 16, 20, 24, 24, 28, 32, 36, 40)]


def test_a_process_in_the_background_of_a_terminal_shows_lines_only(tmp_path: Path) -> None:
    plain, terminal = io.StringIO(), Terminal()
    record = read_run(Synthesis(tmp_path).write())
    replay(record, Progress(plain))
    replay(record, Progress(terminal, bar=False))
    assert terminal.getvalue() == plain.getvalue() != ""


def test_a_terminal_gets_a_bar_and_the_same_lines(tmp_path: Path) -> None:
    stream = Terminal()
    replay(read_run(Synthesis(tmp_path).write()), Progress(stream))
    assert "✓ stage 2 rebuilt in w5 from stages 1, 3" in stream.getvalue()
    assert "step 40/40" in stream.getvalue()


def test_a_stream_that_cannot_encode_a_sign_gets_question_marks(tmp_path: Path) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    replay(read_run(Synthesis(tmp_path).write()), Progress(stream))
    stream.seek(0)
    assert "step 12  ? stage 2 rebuilt" in stream.read()


def line_texts(*facts: object) -> list[str]:
    narrator = Narrator()
    lines = [narrator.describe(float(t), fact) for t, fact in enumerate(facts)]  # type: ignore[arg-type]
    return [line.text for line in lines if line]


def form(outcome: str, step: int = 5) -> Form:
    members = [Member(node=0, stage=0, worker="a", source=Keep()), Member(node=1, stage=1, worker="b", source=Keep())]
    return Form(generation=2, step=step, outcome=outcome, members=members, links=[])  # type: ignore[arg-type]


EDGE = EdgeBroken(worker="a", node=1, peer=0, generation=1, detail="timeout")
UP = [Linked(worker=worker, node=n, stage=n, generation=2, link_s=0.1) for n, worker in enumerate("ab")]
STARTING = WorkersStarting(workers=["w0", "w2"], ready=3, waited_s=10.2, limit_s=120.0)


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ([EDGE, form("relinked"), *UP], "broken edge 0–1 replaced"),
        ([form("rolled back")], "rolled back to step 5"),
        ([WorkerLost(worker="s", incarnation=0, cause="exit", detail="")], "worker s (spare) lost: process ended"),
        (
            [FaultInjected(worker="b", node=1, signal="stop", step=3, moment="")],
            "stop sent to worker b (stage 1)",
        ),
        ([Unrecoverable(lost=[2, 1], reason="neighbours")], "stages 1, 2 cannot be rebuilt: neighbours"),
        ([Unrecoverable(lost=[], reason="20 in a row")], "the run cannot continue: 20 in a row"),
        ([Seal(step=5, folder="f", stages=[0, 3], partial=True)], "the remaining stages 0, 3 were saved in f"),
        ([Seal(step=5, folder="f", stages=[0, 3])], None),
        (
            [form("started"), WorkerFailed(worker="b", stage=1, generation=1, detail="disk full")],
            "worker b (stage 1) failed: disk full",
        ),
        (
            [ZombieIgnored(worker="b", incarnation=1, report="ready")],
            "worker b (incarnation 1) woke up and was ignored",
        ),
        (
            [STARTING],
            "waiting for w0 and w2 to start, for 10 s; 3 others are ready; a start may take 120 s "
            "(fleet.start_timeout_s)",
        ),
        ([StopOverdue(detail="step 3 was dropped")], "the stop request timed out: step 3 was dropped"),
        ([StopRequested(reason="Ctrl-C")], "will stop at the next whole step: Ctrl-C"),
        ([RunStep(generation=1, step=2)], None),
    ],
)
def test_every_kind_of_problem_has_a_line(facts: list[object], line: str | None) -> None:
    assert line_texts(*facts) == ([] if line is None else [line])


def test_an_edge_is_not_reported_replaced_before_it_is_open() -> None:
    """Each of these once came as "broken edge … replaced" every few seconds, though nothing answered."""

    def broken(generation: int, **printed: str) -> EdgeBroken:
        return EdgeBroken(worker="a", node=1, peer=0, generation=generation, detail="", **printed)

    refused = {"cause": "could not be opened: Connection refused"}
    first = broken(1, cause="connection closed")
    assert (
        line_texts(first, form("relinked"), *[broken(2, **refused)] * 9)
        == ["edge 0–1 still broken: could not be opened: Connection refused"] * 3
    )
    silent = broken(2, cause="the relay 127.0.0.1:7 did not answer (Connection refused)", relay="north")
    answers = RelayAnswers(relay="north")
    assert line_texts(
        first, form("relinked"), silent, silent, RelaySilent(relay="north", detail="timed out"), answers
    ) == [
        "relay north does not answer: the relay 127.0.0.1:7 did not answer (Connection refused)",
        "relay north answers again",
    ]


def test_a_disconnected_machine_loses_its_workers_once() -> None:
    """One is lost, and started there again before the machine's own connection ends."""
    joined, started = WorkerJoined(worker="w5", incarnation=1, pid=1), Spawn(worker="w5", incarnation=1, host="g1")
    lost = WorkerLost(worker="w5", incarnation=1, cause="heartbeat", detail="silent for 2 s")
    again = Spawn(worker="w5", incarnation=2, host="g1")
    left = HostLeft(host="g1", detail="silent for 4 s")
    removed = WorkerLost(worker="w5", incarnation=2, cause="exit", detail="machine g1: silent for 4 s")
    facts = (started, joined, lost, again, left, removed)
    assert line_texts(*facts) == [
        "worker w5 (spare) lost: no heartbeat (silent for 2 s)",
        "machine g1 takes no more workers: silent for 4 s",
    ]
    tally = RunTally()
    for t, fact in enumerate(facts):
        tally.apply(float(t), fact)
    assert sum(tally.lost.values()) == 1


def test_repeated_verdicts_are_rate_limited() -> None:
    """A hundred within 90 s, such as under a quota of a fifth of a core."""
    about = {"fault": "flaky link", "nodes": [1, 2], "replica": 0, "step": 1}
    slow = SlowPartFound.model_validate(
        about | {"workers": ["a", "b"], "seconds": 1.0, "initial_s": 0.1, "peer_median_s": 0.1}
    )
    cleared, narrator = Cleared.model_validate(about), Narrator()
    facts = [(0.9 * n, fact) for n, fact in enumerate([slow, cleared] * 50)]
    lines = [line.text for t, fact in facts if (line := narrator.describe(t, fact))]
    assert len(lines) == 6
    assert lines[3].endswith("is no longer flaky (64 more in 60 s not shown)")
    (rest,) = [line for line in [narrator.describe(95.0, Finish(outcome="stopped"))] if line]
    assert rest.text.startswith("flaky link: verdicts: ") and rest.text.endswith("not shown")


def test_nothing_in_a_detail_moves_the_cursor() -> None:
    (text,) = line_texts(WorkerLost(worker="\x1b[2Jw", incarnation=0, cause="exit", detail="a\nb\r"))
    assert text.isprintable()


def shown(repeats: Repeats, times: list[float], subject: str = "link") -> list[str]:
    return [line for t in times if (line := repeats.limit(t, subject, f"at {t:g}")) is not None]


def test_the_first_lines_of_a_window_are_shown_and_the_rest_counted_in_the_next() -> None:
    repeats = Repeats(shown=2, window_s=10)
    assert shown(repeats, [0, 1, 2, 3, 12]) == ["at 0", "at 1", "at 12 (2 more in 10 s not shown)"]
    assert shown(repeats, [13, 25, 31]) == ["at 13"], "the next window is twice as long"
    assert repeats.suppressed() == "link: 2 more in 20 s not shown"


def test_subjects_do_not_disturb_one_another_and_a_quiet_one_is_never_held_back() -> None:
    repeats = Repeats(shown=1, window_s=10)
    assert shown(repeats, [0, 1, 2]) == ["at 0"]
    assert shown(repeats, [0, 20, 40, 60], "worker") == ["at 0", "at 20", "at 40", "at 60"]
    assert repeats.suppressed() == "link: 2 more in 10 s not shown"


@given(st.lists(st.floats(0, 1000), max_size=60).map(sorted), st.integers(1, 4))
def test_every_line_is_shown_or_counted(times: list[float], most: int) -> None:
    repeats = Repeats(shown=most, window_s=30)
    lines = shown(repeats, times)
    counted = sum(int(line.partition("(")[2].split()[0]) for line in lines if "(" in line)
    rest = repeats.suppressed()
    assert len(lines) + counted + (int(rest.split()[1]) if rest else 0) == len(times)
