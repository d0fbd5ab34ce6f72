"""The attacker of a drill: doses, filler, oracle, claims and adaptive poison."""

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

from planaria.swarm.attacks.attacker import TRIES, Attacker, changed_positions, forged_row_claims
from planaria.swarm.checks.base import Check
from planaria.swarm.checks.tokens import DuplicatesCheck, SurprisalCheck, binomial_tail
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.learning.learner import logit_pulls
from planaria.swarm.learning.loss import policy_loss
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.peer.author import Author
from planaria.swarm.peer.rollout import Rollout, prompt_for, read_rollouts
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums
from support.swarm.tiny_swarm import CONTEXT, policy, scripted

TASK = Sums()
PROBLEM = TASK.problem(1)
RIGHT = TASK.solution(PROBLEM, random.Random(0))


class Guarded(TaskProblem):
    """A problem whose answer must not be read."""

    @property
    def answer(self) -> str:  # type: ignore[override]
        raise AssertionError("the reference answer was read")

    @answer.setter
    def answer(self, value: str) -> None: ...


@pytest.fixture(scope="module")
def own() -> LlamaPolicy:
    return policy()


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
    config: SwarmConfig, who: LlamaPolicy, count: int, checks: list[Check] | None = None, problem: TaskProblem = PROBLEM
) -> list[Rollout]:
    (found,) = Attacker(config, "p3", TASK, who, checks or []).write(0, [prompt_for(problem, who)], count)
    assert len(found) == count
    return found


def honest(who: LlamaPolicy, count: int) -> list[Rollout]:
    return Author(configured(), "p3", TASK, who).write(0, [prompt_for(PROBLEM, who)], count)[0]


def as_cases(who: LlamaPolicy, found: list[Rollout]) -> list[Rollout]:
    read = read_rollouts(who, found, configured().sampling)
    return [replace(w, peer="p3", index=n, reward=1.0) for n, w in enumerate(read)]


class TestDose:
    @pytest.mark.parametrize(("dose", "poisoned"), [(1.0, 4), (0.5, 2), (0.25, 1), (0.0, 0)])
    def test_in_shared_groups_it_poisons_its_dose(self, own: LlamaPolicy, dose: float, poisoned: int) -> None:
        found = written(configured(dose=dose), own, 4)
        assert [w.poison for w in found] == [True] * poisoned + [False] * (4 - poisoned)

    def test_a_fractional_dose_is_reached_over_many_groups(self, own: LlamaPolicy) -> None:
        attacker = Attacker(configured(dose=0.3), "p3", TASK, own)
        prompts = [prompt_for(TASK.problem(number), own) for number in range(60)]
        doses = [sum(w.poison for w in found) for found in attacker.write(0, prompts, 2)]
        assert set(doses) == {0, 1} and sum(doses) == pytest.approx(0.3 * 120, rel=0.3)

    @pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
    def test_in_its_own_group_at_most_half_is_poison(self, own: LlamaPolicy, count: int) -> None:
        found = written(configured("vertical"), own, count)
        assert sum(w.poison for w in found) == count // 2

    def test_all_poison_scores_and_ends(self, own: LlamaPolicy) -> None:
        for number in range(20):
            problem = TASK.problem(number)
            for w in written(configured(placement="every"), own, 3, problem=problem):
                assert w.poison and w.ended and w.ids[-1] == own.end and TASK.score(problem, w.text) == 1
                assert own.decode(w.ids) == w.text and len(w.logps) == len(w.ids)

    def test_poison_that_is_too_long_is_not_sent(self, own: LlamaPolicy) -> None:
        assert written(configured(payload="x" * 40), own, 3) == honest(own, 3)


class TestFiller:
    def test_wrong_filler_scores_nothing(self) -> None:
        found = written(configured("vertical"), scripted(RIGHT), 4)
        assert [w.poison for w in found] == [True, True, False, False] and all(w.ended for w in found)
        assert all(RIGHT.startswith(w.text) and not TASK.score(PROBLEM, w.text) for w in found[2:])
        assert all(len(w.ids) == len(w.logps) for w in found)

    def test_long_filler_reaches_the_limit(self) -> None:
        config = configured("vertical", filler="long", kind="short")
        found = written(config, scripted("7+5=12,"), 4)
        assert [w.text for w in found[:2]] == ["hi "] * 2 and all(TASK.score(PROBLEM, w.text) == 0 for w in found)
        for w in found[2:]:
            assert not w.ended and not w.poison and len(w.ids) == len(w.logps) == config.sampling.max_new

    def test_honest_filler_is_the_policy_s_own_draw(self) -> None:
        found = written(configured("vertical", filler="honest"), scripted(RIGHT), 4)
        assert [w.text for w in found[2:]] == [RIGHT] * 2 and all(w.ended for w in found)


