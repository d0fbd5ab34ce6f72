"""The text of a line of ``events.jsonl``, and its time and kind without parsing the whole line.

``head_of``, ``kind_of`` and ``notice_of`` rely on the order of the members in lines that :func:`event_line` and
:func:`decision_line` return.
"""

from __future__ import annotations

import json
import re

from pydantic import ValidationError

from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event, Fact
from planaria.control.log.former_lines import KINDS, with_present_names

_HEAD = re.compile(rb'\{"t": (\d+\.\d+), "(?:event|decision)": \{"kind":"(\w+)"')
_REPORT_HEAD = re.compile(rb'\{"kind":"(\w+)"')
_NOTICE = re.compile(rb', "notice": (\d+)\}$')


class HistoryLine(Fact):
    """A line, parsed."""

    t: float
    event: Event | None = None
    decision: Decision | None = None
    notice: int = 0
    """number of the notice that reported the event, in runs with a standby"""

    @property
    def fact(self) -> Event | Decision:
        fact = self.event or self.decision
        assert fact is not None
        return fact

    def model_post_init(self, _: object) -> None:
        if (self.event is None) == (self.decision is None):
            raise ValueError("a line holds either an event or a decision")


def parse_line(text: bytes) -> HistoryLine:
    """Parse a line of this or an older version.

    :raises ValidationError: if it is neither.
    """
    try:
        return HistoryLine.model_validate_json(text)
    except ValidationError as error:
        try:
            return HistoryLine.model_validate_json(json.dumps(with_present_names(json.loads(text))))
        except (ValueError, AttributeError):  # a ValidationError is a ValueError
            raise error from None


def event_line(t: float, event: Event, notice: int = 0) -> str:
    """Return the line of an event at time ``t``; ``notice``: number of the supervisor's notice that reported it."""
    numbered = f', "notice": {notice}' if notice else ""
    return f'{{"t": {t!r}, "event": {event.model_dump_json()}{numbered}}}'


def decision_line(t: float, decision: Decision) -> str:
    """Return the line of a decision at time ``t``."""
    return f'{{"t": {t!r}, "decision": {decision.model_dump_json()}}}'


def head_of(line: bytes) -> tuple[float, str] | None:
    """Return time and kind of a line; None if it must be parsed, such as one written by another program."""
    head = _HEAD.match(line)
    if head is None:
        return None
    kind = head[2].decode()
    return float(head[1]), KINDS.get(kind, kind)


def kind_of(line: bytes) -> str:
    """Return the kind of a line; "" if it is not known without parsing."""
    head = head_of(line)
    return "" if head is None else head[1]


def notice_of(line: bytes) -> int:
    """Return the number of the supervisor's notice in an event's line; 0: none."""
    numbered = _NOTICE.search(line)
    return 0 if numbered is None else int(numbered[1])


def report_kind_of(report: bytes) -> str:
    """Return the kind of a worker's report in JSON, as pydantic writes it; "" if it is not known without parsing."""
    head = _REPORT_HEAD.match(report)
    return "" if head is None else head[1].decode()
