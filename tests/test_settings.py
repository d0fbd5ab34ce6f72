"""Settings: each is used or refused with its users; durations are parsed alike by every flag."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from planaria.cli.plan_search import parse_budget
from planaria.common.errors import UserError
from planaria.config.durations import seconds
from planaria.config.durations import text as duration
from planaria.config.recipe import fields
from planaria.config.schema import RunConfig
from planaria.faults.trace import Fault, Trace
from planaria.planner.search import SearchBudget
from planaria.runtime.preparation.unused_settings import RULES, require_used, without_effect
from planaria.runtime.resolved_run import ResolvedRun
from support.command_line import refused

SOURCE = Path(__file__).parents[1] / "src" / "planaria"


def config(**sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(sections)


def test_every_field_is_read_somewhere() -> None:
    read = {
        node.attr
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
    }
    assert [name for name, _ in fields() if name.rpartition(".")[2] not in read] == []


def test_rules_name_existing_fields() -> None:
    assert RULES.keys() <= {name for name, _ in fields()}


@pytest.mark.parametrize(
    ("name", "sections"),
    [
        ("pipeline.in_flight", {"pipeline": {"in_flight": 2}, "exchange": {"replicas": 2}}),
        ("routing.skip", {"routing": {"skip": 0.25}}),
        ("routing.data_nodes", {"routing": {"data_nodes": 2}}),
        ("routing.search", {"routing": {"search": "flows"}}),
        ("routing.routes", {"routing": {"routes": [[0, 1, 0]]}}),
        ("optim.clip_by", {"optim": {"clip": 0, "clip_by": "layer"}}),
        ("optim.final_lr", {"optim": {"final_lr": 0.5}}),
        ("optim.decay", {"optim": {"schedule": "cosine", "decay": 0.5}}),
        ("train.schedule_steps", {"train": {"schedule_steps": 600}}),
        ("fleet.address", {"fleet": {"address": "embedded"}}),
        ("network.straggle_probability", {"network": {"straggle_probability": 0.5}}),
        ("checkpoint.background", {"checkpoint": {"background": True, "every": 0}}),
    ],
)
def test_unused_settings_are_refused_before_a_run_begins(name: str, sections: dict[str, dict[str, Any]]) -> None:
    with pytest.raises(UserError, match=rf"^{name} = .*remove it$"):
        require_used(config(**sections))


def test_settings_without_effect_are_listed() -> None:
    quiet, trace = config(), Trace(faults=(Fault(step=1, stage=1, signal="slow"), Fault(step=2, stage=1)))
    assert list(without_effect(ResolvedRun(quiet), trace)) == []
    alone = config(exchange={"kind": "noloco", "options": {"every": 5}}, fleet={"spares": 3}, engine="inline")  # type: ignore[arg-type]
    lines = list(without_effect(ResolvedRun(alone), trace))
    assert [line.partition(":")[0] for line in lines] == [
        "exchange.kind, exchange.options",
        "fleet.spares",
        "faults left out",
    ]
    assert "1 slow" in lines[2] and "kill" not in lines[2]
    assert list(without_effect(ResolvedRun(alone.model_copy(update={"engine": "fleet"})), trace)) == lines[:1]
    beside = config(checkpoint={"background": True, "every": 5}, engine="inline")  # type: ignore[arg-type]
    assert list(without_effect(ResolvedRun(beside), Trace(faults=()))) == [
        "checkpoint.background: for workers in separate processes; engine 'inline' has none"
    ]


def short(kind: str, steps: int, own: list[int] | None = None, replicas: int = 2, **options: object) -> list[str]:
    """The lines about a run with few steps."""
    exchange = {"kind": kind, "replicas": replicas, "options": options, "steps_between_rounds": own or []}
    return list(without_effect(ResolvedRun(config(exchange=exchange, train={"steps": steps})), Trace(faults=())))


def test_a_run_too_short_for_a_round_is_reported() -> None:
    (line,) = short("diloco", 12)
    assert line == (
        "no round of the exchange: exchange.options.every = 500, train.steps = 12; lower the first, or raise the second"
    )
    assert short("diloco", 12, every=12) == short("allreduce", 1) == short("local", 1) == []
    assert (
        short("diloco", 8, own=[8, 20]) == []
        and "exchange.steps_between_rounds = [9, 20]" in short("diloco", 8, own=[9, 20])[0]
    )
    for kind in ("streaming_diloco", "decoupled"):
        assert short(kind, 12, every=12) == []
        assert short(kind, 11, every=12)[0].startswith("rounds of only 3 of 4 fragments: exchange.options.every = 12, ")
        assert short(kind, 2, every=12)[0].startswith("no round of the exchange: exchange.options.every = 12, ")


def test_a_duration_is_written_with_two_digits() -> None:
    written = {2.88: "2.9 s", 57.6: "58 s", 99.6: "1.7 min", 3600: "60 min", 5400: "90 min", 36000: "10 h"}
    assert {seconds: duration(seconds) for seconds in written} == written
    assert duration(0.042) == "0.042 s" and duration(1e7) == "2,778 h"


@pytest.mark.parametrize(
    ("text", "expected"), [("0", 0), ("90", 90), ("1.5s", 1.5), (".5 s", 0.5), ("5min", 300), ("5m", 300), ("2h", 7200)]
)
def test_a_duration_is_in_seconds_unless_it_has_a_unit(text: str, expected: float) -> None:
    assert seconds(text) == expected


@pytest.mark.parametrize("text", ["", "soon", "s", "-1", "nan", "inf", "1e3", "1 day", "1e9h", "300000h", "5 5", "٣s"])
def test_an_invalid_duration_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r": not a duration; use seconds, or a time such as 60s, 5min or 2h"):
        seconds(text)
    for command in (["join", "run", "--patience"], ["run", "chaos", "run", "--kill", "stage=1", "--resume-after"]):
        line = refused(capsys, *command[:-1], f"{command[-1]}={text}")
        assert f"'{command[-1]}': " in line and "not a duration" in line


def test_a_budget_is_a_duration_or_a_number_of_moves() -> None:
    assert parse_budget("5min") == SearchBudget(seconds=300) and parse_budget("60 s") == SearchBudget(seconds=60)
    assert parse_budget("300000moves") == parse_budget("300000 moves") == SearchBudget(moves=300_000)
