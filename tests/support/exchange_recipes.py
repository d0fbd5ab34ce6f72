"""A recipe of replicas for the clock of a comparison."""

from __future__ import annotations

from typing import Any

from planaria.config.schema import RunConfig

NETWORK = {"latency_s": 0.5, "bandwidth": 1000.0, "forward_s": [1.0], "backward_s": [2.0], "replacement_s": 7.0}


def recipe(replicas: int = 4, kind: str = "allreduce", microbatches: int = 2, **options: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"vocab": 260, "dim": 32, "layers": 2, "heads": 2, "hidden": 64, "context": 16},
            "pipeline": {"stages": 2, "microbatches": microbatches, "microbatch_size": 1},
            "network": NETWORK,
            "exchange": {"replicas": replicas, "kind": kind, "options": options},
        }
    )
