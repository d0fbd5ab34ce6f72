"""``planaria plan``: the plan of one step, its simulated time and its lower bound."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from planaria.cli.flags import Quiet, command, flag, recipe_argument, switch
from planaria.cli.settings import Settings
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.runtime.resolved_run import ResolvedRun

BUDGET = (
    "60s, 5min, or 300000moves (default 60s), divided among lower bound, search and a full pipeline to compare with; "
    "starting and compiling take additional time"
)


@command("plan", cls=Settings)
def _plan(
    recipe: Annotated[Path | None, recipe_argument()] = None,
    *,
    skip: Annotated[str | None, flag("SHARE", "the same as --routing.skip")] = None,
    budget: Annotated[str | None, flag("SIZE", BUDGET)] = None,
    update: Annotated[
        bool,
        switch("--update", "keep the arrangement in routing.schedule; move paths whose [[link]] entries changed"),
    ] = False,
    moves: Annotated[int | None, flag("N", "with --update: additional improving moves (default 0)")] = None,
    to: Annotated[Path | None, flag("FILE", "schedule file to write, with an HTML page next to it")] = None,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Draw the plan of one step; with a topology, search for the best arrangement and routes."""
    from planaria.cli.plan_search import parse_budget, plan_routes
    from planaria.config.recipe import load
    from planaria.runtime.preparation.config_checks import check

    spend = parse_budget(budget or "60s")
    config = load(recipe, settings | ({"routing.skip": skip} if skip is not None else {}), "train")
    if update:
        from planaria.cli.plan_search import move_paths

        if budget is not None:
            raise UserError(f"--budget {budget}: limits a search, and --update makes --moves N; remove one of them")
        return move_paths(config, recipe, moves or 0, to)
    if moves is not None:
        raise UserError(f"--moves {moves} requires --update")
    routing = config.routing
    if (
        config.network.topology is not None
        or skip is not None
        or routing.wait_for_gradient_sums
        or routing.search != "anneal"
    ):
        return plan_routes(config, recipe, spend, to, quiet)
    check(config)
    print(describe(config))
    return 0


def describe(config: RunConfig, width: int = 100) -> str:
    """Return a chart of one step's plan, its simulated time, its lower bound, and the time of the whole run.

    Without costs, a forward pass is the unit of time. A recipe with a schedule has a page instead of a chart.
    """
    from planaria.pipeline.network.costs import UNIT, Costs, message_bytes
    from planaria.pipeline.plan.plan_bound import lower_bound
    from planaria.pipeline.plan.simulation import draw
    from planaria.runtime.prediction.simulate import simulate
    from planaria.runtime.resolved_run import ResolvedRun

    pipeline, resolved = config.pipeline, ResolvedRun(config, together=False)
    if (schedule := resolved.schedule) is not None:
        total = config.train.steps * schedule.step_s
        return (
            f"{config.routing.schedule}: {len(schedule.routes)} microbatches over {len(schedule.nodes)} nodes, step "
            f"{schedule.step_s:.4g} s, bound {schedule.bound.step_s:.4g} s\nrun of {config.train.steps} steps: "
            f"{total:.4g} s{_relays(resolved)}"
        )
    plan = resolved.training(0)
    priced = bool(config.network.forward_s or config.network.backward_s)
    costs = Costs(config.network) if priced else UNIT
    size = message_bytes(config.model, pipeline)
    simulated = simulate(plan, costs, size)
    unit = "s" if priced else "forward passes"
    total = config.train.steps * simulated.step_s
    chart = draw(simulated, lower_bound(plan, costs, size), width, unit)
    return f"{chart}\nrun of {config.train.steps} steps: {total:.4g} {unit}{_relays(resolved)}"


def _relays(resolved: ResolvedRun) -> str:
    """Return lines on the edges of each relay at the start, and their balance, or an empty string without relays."""
    config = resolved.config
    if not config.fleet.relays or config.engine != "fleet":
        return ""
    from planaria.control.relays import assign_relays, edge_flows, relay_paths
    from planaria.control.state.replica import ReplicaState
    from planaria.pipeline.network.costs import message_bytes
    from planaria.planner.paths import link_loads, tightest_cut
    from planaria.runtime.preparation.run_start import START, run_started

    replica = ReplicaState.start(run_started(resolved, START))
    nodes = replica.arrangement.stage
    pairs, walked = replica.pairs_of(nodes), replica.routes_over(nodes) or []
    over = assign_relays(replica, pairs, (), walked)
    routes = relay_paths(replica.started.relays)
    paths = {path.id: path for alternatives in routes.paths.values() for path in alternatives}
    own_routes = [route for route in resolved.routes(0) if route[0] in nodes]
    flows = edge_flows(pairs, own_routes, sum(message_bytes(config.model, config.pipeline)))  # activation and gradient
    busy = link_loads(list(flows.values()), routes, [paths[over[pair]] for pair in flows])
    least = tightest_cut(list(flows.values()), routes)
    lines = [
        f"relay {name:8}edges {', '.join(f'{a}–{b}' for (a, b), by in over.items() if by == name) or 'none'}: "
        f"{busy.get(name, 0.0):.4g} s of a step"
        for name in config.fleet.relays
    ]
    gap = least.gap(max(busy.values()))
    return "\n".join(
        ["", *lines, f"lower bound over all choices of relays: {least.seconds:.4g} s of a step (gap {gap:.1%})"]
    )
