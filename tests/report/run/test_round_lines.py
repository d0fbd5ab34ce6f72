from __future__ import annotations

import math
from dataclasses import replace

import pytest

from planaria.config.options import Options
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.report.run.exchange_options import effective_options, rounds_missing
from planaria.report.run.replica_report import by_round, distance_by_round, replica_section, rounds_together, waited
from planaria.report.run.report import _cards
from planaria.report.run.round_history import settled_rounds, totals
from planaria.report.run.summary import facts_of, summary, verdict
from support.report import synthetic_replicas as r

BEGIN: r.Facts = [
    (0.0, r.started(3)), (0.1, r.form(0, "ab")), (0.1, r.form(1, "cd")), (0.1, r.form(2, "ef")),
    (1.0, r.commit(0, 0, 0)), (1.1, r.committed("a", 0)),
    (1.5, r.commit(2, 0, 2)), (1.6, r.committed("e", 0)),
]  # fmt: skip
DRAWN = (1.7, d.DrawGroups(round=0, groups=[[0, 2], [1]]))
TOGETHER: r.Facts = [
    (2.0, r.meet(0, 0, 2)),
    (2.5, r.settle(0, 0, 2)),
    (2.6, r.made("a", 0, 0, blocking=10, ahead=1, spread=3.0)),
    (2.6, r.made("b", 1, 0, blocking=20, ahead=2, spread=1.0)),
    (2.7, r.made("e", 4, 0, blocking=30, ahead=4, spread=3.0)),
    (2.7, r.made("f", 5, 0, blocking=40, ahead=8, spread=1.0)),
]
ALONE: r.Facts = [
    (3.0, r.commit(1, 0, 1)), (3.25, r.committed("d", 0)), (3.5, r.settle(0, 1)), (3.6, r.made("c", 2, 0)),
    (3.7, r.made("d", 3, 0)),
]  # fmt: skip
WHOLE = [*BEGIN, DRAWN, *TOGETHER, *ALONE]


def test_waits_are_from_a_replicas_last_work_to_the_meeting_and_from_there_to_the_end() -> None:
    together, alone = settled_rounds(r.record(WHOLE))
    assert together.waited_for_peers_s == pytest.approx({0: 0.9, 2: 0.4})
    assert together.waited_for_updates_s == pytest.approx({0: 0.5, 2: 0.5})
    assert (alone.waited_for_peers_s, alone.waited_for_updates_s) == ({1: 0.25}, {1: 0.0})
    assert together.steps == {0: 1, 2: 1}


def test_steps_during_an_exchange_are_not_waits() -> None:
    facts = [
        *BEGIN,
        (2.0, r.meet(0, 0, 2)),
        (2.1, r.commit(0, 1, 3)),
        (2.4, r.committed("b", 1)),
        (2.5, r.settle(0, 0, 2)),
    ]
    (history,) = settled_rounds(r.record(facts))
    assert history.waited_for_updates_s == pytest.approx({0: 0.1, 2: 0.5})
    assert history.waited_for_peers_s == pytest.approx({0: 0.9, 2: 0.4})


def test_a_background_save_does_not_count_as_a_replicas_last_work() -> None:
    copied = e.StageCopied(worker="a", stage=0, generation=1, step=1)
    written = e.StageSaved(worker="a", stage=0, generation=1, step=1, bytes=9)
    (history,) = settled_rounds(r.record([*BEGIN, (1.3, copied), DRAWN, (1.9, written), *TOGETHER[:2]]))
    assert history.waited_for_peers_s[0] == pytest.approx(0.7), "since the copy"
    (history,) = settled_rounds(r.record([*BEGIN, DRAWN, (1.9, written), *TOGETHER[:2]]))
    assert history.waited_for_peers_s[0] == pytest.approx(0.1), "since what was waited for"


