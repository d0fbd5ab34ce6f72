"""Verdicts of every kind of page agree with the numbers; uncertain results are not called a success."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.control.log.reader import read_run
from planaria.lab.report.comparison import verdict as of_comparison
from planaria.lab.report.experts_verdict import verdict as of_experts
from planaria.planner.guidelines import find_violations
from planaria.report.phrases import format_count, format_number, join_names
from planaria.report.run.recoveries import FaultsSummary
from planaria.report.run.report import wall_time
from planaria.report.run.schedule_figures import step_of
from planaria.report.run.schedule_page import verdict as of_schedule
from planaria.report.run.summary import NO_END, RunFacts, RunMetrics, facts_of
from planaria.report.run.summary import verdict as of_run
from planaria.report.verdict import Verdict
from planaria.swarm.records.hit_tally import HitTally
from planaria.swarm.records.outcome import ALL, LayerOutcome, RunOutcome
from planaria.swarm.report.drill_report import verdict as of_drill
from planaria.swarm.report.swarm_verdict import verdict as of_swarm
from support.report.every_page import drilled, mixed, peer, planned, replicated, swarmed
from support.report.synthetic_comparison import MANNERS, MISSING, Manner, compared
from support.report.synthetic_run import Synthesis

QUIET = RunFacts(
    ended="finished", steps=40, planned=40, wall_s=10.0, first_loss=7.0, last=RunMetrics(loss=3.5, tokens_per_s=900.0)
)


@given(st.integers(0, 10**7), st.text(min_size=1))
def test_one_is_singular_and_nothing_else(count: int, noun: str) -> None:
    assert format_count(count, noun) == f"{count:,} {noun}{'' if count == 1 else 's'}"
    assert format_count(count, "recovery", "recoveries").endswith("recovery") == (count == 1)


def test_lists_are_english() -> None:
    assert [join_names(list(names)) for names in ("a", "ab", "abc", "abcde")] == [
        "a",
        "a and b",
        "a, b and c",
        "a, b, c and 2 more",
    ]


def test_a_verdict_is_escaped_and_has_a_sign_beside_its_colour() -> None:
    html = Verdict(False, "b", "<b>it failed", [("<1>", "&")], "<i>all").html()
    assert "&lt;b&gt;it failed" in html and "&lt;1&gt;" in html and "&lt;i&gt;all" in html and "✗" in html


def test_the_verdict_on_a_run_without_failures() -> None:
    found = of_run(QUIET)
    assert (found.good, found.badge) == (True, "finished") and found.cost == "Nothing was lost."
    assert found.summary == "Trained all 40 steps. Nothing failed. Every sample was used exactly once."
    assert [number for number, _ in found.numbers] == ["3.5000", "900"]


def test_the_verdict_counts_lost_controllers() -> None:
    found = of_run(replace(QUIET, leaderless_s=[0.25, 1.0]))
    assert found.good and "No worker was lost. 2 controllers were lost and replaced." in found.summary
    assert found.cost == "Lost: 1.25 s without a controller."


def test_the_verdict_on_a_run_that_lost_workers(tmp_path: Path) -> None:
    record = read_run(Synthesis(tmp_path, rollbacks={27: 20}).write())
    found = of_run(facts_of(record, wall_time(record)))
    assert found.good and "2 workers died; 1 recovery succeeded and 1 rolled back." in found.summary
    assert "7 steps repeated after rollbacks" in found.cost and "s in recoveries (" in found.cost
    assert found.numbers[1][0].endswith(" s") and "median of 2 recoveries" in found.numbers[1][1]


def test_a_run_with_missing_samples_failed() -> None:
    found = of_run(replace(QUIET, problems=["samples 1 to 2 are missing", "x"]))
    assert not found.good and found.badge == "samples lost or repeated"
    assert "Not every sample was used exactly once: samples 1 to 2 are missing (1 more)." in found.summary


def test_the_verdict_on_a_stopped_or_unfinished_run() -> None:
    stopped, on = (of_run(replace(QUIET, ended=ended, steps=1)) for ended in ("failed: no spare is left", NO_END))
    assert stopped.good is False and "Stopped after 1 of 40 steps: failed: no spare is left." in stopped.summary
    signalled = of_run(replace(QUIET, ended="stopped: SIGTERM", steps=1))
    assert "Stopped after 1 of 40 steps: SIGTERM." in signalled.summary
    assert on.good is None and "The log records no end: 1 of 40 steps so far." in on.summary


def test_the_verdict_on_replicas_counts_their_rounds() -> None:
    record = replicated()
    found = of_run(facts_of(record, wall_time(record)))
    assert "3 replicas settled 3 rounds" in found.summary


@given(
    st.sampled_from(["finished", NO_END, "failed: x"]),
    st.integers(0, 9),
    st.lists(st.floats(0, 9), max_size=3),
    st.dictionaries(st.sampled_from(["recovered", "cannot", "rolled back"]), st.integers(1, 3)),
    st.none() | st.floats(0, 9),
    st.lists(st.just("samples are missing"), max_size=2),
)
def test_any_run_has_a_verdict(
    ended: str, deaths: int, times: list[float], outcomes: dict[str, int], loss: float | None, problems: list[str]
) -> None:
    facts = RunFacts(
        ended, 3, 9, 0.0, problems, last=RunMetrics(loss), faults=FaultsSummary(0, deaths, outcomes=outcomes),
        recovery_s=times, redone=deaths,
    )  # fmt: skip
    found = of_run(facts)
    assert len(found.numbers) <= 2 and found.summary and found.cost
    assert (found.good is True) == (ended == "finished" and not problems)
    assert (found.cost == "Nothing was lost.") == (not deaths and not times and "cannot" not in outcomes)


def test_a_comparison_names_the_winner_its_lead_and_who_missed() -> None:
    found = of_comparison(compared())
    assert found.good is False and found.badge == "3 of 4 arms reached it"
    assert "checkfree-plus reached the target first" in found.summary
    assert f"{MISSING} missed the target in 3 of 3 seeds" in found.cost
    assert found.numbers[0][0].startswith("× 1.")
    alone = of_comparison(compared({"fault-free": MANNERS["fault-free"]}))
    assert "there is no ranking" in alone.summary and alone.numbers[0][1] == "to the target without failures"


def test_arms_without_failures_are_ranked_with_the_fault_free_arm() -> None:
    codecs = {"fault-free": MANNERS["fault-free"], "codec": Manner({"pipeline.wire": "6/4"}, faults=False, step_s=40.0)}
    found = of_comparison(compared(codecs))
    assert found.summary.startswith("Without failures, codec reached the target first")
    assert found.summary.endswith("before fault-free, and before it with each of 3 seeds.")
    assert found.numbers[0][1] == "hours of codec over those of the fault-free arm"


def test_a_lead_absent_in_some_seeds_is_called_close() -> None:
    twins = compared(
        {"fault-free": MANNERS["fault-free"], "a": MANNERS["checkpoint-50"], "b": MANNERS["checkpoint-50"]}
    )
    a, b = twins.arms[1], twins.arms[2]
    runs = [
        run.model_copy(update={"hours": (run.hours or 0) + shift})
        for run, shift in zip(b.runs, (9, -1, 1), strict=True)
    ]
    twins.arms[2] = b.model_copy(update={"runs": runs})
    found = of_comparison(twins)
    assert "a reached the target first" in found.summary and "the two are close" in found.summary
    assert found.good and found.badge == "every arm reached the target"
    single = twins.model_copy(
        update={"arms": [arm.model_copy(update={"runs": arm.runs[:1]}) for arm in (twins.arms[0], a, twins.arms[2])]}
    )
    assert "with one seed this may be chance" in of_comparison(single).summary


@pytest.mark.parametrize(("met", "ranked"), [(0, False), (1, False), (2, True)])
def test_arms_are_not_ranked_after_a_few_failures(met: int, ranked: bool) -> None:
    """Three seeds with ``met`` failures each."""
    found = compared({name: MANNERS[name] for name in ("fault-free", "checkpoint-50", "redundant")})
    few = [
        arm.model_copy(update={"runs": [r.model_copy(update={"failures": met}) for r in arm.runs]})
        for arm in found.arms
    ]
    summary = of_comparison(found.model_copy(update={"arms": few})).summary
    assert ("reached the target first" in summary) == ranked
    assert ("Too few failures to rank" in summary) != ranked


def test_a_plan_is_good_unless_a_faster_alternative_is_known() -> None:
    plan = planned()
    step = step_of(plan)
    assert find_violations(step.problem, step.solution, step.times) == []
    found = of_schedule(plan, step, [])
    assert found.good and "A step takes 8.00 s on 8 nodes, 50.0% less than the best alternative" in found.summary
    assert [number for number, _ in found.numbers] == ["8.00 s", "25.0 %"] and "nodes idle" in found.cost
    beaten = of_schedule(plan.model_copy(update={"compared": {"rows": 7.0}}), step, [])
    assert not beaten.good and beaten.badge == "slower than an alternative" and "more than the best" in beaten.summary


def test_a_swarm_without_a_peer_learning_alone_claims_no_cause(tmp_path: Path) -> None:
    _, outcome = swarmed(tmp_path)
    found = of_swarm(outcome, 1)
    assert (
        found.good
        and "1 of 1 honest peer solved significantly more problems than alone, none significantly fewer."
        in found.summary
    )
    assert found.numbers[0] == ("+0.50", "of problems solved, over learning alone")
    lonely = outcome.model_copy(
        update={
            "peers": [
                p.model_copy(update={"points": [q.model_copy(update={"alone": None}) for q in p.points]})
                for p in outcome.peers
            ]
        }
    )
    assert "so the cause of the change is unknown" in of_swarm(lonely, 1).summary


def test_a_tiny_loss_is_no_negative_zero(tmp_path: Path) -> None:
    _, outcome = swarmed(tmp_path)
    less = {"accuracy": HitTally(hits=499, eligible=1000), "alone": HitTally(hits=500, eligible=1000)}
    peers = [p.model_copy(update={"points": [q.model_copy(update=less) for q in p.points]}) for p in outcome.peers]
    assert of_swarm(outcome.model_copy(update={"peers": peers}), 1).numbers[0][0] == "+0.00"


def test_a_swarm_reports_its_losses() -> None:
    layers = {
        ALL: LayerOutcome(
            stopped=HitTally(hits=7, eligible=9), misjudged=HitTally(hits=1, eligible=40), off={"judge": 2}
        )
    }
    peers = [peer("p0", 50), peer("p1", 50).model_copy(update={"finished": False})]
    found = of_swarm(RunOutcome(peers=peers, layers=layers, rounds=2, seconds=1.0), 1)
    assert found.good is False and found.badge == "1 peer did not finish"
    assert "2 of 9 poisoned completions were accepted" in found.cost and "p1 did not finish" in found.cost
    assert "1 of 40 completions of honest peers were rejected" in found.cost
    assert "of 4 rounds over all honest peers: all layers in 2" in found.cost


def test_a_swarm_reports_that_accuracy_fell_and_does_not_count_the_start_as_the_end() -> None:
    start, end = peer("p0", 60).points[0], peer("p0", 20).points[0]
    points = [start.model_copy(update={"round": 0}), end.model_copy(update={"round": 2})]
    fallen = peer("p0", 20).model_copy(update={"points": points})
    assert fallen.last(4).accuracy == end.accuracy
    found = of_swarm(RunOutcome(peers=[fallen], layers={}, rounds=2, seconds=1.0), 4)
    assert "Accuracy fell: 0.60 at the start, 0.20 at the end." in found.summary
    assert fallen.model_copy(update={"points": points[:1]}).last(4).accuracy == start.accuracy


def test_a_drill_succeeds_if_an_arm_contains_the_attack() -> None:
    held, through = of_drill(drilled(with_rule=1)), of_drill(drilled(with_rule=30))
    assert held.good and held.numbers[0][0] == "80%" and held.numbers[1] == ("2%", "in defended, at best")
    assert "not clearly more than the 0% of control, without poison" in held.summary
    assert "accuracy in defended is 0.78, -0.02 against control" in held.cost
    assert through.good is False and through.badge == "TEXT got through in every arm"


def test_a_drill_without_attack_or_about_length() -> None:
    calm = drilled()
    calm = calm.model_copy(update={"arms": calm.arms[:1]})
    found = of_drill(calm)
    assert found.good is None and "No arm has attackers" in found.summary
    length = of_drill(drilled(watch=("dos",)))
    assert length.good is None and "18.0 tokens" in length.summary and length.badge == "no attack had an effect"


def test_an_attack_without_effect_is_not_a_successful_defence() -> None:
    weak = drilled()
    weak = weak.model_copy(update={"arms": [weak.arms[0], weak.arms[2]]})
    found = of_drill(weak)
    assert (
        found.good is None
        and found.badge == "no attack had an effect"
        and "so the attack had no effect" in found.summary
    )


@given(st.floats(1e-6, 1e6))
def test_quantities_keep_three_digits(number: float) -> None:
    assert float(format_number(number).replace(",", "")) == pytest.approx(number, rel=0.006)


@pytest.mark.parametrize(("ratio", "good"), [(0.9, True), (1.1, False), (0.999, None)])
def test_experts_are_better_worse_or_neither(ratio: float, good: bool | None) -> None:
    found = of_experts(mixed(ratio))
    assert found.good is good and found.numbers[0][0] == f"× {ratio:.3f}"
    assert ("is worse than M_Ho-I_Ho on" in found.cost) == (good is False)


@pytest.mark.parametrize(("rival", "good"), [(0.8, False), (1.05, True), (0.901, None)])
def test_experts_are_compared_with_one_model_of_the_same_compute(rival: float, good: bool | None) -> None:
    found = of_experts(mixed(0.9, seeds=2, rival=rival))
    assert found.good is good and found.numbers[0][0] == f"× {0.9 / rival:.3f}" and found.numbers[1][0] == "× 2.0"
    assert (
        "one model of the same training compute (generalist-M)" in found.summary
        and "at × 2.0 its compute" in found.summary
    )
    assert "M_He-I_Ho beat equal experts of the same compute: × 0.900" in found.summary, "as before"
    assert ("is worse than generalist-M on code, tables" in found.cost) == (good is False)


def test_experts_that_were_lost_are_named() -> None:
    assert "1 expert could not be trained (code-M-4)" in of_experts(mixed(0.9, lost=("code-M-4",))).cost
