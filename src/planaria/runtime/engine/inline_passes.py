"""A plan's actions in one process, in one fixed topological order."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from planaria.pipeline.plan.actions import Action, Key, Plan
from planaria.pipeline.plan.order import topological_order
from planaria.runtime.engine.runner import StageRunner


def carry_out(
    plan: Plan, runners: Mapping[int, StageRunner], passed: Callable[[Action, Tensor], None] | None = None
) -> None:
    """Let the ``runners`` of its nodes, which have begun, do what it says; ``passed`` hears what each hands on."""
    messages: dict[Key, Tensor] = {}
    for action in topological_order(plan):
        given = messages.pop(action.needs) if action.needs is not None else None
        out = getattr(runners[action.node], action.kind)(action.microbatch, action.hop, given)
        if action.target is not None:
            messages[action.key] = out
            if passed is not None:
                passed(action, out)
