"""Robust rules against liars: fifteen workers learn handwritten digits, three of them lie in every step.

A net of 64-64-10, batches of 32, SGD at 0.2 without momentum, the same data for all, 300 steps; the share of 397
images that were kept apart which is named right. Where the mean ends at 0.80 or less, every rule within its limit ends
at 0.90 or more; Krum may fail and is shown. Without liars no rule costs more than 0.02. No rule is claimed to be the
best. Needs the extra experts (scikit-learn's digits come with it).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from benchmarks.common import Claim, Row, conclude, parser

if TYPE_CHECKING:
    from torch import Generator, Tensor

    Attack = Callable[[Tensor, int, Generator], Tensor]
    """honest vectors [n − f, d], f → what liars say [f, d]"""

NAME = "robust"
RULES: dict[str, dict[str, Any] | None] = {
    "mean": None,
    "median": {"rule": "median"},
    "trimmed mean": {"rule": "trimmed_mean"},
    "Krum": {"rule": "krum"},
    "multi-Krum": {"rule": "multikrum"},
    "geometric median": {"rule": "geometric_median"},
    "Flag, 1 round": {"rule": "flag", "rounds": 1},
    "Flag, 5 rounds": {"rule": "flag", "rounds": 5},
    "NNM, median": {"rule": "median", "mix": "nnm"},
    "NNM, trimmed mean": {"rule": "trimmed_mean", "mix": "nnm"},
    "bucketing, geometric median": {"rule": "geometric_median", "mix": "bucketing"},
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


def accuracy(given: argparse.Namespace, seed: int, rule: Mapping[str, Any] | None, attack: Attack | None) -> float:
    """On images that nobody trained on."""
    import torch
    from sklearn.datasets import load_digits

    from planaria.exchange.robust import robust_of
    from planaria.exchange.robust.combining import combine

    found = load_digits()
    images, digits = torch.tensor(found.data, dtype=torch.float32) / 16, torch.tensor(found.target)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(digits), generator=generator)
    train, test = order[:1400], order[1400:]
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    parameters = list(net.parameters())
    liars = given.liars
    made = None if rule is None else robust_of({"liars": liars, **rule}, given.workers)
    for step in range(given.steps):
        vectors = []
        for _ in range(given.workers - (liars if attack else 0)):
            batch = train[torch.randint(len(train), (32,), generator=generator)]
            loss = torch.nn.functional.cross_entropy(net(images[batch]), digits[batch])
            vectors.append(torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, parameters)]))
        honest = torch.stack(vectors)
        said = honest if attack is None else torch.cat([attack(honest, liars, generator), honest])
        agreed = said.mean(0) if made is None else combine(made.rule, list(said), made.mix, step).value
        with torch.no_grad():
            for parameter, part in zip(parameters, agreed.split([p.numel() for p in parameters]), strict=True):
                parameter -= 0.2 * part.view_as(parameter)
    with torch.no_grad():
        return float((net(images[test]).argmax(1) == digits[test]).float().mean())


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--workers", type=int, default=15)
    flags.add_argument("--liars", type=int, default=3)
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    for what, attack in attacks().items():
        found = {name: [accuracy(given, seed, rule, attack) for seed in given.seeds] for name, rule in RULES.items()}
        mean = median(found["mean"])
        for name, values in found.items():
            claim = None
            if attack is None and name not in MAY_FAIL:
                claim = Claim(low=mean - 0.02)
            elif mean <= 0.80 and name not in MAY_FAIL:
                claim = Claim(low=0.90)
            rows.append(Row(f"{what}: {name}", values, f"mean {mean:.3f}", claim, judged="median"))
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    raise SystemExit(main())
