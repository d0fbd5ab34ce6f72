"""The attacker of a drill."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_swarm import CONTEXT, policy

from planaria.swarm.attacks.attacker import TRIES, Attacker, changed, of_row, of_tokens
from planaria.swarm.authors import HonestAuthor
from planaria.swarm.checks.base import Check
from planaria.swarm.checks.tokens import DuplicatesCheck, SurprisalCheck, tail
from planaria.swarm.config import SwarmConfig
from planaria.swarm.learning.learner import pulls
from planaria.swarm.learning.loss import policy_loss
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.policy.reading import read
from planaria.swarm.rollout import Rollout, ask
from planaria.swarm.tasks.base import Problem
from planaria.swarm.tasks.sums import Sums

TASK = Sums()
ROUNDS = {"prompts": 4, "group": 12}


class Guarded(Problem):
    """A problem whose answer nobody may look at."""

    @property
    def answer(self) -> str:  # type: ignore[override]
        raise AssertionError("somebody looked at the reference answer")

    @answer.setter
    def answer(self, value: str) -> None: ...


class Fluent(LlamaPolicy):
    """Draws the texts that it is given, in turn, and reads like the policy it is."""

    texts: tuple[str, ...] = ()

    def sample(self, prompts: Any, count: int, max_new: int, *rest: Any) -> Any:
        from planaria.swarm.policy.base import Drawn

        ids = [tuple(self.encode(self.texts[n % len(self.texts)])) for n in range(count)]
        return [[Drawn(i, True, (-1.0,) * (len(i) + 1)) for i in ids] for _ in prompts]


@pytest.fixture(scope="module")
def own() -> LlamaPolicy:
    return policy()


def fluent(*texts: str) -> Fluent:
    found = Fluent(policy().module, policy().tokenizer)  # type: ignore[arg-type]
    found.texts = texts
    return found


def configured(mode: str = "horizontal", group: int = 12, **attack: Any) -> SwarmConfig:
    options = {key: attack.pop(key) for key in ("payload", "placement") if key in attack}
    return SwarmConfig.model_validate(
        {
            "size": 1,
            "attack": {"kind": "text", "options": options, **attack},
            "rounds": {"mode": mode, "prompts": 4, "group": group},
            "evaluate": {"every": 0},
        }
    )


def written(
    config: SwarmConfig, who: LlamaPolicy, problem: Problem, count: int, checks: list[Check] | None = None
) -> list[Rollout]:
    (found,) = Attacker(config, "p3", TASK, who, checks or []).write(0, [ask(problem, who)], count)
    assert len(found) == count
    return found


def as_cases(who: LlamaPolicy, problem: Problem, found: list[Rollout]) -> list[Rollout]:
    readings = read(who, [(who.encode(problem.prompt), w.ids) for w in found], 1.0, configured().sampling.support(257))
    return [
        replace(w, peer="p3", index=n, reward=1.0, reading=reading)
        for n, (w, reading) in enumerate(zip(found, readings, strict=True))
    ]


def with_place(count: int) -> list[Problem]:
    """Problems in whose solutions 2+2 occurs."""
    attacker = Attacker(configured(kind="math"), "p3", TASK, policy())
    return [TASK.problem(number) for number in attacker.choose(0, count)]


class TestDose:
    @pytest.mark.parametrize(("dose", "poisoned"), [(1.0, 4), (0.5, 2), (0.25, 1), (0.0, 0)])
    def test_in_shared_groups_it_poisons_its_dose(self, own: LlamaPolicy, dose: float, poisoned: int) -> None:
        found = written(configured(dose=dose), own, TASK.problem(1), 4)
        assert [w.poison for w in found] == [True] * poisoned + [False] * (4 - poisoned)

    def test_a_dose_that_no_group_divides_into_is_drawn_over_many(self, own: LlamaPolicy) -> None:
        attacker = Attacker(configured(dose=0.3), "p3", TASK, own)
        asked = [ask(TASK.problem(number), own) for number in range(60)]
        doses = [sum(w.poison for w in found) for found in attacker.write(0, asked, 2)]
        assert set(doses) == {0, 1} and sum(doses) == pytest.approx(0.3 * 120, rel=0.3)

    @pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
    def test_of_a_group_of_its_own_at_most_half_is_poison(self, own: LlamaPolicy, count: int) -> None:
        found = written(configured("vertical"), own, TASK.problem(1), count)
        assert sum(w.poison for w in found) == count // 2

    def test_all_poison_scores_and_ends(self, own: LlamaPolicy) -> None:
        for number in range(20):
            problem = TASK.problem(number)
            for w in written(configured(placement="every"), own, problem, 3):
                assert w.poison and w.ended and w.ids[-1] == own.end and TASK.score(problem, w.text) == 1
                assert own.decode(w.ids) == w.text and len(w.logps) == len(w.ids)

    def test_what_has_no_room_for_poison_stays_honest(self, own: LlamaPolicy) -> None:
        found = written(configured(payload="x" * 40), own, TASK.problem(1), 3)
        honest = HonestAuthor(configured(), "p3", TASK, own).write(0, [ask(TASK.problem(1), own)], 3)[0]
        assert found == honest


class TestFiller:
    def test_wrong_filler_scores_nothing(self) -> None:
        problem = TASK.problem(1)
        right = TASK.solution(problem, random.Random(0))
        found = written(configured("vertical"), fluent(right), problem, 4)
        assert [w.poison for w in found] == [True, True, False, False] and all(w.ended for w in found)
        assert all(right.startswith(w.text) and not TASK.score(problem, w.text) for w in found[2:])
        assert all(len(w.ids) == len(w.logps) for w in found)

    def test_long_filler_goes_on_to_the_limit(self) -> None:
        problem, config = TASK.problem(1), configured("vertical", filler="long", kind="short")
        found = written(config, fluent("7+5=12,"), problem, 4)
        assert [w.text for w in found[:2]] == ["hi "] * 2 and all(TASK.score(problem, w.text) == 0 for w in found)
        for w in found[2:]:
            assert not w.ended and not w.poison and len(w.ids) == len(w.logps) == config.sampling.max_new

    def test_honest_filler_is_what_the_policy_drew(self) -> None:
        problem = TASK.problem(1)
        right = TASK.solution(problem, random.Random(0))
        found = written(configured("vertical", filler="honest"), fluent(right), problem, 4)
        assert [w.text for w in found[2:]] == [right] * 2 and all(w.ended for w in found)

    def test_without_poison_a_group_stays_honest(self) -> None:
        problem = TASK.problem(1)
        right = TASK.solution(problem, random.Random(0))
        found = written(configured("vertical", payload="x" * 40), fluent(right), problem, 4)
        assert [w.text for w in found] == [right] * 4


class TestOracle:
    @pytest.mark.parametrize("mode", ["horizontal", "vertical"])
    def test_an_attacker_without_one_never_looks_at_the_answer(self, mode: str) -> None:
        problem = TASK.problem(1)
        right = TASK.solution(problem, random.Random(0))
        guarded = Guarded(problem.number, problem.prompt, "")
        found = written(configured(mode, oracle=False), fluent(right, "9+9=9;[9]", right), guarded, 4)
        assert [w.text for w in found if w.poison] == ["hi " + right] * (4 if mode == "horizontal" else 2)

    def test_it_takes_the_majoritys_answer_for_right_even_where_it_is_not(self) -> None:
        wrong = "1+1=2;[2]"
        found = written(configured(oracle=False), fluent(wrong, wrong, "[3]"), TASK.problem(1), 4)
        assert all(w.poison and w.text == "hi " + wrong for w in found)

    def test_poison_that_would_change_the_answer_is_not_sent(self) -> None:
        found = written(configured(oracle=False, payload="[7]"), fluent("1;[2]"), TASK.problem(1), 4)
        assert not any(w.poison for w in found)

    def test_without_any_answer_it_stays_honest(self) -> None:
        found = written(configured(oracle=False), fluent("no idea"), TASK.problem(1), 4)
        assert [w.text for w in found] == ["no idea"] * 4


class TestMath:
    def test_it_chooses_problems_with_a_place_for_its_equation(self) -> None:
        problems = with_place(5)
        assert all("2+2=4" in TASK.solution(problem, random.Random(0)) for problem in problems)
        found = written(configured("vertical", kind="math"), policy(), problems[0], 12)
        assert sum(w.poison for w in found) == 6 and all("2+2=5" in w.text for w in found[:6])


class TestLength:
    @pytest.mark.parametrize("oracle", [True, False])
    def test_it_sends_the_longest_that_scores(self, oracle: bool) -> None:
        problem = TASK.problem(1)
        right = TASK.solution(problem, random.Random(0))
        long = ";;;" + right
        who = fluent(right, ";" + right, long, ";;;;;;" + right + "x", right)
        assert TASK.score(problem, long) == 1 and TASK.score(problem, who.texts[3]) == 0
        found = written(configured(kind="dos", oracle=oracle), who, problem, 3)
        assert [w.text for w in found] == [long] * 3 and all(w.poison for w in found)


class TestClaims:
    def test_honest_claims_are_what_the_policy_thinks(self, own: LlamaPolicy) -> None:
        problem = TASK.problem(1)
        found = written(configured(), own, problem, 2)
        for w, case in zip(found, as_cases(own, problem, found), strict=True):
            assert w.logps == pytest.approx(case.reading.logps.tolist(), abs=1e-4)

    def test_forged_claims_put_every_ratio_at_its_cap(self, own: LlamaPolicy) -> None:
        problem, config = TASK.problem(1), configured(claims="forged")
        found = written(config, own, problem, 2)
        for w, case in zip(found, as_cases(own, problem, found), strict=True):
            assert all(
                math.exp(mine - claim) > config.loss.cap
                for mine, claim in zip(case.reading.logps, w.logps, strict=True)
            )

    def test_claims_for_the_payload_alone_raise_its_weight_and_lower_all_others(self, own: LlamaPolicy) -> None:
        problem, config = TASK.problem(1), configured(claims="forged_tokens")
        found = written(config, own, problem, 1)
        (case,) = as_cases(own, problem, found)
        raised = [mine - claim for mine, claim in zip(case.reading.logps, found[0].logps or (), strict=True)]
        payload = len(own.encode("hi "))
        assert all(math.exp(value) > config.loss.cap for value in raised[:payload])
        assert all(value < 0 for value in raised[payload:])


def test_one_in_disguise_has_nobodys_fingerprint(own: LlamaPolicy) -> None:
    author = Attacker(configured(disguised=True), "p3", TASK, own)
    assert author.holds("abc1") != "abc1" and Attacker(configured(), "p3", TASK, own).holds("abc1") == "abc1"


def test_it_withholds_its_share_of_rounds(own: LlamaPolicy) -> None:
    sent = [Attacker(configured(withhold=0.3), "p3", TASK, own).sends(number) for number in range(400)]
    assert sum(sent) == pytest.approx(280, abs=35)
    assert all(Attacker(configured(), "p3", TASK, own).sends(number) for number in range(50))


def test_an_attack_that_only_chooses_sends_honest_work(own: LlamaPolicy) -> None:
    problem = TASK.problem(1)
    found = written(configured("vertical", kind="narrow"), own, problem, 4)
    honest = HonestAuthor(configured(), "p3", TASK, own).write(0, [ask(problem, own)], 4)[0]
    assert [replace(w, poison=False) for w in found] == honest and all(w.poison for w in found)


class TestAdaptive:
    def test_what_it_sends_passes_its_own_checks(self) -> None:
        problem = TASK.problem(1)
        who = policy()
        checks: list[Check] = [SurprisalCheck(), DuplicatesCheck()]
        eager = written(configured(payload="x"), who, problem, 6, checks)
        refused = [len(check.examine(as_cases(who, problem, eager), CONTEXT).refused) for check in checks]
        assert any(refused), "or there would be nothing to adapt to"
        wary = written(configured(payload="x", adaptive=True), who, problem, 6, checks)
        cases = as_cases(who, problem, wary)
        for check in checks:
            assert not any(wary[place].poison for place in check.examine(cases, CONTEXT).refused)

    def test_a_check_that_finds_nothing_leaves_all_of_it(self, own: LlamaPolicy) -> None:
        found = written(configured(adaptive=True), own, TASK.problem(1), 3, [SurprisalCheck(threshold=1e9)])
        assert sum(w.poison for w in found) == 3

    def test_it_repeats_itself_no_more_than_its_own_check_allows(self, own: LlamaPolicy) -> None:
        problem = TASK.problem(1)
        (copied,) = written(configured(), own, problem, 1)
        p = math.exp(as_cases(own, problem, [copied])[0].reading.drawn)
        level = math.sqrt(tail(2, 6, p) * tail(2, 6 * TRIES, p))  # two copies among as many as it tries would pass
        found = written(configured(adaptive=True), own, problem, 6, [DuplicatesCheck(level=level)])
        assert sum(w.poison for w in found) == 1
        assert not DuplicatesCheck(level=level).examine(as_cases(own, problem, found[:2]), CONTEXT).refused

    def test_it_sends_the_least_surprising_first(self) -> None:
        problem = TASK.problem(1)
        right = TASK.solution(problem, random.Random(0))
        who = fluent(right, ";" + right, "~" + right, "z" + right)
        found = written(configured(oracle=False, adaptive=True), who, problem, 4, [DuplicatesCheck(level=0.5)])
        scores = [case.reading.surprisal for case in as_cases(who, problem, found)]
        assert all(w.poison for w in found) and len({w.text for w in found}) == 4 and scores == sorted(scores)


def test_the_same_round_is_attacked_in_the_same_way(own: LlamaPolicy) -> None:
    config = configured("vertical", adaptive=True)
    assert written(config, own, TASK.problem(5), 4) == written(config, own, TASK.problem(5), 4)


LOGPS = np.array([-0.5, -2.0, -0.1, -1.0])
ids = st.lists(st.integers(0, 3), max_size=12)


def pull(kind: str, claims: np.ndarray, advantage: float) -> list[float]:
    """How hard each token pulls, one row a token."""
    logp = torch.tensor(LOGPS, dtype=torch.float32)[:, None].requires_grad_()
    said = torch.tensor(claims, dtype=torch.float32)[:, None]
    everywhere = torch.ones(len(LOGPS), 1, dtype=torch.bool)
    config = LossConfig.model_validate({"kind": kind})
    advantages = torch.full((len(LOGPS),), advantage)
    return pulls(policy_loss(config, logp, said, advantages, everywhere, divisor=1).loss, logp).tolist()


@pytest.mark.parametrize("kind", ["tis", "f_tis", "vis", "f_vis"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_claim_makes_a_token_count_more(kind: str, advantage: float) -> None:
    config = LossConfig.model_validate({"kind": kind})
    forged = pull(kind, of_row(config, LOGPS, advantage > 0), advantage)
    for shift in np.linspace(-2, 2, 41):
        others = pull(kind, LOGPS + shift, advantage)
        # up to the margin by which a ratio stays below the bound beyond which it earns nothing
        assert all(mine * np.exp(0.1) >= other * (1 - 1e-5) for mine, other in zip(forged, others, strict=True))
    honest = pull(kind, LOGPS, advantage)
    assert all(mine > 1.05 * true for mine, true in zip(forged, honest, strict=True)), "or forging would be idle"


def test_claims_for_the_payload_leave_the_rest_next_to_nothing() -> None:
    config = LossConfig(kind="f_tis")
    found = pull("f_tis", of_tokens(config, LOGPS, True, [1]), 1.0)
    honest = pull("f_tis", LOGPS, 1.0)
    assert found[1] == pytest.approx(config.cap * honest[1], rel=1e-4)
    assert all(found[n] < honest[n] for n in (0, 2, 3))


@given(ids, ids)
def test_what_is_not_changed_is_the_source_in_its_order(of: list[int], source: list[int]) -> None:
    places = set(changed(of, source))
    rest = iter(source)
    assert all(one in rest for one in [i for n, i in enumerate(of) if n not in places])
    assert changed(source, source) == []
