"""``planaria advise RECIPE --wire``: the codec between stages that suits a recipe's links, or one machine instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from planaria.config import recipe
from planaria.config.options import Options
from planaria.config.schema import RunConfig
from planaria.lab.commands.advised_command import flag_text, train_command
from planaria.lab.commands.placed_strategy import in_one_process
from planaria.lab.compare.advice import require_costs
from planaria.models.families import stage_parameters
from planaria.pipeline.network.costs import Costs, message_bytes
from planaria.pipeline.plan.build import max_in_flight
from planaria.report.tables import Table, show
from planaria.runtime.fleet.devices import UNKNOWN
from planaria.runtime.prediction.copy_costs import state_bytes
from planaria.runtime.prediction.memory import stage_memory
from planaria.runtime.prediction.preflight_table import stated_step_s
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.prediction.traffic import one_replica
from planaria.runtime.resolved_run import ResolvedRun

WIRES = ("fp32", "bf16", "8/8", "6/5", "6/4", "5/4", "4/4")
"""codecs to compare, the largest messages first; the recipe's own is added"""
REFERENCE = "bf16"
MAX_SIZE_FACTOR = 8
"""maximum factor on the recipe's microbatch size; activations in memory grow with it"""


@dataclass(frozen=True)
class WireChoice:
    """A codec with the microbatches that make its step shortest."""

    wire: str
    """as a recipe writes it"""
    sent_bytes: int
    """bytes that all workers send in a step"""
    step_s: float
    config: RunConfig
    """the recipe with this codec and these microbatches"""
    own_s: float
    """seconds of a step with the recipe's own microbatches"""


@dataclass(frozen=True)
class WireAdvice:
    """All codecs, and one machine that computes all stages alone."""

    choices: list[WireChoice]
    alone_s: float
    """seconds of a step on one machine as fast as the stages' own, without messages"""

    @property
    def reference(self) -> WireChoice:
        """The codec to which others are compared."""
        return next(choice for choice in self.choices if choice.wire == REFERENCE)


def weigh_wires(config: RunConfig) -> WireAdvice:
    """Compare codecs on the links and at the speeds of ``network``."""
    alone = one_replica(config)
    own = [] if alone.pipeline.wire in WIRES else [alone.pipeline.wire]
    each = [_best_choice(alone, wire) for wire in (*WIRES, *own)]
    return WireAdvice(each, stated_step_s(ResolvedRun(alone.model_copy(update={"engine": "inline"}))) or 0.0)


def _best_choice(config: RunConfig, wire: str | Options) -> WireChoice:
    weighed = [(*_simulate_step(candidate), candidate) for candidate in candidates(config, wire)]
    step_s, sent, chosen = min(weighed, key=lambda one: one[0])
    own = with_wire(config, wire, config.pipeline.microbatch_size).pipeline
    own_s = next(seconds for seconds, _, candidate in weighed if candidate.pipeline == own)
    return WireChoice(flag_text(wire), sent, step_s, chosen, own_s)


def candidates(config: RunConfig, wire: str | Options) -> Iterator[RunConfig]:
    """Yield the recipe with this codec and the microbatches to weigh, those that need less memory first: sizes that
    divide the samples of a step; in flight the recipe's own number, or else the default and its doubles up to all.
    """
    for size in microbatch_sizes(config):
        sized = with_wire(config, wire, size)
        yield sized
        microbatches = sized.pipeline.microbatches
        count = max_in_flight(sized.pipeline, microbatches)
        while not config.pipeline.in_flight and (count := 2 * count) < 2 * microbatches:
            more = sized.pipeline.model_copy(update={"in_flight": min(count, microbatches)})
            yield sized.model_copy(update={"pipeline": more})


def microbatch_sizes(config: RunConfig) -> list[int]:
    """Return the microbatch sizes that divide the samples of a step."""
    own, samples = config.pipeline.microbatch_size, config.pipeline.samples
    return [
        size
        for size in range(1, min(samples, MAX_SIZE_FACTOR * own) + 1)
        if samples % size == 0 and (own % size == 0 or size % own == 0)
    ]