def test_a_released_worker_removes_no_replica_from_a_round() -> None:
    over = r.form(0, "gb", 2, "handed over")
    gone = [(1.65, over), DRAWN, *TOGETHER[:1], (2.1, d.Release(worker="a")), (2.2, r.lost("a")), *TOGETHER[1:2]]
    (history,) = settled_rounds(r.record([*BEGIN, *gone]))
    (stayed,) = settled_rounds(r.record([*BEGIN, DRAWN, *TOGETHER[:2]]))
    assert (history.waited_for_peers_s, history.waited_for_updates_s) == (
        stayed.waited_for_peers_s,
        stayed.waited_for_updates_s,
    )


def test_later_reports_of_workers_belong_to_the_round() -> None:
    together, alone = settled_rounds(r.record(WHOLE))
    assert (together.blocking_bytes, together.prefetched_bytes) == ({0: 30, 2: 70}, {0: 3, 2: 12})
    assert together.spreads == [3.0, 1.0, 3.0, 1.0] and alone.spreads == []
    assert distance_by_round(by_round([together, alone])) == [(1.0, math.sqrt(5.0))]


def test_distances_omit_stages_whose_updates_determine_none() -> None:
    """A stage with fewer layers than fragments sends empty updates, and those of ``eager`` are of the last round."""
    empty = [
        (t, fact.model_copy(update={"spread": 0.0}))
        if isinstance(fact, e.RoundApplied) and fact.stage == 0
        else (t, fact)
        for t, fact in TOGETHER
    ]
    together, _ = histories = settled_rounds(r.record([*BEGIN, DRAWN, *empty, *ALONE]))
    assert together.spreads == [1.0, 1.0]
    assert distance_by_round(by_round(histories)) == [(1.0, 1.0)]
    first = [(t, fact) for t, fact in empty if not isinstance(fact, e.RoundApplied) or fact.stage == 0]
    assert distance_by_round(by_round(settled_rounds(r.record([*BEGIN, DRAWN, *first, *ALONE])))) == []


def test_alone_by_the_draw_differs_from_alone_without_others() -> None:
    together, alone = settled_rounds(r.record(WHOLE))
    assert (together.alone, alone.alone, alone.missing) == (False, True, ())
    other = (1.7, d.DrawGroups(round=0, groups=[[0, 1, 2]]))
    together, alone = settled_rounds(r.record([*BEGIN, other, *TOGETHER, *ALONE]))
    assert together.missing == (1,) and not together.timed_out
    assert alone.missing == (), "the others had settled it already"
    assert totals([together, alone]).by_draw == 0


def test_late_members_are_distinguished_from_absent_ones() -> None:
    patience = (1.8, e.RoundWaitExpired(replica=2, round=0, in_round=False))
    other = (1.7, d.DrawGroups(round=0, groups=[[0, 1, 2]]))
    together, _ = settled_rounds(r.record([*BEGIN, other, patience, *TOGETHER, *ALONE]))
    assert together.timed_out
    left = (1.8, d.Disband(replica=1, workers=["c", "d"], reason=""))
    (together,) = settled_rounds(r.record([*BEGIN, other, left, *TOGETHER]))
    assert together.missing == (), "no replica waits for a disbanded one"


def test_a_loss_ends_a_replicas_meeting() -> None:
    facts = [
        *BEGIN,
        DRAWN,
        (2.0, r.meet(0, 0, 2)),
        (2.2, r.lost("b")),
        (2.4, r.linked(0, 1, "c")),
        (2.5, r.settle(0, 2)),
    ]
    (history,) = settled_rounds(r.record(facts))
    assert (history.members, history.missing) == ((2,), (0,))


