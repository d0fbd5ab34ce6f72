"""Robust rules where workers' data differ, and what rules cost where nobody lies.

Fifteen workers learn handwritten digits as in ``benchmarks.robust``, but each has images of some digits more than of
others (Dirichlet, α = 0.1), says a momentum of 0.9, and the rate is 1; three of them lie in every step. Shown is the
share of unseen images that is named right. Without liars, averaging over nearest neighbours (NNM) lifts the median by
0.10 or more, and buckets of two cost the geometric median no more than 0.01. Then, with the same data for all and
nobody lying, 1,000 steps: a rule's loss on unseen images is at most 1.02 of the mean's. Needs the extra experts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import product
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, parser, start
from benchmarks.robust import RULES, Outcome, Setting, arguments, attacks, each, learnt

if TYPE_CHECKING:
    from torch import Generator, Tensor

    from benchmarks.robust import Attack

NAME = "robust_data"
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


def main() -> int:
    flags = parser(NAME, __doc__)
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
    return conclude(NAME, given, rows, notes)


if __name__ == "__main__":
    start(main)
