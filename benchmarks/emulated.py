"""Steps of a fleet whose stages sleep their cost, beside what the plan's bound and the simulator say of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.common import RUNS
from benchmarks.fleet_run import VOCAB, bytes_data, require_finished, run_fleet, step_seconds
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    ModelConfig,
    NetworkConfig,
    PipelineConfig,
    RunConfig,
    TrainConfig,
)

DIM, CONTEXT = 32, 128
MESSAGE_BYTES = DIM * CONTEXT * 4
SKIP = 2
"""steps that open edges, fill caches and are not counted"""


@dataclass(frozen=True)
class Case:
    """A pipeline and its prices. ``forward_s`` and ``backward_s`` are seconds of one microbatch at stages 1..S."""

    stages: int
    microbatches: int
    order: Literal["1f1b", "gpipe"]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    latency_s: float = 0.0
    bandwidth: float | None = None

    def __str__(self) -> str:
        return f"{self.stages} × {self.microbatches} {self.order}"

    def config(self, name: str, steps: int) -> RunConfig:
        """The recipe: one layer a stage, messages of :data:`MESSAGE_BYTES`, head and loss free."""
        return RunConfig(
            name=name,
            out=str(RUNS),
            model=ModelConfig(vocab=VOCAB, dim=DIM, layers=self.stages, heads=2, hidden=64, context=CONTEXT),
            pipeline=PipelineConfig(
                stages=self.stages, microbatches=self.microbatches, microbatch_size=1, order=self.order
            ),
            data=bytes_data(),
            train=TrainConfig(steps=steps, eval_every=0),
            fleet=FleetConfig(spares=0),
            checkpoint=CheckpointConfig(every=0),
            network=NetworkConfig(
                forward_s=[0.0, *self.forward_s],
                backward_s=[0.0, *self.backward_s],
                latency_s=self.latency_s,
                bandwidth=self.bandwidth,
                emulate=True,
            ),
        )


@dataclass(frozen=True)
class Outcome:
    """Seconds of a step: measured on the fleet, one by one; simulated; and the plan's lower bound."""

    measured: list[float]
    simulated: float
    bound: float
    binds: str


def even(stages: int, microbatches: int, order: Literal["1f1b", "gpipe"], forward_s: float, backward_s: float) -> Case:
    """Stages that are all alike."""
    return Case(stages, microbatches, order, (forward_s,) * stages, (backward_s,) * stages)


def measure(case: Case, name: str, steps: int) -> Outcome:
    """Run ``steps`` steps of the case on the fleet, and ask the simulator and the bound about one."""
    from planaria.pipeline.network.costs import Costs, message_bytes
    from planaria.pipeline.plan.bound import lower_bound
    from planaria.pipeline.plan.build import plan_for
    from planaria.pipeline.routing.base import full
    from planaria.runtime.engine.simulate import simulate

    config = case.config(name, steps + SKIP)
    plan = plan_for(config.pipeline, full(case.stages, case.microbatches))
    costs, size = Costs(config.network), message_bytes(config.model, config.pipeline)
    bound = lower_bound(plan, costs, size)
    record = run_fleet(config)
    require_finished(record)
    return Outcome(step_seconds(record, SKIP), simulate(plan, costs, size).step_s, bound.step_s, bound.binds)
