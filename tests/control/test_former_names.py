"""Records of older versions are read under their present names, and written under these."""

from __future__ import annotations

import json
from typing import Any

import pytest

from planaria.config.registry import Registry
from planaria.control.decisions import DECISION, Seal
from planaria.control.events import EVENT, StageReady
from planaria.exchange.registry import EXCHANGES
from planaria.exchange.robust.rules import RULES
from planaria.runtime.checkpoint.stage_file import StageLabel

OLD: list[tuple[dict[str, Any], str, object]] = [
    ({"kind": "seal", "step": 2, "folder": "f", "stages": [0], "standings": {"1": {"step": 2}}}, "positions", 2),
    ({"kind": "leave_out", "replica": 0, "generation": 1, "step": 2, "liars": [1], "disputes": []}, "byzantine", [1]),
    ({"kind": "found", "replica": 3}, "replica", 3),
]


@pytest.mark.parametrize(("old", "name", "value"), OLD)
def test_old_decisions_are_read(old: dict[str, Any], name: str, value: object) -> None:
    read = DECISION.validate_json(json.dumps(old))
    now = getattr(read, name)
    assert (now[1].step if isinstance(read, Seal) else now) == value
    assert "standings" not in read.model_dump() and "liars" not in read.model_dump()
    assert DECISION.validate_json(read.model_dump_json()) == read


def test_old_events_are_read() -> None:
    old = {"kind": "stage_ready", "worker": "w", "generation": 0, "stage": 0, "step": 1, "heard": {"1": "ab"}}
    read = EVENT.validate_json(json.dumps(old))
    assert isinstance(read, StageReady) and read.received == {1: "ab"}


def test_a_record_with_both_names_is_refused() -> None:
    with pytest.raises(ValueError, match="place"):
        StageLabel.model_validate({"stage": 0, "step": 0, "index": 0, "place": 1})


@pytest.mark.parametrize(("registry", "kind"), [(RULES, "median"), (EXCHANGES, "monna")])
def test_old_options_are_read(registry: Registry[Any], kind: str) -> None:
    assert registry.make(kind, {"liars": 2}).byzantine == 2
