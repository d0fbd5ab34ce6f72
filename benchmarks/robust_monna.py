"""MoNNA: replicas with models of their own keep the models nearest to theirs, while some lie about what they have.

Twelve replicas learn handwritten digits, two of them lie in every step; each has images of some digits more than of
others (Dirichlet, α = 1), momentum 0.99, rate 0.75/(⌊t/50⌋ + 1), batches of 25, gradients clipped to 2, 300 steps.
Liars know all honest models and send: noise of a hundred times a weight's size; the mean, turned round; −0.1 of it;
ALIE 1.5. Where the worst replica ends at 0.15 or less by the mean, the worst honest one of MoNNA ends at 0.90 or more.

Then its theory: of n = 11f + 1 models in 1,000 placements with as much lying as could be thought of, every one hears
n − f and keeps n − 2f. The honest ones' spread is smaller after one round, in all. Needs the extra experts.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.robust import Digits, Setting

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from benchmarks.robust import Attack

NAME = "robust_monna"
BATCH, CLIP, MOMENTUM = 25, 2.0, 0.99


def lies() -> Mapping[str, Attack | None]:
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


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=300)
    flags.add_argument("--replicas", type=int, default=12)
    flags.add_argument("--liars", type=int, default=2)
    flags.add_argument("--placements", type=int, default=1000)
    given = flags.parse_args()
    import torch

    torch.set_num_threads(1)
    rows: list[Row] = []
    for what, attack in lies().items():
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
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
