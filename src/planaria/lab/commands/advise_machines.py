"""``planaria advise RECIPE --wire --network.topology FILE``: one machine, a pipeline with each codec, or replicas."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from planaria.config.schema import RunConfig
from planaria.lab.commands.advise_wire import CLOSE
from planaria.lab.commands.machine_strategies import Strategy, weigh_machines
from planaria.lab.compare.advice import require_costs
from planaria.pipeline.network.costs import message_bytes
from planaria.pipeline.network.topology import read
from planaria.report.phrases import format_count
from planaria.report.tables import Table, show
from planaria.runtime.preparation.prepare import relative_to_recipe

SLOWER = (1.0, 1.15)
"""steps of real processes over simulated ones (docs/plan.md); the range of predicted hours"""


def practically_fastest(fitting: Sequence[Strategy]) -> Strategy:
    """Return the fastest strategy, or one practically as fast that sends nothing or, of pipelines, with more bits."""
    close = [one for one in fitting if one.step_s <= CLOSE * fitting[0].step_s]
    if alone := next((one for one in close if not one.sends), None):
        return alone
    pipelines = [one for one in close if one.name.startswith("pipeline")]
    return max(pipelines, key=_sample_bytes) if fitting[0] in pipelines else fitting[0]


def _sample_bytes(strategy: Strategy) -> float:
    """Return the bytes that a sample takes between two stages, both ways."""
    config = strategy.config
    return sum(message_bytes(config.model, config.pipeline)) / config.pipeline.microbatch_size


HEAD = ["strategy", "machines", "hours", "range", "s a step", "GB", "price", "fits"]


def advise_machines(config: RunConfig, path: Path, flags: Mapping[str, str]) -> int:
    """Print the hours of each strategy on the machines of ``network.topology``; return the exit code.

    ``flags`` changed the recipe, and are part of the advised command.

    :raises UserError: for an invalid topology, or machines that cannot be weighed.
    """
    assert config.network.topology is not None
    require_costs(config.network, path, "forward_s", "backward_s")
    topology = read(relative_to_recipe(path, config.network.topology), config.network.link_time_scale)
    strategies = weigh_machines(config, topology)
    if config.exchange.replicas > 1:
        alone = " --exchange.replicas 1"
        strategies = [s if s.config.exchange.replicas > 1 else replace(s, flags=s.flags + alone) for s in strategies]
    strategies = [replace(s, flags=_with_given(s.flags, flags)) for s in strategies]
    steps = config.train.steps
    title = f"{config.name}: {format_count(steps, 'step')} on {len(topology.nodes)} machines"
    show([Table(title, HEAD, [_row(strategy, steps) for strategy in strategies], numbers_from=1)])
    for line in _conclusions(strategies, steps, path):
        print(line)
    return 0


def _with_given(chosen: str, given: Mapping[str, str]) -> str:
    """Return the flags of a strategy and those of the user that it does not set."""
    divided = "--pipeline.stages " in chosen
    kept = [
        name
        for name in given
        if not (name.startswith("network.") or f"--{name} " in chosen or (divided and name == "pipeline.layers"))
    ]
    return " ".join([chosen, *(f"--{name} {shlex.quote(given[name])}" for name in kept)])


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


def _conclusions(strategies: Sequence[Strategy], steps: int, path: Path) -> Iterator[str]:
    fitting = [strategy for strategy in strategies if not strategy.obstacle]
    if not fitting:
        yield "advice        none: no strategy fits these machines; add memory or stages, or lower model sizes"
    else:
        best = practically_fastest(fitting)
        why = "" if best.sends else ": no pipeline and no exchange over these links is faster"
        if best.sends and best is not fitting[0]:
            why = f"; {fitting[0].name} is less than {CLOSE - 1:.0%} faster"
        if ", every " in best.name:
            why = " for equal steps, which end at a higher loss if replicas meet rarely (docs/replicas.md)"
        yield f"advice        {best.name}, {_digits(best.hours(steps))} hours{why}"
        yield f"command       planaria train {path} {best.flags}"
        if best.flags.startswith("--pipeline"):
            yield f"stages        0 to {len(best.machines) - 1}: {', '.join(machine.name for machine in best.machines)}"
        if "--pipeline.layers" in best.flags and "--recovery" in best.flags:
            yield "recovery      CheckFree needs stages of one size; this command restores lost ones from checkpoints"
        single = next((strategy for strategy in fitting if len(strategy.machines) == 1), None)
        if single is not None and single is not best:
            share, hours = best.step_s / single.step_s, _digits(single.hours(steps))
            yield f"one machine   {single.name}: {hours} hours; the advice takes {share:.3f} of it"
            if share * SLOWER[1] >= 1:
                yield f"confidence    low: at {SLOWER[1]:g} of the simulated step, one machine is faster"
        if any(strategy.money(steps) for strategy in fitting):
            cheap = min(fitting, key=lambda strategy: strategy.money(steps))
            yield (
                f"cheapest      {cheap.name}: {cheap.money(steps):.2f} for {_digits(cheap.hours(steps))} hours; "
                f"the fastest costs {best.money(steps):.2f}"
            )
    if not any(strategy.name.startswith("pipeline") for strategy in strategies):
        yield "pipelines     none: its stages cost differently, and need one machine each and one for the ends"
    for strategy in strategies:
        if strategy.obstacle:
            yield f"does not fit  {strategy.name}: {strategy.obstacle}"
    yield (
        "loss          hours are for equal steps. A small model ended 0.020 nats above bf16 with 6/4 (docs/plan.md); "
        "replicas that meet rarely ended 10 % above all-reduce (`planaria compare compression_race`)"
    )