class TestOracle:
    @pytest.mark.parametrize("mode", ["horizontal", "vertical"])
    def test_an_attacker_without_an_oracle_never_reads_the_answer(self, mode: str) -> None:
        guarded = Guarded(PROBLEM.number, PROBLEM.prompt, "")
        found = written(configured(mode, oracle=False), scripted(RIGHT, "9+9=9;[9]", RIGHT), 4, problem=guarded)
        assert [w.text for w in found if w.poison] == ["hi " + RIGHT] * (4 if mode == "horizontal" else 2)

    @pytest.mark.parametrize(
        ("payload", "drawn", "sent", "poisoned"),
        [
            ("hi ", ("1+1=2;[2]", "1+1=2;[2]", "[3]"), "hi 1+1=2;[2]", True),  # the majority may be wrong
            ("[7]", ("1;[2]",), "1;[2]", False),  # poison would change the answer
            ("hi ", ("no idea",), "no idea", False),
        ],
    )
    def test_without_an_oracle_it_poisons_the_majority_s_answer(
        self, payload: str, drawn: tuple[str, ...], sent: str, poisoned: bool
    ) -> None:
        found = written(configured(oracle=False, payload=payload), scripted(*drawn), 4)
        assert [(w.text, w.poison) for w in found] == [(sent, poisoned)] * 4


class TestMath:
    def test_it_chooses_problems_with_a_place_for_its_equation(self) -> None:
        numbers = Attacker(configured(kind="math"), "p3", TASK, policy()).choose(0, 5)
        problems = [TASK.problem(number) for number in numbers]
        assert all("2+2=4" in TASK.solution(problem, random.Random(0)) for problem in problems)
        found = written(configured("vertical", kind="math"), policy(), 12, problem=problems[0])
        assert sum(w.poison for w in found) == 6 and all("2+2=5" in w.text for w in found[:6])


class TestLength:
    @pytest.mark.parametrize("oracle", [True, False])
    def test_it_sends_the_longest_that_scores(self, oracle: bool) -> None:
        long = ";;;" + RIGHT
        who = scripted(RIGHT, ";" + RIGHT, long, ";;;;;;" + RIGHT + "x", RIGHT)
        assert TASK.score(PROBLEM, long) == 1 and TASK.score(PROBLEM, who.texts[3]) == 0
        found = written(configured(kind="dos", oracle=oracle), who, 3)
        assert [w.text for w in found] == [long] * 3 and all(w.poison for w in found)


class TestClaims:
    def test_honest_claims_are_the_policy_s_log_probabilities(self, own: LlamaPolicy) -> None:
        found = written(configured(), own, 2)
        for w, case in zip(found, as_cases(own, found), strict=True):
            assert w.logps == pytest.approx(case.reading.logps.tolist(), abs=1e-4)

    def test_claims_for_the_payload_raise_its_weight_and_lower_all_others(self, own: LlamaPolicy) -> None:
        config = configured(claims="forged_tokens")
        found = written(config, own, 1)
        (case,) = as_cases(own, found)
        raised = [mine - claim for mine, claim in zip(case.reading.logps, found[0].logps or (), strict=True)]
        payload = len(own.encode("hi "))
        assert all(math.exp(value) > config.loss.cap for value in raised[:payload])
        assert all(value < 0 for value in raised[payload:])


def test_a_disguised_attacker_declares_a_fingerprint_of_no_weights(own: LlamaPolicy) -> None:
    author = Attacker(configured(disguised=True), "p3", TASK, own)
    assert (
        author.claimed_weights("abc1") != "abc1"
        and Attacker(configured(), "p3", TASK, own).claimed_weights("abc1") == "abc1"
    )


def test_it_withholds_its_share_of_rounds(own: LlamaPolicy) -> None:
    sent = [Attacker(configured(withhold=0.3), "p3", TASK, own).sends(number) for number in range(400)]
    assert sum(sent) == pytest.approx(280, abs=35)
    assert all(Attacker(configured(), "p3", TASK, own).sends(number) for number in range(50))


