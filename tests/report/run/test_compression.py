"""The report on compressed messages: what the log tells, once for each stage and round, and why steps went in full."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control import events as e
from planaria.control.logs import RunRecord
from planaria.control.offers import Full
from planaria.exchange.compress import report as compression
from planaria.report import page
from planaria.report.run.summary import summary


def sent(round: int, stage: int, full: Full | None = None, node: int = -1, **norms: float) -> e.MessageCompressed:
    return e.MessageCompressed(
        worker="w", node=stage if node < 0 else node, stage=stage, generation=1, round=round, full=full,
        sent_bytes=4000 if full else 200, dense_bytes=4000, **{"norm": 5.0, "lost": 0.0 if full else 0.75, **norms},
    )  # fmt: skip


def record(*facts: e.Event, **exchange: Any) -> RunRecord:
    config = RunConfig(exchange=ExchangeConfig(**{"replicas": 3, "compress": "econtrol:top5%", **exchange}))
    return RunRecord(Path("x"), config, [(float(t), fact) for t, fact in enumerate(facts)], [], [])


def section(*facts: e.Event, **exchange: Any) -> str:
    return "".join(compression.section(record(*facts, **exchange)))


FACTS = (
    sent(0, 0, "beginning", off=0.0), sent(0, 1, "beginning", off=0.0),
    sent(1, 0, owed=3.0, off=4.0), sent(1, 1, owed=4.0, off=3.0),
    sent(2, 0, owed=9.0), sent(2, 1, lost=0.25, owed=9.0),
    sent(2, 0, "rebuilt", owed=3.0, off=0.0), sent(2, 1, lost=0.25, owed=4.0, off=12.0),
)  # fmt: skip
"""of which the third step was done again, because a node of stage 0 died"""


def test_a_run_whose_messages_lacked_nothing_has_no_such_section() -> None:
    assert section() == "" and section(*FACTS, replicas=1) == ""
    assert not [*compression.told(record())]


def test_a_step_that_was_done_again_counts_as_it_was_done_last() -> None:
    rows = [*compression._rows(record(*FACTS), compression.messages_of(record(*FACTS)))]
    assert rows == [
        ["0", "3", "0.2500", "0.2500", "0.2500", "0.0500", "5.00%", "68.33%", "2"],
        ["1", "3", "0.5000", "0.2500", "0.7500", "0.0500", "5.00%", "36.67%", "1"],
    ]


def test_no_delta_is_stated_where_none_is_guaranteed() -> None:
    run = record(*FACTS, compress="econtrol:sign")
    assert [row[5] for row in compression._rows(run, compression.messages_of(run))] == ["none", "none"]


def test_what_is_drawn_are_norms_of_the_whole_model_and_contractions_of_each_stage() -> None:
    messages = compression.messages_of(record(*FACTS))
    norm, owed, off, full = compression.norms_figure(messages, "step").data
    assert [*norm.y] == pytest.approx([50**0.5] * 3) and [*owed.y] == pytest.approx([5.0, 5.0])
    assert [*owed.x] == [1, 2] and [*off.y] == pytest.approx([0.0, 5.0, 12.0])
    assert [*full.x] == [0, 2]
    one, two = compression.contraction_figure(messages, "step").data
    assert [*one.x] == [1] and [*one.y] == [0.25] and [*two.x] == [1, 2] and [*two.y] == [0.25, 0.75]


def test_the_reasons_for_steps_in_full_are_told() -> None:
    text = section(*FACTS)
    assert "<td>0, 1</td><td>estimates begin with the run</td>" in text
    assert "<td>0</td><td>a node of the stage was rebuilt, and its estimate is gone</td>" in text
    assert "another number of replicas" not in text and "another number" in section(sent(4, 0, "replicas"))
    line = next(line for line in summary(record(*FACTS)) if line.startswith("compression"))
    assert line == (
        "compression   52.5% of dense bytes; delta 0.25, median over stages and steps; 2 steps in full: "
        "estimates begin with the run; a node of the stage was rebuilt, and its estimate is gone"
    )


def test_of_groups_that_meet_in_one_round_the_first_nodes_tell() -> None:
    facts = (sent(0, 0, node=4, lost=0.5), sent(0, 0, node=0, lost=0.25), sent(0, 0, node=2, lost=0.125))
    found = record(*facts, kind="noloco", compress="top5%")
    assert [fact.lost for fact in compression.messages_of(found).shortened(0)] == [0.25]
    assert "median over stages and rounds" in next(compression.told(found))


def test_the_figures_can_be_had_by_their_names() -> None:
    assert [*page.figures(compression.section(record(*FACTS)))] == ["contraction", "compression"]


def test_what_is_said_in_every_round_is_no_landmark_and_short() -> None:
    assert [fact.kind for _, fact in record(*FACTS, e.StopRequested(reason="x")).turns] == ["stop_requested"]
    line = sent(10**6, 9, None, lost=1.23e-5, owed=1.23e-5, off=1.23e-5, norm=1.23e-5).model_dump_json()
    assert len(line) < 250 and e.EVENT.validate_json(line).kind == "message_compressed"
