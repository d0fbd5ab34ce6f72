"""Robust aggregation on digits: lying workers, unlike data, and replicas that agree by MoNNA."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from benchmarks.exchange_in_process import Replica
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, by_case, one_thread, ratios, start
from planaria.exchange.base import Update
from planaria.exchange.monna import MoNNA, nearest
from planaria.exchange.robust.combining import combine
from planaria.exchange.robust.products import NotFinite
from planaria.exchange.robust.rules import make_robust_aggregator
from planaria.exchange.update_attacks import AttackView, VectorAttack, make_attack

if TYPE_CHECKING:
    from torch import Generator, Tensor

    Attack = Callable[[Tensor, int, Generator], Tensor]  # honest vectors [n − f, d], f → Byzantine vectors [f, d]


RULES: dict[str, dict[str, Any] | None] = {
    "mean": None,
    "median": {"rule": "median"},
    "trimmed mean": {"rule": "trimmed_mean"},
    "Krum": {"rule": "krum"},
    "multi-Krum": {"rule": "multikrum"},
    "geometric median": {"rule": "geometric_median", "rounds": 8},
    "centered clipping": {"rule": "clipping", "rounds": 1},
    "Flag, 1 round": {"rule": "flag", "rounds": 1},
    "Flag, 5 rounds": {"rule": "flag", "rounds": 5},
    "NNM, median": {"rule": "median", "mix": "nnm"},
    "NNM, trimmed mean": {"rule": "trimmed_mean", "mix": "nnm"},
    "bucketing, geometric median": {"rule": "geometric_median", "rounds": 8, "mix": "bucketing"},
    "bucketing, clipping": {"rule": "clipping", "rounds": 1, "mix": "bucketing"},
}
MAY_FAIL = {"mean", "Krum"}


def shipped(name: str, strength: float) -> Attack:
    """Return an attack of planaria whose Byzantine workers know all honest vectors."""

    def attack(x: Tensor, f: int, generator: Generator) -> Tensor:
        chosen, known = make_attack(name, strength), dict(enumerate(x))
        assert isinstance(chosen, VectorAttack)
        scenes = [AttackView(own, known, len(x) + f, f, 0, generator) for own in x[:f]]
        return torch.stack([chosen.vector(scene) for scene in scenes])

    return attack


def attacks() -> Mapping[str, Attack | None]:
    """The vectors of Byzantine workers; the first two attacks are drawn for all at once."""

    def gaussian(x: Tensor, f: int, generator: Generator) -> Tensor:
        noise = torch.randn(f, x.shape[1], generator=generator)
        return 10 * x.mean(0).norm() * noise / noise.norm(dim=1, keepdim=True)

    return {
        "none": None,
        "uniform": lambda x, f, generator: torch.rand(f, x.shape[1], generator=generator),
        "Gaussian × 10": gaussian,
        "sign flip × 10": shipped("sign_flip", 10),
        "own flip × 10": shipped("own_flip", 10),
        "IPM 0.1": shipped("ipm", 0.1),
        "IPM 1.1": shipped("ipm", 1.1),
        "ALIE 1.5": shipped("alie", 1.5),
    }


@dataclass(frozen=True)
class Setting:
    """The data and training of the workers."""

    workers: int
    byzantine: int
    steps: int
    lr: float = 0.2
    momentum: float = 0.0  # β of each worker: m ← βm + (1 − β)g; it sends m
    spread: float | None = None  # α of the Dirichlet distribution of digits over workers; None: equal data


class Outcome(NamedTuple):
    """Results on held-out images."""

    accuracy: float
    loss: float


class Digits:
    """Images distributed over workers, and a net of 64-64-10."""

    def __init__(self, setting: Setting, seed: int) -> None:
        from sklearn.datasets import load_digits

        found = load_digits()
        self.images = torch.tensor(found.data, dtype=torch.float32) / 16
        self.digits = torch.tensor(found.target)
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self.digits), generator=self.generator)
        train, self.test = order[:1400], order[1400:]
        self.of = [train] * setting.workers
        if setting.spread is not None:
            self.of = shared_out(train, self.digits, setting.workers, setting.spread, seed)
        torch.manual_seed(seed)
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
        self.weights = torch.cat([p.detach().reshape(-1) for p in net.parameters()])

    def gradients(self, weights: Tensor, workers: Sequence[int], size: int = 32, flipped: int = 0) -> Tensor:
        """Return the gradients [n, d] of a batch per worker at its weights [n, d], for all workers at once.

        The first ``flipped`` workers see 9 − y for each digit y."""
        mine = [self.of[worker] for worker in workers]
        batch = torch.stack([own[torch.randint(len(own), (size,), generator=self.generator)] for own in mine])
        labels = self.digits[batch]
        labels[:flipped] = 9 - labels[:flipped]
        x, (w1, b1, w2, b2) = self.images[batch], _layers(weights)
        hidden = (x @ w1.mT + b1).relu()
        wrong = (hidden @ w2.mT + b2).softmax(-1) - torch.nn.functional.one_hot(labels, 10)
        wrong = wrong / size
        back = (wrong @ w2) * (hidden > 0)
        parts = [back.mT @ x, back.sum(1), wrong.mT @ hidden, wrong.sum(1)]
        return torch.cat([part.flatten(1) for part in parts], dim=1)

    def outcome(self, weights: Tensor) -> Outcome:
        w1, b1, w2, b2 = (part[0] for part in _layers(weights.unsqueeze(0)))
        logits, wanted = (self.images[self.test] @ w1.T + b1).relu() @ w2.T + b2, self.digits[self.test]
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        return Outcome(float((logits.argmax(1) == wanted).float().mean()), float(loss))


def _layers(weights: Tensor) -> tuple[Tensor, ...]:
    w1, b1, w2, b2 = weights.split([64 * 64, 64, 10 * 64, 10], dim=1)
    return w1.unflatten(1, (64, 64)), b1.unsqueeze(1), w2.unflatten(1, (10, 64)), b2.unsqueeze(1)


def shared_out(train: Tensor, digits: Tensor, workers: int, alpha: float, seed: int) -> list[Tensor]:
    """Return images by worker, with shares of each digit from a symmetric Dirichlet distribution."""
    draw = np.random.default_rng(seed)
    of: list[list[Tensor]] = [[] for _ in range(workers)]
    for digit in range(10):
        images = train[digits[train] == digit]
        ends = (np.cumsum(draw.dirichlet([alpha] * workers)) * len(images)).round().astype(int)
        for worker, part in enumerate(torch.tensor_split(images, ends[:-1].tolist())):
            of[worker].append(part)
    found = [torch.cat(parts) for parts in of]
    return [each if len(each) else train[:1] for each in found]


def learnt(setting: Setting, seed: int, rule: Mapping[str, Any] | None, attack: Attack | str | None) -> Outcome:
    """Train and evaluate; with "label flip", Byzantine workers compute honestly on flipped labels."""
    digits, byzantine = Digits(setting, seed), setting.byzantine if attack else 0
    made = None if rule is None else make_robust_aggregator({"byzantine": setting.byzantine, **rule}, setting.workers)
    flipped = byzantine if attack == "label flip" else 0
    computing = range(byzantine - flipped, setting.workers)
    momenta = torch.zeros(len(computing), len(digits.weights))
    last: Tensor | None = None
    for step in range(setting.steps):
        new = digits.gradients(digits.weights.expand(len(computing), -1), computing, flipped=flipped)
        momenta = setting.momentum * momenta + (1 - setting.momentum) * new
        updates = torch.cat([attack(momenta, byzantine, digits.generator), momenta]) if callable(attack) else momenta
        try:
            last = updates.mean(0) if made is None else combine(made.rule, list(updates), made.mix, step, last).value
        except NotFinite:  # the weights have diverged
            digits.weights = digits.weights * math.nan
            break
        digits.weights = digits.weights - setting.lr * last
    return digits.outcome(digits.weights)


def _accuracy(setting: Setting, what: str, rule: str, seed: int) -> float:
    return learnt(setting, seed, RULES[rule], attacks()[what]).accuracy


SIZES = {"seeds": Flag([1, 2, 3]), "steps": Flag(300), "workers": Flag(15), "byzantine": Flag(3), "processes": Flag(2)}


@benchmark("robust", **SIZES)
def run_robust(args: Namespace) -> Measurement:
    """Measure robust rules on handwritten digits: three of fifteen workers are Byzantine in every step.

    A net of 64-64-10, batches of 32, SGD at 0.2, equal data, 300 steps; accuracy on 397 held-out images. Claims: where
    the mean ends at 0.80 or less, every rule within its limit ends at 0.90 or more (Krum may fail); without attack no
    rule costs more than 0.02. Needs the extra experts (scikit-learn's digits).
    """
    setting = Setting(args.workers, args.byzantine, args.steps)
    cases = product(attacks(), RULES, args.seeds)
    values = by_case(args.processes, _accuracy, cases, setting, begin=one_thread)
    rows: list[Row] = []
    for what, name in product(attacks(), RULES):
        own, plain = ([values[what, rule, seed] for seed in args.seeds] for rule in (name, "mean"))
        mean, claim = median(plain), None
        if what == "none" and name not in MAY_FAIL:
            claim = Claim(low=mean - 0.02)
        elif mean <= 0.80 and name not in MAY_FAIL:
            claim = Claim(low=0.90)
        rows.append(Row(f"{what}: {name}", own, f"mean {mean:.3f}", claim, judged="median"))
    return rows


SHOWN = [rule for rule in RULES if rule != "Flag, 1 round"]


class Mimic:
    """All Byzantine workers copy the honest worker furthest along the principal direction of the first steps' vectors
    (arXiv 2006.09365, section 3)."""

    FIRST = 10

    def __init__(self) -> None:
        self._said: list[Tensor] = []
        self._whom = 0

    def __call__(self, x: Tensor, f: int, generator: Generator) -> Tensor:
        if len(self._said) < self.FIRST:
            self._said.append(x)
            if len(self._said) == self.FIRST:
                centred = torch.stack(self._said) - torch.cat(self._said).mean(0)
                direction = torch.linalg.svd(centred.flatten(0, 1), full_matrices=False).Vh[0]
                self._whom = int((centred.sum(0) @ direction).abs().argmax())
        return x[self._whom].expand(f, -1)


def alie(x: Tensor, f: int, _: Generator) -> Tensor:
    return (x.mean(0) - 0.3 * x.std(0)).expand(f, -1)


def is_byzantine() -> Mapping[str, Callable[[], Attack | str | None]]:
    """Attacks, created anew for each run."""
    known = attacks()
    return {
        "none": lambda: None,
        "mimic": Mimic,
        "label flip": lambda: "label flip",
        "ALIE 0.3": lambda: alie,
        "ALIE 1.5": lambda: known["ALIE 1.5"],
        "IPM 0.1": lambda: known["IPM 0.1"],
    }


def _learnt(setting: Setting, what: str, rule: str, seed: int) -> Outcome:
    return learnt(setting, seed, RULES[rule], is_byzantine()[what]())


def differing(found: Mapping[tuple[str, str], list[Outcome]]) -> list[Row]:
    """Accuracies with unlike data, by attack."""
    values = {run: [outcome.accuracy for outcome in outcomes] for run, outcomes in found.items()}
    least = {
        ("none", "NNM, median"): median(values["none", "median"]) + 0.10,
        ("none", "bucketing, geometric median"): median(values["none", "geometric median"]) - 0.01,
    }
    rows = []
    for (what, name), own in values.items():
        claim = Claim(low=round(least[what, name], 4)) if (what, name) in least else None
        rows.append(Row(f"{what}: {name}", own, f"mean {median(values[what, 'mean']):.3f}", claim))
    return rows


def honest(found: Mapping[str, list[Outcome]]) -> list[Row]:
    rows, base = [], [mean.loss for mean in found["mean"]]
    for name, outcomes in found.items():
        if name != "mean":
            over = ratios([own.loss for own in outcomes], base)
            columns = {"accuracy": round(median(own.accuracy for own in outcomes), 3)}
            rows.append(Row(f"no attack: loss of {name}, over the mean's", over, "1", Claim(high=1.02), columns))
    return rows


@benchmark("robust_data", honest_steps=1000, **SIZES)
def run_data(args: Namespace) -> Measurement:
    """Measure robust rules on unlike data, and their cost without attack.

    As in `digits`, but with unequal digits per worker (Dirichlet, α = 0.1), momentum 0.9 and rate 1. Claims without
    attack: nearest-neighbour mixing (NNM) raises the median by 0.10 or more; buckets of two cost the geometric median
    at most 0.01. Then equal data, no attack, 1,000 steps: a rule's held-out loss is at most 1.02 of the mean's. Needs
    the extra experts.
    """
    unlike = Setting(args.workers, args.byzantine, args.steps, lr=1.0, momentum=0.9, spread=0.1)
    alike = Setting(args.workers, args.byzantine, args.honest_steps)
    first = [(unlike, what, name) for what, name in product(is_byzantine(), SHOWN)]
    runs = [*first, *((alike, "none", name) for name in SHOWN)]
    found = by_case(args.processes, _learnt, [(*run, s) for run in runs for s in args.seeds], begin=one_thread)
    by_run = {run: [found[*run, seed] for seed in args.seeds] for run in runs}
    rows = [
        *differing({(what, name): values for (setting, what, name), values in by_run.items() if setting == unlike}),
        *honest({name: values for (setting, _, name), values in by_run.items() if setting == alike}),
    ]
    notes = [
        "A member is left out of a round only for numbers that are not finite; a rule only lowers "
        f"coefficients. In {args.honest_steps * len(args.seeds) * len(SHOWN)} honest rounds no member was left out."
    ]
    return Result(rows, notes)


BATCH, CLIP, MOMENTUM = 25, 2.0, 0.99


def monna_lies() -> Mapping[str, Attack | None]:
    """The models of Byzantine replicas, given the honest ones [n − f, d]."""

    def noise(x: Tensor, f: int, generator: Generator) -> Tensor:
        return 100 * x.square().mean().sqrt() * torch.randn(f, x.shape[1], generator=generator)

    return {
        "none": None,
        "noise × 100": noise,
        "turned round": lambda x, f, _: -x.mean(0).expand(f, -1),
        "−0.1 of the mean": lambda x, f, _: -0.1 * x.mean(0).expand(f, -1),
        "ALIE 1.5": lambda x, f, _: (x.mean(0) - 1.5 * x.std(0)).expand(f, -1),
    }


def worst(args: Namespace, seed: int, believed: int, attack: Attack | None, momentum: float) -> float:
    """Return the accuracy of the worst honest replica for ``believed`` Byzantine ones; 0 means the plain mean."""
    made = MoNNA(every=1, byzantine=believed, alpha=momentum)
    setting = Setting(args.replicas, args.byzantine, args.steps, spread=1.0)
    digits, byzantine = Digits(setting, seed), range(args.byzantine if attack else 0)
    honest = range(len(byzantine), args.replicas)
    begin = {"w": digits.weights}
    of = {member: Replica(dict(begin), made.start(begin)) for member in honest}
    for step in range(args.steps):
        rate = 0.75 / (step // 50 + 1)
        gradients = digits.gradients(torch.stack([of[i].fast["w"] for i in honest]), honest, BATCH)
        gradients *= (CLIP / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)
        for replica, gradient in zip(of.values(), gradients, strict=True):
            replica.fast = {"w": replica.fast["w"] - rate * gradient}
        updates = {member: made.update(replica.outer, replica.fast) for member, replica in of.items()}
        if attack:
            models = torch.stack([update.blocking for update in updates.values() if update.blocking is not None])
            lying = attack(models, len(byzantine), digits.generator)
            updates |= {member: Update(model.clone()) for member, model in zip(byzantine, lying, strict=True)}
        for member, replica in of.items():
            replica.fast, replica.outer = made.settle(replica.outer, replica.fast, updates, member)
    return min(digits.outcome(replica.fast["w"]).accuracy for replica in of.values())


def reduction(f: int, seed: int) -> tuple[float, float]:
    """Return (α, λ) of one round: the honest spread after over before, and the squared shift of the honest mean over
    the spread before. Spread: mean squared distance from the mean."""
    draw = torch.Generator().manual_seed(seed)
    n, d = 11 * f + 1, [1, 2, 10, 100][seed % 4]
    honest = torch.randn(n - f, d, generator=draw)
    shape = seed // 4 % 4
    if shape == 1:  # two groups
        honest[: (n - f) // 2] += 10.0
    elif shape == 2:  # f outliers
        honest[:f] += 10.0
    elif shape == 3:  # unequal distances
        honest *= torch.linspace(0, 1, n - f).square().unsqueeze(1)
    away = honest - honest.mean(0)
    after = []
    for me in range(n - f):
        order = (honest - honest[me]).norm(dim=1).argsort()
        # Late models are the nearest, the farthest, or random ones. Byzantine models are near the limit of acceptance:
        # in one direction, at about the distance of the last model that would be kept.
        late = [order[1 : 1 + f], order[-f:], order[1 + torch.randperm(n - f - 1, generator=draw)[:f]]][seed // 16 % 3]
        received = {i + f: honest[i] for i in range(n - f) if i == me or i not in late.tolist()}
        reach = (honest[order[n - 3 * f]] - honest[me]).norm()
        direction = away[int(away.norm(dim=1).argmax())] if seed // 48 % 2 else away[me]
        if float(direction.norm()) == 0.0:
            direction = torch.ones(d)
        how = [0.5, 0.9, 1.0, 1.1, 2.0][int(torch.randint(5, (1,), generator=draw))]
        lie = honest[me] + how * reach * direction / direction.norm()
        received |= dict.fromkeys(range(f), lie)
        kept = nearest(received, me + f, n - 2 * f)
        after.append(torch.stack([received[j] for j in kept]).mean(0))
    new, before = torch.stack(after), float(away.square().sum(1).mean())
    moved = float((new.mean(0) - honest.mean(0)).square().sum())
    return float((new - new.mean(0)).square().sum(1).mean()) / before, moved / before


@benchmark("robust_monna", seeds=[1, 2, 3], steps=300, replicas=12, byzantine=2, placements=1000)
def run_monna(args: Namespace) -> Measurement:
    """Measure MoNNA, by which replicas average the models nearest to their own.

    Twelve replicas learn handwritten digits, two are Byzantine; Dirichlet α = 1, momentum 0.99, rate 0.75/(⌊t/50⌋ + 1),
    batches of 25, gradients clipped to 2, 300 steps. Byzantine replicas know all honest models and send noise of 100
    times a weight's size, the negated mean, −0.1 of it, or ALIE 1.5. Claim: where the mean's worst replica ends at 0.15
    or less, MoNNA's worst honest one ends at 0.90 or more. Theory: of n = 11f + 1 models in 1,000 adverse placements,
    each receives n − f and keeps n − 2f; the honest spread shrinks in one round in all. Needs the extra experts.
    """
    torch.set_num_threads(1)
    rows: list[Row] = []
    for what, attack in monna_lies().items():
        plain = [worst(args, seed, 0, attack, MOMENTUM) for seed in args.seeds]
        rows.append(Row(f"{what}: mean", plain, "1"))
        claim = Claim(low=0.90) if max(plain) <= 0.15 else None
        for momentum in (MOMENTUM, 0.0):
            found = [worst(args, seed, args.byzantine, attack, momentum) for seed in args.seeds]
            shown = claim if momentum else None
            rows.append(Row(f"{what}: MoNNA, momentum {momentum:g}", found, "1", shown, judged="least"))
    for f in (1, 2):
        alphas, lambdas = zip(*(reduction(f, seed) for seed in range(args.placements)), strict=True)
        rows.append(Row(f"n = {11 * f + 1}: spread over before", alphas, "0", Claim(high=1.0), judged="worst"))
        rows.append(Row(f"n = {11 * f + 1}: mean moved, over spread", lambdas, "0", judged="worst"))
    return rows


if __name__ == "__main__":
    start(digits=run_robust, data=run_data, monna=run_monna)
