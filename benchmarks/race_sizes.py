"""Does the order of strategies hold at larger models? A line through the two sizes of the race, and how sure it is.

Read from the saved races (``race_small``, ``race_large`` and ``race_gpu`` in ``results/race.json``), nothing
is trained. For two arms, each seed of a size says ln(hours of one ÷ hours of the other), on the same failures. The
means of the two sizes lie on a line over the logarithm of the model's parameters; at a third size, ten times the larger
one, the line says what to expect. A mean's error is Student's, with the degrees of freedom of Welch and Satterthwaite
for a sum of two unlike errors. What is told is the probability that the first arm is the quicker one, by this fit: the
line is assumed.

A third race, of a model of that size, was run when the line had been drawn: what it measured is told beside what the
line expects of it, the line's errors and the race's own added. All races meet the same failures with the same seed, and
three pairs of arms are not independent: both are left out of the errors.

The claim: the means of the third race lie within the 95 % that the line expects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from statistics import fmean, variance
from typing import NamedTuple

from pydantic import ValidationError

from benchmarks import common
from benchmarks.common import Claim, Row, conclude, parser, start
from planaria.common.errors import UserError
from planaria.config import recipe, shipped
from planaria.lab.compare.race_results import Compared
from planaria.models.families import parameters

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


def interval(line: Expected, logs: Sequence[float]) -> tuple[float, float]:
    """Where the mean of further races lies with 95 %, if the line holds; ``logs`` tell how far such races scatter.

    mean ± t · √(e² + s² / n), with Welch's and Satterthwaite's degrees of freedom for the sum.
    """
    from scipy.stats import t

    own, fitted, n = variance(logs) / len(logs), line.error**2, len(logs)
    below = (fitted**2 / line.freedom if fitted else 0.0) + own**2 / (n - 1)
    half = math.sqrt(own + fitted) * float(t.ppf(0.975, (own + fitted) ** 2 / below)) if below else 0.0
    return line.mean - half, line.mean + half


def saved(names: Sequence[str]) -> list[tuple[Compared, int]]:
    """The saved races of these names, each with the parameters of its model.

    :raises UserError: naming the one that cannot be an end of the line, or cannot be held against it.
    """
    found: dict[int, Compared] = {}
    for name in names:
        record = common.saved(name)
        try:
            race = Compared.model_validate_json(json.dumps(record))
        except ValidationError as error:
            raise UserError(f"{name}: the saved result is not a comparison; name a race") from error
        config = recipe.load(shipped.find(name), {})
        count = parameters(config.model, config.pipeline.stages)
        if count in found:
            raise UserError(f"{name}: its model is as large as that of {found[count].name}; name races of three sizes")
        if len(race.failures) < 2:
            raise UserError(f"{name}: one seed says nothing of how far seeds scatter; race more")
        found[count] = race
    return [(race, count) for count, race in found.items()]


def size(found: Compared, count: int, pair: tuple[str, str], of: str) -> Size:
    arms = {arm.name: arm for arm in found.arms}
    runs = zip(*(arms[name].runs for name in pair), strict=True)
    both = [(getattr(a, of), getattr(b, of)) for a, b in runs]
    logs = [math.log(a / b) for a, b in both if a is not None and b is not None]
    if len(logs) < 2:
        raise UserError(
            f"{found.name}: {pair[0]} and {pair[1]} reached the target together with too few seeds; race more"
        )
    return Size(count, logs)


def compared(races: Sequence[Compared]) -> Iterator[tuple[str, tuple[str, str]]]:
    """What is counted, and the arms that all races have, two at a time."""
    first, *others = ([arm.name for arm in race.contestants if not arm.alike] for race in races)
    names = [name for name in first if all(name in other for other in others)]
    return ((of, pair) for of in OF for pair in combinations(names, 2))


def lines(races: Sequence[tuple[Compared, int]]) -> Iterator[Row]:
    """The first arm over the second at the two sizes, and how sure the line is of their order at all three."""
    (small, few), (large, many), _ = races
    for of, pair in compared([small, large]):
        ends = size(small, few, pair, of), size(large, many, pair, of)
        sure = {f"{n / 1e6:.3g} M": round(expected(*ends, n).first_is_quicker, 3) for _, n in races}
        means = [math.exp(fmean(one.logs)) for one in ends]
        yield Row(f"{told(of, pair)}, small and large", means, "equal: 1", None, sure)


def measured(races: Sequence[tuple[Compared, int]]) -> Iterator[Row]:
    """The same at the third size, by its own race, beside what the line expects there."""
    for of, pair in compared([found for found, _ in races]):
        small, large, third = (size(found, count, pair, of) for found, count in races)
        line = expected(small, large, third.parameters)
        low, high = (math.exp(end) for end in interval(line, third.logs))
        ratios = [math.exp(one) for one in third.logs]
        what = f"{told(of, pair)}, measured at {third.parameters / 1e6:.3g} M"
        beside = {"least": round(min(ratios), 3), "most": round(max(ratios), 3), "seeds": len(ratios)}
        limit = f"by the line: {math.exp(line.mean):.3f}"
        yield Row(what, [math.exp(fmean(third.logs))], limit, Claim(low=round(low, 3), high=round(high, 3)), beside)


def told(of: str, pair: tuple[str, str]) -> str:
    return f"{'hours' if of == 'hours' else 'steps'}: {pair[0]} over {pair[1]}"


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--races", nargs=2, metavar=("SMALL", "LARGE"), default=["race_small", "race_large"])
    flags.add_argument("--then", metavar="LARGER", default="race_gpu", help="the race that the line is held against")
    given = flags.parse_args()
    races = saved([*given.races, given.then])
    notes = [
        "columns of parameters: the probability that the first arm is the quicker one, by the line through both races",
        "claims: where the line and the scatter of the race's own seeds expect its mean with 95 %",
    ]
    return conclude(NAME, given, [*lines(races), *measured(races)], notes)


if __name__ == "__main__":
    start(main)
