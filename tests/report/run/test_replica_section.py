from __future__ import annotations

from pathlib import Path

from planaria.config.schema import RunConfig
from planaria.control.decisions import Decision
from planaria.control.events import Event, ReplicasEvaluated, RoundSettled
from planaria.control.logs import RunRecord
from planaria.report.run.replica_report import losses_figure, meetings_figure, replica_section, spread_figure

LOOKS = [
    ReplicasEvaluated(step=0, losses=[5.0, 5.0, 5.0], consensus=5.0, spread=0.0),
    ReplicasEvaluated(step=4, losses=[4.0, 4.5, 4.25], consensus=4.125, spread=0.01),
]
ROUNDS = [
    RoundSettled(
        step=2, number=0, groups=[[0, 1], [2]], blocking_bytes=2_000_000, prefetched_bytes=8_000_000, spread=0.02
    ),
    RoundSettled(step=4, number=1, groups=[[0, 1], [2]], blocking_bytes=1_000_000, prefetched_bytes=0, spread=0.01),
]


def section(*facts: Event | Decision) -> str:
    return "".join(replica_section(RunRecord(Path("x"), RunConfig(), [(1.0, fact) for fact in facts], [], [])))


def test_a_run_of_one_replica_has_no_such_section() -> None:
    assert section() == ""


def test_the_section_tells_what_was_sent() -> None:
    text = section(*LOOKS, *ROUNDS)
    assert "3 replicas" in text and "2 rounds" in text
    assert "3.0 MB that somebody waited for and 8.0 MB ahead" in text
    assert "rounds of exchange" not in section(*LOOKS)


def test_every_replica_and_the_one_model_have_a_line() -> None:
    one, *replicas = losses_figure(LOOKS).data
    assert [list(line.y) for line in replicas] == [[5.0, 4.0], [5.0, 4.5], [5.0, 4.25]]
    assert list(one.y) == [5.0, 4.125]


def test_the_spread_is_drawn_after_each_round_or_where_it_was_looked_at() -> None:
    assert list(spread_figure(LOOKS, ROUNDS).data[0].y) == [0.02, 0.01]
    assert list(spread_figure(LOOKS, []).data[0].y) == [0.0, 0.01]


def test_who_met_whom_is_counted_both_ways() -> None:
    table = meetings_figure(ROUNDS, 3).data[0].z
    assert [list(row) for row in table] == [[None, 2, 0], [2, None, 0], [0, 0, None]]
