"""Run the scripts for SLURM and SkyPilot: their nodes are processes with separate folders on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import pytest
from benchmarks.processes import free_port

import planaria
from planaria.control.facts import events as e
from planaria.control.log.reader import read_run
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.checkpoint.mirror import Mirror
from support.clusters import KEY, environment, read, real, recipe, shell, skypilot

pytestmark = pytest.mark.timeout(200)
LONG_S, STEPS = 100.0, 30
SRUN = """#!{python}
import os, signal, subprocess, sys
known = {{"nodes", "ntasks", "relative", "cpus-per-task", "no-kill", "kill-on-bad-exit", "wait"}}
rest = sys.argv[1:]
given = {{}}
while rest[0].startswith("--"):
    name, _, value = rest.pop(0)[2:].partition("=")
    assert name in known, name
    given[name] = value
first, count = int(given["relative"]), int(given["nodes"])
assert int(given["ntasks"]) == count and first + count <= int(os.environ["SLURM_JOB_NUM_NODES"])
text, tasks = sys.stdin.buffer.read(), []
def forward(number, frame):
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)
signal.signal(signal.SIGTERM, forward)
for node in range(first, first + count):
    home = os.path.join({homes!r}, str(node))
    os.makedirs(home + "/tmp", exist_ok=True)
    of_its_own = {{**os.environ, "HOME": home, "TMPDIR": home + "/tmp"}}
    tasks.append(subprocess.Popen(rest, env=of_its_own, stdin=subprocess.PIPE, start_new_session=True))
    tasks[-1].stdin.write(text)
    tasks[-1].stdin.close()
sys.exit(max(task.wait() % 256 for task in tasks))
"""
"""every task on its own node, with the whole standard input; SIGTERM is forwarded to all processes of the tasks"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") printf '127.0.0.1\\n127.0.0.2\\n' ;;
  requeue*) echo "$2" > {folder}/requeued ;;
  *) exit 64 ;;
esac
"""


@contextmanager
def node(script: str, words: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Run a script on a machine; kill its remaining processes at the end."""
    process = subprocess.Popen(
        ["bash", "-c", script, "script", *words], env=environ, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        yield process
    finally:
        for pid in (process.pid, *left(Path(environ["HOME"]).parent)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.communicate()


def left(homes: Path) -> list[int]:
    """Return the processes whose home is a folder below ``homes``."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"\0HOME={homes}/".encode() in b"\0" + (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Return the exit code and the output."""
    output, _ = process.communicate(timeout=LONG_S)
    return process.returncode, output


def until(reached: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONG_S
    while not reached():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.05)


def assert_finished(run: Path, homes: Path) -> None:
    """The run finished in two parts, with a machine that joined in each; nothing is left on the machines."""
    record = read_run(run)
    kinds = [type(fact) for _, fact in record.history]
    assert planaria.load(run).outcome == "finished" and max(m.step for m in record.trained) == STEPS - 1
    assert kinds.count(e.RunStarted) == 2 and kinds.count(e.HostJoined) == 2
    assert prove_exactly_once(record) == []
    assert (run / "model").is_dir()
    assert left(homes) == []
    left_over = {file.name for home in homes.iterdir() for file in (home / "tmp").iterdir()}
    assert all(name.startswith("torchinductor_") for name in left_over), "keys and caches are removed, except torch's"


def slurm(folder: Path, job: str, **more: str) -> tuple[dict[str, str], Path]:
    """Return the environment of a batch script on two nodes, and the homes of the nodes."""
    commands, homes = real(folder), folder / "homes"
    shell(commands / "srun", SRUN.format(python=sys.executable, homes=str(homes)))
    shell(commands / "scontrol", SCONTROL.format(folder=folder))
    more |= {"SLURM_JOB_ID": job, "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
    return environment(commands, homes / "batch", **more), homes


@pytest.mark.slow
def test_slurm_stops_at_its_time_limit_and_resumes_when_requeued(tmp_path: Path) -> None:
    job, runs = f"51{free_port() - 20000:04}", tmp_path / "runs"
    environ, homes = slurm(tmp_path, job, WORKERS="2")
    words = [str(recipe(tmp_path)), "--out", str(runs)]
    with node(read("slurm.sh"), words, environ) as first:
        until(lambda: list((runs / "mine" / "checkpoints").glob("step-*[0-9]")), first)
        first.send_signal(signal.SIGUSR1)
        code, output = ended(first)
    assert code == 1 and "stopped by SIGTERM" in output, output
    assert (tmp_path / "requeued").read_text() == f"{job}\n"
    (tmp_path / "requeued").unlink()
    with node(read("slurm.sh"), words, environ) as second:
        code, output = ended(second)
    assert code == 0 and not (tmp_path / "requeued").exists(), output
    assert_finished(runs / "mine", homes)


@pytest.mark.slow
def test_a_slurm_job_with_an_error_is_not_requeued(tmp_path: Path) -> None:
    environ, homes = slurm(tmp_path, "1")
    with node(read("slurm.sh"), ["no_such_recipe"], environ) as process:
        code, output = ended(process)
        until(lambda: not left(homes))
    assert code == 2 and "no such recipe" in output and not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_skypilot_resumes_elsewhere_after_all_nodes_are_lost(tmp_path: Path) -> None:
    commands, task, store = real(tmp_path), skypilot(), f"file://{tmp_path / 'store'}"
    mirror = Mirror(store, "mine")
    given = {**task["envs"], "RECIPE": str(recipe(tmp_path)), "STORE": store, "PLANARIA_KEY": KEY}
    given |= {"PORT": str(free_port()), "WORKERS": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    after = tmp_path / "after"

    def rank(homes: Path, number: str) -> AbstractContextManager[subprocess.Popen[str]]:
        return node(task["run"], [], environment(commands, homes / number, SKYPILOT_NODE_RANK=number, **given))

    with rank(tmp_path / "before", "1") as join, rank(tmp_path / "before", "0") as lead:
        until(mirror.newest, lead, join)
        for process in (lead, join):
            os.killpg(process.pid, signal.SIGKILL)
    with rank(after, "0") as lead, rank(after, "1") as join:
        (lead_code, lead_output), (join_code, join_output) = ended(lead), ended(join)
    assert lead_code == join_code == 0, lead_output + join_output
    assert "fetching step-" in lead_output and join_output.endswith("the run is over\n")
    assert mirror.newest() == f"step-{STEPS:08}"
    assert_finished(after / "0" / "runs" / "mine", after)
