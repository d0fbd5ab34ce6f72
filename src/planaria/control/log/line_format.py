"""Format of the lines of ``events.jsonl``: serialise an event or decision, parse a line, or read its head only.

:func:`head_of`, :func:`kind_of` and :func:`notice_of` do not parse the line; they rely on the member order of
:func:`event_line` and :func:`decision_line`. :func:`parse_line` also accepts the names that older versions wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from planaria.control.facts.decisions import Decision
from planaria.control.facts.events import Event, Fact

_HEAD = re.compile(rb'\{"t": (\d+\.\d+), "(?:event|decision)": \{"kind":"(\w+)"')
_REPORT_HEAD = re.compile(rb'\{"kind":"(\w+)"')
_NOTICE = re.compile(rb', "notice": (\d+)\}$')

FORMER_KINDS = {
    "blamed": "slow_part_found",
    "cannot": "unrecoverable",
    "found": "replica_restarted",
    "gauged": "worker_measurements",
    "introduce": "open_prefetch_links",
    "meet": "begin_round",
    "nobody_joined": "join_timed_out",
    "offer_heard": "update_received",
    "offer_refused": "update_rejected",
    "offers_counted": "updates_weighted",
    "patience_over": "round_wait_expired",
    "relieve": "hand_over_slow_stage",
    "round_made": "round_applied",
    "send_away": "exclude_member",
    "turn_away": "remove_machine",
}
"""former kind → present kind"""
FORMER_FIELDS: Mapping[str, Mapping[str, str]] = {
    "edge_broken": {"since_s": "wait_began_s"},
    "join_timed_out": {"lacking": "missing_workers"},
    "leave_out": {"liars": "byzantine"},
    "message_compressed": {"lost": "relative_error", "off": "estimate_error", "owed": "residual"},
    "replan": {"ways": "links"},
    "round_applied": {"apart": "spread"},
    "round_wait_expired": {"meeting": "in_round"},
    "run_started": {
        "columns": "nodes_by_replica",
        "copies_first": "start_from_first_worker",
        "load": "checkpoint_of_stage",
        "own": "local_workers",
        "pairs": "extra_edges",
        "recalled": "snapshot_step",
        "remembering": "snapshot_nodes",
        "standings": "positions",
        "work": "stage_work",
    },
    "seal": {"standings": "positions"},
    "settle": {"liars": "byzantine"},
    "slow_part_found": {"past": "initial_s", "usual": "peer_median_s"},
    "stage_ready": {"heard": "received"},
    "stop_requested": {"prompt": "skip_repairs"},
    "zombie_ignored": {"said": "report"},
}
"""present kind → former field → present field"""
FORMER_INNER_FIELDS: Mapping[str, Mapping[str, str]] = {
    "links": {"over": "relay"},
    "recut": {"said": "notes"},
    "unequal": {"odd": "differing"},
}
"""field with a record or a list of records → former field of these → present field"""
FORMER_VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {("leader_started", "cause"): {"machine": "silent"}}
"""(present kind, field) → former value → present value"""


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
            return HistoryLine.model_validate_json(json.dumps(_with_present_names(json.loads(text))))
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
    return float(head[1]), FORMER_KINDS.get(kind, kind)


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


def _with_present_names(line: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed line with present names; a line of this version is returned equal."""
    return {name: _fact(value) if name in ("event", "decision") else value for name, value in line.items()}


def _fact(fact: Any) -> Any:
    if not isinstance(fact, dict):
        return fact
    kind = str(fact.get("kind"))
    kind = FORMER_KINDS.get(kind, kind)
    renamed = _renamed({**fact, "kind": kind}, FORMER_FIELDS.get(kind, {}))
    for name, value in renamed.items():
        if (fields := FORMER_INNER_FIELDS.get(name)) is not None:
            several = isinstance(value, list)
            renamed[name] = [_renamed(item, fields) for item in value] if several else _renamed(value, fields)
        elif (values := FORMER_VALUES.get((kind, name))) is not None:
            renamed[name] = values.get(value, value)
    return renamed


def _renamed(record: Any, names: Mapping[str, str]) -> Any:
    """Return a record with its former fields renamed, unless it has the present ones too."""
    if not isinstance(record, dict):
        return record
    return {name if names.get(name) in record else names.get(name, name): value for name, value in record.items()}
