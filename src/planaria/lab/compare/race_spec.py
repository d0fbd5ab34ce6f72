"""Comparison settings: one recipe, arms with different recovery, seeds, and the failures they share."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from decimal import Decimal
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from planaria.common.errors import UserError, suggestion
from planaria.config.bounds import MAX_EXACT_INT, Fraction, Natural, Stages
from planaria.config.schema import RunConfig, Section
from planaria.config.section import formerly
from planaria.data.corpus import resolve_formats
from planaria.faults.failure_groups import FailureDomain
from planaria.faults.trace import Trace
from planaria.faults.trace_generation import generate
from planaria.recovery import RECOVERIES
from planaria.trials.arms import ArmRules, TrialsWithArms, file_name, read_table
from planaria.trials.jobs import JobSettings

FAULT_FREE = "fault-free"
"""the arm that every comparison has: the recipe without failures"""
TUNED = "tuned"
"""the fault-free arm with the optimizer settings, found by a search, that reach the target soonest"""
CONTROLS = ("oracle", "reset")
"""strategies that serve as references for others"""
DEFAULT_VALIDATIONS = 20
"""validations of each arm if the recipe has no comparison and too few validations"""
SMOOTHING_WINDOW = 3
"""validations averaged as the loss at the last of them"""
RULES = ArmRules(
    "compare",
    RunConfig,
    free=(
        "recovery", "checkpoint", "exchange", "optim.kind", "optim.lr", "optim.beta1", "optim.beta2", "optim.eps",
        "optim.clip", "pipeline.microbatches", "pipeline.wire", "routing.kind", "routing.mixed", "model.dim",
        "model.embedding_std", "model.share", "model.share_over", "model.subspace",
    ),
)  # fmt: skip


class TraceSpec(Section):
    """Distribution of the failures, drawn once per seed."""

    hourly: Fraction = 0.1
    """probability that a stage fails within an hour"""
    step_s: Annotated[float, Field(gt=0)] = 91.3
    """seconds of one step, to convert the hourly rate to a rate per step"""
    exempt: list[Natural] = Field(default_factory=list)
    """stages that never fail"""
    ends: bool = False
    """the ends worker fails at the same rate as the block stages"""
    forbid_adjacent: bool = False
    """neighbouring stages never fail in the same step: so never a copy and its host, if these are neighbours"""
    adjacent_probability: Annotated[Fraction, formerly("adjacent_probability", "together")] = 0.0
    """chance that a failure takes the next stage too, and then possibly the one after"""
    failure_domain: Annotated[FailureDomain, formerly("failure_domain", "lost")] = "stage"
    """what one failure takes: stage, adjacent (a stage and the next), machine, or region (half of all stages); each
    stage is lost about as often"""
    machine: Stages = 2
    """stages in a row that share a machine"""


class TuningGrid(Section):
    """Optimizer settings to try without failures, in all combinations; none by default.

    The best of them becomes the arm 'tuned'. Other arms keep their settings.
    """

    lr: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)
    """peak learning rates"""
    beta2: list[Fraction] = Field(default_factory=list)
    """decays of the second moment"""

    @property
    def points(self) -> dict[str, dict[str, Any]]:
        """Name → its changes of the recipe."""
        tried = {name: grid for name, grid in (("lr", self.lr), ("beta2", self.beta2)) if grid}
        changes: dict[str, dict[str, Any]] = {}
        for point in product(*tried.values()) if tried else ():
            settings = dict(zip(tried, point, strict=True))
            changes[", ".join(f"{name} {setting:g}" for name, setting in settings.items())] = {"optim": settings}
        return changes


class Comparison(TrialsWithArms, JobSettings):
    """The ``[compare]`` table of a recipe.

    Besides changes of the recipe an arm may have ``faults = false``, which excludes failures. With a list of rates as
    ``optim.lr`` it becomes one arm for each, named 'ARM_2e-3'.
    """

    target_at: Annotated[float, Field(gt=0, lt=1)] = 0.6
    """the target loss is the fault-free arm's after this fraction of the steps, for each seed"""
    clock: str = ""
    """the recipe whose sizes and [network] determine the hours; default: this one"""
    trace: TraceSpec = TraceSpec()
    controls: bool = True
    """whether to run controls that lose nothing (oracle) and only moments (reset), if arms differ in recovery"""
    search: TuningGrid = TuningGrid()

    @field_validator("arms")
    @classmethod
    def _split_by_rate(cls, arms: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        return {name: tables for arm, given in arms.items() for name, tables in _split_rates(arm, given).items()}


def _split_rates(arm: str, tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return an arm, or one for each rate in its ``optim.lr``."""
    optim = tables.get("optim", {})
    rates = optim.get("lr") if isinstance(optim, dict) else None
    if not rates or not isinstance(rates, list) or not all(isinstance(rate, float) for rate in rates):
        return {arm: tables}
    return {f"{arm}_{Decimal(str(rate)).normalize():e}": {**tables, "optim": optim | {"lr": rate}} for rate in rates}


class Arm(Section):
    """One arm: its whole configuration, and whether failures apply."""

    name: str
    config: RunConfig
    faults: bool = True
    searched: bool = False
    """whether it is a point of the search for the fault-free arm's best settings"""


def load(
    path: Path,
    flags: Mapping[str, object],
    seeds: Sequence[int] | None = None,
    only: Sequence[str] | None = None,
    trace_overrides: Mapping[str, object] | None = None,
) -> tuple[Comparison, list[Arm]]:
    """Return the comparison in the recipe ``path``, with ``flags`` applied to all arms; the fault-free arm is first.

    ``seeds`` replace the recipe's, and ``trace_overrides`` replace settings of compare.trace. ``only`` selects arms;
    names of recovery strategies count as arms, raced in the routing that they require. With ``only``, a [compare] table
    is optional, and neither controls nor a search are added.

    :raises UserError: naming file, arm and key of an error, or of a change that is not allowed.
    """
    overrides: dict[str, Any] = {} if seeds is None else {"seeds": list(seeds)}
    overrides |= {"trace": dict(trace_overrides)} if trace_overrides else {}
    comparison, tree = read_table(path, "compare", Comparison, "train", overrides, required=only is None)
    chosen, points = _select_arms(comparison, only, path)
    faults = {name: tables.get("faults", name not in points) for name, tables in chosen.items()}
    for name, has_faults in faults.items():
        if not isinstance(has_faults, bool):
            raise UserError(f"{path}: compare.arms.{name}.faults = {has_faults!r} must be true or false")
    changes = {name: {key: t for key, t in tables.items() if key != "faults"} for name, tables in chosen.items()}
    base, configs = _resolve_with_equal_samples(tree, changes, flags, path)
    if not comparison.arms and _count_validations(comparison, base) < SMOOTHING_WINDOW:  # the recipe has no comparison
        flags = {**flags, "train.eval_every": str(max(1, base.train.steps // DEFAULT_VALIDATIONS))}
        base, configs = _resolve_with_equal_samples(tree, changes, flags, path)
    if _count_validations(comparison, base) < SMOOTHING_WINDOW:
        fix = "validate more often" if base.train.eval_every > 1 else "raise train.steps"
        raise UserError(
            f"{path}: train.eval_every = {base.train.eval_every}: the target needs {SMOOTHING_WINDOW} validations "
            f"within {comparison.target_at:g} of {base.train.steps} steps; {fix}"
        )
    return comparison, _distinct_arms(base, configs, points, faults)


def _distinct_arms(
    base: RunConfig, configs: Mapping[str, RunConfig], points: Collection[str], faults: Mapping[str, bool]
) -> list[Arm]:
    """Return the fault-free arm and all others, without points of a search that repeat the recipe or another point."""
    data_config = {"data": resolve_formats(base.data)}  # no arm may change it
    seen = [base]
    arms = [Arm(name=FAULT_FREE, config=base.model_copy(update=data_config), faults=False)]
    for name, config in configs.items():
        if name in points and config in seen:
            continue
        seen += [config] if name in points else []
        config = config.model_copy(update=data_config)
        arms.append(Arm(name=name, config=config, faults=faults[name], searched=name in points))
    return arms


def _select_arms(
    comparison: Comparison, only: Sequence[str] | None, path: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Return arm → its changes, and those of them that are points of a search."""
    if only is not None and not only:
        raise UserError(
            f"{path}: compare.arms: none was selected; {suggestion('', [*comparison.arms, *RECOVERIES.names])}"
        )
    own = comparison.arms
    chosen = {name: tables for name, tables in own.items() if only is None or name in only}
    chosen |= {name: _strategy_arm(name, own, path) for name in only or () if name not in own}
    if reserved := [name for name in chosen if file_name(name) in (FAULT_FREE, TUNED)]:
        raise UserError(f"{path}: compare.arms.{reserved[0]}: the name is reserved; choose another name")
    points = comparison.search.points if only is None else {}
    chosen |= {**(_controls(comparison, chosen) if only is None else {}), **points}
    return chosen, points


def _controls(comparison: Comparison, chosen: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    compares_recovery = any("recovery" in tables and tables.get("faults", True) for tables in chosen.values())
    if not (compares_recovery and comparison.controls and comparison.trace.hourly):
        return {}
    return {name: {"recovery": {"strategy": name}} for name in CONTROLS if name not in chosen}


def _resolve_with_equal_samples(
    tree: Mapping[str, Any], changes: Mapping[str, Mapping[str, Any]], flags: Mapping[str, object], path: Path
) -> tuple[RunConfig, dict[str, RunConfig]]:
    """Return the recipe and its arms, which all use equally many samples per step."""
    base, configs = RULES.arms(tree, changes, flags, path)
    for name, arm in configs.items():
        if arm.samples == base.samples:
            continue
        count, each = arm.exchange.replicas, arm.pipeline.microbatches
        microbatches, left = divmod(base.samples, count * arm.pipeline.microbatch_size)
        per_replica = base.samples // arm.pipeline.microbatch_size
        fix = f"exchange.replicas that divide {per_replica}" if left else f"pipeline.microbatches = {microbatches}"
        raise UserError(
            f"{path}: compare.arms.{name}: exchange.replicas = {count} with pipeline.microbatches = {each} take "
            f"{arm.samples} samples a step, the recipe {base.samples}; set {fix}"
        )
    return base, configs


def _strategy_arm(name: str, own: Collection[str], path: Path) -> dict[str, Any]:
    """Return the changes of an arm given as a recovery strategy's name or 'module:Class'."""
    if name not in RECOVERIES.names and ":" not in name:
        fix = suggestion(name, [*own, *RECOVERIES.names])
        raise UserError(f"{path}: compare.arms.{name}: neither an arm nor a strategy; {fix}")
    return {"recovery": {"strategy": name}, "routing": {"kind": RECOVERIES.find(name).requirements.routing or "full"}}


def _count_validations(comparison: Comparison, base: RunConfig) -> int:
    """Return how often the part of a run up to the target is validated."""
    return int(comparison.target_at * base.train.steps / base.train.eval_every) if base.train.eval_every else 0


def traces_for(comparison: Comparison, config: RunConfig, seed: int, replicas: int) -> list[Trace]:
    """Return the failures of each replica of every arm with this seed; without failures, one trace for all."""
    several = replicas if comparison.trace.hourly else 1
    return [trace_for(comparison, config, seed, replica) for replica in range(several)]


def trace_for(comparison: Comparison, config: RunConfig, seed: int, replica: int = 0) -> Trace:
    """Return the failures of this replica of every arm with this seed.

    All arms have replica 0. Further replicas fail independently at the same rate, from seeds derived from this one.
    """
    spec = comparison.trace
    return generate(
        random.Random(f"planaria comparison {seed} replica {replica}").randrange(MAX_EXACT_INT) if replica else seed,
        spec.hourly,
        spec.step_s,
        config.pipeline.stages,
        config.train.steps,
        set(spec.exempt),
        spec.forbid_adjacent,
        spec.ends,
        spec.adjacent_probability,
        spec.failure_domain,
        spec.machine,
    )
