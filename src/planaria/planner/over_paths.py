"""Plans where sites are joined by several paths: the path of each edge, its rate, and the resulting step.

Each edge of a plan becomes a flow with a path and a rate: its max-min fair share when all flows send at the same time.
Links can sustain these rates in any order of work, so the step is overestimated rather than underestimated.

A search prices pairs of sites: at first by the best path alone, then by the rates of earlier plans' edges. It returns
the best of the plans on their paths.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from planaria.common.errors import UserError
from planaria.pipeline.network.multipath import Path, PathNetwork, max_min_rates
from planaria.pipeline.network.topology import Topology
from planaria.planner.paths import (
    PathAssignment,
    SiteFlow,
    improve_paths,
    largest_load,
    plan_paths,
    random_paths,
    replan_paths,
    tightest_cut,
)
from planaria.planner.problem import LONGEST_S, NO_LATENCY, PlanningProblem, Solution
from planaria.planner.schedule import EdgeLoad, SeveralPaths
from planaria.planner.search import OnProgress, PlanSearch, SearchBudget, SearchResult, search, step_ns

MAX_NODES = 1 << 10
"""maximum number of nodes with several paths; every pair of nodes has its own times"""
SEEDS = 20
"""number of hashed assignments to average"""
ROUNDS = 8
"""searches, each with prices that depend on earlier ones"""
HASHED = "this plan, paths by hashing"

Choose = Callable[[Sequence[SiteFlow], PathNetwork], PathAssignment]


@dataclass(frozen=True)
class PathedPlan:
    """A plan's edges on their paths."""

    edges: tuple[tuple[int, int], ...]
    """(node, node) between different sites, in the order of the fields below"""
    flows: tuple[SiteFlow, ...]
    assignment: PathAssignment
    rates: tuple[float, ...]
    """bytes per second"""
    largest_s: float
    """seconds in which the busiest link carries its bytes of a step"""


