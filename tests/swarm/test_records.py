"""What peers note, and what is read of it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_swarm import case

from planaria.swarm.checks.defence import Report
from planaria.swarm.intake import Turned
from planaria.swarm.learning.learner import Learned
from planaria.swarm.learning.lessons import lessons
from planaria.swarm.records.lines import (
    NEWCOMERS,
    Finished,
    Log,
    PoisonRecord,
    RoundDone,
    SampleRecord,
    Started,
    follow,
    read_log,
    read_poison,
    read_samples,
)
from planaria.swarm.records.noting import round_record, sample_records
from planaria.swarm.report.swarm_report import influence_figure

START = Started(name="p0", id="00", attack="none", model="tiny", parameters=1, vocab=257, first_round=0)


def test_what_was_noted_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "log.jsonl"
    end = Finished(time=2.0, reason="a line\nof \u2028 trouble")
    log = Log(file)
    log.note(START, end)
    log.note()
    assert read_log(file) == [START, end]


def test_there_may_be_nothing_to_read_yet(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none") == list(read_samples(tmp_path / "none")) == []
    assert list(read_poison(tmp_path / "none")) == [] and follow(tmp_path / "none")() == []


def test_a_line_that_is_still_being_written_is_left_for_later(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    news = follow(file)
    line = START.model_dump_json() + "\n"
    file.write_text(line + line[:20])
    assert read_log(file) == [START] and news() == [START] and news() == []
    file.write_text(line + line)
    assert news() == [START] and read_log(file) == [START, START]


def test_a_line_that_its_writer_never_finished_does_not_spoil_the_next(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    line = START.model_dump_json() + "\n"
    file.write_text(line + line[:20])
    news = follow(file)
    assert news() == [START]
    Log(file).note(Finished(time=1.0))
    assert read_log(file) == [START, Finished(time=1.0)] and news() == [Finished(time=1.0)]
    file.write_text(line[:20])
    Log(file).note(START)
    assert read_log(file) == [START]


def test_poison_is_read_again(tmp_path: Path) -> None:
    notes = [PoisonRecord(round=n, problem=2, index=3) for n in range(3)]
    Log(tmp_path / "poison").note(*notes)
    assert list(read_poison(tmp_path / "poison")) == notes


def judged() -> Report:
    texts = [case("me", 1, n, reward=n % 2) for n in range(2)] + [case("x", 1, n, reward=1.0) for n in range(2)]
    found = [replace(c, passed=("support",)) for c in texts[:3]]
    found.append(replace(texts[3], layer="support", reason="token 1"))
    return Report(found, {"support": {"me": (2, 0), "x": (2, 1)}}, {"judge": "no eyes"}, {"x": "much"})


TURNED = [Turned("x", 9, 0, "problem 9"), Turned("x", 1, 5, "too long"), Turned("y", 1, 0, "too long")]


def test_every_completion_that_came_is_noted_once() -> None:
    report = judged()
    taken = lessons(report.accepted, "horizontal", True)
    notes = sample_records(report, taken, TURNED, 4)
    assert [(n.peer, n.problem, n.index, n.layer) for n in notes] == [
        ("me", 1, 0, ""),
        ("me", 1, 1, ""),
        ("x", 1, 0, ""),
        ("x", 1, 1, "support"),
        ("x", 9, 0, "schedule"),
        ("x", 1, 5, "schedule"),
        ("y", 1, 0, "schedule"),
    ]
    assert all(note.round == 4 for note in notes)
    assert [note.advantage is None for note in notes] == [False, False, False, True, True, True, True]
    assert sum(note.advantage or 0.0 for note in notes) == pytest.approx(0)


@pytest.mark.parametrize("value", [1.5, math.inf, math.nan])
def test_a_round_is_summed_up_and_can_be_read_again_whatever_the_loss(tmp_path: Path, value: float) -> None:
    report = judged()
    taken = lessons(report.accepted, "horizontal", True)
    learned = Learned(value, value, {"ratio": value})
    record = round_record(4, {"read": 0.12345678}, "me", TURNED, {"z": "forged"}, ["w"], report, taken, learned, "ff")
    assert record.reward == 0.5 and record.sent == {"me": 2, "x": 2} and record.accepted == {"me": 2, "x": 1}
    assert record.turned == {"x": "problem 9", "y": "too long"}, "the first of each"
    assert record.layers["support"]["x"].refused == 1 and record.off and record.aside and record.lessons == 3
    Log(tmp_path / "log").note(record)
    (again,) = read_log(tmp_path / "log")
    assert isinstance(again, RoundDone) and repr(again) == repr(record)


def test_a_peer_of_whom_nothing_came_had_no_reward() -> None:
    record = round_record(0, {}, "me", [], {}, [], Report([]), lessons([], "horizontal", True), Learned(), "")
    assert record.reward == 0.0 and record.lessons == 0


def test_samples_are_read_again(tmp_path: Path) -> None:
    notes = [SampleRecord(peer="a", round=0, problem=1, index=n, reward=1.0, passed=["x"]) for n in range(3)]
    Log(tmp_path / "samples").note(*notes)
    assert list(read_samples(tmp_path / "samples")) == notes


def test_what_strangers_pull_together_is_drawn_beside_the_peers() -> None:
    learned = Learned(influence={"id0": 0.75, NEWCOMERS: 0.25})
    record = round_record(0, {}, "id0", [], {}, [], Report([]), lessons([], "horizontal", True), learned, "")
    lines = influence_figure({"p0": [record]}, {"id0": "p0"}).data
    assert [(line.name, list(line.y)) for line in lines] == [("newcomers", [0.25]), ("p0", [0.75])]
    alone = record.model_copy(update={"influence": {"id0": 1.0}})
    assert [line.name for line in influence_figure({"p0": [alone]}, {"id0": "p0"}).data] == ["p0"]
