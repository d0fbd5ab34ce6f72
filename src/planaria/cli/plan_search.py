"""The searches of ``planaria plan`` on a topology: an arrangement and routes with a lower bound, and paths of a changed
network."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from functools import partial
from itertools import zip_longest
from pathlib import Path

from planaria.common.compiled import COMPILED
from planaria.common.errors import UserError, install_command
from planaria.config import shipped
from planaria.config.durations import seconds
from planaria.config.schema import RoutingConfig, RunConfig
from planaria.pipeline.network.costs import message_bytes
from planaria.pipeline.network.topology import Topology, read
from planaria.planner.baselines import compare_baselines
from planaria.planner.bound.step_bound import ALL, HAS_SOLVER, RELAXED, step_lower_bound
from planaria.planner.flows import search_flows
from planaria.planner.over_paths import HASHED, MultipathPlanner
from planaria.planner.problem import PlanningProblem, Solution, problem_of
from planaria.planner.schedule import ProvedBound, Schedule, SearchRecord, SeveralPaths, make_schedule, write
from planaria.planner.schedule import read as read_schedule
from planaria.planner.search import PlanSearch, SearchBudget, search, step_ns
from planaria.report.observe.bars import SearchProgress
from planaria.report.run.schedule_page import path_summary, path_table, write_page
from planaria.report.tables import Table, show
from planaria.runtime.preparation.prepare import relative_to_recipe

MAX_MOVES = 1e9
"""maximum number of moves of a budget"""
_MOVES = re.compile(r"(\d+\.?\d*)\s*moves", re.ASCII)
COSTS = "set network.forward_s and network.backward_s, seconds of a pass"
BOUND_SHARE = 0.3
"""maximum share of the budget's time for the lower bound"""
BASELINE_SHARE = 0.2
"""share of the remaining time for planning a full pipeline to compare with"""


def plan_routes(config: RunConfig, recipe: Path | None, spend: SearchBudget, to: Path | None, quiet: bool) -> int:
    """Plan the recipe's routes and write ``to`` (JSON, with a page next to it); return the exit code."""
    topology = topology_of(config, recipe)
    problem = problem_of(config, topology)
    find = plan_search(config.routing)
    step = step_ns
    over = None
    if topology.path_network is not None:
        over = MultipathPlanner(topology, message_bytes(config.model, config.pipeline).larger, find)
        find, step = over.search, over.step_ns
    until, share = time.monotonic() + spend.seconds, BASELINE_SHARE
    # Paths are not part of the problem, so an exhaustive search would not cover them.
    bound = step_lower_bound(problem, exact=over is None, seconds=BOUND_SHARE * spend.seconds)
    with SearchProgress(
        spend, bound.step_s if problem.forward.any() or problem.backward.any() else None, quiet
    ) as progress:
        first = SearchBudget((until - time.monotonic()) * (1 - share), spend.moves * (1 - share))
        found = find(problem, config.seed, first, progress.update)
    rest = SearchBudget(until - time.monotonic(), spend.moves * share)
    compared = compare_baselines(problem, found.solution, config.seed, rest, step, find)
    record = SearchRecord(seed=config.seed, moves=found.moves, seconds=round(found.seconds, 3))
    schedule = _schedule(problem, found.solution, found.step_s, ProvedBound(**bound._asdict()), compared, record, over)
    file = to or Path(config.out) / f"{config.name}.schedule.json"
    write(schedule, file)
    page = write_page(schedule, file.with_suffix(".html"))
    _show(problem, schedule)
    if config.routing.search == "flows" and config.routing.swaps != RoutingConfig().swaps:
        note = "the search over flows plans no steps back; only what the plan is compared with uses it"
        print(f"no effect     routing.swaps = {config.routing.swaps}: {note}")
    print(f"schedule      {file}\npage          {page}")
    if not HAS_SOLVER:
        print(f"bound         scipy is not installed; it improves the bound: {install_command('planner')}")
    if not COMPILED:
        print(f"slow          numba is not installed; the search is much faster with it: {install_command('planner')}")
    return 0


def plan_search(routing: RoutingConfig) -> PlanSearch:
    """Return the search that routing.search selects."""
    return search if routing.search == "anneal" else partial(search_flows, rule=routing.edge_cost)


def _schedule(
    problem: PlanningProblem,
    solution: Solution,
    step_s: float,
    bound: ProvedBound,
    compared: dict[str, float],
    record: SearchRecord,
    over: MultipathPlanner | None,
) -> Schedule:
    """Return the schedule of a plan; with several paths between sites, with the times of its edges on their paths."""
    if over is None:
        return make_schedule(problem, solution, step_s, bound, compared, record)
    routed = over.route(problem, solution)
    priced = over.with_path_costs(problem, routed)
    others = compared | {HASHED: over.mean_hashed_s(problem, solution)}
    return make_schedule(
        priced, solution, step_ns(priced, solution) / 1e9, bound, others, record, over.path_choice(routed)
    )


def topology_of(config: RunConfig, recipe: Path | None) -> Topology:
    """Read the topology of a recipe, relative to the recipe; UserError if it has none."""
    if config.network.topology is None:
        raise UserError(
            "network.topology is not set; to plan routes, set it to a TOML file of sites and nodes, such as "
            f"{shipped.FOLDER / 'topologies' / 'twelve_cities.toml'}"
        )
    return read(relative_to_recipe(recipe, config.network.topology), config.network.link_time_scale)


