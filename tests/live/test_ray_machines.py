"""Nodes of a Ray cluster that join a run outlive its controller, and end with the run."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from planaria.control.facts import events as e
from support.live.harness import STORE, checked, ending, facts, losses, steps
from support.live.shared_log_run import led, shared, undisturbed
from support.processes import planaria
from support.waiting import until

pytestmark = pytest.mark.timeout(300)


def join(config: Any, cluster: Any, *words: str) -> Any:
    """Let nodes of the cluster join the run."""
    at = f"127.0.0.1:{config.fleet.port}"
    return planaria("join", at, "--ray", cluster.address, "--key-file", str(config.fleet.key), *words)


def actors(cluster: Any) -> int:
    """Return the number of living actors of the cluster."""
    import ray

    ray.init(address=cluster.address, namespace="planaria")
    try:
        return len(ray.util.list_named_actors())
    finally:
        ray.shutdown()


@pytest.mark.slow
def test_nodes_of_a_cluster_keep_their_stages_when_the_controller_is_lost(tmp_path: Path, cluster: Any) -> None:
    config = shared(tmp_path, steps=150)
    with led(config, tmp_path) as (run, machines):
        standby, there = machines.standby()
        done = join(config, cluster, "--machines", "2", "--workers", "3")
        assert done.returncode == 0 and done.stdout.count("has joined") == 2, done.stderr
        run.wait_until(lambda record: steps(record) >= 8)
        os.killpg(run.process.pid, signal.SIGKILL)
        output, errors = standby.communicate(timeout=100)
    assert "continuing as term 2" in output, errors
    record = checked(there)
    assert losses(record) == undisturbed(config)
    assert not facts(record, e.WorkerLost) and len(facts(record, e.HostJoined)) == 2
    until(lambda: actors(cluster) == 0, 60.0)


@pytest.mark.slow
def test_a_node_that_dies_is_replaced_by_another_one(tmp_path: Path, cluster: Any) -> None:
    """Ray starts its machine again, which joins as a new one."""
    config = shared(tmp_path, steps=100_000, recovery={"strategy": "redundant"})
    with led(config, tmp_path) as (run, machines), ExitStack() as last:
        machines.standby()
        machines.workers("worker", 5)
        node = cluster.add_node(num_cpus=1, num_gpus=1, **STORE)  # fictional
        last.callback(lambda: node in cluster.worker_nodes and cluster.remove_node(node, allow_graceful=False))
        done = join(config, cluster, "--workers", "1", "--gpus", "1")
        assert done.returncode == 0, done.stderr
        other = cluster.add_node(num_cpus=1, num_gpus=1, **STORE)
        last.callback(cluster.remove_node, other)
        cluster.remove_node(node, allow_graceful=False)
        run.wait_until(lambda record: len(facts(record, e.HostJoined)) == 3, 100.0)
        run.process.send_signal(signal.SIGTERM)
        run.end(100.0)
        until(lambda: actors(cluster) == 0, 60.0)
    assert ending(checked(run.folder)).outcome == "stopped"


@pytest.mark.slow
def test_machines_that_cannot_join_are_reported_in_one_line(tmp_path: Path, cluster: Any) -> None:
    config = shared(tmp_path, steps=1000)
    nobody = join(config, cluster, "--workers", "3")
    assert nobody.returncode == 2 and "cannot join: planaria: " in nobody.stderr, nobody.stderr
    assert nobody.stderr.count("\n") == 1 and "the controller does not answer" in nobody.stderr
    until(lambda: actors(cluster) == 0, 60.0)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--ray", "auto", "--workers", "1", "--machines", "0"], "--machines 0: use 1 or more"),
        (["--ray", "auto"], "pass --workers, the number of workers of each machine"),
        (["--ray", "127.0.0.1:1", "--workers", "1"], "no Ray cluster answers there"),
        (["--ray", "auto", "--workers", "1", "--no-inbound"], "--no-inbound has no effect with --ray"),
        (["--machines", "2"], "add --ray ADDRESS, or remove them"),
    ],
)
def test_words_that_do_not_fit_are_refused(tmp_path: Path, words: list[str], line: str) -> None:
    config = shared(tmp_path)
    at = f"127.0.0.1:{config.fleet.port}"
    done = planaria("join", at, "--key-file", str(config.fleet.key), *words)
    assert done.returncode == 2 and line in done.stderr and done.stderr.count("\n") == 1, done.stderr
