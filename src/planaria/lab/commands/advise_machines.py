"""``planaria advise RECIPE --wire --network.topology FILE``: one machine, a pipeline with each codec, or replicas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from planaria.config.schema import RunConfig
from planaria.lab.commands.advise_wire import CLOSE
from planaria.lab.commands.advised_command import deployed, join_command, train_command
from planaria.lab.commands.machine_strategies import not_weighed, weigh_machines
from planaria.lab.commands.placed_strategy import Strategy
from planaria.lab.compare.advice import require_costs
from planaria.models.llama_stages import stage_layers
from planaria.pipeline.network.costs import message_bytes
from planaria.pipeline.network.topology import Topology, read
from planaria.report.phrases import format_count
from planaria.report.tables import Table, show
from planaria.runtime.preparation.prepare import relative_to_recipe

SLOWER = (1.0, 1.15)
"""steps of real processes over simulated ones (docs/plan.md); the range of predicted hours"""
RARELY = ", every "
"""part of the names of replicas that do not exchange in every step"""
HEAD = ["strategy", "machines", "hours", "range", "s a step", "GB", "price", "fits"]


def practically_fastest(fitting: Sequence[Strategy]) -> Strategy:
    """Return the fastest strategy, or one practically as fast that sends nothing, that exchanges in every step, or, of
    pipelines, with more bits.
    """
    close = [one for one in fitting if one.step_s <= CLOSE * fitting[0].step_s]
    if alone := next((one for one in close if not one.sends), None):
        return alone
    close = [one for one in close if RARELY not in one.name] or close
    pipelines = [one for one in close if one.is_pipeline]
    return max(pipelines, key=_sample_bytes) if close[0] in pipelines else close[0]


def _sample_bytes(strategy: Strategy) -> float:
    """Return the bytes that a sample takes between two stages, both ways."""
    config = strategy.config
    return sum(message_bytes(config.model, config.pipeline)) / config.pipeline.microbatch_size


def advise_machines(config: RunConfig, path: Path, flags: Mapping[str, str]) -> int:
    """Print the hours of each strategy on the machines of ``network.topology``; return the exit code.

    ``flags`` changed the recipe, and are part of the advised command.

    :raises UserError: for an invalid topology, or machines that cannot be weighed.
    """
    assert config.network.topology is not None
    require_costs(config.network, path, "forward_s", "backward_s")
    topology = read(relative_to_recipe(path, config.network.topology), config.network.link_time_scale)
    strategies = weigh_machines(config, topology)
    steps = config.train.steps
    title = f"{config.name}: {format_count(steps, 'step')} on {format_count(len(topology.nodes), 'machine')}"
    show([Table(title, HEAD, [_row(strategy, steps) for strategy in strategies], numbers_from=1)])
    print(
        f"range         {SLOWER[0]:g} to {SLOWER[1]:g} of the simulated step, as measured (docs/plan.md); one machine "
        "sends nothing. With low confidence, another kind of strategy may be faster: time both for some steps"
    )
    for line in _conclusions(config, topology, strategies, lambda run: train_command(path, config, run, flags)):
        print(line)
    for line in not_weighed(config, topology, strategies):
        print(f"not weighed   {line}")
    print(
        "loss          hours are for equal steps. With 6/4, two small models ended 0.007 and 0.020 nats above bf16 "
        "(docs/home-links.md, docs/plan.md); replicas that meet rarely ended 10 % above all-reduce (`planaria compare "
        "compression_race`)"
    )
    return 0


def _row(strategy: Strategy, steps: int) -> list[str]:
    hours, peak = strategy.hours(steps), strategy.peak
    spread = " … ".join(_digits(hours * factor) for factor in SLOWER) if strategy.sends else "calculated"
    price = f"{strategy.money(steps):.2f}" if strategy.money(steps) else "–"
    memory = "not known" if peak is None else f"{peak / 1e9:.2f}"
    return [
        strategy.name,
        str(len(strategy.machines)),
        _digits(hours),
        spread,
        f"{strategy.step_s:.4g}",
        memory,
        price,
        "no" if strategy.obstacle else "yes",
    ]


def _digits(hours: float) -> str:
    return f"{hours:.3g}" if hours < 1000 else f"{hours:.0f}"


def _conclusions(
    config: RunConfig, topology: Topology, strategies: Sequence[Strategy], command: Callable[[RunConfig], str]
) -> Iterator[str]:
    """Yield the advice; ``command`` returns the command line of a run."""
    fitting = [strategy for strategy in strategies if not strategy.obstacle]
    if fitting:
        best = practically_fastest(fitting)
        yield from _advice(best, fitting, config.train.steps)
        run = deployed(best, topology)
        yield f"command       {command(run)}"
        yield from _how_to_join(best, run)
        if best.sends and run.recovery.strategy != config.recovery.strategy:
            yield f"recovery      from checkpoints; {config.recovery.strategy!r} does not support these stages"
        yield from _alternatives(best, fitting, config.train.steps)
    else:
        yield "advice        none: no strategy fits these machines"
    for strategy in strategies:
        if strategy.obstacle:
            yield f"does not fit  {strategy.name}: {strategy.obstacle}"


def _advice(best: Strategy, fitting: Sequence[Strategy], steps: int) -> Iterator[str]:
    why = "" if best.sends else ": no pipeline and no exchange over these links is faster"
    if best.sends and best is not fitting[0]:
        why = f"; {fitting[0].name} is less than {CLOSE - 1:.0%} faster"
    if RARELY in best.name:
        why = " for equal steps, which end at a higher loss if replicas meet rarely (docs/replicas.md)"
    slower = [one for one in fitting if one.sends != best.sends or one.is_pipeline != best.is_pipeline]
    rivals = [one for one in slower if best.sends and one.step_s <= SLOWER[1] * best.step_s]
    low = " (low confidence)" if rivals else ""
    yield f"advice        {best.name}, {_digits(best.hours(steps))} hours{low}{why}"
    if rivals:
        rival = min(rivals, key=lambda one: one.step_s)
        yield (
            f"confidence    low: {rival.name}, {_digits(rival.hours(steps))} hours, is within the range of the advice"
        )


def _alternatives(best: Strategy, fitting: Sequence[Strategy], steps: int) -> Iterator[str]:
    single = next((strategy for strategy in fitting if len(strategy.machines) == 1), None)
    if single is not None and single is not best:
        share, hours = best.step_s / single.step_s, _digits(single.hours(steps))
        yield f"one machine   {single.name}: {hours} hours; the advice takes {share:.3f} of it"
    if any(strategy.money(steps) for strategy in fitting):
        cheap = min(fitting, key=lambda strategy: strategy.money(steps))
        yield (
            f"cheapest      {cheap.name}: {cheap.money(steps):.2f} for {_digits(cheap.hours(steps))} hours; "
            f"the fastest costs {best.money(steps):.2f}"
        )


def _how_to_join(best: Strategy, run: RunConfig) -> Iterator[str]:
    """Yield the machines of the stages, and the command of those that join ``run``."""
    machines = best.machines
    if not best.sends:
        yield f"machine       {machines[0].name}"
        return
    held = [_layers(best.config, stage) if best.is_pipeline else "one replica" for stage in range(len(machines))]
    pairs = zip(machines, held, strict=True)
    yield f"machines      {'; '.join(f'{machine.name}: {part}' for machine, part in pairs)}"
    order = " in any order (the run times all; the fastest gets the most work)"
    if not run.pipeline.has_uneven_stages:
        order = " one after the other, in this order" if machines[2:] else ""
    first, *others = (machine.name for machine in machines)
    yield f"join          start the command on {first} (ADDRESS: its address), then on {', '.join(others)}{order}:"
    yield f"              {join_command(run)}"


def _layers(config: RunConfig, stage: int) -> str:
    """Return the layers of a stage, such as "stage 1 (layers 0–3)"."""
    layers = stage_layers(config.model, config.pipeline.stages, stage)
    span = f"{layers.start}–{layers.stop - 1}" if len(layers) > 1 else f"{layers.start}" if layers else ""
    numbered = f"layer{'s' * (len(layers) > 1)} {span}" if span else ""
    if not stage:
        return f"the ends, {numbered}" if numbered else "the ends"
    return f"stage {stage} ({numbered})"
