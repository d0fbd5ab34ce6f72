"""Records of older versions are read under their present names, and written under these."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from planaria import configure
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.registry import Registry
from planaria.control.facts.decisions import DECISION, Decision, Seal
from planaria.control.facts.events import (
    EVENT,
    Event,
    Fact,
    LeaderStarted,
    RoundApplied,
    RoundWaitExpired,
    StageReady,
)
from planaria.control.log.line_format import (
    FORMER_FIELDS,
    FORMER_INNER_FIELDS,
    FORMER_KINDS,
    FORMER_VALUES,
    head_of,
    parse_line,
)
from planaria.exchange.registry import EXCHANGES
from planaria.exchange.robust.rules import RULES
from planaria.runtime.checkpoint.stage_file import StageLabel
from support.command_line import refused

OLD: list[tuple[dict[str, Any], str, object]] = [
    ({"kind": "seal", "step": 2, "folder": "f", "stages": [0], "standings": {"1": {"step": 2}}}, "positions", 2),
    ({"kind": "leave_out", "replica": 0, "generation": 1, "step": 2, "liars": [1], "disputes": []}, "byzantine", [1]),
    ({"kind": "found", "replica": 3}, "kind", "replica_restarted"),
    ({"kind": "turn_away", "host": "g1", "reason": "full"}, "kind", "remove_machine"),
    ({"kind": "send_away", "member": 1, "workers": [], "strikes": 2, "reason": ""}, "kind", "exclude_member"),
    ({"kind": "meet", "round": 0, "members": [], "generations": [], "links": []}, "kind", "begin_round"),
    ({"kind": "introduce", "round": 0, "members": [], "generations": [], "links": []}, "kind", "open_prefetch_links"),
    ({"kind": "cannot", "replica": 0, "lost": [1], "reason": "adjacent"}, "kind", "unrecoverable"),
]


def fact_of(event: dict[str, Any] | None = None, decision: dict[str, Any] | None = None) -> Event | Decision:
    """Return the fact of a line of an older version."""
    return parse_line(json.dumps({"t": 1.0, "event": event, "decision": decision}).encode()).fact


def facts_of(union: Any) -> Iterator[type[Fact]]:
    """Yield the classes of an annotated union."""
    yield from get_args(get_args(union)[0])


@pytest.mark.parametrize(("old", "name", "value"), OLD)
def test_old_decisions_are_read(old: dict[str, Any], name: str, value: object) -> None:
    read = fact_of(decision=old)
    now = getattr(read, name)
    assert (now[1].step if isinstance(read, Seal) else now) == value
    assert DECISION.validate_json(read.model_dump_json()) == read


def test_the_head_of_an_old_line_names_the_present_kind() -> None:
    assert head_of(b'{"t": 1.5, "decision": {"kind":"found","replica":3}}') == (1.5, "replica_restarted")


def test_old_names_lead_to_present_ones() -> None:
    classes = {get_args(c.model_fields["kind"].annotation)[0]: c for c in (*facts_of(Event), *facts_of(Decision))}
    assert set(FORMER_KINDS.values()) <= classes.keys() and not FORMER_KINDS.keys() & classes.keys()
    for kind, names in FORMER_FIELDS.items():
        fields = classes[kind].model_fields.keys()
        assert set(names.values()) <= fields and not names.keys() & fields, kind
    assert all(name in classes[kind].model_fields for kind, name in FORMER_VALUES)
    assert all(any(name in c.model_fields for c in classes.values()) for name in FORMER_INNER_FIELDS)


def test_a_line_that_is_neither_is_reported_as_it_is() -> None:
    with pytest.raises(ValidationError, match="strange"):
        parse_line(b'{"t": 1.0, "event": {"kind": "nobody_joined", "strange": 2}}')


def test_old_events_are_read() -> None:
    read = fact_of({"kind": "stage_ready", "worker": "w", "generation": 0, "stage": 0, "step": 1, "heard": {"1": "ab"}})
    assert isinstance(read, StageReady) and read.received == {1: "ab"}
    lost = {"kind": "leader_started", "term": 2, "pid": 1, "silent_s": 0, "lost_s": 0, "wall_time": 0}
    read = fact_of(lost | {"cause": "machine"})
    assert isinstance(read, LeaderStarted) and read.cause == "silent"


@pytest.mark.parametrize(
    ("old", "name", "value"),
    [
        ({"kind": "nobody_joined", "lacking": 2}, "missing_workers", 2),
        ({"kind": "stop_requested", "reason": "SIGTERM", "prompt": True}, "skip_repairs", True),
    ],
)
def test_old_fields_of_events_are_read(old: dict[str, Any], name: str, value: object) -> None:
    read = fact_of(old)
    assert getattr(read, name) == value and EVENT.validate_json(read.model_dump_json()) == read


def test_old_fields_of_rounds_are_read() -> None:
    waited = fact_of({"kind": "patience_over", "replica": 0, "round": 1, "meeting": True})
    assert isinstance(waited, RoundWaitExpired) and waited.in_round
    applied = {"kind": "round_made", "worker": "w", "node": 0, "stage": 0, "generation": 0, "round": 0}
    read = fact_of(applied | {"blocking_bytes": 1, "prefetched_bytes": 0, "apart": 0.5})
    assert isinstance(read, RoundApplied) and read.spread == 0.5


@pytest.mark.parametrize(
    ("old", "name", "value"),
    [
        ("[fleet]\nown = 2", "local_workers", 2),
        ("[fleet]\nmissed = 9", "missed_heartbeats", 9),
        ('[fleet]\ndiagnose = "tell"', "diagnose", "report"),
        ("[exchange]\ninner = [3]", "steps_between_rounds", (3,)),
        ("[exchange]\nmost = 4", "max_replicas", 4),
        ("[data]\nmost = 400", "max_chars", 400),
        ("[network]\nhourly = 0.2", "hourly_failure_probability", 0.2),
        ("[network]\nstraggle_times = 7.0", "straggle_factor", 7.0),
        ("[routing]\njump = 2", "max_jump", 2),
    ],
)
def test_old_settings_are_read(old: str, name: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "old.toml").write_text(old)
    config = recipe.load(tmp_path / "old.toml", {})
    section = getattr(config, old[1:].partition("]")[0])
    assert getattr(section, name) == value
    assert recipe.parse(config.model_dump_json().replace("missed_heartbeats", "missed"), "config.json") == config


def test_old_flags_and_settings_name_the_present_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"fleet\.own is now fleet\.local_workers"):
        configure("demo", settings={"fleet.own": 2})
    assert "use --fleet.missed_heartbeats" in refused(capsys, "train", "demo", "--fleet.missed", "9")
    assert "--failure-domain DOMAIN" in refused(capsys, "compare", "recovery", "--lost", "machine")


def test_a_record_with_both_names_is_refused() -> None:
    with pytest.raises(ValueError, match="place"):
        StageLabel.model_validate({"stage": 0, "step": 0, "index": 0, "place": 1})


@pytest.mark.parametrize(("registry", "kind"), [(RULES, "median"), (EXCHANGES, "monna")])
def test_old_options_are_read(registry: Registry[Any], kind: str) -> None:
    assert registry.make(kind, {"liars": 2}).byzantine == 2
