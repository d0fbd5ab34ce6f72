"""Advice on codecs between the stages of a pipeline: the step of each one at its best microbatch size. Pure.

On links that are slower than the machines, a step costs a time per byte and a latency per message. Large microbatches
send fewer messages, small ones fill the pipeline, so the best size depends on the codec. A step keeps its samples.
"""

from __future__ import annotations

from dataclasses import dataclass

from planaria.config.options import Options
from planaria.config.schema import RunConfig
from planaria.pipeline.network.costs import Costs, message_bytes
from planaria.runtime.prediction.simulate import simulate
from planaria.runtime.prediction.traffic import one_replica
from planaria.runtime.resolved_config import ResolvedRun

WIRES = ("fp32", "bf16", "8/8", "6/5", "6/4", "5/4", "4/4")
"""codecs to weigh, the largest messages first; the recipe's own is added"""
REFERENCE = "bf16"
LARGEST = 8
"""largest factor on the recipe's microbatch size: activations in memory grow with it"""


@dataclass(frozen=True)
class WireChoice:
    """A codec with its best microbatch size among those that keep a step's samples."""

    wire: str
    sent_bytes: int
    """in a step, by all workers"""
    step_s: float
    microbatch_size: int
    same_size_s: float
    """seconds of a step at the recipe's own microbatch size"""


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
    """Weigh codecs on the links and at the speeds that ``network`` states."""
    alone = one_replica(config)
    own = [] if alone.pipeline.wire in WIRES else [alone.pipeline.wire]
    each = [_best(alone, wire) for wire in (*WIRES, *own)]
    passes = Costs(alone.network)
    work = sum(
        passes.compute(kind, stage, 1) for kind in ("forward", "backward") for stage in range(alone.pipeline.stages + 1)
    )
    return WireAdvice(each, work * alone.pipeline.microbatches)


def _best(config: RunConfig, wire: str | Options) -> WireChoice:
    result = {size: _step(_resized(config, wire, size)) for size in _sizes(config)}
    best = min(result, key=lambda size: (result[size][0], size))
    step_s, sent = result[best]
    return WireChoice(str(wire), sent, step_s, best, result[config.pipeline.microbatch_size][0])


def _sizes(config: RunConfig) -> list[int]:
    """Return the microbatch sizes that divide the samples of a step."""
    own, samples = config.pipeline.microbatch_size, config.pipeline.samples
    return [
        size
        for size in range(1, min(samples, LARGEST * own) + 1)
        if samples % size == 0 and (own % size == 0 or size % own == 0)
    ]


def _resized(config: RunConfig, wire: str | Options, size: int) -> RunConfig:
    """Return the recipe with another codec and microbatch size; passes take as long per sample."""
    pipeline, network = config.pipeline, config.network
    factor = size / pipeline.microbatch_size
    resized = pipeline.model_copy(
        update={"wire": wire, "microbatch_size": size, "microbatches": pipeline.samples // size}
    )
    scaled = {name: [seconds * factor for seconds in getattr(network, name)] for name in ("forward_s", "backward_s")}
    return config.model_copy(update={"pipeline": resized, "network": network.model_copy(update=scaled)})


def _step(config: RunConfig) -> tuple[float, int]:
    """Return the seconds of a step and the bytes that all workers send in it."""
    plan = ResolvedRun(config).training(0)
    result = simulate(plan, Costs(config.network), message_bytes(config.model, config.pipeline))
    return result.step_s, sum(result.sent_bytes.values())
