"""A Ray node that cannot see the run's folder: its workers' files come from the controller, and go there."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from planaria.runtime.checkpoint.stage_file import require_stage, stage_file
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.fleet.joining import RUN_ADDRESS_FILE, publish_run_address
from planaria.runtime.transport.secure import new_key
from support.live.harness import (
    STORE,
    LiveWorkers,
    apart,
    ending,
    facts,
    folder_of,
    inline,
    losses,
    outcomes,
    tiny,
    train,
)
from support.live.process_tree import descendants
from support.waiting import until

PATIENCE_S = 60.0


class Node:
    """A raylet and its child processes, on a machine that sees another folder than this one."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def processes(self) -> set[int]:
        return descendants(self._process.pid)

    def at(self, path: Path) -> Path:
        """Return its view of ``path``."""
        return Path(f"/proc/{self._process.pid}/root{path}")


@contextmanager
def node_elsewhere(cluster: Any, run: Path, cache: Path) -> Iterator[Node]:
    """A node with room for one worker that has another run in place of this run and its data.

    A mount namespace hides them, so its workers reach them through the controller only.
    """
    if os.geteuid() or shutil.which("unshare") is None:
        pytest.skip("a node that does not see this machine's files takes root and unshare")
    if (done := subprocess.run(["unshare", "--mount", "true"], capture_output=True, text=True)).returncode:
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    other = cache.with_name("other")
    other.mkdir()
    publish_run_address(other, "127.0.0.1:1", new_key(), "another run")
    hide = (
        f"mount -t tmpfs none '{run.parent.parent}' && mkdir '{run.parent}' && cp -r '{other}' '{run}' && exec \"$@\""
    )
    start = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--address={cluster.address}", "--num-cpus=1"]
    start += [f"--object-store-memory={STORE['object_store_memory']}", "--min-worker-port=0", "--max-worker-port=0"]
    elsewhere = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{hide} && exec "$@"', "sh"]
    nodes = alive(cluster)
    process = subprocess.Popen(
        [*elsewhere, *start, "--block"], env={**os.environ, "XDG_CACHE_HOME": str(cache)},
        stdout=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    node = Node(process)
    try:
        until(lambda: alive(cluster) > nodes, PATIENCE_S)
        yield node
    finally:
        for pid in {process.pid, *node.processes}:
            os.kill(pid, signal.SIGKILL)
        process.wait()
        until(lambda: alive(cluster) == nodes, PATIENCE_S)


def alive(cluster: Any) -> int:
    return sum(node["Alive"] for node in cluster.global_state.node_table())


def spread(home: Path) -> RunConfig:
    """Three workers without a spare, so that one is on the other node, and restarts there."""
    sections = {"network": {"emulate": "links", "latency_s": 0.01}, "fleet": {"spares": 0}}
    saves = {"recovery": {"strategy": "checkpoint"}, "checkpoint": {"every": 3, "keep": 100}}
    return tiny(home, stages=2, steps=20, **sections, **saves)


@pytest.mark.slow
def test_a_worker_without_the_runs_folder_recovers_as_inline(tmp_path: Path, on_ray: Any) -> None:
    config = spread(tmp_path / "home")
    cache, run, there = tmp_path / "cache", folder_of(config), list[int]()

    def inject(decision: d.Decision, workers: LiveWorkers) -> None:
        if isinstance(decision, d.RunStep) and decision.step == (8, 14, None)[len(there)]:
            (pid,) = set(workers.pids.values()) & node.processes
            there.append(pid)
            if len(there) == 1:
                os.kill(pid, signal.SIGKILL)
                assert not node.at(run / "checkpoints").exists()

    with node_elsewhere(on_ray, run, cache) as node:
        record = train(config, hook=inject)
        assert [file.name for file in node.at(run).iterdir()] == [RUN_ADDRESS_FILE], "what was there is another run's"
    assert outcomes(record) == ["started", "rolled back"] and ending(record).outcome == "finished"
    assert len(set(there)) == 2, "killed and restarted"
    pids = {fact.pid: fact.worker for fact in facts(record, e.WorkerJoined)}
    (gone,) = facts(record, e.WorkerLost)
    assert gone.worker == pids[there[0]]
    assert apart(losses(record), inline(record)[0]) == 0.0
    saved = CheckpointStore(run / "checkpoints").list()
    assert [one.step for one in saved] == [3, 6, 9, 12, 15, 18, 20] and all(one.whole for one in saved)
    for one in saved:
        for stage in one.manifest.stages:
            require_stage(one.folder, stage, one.step, one.manifest.digests[stage_file(Path(), stage).name])
    here = {file.stem for file in (run / "workers").iterdir()}
    elsewhere = {file.stem for file in cache.rglob("*.log")}
    assert elsewhere == {pids[pid] for pid in there} and here == {*pids.values()} - elsewhere
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.slow
def test_a_node_that_cannot_have_the_files_is_named_before_a_worker_starts(tmp_path: Path, on_ray: Any) -> None:
    config = spread(tmp_path / "home")
    (tmp_path / "cache").write_text("no folder")
    with (
        node_elsewhere(on_ray, folder_of(config), tmp_path / "cache"),
        pytest.raises(UserError, match=r"^Ray node .* cannot store the run's files in .*/cache/planaria") as caught,
    ):
        train(config)
    assert "\n" not in str(caught.value) and not (folder_of(config) / "workers").exists()
