"""Advice for made-up households, without running a fleet."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fleet_run import bytes_data
from benchmarks.households import HOUSEHOLDS, base, topology_of

from planaria.lab.commands.machine_strategies import weigh_machines


def test_one_machine_is_advised_beside_slow_ones_and_pipelines_otherwise(tmp_path: Path) -> None:
    best, data = {}, bytes_data(folder=tmp_path)
    for household, machines in HOUSEHOLDS.items():
        weighed = weigh_machines(base("household", 2, data=data), topology_of(machines))
        best[household] = next(strategy for strategy in weighed if "replicas" not in strategy.name)
    assert len(best) == 6
    assert all(strategy.name.startswith("pipeline, ") for strategy in best.values())
    assert all(strategy.config.pipeline.samples == 32 for strategy in best.values())
