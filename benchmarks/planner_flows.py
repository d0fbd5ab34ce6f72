"""Instances and methods of ``benchmarks.planner flows``: local search over flows, and annealing of whole plans."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Literal, NamedTuple

import numpy as np

from benchmarks.harness import Cell, Claim, Row
from planaria.common.compiled import COMPILED
from planaria.planner.anneal import RANDOMS, anneal
from planaria.planner.bound.step_bound import step_lower_bound
from planaria.planner.evaluate import NEVER, makespan
from planaria.planner.flows import EdgeRule, FlowRound, edge_costs, flow_costs, network_of, random_flows, search_flows
from planaria.planner.guidelines import find_violations
from planaria.planner.initial_plans import greedy_plan
from planaria.planner.problem import BLOCK, ROLES, PlanningProblem, Solution
from planaria.planner.search import FINAL_TEMPERATURE, INITIAL_TEMPERATURE, SearchBudget, SearchResult, search, step_ns
from planaria.planner.tables import CostTables, Ints

SIZE = 4e6
"""bytes of a message"""
FAST, SLOW = 12.5e6, 1.25e6
"""100 and 10 Mbit/s in bytes per second"""
SHAPES = (((2, 2, 2, 2, 2), 2), ((3, 3, 3, 3), 1))
"""nodes of each stage and microbatches of each data node: 16⁴ and 27³ wirings"""
DRIFT = 0.1
"""standard deviation of the logarithm of a link's times from round to round"""


def instance(seed: int, asymmetric: bool, times: int = 1) -> PlanningProblem:
    """Return 10 or 12 nodes at six sites, the first ones data nodes, with ``times`` as many microbatches.

    Bandwidths are drawn between 10 and 100 Mbit/s; if ``asymmetric``, half of the pairs have 100 in a random direction
    and 10 in the other. Latencies are 5 to 100 ms, speeds 1 or 2.
    """
    rng, (sizes, each) = np.random.default_rng(seed), SHAPES[seed % len(SHAPES)]
    nodes, sites = sum(sizes), 6
    rates = np.exp(rng.uniform(np.log(SLOW), np.log(FAST), (sites, sites)))
    late = rng.uniform(0.005, 0.1, (sites, sites))
    rates, late = np.triu(rates) + np.triu(rates, 1).T, np.triu(late) + np.triu(late, 1).T
    uneven, there = rng.random((sites, sites)) < 0.5, rng.random((sites, sites)) < 0.5
    for a, b in zip(*np.triu_indices(sites, 1), strict=True):
        if asymmetric and uneven[a, b]:
            rates[a, b], rates[b, a] = (FAST, SLOW) if there[a, b] else (SLOW, FAST)
    np.fill_diagonal(rates, 2e9)
    np.fill_diagonal(late, 0.001)
    speed = rng.choice([1.0, 2.0], nodes)
    transfer = np.rint(SIZE / rates * 1e9).astype(np.int64)
    latency = np.rint(late * 1e9).astype(np.int64)
    return PlanningProblem(
        names=tuple(f"node {n}" for n in range(nodes)),
        sites=tuple(f"site {s}" for s in range(sites)),
        site=rng.integers(0, sites, nodes),
        sizes=sizes,
        microbatches=each * times,
        visits=len(sizes) - 1,
        swaps=0,
        jump=1,
        forward=np.rint(np.outer([0.44, 0.44, 0.11], 1 / speed) * 1e9).astype(np.int64),
        backward=np.rint(np.outer([0.66, 0.66, 0.0], 1 / speed) * 1e9).astype(np.int64),
        link=latency + transfer,
        transmit=transfer,
        slots=rng.integers(2, 5, nodes),
        role=np.array([ROLES.index("data" if n < sizes[0] else "worker") for n in range(nodes)], np.int64),
        latency=latency,
    )


