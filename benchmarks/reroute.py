"""A link becomes slow in mid-run: what does it gain to plan anew around it?

Twelve nodes on real processes, as in ``planned_run``: one in each of the published cities, passes and links a fiftieth
of the published times, three seeds of the search. From a step on, the link that carries most activations between two
block stages delivers each of them so many times later. One arm is told of it, one goes around it, and one follows from
the start a plan that was made for the slow link. The claims: steps of who goes around are at most 1.10 of those of who
had that plan, and those of who does not take at least 1.15 times as long. A plan that is made beforehand may place
stages elsewhere, which nobody does in mid-run. Beside it stand the best routes over nodes that keep their stages, by a
search sixteen times as long as the run's own.
"""

from __future__ import annotations

import argparse
from collections import Counter
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.common import Claim, Row, conclude, parser, start

NAME = "reroute"
SETTLED = 8
"""steps after the onset in which the link is found and gone around"""


def arms(given: argparse.Namespace, seed: int) -> dict[str, float]:
    """Seconds of a step, measured and simulated."""
    from benchmarks.planned_run import problem, summed_s
    from planaria.planner.replan import WORK, measured
    from planaria.planner.search import Budget, improve, search

    asked = problem(given.skip)
    found = search(asked, seed, Budget(moves=given.moves))
    block = [hop for path in found.solution.path.tolist() for hop in pairwise(path)]
    (source, target), _ = Counter(hop for hop in block if asked.site[hop[0]] != asked.site[hop[1]]).most_common(1)[0]
    usual = float(asked.link[asked.site[source], asked.site[target]]) / 1e9
    slower = measured(asked, {(source, target): given.times * usual})
    true = search(slower, seed, Budget(moves=given.moves))
    told = {"simulated, old plan": summed_s(slower, found.solution)}
    told["simulated, plan for the slow link"] = summed_s(slower, true.solution)
    routes = improve(slower, found.solution, seed, 16 * WORK // slower.work)
    told["simulated, best routes"] = summed_s(slower, routes.solution)
    more = (source, target, (given.times - 1) * usual)
    for diagnose in ("tell", "act"):
        told[diagnose] = step_s(given, asked, found, diagnose, more)
    hops = {frozenset(hop) for path in true.solution.path.tolist() for hop in pairwise(path)}
    told["made for it"] = step_s(given, asked, true, "tell", more if frozenset((source, target)) in hops else None)
    return told


def step_s(
    given: argparse.Namespace, asked: Any, found: Any, diagnose: str, slow: tuple[int, int, float] | None
) -> float:
    """The median step of a run once the link has been slow for a while; None: the plan does not use it."""
    from benchmarks.fleet_run import require_finished, run_fleet, step_seconds
    from benchmarks.planned_run import config_for
    from planaria.faults.trace import Fault

    config = config_for(asked, found.solution, found.step_s, f"{NAME}-{diagnose}", given.onset + SETTLED + given.steps)
    fleet = config.fleet.model_copy(update={"diagnose": diagnose})
    faults = []
    if slow:
        source, target, more_s = slow
        faults.append(Fault(step=given.onset, stage=target, peer=source, signal="delay", strength=more_s))
    record = run_fleet(config.model_copy(update={"fleet": fleet}), tuple(faults))
    require_finished(record)
    return median(step_seconds(record, given.onset + SETTLED))


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--times", type=float, default=20.0, help="as late as usual")
    flags.add_argument("--onset", type=int, default=14)
    flags.add_argument("--steps", type=int, default=24, help="that count")
    flags.add_argument("--skip", type=float, default=1 / 3)
    flags.add_argument("--moves", type=int, default=20_000)
    flags.add_argument("--seeds", type=int, default=3)
    given = flags.parse_args()
    found = [arms(given, seed) for seed in range(1, given.seeds + 1)]
    plan, routes = "simulated, plan for the slow link", "simulated, best routes"
    rows = [
        Row("act over a plan made for it", [f["act"] / f["made for it"] for f in found], "1", Claim(high=1.10)),
        Row("act over the best routes' simulation", [f["act"] / f[routes] for f in found], "1", Claim(high=1.10)),
        Row("simulated: best routes over a plan made for it", [f[routes] / f[plan] for f in found], "1"),
        Row("tell over act", [f["tell"] / f["act"] for f in found], "", Claim(low=1.15)),
        Row("a plan made for it over its simulation", [f["made for it"] / f[plan] for f in found], "1"),
        Row("simulated: old plan over that", [f["simulated, old plan"] / f[plan] for f in found], ""),
    ]
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
