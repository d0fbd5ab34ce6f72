"""The failures that all arms of a comparison share."""

from __future__ import annotations

from planaria.config.schema import RunConfig
from planaria.lab.compare.race_spec import Comparison, TraceSpec, trace_for


def test_a_comparison_has_the_bursts_that_it_asks_for_and_the_same_failures_otherwise() -> None:
    config = RunConfig()

    def struck(**spec: object) -> set[tuple[int, int]]:
        plain = {"hourly": 0.5, "step_s": 600.0, "ends": True} | spec
        comparison = Comparison.model_construct(trace=TraceSpec.model_validate(plain))
        return {(fault.step, fault.stage) for fault in trace_for(comparison, config, 3).faults}

    alone, bursts = struck(), struck(together=0.5)
    assert alone < bursts
    assert all((step, (stage - 1) % 5) in bursts for step, stage in bursts - alone)
