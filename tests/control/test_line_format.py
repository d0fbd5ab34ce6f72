"""Time and kind of a log line are read from its first characters, as the writer wrote them."""

from __future__ import annotations

import json

import pytest

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.line_format import (
    decision_line,
    event_line,
    head_of,
    kind_of,
    notice_of,
    parse_line,
    report_kind_of,
)

LOST = e.WorkerLost(worker="w2", incarnation=1, cause="connection", detail='a "quoted" detail, "notice": 7}')


@pytest.mark.parametrize("notice", [0, 12])
def test_an_event_is_recognised_by_its_first_characters(notice: int) -> None:
    line = event_line(12.5, LOST, notice)
    assert json.loads(line)["event"]["detail"] == LOST.detail
    assert head_of(line.encode()) == (12.5, "worker_lost") and kind_of(line.encode()) == "worker_lost"
    assert notice_of(line.encode()) == notice


def test_a_decision_is_recognised_by_its_first_characters() -> None:
    line = decision_line(3.0, d.Finish(outcome="finished", reason="")).encode()
    assert head_of(line) == (3.0, "finish") and notice_of(line) == 0


@pytest.mark.parametrize("block", [None, 7])
def test_only_a_reserved_block_is_in_the_line_of_a_commit(block: int | None) -> None:
    commit = d.Commit(generation=1, step=2, progress=2, next_block=block)
    line = decision_line(3.0, commit)
    assert ("next_block" in line) == (block is not None) and parse_line(line.encode()).fact == commit


@pytest.mark.parametrize("text", ['{"event": {"kind":"finish"}, "t": 1.0}', "", "{"])
def test_another_layout_must_be_parsed(text: str) -> None:
    assert head_of(text.encode()) is None and kind_of(text.encode()) == ""


def test_a_report_is_recognised_by_its_first_characters() -> None:
    assert report_kind_of(e.Heartbeat(doing="orders").model_dump_json().encode()) == "heartbeat"
    assert report_kind_of(b'{"worker": 1}') == ""
