"""``planaria plan``: what a recipe's step looks like, and how long it must take at least."""

from __future__ import annotations

from planaria.config import RunConfig
from planaria.engine.simulate import simulate
from planaria.network.costs import UNIT, Costs, message_bytes
from planaria.plan.bound import lower_bound
from planaria.plan.build import plan_for
from planaria.plan.draw import draw
from planaria.routing import routes


def describe(config: RunConfig, width: int = 100) -> str:
    """The plan of one step drawn as a chart, its simulated time, its lower bound, and the time of the whole run.

    A recipe without costs is drawn with a forward pass as the unit of time.
    """
    pipeline = config.pipeline
    plan = plan_for(pipeline, routes(config, 0))
    priced = bool(config.network.forward_s or config.network.backward_s)
    costs = Costs(config.network) if priced else UNIT
    size = message_bytes(config.model, pipeline)
    simulated = simulate(plan, costs, size)
    unit = "s" if priced else "forward passes"
    total = config.train.steps * simulated.step_s
    chart = draw(simulated, lower_bound(plan, costs, size), width, unit)
    return f"{chart}\nrun of {config.train.steps} steps: {total:.4g} {unit}"
