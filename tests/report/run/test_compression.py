"""The report's section on compressed messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.exchange.compress import compression_report as compression
from planaria.report.run.summary import summary
from support.report.compression_facts import FACTS, sent


def record(*facts: e.Event, **exchange: Any) -> RunRecord:
    config = RunConfig(exchange=ExchangeConfig(**{"replicas": 3, "compress": "econtrol:top5%", **exchange}))
    return RunRecord(Path("x"), config, [(float(t), fact) for t, fact in enumerate(facts)], [], [])


def section(*facts: e.Event, **exchange: Any) -> str:
    return "".join(compression.section(record(*facts, **exchange)))


def test_a_run_without_compression_has_no_section() -> None:
    assert section() == "" and section(*FACTS, replicas=1) == ""
    assert not [*compression.summary_lines(record())]


def test_a_repeated_step_counts_once_with_its_last_message() -> None:
    rows = [*compression._rows(record(*FACTS), compression.messages_of(record(*FACTS)))]
    assert rows == [
        ["0", "3", "0.2500", "0.2500", "0.2500", "0.0500", "5.00%", "68.33%", "2"],
        ["1", "3", "0.5000", "0.2500", "0.7500", "0.0500", "5.00%", "36.67%", "1"],
    ]


def test_a_compressor_without_guarantee_has_no_stated_delta() -> None:
    run = record(*FACTS, compress="econtrol:sign")
    assert [row[5] for row in compression._rows(run, compression.messages_of(run))] == ["none", "none"]


def test_figures_show_norms_of_the_model_and_contractions_per_stage() -> None:
    messages = compression.messages_of(record(*FACTS))
    norm, residual, off, full = compression.norms_figure(messages, "step").data
    assert [*norm.y] == pytest.approx([50**0.5] * 3) and [*residual.y] == pytest.approx([5.0, 5.0])
    assert [*residual.x] == [1, 2] and [*off.y] == pytest.approx([0.0, 5.0, 12.0])
    assert [*full.x] == [0, 2]
    one, two = compression.contraction_figure(messages, "step").data
    assert [*one.x] == [1] and [*one.y] == [0.25] and [*two.x] == [1, 2] and [*two.y] == [0.25, 0.75]


def test_the_reasons_for_uncompressed_steps_are_listed() -> None:
    text = section(*FACTS)
    assert "<td>0, 1</td><td>estimates start with the run</td>" in text
    assert "<td>0</td><td>a node of the stage was rebuilt without its estimate</td>" in text
    assert "number of replicas changed" not in text and "number of replicas changed" in section(sent(4, 0, "replicas"))
    line = next(line for line in summary(record(*FACTS)) if line.startswith("compression"))
    assert line == (
        "compression   52.5% of dense bytes; delta 0.25, median over stages and steps; 2 steps in full: "
        "estimates start with the run; a node of the stage was rebuilt without its estimate"
    )


def test_of_several_groups_in_a_round_the_lowest_node_counts() -> None:
    facts = (
        sent(0, 0, node=4, relative_error=0.5),
        sent(0, 0, node=0, relative_error=0.25),
        sent(0, 0, node=2, relative_error=0.125),
    )
    found = record(*facts, kind="noloco", compress="top5%")
    assert [fact.relative_error for fact in compression.messages_of(found).lossy_messages(0)] == [0.25]
    assert "median over stages and rounds" in next(compression.summary_lines(found))


def test_reports_of_every_round_are_short_and_no_landmarks() -> None:
    assert [fact.kind for _, fact in record(*FACTS, e.StopRequested(reason="x")).turns] == ["stop_requested"]
    line = sent(
        10**6, 9, None, relative_error=1.23e-5, residual=1.23e-5, estimate_error=1.23e-5, norm=1.23e-5
    ).model_dump_json()
    assert len(line) < 250 and e.EVENT.validate_json(line).kind == "message_compressed"
