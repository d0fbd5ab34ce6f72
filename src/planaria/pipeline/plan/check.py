"""Check that a plan can be executed and gives the right gradient for any timing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from planaria.common.errors import UserError
from planaria.pipeline.plan.actions import (
    Action,
    Key,
    PassKind,
    StepPlan,
    build_graph,
    deadlock_error,
    feasible_actions,
)


def check(plan: StepPlan) -> list[str]:
    """Return the problems of ``plan``, one line each, naming microbatch, stage and hop; empty if there are none.

    Later checks run only if the earlier ones pass: closed routes, exactly the actions of the routes, required waits,
    and no deadlock.
    """
    for question in (_route_problems, _action_problems, _wait_problems, _deadlock_problems):
        if problems := list(question(plan)):
            return problems
    return []


def require(plan: StepPlan) -> None:
    """Check ``plan``.

    :raises UserError: with its first problem.
    """
    if problems := check(plan):
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UserError(f"this plan cannot be carried out: {problems[0]}{more}")


def _route_problems(plan: StepPlan) -> Iterator[str]:
    if not plan.routes:
        yield "it has no microbatches"
    for node, slots in sorted(plan.slots.items()):
        if slots < 1:
            yield f"node {node} has slots for {slots} microbatches; it needs at least one"
    origins = {route[0] for route in plan.routes if route}
    for i, route in enumerate(plan.routes):
        where = f"the route of microbatch {i}"
        if len(route) < 3:
            yield f"{where} visits no block stage"
            continue
        if route[0] != route[-1]:
            yield f"{where} goes from node {route[0]} to node {route[-1]}; it must end where it starts"
        for hop, node in enumerate(route[1:-1], start=1):
            if node in origins:
                yield f"{where} visits node {node} at hop {hop}, where microbatches start"
            elif node == route[hop - 1]:
                yield f"{where} visits node {node} twice in a row, at hops {hop - 1} and {hop}"
            elif node not in plan.actions:
                yield f"{where} visits node {node} at hop {hop}, which has nothing to do"


def _action_problems(plan: StepPlan) -> Iterator[str]:
    """Check that each visit has its forward, and its backward unless the plan has none, and nothing else."""
    listed = [(stage, action) for stage, actions in plan.actions.items() for action in actions]
    training = any(action.kind == "backward" for _, action in listed)
    kinds: tuple[PassKind, ...] = ("forward", "backward") if training else ("forward",)
    seen = Counter(action.key for _, action in listed)
    for i, route in enumerate(plan.routes):
        for hop, stage in enumerate(route):
            for kind in kinds:
                if not seen[Key(kind, i, hop)]:
                    yield f"{_label(kind, i, stage, hop)} is missing"
    for stage, action in listed:
        name = _label(action.kind, action.microbatch, stage, action.hop)
        if seen[action.key] > 1:
            yield f"{name} appears {seen[action.key]} times"
        elif action.node != stage:
            yield f"{name} says that it is stage {action.node}'s"
        elif wrong := _route_mismatch(plan, action):
            yield f"{name} {wrong}"


def _route_mismatch(plan: StepPlan, action: Action) -> str:
    """Return how ``action`` contradicts its microbatch's route, or an empty string if it does not."""
    if not 0 <= action.microbatch < len(plan.routes):
        return f"belongs to no microbatch: there are {len(plan.routes)}"
    route = plan.routes[action.microbatch]
    if not 0 <= action.hop < len(route) or route[action.hop] != action.node:
        return f"is not on the route {'→'.join(map(str, route))}"
    before = route[action.hop - 1] if action.hop else None
    behind = route[action.hop + 1] if action.hop + 1 < len(route) else None
    source, target = (before, behind) if action.kind == "forward" else (behind, before)
    if action.source != source:
        return f"takes its input from {_stage_label(action.source)}; its route says {_stage_label(source)}"
    if action.target != target:
        return f"sends its output to {_stage_label(action.target)}; its route says {_stage_label(target)}"
    return ""


