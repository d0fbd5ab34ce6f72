"""Runs on a Ray cluster: failures that only a cluster can have. The other files test both kinds of fleet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from planaria.config.schema import FleetConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.control.log.run_record import RunRecord
from planaria.runtime.fleet.bundles import Bundle
from support.live import harness
from support.live.harness import LiveWorkers, ending, facts, live, living, losses, newest, outcomes, resume, tiny, train
from support.live.process_tree import descendants, parents
from support.waiting import until

TOLERANCE = 1e-5
PACE: dict[str, Any] = {"network": {"emulate": True, "forward_s": [0.004], "backward_s": [0.008]}}
"""steps of 80 ms and more, however fast the machine"""
ANY_STAGE: dict[str, Any] = {"recovery": {"strategy": "checkfree, checkpoint"}}
SOON: dict[str, Any] = {"fleet": {"missed_heartbeats": 6}}


@pytest.mark.slow
def test_a_ray_started_for_the_run_dies_with_its_killed_controller(tmp_path: Path) -> None:
    ground = {"kind": "ray", "address": "embedded"}
    with live(tiny(tmp_path, steps=10_000, checkpoint={"every": 5}, fleet=ground)) as run:
        run.wait_until(lambda record: len(losses(record)) >= 6)
        # Ray's own agents look for their dead cluster for a minute before they give up.
        ray = {pid for pid in descendants(run.process.pid) if not called(pid).endswith("Agent")}
        os.kill(max(living(run.folder)), signal.SIGSTOP)
        os.kill(run.process.pid, signal.SIGKILL)
        assert run.end()[0] == -signal.SIGKILL
    assert len(ray) > 6
    until(lambda: not any(map(alive, ray)), harness.LEFTOVER_TIMEOUT_S)
    step = newest(run.folder).step
    record = resume(run.folder, train__steps=str(step + 5), fleet__kind="local")
    assert ending(record).outcome == "finished"
    assert losses(record) == losses(train(tiny(tmp_path / "uninterrupted", steps=step + 5)))


@pytest.mark.slow
def test_a_stop_signal_keeps_the_runs_own_ray_until_all_is_saved(tmp_path: Path) -> None:
    with live(tiny(tmp_path, steps=10_000, fleet={"kind": "ray", "address": "embedded"})) as run:
        run.wait_until(lambda record: len(losses(record)) >= 5)
        os.killpg(run.process.pid, signal.SIGTERM)
        code, errors = run.end()
    assert code == 1 and errors.startswith("planaria: ") and errors.count("\n") == 1, errors
    stopped = newest(run.folder)
    assert stopped.whole and stopped.step >= 5


@pytest.mark.slow
def test_a_run_continues_without_a_killed_node_and_its_workers(tmp_path: Path, on_ray: Any, node: Any) -> None:
    record = train_and_inject(tmp_path, node, lambda: on_ray.remove_node(node, allow_graceful=False))
    (lost,) = facts(record, e.WorkerLost)
    assert lost.cause in ("connection", "exit")


@pytest.mark.slow
def test_a_killed_actor_is_replaced_after_its_nodes_workers_died(tmp_path: Path, node: Any) -> None:
    workers, killed = set[int](), list[int]()

    def inject() -> None:
        (worker,) = workers
        killed.append(parents()[worker])  # the pool that the worker dies with
        os.kill(killed[0], signal.SIGKILL)

    record = train_and_inject(tmp_path, node, inject, workers)
    (lost,) = facts(record, e.WorkerLost)
    assert len(killed) == 1 and lost.cause in ("connection", "exit")


@pytest.mark.slow
def test_a_frozen_node_is_lost_and_its_workers_are_refused_later(tmp_path: Path, node: Any) -> None:
    frozen: set[int] = set()

    def inject() -> None:
        frozen.update({raylet(node), *descendants(raylet(node))})
        for pid in frozen:
            os.kill(pid, signal.SIGSTOP)

    def thaw(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.RunStep) and decision.step == 20:
            for pid in frozen:
                os.kill(pid, signal.SIGCONT)

    try:
        record = train_and_inject(tmp_path, node, inject, hook=thaw, **SOON)
    finally:
        for pid in filter(alive, frozen):
            os.kill(pid, signal.SIGCONT)
    assert [lost.cause for lost in facts(record, e.WorkerLost)] == ["heartbeat"]
    assert len(facts(record, e.ZombieIgnored)) == 1


@pytest.mark.slow
def test_workers_leave_a_draining_node(tmp_path: Path, node: Any) -> None:
    def inject() -> None:
        from ray._private.worker import global_worker

        preempted, soon = 2, int(time.time() + 60) * 1000
        global_worker.gcs_client.drain_node(node.node_id, preempted, "spot", soon)

    record = train_and_inject(tmp_path, node, inject, steps=100)
    (leaving,) = facts(record, e.WorkerLeaving)
    assert "is draining, gone in " in leaving.detail
    assert [fact.worker for fact in facts(record, d.Release)] == [leaving.worker]
    assert [form.outcome for form in facts(record, d.Form)] == ["started", "handed over"]


# ---- striking at a node


def train_and_inject(
    tmp_path: Path,
    node: Any,
    inject: Callable[[], None],
    workers: set[int] | None = None,
    hook: harness.Hook | None = None,
    steps: int = 40,
    **settings: Any,
) -> RunRecord:
    """Train with one worker on ``node``, inject a fault there in step 5, and check that another worker takes over.

    ``workers`` is filled with the process ids of the node's workers before that.
    """
    there = set[int]() if workers is None else workers

    def at_step_5(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.RunStep) and decision.step == 5 and not there:
            there.update(living(workers.folder) & descendants(raylet(node)))
            inject()
        if hook is not None:
            hook(decision, workers)

    fleet = {"spares": 0} | settings.pop("fleet", {})  # the node's worker has a stage
    config = tiny(tmp_path, steps=steps, fleet=fleet, checkpoint={"every": 3}, **(PACE | ANY_STAGE | settings))
    record = train(config, hook=at_step_5)
    assert ending(record).outcome == "finished"
    assert len(outcomes(record)) == 2 and outcomes(record)[1] in ("recovered", "rolled back", "handed over")
    pids = {fact.pid: fact.worker for fact in facts(record, e.WorkerJoined)}
    assert [pids[pid] for pid in there] == [lost.worker for lost in facts(record, e.WorkerLost)]
    harness.assert_no_orphans(record.folder)
    return record


def raylet(node: Any) -> int:
    return int(node.all_processes["raylet"][0].process.pid)


def called(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
@pytest.mark.usefixtures("gpu_node")
@pytest.mark.parametrize(("share", "expected"), [(1.0, {"0", "1"}), (0.5, {"0"})])
def test_every_bundle_keeps_the_gpu_that_ray_reserved(cluster: Any, share: float, expected: set[str]) -> None:
    import ray

    from planaria.runtime.fleet import ray as ours

    ray.init(address=cluster.address, log_to_driver=False)
    try:
        config = FleetConfig(kind="ray", gpu_share=share)
        machines = ours._Ray(None, 2, ours.worker_resources(config, cuda=True))
        nodes = machines.where()[0]
        for _ in range(2):
            found = [machines.device(Bundle(0, bundle), str(nodes[bundle])) for bundle in range(2)]
            assert {device.result(60) for device in found if device is not None} == expected
            machines._devices.clear()
        assert ours._Ray(None, 1, ours.worker_resources(config, cuda=False)).device(Bundle(0, 0), "") is None
    finally:
        ray.shutdown()
