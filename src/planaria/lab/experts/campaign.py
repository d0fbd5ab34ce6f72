"""The arms of an experts run, and one seed of it: train parents, probe domains, allot compute, train experts.

Every finished part is kept and not repeated, so the same command resumes an interrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

from torch import Tensor

from planaria.common.errors import RunStopped
from planaria.config.schema import RunConfig
from planaria.lab.experts.budget import (
    GENERALIST,
    SYNCHRONISED,
    ArmCost,
    ExpertPlan,
    allot_jobs,
    arm_cost,
    arm_costs,
    generalist,
    is_generalist,
)
from planaria.lab.experts.domains import GENERAL, TRAINED
from planaria.lab.experts.ensemble import prior_of_parent
from planaria.lab.experts.experts_results import SeedResult
from planaria.lab.experts.experts_spec import ExpertsSpec, expert_shapes, step_tokens
from planaria.lab.experts.lineage import (
    ProbeLoss,
    chains,
    lineages,
    numbered_name,
    parent_seed,
    remaining_gain,
    tier_of_domains,
)
from planaria.lab.experts.log_probabilities import DomainLogProbabilities, DomainTexts, sources, token_logps
from planaria.lab.experts.scoring import arm_result
from planaria.lab.experts.training import Training, train_all, with_changes
from planaria.runtime.checkpoint.loading import load_model
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.trials.jobs import Watcher

QUARTERS = 4
"""points of a probe's learning curve"""
Line = Mapping[str, str]
"""size → the parent that experts of this size branch off"""


def arms_of(spec: ExpertsSpec, base: RunConfig, tier: Mapping[str, Mapping[str, int]]) -> dict[str, list[ExpertPlan]]:
    """Return arm → its jobs. ``tier``: measure of difficulty → domain → its tier.

    Further measures of difficulty add uneven arms; the even arm is the same for all, and its cost is the budget of each
    generalist.
    """
    arms: dict[str, list[ExpertPlan]] = {}
    for by, tiers in tier.items():
        for arm, jobs in allot_jobs(tiers, list(spec.sizes), spec.steps).items():
            if by == spec.probe.by[0]:
                arms[arm] = jobs
            elif arm != SYNCHRONISED:
                arms[f"{arm}, by {by}"] = jobs
    models, tokens = expert_shapes(base.model, spec), step_tokens(base)
    flops = arm_cost(arms[SYNCHRONISED], models, tokens).flops
    for size in spec.rivals:
        arm, job = generalist(size, flops, models[size], tokens)
        arms[arm] = [job]
    return arms


def costs(spec: ExpertsSpec, base: RunConfig, arms: Mapping[str, list[ExpertPlan]]) -> dict[str, ArmCost]:
    """Return arm → its cost.

    :raises UserError: when arms of experts differ in cost.
    """
    return arm_costs(arms, expert_shapes(base.model, spec), step_tokens(base), {*spec.speaking, GENERALIST})


def require_equal_costs(spec: ExpertsSpec, base: RunConfig) -> None:
    """Check before anything runs that all arms cost the same, given the number of domains in each tier.

    :raises UserError: as :func:`costs` does.
    """
    costs(spec, base, _planned_arms(spec, base))


def planned_models(spec: ExpertsSpec, base: RunConfig) -> dict[str, list[int]]:
    """Return size → the steps of each of its models that a seed trains, with the tiers of a single measure."""
    jobs = {job.name: job for jobs in _planned_arms(spec, base).values() for job in jobs}
    steps = {size: [spec.seed.steps] * spec.parents for size in spec.sizes}
    if "probe" in spec.probe.by:
        steps[spec.middle] += [spec.probe.steps] * len(spec.domains)
    for job in jobs.values():
        steps[job.size] += [job.steps] * spec.parents
    return steps


def _planned_arms(spec: ExpertsSpec, base: RunConfig) -> dict[str, list[ExpertPlan]]:
    """Return arm → its jobs, with the number of domains in each tier but an arbitrary order of difficulty."""
    tiers = tier_of_domains(dict.fromkeys(spec.domains, 0.0), spec.after, len(spec.sizes))
    return arms_of(spec, base, {spec.probe.by[0]: tiers})


def schedule_steps(spec: ExpertsSpec, job: ExpertPlan) -> int:
    """Return the length in steps of the learning-rate schedule that a job begins; 0: the job's own length.

    A generalist's schedule is scaled like the even arm's, so both end at the same rate.
    """
    if job.domain != GENERALIST:
        return spec.schedule_steps
    return spec.schedule_steps * job.steps // spec.steps[len(spec.steps) // 2]


