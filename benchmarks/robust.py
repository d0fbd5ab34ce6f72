"""Robust aggregation on digits: lying workers, unlike data, and replicas that agree by MoNNA."""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from benchmarks.common import Claim, Row, conclude, parser, start

if TYPE_CHECKING:
    from torch import Generator, Tensor

    Attack = Callable[[Tensor, int, Generator], Tensor]
    "honest vectors [n − f, d], f → what liars say [f, d]"


ROBUST_NAME = "robust"
Result = TypeVar("Result")
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
    """An attack of planaria's, by liars who know what all others say; the own vector of each is that of another."""

    def attack(x: Tensor, f: int, generator: Generator) -> Tensor:
        import torch

        from planaria.exchange.attacks import attack_of
        from planaria.exchange.attacks.base import Scene, VectorAttack

        chosen, known = attack_of(name, strength), dict(enumerate(x))
        assert isinstance(chosen, VectorAttack)
        scenes = [Scene(own, known, len(x) + f, f, 0, generator) for own in x[:f]]
        return torch.stack([chosen.vector(scene) for scene in scenes])

    return attack


def attacks() -> Mapping[str, Attack | None]:
    """What liars say. The first two are drawn for all of them at once."""
    import torch

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
    """What the workers learn from, and how."""

    workers: int
    liars: int
    steps: int
    lr: float = 0.2
    momentum: float = 0.0
    """β of each worker's own: m ← βm + (1 − β)g; it says m"""
    spread: float | None = None
    """α of the Dirichlet distribution by which each worker has images of some digits more than of others; none: all
    have the same data"""


class Outcome(NamedTuple):
    """On images that nobody trained on."""

    accuracy: float
    loss: float


class Digits:
    """Images that are shared out, and a net of 64-64-10 that learns them."""

    def __init__(self, setting: Setting, seed: int) -> None:
        import torch
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
        """Of a batch of each of these ``workers`` at its weights [n, d]: [n, d]. The first so many are ``flipped``:
        they take each digit y for 9 − y. By hand, for all at once: a fraction of the time."""
        import torch

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
        """Of one model [d]."""
        import torch

        w1, b1, w2, b2 = (part[0] for part in _layers(weights.unsqueeze(0)))
        logits, wanted = (self.images[self.test] @ w1.T + b1).relu() @ w2.T + b2, self.digits[self.test]
        loss = torch.nn.functional.cross_entropy(logits, wanted)
        return Outcome(float((logits.argmax(1) == wanted).float().mean()), float(loss))


def _layers(weights: Tensor) -> tuple[Tensor, ...]:
    """Both layers' weights and biases [n, …] of models [n, d]."""
    w1, b1, w2, b2 = weights.split([64 * 64, 64, 10 * 64, 10], dim=1)
    return w1.unflatten(1, (64, 64)), b1.unsqueeze(1), w2.unflatten(1, (10, 64)), b2.unsqueeze(1)


def shared_out(train: Tensor, digits: Tensor, workers: int, alpha: float, seed: int) -> list[Tensor]:
    """Images by worker: of each digit, shares that are drawn from a symmetric Dirichlet distribution."""
    import numpy as np
    import torch

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
    """What the net has learnt after all steps; with "label flip" liars compute honestly, on flipped labels."""
    import torch

    from planaria.exchange.robust.combining import combine
    from planaria.exchange.robust.products import NotFinite
    from planaria.exchange.robust.rules import robust_of

    digits, liars = Digits(setting, seed), setting.liars if attack else 0
    made = None if rule is None else robust_of({"liars": setting.liars, **rule}, setting.workers)
    flipped = liars if attack == "label flip" else 0
    computing = range(liars - flipped, setting.workers)
    momenta = torch.zeros(len(computing), len(digits.weights))
    last: Tensor | None = None
    for step in range(setting.steps):
        new = digits.gradients(digits.weights.expand(len(computing), -1), computing, flipped=flipped)
        momenta = setting.momentum * momenta + (1 - setting.momentum) * new
        said = torch.cat([attack(momenta, liars, digits.generator), momenta]) if callable(attack) else momenta
        try:
            last = said.mean(0) if made is None else combine(made.rule, list(said), made.mix, step, last).value
        except NotFinite:  # the weights have grown beyond all numbers
            digits.weights = digits.weights * math.nan
            break
        digits.weights = digits.weights - setting.lr * last
    return digits.outcome(digits.weights)


