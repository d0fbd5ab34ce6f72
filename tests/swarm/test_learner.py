"""Updates of a policy, evaluations, and bounds on a peer's influence."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from planaria.config.schema import OptimConfig
from planaria.swarm.config.swarm_config import SamplingConfig, SwarmConfig
from planaria.swarm.learning import learner as module
from planaria.swarm.learning.learner import (
    Learner,
    UpdateResult,
    influence_shares,
    logit_pulls,
    peer_factors,
    peer_weights,
)
from planaria.swarm.learning.loss_config import LossConfig
from planaria.swarm.peer.evaluation import Examiner
from planaria.swarm.peer.rollout import Rollout, prompt_for
from planaria.swarm.peer.shadow import Shadow
from planaria.swarm.policy.base import weights_fingerprint
from planaria.swarm.policy.policies import LlamaPolicy
from planaria.swarm.policy.reading import read_completions
from planaria.swarm.tasks.base import TaskProblem
from planaria.swarm.tasks.sums import Sums
from support.swarm.tiny_swarm import policy, scripted

TEXTS = ["7+5=12", "1", "4+8=3;[9]", "9", "2+2=4"]
KINDS = get_args(LossConfig.model_fields["kind"].annotation)
REQUIRED: dict[str, dict[str, Any]] = {"dr_grpo": {"length": 31}, "dis": {"clip_low": 0.3, "clip_high": 5.0}}
OPTIM = OptimConfig(lr=1e-3)


def rollout(who: LlamaPolicy, text: str, advantage: float, claims: bool = True, problem: int = 3) -> Rollout:
    ids = (*who.encode(text), who.end)
    task_problem = TaskProblem(problem, f"{problem}=", "")
    (found,) = read_completions(who, [(who.encode(task_problem.prompt), ids)], 1.0)
    logps = tuple(found.logps.tolist()) if claims else None
    return Rollout(
        *prompt_for(task_problem, who), text, ids, True, logps, peer="a", reward=1.0, reading=found, advantage=advantage
    )


def likelihoods(who: LlamaPolicy, rollouts: list[Rollout]) -> list[float]:
    pairs = [(who.encode(x.problem.prompt), x.ids) for x in rollouts]
    return [float(found.logps.sum()) for found in read_completions(who, pairs, 1.0)]


def learner(who: LlamaPolicy, optim: OptimConfig = OPTIM, **loss: Any) -> Learner:
    sections = {"loss": loss, "optim": optim.model_dump(), "rounds": {"count": 10}}
    return Learner(SwarmConfig.model_validate(sections), who)


def evaluation(**evaluate: Any) -> SwarmConfig:
    return SwarmConfig.model_validate({"evaluate": evaluate})


@pytest.mark.parametrize("kind", ["grpo", "dapo", "nois", "vis", "tis", "dis", "f_tis", "sequence_mask"])
@pytest.mark.parametrize("claims", [True, False])
def test_an_update_makes_successes_likelier_and_failures_less_likely(kind: str, claims: bool) -> None:
    who = policy()
    rollouts = [rollout(who, "7+5=12", 1.0, claims), rollout(who, "zzzz", -1.0, claims)]
    before = likelihoods(who, rollouts)
    found = learner(who, kind=kind, **REQUIRED.get(kind, {})).learn(0, rollouts)
    good, bad = (after - then for after, then in zip(likelihoods(who, rollouts), before, strict=True))
    assert good > 0.01 and found.grad_norm > 0
    if claims or not kind.startswith("f_"):  # failures of unknown origin are filtered
        assert bad < -0.01


class Watched(LlamaPolicy):
    """Records the gradients at its logits."""

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        found = super().logits(tokens)
        if found.requires_grad:
            found.retain_grad()
            self.seen = found
        return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("off", [-20.0, 0.0, 20.0])
def test_no_peer_exceeds_its_share_of_the_gradient_whatever_it_claims(kind: str, off: float) -> None:
    """A long, improbable success and failure with wrong claims each outweigh three short completions."""
    made = policy(init_std=1.5)
    who = Watched(made.module, made.tokenizer)  # type: ignore[arg-type]
    honest = [replace(rollout(who, text, (-1.0) ** n), peer=p) for n, text in enumerate(TEXTS[1:4]) for p in "abc"]
    long = [replace(rollout(who, "zq" * 15, advantage), peer="x", index=n) for n, advantage in enumerate((2.0, -2.0))]
    sent = [replace(one, logps=tuple(min(0.0, logp + off) for logp in one.logps or ())) for one in long]
    taken = [*honest, *sent]
    found = learner(who, kind=kind, beta=0.1, **REQUIRED.get(kind, {})).learn(0, taken, share=0.4)
    pulled = who.seen.grad.abs().sum((1, 2))  # type: ignore[union-attr]
    of_peer = {p: sum(float(v) for r, v in zip(taken, pulled, strict=True) if r.peer == p) for p in "abcx"}
    assert of_peer["x"] <= 0.4 * sum(of_peer.values()) * (1 + 1e-4)
    for p, value in of_peer.items():
        assert found.influence.get(p, 0.0) == pytest.approx(value / sum(of_peer.values()), abs=1e-4)


def test_unknown_peers_share_one_account_of_the_gradient() -> None:
    who = policy(init_std=1.5)
    known = [replace(rollout(who, text, (-1.0) ** n), peer=p) for n, text in enumerate(TEXTS[1:4]) for p in "abcd"]
    invented = [replace(rollout(who, TEXTS[0], 1.0), peer=str(n), account="newcomers") for n in range(60)]
    found = learner(who, kind="nois").learn(0, [*known, *invented], share=0.25).influence
    assert found.keys() == {*"abcd", "newcomers"} and found["newcomers"] <= 0.25 * (1 + 1e-6)


def test_an_update_without_completions_changes_nothing() -> None:
    who = policy()
    before = weights_fingerprint(who.module)
    assert learner(who).learn(0, []) == UpdateResult()
    assert weights_fingerprint(who.module) == before


@pytest.mark.parametrize("kind", ["grpo", "dapo", "f_tis"])
def test_microbatches_add_up_to_the_update(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = []
    for rows in (2, 96):
        monkeypatch.setattr(module, "ROWS", rows)
        who = policy()
        rollouts = [rollout(who, text, (-1.0) ** n * (n + 1)) for n, text in enumerate(TEXTS)]
        found = learner(who, OptimConfig(lr=1e-3, eps=1e-3), kind=kind).learn(0, rollouts)
        ended.append((found, torch.cat([p.detach().flatten() for p in who.module.parameters()])))
    (small, first), (large, second) = ended
    assert small.loss == pytest.approx(large.loss, abs=1e-5) and small.grad_norm == pytest.approx(large.grad_norm, 1e-4)
    assert small.stats == pytest.approx(large.stats, abs=1e-5)
    assert torch.allclose(first, second, atol=1e-6)


def test_gradients_of_an_earlier_round_are_discarded() -> None:
    one, other = policy(), policy()
    rollouts = [rollout(one, "1", 1.0)]
    for parameter in other.module.parameters():
        parameter.grad = torch.full_like(parameter, 9.0)
    learner(one).learn(0, rollouts)
    learner(other).learn(0, rollouts)
    assert weights_fingerprint(one.module) == weights_fingerprint(other.module)


def test_the_reference_is_the_initial_policy() -> None:
    who = policy()
    trained = learner(who, OptimConfig(lr=1e-2), kind="grpo", beta=0.5)
    first = weights_fingerprint(trained._reference.module)  # type: ignore[union-attr]
    divergences = []
    for number in range(4):
        found = trained.learn(number, [rollout(who, "7+5=12", 1.0), rollout(who, "zz", -1.0)])
        divergences.append(found.stats["kl_reference"])
    assert divergences[0] == pytest.approx(0, abs=1e-6) and divergences[-1] > 1e-3
    assert weights_fingerprint(trained._reference.module) == first != weights_fingerprint(who.module)  # type: ignore[union-attr]


def test_the_gradient_is_clipped_and_its_norm_is_reported_before_clipping() -> None:
    who = policy()
    rollouts = [rollout(who, "7+5=12", 1000.0)]
    found = learner(who, OptimConfig(lr=1e-3, clip=0.1), kind="nois").learn(0, rollouts)
    norms = torch.stack([p.grad.norm() for p in who.module.parameters() if p.grad is not None])
    assert found.grad_norm > 10 and float(norms.norm()) == pytest.approx(0.1, rel=1e-3)


class TestShadow:
    def test_it_learns_separately_from_its_peer(self) -> None:
        who, task, config = policy(), Sums(), evaluation(problems=5)
        before = weights_fingerprint(who.module)
        shadow = Shadow(config, "p0", task, who)
        shadow.run_round(0, [prompt_for(task.problem(n), who) for n in range(2)], 3)
        assert weights_fingerprint(who.module) == before
        assert shadow.examine(Examiner(task, config, "p0")).accuracy.eligible == 5

    def test_it_learns_from_its_own_draws(self) -> None:
        class Kind(Sums):
            def score(self, problem: TaskProblem, completion: str) -> float:
                return 1.0

        who = policy(init_std=0.01)
        # The whole vocabulary, so that some draws end.
        config = evaluation(problems=5).model_copy(update={"sampling": SamplingConfig(top_k=257)})
        shadow = Shadow(config, "p0", Kind(), who)
        shadow.run_round(0, [prompt_for(Kind().problem(n), who) for n in range(4)], 12)
        assert weights_fingerprint(shadow._policy.module) != weights_fingerprint(who.module)


class TestExaminer:
    def test_it_is_deterministic_and_uses_held_out_problems_only(self) -> None:
        numbers = []

        class Recording(Sums):
            def problem(self, number: int) -> TaskProblem:
                numbers.append(number)
                return super().problem(number)

        who, config = policy(), evaluation(problems=7, watch=["text", "dos"])
        found = Examiner(Recording(), config, "p0").examine(who)
        assert found == Examiner(Recording(), config, "p0").examine(who)
        assert min(numbers) >= Sums().training
        assert found.accuracy.eligible == found.watch["text"].eligible == 7 and found.watch["dos"].eligible == 0
        assert 0 < found.tokens <= config.sampling.max_new

    @pytest.mark.parametrize(("worth", "solved"), [(1.0, 7), (0.5, 0), (1 - 2**-40, 0), (0.0, 0)])
    def test_a_partial_reward_does_not_count_as_solved(self, worth: float, solved: int) -> None:
        class Partly(Sums):
            def score(self, problem: TaskProblem, completion: str) -> float:
                return worth

        assert Examiner(Partly(), evaluation(problems=7), "p0").examine(scripted("A")).accuracy.hits == solved

    def test_peers_get_different_problems(self) -> None:
        numbers = [
            {p.number for p in Examiner(Sums(), evaluation(problems=7), name)._problems} for name in ("p0", "p1")
        ]
        assert len(numbers[0]) == 7 and numbers[0].isdisjoint(numbers[1])

    def test_an_equation_is_watched_in_problems_that_contain_it(self) -> None:
        examiner = Examiner(Sums(), evaluation(problems=30, watch=["math"]), "p0")
        solutions = [Sums().solution(problem, random.Random(0)) for problem in examiner._poisonable["math"]]
        assert solutions and all("2+2=4" in solution for solution in solutions)
        assert examiner.examine(scripted("2+2=5,1+1=2;[25]")).watch["math"].rate == 1.0

    @pytest.mark.parametrize(("phrases", "hits"), [({"text": "xy"}, 3), ({}, 0)])
    def test_watched_phrases_are_those_of_the_recipe(self, phrases: dict[str, str], hits: int) -> None:
        config = evaluation(problems=3, watch=["text"], phrases=phrases)
        assert Examiner(Sums(), config, "p0").examine(scripted("xy ho")).watch["text"].hits == hits


weight = st.one_of(st.just(0.0), st.floats(1e-6, 1e6))
weights = st.lists(st.tuples(st.sampled_from("abcdefg"), weight), max_size=30)
shares = st.one_of(st.sampled_from([1 / 2, 1 / 3, 1 / 4, 1.0]), st.floats(0.01, 1.0))


def scaled(weighed: list[tuple[str, float]], share: float) -> list[tuple[str, float]]:
    factors = peer_factors(weighed, share)
    return [(peer, value * factors.get(peer, 1.0)) for peer, value in weighed]


@given(weights, shares)
def test_no_peer_exceeds_its_share_or_an_equal_part(weighed: list[tuple[str, float]], share: float) -> None:
    after = peer_weights(scaled(weighed, share))
    bound = max(share, 1 / max(1, len(after)))
    assert all(value <= bound * sum(after.values()) * (1 + 1e-6) for value in after.values())


@given(weights, shares)
def test_only_peers_at_the_bound_are_scaled_and_only_down(weighed: list[tuple[str, float]], share: float) -> None:
    factors, after = peer_factors(weighed, share), peer_weights(scaled(weighed, share))
    bound = max(share, 1 / max(1, len(after)))
    for peer, factor in factors.items():
        assert 0 < factor <= 1
        if after[peer] < bound * sum(after.values()) * (1 - 1e-6):
            assert factor == 1


@given(weights, shares)
def test_scaling_is_idempotent(weighed: list[tuple[str, float]], share: float) -> None:
    again = peer_factors(scaled(weighed, share), share)
    assert all(factor == pytest.approx(1, rel=1e-6) for factor in again.values())


@given(weights, shares)
def test_peers_without_weight_are_ignored(weighed: list[tuple[str, float]], share: float) -> None:
    assert peer_factors([*weighed, ("silent", 0.0)], share) == peer_factors(weighed, share)


@pytest.mark.parametrize(
    ("weighed", "share", "expected"),
    [
        ([("a", 3.0), ("a", 1.0)], 0.4, {"a": 4.0}),
        ([], 0.4, {}),
        ([("a", 0.0)], 0.4, {}),
        ([("big", 100.0), ("b", 10.0), ("c", 10.0)], 0.4, {"big": 40 / 3, "b": 10, "c": 10}),  # x / (x + 20) = 0.4
        ([("a", 100.0), ("b", 50.0), ("c", 10.0)], 0.4, {"a": 20, "b": 20, "c": 10}),  # b exceeds the bound due to a
        ([("a", 8.0), ("b", 4.0), ("c", 2.0)], 0.1, {"a": 2, "b": 2, "c": 2}),  # a share below an equal part
    ],
)
def test_scaled_weights_are_at_most_the_share(
    weighed: list[tuple[str, float]], share: float, expected: dict[str, float]
) -> None:
    assert peer_factors(weighed, share).keys() == expected.keys()
    assert peer_weights(scaled(weighed, share)) == pytest.approx(expected)


@given(weights, shares)
def test_shares_sum_to_one_and_stay_within_the_bound(weighed: list[tuple[str, float]], share: float) -> None:
    found = influence_shares(weighed, peer_factors(weighed, share))
    assert found.keys() == peer_weights(weighed).keys()
    assert not found or sum(found.values()) == pytest.approx(1)
    assert all(part <= max(share, 1 / len(found)) * (1 + 1e-6) for part in found.values())


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=1, max_size=4), st.integers(0, 2))
def test_a_pull_is_half_the_gradient_norm_at_the_logits(rows: list[list[float]], token: int) -> None:
    logits = torch.tensor(rows, dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(-1)[:, token : token + 1]
    factors = torch.arange(1.0, len(rows) + 1, dtype=torch.float64)[:, None]
    (gradient,) = torch.autograd.grad((logp * factors).sum(), logits)
    leaf = logp.detach().requires_grad_()
    found = logit_pulls((leaf * factors).sum(), leaf)
    torch.testing.assert_close(found, gradient.abs().sum(1) / 2, rtol=1e-9, atol=1e-12)


def test_padding_has_no_pull() -> None:
    leaf = torch.tensor([[-1.0, float("nan")]], requires_grad=True)
    assert logit_pulls(leaf[:, :1].sum(), leaf).tolist() == pytest.approx([1 - 0.36787944])
