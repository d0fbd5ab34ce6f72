"""What a comparison found, put together from its courses: every number of it, and what these follow from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.faults.trace import Trace, digest
from planaria.lab.arm_clocks import clock_config
from planaria.lab.compare.clock import Clock, activation_bytes, exchanged_bytes, of_weights
from planaria.lab.compare.race import Course
from planaria.lab.compare.race_job import Race
from planaria.lab.compare.race_results import Compared, Failures, Given, Run, Scored, against_reset, curve, score
from planaria.lab.compare.race_spec import TUNED, Arm, Comparison
from planaria.models.families import stage_parameters
from planaria.pipeline.network.costs import message_bytes
from planaria.recovery import recovery
from planaria.runtime.engine.copy_costs import step_bytes_and_memory
from planaria.runtime.engine.resolved import ResolvedRun


def compared(
    path: Path,
    comparison: Comparison,
    arms: list[Arm],
    clocks: Mapping[str, Clock],
    traces: Mapping[int, Sequence[Trace]],
    races: Sequence[Race],
    courses: Sequence[Course],
) -> Compared:
    """Every arm scored against the fault-free one, the first; points of the search apart, the best of them an arm."""
    base, clock, free = arms[0].config, clocks[arms[0].name], dict[int, Course]()
    told = [_failures(seed, replica, trace) for seed, all_ in traces.items() for replica, trace in enumerate(all_)]
    digests = {failures.seed: failures.digest for failures in told if not failures.replica}
    scored, search = list[Scored](), list[Scored]()
    for arm in arms:
        own = {race.config.seed: course for race, course in zip(races, courses, strict=True) if race.arm == arm.name}
        free = free or own
        clocked = clock_config(path, comparison, arm, base)
        scale = _scale(base, clocked)
        runs = score(free, own, (clock, clocks[arm.name]), digests, comparison.target_at, scale)
        (search if arm.searched else scored).append(
            _scored(base, arm, clocked, clocks[arm.name], runs, list(own.values()), scale)
        )
    if search:
        search.insert(0, scored[0])
        scored.insert(1, tuned(search))
    return Compared(
        name=base.name,
        clock=comparison.clock or str(path),
        steps=base.train.steps,
        stages=base.pipeline.stages,
        target_at=comparison.target_at,
        hourly=comparison.trace.hourly,
        failures=[failures for failures in told if not failures.replica],
        further=[failures for failures in told if failures.replica],
        arms=against_reset(scored),
        search=search,
        blows=comparison.trace.lost,
    )


def tuned(search: Sequence[Scored]) -> Scored:
    """The arm of the search that takes the fewest steps, as the mean over seeds: chosen by the same seeds, it looks a
    little better than it is. Who missed the target with a seed is none."""
    arrived = [(spread.mean, place) for place, arm in enumerate(search) if (spread := arm.spread("ticks"))]
    return search[min(arrived)[1]].model_copy(update={"name": TUNED})


def _failures(seed: int, replica: int, trace: Trace) -> Failures:
    faults = [(fault.step, fault.stage) for fault in trace.faults]
    return Failures(seed=seed, digest=digest(trace), faults=faults, replica=replica)


def _scale(raced: RunConfig, clocked: RunConfig) -> float:
    """Parameters of a block stage of the model that the clock is for, over those of the raced one."""
    ours, theirs = (stage_parameters(c.model, c.pipeline.stages, 1) for c in (raced, clocked))
    return theirs / ours


def _scored(
    base: RunConfig,
    arm: Arm,
    clocked: RunConfig,
    clock: Clock,
    runs: list[Run],
    courses: list[Course],
    scale: float,
) -> Scored:
    """An arm's runs, and what its copies cost in the model that the clock is for; further replicas are copies too."""
    copies, memory = step_bytes_and_memory(ResolvedRun(clocked)) if arm.faults else (0.0, 0.0)
    memory += arm.config.exchange.replicas / base.exchange.replicas - 1.0
    sent = copies + exchanged_bytes(clocked)
    chain = recovery(arm.config.recovery, arm.config.pipeline.stages)
    return Scored(
        name=arm.name,
        changes=_changes(base, arm.config),
        faults=arm.faults,
        routing=arm.config.routing.kind,
        runs=runs,
        step_s=clock.step_s,
        save_s=clock.save_s,
        step_bytes=sent,
        traffic=sent / activation_bytes(clocked),
        weights=of_weights(clocked),
        memory=memory,
        workers=clock.workers,
        curves=[curve(course, clock, scale) for course in courses],
        control=chain.control if arm.faults else "",
        exact=all(strategy.exact for strategy in chain.strategies.values()),
        given=_given(clocked, clock, scale),
        courses=courses,
    )


def _given(config: RunConfig, clock: Clock, scale: float) -> Given:
    pipeline, stages = config.pipeline, config.pipeline.stages
    sample = config.model.context * config.model.dim * pipeline.microbatch_size
    return Given(
        replacement_s=clock.replacement_s,
        load_s=clock.load_s,
        again=clock.again,
        bandwidth=None if math.isinf(clock.bandwidth) else clock.bandwidth,
        scale=scale,
        replicas=config.exchange.replicas,
        stages=stages,
        microbatches=pipeline.microbatches,
        microbatch_size=pipeline.microbatch_size,
        context=config.model.context,
        dim=config.model.dim,
        wire_bytes=message_bytes(config.model, pipeline) // sample,
        parameters=[stage_parameters(config.model, stages, stage) for stage in range(stages + 1)],
    )


def _changes(base: RunConfig, config: RunConfig) -> dict[str, str]:
    """The settings in which an arm differs from the recipe."""
    one, other = recipe.flat(base), recipe.flat(config)
    return {name: str(value) for name, value in other.items() if one.get(name) != value and name != "name"}
