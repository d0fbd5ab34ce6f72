"""Records of peers."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from planaria.swarm.board.message import Completion
from planaria.swarm.checks.defence import DefenceReport
from planaria.swarm.learning.advantages import round_advantages
from planaria.swarm.learning.learner import UpdateResult
from planaria.swarm.peer.completion_intake import SentCompletion
from planaria.swarm.records.lines import (
    UNKNOWN_PEERS,
    Finished,
    Log,
    PeerStarted,
    PoisonRecord,
    RoundDone,
    SampleRecord,
    follow,
    read_log,
    read_poison,
    read_samples,
)
from planaria.swarm.records.round_records import round_record, sample_records
from planaria.swarm.report.swarm_report import influence_figure
from support.swarm.tiny_swarm import case

START = PeerStarted(name="p0", id="00", attack="none", model="tiny", parameters=1, vocab=257, first_round=0)


def test_records_are_read_back(tmp_path: Path) -> None:
    file = tmp_path / "deep" / "log.jsonl"
    end = Finished(time=2.0, reason="a line\nof \u2028 trouble")
    log = Log(file)
    log.append(START, end)
    log.append()
    assert read_log(file) == [START, end]


def test_a_missing_log_is_empty(tmp_path: Path) -> None:
    assert read_log(tmp_path / "none") == list(read_samples(tmp_path / "none")) == []
    assert list(read_poison(tmp_path / "none")) == [] and follow(tmp_path / "none")() == []


def test_a_partial_line_is_read_later(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    news = follow(file)
    line = START.model_dump_json() + "\n"
    file.write_text(line + line[:20])
    assert read_log(file) == [START] and news() == [START] and news() == []
    file.write_text(line + line)
    assert news() == [START] and read_log(file) == [START, START]


def test_a_partial_line_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "log.jsonl"
    line = START.model_dump_json() + "\n"
    file.write_text(line + line[:20])
    news = follow(file)
    assert news() == [START]
    Log(file).append(Finished(time=1.0))
    assert read_log(file) == [START, Finished(time=1.0)] and news() == [Finished(time=1.0)]
    long = json.dumps({"x": "y" * 200_000}) + "\n"
    for text, left in [(long + "z" * 100_000, long), (line[:20], ""), ("", ""), (long, long)]:
        file.write_text(text)
        Log(file)
        assert file.read_text() == left


@pytest.mark.parametrize(
    ("read", "notes"),
    [
        (read_poison, [PoisonRecord(round=n, problem=2, index=3) for n in range(3)]),
        (
            read_samples,
            [SampleRecord(peer="a", round=0, problem=1, index=n, reward=1.0, passed=["x"]) for n in range(3)],
        ),
    ],
)
def test_samples_and_poison_are_read_back(tmp_path: Path, read: Callable[[Path], Any], notes: list[BaseModel]) -> None:
    Log(tmp_path / "notes").append(*notes)
    assert list(read(tmp_path / "notes")) == notes


def judged() -> DefenceReport:
    texts = [case("me", 1, n, reward=n % 2) for n in range(2)] + [case("x", 1, n, reward=1.0) for n in range(2)]
    found = [replace(c, passed=("support",)) for c in texts[:3]]
    found.append(replace(texts[3], layer="support", reason="token 1"))
    return DefenceReport(found, {"support": {"me": (2, 0), "x": (2, 1)}}, {"judge": "no eyes"}, {"x": "much"})


TURNED = [
    SentCompletion(peer, 4, problem, index, Completion(text="", ended=True)).rejection(reason)
    for peer, problem, index, reason in (("x", 9, 0, "problem 9"), ("x", 1, 5, "too long"), ("y", 1, 0, "too long"))
]
EMPTY: dict[str, Any] = {"seconds": {}, "rejected_messages": {}, "missing": [], "weights": ""}


def test_every_received_completion_has_one_record() -> None:
    report = judged()
    taken = round_advantages(report.accepted, "horizontal", True)
    notes = sample_records(report, taken, 4) + TURNED
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
def test_round_records_survive_any_loss_value(tmp_path: Path, value: float) -> None:
    report = judged()
    taken = round_advantages(report.accepted, "horizontal", True)
    learned = UpdateResult(value, value, {"ratio": value})
    record = round_record(4, "me", report, taken, learned, TURNED, **EMPTY)
    assert record.reward == 0.5 and record.sent == {"me": 2, "x": 2} and record.accepted == {"me": 2, "x": 1}
    assert record.rejected_unread == {"x": "problem 9", "y": "too long"}, "the first of each"
    assert (
        record.layers["support"]["x"].rejected == 1
        and record.off
        and record.quarantined
        and record.training_completions == 3
    )
    Log(tmp_path / "log").append(record)
    (again,) = read_log(tmp_path / "log")
    assert isinstance(again, RoundDone) and repr(again) == repr(record)


def empty_round(me: str, learned: UpdateResult) -> RoundDone:
    return round_record(0, me, DefenceReport([]), round_advantages([], "horizontal", True), learned, **EMPTY)


@pytest.mark.parametrize("name", ["training_groups", "lessons"])
def test_a_round_record_with_a_former_name_is_read(tmp_path: Path, name: str) -> None:
    fields = empty_round("me", UpdateResult()).model_dump(mode="json")
    del fields["training_completions"]
    (tmp_path / "log").write_text(json.dumps(fields | {name: 3}) + "\n")
    (record,) = read_log(tmp_path / "log")
    assert isinstance(record, RoundDone) and record.training_completions == 3


def test_a_peer_without_completions_has_zero_reward() -> None:
    record = empty_round("me", UpdateResult())
    assert record.reward == 0.0 and record.training_completions == 0


def test_influence_of_unknown_peers_is_plotted() -> None:
    record = empty_round("id0", UpdateResult(influence={"id0": 0.75, UNKNOWN_PEERS: 0.25}))
    lines = influence_figure({"p0": [record]}, {"id0": "p0"}).data
    assert [(line.name, list(line.y)) for line in lines] == [("newcomers", [0.25]), ("p0", [0.75])]
    alone = record.model_copy(update={"influence": {"id0": 1.0}})
    assert [line.name for line in influence_figure({"p0": [alone]}, {"id0": "p0"}).data] == ["p0"]
