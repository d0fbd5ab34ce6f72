"""One seed of an experts run: train the models to branch off, probe the domains, allot, train the experts.

Every part is kept where it was made and not made again, so the same command goes on where an earlier one stopped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from planaria.checkpoint.loading import load_model
from planaria.checkpoint.store import CheckpointStore
from planaria.config import RunConfig
from planaria.errors import RunStopped
from planaria.experts.budget import SYNCHRONISED, Job, allot, bills
from planaria.experts.difficulty import Point, still_to_learn, tiers
from planaria.experts.domains import HELD_OUT, TRAINED
from planaria.experts.experts_results import SeedResult
from planaria.experts.experts_spec import ExpertsSpec, sized, step_tokens
from planaria.experts.listening import Listener
from planaria.experts.reading import Readings, Texts, token_logps
from planaria.experts.scoring import arm_result
from planaria.experts.training import Training, configured, train_all
from planaria.trials.jobs import Watcher

QUARTERS = 4
"""points of a probe's learning curve"""


@dataclass
class Campaign:
    """What one seed needs to know."""

    spec: ExpertsSpec
    base: RunConfig
    folder: Path
    """of the whole run, with the domains' texts and the tokenizer"""
    seed: int
    texts: Texts
    watcher: Watcher
    parents: dict[str, Training] = field(default_factory=dict)
    """size → the model that experts of that size branch off"""
    curves: dict[str, list[Point]] = field(default_factory=dict)
    """domain → the probe's held-out losses"""

    @property
    def own(self) -> Path:
        return self.folder / f"seed-{self.seed}"

    @property
    def middle(self) -> Training:
        sizes = list(self.spec.sizes)
        return self.parents[sizes[len(sizes) // 2]]

    def run(self) -> SeedResult:
        """All of it; what came of it.

        :raises RunStopped: when a model that others rest on could not be trained.
        """
        self.parents = {size: self._parent(size) for size in self.spec.sizes}
        self._must("models to branch off", list(self.parents.values()))
        difficulty = {str(by): self._difficulty(by) for by in self.spec.probe.by}
        tier = {by: tiers(hard, len(self.spec.sizes)) for by, hard in difficulty.items()}
        arms = self._arms(tier)
        cost = bills(arms, sized(self.base.model, self.spec), step_tokens(self.base))
        experts = {job.name: self._expert(job) for jobs in arms.values() for job in jobs}
        lost = self._train("experts", list(experts.values()))
        readings = {name: self._read(one) for name, one in experts.items() if name not in lost}
        places = self._places()
        for arm, jobs in arms.items():
            if not readings.keys() & {job.name for job in jobs}:
                raise RunStopped(f"{self.own}: none of the experts of {arm} could be trained; see their .log files")
        return SeedResult(
            seed=self.seed,
            difficulty=difficulty,
            tier=tier,
            curves={name: [(point.step, point.loss) for point in curve] for name, curve in self.curves.items()},
            parent=self._read(self.middle).losses,
            single={name: found.losses for name, found in readings.items()},
            lost=lost,
            arms={arm: arm_result(jobs, cost[arm], readings, self.spec, places) for arm, jobs in arms.items()},
        )

    def _places(self) -> Mapping[str, Tensor]:
        """What the texts tell of the experts: of this seed's parent's hidden states, or the same for all seeds."""
        mixture, domains = self.spec.mixture, list(self.spec.domains)
        if mixture.prior != "ridge":
            return self.texts.places
        listener = Listener.beside(self.middle.model, self.folder, domains, self.base.data.cache)
        return self.texts.told(lambda samples: listener.priors(samples, domains, mixture.temperature))

    def _difficulty(self, by: str) -> dict[str, float]:
        """Domain → how hard it is, told by one of the ways there are."""
        if by == "hand":
            return {name: float(domain.hand or 0) for name, domain in self.spec.domains.items()}
        if by == "seed_loss":
            return self._read(self.middle).held_out_losses
        if by == "sizes":
            smallest, *_, largest = (self._read(parent).held_out_losses for parent in self.parents.values())
            return {name: loss - largest[name] for name, loss in smallest.items()}
        return self._probed()

    def _probed(self) -> dict[str, float]:
        """Nats that the last doubling of a probe's steps brought, for each domain."""
        probes = {name: self._probe(name) for name in self.spec.domains}
        self._must("probes", list(probes.values()))
        found = {}
        for name, probe in probes.items():
            saved = CheckpointStore(probe.folder / "checkpoints").list()
            held_out = self.texts.held_out[name]
            curve = [Point(one.step, -float(token_logps(load_model(one).eval(), held_out).mean())) for one in saved]
            self.curves[name], found[name] = curve, still_to_learn(curve)
            self.watcher.said(f"{name}: {found[name]:.4f} nats learned in the last doubling of {curve[-1].step} steps")
        return found

    def _arms(self, tier: Mapping[str, Mapping[str, int]]) -> dict[str, list[Job]]:
        """Arm → its jobs. Further ways to tell what is hard add uneven arms; the even one is the same for all."""
        found: dict[str, list[Job]] = {}
        for by, tiered in tier.items():
            for arm, jobs in allot(tiered, list(self.spec.sizes), self.spec.steps).items():
                if by == self.spec.probe.by[0]:
                    found[arm] = jobs
                elif arm != SYNCHRONISED:
                    found[f"{arm}, by {by}"] = jobs
        return found

    def _parent(self, size: str) -> Training:
        changes = {"train": {"steps": self.spec.seed.steps}, "optim": {"lr": self.spec.seed.lr}}
        return self._training("seeds", size, size, TRAINED, changes)

    def _probe(self, domain: str) -> Training:
        steps, parent = self.spec.probe.steps, self.middle
        saves = {"every": steps // QUARTERS, "keep": QUARTERS + 2}
        changes = {"train": {"steps": steps, "start": str(parent.model)}, "checkpoint": saves}
        return self._training("probes", domain, parent.config.name, f"{TRAINED}/{domain}.jsonl", changes)

    def _expert(self, job: Job) -> Training:
        changes = {"train": {"steps": job.steps, "start": str(self.parents[job.size].model)}}
        return self._training("experts", job.name, job.size, f"{TRAINED}/{job.domain}.jsonl", changes)

    def _training(self, shelf: str, name: str, size: str, source: str, changes: Mapping[str, Any]) -> Training:
        """A model of this size that reads ``source``."""
        data = {
            "source": str((self.folder / source).absolute()),
            "field": "text",
            "tokenizer": str((self.folder / "tokenizer.json").absolute()),
            "validation": HELD_OUT,
        }
        own = {"name": name, "out": str(self.own / shelf), "seed": self.seed, "data": data}
        return Training(configured(self.base, own | {"model": {"hidden": self.spec.sizes[size]}, **changes}))

    def _read(self, one: Training) -> Readings:
        return self.texts.read(one.model)

    def _train(self, what: str, trainings: Sequence[Training]) -> list[str]:
        return train_all(f"{what} of seed {self.seed}", trainings, self.spec, self.spec.retries, self.watcher)

    def _must(self, what: str, trainings: Sequence[Training]) -> None:
        """Train what everything else rests on."""
        if lost := self._train(what, trainings):
            log = next(one for one in trainings if one.config.name == lost[0]).log
            raise RunStopped(f"{self.own}: {', '.join(lost)} could not be trained, and all experts need it; see {log}")
