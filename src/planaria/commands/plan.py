"""``planaria plan``: the plan of one step, its simulated time and its lower bound."""

from __future__ import annotations

from planaria.config import RunConfig
from planaria.engine.itinerary import Itinerary
from planaria.engine.simulate import simulate
from planaria.network.costs import UNIT, Costs, message_bytes
from planaria.plan.bound import lower_bound
from planaria.plan.draw import draw


def describe(config: RunConfig, width: int = 100) -> str:
    """The plan of one step drawn as a chart, its simulated time, its lower bound, and the time of the whole run.

    A recipe without costs is drawn with a forward pass as the unit of time; one on a schedule has its page for a chart.
    """
    pipeline, itinerary = config.pipeline, Itinerary(config)
    if (schedule := itinerary.schedule) is not None:
        total = config.train.steps * schedule.step_s
        return (
            f"{config.routing.schedule}: {len(schedule.routes)} microbatches over {len(schedule.nodes)} nodes, step "
            f"{schedule.step_s:.4g} s, bound {schedule.bound.step_s:.4g} s\nrun of {config.train.steps} steps: "
            f"{total:.4g} s"
        )
    plan = itinerary.training(0)
    priced = bool(config.network.forward_s or config.network.backward_s)
    costs = Costs(config.network) if priced else UNIT
    size = message_bytes(config.model, pipeline)
    simulated = simulate(plan, costs, size)
    unit = "s" if priced else "forward passes"
    total = config.train.steps * simulated.step_s
    chart = draw(simulated, lower_bound(plan, costs, size), width, unit)
    return f"{chart}\nrun of {config.train.steps} steps: {total:.4g} {unit}"
