"""Each layer of the defence alone."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_swarm import CONTEXT, case, reading

from planaria.swarm.checks.defence import Quarantine
from planaria.swarm.checks.judge import Judge, Noisy, Steps
from planaria.swarm.checks.tokens import ClaimsCheck, DuplicatesCheck, SupportCheck, SurprisalCheck, outside, tail
from planaria.swarm.intake import Schedule, unscheduled
from planaria.swarm.rollout import Rollout
from planaria.swarm.tasks.base import Problem
from planaria.swarm.tasks.sums import Sums


class TestSupport:
    def test_a_token_of_rank_k_is_refused_and_one_of_rank_k_less_one_is_not(self) -> None:
        inside, beyond = (case(read=reading([-1.0] * 3, ranks=[0, rank, 0])) for rank in (2, 3))
        found = SupportCheck().examine([inside, beyond], CONTEXT)
        assert found.refused.keys() == {1} and not found.off
        assert "token 2 has rank 4," in found.refused[1]

    @given(st.lists(st.integers(0, 10)), st.integers(1, 10))
    def test_the_first_token_outside_is_named(self, ranks: list[int], k: int) -> None:
        place = outside(ranks, k)
        if place is None:
            assert all(rank < k for rank in ranks)
        else:
            assert ranks[place] >= k and all(rank < k for rank in ranks[:place])

    @pytest.mark.parametrize(("k", "vocab", "warns"), [(3, 46, False), (8, 46, True), (3, 257, False), (8, 257, True)])
    def test_a_support_too_large_for_the_vocabulary_is_warned_of(self, k: int, vocab: int, warns: bool) -> None:
        assert bool(SupportCheck().warning(replace(CONTEXT, support=k, vocab=vocab))) == warns

    def test_httfs_own_support_is_no_reason_to_warn(self) -> None:
        assert not SupportCheck().warning(replace(CONTEXT, support=50, vocab=151_936))
        assert "50 is in proportion" in SupportCheck().warning(replace(CONTEXT, support=15_000, vocab=151_936))


class TestSurprisal:
    def test_only_what_lies_above_the_threshold_is_refused(self) -> None:
        cases = [case(read=reading([-1.0 - z], variance=1.0)) for z in (-9.0, 0.0, 3.0, 3.5)]
        assert SurprisalCheck(threshold=3.0).examine(cases, CONTEXT).refused.keys() == {3}

    def test_what_the_policy_holds_for_impossible_is_refused(self) -> None:
        impossible = case(read=reading([-3.0], entropy=0.0, variance=0.0))
        assert SurprisalCheck(threshold=1e9).examine([impossible], CONTEXT).refused.keys() == {0}


class TestDuplicates:
    @given(st.integers(0, 20), st.fractions(0, 1, max_denominator=1000), st.data())
    def test_the_tail_is_the_exact_sum(self, n: int, p: Fraction, data: st.DataObject) -> None:
        count = data.draw(st.integers(0, n + 1))
        exact = sum(math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(count, n + 1))
        assert tail(count, n, float(p)) == pytest.approx(float(exact), rel=1e-9, abs=1e-300)

    def test_rounding_above_certainty_is_certainty(self) -> None:
        assert tail(3, 3, 1 + 1e-9) == 1 and tail(1, 3, -0.0) == 0

    def test_a_policy_that_is_sure_of_itself_may_repeat(self) -> None:
        sure = [case(index=n, read=reading([-0.05])) for n in range(12)]
        assert not DuplicatesCheck(level=1e-6).examine(sure, CONTEXT).refused

    def test_copies_beyond_chance_are_refused_and_the_first_stay(self) -> None:
        copies = [case(index=n, read=reading([-8.0])) for n in range(12)]
        refused = DuplicatesCheck(level=1e-6).examine(copies, CONTEXT).refused
        first = next(c for c in range(2, 13) if tail(c, 12, math.exp(-8)) < 1e-6)
        assert set(refused) == set(range(first - 1, 12)) and 1 < first < 12

    def test_peers_and_problems_are_counted_apart(self) -> None:
        unlikely = reading([-20.0])
        cases = [case(peer, problem, read=unlikely) for peer in "abcd" for problem in range(3)]
        assert not DuplicatesCheck(level=1e-6).examine(cases, CONTEXT).refused
        assert DuplicatesCheck(level=1e-6).examine([*cases, cases[0]], CONTEXT).refused.keys() == {12}

    def test_another_text_is_no_copy(self) -> None:
        cases = [case(text=str(n), read=reading([-20.0])) for n in range(12)]
        assert not DuplicatesCheck(level=0.5).examine(cases, CONTEXT).refused


class TestClaims:
    def claiming(self, *claims: float, alike: bool = True) -> Rollout:
        return case(read=reading([-1.0] * len(claims)), logps=claims, alike=alike)

    def test_whoever_says_that_it_holds_our_weights_says_what_they_give(self) -> None:
        honest, forged = self.claiming(-1.01, -0.95), self.claiming(-1.0, -21.0)
        refused = ClaimsCheck().examine([honest, forged, self.claiming(-0.5)], CONTEXT).refused
        assert refused.keys() == {1, 2}
        assert refused[1] == "it claims our weights, and for token 2 is 20 nats off them"

    def test_of_other_weights_and_without_a_claim_nobody_can_tell(self) -> None:
        assert not ClaimsCheck().examine([self.claiming(-9.0, alike=False), case(alike=True)], CONTEXT).refused


class TestJudge:
    task = Sums()

    def solved(self, number: int, text: str | None = None, reward: float = 1.0) -> tuple[Problem, str, float]:
        problem = self.task.problem(number)
        return problem, text or self.task.solution(problem, random.Random(0)), reward

    def examined(self, judge: Judge, *entries: tuple[Problem, str, float]) -> set[int]:
        cases = []
        for problem, text, reward in entries:
            cases.append(case(asked=problem, text=text, reward=reward))
        return set(judge.examine(cases, CONTEXT).refused)

    def test_only_what_scores_is_read(self) -> None:
        right = self.solved(0)
        false = (right[0], "1+1=3;" + right[1], 1.0)
        unscored = (*false[:2], 0.0)
        assert self.examined(Steps(), right, false, unscored) == {1}

    def test_a_noisy_judge_is_right_about_poison_and_wrong_about_its_share(self) -> None:
        judge = Noisy(rate=0.25)
        good = [self.solved(number) for number in range(400)]
        bad = [(problem, "hi " + text, 1.0) for problem, text, _ in good]
        assert len(self.examined(judge, *bad)) == 400
        assert 70 < len(self.examined(judge, *good)) < 130
        assert self.examined(judge, *good) == self.examined(Noisy(rate=0.25), *good)

    def test_a_task_that_cannot_check_reasoning_switches_the_judge_off(self) -> None:
        class Mute(Sums):
            def sound(self, problem: Problem, completion: str) -> None:  # type: ignore[override]
                return None

        mute = replace(CONTEXT, task=Mute())
        found = Steps().examine([case()], mute)
        assert "cannot check reasoning" in found.off and not found.refused
        warning = Steps().warning(mute)
        assert "nobody reads" in warning and "--defence.checks" in warning and "model" in warning
        assert not Steps().warning(CONTEXT)
        assert Noisy(rate=0.5).examine([case()], mute) == found


class TestQuarantine:
    BAD, CLEAN = {"a": (10, 0), "x": (10, 5)}, {"a": (10, 0), "x": (10, 0)}

    def test_a_peer_of_whom_much_is_refused_is_set_aside_at_once_and_freed_if_it_is_clean(self) -> None:
        quarantine = Quarantine(0.3, window=4)
        assert quarantine.hear(0, self.BAD).keys() == {"x"}
        assert [set(quarantine.hear(n, self.CLEAN)) for n in range(1, 6)] == [{"x"}, {"x"}, {"x"}, set(), set()]

    def test_a_peer_that_is_not_clean_meanwhile_stays(self) -> None:
        quarantine = Quarantine(0.3, window=4)
        assert all(quarantine.hear(n, self.BAD).keys() == {"x"} for n in range(20))
        freed = [n for n in range(20, 40) if not quarantine.hear(n, self.CLEAN)]
        assert freed == list(range(freed[0], 40)) and freed[0] <= 20 + 2 * 4

    @given(
        st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 10).map(lambda k: (10, k))), max_size=30),
        st.integers(1, 8),
    )
    def test_never_is_anybody_set_aside_for_good(self, past: list[dict[str, tuple[int, int]]], window: int) -> None:
        quarantine = Quarantine(0.3, window)
        for number, counts in enumerate(past):
            quarantine.hear(number, counts)
        clean = dict.fromkeys("abc", (10, 0))
        aside = [quarantine.hear(len(past) + n, clean) for n in range(2 * window)]
        assert not aside[-1]

    @given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
    def test_a_peer_below_the_threshold_is_never_set_aside(self, refused: list[int]) -> None:
        quarantine = Quarantine(0.3, window=4)
        assert not any(quarantine.hear(n, {"a": (10, k)}) for n, k in enumerate(refused))

    def test_a_threshold_of_zero_means_never(self) -> None:
        assert not any(Quarantine(0.0, 4).hear(n, {"x": (10, 10)}) for n in range(10))

    def test_a_peer_that_comes_back_is_judged_by_what_it_sent_last(self) -> None:
        quarantine = Quarantine(0.3, window=4)
        quarantine.hear(0, self.BAD)
        for n in range(1, 50):
            assert not quarantine.hear(n, {"a": (10, 0)})
        assert quarantine.hear(50, self.CLEAN) == {}, "5 of its last 20 were refused"


class TestSchedule:
    schedule = Schedule(frozenset({3, 5}), training=100, groups=2, completions=2)

    def test_what_belongs_to_the_round_is_taken(self) -> None:
        assert not unscheduled([("a", 3), ("a", 5), ("b", 3), ("a", 3), ("a", 5)], self.schedule)

    def test_problems_of_another_round_are_not(self) -> None:
        assert unscheduled([("a", 4), ("a", 3)], self.schedule).keys() == {0}

    def test_no_peer_may_send_more_than_its_part_and_the_first_count(self) -> None:
        refused = unscheduled([("a", 3), ("a", 3), ("b", 3), ("a", 3), ("a", 5)], self.schedule)
        assert refused == {3: "more than 2 completions of one problem"}

    def test_held_out_problems_are_never_trained_on(self) -> None:
        free = Schedule(None, training=100, groups=2, completions=2)
        assert unscheduled([("a", 99), ("a", 100), ("a", 2**62)], free).keys() == {1, 2}

    @given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 12)), max_size=60))
    def test_where_peers_choose_they_are_held_to_their_number_of_problems(self, sent: list[tuple[str, int]]) -> None:
        free = Schedule(None, training=10, groups=2, completions=3)
        refused = unscheduled(sent, free)
        kept = [entry for place, entry in enumerate(sent) if place not in refused]
        for peer in "ab":
            own = [problem for who, problem in kept if who == peer]
            assert len(set(own)) <= 2 and all(own.count(problem) <= 3 and problem < 10 for problem in own)
            first = list(dict.fromkeys(problem for who, problem in sent if who == peer and problem < 10))[:2]
            assert set(own) == set(first)
