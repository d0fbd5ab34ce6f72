"""What an arm's hours are for: its way of coping, on the model and the machines of the clock's recipe."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.registry import blaming
from planaria.config.schema import RunConfig
from planaria.faults.blows import blows, share
from planaria.faults.generating import hourly_of_all
from planaria.lab.compare.clock import Clock, clock_of
from planaria.lab.compare.race_spec import Arm, Comparison
from planaria.lab.trials.arms import of_arm
from planaria.recovery.checkpoint import best_steps
from planaria.runtime.engine.check import check
from planaria.runtime.engine.copy_costs import settle
from planaria.runtime.engine.own_classes import own_classes


def checked(path: Path, comparison: Comparison, arms: Sequence[Arm]) -> tuple[list[Arm], dict[str, Clock]]:
    """The arms as they can be raced, with numbers for what they call 'best', and the clock of each.

    :raises UserError: naming the arm that no engine takes, and why.
    """
    if arms[0].config.routing.schedule is not None:
        raise UserError(f"{path}: routing.schedule: schedules are not raced: their nodes are no stages; leave it out")
    if arms[0].config.train.start is not None:
        raise UserError(f"{path}: train.start: arms begin with the weights of their seed; leave it out")
    for arm in arms:
        if arm.config.checkpoint.store is not None:
            place = path if arm.config == arms[0].config else f"{path}: compare.arms.{arm.name}"
            raise UserError(f"{place}: checkpoint.store: races keep their checkpoints in memory; leave it out")
    on_the_clock = {arm.name: clock_config(path, comparison, arm, arms[0].config) for arm in arms}
    clocks = {arm.name: _clock(path, arm, on_the_clock[arm.name]) for arm in arms}
    settled = [_settled(comparison, arm, on_the_clock[arm.name], clocks[arm.name]) for arm in arms]
    for arm in settled:
        with of_arm(f"{path}: compare.arms.{arm.name}"):
            check(arm.config.model_copy(update={"engine": "inline"}))
    return settled, clocks


def _clock(path: Path, arm: Arm, config: RunConfig) -> Clock:
    with of_arm(f"{path}: compare.arms.{arm.name}"), blaming(partial(own_classes, config)):
        return clock_of(config)


def _settled(comparison: Comparison, arm: Arm, on_the_clock: RunConfig, clock: Clock) -> Arm:
    """The arm with its best intervals as numbers of steps, by the clock and the trace's rate."""
    config, trace = arm.config.model_copy(update={"recovery": on_the_clock.recovery}), comparison.trace
    if config.checkpoint.every != "best":
        return arm.model_copy(update={"config": config})
    struck = set(range(0 if trace.ends else 1, config.pipeline.stages + 1)) - set(trace.exempt)
    hourly = hourly_of_all(trace.hourly, trace.step_s, config.exchange.replicas)
    blown = share(trace.lost) * len(blows(trace.lost, struck, config.pipeline.stages, trace.machine))
    every = max(best_steps(hourly, blown, clock.step_s, clock.save_s), clock.behind)
    checkpoint = config.checkpoint.model_copy(update={"every": every})
    return arm.model_copy(update={"config": config.model_copy(update={"checkpoint": checkpoint})})


def clock_config(path: Path, comparison: Comparison, arm: Arm, base: RunConfig) -> RunConfig:
    """What the hours are for: the arm's way of coping, on the model and the network of the clock's recipe.

    A replica has as many of its microbatches as the arm has of those of ``base``, the recipe that it changes.
    """
    if not comparison.clock:
        return settle(arm.config)
    beside = path.parent / comparison.clock
    other = recipe.load(beside if beside.is_file() else Path(comparison.clock), {}, "train", "compare")
    if other.pipeline.stages != arm.config.pipeline.stages:
        raise UserError(
            f"{path}: compare.clock = {comparison.clock!r}: has {other.pipeline.stages} block stages, "
            f"this comparison {arm.config.pipeline.stages}; the same failures must mean the same"
        )
    share = other.pipeline.microbatches * arm.config.pipeline.microbatches
    count, left = divmod(share, base.pipeline.microbatches)
    if left:
        raise UserError(
            f"{path}: compare.arms.{arm.name}: pipeline.microbatches = {arm.config.pipeline.microbatches} of "
            f"{base.pipeline.microbatches} are no whole number of {comparison.clock}'s {other.pipeline.microbatches}; "
            "give another number, or another compare.clock"
        )
    pipeline = other.pipeline.model_copy(update={"microbatches": count})
    taken = ("routing", "recovery", "exchange", "checkpoint")
    return settle(other.model_copy(update={"pipeline": pipeline} | {name: getattr(arm.config, name) for name in taken}))
