"""Where a run takes up, and the event that says so."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations

from planaria.config import RunConfig
from planaria.control.cadence import PROBE
from planaria.engine.itinerary import Itinerary
from planaria.events import RunStarted
from planaria.recovery import recovery
from planaria.routing import change


@dataclass(frozen=True)
class Origin:
    """Committed steps, the last generation, and the checkpoint folder that each stage is loaded from.

    Stages that ``load`` does not name start from the seed's initial weights.
    """

    step: int = 0
    generation: int = 0
    load: Mapping[int, str] = field(default_factory=dict)
    samples: int | None = None
    """used in those steps; as many as the recipe says for each, unless given"""
    struck: bool = False
    """the faults of ``step`` have struck already: they are why the run stopped there"""

    @property
    def next_fault(self) -> int:
        """The first step whose faults are still to come."""
        return self.step + 1 if self.struck else self.step

    def sample_offset(self, config: RunConfig) -> int:
        """What to add to the number of a sample, if all steps before had taken as many as the recipe says."""
        return 0 if self.samples is None else self.samples - self.step * config.samples


START = Origin()


def run_started(itinerary: Itinerary, origin: Origin) -> RunStarted:
    """The first event of a run: all of the recipe that its decisions depend on."""
    config, pipeline = itinerary.config, itinerary.config.pipeline
    walked = [list(route) for route in itinerary.routes(0)]
    scheduled = itinerary.schedule is not None or itinerary.arrangement.shared
    met = combinations(range(pipeline.stages + 1), 2) if change(config) and not scheduled else ()
    copies = [slot.copy for slot in recovery(config.recovery, pipeline.stages).slots]
    return RunStarted(
        name=config.name,
        seed=config.seed,
        stages=config.pipeline.stages,
        steps=config.train.steps,
        first_step=origin.step,
        first_generation=origin.generation,
        samples_per_step=config.samples,
        first_sample=origin.samples,
        wall_time=time.time(),
        load=dict(origin.load),
        eval_every=config.train.eval_every,
        save_every=PROBE if config.checkpoint.every == "best" else config.checkpoint.every,
        spares=config.fleet.spares,
        replace=config.fleet.replace,
        routes=walked if scheduled else sorted(map(list, {tuple(route) for route in walked})),
        arrangement=[list(itinerary.arrangement.nodes(s)) for s in range(pipeline.stages + 1)] if scheduled else [],
        pairs=sorted({*met, *((min(copy), max(copy)) for copy in copies)}),
        recovery=config.recovery,
    )