def stale(problem: PlanningProblem, rounds: int, seed: int) -> PlanningProblem:
    """Return the problem with the transfer times of ``rounds`` rounds ago; both directions drift alike."""
    rng = np.random.default_rng([seed, 1])
    drift = np.exp(np.triu(rng.normal(0, DRIFT, (rounds, *problem.link.shape)).sum(axis=0), 1))
    transfer = np.rint((problem.link - problem.latency) * drift * drift.T).astype(np.int64)
    return replace(problem, link=problem.latency + transfer, transmit=transfer)


class Wiring(NamedTuple):
    """The arrangement that all methods share, and its start."""

    problem: PlanningProblem
    start: Solution
    routes: Ints
    """[routes, visits]: all walks through a node of every stage."""

    def plan(self, choice: Ints) -> Solution:
        """Return the plan in which microbatch i takes route ``choice[i]``."""
        return self.start._replace(path=self.routes[choice])


def wiring(problem: PlanningProblem, seed: int) -> Wiring:
    """Return a greedy arrangement and random flows over it, equal in proportion to slots."""
    plan = greedy_plan(problem, random.Random(seed))
    stages = [plan.members(s) for s in range(len(problem.sizes))]
    routes = np.array(list(product(*stages[1:])), np.int64)
    return Wiring(problem, random_flows(problem, stages, random.Random(seed)), routes)


def annealed(wired: Wiring, known: PlanningProblem, seed: int, moves: int) -> Solution:
    """Return the best plan of one round of the planner's annealing, with stages kept, under ``known`` costs."""
    now, best = wired.start.copy(), wired.start.copy()
    least = step_ns(known, now)
    heat = (
        least
        / known.sizes[0]
        * INITIAL_TEMPERATURE
        * (FINAL_TEMPERATURE / INITIAL_TEMPERATURE) ** (np.arange(moves) / max(1, moves))
    )
    chance = np.random.default_rng(seed).random((moves, RANDOMS))
    anneal(
        known.tables, now.origin, now.path, now.stage, chance, heat, best.origin, best.path, best.stage, least, False
    )
    return best


def flow_along(
    problem: PlanningProblem, solution: Solution, seed: int, moves: int, rule: EdgeRule = "two_way"
) -> SearchResult:
    """Improve the flows of ``solution``, in natural order of stages, by ``moves`` moves; stages stay."""
    flow_round = FlowRound(problem, edge_costs(problem, rule), solution, np.random.default_rng(seed), moves)
    began = time.monotonic()
    flow_round.run(moves)
    return SearchResult(flow_round.best, step_ns(problem, flow_round.best) / 1e9, moves, time.monotonic() - began)


def flowed(rule: EdgeRule) -> Callable[[Wiring, PlanningProblem, int, int], Solution]:
    """Return the local search over flows by a rule of edge costs."""
    return lambda wired, known, seed, moves: flow_along(known, wired.start, seed, moves, rule).solution


def drawn(wired: Wiring, seed: int, draws: int, throughput: bool) -> Ints:
    """Return [draws, count]: routes through random nodes, alike or in proportion to their throughput (SWARM)."""
    problem, rng = wired.problem, np.random.default_rng([seed, 2])
    pace = 1 / problem.passes[BLOCK]
    weight = np.prod(pace[wired.routes], axis=1) if throughput else np.ones(len(wired.routes))
    return rng.choice(len(wired.routes), (draws, problem.count), p=weight / weight.sum())


def every(wired: Wiring) -> Ints:
    """Return [wirings, count]: all choices of routes."""
    count = wired.problem.count
    return np.indices((len(wired.routes),) * count).reshape(count, -1).T


Steps = Callable[[CostTables, Ints, Ints, Ints], Ints]
"""(tables, origins, routes, choices) → steps, nanoseconds"""


