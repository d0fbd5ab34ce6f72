"""A comparison as typed data: one recipe, arms that cope in different ways, seeds, and the failures they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from planaria import recipe
from planaria.bounds import Fraction, Natural
from planaria.chaos.trace import Trace, generate
from planaria.config import RunConfig, Section
from planaria.errors import UserError, nearest

FAULT_FREE = "fault-free"
"""the arm that every comparison has: the recipe as it stands, and no failures"""
SMOOTHED = 3
"""validations whose mean counts as the loss at the last of them: one lucky one does not win a race"""
FREE_TO_DIFFER = ("recovery", "checkpoint", "exchange", "routing.kind", "routing.mixed", "name")
"""all that arms may change; with other text, seeds, sizes or budgets they would not be comparable"""
FIXED = ("exchange.replicas",)
"""of these, what they may not change: replicas have samples of their own"""


class TraceSpec(Section):
    """How the failures are drawn, once for each seed."""

    hourly: Fraction = 0.1
    """probability that a stage fails within an hour"""
    step_s: Annotated[float, Field(gt=0)] = 91.3
    """seconds of one step, for turning the hourly rate into one per step"""
    exempt: list[Natural] = Field(default_factory=list)
    """stages that never fail"""
    ends: bool = False
    """the ends worker fails at the same rate as the block stages"""
    forbid_adjacent: bool = False
    """neighbouring stages never fail in the same step"""


class Comparison(Section):
    """The ``[compare]`` table of a recipe, beside the run's own sections."""

    seeds: list[Natural] = Field(default_factory=lambda: [1, 2, 3])
    """one run of every arm for each; a seed gives weights, data order and failures"""
    target_at: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """the loss to reach is the fault-free arm's after this fraction of the steps, for each seed"""
    clock: str = ""
    """the recipe whose sizes and [network] give the hours; this one unless given"""
    workers: Natural = 0
    """runs at the same time; 0 is one for each core"""
    trace: TraceSpec = TraceSpec()
    arms: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """arm → what it changes, as tables of the recipe; ``faults = false`` spares it the failures"""


class Arm(Section):
    """One contestant: its whole configuration, and whether the failures strike it."""

    name: str
    config: RunConfig
    faults: bool = True


def load(
    path: Path, flags: Mapping[str, object], seeds: Sequence[int] | None = None, only: Sequence[str] | None = None
) -> tuple[Comparison, list[Arm]]:
    """The comparison in the recipe ``path``, with ``flags`` laid over all arms; the fault-free arm comes first.

    ``seeds`` take the place of the recipe's; of the arms, it may be about ``only`` some.

    :raises UserError: naming file, arm and key of what is wrong, or what an arm changes that it must not.
    """
    tree = recipe.read(path)
    recipe.require_kind(tree, path, "compare", "train")
    table = tree.pop("compare", None)
    if table is None:
        raise UserError(f"{path}: has no [compare] table; `planaria train {path}` trains it, see docs/compare.md")
    comparison = _comparison(table if seeds is None else {**table, "seeds": list(seeds)}, path)
    if only is not None and not only:
        raise UserError(f"{path}: compare.arms: none was chosen; {nearest('', comparison.arms)}")
    for name in only or ():
        if name not in comparison.arms:
            raise UserError(f"{path}: compare.arms.{name}: there is no such arm; {nearest(name, comparison.arms)}")
    base = recipe.from_tree(tree, flags, path)
    validations = int(comparison.target_at * base.train.steps / base.train.eval_every) if base.train.eval_every else 0
    if validations < SMOOTHED:
        raise UserError(
            f"{path}: train.eval_every = {base.train.eval_every}: the target needs {SMOOTHED} validations within "
            f"{comparison.target_at:g} of {base.train.steps} steps; validate more often"
        )
    arms = [Arm(name=FAULT_FREE, config=base, faults=False)]
    for name, changes in comparison.arms.items():
        if only is not None and name not in only:
            continue
        faults = changes.pop("faults", True)
        if not isinstance(faults, bool):
            raise UserError(f"{path}: compare.arms.{name}.faults = {faults!r}: must be true or false")
        config = recipe.from_tree(recipe.overlaid(tree, changes), flags, path, f"compare.arms.{name}")
        _refuse_unfair(base, config, f"{path}: compare.arms.{name}")
        arms.append(Arm(name=name, config=config, faults=faults))
    return comparison, arms


def trace_for(comparison: Comparison, config: RunConfig, seed: int) -> Trace:
    """The failures that strike every arm with this seed."""
    spec = comparison.trace
    return generate(
        seed,
        spec.hourly,
        spec.step_s,
        config.pipeline.stages,
        config.train.steps,
        set(spec.exempt),
        spec.forbid_adjacent,
        spec.ends,
    )


def _comparison(table: Any, path: Path) -> Comparison:
    made = recipe.table(Comparison, table, "compare", path)
    if not made.seeds or len(set(made.seeds)) < len(made.seeds):
        raise UserError(f"{path}: compare.seeds = {made.seeds}: give one seed or more, each once")
    if FAULT_FREE in made.arms:
        raise UserError(f"{path}: compare.arms.{FAULT_FREE}: every comparison has this arm; choose another name")
    if not made.arms:
        raise UserError(f"{path}: compare.arms: there are none; write one table [compare.arms.NAME] for each")
    return made


def _refuse_unfair(base: RunConfig, arm: RunConfig, place: str) -> None:
    """Arms that differ in data, trace or budget cannot be compared."""
    ours, theirs = recipe.flat(base), recipe.flat(arm)
    free = ", ".join(FREE_TO_DIFFER[:-1])
    for name in ours.keys() | theirs.keys():
        if (name in FIXED or not name.startswith(FREE_TO_DIFFER)) and ours.get(name) != theirs.get(name):
            raise UserError(
                f"{place}.{name} = {theirs[name]!r}: the recipe has {ours[name]!r}; arms may differ in {free} only"
            )
