"""``planaria advise RECIPE --wire``: the codec between stages that suits a recipe's links, or one machine instead."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.lab.compare.advice import require_costs
from planaria.lab.compare.wire_advice import REFERENCE, WireAdvice, WireChoice, weigh_wires
from planaria.models.families import stage_parameters
from planaria.report.tables import Table, show
from planaria.runtime.prediction.copy_costs import state_bytes

HEAD = ["pipeline.wire", "MB a step", "s a step", f"of {REFERENCE}", "microbatch size", "s at the recipe's size"]
GRADIENT_BYTES = 4
CLOSE = 1.01
"""ratio of steps that are practically equal"""


def advise_wire(config: RunConfig, path: Path) -> int:
    """Print the step of each codec, and conclusions; return the exit code.

    :raises UserError: when [network] lacks prices, or the recipe has a schedule.
    """
    require_costs(config.network, path, "forward_s", "backward_s", "bandwidth")
    if config.routing.schedule or config.network.topology:
        raise UserError(f"{path}: routing.schedule, network.topology: --wire is for equal links; leave them out")
    advice = weigh_wires(config)
    rows = [_row(choice, advice.reference) for choice in advice.choices]
    network = config.network
    links = f"{network.bandwidth:.3g} bytes/s, {network.latency_s:g} s, {network.inbound}"
    show([Table(f"{config.name}: {config.pipeline.stages + 1} workers, {links}", HEAD, rows, numbers_from=1)])
    for line in _conclusions(config, advice):
        print(line)
    return 0


def _row(choice: WireChoice, reference: WireChoice) -> list[str]:
    share = f"{choice.step_s / reference.step_s:.3f}"
    same = f"{choice.same_size_s:.4g}"
    return [
        choice.wire,
        f"{choice.sent_bytes / 1e6:.3g}",
        f"{choice.step_s:.4g}",
        share,
        str(choice.microbatch_size),
        same,
    ]


def _conclusions(config: RunConfig, advice: WireAdvice) -> Iterator[str]:
    stages = config.pipeline.stages
    parameters = sum(stage_parameters(config.model, stages, stage) for stage in range(stages + 1))
    state = (state_bytes(config) + GRADIENT_BYTES) * parameters
    yield (
        f"alone         {advice.alone_s:.4g} s a step on one machine as fast as a stage's; weights, gradients and "
        f"moments take {state / 1e9:.3g} GB there, before activations"
    )
    best = min(advice.choices, key=lambda choice: choice.step_s)
    if advice.alone_s <= best.step_s:
        yield (
            "advice        one machine, if it has the memory: no codec makes this pipeline faster; replicas that meet "
            "rarely (exchange.kind = 'noloco') use the others"
        )
    elif advice.reference.step_s <= CLOSE * best.step_s:
        yield f"advice        {REFERENCE}: fewer bits make a step less than {CLOSE - 1:.0%} shorter"
    else:
        yield (
            f"fastest       {best.wire} with microbatches of {best.microbatch_size}: {best.step_s:.4g} s, "
            f"{best.step_s / advice.alone_s:.3f} of one machine's step"
        )
    yield (
        "loss          not predicted; a small model ended 0.001 nats above bf16 with 8/8, 0.020 with 6/4 and 0.29 with "
        "4/4 (docs/plan.md); `planaria compare wire` races codecs"
    )
