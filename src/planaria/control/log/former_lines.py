"""Lines that older versions wrote, with their events, decisions and fields under the present names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KINDS = {
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
FIELDS: Mapping[str, Mapping[str, str]] = {
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
INNER_FIELDS: Mapping[str, Mapping[str, str]] = {
    "links": {"over": "relay"},
    "recut": {"said": "notes"},
    "unequal": {"odd": "differing"},
}
"""field with a record or a list of records → former field of these → present field"""
VALUES: Mapping[tuple[str, str], Mapping[str, str]] = {("leader_started", "cause"): {"machine": "silent"}}
"""(present kind, field) → former value → present value"""


def with_present_names(line: dict[str, Any]) -> dict[str, Any]:
    """Return a parsed line with present names; a line of this version is returned equal."""
    return {name: _fact(value) if name in ("event", "decision") else value for name, value in line.items()}


def _fact(fact: Any) -> Any:
    if not isinstance(fact, dict):
        return fact
    kind = str(fact.get("kind"))
    kind = KINDS.get(kind, kind)
    renamed = _renamed({**fact, "kind": kind}, FIELDS.get(kind, {}))
    for name, value in renamed.items():
        if (fields := INNER_FIELDS.get(name)) is not None:
            several = isinstance(value, list)
            renamed[name] = [_renamed(item, fields) for item in value] if several else _renamed(value, fields)
        elif (values := VALUES.get((kind, name))) is not None:
            renamed[name] = values.get(value, value)
    return renamed


def _renamed(record: Any, names: Mapping[str, str]) -> Any:
    """Return a record with its former fields renamed, unless it has the present ones too."""
    if not isinstance(record, dict):
        return record
    return {name if names.get(name) in record else names.get(name, name): value for name, value in record.items()}
