"""Advice for made-up households, without running a fleet."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.fleet_run import bytes_data
from benchmarks.households import HOUSEHOLDS, base, emulated_run, topology_of

from benchmarks import households
from planaria.lab.commands.machine_strategies import weigh_machines


def test_one_machine_is_advised_beside_slow_ones_and_pipelines_otherwise(tmp_path: Path) -> None:
    best, data = {}, bytes_data(folder=tmp_path)
    for household, machines in HOUSEHOLDS.items():
        weighed = weigh_machines(base("household", 2, data=data), topology_of(machines))
        best[household] = next(strategy for strategy in weighed if "replicas" not in strategy.name)
    assert len(best) == 6
    assert all(strategy.name.startswith("pipeline, ") for strategy in best.values())
    assert all(strategy.config.pipeline.samples == 32 for strategy in best.values())


def test_the_fleet_of_a_strategy_sleeps_over_emulated_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(households, "RUNS", tmp_path)
    topology = topology_of(HOUSEHOLDS["two equal, fibre"])
    weighed = weigh_machines(base("household", 2, data=bytes_data(folder=tmp_path)), topology)
    pipeline = next(strategy for strategy in weighed if strategy.is_pipeline)
    run = emulated_run(pipeline, topology, "household", 2)
    assert run.network.emulate is True and pipeline.config.network.emulate is False
    assert run.pipeline.wire == pipeline.config.pipeline.wire