class MultipathPlanner:
    """A topology whose sites are joined by several paths, for messages of ``size`` bytes."""

    def __init__(self, topology: Topology, size: int, find: PlanSearch = search) -> None:
        """:raises UserError: when there are too many nodes."""
        assert topology.path_network is not None
        if (count := len(topology.nodes)) > MAX_NODES:
            raise UserError(f"network.topology: {count} nodes; with [[link]] entries there can be {MAX_NODES}")
        self._size, self._topology, self._find = size, topology, find
        network = topology.path_network
        self.path_network = PathNetwork(
            network.paths, {link: rate / topology.scale for link, rate in network.capacity.items()}
        )
        """paths, and capacities divided by the topology's scale"""

    def edges(self, problem: PlanningProblem, solution: Solution) -> dict[tuple[int, int], SiteFlow]:
        """Return the flow of each edge between sites in a step: activations out, gradients back."""
        site = [problem.sites[s] for s in problem.site.tolist()]
        messages = Counter(
            edge
            for route in solution.routes
            for a, b in pairwise(route)
            for edge in ((a, b), (b, a))
            if site[a] != site[b]
        )
        return {(a, b): SiteFlow(site[a], site[b], messages[a, b] * self._size) for a, b in sorted(messages)}

    def route(self, problem: PlanningProblem, solution: Solution, choose: Choose = plan_paths) -> PathedPlan:
        """Return the edges of a plan on the paths that ``choose`` assigns."""
        carried = self.edges(problem, solution)
        edges, flows = tuple(carried), tuple(carried.values())
        chosen = choose(flows, self.path_network)
        rates = tuple(max_min_rates([path.links for path in chosen], self.path_network.capacity))
        return PathedPlan(edges, flows, chosen, rates, largest_load(flows, self.path_network, chosen))

    def with_path_costs(self, problem: PlanningProblem, routed: PathedPlan) -> PlanningProblem:
        """Return the problem with every node as its own site, and each edge at its path's latency and rate.

        :raises UserError: when a message takes too long.
        """
        link = problem.link[np.ix_(problem.site, problem.site)]
        transmit = problem.transmit[np.ix_(problem.site, problem.site)]
        topology = self._topology
        for (a, b), path, rate in zip(routed.edges, routed.assignment, routed.rates, strict=True):
            transmit_s = self._size / rate
            seconds = topology.scale * (path.latency_s + topology.overhead_s) + transmit_s
            if seconds > LONGEST_S:
                raise UserError(
                    f"network.topology: link {path.id!r}: {problem.names[a]} – {problem.names[b]}: a microbatch's "
                    f"{self._size} bytes take {seconds:.3g} s, more than {LONGEST_S:g} s; raise its bandwidth"
                )
            link[a, b] = round(seconds * 1e9)
            transmit[a, b] = round(transmit_s * 1e9) * topology.queueing
        sums = problem.sums[:, problem.site][:, :, problem.site] if problem.summed else problem.sums
        own = np.arange(problem.nodes)
        return replace(
            problem, sites=problem.names, site=own, link=link, transmit=transmit, sums=sums, latency=NO_LATENCY
        )

    def search(
        self, problem: PlanningProblem, seed: int, budget: SearchBudget, on_progress: OnProgress = lambda match: None
    ) -> SearchResult:
        """Return the best plan, on its paths, of several searches that share ``budget``.

        Call ``on_progress`` after each.

        The time includes the choice of paths and prices; no search starts after it.
        """
        tried, best, moves, began = problem, None, 0, time.monotonic()
        for left in range(ROUNDS, 0, -1):
            seconds = time.monotonic() - began
            if best is not None and seconds >= budget.seconds:
                break
            match = self._find(tried, seed, SearchBudget((budget.seconds - seconds) / left, budget.moves / ROUNDS))
            moves += match.moves
            routed = self.route(problem, match.solution)
            step_s = step_ns(self.with_path_costs(problem, routed), match.solution) / 1e9
            if best is None or step_s < best.step_s:
                best = replace(match, step_s=step_s)
            best = replace(best, moves=moves, seconds=time.monotonic() - began)
            on_progress(best)
            tried = self._damped_prices(problem, tried, routed)
        assert best is not None
        return best

    def _damped_prices(self, problem: PlanningProblem, tried: PlanningProblem, routed: PathedPlan) -> PlanningProblem:
        """Return prices half way from ``tried`` to the mean over the plan's edges between two sites.

        Full steps would make the searches oscillate between links.
        """
        link, transmit = problem.link.astype(float), problem.transmit.astype(float)
        priced, site = self.with_path_costs(problem, routed), problem.site
        edges = np.array(routed.edges, np.int64).reshape(-1, 2)
        for a, b in set(zip(site[edges[:, 0]].tolist(), site[edges[:, 1]].tolist(), strict=True)):
            between = edges[(site[edges[:, 0]] == a) & (site[edges[:, 1]] == b)]
            link[a, b] = priced.link[between[:, 0], between[:, 1]].mean()
            transmit[a, b] = priced.transmit[between[:, 0], between[:, 1]].mean()
        halves = ((tried.link + link) / 2, (tried.transmit + transmit) / 2)
        return replace(problem, link=np.rint(halves[0]).astype(np.int64), transmit=np.rint(halves[1]).astype(np.int64))

    def step_ns(self, problem: PlanningProblem, solution: Solution, choose: Choose = plan_paths) -> int:
        """Return the simulated step of a plan, nanoseconds."""
        return step_ns(self.with_path_costs(problem, self.route(problem, solution, choose)), solution)

    def mean_hashed_s(self, problem: PlanningProblem, solution: Solution) -> float:
        """Return the mean seconds of a step of the same plan with hashed paths."""
        steps = (
            self.step_ns(problem, solution, lambda flows, ways, seed=seed: random_paths(flows, ways, seed))  # type: ignore[misc]
            for seed in range(SEEDS)
        )
        return fmean(steps) / 1e9

    def adapt_paths(self, problem: PlanningProblem, solution: Solution, before: SeveralPaths, moves: int) -> PathedPlan:
        """Keep the paths of ``before`` except for edges over changed or missing links; then make ``moves`` moves."""
        had = {(edge.source, edge.target): edge.path for edge in before.edges}
        changed = {link for link, rate in self.path_network.capacity.items() if before.links.get(link) != rate}

        def choose(flows: Sequence[SiteFlow], network: PathNetwork) -> PathAssignment:
            edges = zip(self.edges(problem, solution), flows, strict=True)
            kept = [_path_with_id(network.living(flow.source, flow.target), had.get(edge)) for edge, flow in edges]
            chosen = replan_paths(flows, network, kept, changed)
            for _ in range(moves):
                chosen = improve_paths(flows, network, chosen) or chosen
            return chosen

        return self.route(problem, solution, choose)

    def path_choice(self, routed: PathedPlan) -> SeveralPaths:
        """Return the choice for a schedule, with the lower bound on any choice's largest load."""
        cut = tightest_cut(routed.flows, self.path_network)
        return SeveralPaths(
            links=dict(self.path_network.capacity),
            edges=[
                EdgeLoad(source=a, target=b, path=path.id, size=flow.size, rate=rate)
                for (a, b), flow, path, rate in zip(
                    routed.edges, routed.flows, routed.assignment, routed.rates, strict=True
                )
            ],
            largest_s=routed.largest_s,
            least_s=cut.seconds,
            cut=list(cut.links),
        )


def _path_with_id(paths: Sequence[Path], name: str | None) -> Path | None:
    return next((path for path in paths if path.id == name), None)