def parse_budget(text: str) -> SearchBudget:
    """Parse a budget such as '60s', '5min' or '300000 moves'; UserError for other text."""
    with suppress(ValueError):
        if moves := _MOVES.fullmatch(text.strip()):
            if 0 < float(moves[1]) <= MAX_MOVES:
                return SearchBudget(moves=float(moves[1]))
        elif not text[-1:].isdigit() and (duration := seconds(text)):  # a number without unit is ambiguous
            return SearchBudget(seconds=duration)
    raise UserError(
        f"--budget {text}: use a time such as 60s or 5min, or up to {MAX_MOVES:g} moves such as 300000moves"
    )


def _show(problem: PlanningProblem, schedule: Schedule) -> None:
    others = sorted(schedule.compared.items(), key=lambda pair: pair[1])
    terms = sorted(schedule.bound.terms.items(), key=lambda pair: -pair[1])
    rows = [
        ["this plan", _seconds(schedule.step_s), "1.000"],
        *([name, _seconds(step_s), f"{schedule.step_s / step_s:.3f}" if step_s else "–"] for name, step_s in others),
        [
            f"lower bound ({schedule.bound.binds})",
            _seconds(schedule.bound.step_s),
            "–" if schedule.gap is None else f"gap {schedule.gap:.1%}",
        ],
        *([f"  {name}", _seconds(step_s), ""] for name, step_s in terms if name != schedule.bound.binds),
    ]
    title = f"one step: {problem.count} microbatches, {problem.visits} of {len(problem.sizes) - 1} stages"
    title += ", then gradient sums" if problem.summed else ""
    show([Table(title, ["", "seconds", "this plan ÷ it"], rows)])
    if schedule.gap is None:
        print(f"costs         passes cost nothing, so only messages count: {COSTS}")
    record = schedule.search
    if schedule.paths is not None:
        show([path_table(schedule, schedule.paths)])
        print(f"paths         {path_summary(schedule.paths)}")
    if schedule.bound.binds != ALL:
        print(f"relaxed       the bound ignores {RELAXED}")
    print(f"search        seed {record.seed}, {record.moves} moves in {record.seconds:.1f} s")


def _seconds(number: float) -> str:
    return f"{number:.{2 if number >= 10 else 3 if number >= 1 else 4}f}"


def move_paths(config: RunConfig, recipe: Path | None, moves: int, to: Path | None) -> int:
    """Compare a schedule's paths with the current topology; return the exit code.

    Moves edges over changed links, then makes ``moves`` improving moves. ``to``: the schedule to write, with a page
    next to it; default: write nothing.

    :raises UserError: if recipe, topology and schedule are inconsistent.
    """
    if moves < 0:
        raise UserError(f"--moves {moves}: use 0 or more")
    topology = topology_of(config, recipe)
    schedule, before = _planned_paths(config, recipe)
    if topology.path_network is None:
        raise UserError("network.topology has no [[link]] entries, so there is one path between two sites")
    problem, solution = problem_of(config, topology), schedule.solution
    _require_same(problem, schedule)
    over = MultipathPlanner(topology, message_bytes(config.model, config.pipeline).larger)
    routed = over.adapt_paths(problem, solution, before, moves)
    priced, paths = over.with_path_costs(problem, routed), over.path_choice(routed)
    bound = ProvedBound(**step_lower_bound(problem, exact=False)._asdict())
    # Other arrangements were simulated on the old links: compare only new results.
    hashed = {HASHED: over.mean_hashed_s(problem, solution)}
    step_s = step_ns(priced, solution) / 1e9
    moved = make_schedule(priced, solution, step_s, bound, hashed, schedule.search, paths)
    old_paths = {(edge.source, edge.target): edge.path for edge in before.edges}
    show([path_table(moved, paths, old_paths)])
    changed = sum(edge.path != old_paths[edge.source, edge.target] for edge in paths.edges)
    print(f"paths         {path_summary(paths)}")
    steps = f"step {schedule.step_s:.4g} s before, {moved.step_s:.4g} s now"
    print(f"moved         {changed} of {len(paths.edges)} edges; {steps}")
    if to is not None:
        write(moved, to)
        print(f"schedule      {to}\npage          {write_page(moved, to.with_suffix('.html'))}")
    return 0


def _planned_paths(config: RunConfig, recipe: Path | None) -> tuple[Schedule, SeveralPaths]:
    if config.routing.schedule is None:
        raise UserError("routing.schedule is not set; set it to a schedule that `planaria plan` wrote")
    file = relative_to_recipe(recipe, config.routing.schedule)
    schedule = read_schedule(file)
    if schedule.paths is None:
        raise UserError(f"{file} was planned with one path between two sites; plan again with [[link]] entries")
    return schedule, schedule.paths


def _require_same(problem: PlanningProblem, schedule: Schedule) -> None:
    """Raise UserError if the schedule has other nodes, stages or microbatches."""
    rules = schedule.rules
    different = [a or b for a, b in zip_longest([m.name for m in schedule.nodes], problem.names) if a != b]
    if different:
        difference = f"its nodes are not those of network.topology ({different[0]})"
    elif tuple(rules.sizes) != problem.sizes or rules.visits != problem.visits:
        difference = "its stages or visits are not the recipe's (pipeline.stages, routing.data_nodes, routing.skip)"
    elif problem.summed != (schedule.sums_s is not None):
        difference = (
            "it was planned "
            + ("without gradient sums" if problem.summed else "with them")
            + " (routing.wait_for_gradient_sums)"
        )
    elif rules.microbatches != problem.microbatches:
        difference = "its microbatches are not the recipe's (pipeline.microbatches)"
    else:
        return
    raise UserError(f"routing.schedule: {difference}; plan again with `planaria plan`")