def with_wire(config: RunConfig, wire: str | Options, size: int) -> RunConfig:
    """Return the recipe with another codec and microbatch size; the time of passes per sample is unchanged."""
    pipeline, network = config.pipeline, config.network
    factor = size / pipeline.microbatch_size
    resized = pipeline.model_copy(
        update={"wire": wire, "microbatch_size": size, "microbatches": pipeline.samples // size}
    )
    scaled: dict[str, object] = {}
    for name in ("forward_s", "backward_s"):
        scaled[name] = [seconds * factor for seconds in getattr(network, name)]
        scaled[f"entry_{name}"] = getattr(network, f"entry_{name}") * factor
    return config.model_copy(update={"pipeline": resized, "network": network.model_copy(update=scaled)})


def _simulate_step(config: RunConfig) -> tuple[float, int]:
    """Return the seconds of a step and the bytes that all workers send in it."""
    plan = ResolvedRun(config).training(0)
    simulated = simulate(plan, Costs(config.network), message_bytes(config.model, config.pipeline))
    return simulated.step_s, sum(simulated.sent_bytes.values())


HEAD = ["pipeline.wire", "MB a step", "s a step", f"of {REFERENCE}", "microbatch", "in flight", "s with the recipe's"]
GRADIENT_BYTES = 4
CLOSE = 1.01
"""ratio of steps that are practically equal"""


def advise_wire(config: RunConfig, path: Path, flags: Mapping[str, str]) -> int:
    """Print the step of each codec, and conclusions; return the exit code.

    ``flags`` changed the recipe, and are part of the advised command.

    :raises UserError: if [network] lacks costs.
    """
    require_costs(config.network, path, "forward_s", "backward_s", "bandwidth")
    advice = weigh_wires(config)
    rows = [_row(choice, advice.reference) for choice in advice.choices]
    network = config.network
    links = f"{network.bandwidth:.3g} bytes/s, {network.latency_s:g} s, {network.inbound}"
    show([Table(f"{config.name}: {config.pipeline.stages + 1} workers, {links}", HEAD, rows, numbers_from=1)])
    for line in _conclusions(config, advice, lambda run: train_command(path, config, run, flags)):
        print(line)
    return 0


def _row(choice: WireChoice, reference: WireChoice) -> list[str]:
    share = f"{choice.step_s / reference.step_s:.3f}"
    pipeline = choice.config.pipeline
    return [
        choice.wire,
        f"{choice.sent_bytes / 1e6:.3g}",
        f"{choice.step_s:.4g}",
        share,
        str(pipeline.microbatch_size),
        str(max_in_flight(pipeline, pipeline.microbatches)),
        f"{choice.own_s:.4g}",
    ]


def _conclusions(config: RunConfig, advice: WireAdvice, command: Callable[[RunConfig], str]) -> Iterator[str]:
    """Yield the advice; ``command`` returns the command line of a run."""
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
        yield f"command       {command(recipe.with_flags(config, {'exchange.replicas': 1, **in_one_process(config)}))}"
    else:
        chosen = best
        line = (
            f"fastest       {best.wire}: {best.step_s:.4g} s, {best.step_s / advice.alone_s:.3f} of one machine's step"
        )
        if advice.reference.step_s <= CLOSE * best.step_s:
            chosen = advice.reference
            line = f"advice        {REFERENCE}: fewer bits make a step less than {CLOSE - 1:.0%} shorter"
        yield line
        changed = {"pipeline": chosen.config.pipeline, "network": chosen.config.network}
        yield f"command       {command(config.model_copy(update=changed))}"
        yield f"memory        {_memory(config, chosen.config)}"
    yield (
        "loss          not predicted; a small model ended 0.001 nats above bf16 with 8/8, 0.020 with 6/4 and 0.29 with "
        "4/4 (docs/plan.md); `planaria compare wire` races codecs"
    )


def _memory(config: RunConfig, chosen: RunConfig) -> str:
    """Return a line about the largest stage with the advised microbatches, which no memory limits here."""
    device = 0 if config.train.device == "cpu" else UNKNOWN
    peaks = [max((stage.peak for stage in stage_memory(run, device)), default=0) for run in (chosen, config)]
    if not all(peaks):
        return "not known, and not considered"
    return (
        f"{peaks[0] / 1e9:.3g} GB for the largest stage, {peaks[1] / 1e9:.3g} GB with the recipe's microbatches; not "
        "compared with your machines: describe them in network.topology with memory_gb"
    )
