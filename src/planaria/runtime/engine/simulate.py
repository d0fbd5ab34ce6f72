"""The ``simulate`` engine: plays a plan on a clock (``pipeline/plan/clock.py``) at the prices of a recipe."""

from __future__ import annotations

from planaria.pipeline.network.costs import Costs, Prices
from planaria.pipeline.plan.actions import Plan
from planaria.pipeline.plan.clock import Clock, Simulated

__all__ = ["Simulated", "simulate"]


def simulate(plan: Plan, costs: Costs, message_bytes: int) -> Simulated:
    """The step that ``plan`` makes if actions, and messages of ``message_bytes`` each, cost what ``costs`` says.

    The clock counts whole nanoseconds; what happens at one instant is seen by all workers before they choose.
    Raises UserError, naming actions, if the plan can never finish.
    """
    clock = Clock(plan, Prices(costs, message_bytes))
    step = clock.run()
    actions = clock.graph.actions
    return Simulated(
        step_s=Prices.seconds(step),
        ran={stage: [actions[n] for n in ran] for stage, ran in clock.ran.items()},
        starts={stage: [Prices.seconds(clock.starts[n]) for n in ran] for stage, ran in clock.ran.items()},
        ends={stage: [Prices.seconds(clock.ends[n]) for n in ran] for stage, ran in clock.ran.items()},
        sent_bytes={link: count * message_bytes for link, count in sorted(clock.messages.items())},
    )
