"""``planaria plan --update``: compare the paths of a schedule's edges with a changed network, and move some."""

from __future__ import annotations

from itertools import zip_longest
from pathlib import Path

from planaria.cli.commands.schedule import topology_of
from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.pipeline.network.costs import message_bytes
from planaria.planner.bound.step_bound import step_lower_bound
from planaria.planner.over_paths import HASHED, MultipathPlanner
from planaria.planner.problem import PlanningProblem, problem_of
from planaria.planner.schedule import ProvedBound, Schedule, SeveralPaths, make_schedule, read, write
from planaria.planner.search import step_ns
from planaria.report.run.path_table import summary, table
from planaria.report.run.schedule_page import write_page
from planaria.report.tables import show
from planaria.runtime.preparation.prepare import relative_to_recipe


def move_paths(config: RunConfig, recipe: Path | None, moves: int, to: Path | None) -> int:
    """Compare a schedule's paths with the current topology; return the exit code.

    Moves edges over changed links, then makes ``moves`` improving moves. ``to``: the schedule to write, with a page
    next to it; default: write nothing.

    :raises UserError: if recipe, topology and schedule are inconsistent.
    """
    if moves < 0:
        raise UserError(f"--moves {moves}: use 0 or more")
    topology = topology_of(config, recipe)
    schedule, before = _schedule(config, recipe)
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
    show([table(moved, paths, old_paths)])
    changed = sum(edge.path != old_paths[edge.source, edge.target] for edge in paths.edges)
    print(f"paths         {summary(paths)}")
    steps = f"step {schedule.step_s:.4g} s before, {moved.step_s:.4g} s now"
    print(f"moved         {changed} of {len(paths.edges)} edges; {steps}")
    if to is not None:
        write(moved, to)
        print(f"schedule      {to}\npage          {write_page(moved, to.with_suffix('.html'))}")
    return 0


def _schedule(config: RunConfig, recipe: Path | None) -> tuple[Schedule, SeveralPaths]:
    if config.routing.schedule is None:
        raise UserError("routing.schedule is not set; set it to a schedule that `planaria plan` wrote")
    file = relative_to_recipe(recipe, config.routing.schedule)
    schedule = read(file)
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
