"""Does the order of strategies hold at larger models? A line through the two sizes of the race, and how sure it is.

Read from the saved races (``docs/results/race_small.json`` and ``race_large.json``), nothing is trained. For two arms,
each seed of a size says ln(hours of one ÷ hours of the other), on the same failures. The means of the two sizes lie on
a line over the logarithm of the model's parameters; at a third size, ten times the larger one, the line says what to
expect. A mean's error is Student's, with the degrees of freedom of Welch and Satterthwaite for a sum of two unlike
errors. What is told is the probability that the first arm is the quicker one, by this fit: the line is assumed.

The claim: none. A rank that the fit holds with 95 % would be worth one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean, variance
from typing import NamedTuple

from benchmarks.common import RESULTS, Row, conclude, parser, start
from planaria import recipe, shipped
from planaria.compare.race_results import Compared
from planaria.errors import UserError
from planaria.model.families import parameters

NAME = "race_sizes"
OF = ("hours", "ticks")


class Size(NamedTuple):
    """What one size of the model says of two arms."""

    parameters: float
    logs: Sequence[float]
    """for each seed, ln(first ÷ second)"""


class Expected(NamedTuple):
    """Of ln(first ÷ second) at some size."""

    mean: float
    error: float
    """of the mean"""
    freedom: float

    @property
    def first_is_quicker(self) -> float:
        """Probability that the mean is below 0."""
        from scipy.stats import t

        return float(t.cdf(-self.mean / self.error, self.freedom)) if self.error else float(self.mean < 0)


def expected(small: Size, large: Size, at: float) -> Expected:
    """The line through both sizes' means at ``at`` parameters.

    m = Σ w_i · mean_i with w the weights of the line's ends; its variance is Σ v_i with v_i = w_i² s_i² / n_i, its
    degrees of freedom are (Σ v_i)² / Σ (v_i² / (n_i − 1)).
    """
    share = math.log(at / small.parameters) / math.log(large.parameters / small.parameters)
    ends = ((1 - share, small), (share, large))
    errors = [w**2 * variance(size.logs) / len(size.logs) for w, size in ends]
    below = sum(v**2 / (len(size.logs) - 1) for v, (_, size) in zip(errors, ends, strict=True))
    mean = sum(w * fmean(size.logs) for w, size in ends)
    return Expected(mean, math.sqrt(sum(errors)), sum(errors) ** 2 / below if below else math.inf)


def saved(name: str) -> tuple[Compared, int]:
    """A saved race, and the parameters of its model."""
    found = Compared.model_validate_json((RESULTS / f"{name}.json").read_bytes())
    config = recipe.load(shipped.find(name), {})
    return found, parameters(config.model, config.pipeline.stages)


def size(found: Compared, count: int, pair: tuple[str, str], of: str) -> Size:
    arms = {arm.name: arm for arm in found.arms}
    runs = zip(*(arms[name].runs for name in pair), strict=True)
    both = [(getattr(a, of), getattr(b, of)) for a, b in runs]
    return Size(count, [math.log(a / b) for a, b in both if a is not None and b is not None])


def rows(given: argparse.Namespace) -> Iterator[Row]:
    (small, few), (large, many) = (saved(name) for name in given.races)
    both = {arm.name for arm in large.contestants} & {arm.name for arm in small.contestants}
    names = [arm.name for arm in small.contestants if arm.name in both and not arm.alike]
    for of in OF:
        for pair in combinations(names, 2):
            ends = size(small, few, pair, of), size(large, many, pair, of)
            sure = {
                f"{at / 1e6:.3g} M": round(expected(*ends, at).first_is_quicker, 3)
                for at in (few, many, given.times * many)
            }
            means = [math.exp(fmean(one.logs)) for one in ends]
            what = f"{'hours' if of == 'hours' else 'steps'}: {pair[0]} over {pair[1]}, small and large"
            yield Row(what, means, "equal: 1", None, sure)


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--races", nargs=2, metavar=("SMALL", "LARGE"), default=["race_small", "race_large"])
    flags.add_argument("--times", type=float, default=10.0, help="of the larger model: where the line is followed to")
    given = flags.parse_args()
    for name in given.races:
        if not Path(RESULTS / f"{name}.json").is_file():
            raise UserError(
                f"--races {name}: docs/results/{name}.json is not there; run `planaria compare {name}` first"
            )
    notes = ["columns of parameters: the probability that the first arm is the quicker one, by the line through both"]
    return conclude(NAME, given, list(rows(given)), notes)


if __name__ == "__main__":
    start(main)
