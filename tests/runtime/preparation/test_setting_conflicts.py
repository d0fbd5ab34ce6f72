"""Settings of replicas that exclude each other: recipes are refused as two tables of docs/exchange-options.md state."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.exchange.registry import EXCHANGES
from planaria.runtime.preparation.config_checks import check
from support.tiny_engine import Recipe

PAGE = Path(__file__).parents[3] / "docs" / "exchange-options.md"
GIVEN = {"gasloc": {"alpha": 0.5, "beta": 0.7, "gamma": 0.7}}
"""options without a default"""
ASKED: dict[str, dict[str, dict[str, Any]]] = {
    "`bits`": {"yes": {"options": {"bits": 8}}},
    "`prefetch`": {"yes": {"options": {"prefetch": True}}},
    "`compress`": {
        "`none`": {"compress": "none:top1%"},
        "`ef14`": {"compress": "ef14:8bits"},
        "any feedback": {"compress": "ef21:top1%"},
    },
    "`robust`": {
        "any rule": {"robust": "clipping"},
        "groups above the minimum size": {"robust": "median", "options": {"group": 5}},
        "any but `clipping`": {"robust": "median"},
        "in pairs": {"robust": "median"},
    },
    "`coded`": {"yes": {"coded": "gc"}},
}
"""column → words of its cells → the recipe they are about"""
IMPLIED = {
    "any feedback": {"`none`", "`ef14`", "any feedback"},
    "any rule": {"any rule", "any but `clipping`", "in pairs"},
    "any but `clipping`": {"in pairs"},
}
"""words of a cell that imply others"""
GROUPED = {"noloco", "pair_mean", "gasloc"}
WHOLE = {"rule": "krum", "scope": "replica"}
BESIDE: list[tuple[str, dict[str, Any], str]] = [
    ("`compress`", {"exchange": {"compress": "ef14:8bits", "options": {"bits": 8}}}, "remove one of them"),
    ("`robust`", {"exchange": {"robust": "median", "compress": "ef21:top1%"}}, "hold differences to estimates"),
    ("`robust`", {"exchange": {"robust": "median", "compress": "econtrol:top1%"}}, "hold differences to estimates"),
    (
        "`robust`",
        {"exchange": {"kind": "diloco", "robust": "median"}, "routing": {"mixed": True}},
        "does not belong to one",
    ),
    ("`robust.scope", {"exchange": {"robust": WHOLE}}, "needs rounds"),
    (
        "`robust.scope",
        {"exchange": {"kind": "diloco", "robust": {**WHOLE, "rule": "median"}}},
        "each coordinate separately",
    ),
    (
        "`robust.scope",
        {"exchange": {"kind": "diloco", "robust": WHOLE}, "routing": {"mixed": True}},
        "cannot be judged alone",
    ),
    (
        "`options.aggregator`",
        {"exchange": {"options": {"aggregator": "rda"}, "robust": "median"}},
        "remove one of them",
    ),
    ("`options.aggregator`", {"exchange": {"options": {"aggregator": "rda"}, "compress": "ef21:top1%"}}, "or ef14"),
    ("`senders`", {"exchange": {"kind": "noloco", "options": {"aggregator": "senders"}}}, "were not sent"),
    ("`coded`", {"exchange": {"coded": "gc", "compress": "ef14:8bits"}}, "are sums of gradients"),
    ("`coded`", {"exchange": {"coded": "gc", "robust": "median"}}, "are sums of gradients"),
    ("`coded`", {"exchange": {"coded": "gc"}, "routing": {"mixed": True}}, "does not support routing.mixed; remove it"),
    ("`coded`", {"exchange": {"coded": "gc"}, "recovery": {"meanwhile": "skip"}}, "needs all stages of a replica"),
    ("γ", {"exchange": {"kind": "noloco", "options": {"alpha": 0.9}}}, "replicas would drift apart"),
    ("`delay`", {"exchange": {"kind": "streaming_diloco", "options": {"every": 8, "delay": 2}}}, "must be settled"),
    ("`delay`", {"exchange": {"kind": "streaming_diloco", "options": {"every": 10}}}, "does not divide"),
    (
        "`decoupled`",
        {"exchange": {"kind": "decoupled", "options": {"mix": 0.5}}},
        "adopts the result of a round unmixed",
    ),
    ("`decoupled`", {"exchange": {"kind": "decoupled", "robust": "median"}}, "do not compare what they received"),
    ("`decoupled`", {"exchange": {"kind": "decoupled"}, "routing": {"mixed": True}}, "all replicas step together"),
    ("`max_replicas`", {"exchange": {"max_replicas": 6}, "engine": "fleet"}, "other than 'allreduce'"),
    ("`max_replicas`", {"exchange": {"kind": "noloco", "max_replicas": 6}}, "no machines join a run in one process"),
    (
        "`steps_between_rounds`",
        {"exchange": {"kind": "noloco", "steps_between_rounds": [1, 2, 3, 4, 5]}, "routing": {"mixed": True}},
        "all replicas step together",
    ),
    (
        "`steps_between_rounds`",
        {"exchange": {"steps_between_rounds": [1, 2, 3, 4, 5]}, "engine": "fleet"},
        "no inner steps between them",
    ),
    (
        "`steps_between_rounds`",
        {
            "exchange": {
                "kind": "streaming_diloco",
                "options": {"every": 8, "fragments": 1, "delay": 2},
                "steps_between_rounds": [8, 8, 2, 8, 8],
            },
            "engine": "fleet",
        },
        "use more than 2 steps",
    ),
    ("`coded`", {"exchange": {"coded": "gc", "options": {"bits": 8}}}, "are sums of gradients"),
    ("`routing.mixed`", {"routing": {"mixed": True}, "engine": "fleet"}, "use --engine inline"),
    (
        "`routing.schedule`",
        {"pipeline": {"layers": "auto"}, "recovery": {"strategy": "checkpoint"}, "engine": "fleet"},
        "is for one replica",
    ),
    ("a `recovery.strategy`", {"recovery": {"strategy": "echo"}}, "keeps copies of stages at other stages' workers"),
    ("`recovery.meanwhile", {"recovery": {"meanwhile": "skip"}, "engine": "fleet"}, "use 'wait'"),
    (
        "`recovery.meanwhile",
        {"checkpoint": {"every": "best"}, "network": {"hourly_failure_probability": 0.1}, "engine": "fleet"},
        "is for one replica",
    ),
]
"""the beginning of a row of the second table, a recipe for it, and its message"""


def tables() -> list[list[list[str]]]:
    """The rows of each table of the section, cell by cell, headers included."""
    section = PAGE.read_text().partition("## Combinations\n")[2].partition("\n## ")[0]
    found = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    return [
        [[cell.strip() for cell in row.strip("|").split("|")] for row in table.splitlines() if "---" not in row]
        for table in found
    ]


def documented_cell(kind: str, column: str) -> str:
    """Return a cell of the first table."""
    header, *rows = tables()[0]
    (row,) = [row for row in rows if f"`{kind}`" in row[0]]
    return row[header.index(column)]


def taken(recipe: Callable[[], RunConfig]) -> bool:
    """Return whether the recipe is accepted; a refusal must be one line."""
    try:
        check(recipe())
    except UserError as wrong:
        assert "\n" not in str(wrong)
        return False
    return True


def recipe_of(config: Recipe, engine: str = "inline", **sections: dict[str, Any]) -> RunConfig:
    """Five replicas, with these settings."""
    exchange = {"replicas": 5, **sections.pop("exchange", {})}
    pipeline = {"stages": 2, "microbatches": 5, "microbatch_size": 1, **sections.pop("pipeline", {})}
    made = config(exchange=exchange, pipeline=pipeline, **{"model": {"layers": 2}, **sections})
    return made.model_copy(update={"engine": engine})


@pytest.mark.parametrize("column", ASKED)
@pytest.mark.parametrize("kind", EXCHANGES.names)
def test_a_kind_accepts_the_settings_of_its_row_alone(kind: str, column: str, config: Recipe) -> None:
    cell = documented_cell(kind, column)
    named = {words for words in ASKED[column] if words in cell}
    named |= {implied for words in named for implied in IMPLIED.get(words, ())}
    for words, settings in ASKED[column].items():
        if "group" in settings.get("options", {}) and kind not in GROUPED:
            continue
        options = {**GIVEN.get(kind, {}), **settings.get("options", {})}
        exchange = {"kind": kind, **settings, "options": options}
        assert taken(lambda exchange=exchange: recipe_of(config, exchange=exchange)) == (words in named), words


def test_every_kind_has_its_row() -> None:
    assert set(re.findall(r"`(\w+)`", "".join(row[0] for row in tables()[0][1:]))) == set(EXCHANGES.names)
    assert set(tables()[0][0][1:]) == set(ASKED)


@pytest.mark.parametrize(("row", "settings", "complaint"), BESIDE)
def test_the_refusals_of_each_row_hold(row: str, settings: dict[str, Any], complaint: str, config: Recipe) -> None:
    with pytest.raises(UserError, match=re.escape(complaint)) as caught:
        check(recipe_of(config, **settings))
    assert "\n" not in str(caught.value)


def test_every_row_of_refusals_is_tested() -> None:
    firsts = [row[0] for row in tables()[1][1:]]
    tried = {row for row, _, _ in BESIDE}
    assert [first for first in firsts if not any(first.startswith(row) for row in tried)] == []
    assert [row for row in tried if not any(first.startswith(row) for first in firsts)] == []