def scorer() -> Steps:
    """Return the function that simulates the steps of choices of routes; nanoseconds."""

    def steps(tables: CostTables, origin: Ints, routes: Ints, choices: Ints) -> Ints:
        done, over = np.zeros(len(origin), np.int64), np.zeros(len(tables.slots), np.int64)
        result = np.zeros(len(choices), np.int64)
        for n in range(len(choices)):
            result[n] = makespan(tables, origin, routes[choices[n]], done, over)
        return result

    if not COMPILED:
        return steps
    import numba

    made: Steps = numba.njit()(steps)
    return made


FLOWS, PUBLISHED_RULE, ANNEALING = "flows, two_way", "flows, sum", "annealing"
ONE, BEST = "one draw", "best of as many draws"
FREE, FREE_FLOWS = "annealing, own stages", "flows, own stages"
OLD = (1, 10)
"""rounds by which known costs are old"""


class Score(NamedTuple):
    """A plan of an instance."""

    step: float
    """over the least step of all wirings"""
    objective: float
    """largest flow cost over the least of all wirings within capacities, by the method's own rule, else ``two_way``"""
    gap: float
    """1 - bound / step"""


class Least(NamedTuple):
    """What all wirings of an instance attain; seconds."""

    step: float
    objective: dict[EdgeRule, float]
    at_least: float
    """the shortest step of those with the least objective"""
    bound: float


class Instance:
    """One instance: all wirings, and the methods' plans."""

    def __init__(self, seed: int, asymmetric: bool, moves: int, steps: Steps) -> None:
        self.problem, self.seed, self.moves, self._steps = instance(seed, asymmetric), seed, moves, steps
        self.wired = wiring(self.problem, seed)
        self.edges: dict[EdgeRule, Ints] = {rule: edge_costs(self.problem, rule) for rule in ("two_way", "sum")}
        self.faults = 0
        self.least = self._tried()
        self.plans = self._planned()

    def _simulated(self, choices: Ints) -> Ints:
        return self._steps(self.problem.tables, self.wired.start.origin, self.wired.routes, choices)

    def _tried(self) -> Least:
        wired, problem, choices = self.wired, self.problem, every(self.wired)
        steps = self._simulated(choices)
        load = np.bincount(wired.start.path.ravel(), minlength=problem.nodes)
        net = network_of(problem, self.edges["two_way"], wired.start, load)
        uses = np.stack([np.bincount(route, minlength=problem.nodes) for route in wired.routes]).astype(np.int8)
        fits = (sum(uses[choices[:, i]] for i in range(problem.count)) <= net.room).all(axis=1)
        least: dict[EdgeRule, float] = {}
        for rule, edges in self.edges.items():
            each = np.stack(
                [flow_costs(edges, wired.plan(np.full(problem.count, n))) for n in range(len(wired.routes))]
            )
            largest = np.max([each[choices[:, i], i] for i in range(problem.count)], axis=0)
            least[rule] = float(largest[fits].min())
            if rule == "two_way":
                at_least = float(steps[fits & (largest == least[rule])].min())
        bound = step_lower_bound(problem, exact=False).step_s
        return Least(steps.min() / 1e9, {rule: cost / 1e9 for rule, cost in least.items()}, at_least / 1e9, bound)

    def _planned(self) -> dict[str, Solution]:
        wired, problem, seed, moves = self.wired, self.problem, self.seed, self.moves
        plans = {}
        for name, method in METHODS.items():
            plans[name] = method(wired, problem, seed, moves)
            plans |= {f"{name}, {_old(k)}": method(wired, stale(problem, k, seed), seed, moves) for k in OLD}
        for name, throughput in (("random", False), ("by throughput", True)):
            draws = drawn(wired, seed, moves, throughput)
            steps = self._simulated(draws)
            plans |= {f"{name}, {ONE}": wired.plan(draws[0]), f"{name}, {BEST}": wired.plan(draws[steps.argmin()])}
        budget = SearchBudget(moves=moves)
        plans |= {
            FREE: search(problem, seed, budget).solution,
            FREE_FLOWS: search_flows(problem, seed, budget).solution,
        }
        self.faults = sum(bool(find_violations(problem, plan)) for name, plan in plans.items() if "draw" not in name)
        return plans

    def score(self, name: str) -> Score:
        """Return the score of a method's plan; a wiring that deadlocks has an infinite step."""
        plan, least = self.plans[name], self.least
        rule: EdgeRule = "sum" if name.startswith(PUBLISHED_RULE) else "two_way"
        step = step_ns(self.problem, plan)
        seconds = step / 1e9 if step != NEVER else float("inf")
        objective = flow_costs(self.edges[rule], plan).max() / 1e9 / least.objective[rule]
        return Score(seconds / least.step, float(objective), 1 - least.bound / seconds)