def each(job: Callable[..., Result], *given: Sequence[object], processes: int) -> list[Result]:
    """What ``job`` makes of the first of all given, of the second, and so on, in processes beside one another."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, _by_itself) as pool:
        return list(pool.map(job, *given))


def _by_itself() -> None:
    import torch

    torch.set_num_threads(1)


def _accuracy(setting: Setting, seed: int, rule: str, what: str) -> float:
    return learnt(setting, seed, RULES[rule], attacks()[what]).accuracy


def run_robust() -> int:
    """Robust rules against liars: fifteen workers learn handwritten digits, three of them lie in every step.

    A net of 64-64-10, batches of 32, SGD at 0.2 without momentum, the same data for all, 300 steps; the share of 397
    images that were kept apart which is named right. Where the mean ends at 0.80 or less, every rule within its limit
    ends at 0.90 or more; Krum may fail and is shown. Without liars no rule costs more than 0.02. No rule is claimed to
    be the best. Needs the extra experts (scikit-learn's digits come with it).
    """
    given = arguments(parser(ROBUST_NAME, run_robust.__doc__))
    setting = Setting(given.workers, given.liars, given.steps)
    runs = list(product(attacks(), RULES, given.seeds))
    whats, rules, seeds = zip(*runs, strict=True)
    found = each(_accuracy, [setting] * len(runs), seeds, rules, whats, processes=given.processes)
    values = dict(zip(runs, found, strict=True))
    rows: list[Row] = []
    for what, name in product(attacks(), RULES):
        own, plain = ([values[what, rule, seed] for seed in given.seeds] for rule in (name, "mean"))
        mean, claim = median(plain), None
        if what == "none" and name not in MAY_FAIL:
            claim = Claim(low=mean - 0.02)
        elif mean <= 0.80 and name not in MAY_FAIL:
            claim = Claim(low=0.90)
        rows.append(Row(f"{what}: {name}", own, f"mean {mean:.3f}", claim, judged="median"))
    return conclude(ROBUST_NAME, given, rows)


def arguments(flags: argparse.ArgumentParser) -> argparse.Namespace:
    """What all benchmarks of this kind are told."""
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--workers", type=int, default=15)
    flags.add_argument("--liars", type=int, default=3)
    flags.add_argument("--processes", type=int, default=2)
    return flags.parse_args()


DATA_NAME = "robust_data"
SHOWN = [rule for rule in RULES if rule != "Flag, 1 round"]


class Mimic:
    """All liars say what one honest worker says: the one that lies furthest along the principal direction of what was
    said in the first steps (arXiv 2006.09365, section 3)."""

    FIRST = 10

    def __init__(self) -> None:
        self._said: list[Tensor] = []
        self._whom = 0

    def __call__(self, x: Tensor, f: int, generator: Generator) -> Tensor:
        import torch

        if len(self._said) < self.FIRST:
            self._said.append(x)
            if len(self._said) == self.FIRST:
                centred = torch.stack(self._said) - torch.cat(self._said).mean(0)
                direction = torch.linalg.svd(centred.flatten(0, 1), full_matrices=False).Vh[0]
                self._whom = int((centred.sum(0) @ direction).abs().argmax())
        return x[self._whom].expand(f, -1)


def alie(x: Tensor, f: int, _: Generator) -> Tensor:
    """What stays so near to the mean that nobody can tell."""
    return (x.mean(0) - 0.3 * x.std(0)).expand(f, -1)


def lies() -> Mapping[str, Callable[[], Attack | str | None]]:
    """What liars say, begun anew in each run."""
    known = attacks()
    return {
        "none": lambda: None,
        "mimic": Mimic,
        "label flip": lambda: "label flip",
        "ALIE 0.3": lambda: alie,
        "ALIE 1.5": lambda: known["ALIE 1.5"],
        "IPM 0.1": lambda: known["IPM 0.1"],
    }


def _learnt(setting: Setting, seed: int, rule: str, what: str) -> Outcome:
    return learnt(setting, seed, RULES[rule], lies()[what]())


def differing(found: Mapping[tuple[str, str], list[Outcome]]) -> list[Row]:
    """Accuracies where data differ, attack by attack."""
    values = {run: [outcome.accuracy for outcome in outcomes] for run, outcomes in found.items()}
    least = {
        ("none", "NNM, median"): median(values["none", "median"]) + 0.10,
        ("none", "bucketing, geometric median"): median(values["none", "geometric median"]) - 0.01,
    }
    return [
        Row(
            f"{what}: {name}",
            own,
            f"mean {median(values[what, 'mean']):.3f}",
            Claim(low=round(least[what, name], 4)) if (what, name) in least else None,
        )
        for (what, name), own in values.items()
    ]


def honest(found: Mapping[str, list[Outcome]]) -> list[Row]:
    """Losses over the mean's, where all are honest and have the same data."""
    return [
        Row(
            f"nobody lies: loss of {name}, over the mean's",
            [own.loss / mean.loss for own, mean in zip(outcomes, found["mean"], strict=True)],
            "1",
            Claim(high=1.02),
            {"accuracy": round(median(own.accuracy for own in outcomes), 3)},
        )
        for name, outcomes in found.items()
        if name != "mean"
    ]


def run_data() -> int:
    """Robust rules where workers' data differ, and what rules cost where nobody lies.

    Fifteen workers learn handwritten digits as in the first case, but each has images of some digits more than
    of others (Dirichlet, α = 0.1), says a momentum of 0.9, and the rate is 1; three of them lie in every step. Shown is
    the share of unseen images that is named right. Without liars, averaging over nearest neighbours (NNM) lifts the
    median by 0.10 or more, and buckets of two cost the geometric median no more than 0.01. Then, with the same data for
    all and nobody lying, 1,000 steps: a rule's loss on unseen images is at most 1.02 of the mean's. Needs the extra
    experts.
    """
    flags = parser(DATA_NAME, run_data.__doc__)
    flags.add_argument("--honest-steps", type=int, default=1000)
    given = arguments(flags)
    unlike = Setting(given.workers, given.liars, given.steps, lr=1.0, momentum=0.9, spread=0.1)
    alike = Setting(given.workers, given.liars, given.honest_steps)
    first = [(unlike, what, name) for what, name in product(lies(), SHOWN)]
    runs: list[tuple[Setting, str, str, int]] = [
        (*run, seed) for run in [*first, *((alike, "none", name) for name in SHOWN)] for seed in given.seeds
    ]
    settings, whats, names, seeds = zip(*runs, strict=True)
    found = each(_learnt, settings, seeds, names, whats, processes=given.processes)
    by_run: dict[tuple[Setting, str, str], list[Outcome]] = {}
    for (setting, what, name, _), outcome in zip(runs, found, strict=True):
        by_run.setdefault((setting, what, name), []).append(outcome)
    rows = [
        *differing({(what, name): values for (setting, what, name), values in by_run.items() if setting == unlike}),
        *honest({name: values for (setting, _, name), values in by_run.items() if setting == alike}),
    ]
    notes = [
        "A member is left out of a round only for numbers that are not finite; a rule lowers coefficients and accuses "
        f"nobody. In {given.honest_steps * len(given.seeds) * len(SHOWN)} honest rounds nobody was left out."
    ]
    return conclude(DATA_NAME, given, rows, notes)


MONNA_NAME = "robust_monna"
BATCH, CLIP, MOMENTUM = 25, 2.0, 0.99


def monna_lies() -> Mapping[str, Attack | None]:
    """What liars say for models, of those [n − f, d] that the honest ones send."""
    import torch

    def noise(x: Tensor, f: int, generator: Generator) -> Tensor:
        return 100 * x.square().mean().sqrt() * torch.randn(f, x.shape[1], generator=generator)

    return {
        "none": None,
        "noise × 100": noise,
        "turned round": lambda x, f, _: -x.mean(0).expand(f, -1),
        "−0.1 of the mean": lambda x, f, _: -0.1 * x.mean(0).expand(f, -1),
        "ALIE 1.5": lambda x, f, _: (x.mean(0) - 1.5 * x.std(0)).expand(f, -1),
    }


def worst(given: argparse.Namespace, seed: int, believed: int, attack: Attack | None, momentum: float) -> float:
    """The accuracy of the worst honest replica, if so many liars are reckoned with: 0 is the mean of all."""
    import torch

    from planaria.exchange.base import Offer
    from planaria.exchange.lab import Replica
    from planaria.exchange.monna import MoNNA

    made = MoNNA(every=1, liars=believed, alpha=momentum)
    setting = Setting(given.replicas, given.liars, given.steps, spread=1.0)
    digits, liars = Digits(setting, seed), range(given.liars if attack else 0)
    honest = range(len(liars), given.replicas)
    begin = {"w": digits.weights}
    of = {member: Replica(dict(begin), made.start(begin)) for member in honest}
    for step in range(given.steps):
        rate = 0.75 / (step // 50 + 1)
        gradients = digits.gradients(torch.stack([of[i].fast["w"] for i in honest]), honest, BATCH)
        gradients *= (CLIP / gradients.norm(dim=1, keepdim=True)).clamp(max=1.0)
        for replica, gradient in zip(of.values(), gradients, strict=True):
            replica.fast = {"w": replica.fast["w"] - rate * gradient}
        said = {member: made.offer(replica.outer, replica.fast) for member, replica in of.items()}
        if attack:
            models = torch.stack([offer.blocking for offer in said.values() if offer.blocking is not None])
            lying = attack(models, len(liars), digits.generator)
            said |= {member: Offer(model.clone()) for member, model in zip(liars, lying, strict=True)}
        for member, replica in of.items():
            replica.fast, replica.outer = made.settle(replica.outer, replica.fast, said, member)
    return min(digits.outcome(replica.fast["w"]).accuracy for replica in of.values())


def reduction(f: int, seed: int) -> tuple[float, float]:
    """(α, λ) of one round: the honest ones' spread after it over that before, and how far their mean has moved,
    squared, over the spread before. Spread: the mean squared distance from their mean."""
    import torch

    from planaria.exchange.monna import nearest

    draw = torch.Generator().manual_seed(seed)
    n, d = 11 * f + 1, [1, 2, 10, 100][seed % 4]
    honest = torch.randn(n - f, d, generator=draw)
    shape = seed // 4 % 4
    if shape == 1:  # two camps
        honest[: (n - f) // 2] += 10.0
    elif shape == 2:  # f that lie apart
        honest[:f] += 10.0
    elif shape == 3:  # unequally far out
        honest *= torch.linspace(0, 1, n - f).square().unsqueeze(1)
    away = honest - honest.mean(0)
    after = []
    for me in range(n - f):
        order = (honest - honest[me]).norm(dim=1).argsort()
        # Those who come too late are the nearest, the farthest, or any. Liars stand where they are just believed: in
        # one direction from me, as far as the last of those whom I would keep, and a little more or less.
        late = [order[1 : 1 + f], order[-f:], order[1 + torch.randperm(n - f - 1, generator=draw)[:f]]][seed // 16 % 3]
        heard = {i + f: honest[i] for i in range(n - f) if i == me or i not in late.tolist()}
        reach = (honest[order[n - 3 * f]] - honest[me]).norm()
        direction = away[int(away.norm(dim=1).argmax())] if seed // 48 % 2 else away[me]
        if float(direction.norm()) == 0.0:
            direction = torch.ones(d)
        how = [0.5, 0.9, 1.0, 1.1, 2.0][int(torch.randint(5, (1,), generator=draw))]
        lie = honest[me] + how * reach * direction / direction.norm()
        heard |= dict.fromkeys(range(f), lie)
        kept = nearest(heard, me + f, n - 2 * f)
        after.append(torch.stack([heard[j] for j in kept]).mean(0))
    new, before = torch.stack(after), float(away.square().sum(1).mean())
    moved = float((new.mean(0) - honest.mean(0)).square().sum())
    return float((new - new.mean(0)).square().sum(1).mean()) / before, moved / before


def run_monna() -> int:
    """MoNNA: replicas with models of their own keep the models nearest to theirs, while some lie about what they have.

    Twelve replicas learn handwritten digits, two of them lie in every step; each has images of some digits more than of
    others (Dirichlet, α = 1), momentum 0.99, rate 0.75/(⌊t/50⌋ + 1), batches of 25, gradients clipped to 2, 300 steps.
    Liars know all honest models and send: noise of a hundred times a weight's size; the mean, turned round; −0.1 of it;
    ALIE 1.5. Where the worst replica ends at 0.15 or less by the mean, the worst honest one of MoNNA ends at 0.90 or
    more.

    Then its theory: of n = 11f + 1 models in 1,000 placements with as much lying as could be thought of, every one
    hears n − f and keeps n − 2f. The honest ones' spread is smaller after one round, in all. Needs the extra experts.
    """
    flags = parser(MONNA_NAME, run_monna.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--replicas", type=int, default=12)
    flags.add_argument("--liars", type=int, default=2)
    flags.add_argument("--placements", type=int, default=1000)
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    for what, attack in monna_lies().items():
        plain = [worst(given, seed, 0, attack, MOMENTUM) for seed in given.seeds]
        rows.append(Row(f"{what}: mean", plain, "1"))
        claim = Claim(low=0.90) if max(plain) <= 0.15 else None
        for momentum in (MOMENTUM, 0.0):
            found = [worst(given, seed, given.liars, attack, momentum) for seed in given.seeds]
            shown = claim if momentum else None
            rows.append(Row(f"{what}: MoNNA, momentum {momentum:g}", found, "1", shown, judged="least"))
    for f in (1, 2):
        alphas, lambdas = zip(*(reduction(f, seed) for seed in range(given.placements)), strict=True)
        rows.append(Row(f"n = {11 * f + 1}: spread over before", alphas, "0", Claim(high=1.0), judged="worst"))
        rows.append(Row(f"n = {11 * f + 1}: mean moved, over spread", lambdas, "0", judged="worst"))
    return conclude(MONNA_NAME, given, rows)


if __name__ == "__main__":
    start(digits=run_robust, data=run_data, monna=run_monna)