def _wait_problems(plan: StepPlan) -> Iterator[str]:
    """Check that ``after`` names local actions, memory suffices, and gradients are added in one fixed order."""
    for stage, actions in plan.actions.items():
        local = {action.key for action in actions}
        for action in actions:
            name = _label(action.kind, action.microbatch, stage, action.hop)
            for key in action.after:
                if key not in local:
                    yield f"{name} waits for the {key.kind} of microbatch {key.microbatch} at hop {key.hop}, elsewhere"
            if action.kind == "backward" and Key("forward", action.microbatch, action.hop) not in action.after:
                yield f"{name} does not wait for its forward"
        backwards = [a for a in actions if a.kind == "backward"]
        # Embedding and head are different weights, each with its own sum.
        disorder = [
            *_sum_order_problems([a for a in backwards if not a.returns]),
            *_sum_order_problems([a for a in backwards if a.returns]),
        ]
        yield from disorder
        if backwards and not disorder and stage in plan.slots:
            yield from _memory_problems(actions, plan.slots[stage])


def _memory_problems(actions: Sequence[Action], slots: int) -> Iterator[str]:
    """Check that at most ``slots`` microbatches are between forward and backward at a node.

    Its backwards run in one fixed order. If the k-th forward, by the backwards they wait for, waits for backward number
    k − slots or a later one, then enough backwards are done before any set of forwards.
    """
    stay = {a.key for a in actions if not a.returns}
    chain = _waiting_chain([a for a in actions if a.kind == "backward" and a.key in stay])
    positions = {key: n for n, key in enumerate(chain)}
    forwards = [a for a in actions if a.kind == "forward" and a.key in stay]
    waits = sorted(
        (max((positions[key] for key in a.after if key in positions), default=-1), a.microbatch, a) for a in forwards
    )
    for k, (freed, _, action) in enumerate(waits):
        if freed < k - slots:
            yield (
                f"{_label('forward', action.microbatch, action.node, action.hop)} may start with {slots} microbatches "
                "under way, all that there is memory for"
            )


def _waiting_chain(backwards: Sequence[Action]) -> list[Key]:
    """Return the keys in the order in which they wait for one another, as :func:`_sum_order_problems` checks."""
    keys = {action.key for action in backwards}
    follows = {key: action.key for action in backwards for key in action.after if key in keys}
    row = [action.key for action in backwards if not keys.intersection(action.after)][:1]
    while row and row[-1] in follows and len(row) < len(keys):
        row.append(follows[row[-1]])
    return row


def _sum_order_problems(backwards: Sequence[Action]) -> Iterator[str]:
    """Check that each backward of one sum, except the first, waits for exactly one other, in a single row."""
    keys = {action.key for action in backwards}
    waits = {action.key: [key for key in action.after if key in keys] for action in backwards}
    first = [action for action in backwards if not waits[action.key]]
    followed = Counter(key for waited in waits.values() for key in waited)
    for action in first[1:]:
        yield (
            f"{_label('backward', action.microbatch, action.node, action.hop)} waits for no other of its sum: the "
            "gradient would depend on timing"
        )
    for key, count in followed.items():
        if count > 1:
            stage = backwards[0].node
            yield (
                f"{count} others wait for {_label('backward', key.microbatch, stage, key.hop)}, not for one another: "
                "the gradient would depend on timing"
            )


def _deadlock_problems(plan: StepPlan) -> Iterator[str]:
    numbered = build_graph(plan)
    order = feasible_actions(numbered)
    if len(order) < len(numbered.actions):
        yield str(deadlock_error(numbered, order))


def _label(kind: str, microbatch: int, stage: int, hop: int) -> str:
    return f"the {kind} of microbatch {microbatch} at stage {stage}, hop {hop},"


def _stage_label(stage: int | None) -> str:
    return "nowhere" if stage is None else f"stage {stage}"