METHODS = {ANNEALING: annealed, FLOWS: flowed("two_way"), PUBLISHED_RULE: flowed("sum")}


def _old(rounds: int) -> str:
    return f"costs {rounds} rounds old" if rounds > 1 else "costs 1 round old"


def instance_rows(what: str, instances: Sequence[Instance]) -> Iterator[Row]:
    """Yield steps, objectives and gaps of each method on instances of one kind, and the least that wirings attain."""
    least = [one.least for one in instances]
    yield _row(f"{what}: least step, s", [one.step for one in least], "exact")
    yield _row(f"{what}: least largest flow, two_way, s", [one.objective["two_way"] for one in least], "exact")
    yield _row(f"{what}: least largest flow, sum, s", [one.objective["sum"] for one in least], "exact")
    yield _row(f"{what}: bound, s", [one.bound for one in least], "certificate")
    yield _row(f"{what}, least largest flow: step", [one.at_least / one.step for one in least], "1")
    yield Row(f"{what}: invalid plans", [sum(one.faults for one in instances)], "0", Claim(high=0.0))
    for name in instances[0].plans:
        scores = [one.score(name) for one in instances]
        yield _row(f"{what}, {name}: step", [score.step for score in scores], "1")
        claim = Claim(low=1.0) if name in (FLOWS, PUBLISHED_RULE) else None
        objectives = [score.objective for score in scores]
        yield _row(f"{what}, {name}: largest flow", objectives, "1", claim, "least" if claim else "median")
        yield _row(f"{what}, {name}: gap to the bound", [score.gap for score in scores], "0")


def _row(
    what: str,
    values: Sequence[float],
    limit: str,
    claim: Claim | None = None,
    judged: Literal["median", "worst", "least"] = "median",
) -> Row:
    kept = [round(value, 5) if math.isfinite(value) else 1e9 for value in values]
    columns: dict[str, Cell] = {"median": f"{median(kept):.3f}", "p90": f"{float(np.quantile(kept, 0.9)):.3f}"}
    return Row(what, kept, limit, claim, columns, judged)


def equal_rules(instances: Sequence[Instance]) -> Row:
    """Return the instances on which both rules give different plans."""
    apart = [int((one.plans[FLOWS].path != one.plans[PUBLISHED_RULE].path).any()) for one in instances]
    return Row("equal directions: plans that differ by rule", [sum(apart)], "0", Claim(high=0.0))


def loaded(seeds: int, moves: int, times: int) -> Iterator[Row]:
    """Yield gaps with ``times`` as many microbatches, unequal directions."""
    gaps: dict[str, list[float]] = {name: [] for name in METHODS}
    over: dict[str, list[float]] = {name: [] for name in METHODS}
    for seed in range(seeds):
        problem = instance(seed, True, times)
        wired, bound = wiring(problem, seed), step_lower_bound(problem, exact=False)
        steps = {name: step_ns(problem, method(wired, problem, seed, moves)) / 1e9 for name, method in METHODS.items()}
        for name, step in steps.items():
            gaps[name].append(bound.gap(step))
            over[name].append(step / steps[ANNEALING])
    for name in METHODS:
        yield _row(f"{times} times the microbatches, {name}: gap to the bound", gaps[name], "0")
        yield _row(f"{times} times the microbatches, {name}: step over annealing's", over[name], "1")