@dataclass
class Campaign:
    """One seed of an experts run."""

    spec: ExpertsSpec
    base: RunConfig
    folder: Path
    """folder of the whole run, with the domains' texts and the tokenizer"""
    seed: int
    texts: DomainTexts
    watcher: Watcher
    parents: dict[str, Training] = field(default_factory=dict)
    """name → a model that experts branch off"""
    curves: dict[str, list[ProbeLoss]] = field(default_factory=dict)
    """domain → the probe's held-out losses"""

    @property
    def own(self) -> Path:
        return self.folder / f"seed-{self.seed}"

    def run(self) -> list[SeedResult]:
        """Run everything; return the results of each line of descent.

        :raises RunStopped: when a model that others depend on could not be trained.
        """
        numbers = range(self.spec.parents)
        self.parents = {numbered_name(size, n): self._parent(size, n) for size in self.spec.sizes for n in numbers}
        self._require("models to branch off", list(self.parents.values()))
        difficulty = {str(by): self._difficulty(by) for by in self.spec.probe.by}
        tier = {by: tier_of_domains(hard, self.spec.after, len(self.spec.sizes)) for by, hard in difficulty.items()}
        arms = arms_of(self.spec, self.base, tier)
        cost = costs(self.spec, self.base, arms)
        lines = lineages(list(self.spec.sizes), self.spec.parents, self.seed)
        jobs = {job.name: job for jobs in arms.values() for job in jobs}
        experts = [{name: self._expert(job, n, line) for name, job in jobs.items()} for n, line in enumerate(lines)]
        lost = self._train_experts(jobs, experts)
        return [
            SeedResult(
                seed=self.seed,
                line=n,
                parents=dict(line),
                difficulty=difficulty,
                tier=tier,
                curves={name: [(point.step, point.loss) for point in curve] for name, curve in self.curves.items()},
                parent=self._read_texts(self.parents[line[self.spec.middle]]).losses,
                branched={size: self._read_texts(self.parents[name]).losses for size, name in line.items()},
                **self._results(arms, cost, experts[n], lost, self._text_priors(line)),
            )
            for n, line in enumerate(lines)
        ]

    def _results(
        self,
        arms: Mapping[str, Sequence[ExpertPlan]],
        cost: Mapping[str, ArmCost],
        experts: Mapping[str, Training],
        lost: Sequence[str],
        positions: Mapping[str, Tensor],
    ) -> dict[str, Any]:
        """Return the arms' results in one line of descent."""
        missing = [name for name, training in experts.items() if training.config.name in lost]
        speaking = {*self.spec.speaking, GENERALIST}
        members = {arm: [job for job in jobs if job.domain in speaking] for arm, jobs in arms.items()}
        members_trained = {job.name for jobs in members.values() for job in jobs} - set(missing)
        readings = {name: self._read_texts(experts[name]) for name in experts if name in members_trained}
        untrained_arms = [arm for arm, jobs in members.items() if not readings.keys() & {job.name for job in jobs}]
        for arm in untrained_arms:
            if not is_generalist(arm):
                raise RunStopped(f"{self.own}: none of the experts of {arm} could be trained; see their .log files")
        return {
            "single": {name: reading.losses for name, reading in readings.items()},
            "lost": [experts[name].config.name for name in missing],
            "arms": {
                arm: arm_result(jobs, cost[arm], readings, self.spec, positions)
                for arm, jobs in members.items()
                if arm not in untrained_arms
            },
        }

    def _text_priors(self, line: Line) -> Mapping[str, Tensor]:
        """Return the text priors of a line's experts: by its parent of middle size, or the same for all lines."""
        mixture, domains = self.spec.mixture, self.spec.speaking
        if not mixture.is_fitted_on_parent:
            return self.texts.text_priors
        parent, texts = self.parents[line[self.spec.middle]].model, {name: self.spec.parts(name) for name in domains}
        prior = prior_of_parent(parent, self.folder, texts, mixture, self.base.data.cache)
        return {key: prior.priors(samples, domains, mixture.temperature) for key, samples in self.texts.samples.items()}

    def _difficulty(self, by: str) -> dict[str, float]:
        """Return domain → its difficulty by one measure."""
        if by == "hand":
            return {name: float(domain.hand or 0) for name, domain in self.spec.domains.items()}
        if by == "seed_loss":
            return self._held_out(self.spec.middle)
        if by == "sizes":
            smallest, *_, largest = (self._held_out(size) for size in self.spec.sizes)
            return {name: loss - largest[name] for name, loss in smallest.items()}
        return self._probe_difficulty()

    def _held_out(self, size: str) -> dict[str, float]:
        """Return domain → mean held-out loss of the parents of this size."""
        all_of = [
            self._read_texts(self.parents[numbered_name(size, n)]).held_out_losses for n in range(self.spec.parents)
        ]
        return {name: fmean(losses[name] for losses in all_of) for name in self.spec.domains}

    def _probe_difficulty(self) -> dict[str, float]:
        """Return domain → nats learned in the last doubling of a probe's steps."""
        probes = {name: self._probe(name) for name in self.spec.domains}
        self._require("probes", list(probes.values()))
        nats = {}
        for name, probe in probes.items():
            saved = CheckpointStore(probe.folder / "checkpoints").list()
            held_out = self.texts.held_out[name]
            curve = [
                ProbeLoss(checkpoint.step, -float(token_logps(load_model(checkpoint).eval(), held_out).mean()))
                for checkpoint in saved
            ]
            self.curves[name], nats[name] = curve, remaining_gain(curve)
            self.watcher.print_note(
                f"{name}: {nats[name]:.4f} nats learned in the last doubling of {curve[-1].step} steps"
            )
        return nats

    def _parent(self, size: str, number: int) -> Training:
        spec = self.spec.seed
        own = {"lr": spec.lr, "warmup": spec.warmup, "final_lr": spec.final_lr}
        optim = {name: setting for name, setting in own.items() if setting is not None}
        text = {"source": str((self.folder / (GENERAL if spec.text.source else TRAINED)).absolute())}
        changes = {"train": {"steps": spec.steps}, "optim": optim, "seed": parent_seed(self.seed, number)}
        return self._training("seeds", numbered_name(size, number), size, text, changes)

    def _probe(self, domain: str) -> Training:
        steps, middle = self.spec.probe.steps, self.spec.middle
        saves = {"every": steps // QUARTERS, "keep": QUARTERS + 2}
        changes = {"train": {"steps": steps, "start": str(self.parents[middle].model)}, "checkpoint": saves}
        return self._training("probes", domain, middle, self._text(domain), changes)

    def _expert(self, job: ExpertPlan, number: int, line: Line) -> Training:
        """Return the training of a job in the ``number``-th line of descent."""
        before = self._previous_expert(job)
        start = self.parents[line[job.size]] if before is None else self._expert(before, number, line)
        schedule = schedule_steps(self.spec, job)
        changes = {"train": {"steps": job.steps, "schedule_steps": schedule, "start": str(start.model)}}
        return self._training("experts", numbered_name(job.name, number), job.size, self._text(job.domain), changes)

    def _previous_expert(self, job: ExpertPlan) -> ExpertPlan | None:
        """Return the expert that a job's branches off, of the domain before its own, or None for a parent."""
        domain = self.spec.after.get(job.domain)
        return job.model_copy(update={"domain": domain}) if domain else None

    def _text(self, domain: str) -> dict[str, Any]:
        return sources(self.spec.parts(domain), self.folder / TRAINED)

    def _training(
        self, subfolder: str, name: str, size: str, text: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> Training:
        """Return the training of a model of this size that reads ``text``."""
        own_validation = self.base.data.validation if self.base.train.eval_every else 0.0
        data = {
            **text,
            "field": "text",
            "tokenizer": str((self.folder / "tokenizer.json").absolute()),
            "validation": own_validation,
        }
        own = {"name": name, "out": str(self.own / subfolder), "seed": self.seed, "data": data}
        return Training(with_changes(self.base, own | {"model": {"hidden": self.spec.sizes[size]}, **changes}))

    def _read_texts(self, training: Training) -> DomainLogProbabilities:
        return self.texts.read(training.model)

    def _train_experts(self, jobs: Mapping[str, ExpertPlan], lines: Sequence[Mapping[str, Training]]) -> list[str]:
        """Train the experts of all lines, each after the one it branches off; return the names of lost ones."""
        depth = {domain: at for chain in chains(self.spec.after) for at, domain in enumerate(chain)}
        lost = list[str]()
        for at in range(max(depth.values()) + 1):
            due = [(line, job) for line in lines for job in jobs.values() if depth.get(job.domain, 0) == at]
            orphans = [line[job.name].config.name for line, job in due if self._has_lost_parent(job, line, lost)]
            for name in orphans:
                self.watcher.print_note(f"{name}: lost, because the model that it branches off is lost")
            remaining = [line[job.name] for line, job in due if line[job.name].config.name not in orphans]
            lost += orphans + self._train("experts", remaining)
        return lost

    def _has_lost_parent(self, job: ExpertPlan, line: Mapping[str, Training], lost: Sequence[str]) -> bool:
        before = self._previous_expert(job)
        return before is not None and line[before.name].config.name in lost

    def _train(self, kind: str, trainings: Sequence[Training]) -> list[str]:
        return train_all(f"{kind} of seed {self.seed}", trainings, self.spec, self.spec.retries, self.watcher)

    def _require(self, kind: str, trainings: Sequence[Training]) -> None:
        if lost := self._train(kind, trainings):
            log = next(training for training in trainings if training.config.name == lost[0]).log
            raise RunStopped(f"{self.own}: {', '.join(lost)} could not be trained, and all experts need it; see {log}")
