"""The places where the tests of real runs find their workers: this machine, or the nodes of a Ray cluster on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.live import harness
from support.live.harness import STORE

SETTINGS = {
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 3,
}


@pytest.fixture(scope="session")
def cluster() -> Iterator[Any]:
    """A Ray cluster with room for sixteen workers on its one node; tests may add nodes."""
    testing = pytest.importorskip("ray.cluster_utils")
    head = {"num_cpus": 16, "include_dashboard": False, "_system_config": SETTINGS, **STORE}
    cluster = testing.Cluster(initialize_head=True, head_node_args=head)
    yield cluster
    cluster.shutdown()


@pytest.fixture
def on_ray(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs of this test have their workers on the cluster."""
    monkeypatch.setattr(harness, "WORKER_LOCATION", {"kind": "ray", "address": cluster.address})
    return cluster


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.slow)])
def ground(request: pytest.FixtureRequest) -> None:
    """Runs of this test have their workers here, and once more on the cluster."""
    if request.param == "ray":
        request.getfixturevalue("on_ray")


@pytest.fixture
def node(on_ray: Any) -> Iterator[Any]:
    """A second node of the cluster, with room for one worker."""
    node = on_ray.add_node(num_cpus=1, **STORE)
    yield node
    if node in on_ray.worker_nodes:
        on_ray.remove_node(node, allow_graceful=False)


@pytest.fixture
def gpu_node(on_ray: Any) -> Iterator[Any]:
    """Yield a node with two fictional GPUs: Ray accepts the count without asking CUDA."""
    node = on_ray.add_node(num_cpus=2, num_gpus=2, **STORE)
    yield node
    on_ray.remove_node(node, allow_graceful=False)