def test_sums_and_tables() -> None:
    held = settled_rounds(r.record(WHOLE))
    sums = totals(held)
    assert (sums.rounds, sums.attended, sums.alone, sums.by_draw) == (1, 3, 1, 1)
    assert (sums.blocking_bytes, sums.prefetched_bytes) == (100, 15)
    assert (sums.waited_for_peers_s, sums.waited_for_updates_s) == pytest.approx((1.55, 1.0))
    assert rounds_together(held, 3) == [[0, 0, 1], [0, 1, 0], [1, 0, 0]]
    others, updates, longest, who = waited(held)
    assert (others, updates, longest, who) == (pytest.approx(1.55 / 3), pytest.approx(1 / 3), pytest.approx(1.4), 0)


def test_a_resumed_run_may_come_to_a_round_again() -> None:
    held = settled_rounds(r.record([*WHOLE, *((t + 10, fact) for t, fact in WHOLE)]))
    assert [(history.part, len(history.members)) for history in held] == [(0, 2), (0, 1), (1, 2), (1, 1)]
    assert totals(held).rounds == 2
    assert [history.part for history in by_round(held)[0]] == [1, 1]


def test_without_replicas_there_are_no_rounds() -> None:
    one = r.started(1, nodes_by_replica=[])
    assert settled_rounds(r.record([(0.0, one), *WHOLE[1:]])) == []
    assert list(replica_section(r.record([(0.0, one)]))) == []


def test_the_section_names_every_replica_and_has_its_figures() -> None:
    left = [(4.0, d.Disband(replica=1, workers=["c", "d"], reason="")), (6.0, d.ReplicaRestarted(replica=1))]
    (text,) = replica_section(r.record([*WHOLE, *left]))
    assert "left at 4.0 s, back at 6.0 s" in text and text.count("throughout") == 2
    for name in ("spread", "waits", "rounds"):
        assert f'id="{name}"' in text
    assert "1 round; alone 1 of 3 times, 1 by the draw" in text
    assert "Exchange: noloco (bits = 32, " in text and "every = 50, " in text, "with defaults"


def test_summary_and_cards_have_the_totals_of_the_exchange() -> None:
    lines = list(summary(r.record(WHOLE)))
    assert lines[0] == "exchange      1 round; alone 1 of 3 times, 1 by the draw"
    assert lines[1].strip() == "0.0 MB sent during inner steps, 0.0 MB while others waited"
    assert lines[2].strip().startswith("2.55 s waited, sum over replicas: 1.55 s for others to join")
    record = r.record(WHOLE)
    cards = {name: small for name, _, small in _cards(record, facts_of(record, 1.0))}
    assert cards["rounds of exchange"] == "0.0 MB sent; 1 of 3 times alone; 2.5 s waited"


def test_a_run_without_a_round_names_the_settings() -> None:
    record = r.record([(0.0, r.started(3)), (9.0, d.Finish(outcome="finished", reason=""))])
    assert not any("exchange" in line for line in summary(record)), "enough steps"
    short = record.config.model_copy(update={"train": record.config.train.model_copy(update={"steps": 12})})
    record = replace(record, config=short)
    line = "o round of the exchange: exchange.options.every = 50, train.steps = 12"
    assert f"exchange      n{line}" in list(summary(record))
    helped = replace(r.record(WHOLE), config=short)
    assert not any(line in text for text in summary(helped)), "a replica that made steps of others"
    assert f"N{line}." in verdict(facts_of(record, 1.0)).summary and f"N{line}." in "".join(replica_section(record))


def test_the_options_of_an_unavailable_exchange_are_those_of_the_recipe() -> None:
    own = ExchangeConfig(replicas=3, kind="missing_module:Mine", options=Options({"every": 7}))
    record = replace(r.record([(0.0, r.started(3))]), config=RunConfig(exchange=own))
    assert effective_options(record) == "missing_module:Mine (every = 7)" and rounds_missing(record) == ""


def test_replicas_that_were_stopped_before_they_stood_have_a_section() -> None:
    (section,) = replica_section(r.record([(0.0, r.started(3)), (1.0, d.Finish(outcome="stopped", reason="asked"))]))
    assert "3 replicas" in section