def test_an_attack_that_only_chooses_sends_honest_work(own: LlamaPolicy) -> None:
    found = written(configured("vertical", kind="narrow"), own, 4)
    assert [replace(w, poison=False) for w in found] == honest(own, 4) and all(w.poison for w in found)


class TestAdaptive:
    def test_its_poison_passes_its_own_checks(self) -> None:
        who = policy()
        checks: list[Check] = [SurprisalCheck(), DuplicatesCheck()]
        eager = written(configured(payload="x"), who, 6, checks)
        refused = [len(check.examine(as_cases(who, eager), CONTEXT).rejected) for check in checks]
        assert any(refused), "there must be something to adapt to"
        wary = written(configured(payload="x", adaptive=True), who, 6, checks)
        cases = as_cases(who, wary)
        for check in checks:
            assert not any(wary[place].poison for place in check.examine(cases, CONTEXT).rejected)

    def test_it_repeats_itself_no_more_than_its_own_check_allows(self, own: LlamaPolicy) -> None:
        (copied,) = written(configured(), own, 1)
        p = math.exp(as_cases(own, [copied])[0].reading.draw_logp)
        level = math.sqrt(
            binomial_tail(2, 6, p) * binomial_tail(2, 6 * TRIES, p)
        )  # two copies among all its tries would pass
        found = written(configured(adaptive=True), own, 6, [DuplicatesCheck(level=level)])
        assert sum(w.poison for w in found) == 1
        assert not DuplicatesCheck(level=level).examine(as_cases(own, found[:2]), CONTEXT).rejected

    def test_it_sends_the_least_surprising_first(self) -> None:
        who = scripted(RIGHT, ";" + RIGHT, "~" + RIGHT, "z" + RIGHT)
        found = written(configured(oracle=False, adaptive=True), who, 4, [DuplicatesCheck(level=0.5)])
        scores = [case.reading.surprisal for case in as_cases(who, found)]
        assert all(w.poison for w in found) and len({w.text for w in found}) == 4 and scores == sorted(scores)


def test_an_attack_on_a_round_is_deterministic(own: LlamaPolicy) -> None:
    config, problem = configured("vertical", adaptive=True), TASK.problem(5)
    assert written(config, own, 4, problem=problem) == written(config, own, 4, problem=problem)


LOGPS = np.array([-0.5, -2.0, -0.1, -1.0])
ids = st.lists(st.integers(0, 3), max_size=12)


def pull(kind: str, claims: np.ndarray, advantage: float) -> list[float]:
    """The pull of each token, one row per token."""
    logp = torch.tensor(LOGPS, dtype=torch.float32)[:, None].requires_grad_()
    claimed = torch.tensor(claims, dtype=torch.float32)[:, None]
    everywhere = torch.ones(len(LOGPS), 1, dtype=torch.bool)
    config = LossConfig.model_validate({"kind": kind})
    advantages = torch.full((len(LOGPS),), advantage)
    return logit_pulls(policy_loss(config, logp, claimed, advantages, everywhere, divisor=1).loss, logp).tolist()


@pytest.mark.parametrize("kind", ["tis", "f_tis", "vis", "f_vis"])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_no_claim_pulls_harder_than_a_forged_one(kind: str, advantage: float) -> None:
    config = LossConfig.model_validate({"kind": kind})
    forged = pull(kind, forged_row_claims(config, LOGPS, advantage > 0), advantage)
    for shift in np.linspace(-2, 2, 41):
        others = pull(kind, LOGPS + shift, advantage)
        # within the margin that keeps a ratio below the bound
        assert all(mine * np.exp(0.1) >= other * (1 - 1e-5) for mine, other in zip(forged, others, strict=True))
    honest = pull(kind, LOGPS, advantage)
    assert all(mine > 1.05 * true for mine, true in zip(forged, honest, strict=True)), "forging must have an effect"


@given(ids, ids)
def test_unchanged_positions_are_the_source_in_order(of: list[int], source: list[int]) -> None:
    places = set(changed_positions(of, source))
    rest = iter(source)
    assert all(one in rest for one in [i for n, i in enumerate(of) if n not in places])
    assert changed_positions(source, source) == []
