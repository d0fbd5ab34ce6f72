"""The ``simulate`` engine: simulates a plan (``pipeline/plan/simulation.py``) with the costs of a recipe."""

from __future__ import annotations

from collections import Counter

from planaria.pipeline.codecs.base import MessageBytes
from planaria.pipeline.network.costs import Costs, MessageCosts
from planaria.pipeline.plan.actions import StepPlan
from planaria.pipeline.plan.simulation import PlanSimulation, SimulatedStep

__all__ = ["SimulatedStep", "simulate"]


def simulate(plan: StepPlan, costs: Costs, message_bytes: MessageBytes) -> SimulatedStep:
    """Simulate a step of ``plan`` in which actions, and messages of ``message_bytes`` each, have these ``costs``.

    The clock counts whole nanoseconds; simultaneous events are visible to all workers before they choose.

    :raises UserError: if the plan can never finish; it names actions.
    """
    clock = PlanSimulation(plan, MessageCosts(costs, message_bytes))
    step = clock.run()
    actions = clock.graph.actions
    return SimulatedStep(
        step_s=MessageCosts.seconds(step),
        ran={stage: [actions[n] for n in ran] for stage, ran in clock.ran.items()},
        starts={stage: [MessageCosts.seconds(clock.starts[n]) for n in ran] for stage, ran in clock.ran.items()},
        ends={stage: [MessageCosts.seconds(clock.ends[n]) for n in ran] for stage, ran in clock.ran.items()},
        sent_bytes=dict(sorted(_messages_sent(clock, message_bytes).items())),
    )


def _messages_sent(clock: PlanSimulation, message_bytes: MessageBytes) -> Counter[tuple[int, int]]:
    sent = Counter[tuple[int, int]]()
    for (source, target, kind), count in clock.messages.items():
        sent[source, target] += count * message_bytes.of(kind)
    return sent
