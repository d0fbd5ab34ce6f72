"""Each layer of the defence alone: tokens, judges, quarantine and schedule."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planaria.swarm.checks.defence import Defence, Quarantine
from planaria.swarm.checks.judge import Judge, Noisy, Steps
from planaria.swarm.checks.tokens import (
    ClaimsCheck,
    DuplicatesCheck,
    ImprobableCheck,
    SupportCheck,
    SurprisalCheck,
    binomial_tail,
)
from planaria.swarm.config.swarm_config import DefenceConfig
from planaria.swarm.peer.completion_intake import RoundAllowance, unscheduled_completions
from planaria.swarm.peer.rollout import Rollout
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums
from support.swarm.tiny_swarm import CONTEXT, case, reading


class TestSupport:
    def test_only_tokens_within_the_k_likeliest_are_accepted(self) -> None:
        inside, beyond = (case(read=reading([-1.0] * 3, ranks=[0, rank, 0])) for rank in (2, 3))
        found = SupportCheck().examine([inside, beyond], CONTEXT)
        assert found.rejected.keys() == {1} and not found.off
        assert "token 2 has rank 4," in found.rejected[1]

    @pytest.mark.parametrize(
        ("k", "vocab", "advice"),
        [
            (3, 46, ""),
            (8, 46, "3 is in proportion"),
            (3, 257, ""),
            (8, 257, "3 is in proportion"),
            (50, 151_936, ""),
            (15_000, 151_936, "50 is in proportion"),
        ],
    )
    def test_a_support_too_large_for_the_vocabulary_is_warned_of(self, k: int, vocab: int, advice: str) -> None:
        warning = SupportCheck().warning(replace(CONTEXT, support=k, vocab=vocab))
        assert advice in warning and bool(warning) == bool(advice)


class TestSurprisal:
    def test_only_completions_above_the_threshold_are_refused(self) -> None:
        cases = [case(read=reading([-1.0 - z], variance=1.0)) for z in (-9.0, 0.0, 3.0, 3.5)]
        assert SurprisalCheck(threshold=3.0).examine(cases, CONTEXT).rejected.keys() == {3}
        impossible = case(read=reading([-3.0], entropy=0.0, variance=0.0))
        assert SurprisalCheck(threshold=1e9).examine([impossible], CONTEXT).rejected.keys() == {0}


class TestImprobable:
    def test_completions_far_below_the_policys_own_are_refused_whoever_wrote_them(self) -> None:
        cases = [case(read=reading([-1.0 - z], variance=1.0)) for z in (3.5, 15.0, 15.5)]
        assert ImprobableCheck().examine(cases, CONTEXT).rejected == {2: "z = 15.5, above 15"}
        assert not ImprobableCheck(limit=20.0).examine(cases, CONTEXT).rejected

    def test_colluders_do_not_switch_it_off(self) -> None:
        far, near = reading([-31.0], variance=1.0), reading([-1.0], variance=1.0)
        cases = [case(peer, read=read) for peer, read in (("a", near), ("b", near), ("c", far), ("d", far))]
        config = DefenceConfig(quarantine=0.0)
        for check, accepted in ((ImprobableCheck(), ["a", "b"]), (SurprisalCheck(), ["a", "b", "c", "d"])):
            report = Defence(config, [check], CONTEXT).examine(0, cases)
            assert [rollout.peer for rollout in report.accepted] == accepted


class TestDuplicates:
    @given(st.integers(0, 20), st.fractions(0, 1, max_denominator=1000), st.data())
    def test_the_tail_is_the_exact_sum(self, n: int, p: Fraction, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, n + 1))
        exact = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(count, n + 1))
        assert binomial_tail(count, n, float(p)) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)

    @pytest.mark.parametrize("n", [1_029, 1_030, 1_500])
    @pytest.mark.parametrize("p", [2.0**-9, 0.125, 0.5, 1 - 2.0**-9])
    def test_the_tail_of_many_completions_is_the_exact_sum(self, n: int, p: float) -> None:
        above, whole = p.as_integer_ratio()
        mean, deviation = n * p, math.sqrt(n * p * (1 - p))
        wanted = {1, 2, n // 2, n, *(round(mean + z * deviation) for z in (-30, -3, 0, 1, 8))}
        total, exact = 0, {}
        for k in range(n, -1, -1):
            total += math.comb(n, k) * above**k * (whole - above) ** (n - k)
            if k in wanted:
                exact[k] = Fraction(total, whole**n)
        for count, tail in exact.items():
            assert binomial_tail(count, n, p) == pytest.approx(float(tail), rel=1e-9, abs=1e-300)

    def test_impossible_and_certain_counts(self) -> None:
        certain = [(0, 5, 0.0), (5, 5, 1.0), (0, 5, 0.5), (-1, 5, 0.0), (0, 0, 0.3)]
        assert all(binomial_tail(*case) == 1 for case in certain)
        assert all(binomial_tail(*case) == 0 for case in [(1, 5, 0.0), (6, 5, 1.0), (6, 5, 0.5)])
        assert binomial_tail(1, 100_000, 5e-324) == pytest.approx(100_000 * 5e-324, abs=1e-320)

    def test_a_confident_policy_may_repeat_itself(self) -> None:
        sure = [case(index=n, read=reading([-0.05])) for n in range(12)]
        assert not DuplicatesCheck(level=1e-6).examine(sure, CONTEXT).rejected

    def test_only_copies_beyond_chance_are_refused(self) -> None:
        copies = [case(index=n, read=reading([-8.0])) for n in range(12)]
        refused = DuplicatesCheck(level=1e-6).examine(copies, CONTEXT).rejected
        first = next(c for c in range(2, 13) if binomial_tail(c, 12, math.exp(-8)) < 1e-6)
        assert set(refused) == set(range(first - 1, 12)) and 1 < first < 12

    def test_copies_are_counted_by_peer_problem_and_text(self) -> None:
        unlikely = reading([-20.0])
        cases = [case(peer, problem, read=unlikely) for peer in "abcd" for problem in range(3)]
        assert not DuplicatesCheck(level=1e-6).examine(cases, CONTEXT).rejected
        assert DuplicatesCheck(level=1e-6).examine([*cases, cases[0]], CONTEXT).rejected.keys() == {12}
        texts = [case(text=str(n), read=unlikely) for n in range(12)]
        assert not DuplicatesCheck(level=0.5).examine(texts, CONTEXT).rejected


class TestClaims:
    def claiming(self, *claims: float, alike: bool = True) -> Rollout:
        return case(read=reading([-1.0] * len(claims)), logps=claims, declares_same_weights=alike)

    def test_a_peer_with_the_reader_s_weights_must_claim_their_log_probabilities(self) -> None:
        honest, forged = self.claiming(-1.01, -0.95), self.claiming(-1.0, -21.0)
        refused = ClaimsCheck().examine([honest, forged, self.claiming(-0.5)], CONTEXT).rejected
        assert refused.keys() == {1, 2}
        assert refused[1] == "it claims our weights, and for token 2 is 20 nats off them"

    def test_other_weights_and_missing_claims_cannot_be_checked(self) -> None:
        assert (
            not ClaimsCheck()
            .examine([self.claiming(-9.0, alike=False), case(declares_same_weights=True)], CONTEXT)
            .rejected
        )


class TestJudge:
    task = Sums()

    def solved(self, number: int, text: str | None = None, reward: float = 1.0) -> tuple[TaskProblem, str, float]:
        problem = self.task.problem(number)
        return problem, text or self.task.solution(problem, random.Random(0)), reward

    def examined(self, judge: Judge, *entries: tuple[TaskProblem, str, float]) -> set[int]:
        cases = [case(prompted=problem, text=text, reward=reward) for problem, text, reward in entries]
        return set(judge.examine(cases, CONTEXT).rejected)

    def test_only_completions_that_score_are_read(self) -> None:
        right = self.solved(0)
        false = (right[0], "1+1=3;" + right[1], 1.0)
        unscored = (*false[:2], 0.0)
        assert self.examined(Steps(), right, false, unscored) == {1}

    def test_a_noisy_judge_refuses_all_poison_and_its_share_of_the_rest(self) -> None:
        judge = Noisy(rate=0.25)
        good = [self.solved(number) for number in range(400)]
        bad = [(problem, "hi " + text, 1.0) for problem, text, _ in good]
        assert len(self.examined(judge, *bad)) == 400
        assert 70 < len(self.examined(judge, *good)) < 130
        pairs = [(problem, text) for problem, text, _ in good]
        found = judge.objections(pairs, CONTEXT)
        assert found == [Noisy(rate=0.25).objections([pair], CONTEXT)[0] for pair in pairs]

    def test_a_task_that_cannot_check_reasoning_switches_the_judge_off(self) -> None:
        class Mute(Sums):
            def sound(self, problem: TaskProblem, completion: str) -> None:  # type: ignore[override]
                return None

        mute = replace(CONTEXT, task=Mute())
        found = Steps().examine([case()], mute)
        assert "cannot check reasoning" in found.off and not found.rejected
        warning = Steps().warning(mute)
        assert "no judge reads" in warning and "--defence.checks" in warning and "model" in warning
        assert not Steps().warning(CONTEXT)
        assert Noisy(rate=0.5).examine([case()], mute) == found


class TestQuarantine:
    BAD, CLEAN = {"a": (10, 0), "x": (10, 5)}, {"a": (10, 0), "x": (10, 0)}

    def test_a_peer_is_excluded_at_once_and_returns_if_it_is_clean(self) -> None:
        quarantine = Quarantine(0.3, window=4)
        assert quarantine.update(0, self.BAD).keys() == {"x"}
        assert [set(quarantine.update(n, self.CLEAN)) for n in range(1, 6)] == [{"x"}, {"x"}, {"x"}, set(), set()]

    def test_a_peer_that_is_not_clean_stays_excluded(self) -> None:
        quarantine = Quarantine(0.3, window=4)
        assert all(quarantine.update(n, self.BAD).keys() == {"x"} for n in range(20))
        freed = [n for n in range(20, 40) if not quarantine.update(n, self.CLEAN)]
        assert freed == list(range(freed[0], 40)) and freed[0] <= 20 + 2 * 4

    @given(
        st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 10).map(lambda k: (10, k))), max_size=30),
        st.integers(1, 8),
    )
    def test_no_exclusion_is_permanent(self, past: list[dict[str, tuple[int, int]]], window: int) -> None:
        quarantine = Quarantine(0.3, window)
        for number, counts in enumerate(past):
            quarantine.update(number, counts)
        clean = dict.fromkeys("abc", (10, 0))
        aside = [quarantine.update(len(past) + n, clean) for n in range(2 * window)]
        assert not aside[-1]

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def test_a_peer_below_the_threshold_is_never_excluded(self, refused: list[int]) -> None:
        quarantine = Quarantine(0.3, window=4)
        assert not any(quarantine.update(n, {"a": (10, k)}) for n, k in enumerate(refused))

    def test_a_threshold_of_zero_disables_quarantine(self) -> None:
        assert not any(Quarantine(0.0, 4).update(n, {"x": (10, 10)}) for n in range(10))


class TestSchedule:
    schedule = RoundAllowance(frozenset({3, 5}), training=100, groups=2, completions=2)

    def test_completions_beyond_the_schedule_are_refused(self) -> None:
        assert not unscheduled_completions([("a", 3), ("a", 5), ("b", 3), ("a", 3), ("a", 5)], self.schedule)
        assert unscheduled_completions([("a", 4), ("a", 3)], self.schedule).keys() == {0}, "a problem of another round"
        refused = unscheduled_completions([("a", 3), ("a", 3), ("b", 3), ("a", 3), ("a", 5)], self.schedule)
        assert refused == {3: "more than 2 completions of one problem"}

    def test_held_out_problems_are_never_trained_on(self) -> None:
        free = RoundAllowance(None, training=100, groups=2, completions=2)
        assert unscheduled_completions([("a", 99), ("a", 100), ("a", 2**62)], free).keys() == {1, 2}

    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), max_size=60))
    def test_where_peers_choose_their_number_of_problems_is_limited(self, sent: list[tuple[str, int]]) -> None:
        free = RoundAllowance(None, training=10, groups=2, completions=3)
        refused = unscheduled_completions(sent, free)
        kept = [entry for place, entry in enumerate(sent) if place not in refused]
        for peer in "ab":
            own = [problem for sender, problem in kept if sender == peer]
            assert len(set(own)) <= 2 and all(own.count(problem) <= 3 and problem < 10 for problem in own)
            first = list(dict.fromkeys(problem for sender, problem in sent if sender == peer and problem < 10))[:2]
            assert set(own) == set(first)
