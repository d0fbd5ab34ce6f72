"""The report's section on trust: logged coefficients, and rejections with their reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import events as e
from planaria.control.facts.update_reports import rounded
from planaria.exchange.robust import robust_report as trust
from planaria.report.run.event_lines import Narrator
from support.report.trust_facts import FACTS, NAN, SHORT, compared, counted, record, refused


def section(*facts: e.Event, replicas: int = 3) -> str:
    return "".join(trust.section(record(*facts, replicas=replicas)))


def test_a_run_without_rejections_has_no_section() -> None:
    assert section() == "" and section(*FACTS, replicas=1) == ""


def test_a_row_is_a_stage_of_a_replica_and_a_column_a_round() -> None:
    means, red = trust.trust_figure(trust.trust_of(record(*FACTS))).data
    assert [*means.y] == [f"replica {r} · stage {s}" for r in range(3) for s in range(2)] and [*means.x] == [0, 1, 3, 4]
    assert [[*row] for row in means.z] == [
        [0.5, 0.4, None, None], [0.5, None, None, None],
        [0.5, 0.6, None, None], [0.0, None, None, None],
        [0.0, None, None, None], [0.5, None, None, None],
    ]  # fmt: skip
    assert [[*row] for row in red.z[4:]] == [[None, 1, None, None], [None, None, 1, 1]]
    assert not any(cell for row in red.z[:4] for cell in row)


def test_a_long_run_has_a_bounded_number_of_columns() -> None:
    facts = [counted(round, 0, {0: float(round % 2), 1: 0.25}) for round in range(10 * trust.COLUMNS)]
    facts += [refused(7 * trust.COLUMNS, 0, 1, NAN, 0)]
    found = trust.trust_of(record(*facts))
    means, red = trust.trust_figure(found).data
    assert len(means.x) <= trust.COLUMNS and found.width == 10
    assert {*means.z[0]} == {0.5} and {*means.z[1]} == {0.25}
    assert [cell for cell in red.z[1] if cell] == [1]
    assert "A column is the mean of 10 rounds" in section(*facts)


def test_weights_without_a_robust_rule_are_shown_as_shares() -> None:
    """A decoupled exchange weighs updates by inner steps."""
    weighed = [counted(0, 0, {0: 12.0, 1: 20.0, 2: 16.0}), counted(1, 0, {0: 5.0, 2: 15.0}), counted(2, 0, {1: 0.0})]
    exchange = ExchangeConfig(replicas=3, kind="decoupled")
    of = replace(record(*weighed), config=RunConfig(exchange=exchange))
    fig = trust.trust_figure(trust.trust_of(of))
    assert [[*row] for row in fig.data[0].z] == [
        [0.25, 0.25, None], [pytest.approx(5 / 12), None, 0.0], [pytest.approx(1 / 3), 0.75, None],
    ]  # fmt: skip
    assert fig.data[0].colorbar.title.text == "share"
    (text,) = trust.section(of)
    assert "Shares of updates" in text and "Trust" not in text and "exchange.robust" not in text
    assert "Share of each replica" in text and "exchange.kind = 'decoupled'" in text.replace("&#x27;", "'")


def test_rejections_have_sender_and_reason_the_most_frequent_first() -> None:
    text = section(*FACTS)
    assert "<not>" not in text and "&lt;not&gt; finite" in text, "nothing in it is HTML of a stranger's"
    assert text.index("torch.float32 [3]") < text.index("&lt;not&gt;")
    table = trust._rows(trust.trust_of(record(*FACTS)))
    assert sorted(table) == [["2", "0", NAN, "1", "1", "1", "2 nodes"], ["2", "1", SHORT, "2", "3", "4", "2 nodes"]]
    many = [refused(0, 0, 1, f"wrong {number}") for number in range(trust.ROWS + 5)]
    assert f"The {trust.ROWS} most frequent of {trust.ROWS + 5}" in section(*many)


def test_weights_of_other_rules_are_means_over_the_rounds_that_have_them() -> None:
    facts = (
        compared(0, {0: 0.5, 1: 0.5, 2: 0.0}, {"krum": {2: 1.0}, "flag": {2: 0.25}}),
        compared(1, {0: 0.5, 1: 0.0, 2: 0.5}, {"krum": {1: 0.0}}),
        compared(2, {0: 1.0, 2: 0.1}, {"krum": {2: 0.5}}),
    )
    heads, rows = trust._rival_table(trust.trust_of(record(*facts)))
    assert heads == ["replica", "stage", "rounds", "this run's", "mean", "flag", "krum"]
    assert rows == [
        ["2", "0", "2", "0.050", "0.417", "0.250", "0.750"],
        ["1", "0", "1", "0.000", "0.333", "–", "0.000"],
    ]
    assert "By other rules" in section(*facts) and "By other rules" not in section(*FACTS)


def test_replicas_that_are_judged_as_wholes_have_a_row_each() -> None:
    """One stage reports for all; updates that any stage rejected are red."""
    reported = [compared(round, {0: 0.5, 1: 0.5, 2: 0.0}, {"krum": {2: 1.0}}) for round in (0, 1)]
    of = record(*reported, refused(3, 1, 2, SHORT), robust=Options({"rule": "multikrum", "scope": "replica"}))
    means, red = trust.trust_figure(trust.trust_of(of)).data
    assert [*means.y] == ["replica 0", "replica 1", "replica 2"] and [*means.x] == [0, 1, 3]
    assert [[*row] for row in means.z] == [[0.5, 0.5, None], [0.5, 0.5, None], [0.0, 0.0, None]]
    assert [*red.z[2]] == [None, None, 1]
    _, rows = trust._rival_table(trust.trust_of(of))
    assert [row[:3] for row in rows] == [["2", "all", "2"]]
    assert "over all stages" in "".join(trust.section(of)) and "stage by stage" in section(*FACTS)


def test_repeated_rejections_of_gradients_are_shown_once_per_stage_and_reason() -> None:
    narrator = Narrator()
    lines = [line for t, fact in enumerate(FACTS) if (line := narrator.describe(float(t), fact)) is not None]
    assert [line.text for line in lines] == [
        f"invalid update of replica 2 for stage 0 ({NAN})", f"invalid update of replica 2 for stage 1 ({SHORT})"
    ]  # fmt: skip


def test_logged_weights_are_short() -> None:
    assert rounded({0: 1 / 3, 1: 1e-9 / 3, 2: 0.0}) == {0: 0.333, 1: 3.33e-10, 2: 0.0}
    line = counted(10**6, 9, rounded(dict.fromkeys(range(64), 1 / 64))).model_dump_json()
    assert len(line) < 64 * 16 and e.EVENT.validate_json(line) == counted(10**6, 9, dict.fromkeys(range(64), 0.0156))


@pytest.mark.parametrize("kind", ["updates_weighted", "update_rejected"])
def test_facts_of_every_round_are_no_landmarks(kind: str) -> None:
    assert [fact.kind for _, fact in record(*FACTS, e.StopRequested(reason="x")).landmarks] == ["stop_requested"]
    reported = [fact.kind for _, fact in record(*FACTS, e.StopRequested(reason="x")).turns]
    assert (kind in reported) == (kind == "update_rejected"), "lines name the reason for a missing member"
