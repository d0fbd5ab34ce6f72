"""Repair strategies and their baselines: each returns weights and none knows the attack.

All use the same texts and steps. The mask (arXiv 2405.09055) and the mixing of layers by cosine (SafeMERGE, arXiv
2503.17239) are published; the functions state how they differ here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from planaria.common.errors import UserError
from planaria.models import masking, task_vectors
from planaria.models.masking import Mask
from planaria.models.task_vectors import Named
from planaria.swarm.attacks import measured_attack
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.random_draws import generator
from planaria.swarm.repair.exams import Exam, Reviewer, TaskExam, collect_texts, repair_problems
from planaria.swarm.repair.repair_results import BACK, LAYERS, MASK, MIX, RANDOM, TUNE, TUNE_PARENT, StrategyResult
from planaria.swarm.repair.repair_training import RepairModels, RepairPlan, fine_tune, train_masks
from planaria.swarm.repair.texts import RepairTexts
from planaria.swarm.tasks.base import Task

ALPHAS = (0.25, 0.5, 0.75)
"""tried fractions between the parent (0) and the model (1)"""
DAMPED = (0.0, 0.5)
"""tried fractions for layers that oppose the trusted direction"""


@dataclass(frozen=True)
class Case:
    """A model to repair, its training texts and its measurement."""

    models: RepairModels
    texts: RepairTexts
    plan: RepairPlan
    exam: Exam


@dataclass(frozen=True)
class Repair:
    """Repaired weights and how they were selected."""

    weights: Named
    detail: str = ""
    masks: Sequence[Mask] = ()


def parent_weights(case: Case) -> Repair:
    return Repair(case.models.parent)


def mix(case: Case) -> Repair:
    """Interpolate between parent and model; α selected by the exam."""
    parent, whole = case.models.parent, case.models.whole
    alpha = max(ALPHAS, key=lambda a: _fit(case, task_vectors.interpolate(parent, whole, a)))
    return Repair(task_vectors.interpolate(parent, whole, alpha), f"α = {alpha:g}")


def tune(case: Case) -> Repair:
    return Repair(fine_tune(case.models.tuned, case.texts, case.models.teachers, case.plan))


def tune_parent(case: Case) -> Repair:
    """Fine-tune the parent: a baseline without the harmed model's learning."""
    return Repair(fine_tune(case.models.safe, case.texts, case.models.teachers, case.plan))


def train_mask(case: Case) -> Repair:
    """Train a bit per parameter and part: keep it, or reset it to the parent's."""
    models = case.models
    result = train_masks(models.tuned, models.parts, models.merge, case.texts, models.teachers, case.plan)
    return _masked_repair(case, result)


def random_mask(case: Case, masks: Sequence[Mask]) -> Repair:
    """Shuffle masks: keep the same share of each tensor, at random."""
    draws = generator("repair", case.plan.seed, "random")
    return _masked_repair(case, [masking.random_mask(one, draws) for one in masks])


def mix_layers(case: Case, trusted: Named) -> Repair:
    """Reset tensors whose task vectors oppose the trusted direction to the parent, wholly or half.

    SafeMERGE uses the direction from an unaligned parent to an aligned model. No such pair is available here: the
    direction is that of the parent fine-tuned on the trusted texts, whose weights are ``trusted``. The threshold is one
    of the cosines, selected by the exam.
    """
    parent, whole = case.models.parent, case.models.whole
    cosines = task_vectors.agreement(task_vectors.task_vector(whole, parent), task_vectors.task_vector(trusted, parent))
    ranked = sorted(cosines.values())
    limits = [ranked[len(ranked) * quarter // 4] for quarter in (1, 2, 3)]
    candidates = [
        ({n: 1.0 if c >= limit else damp for n, c in cosines.items()}, limit) for limit in limits for damp in DAMPED
    ]
    alphas, limit = max(candidates, key=lambda one: _fit(case, task_vectors.interpolate(parent, whole, one[0])))
    damp = min(alphas.values())
    return Repair(task_vectors.interpolate(parent, whole, alphas), f"α = {damp:g} where cosine < {limit:.2f}")


STRATEGIES: Mapping[str, Callable[[Case], Repair]] = {BACK: parent_weights, MIX: mix, TUNE: tune, MASK: train_mask}
"""strategies that a user may choose"""


def measure_all(case: Case) -> list[StrategyResult]:
    """Measure every strategy and baseline."""
    result = {by: route(case) for by, route in STRATEGIES.items()}
    result[RANDOM], result[TUNE_PARENT] = random_mask(case, result[MASK].masks), tune_parent(case)
    result[LAYERS] = mix_layers(case, result[TUNE_PARENT].weights)
    return [measure_repair(case, by, repair) for by, repair in result.items()]


def measure_repair(case: Case, by: str, repair: Repair) -> StrategyResult:
    return StrategyResult(by=by, detail=repair.detail, after=case.exam.measure(case.models.policy(repair.weights)))


def _masked_repair(case: Case, masks: Sequence[Mask]) -> Repair:
    shares = ", ".join(f"{masking.density(one):.0%}" for one in masks)
    return Repair(case.models.merge(masks), f"{shares} kept", masks)


def _fit(case: Case, weights: Named) -> tuple[float, ...]:
    return case.exam.fit(case.models.policy(weights))


def make_case(config: SwarmConfig, task: Task, models: RepairModels, watch: Sequence[str], plan: RepairPlan) -> Case:
    """Return the repair case of a peer of this configuration, for the attacks in ``watch``.

    :raises UserError: if ``watch`` is empty, there is no judge, or the judge passes no text.
    """
    if not watch:
        raise UserError("the run watches for no attack (evaluate.watch); pass the attack, such as --watch text")
    attacks = [measured_attack(kind, config.evaluate.phrases) for kind in watch]
    problems, choosing = repair_problems(task, attacks, plan.seed)
    reviewer = Reviewer(config, task, models.tuned)
    texts = collect_texts(reviewer, problems, models.tuned, models.safe)
    return Case(models, texts, plan, TaskExam(config, reviewer, choosing, watch))
