"""The scripts for SLURM and SkyPilot are run: their nodes are processes with folders of their own, on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from clusters import KEY, environment, free_port, read, real, recipe, shell, skypilot

import planaria
from planaria.control import events as e
from planaria.control.logs import read_run
from planaria.report.run.ledger import prove_exactly_once
from planaria.runtime.checkpoint.mirror import Mirror

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
def told(number, frame):
    for task in tasks:
        if task.poll() is None:
            os.killpg(task.pid, number)
signal.signal(signal.SIGTERM, told)
for node in range(first, first + count):
    home = os.path.join({homes!r}, str(node))
    os.makedirs(home + "/tmp", exist_ok=True)
    of_its_own = {{**os.environ, "HOME": home, "TMPDIR": home + "/tmp"}}
    tasks.append(subprocess.Popen(rest, env=of_its_own, stdin=subprocess.PIPE, start_new_session=True))
    tasks[-1].stdin.write(text)
    tasks[-1].stdin.close()
sys.exit(max(task.wait() % 256 for task in tasks))
"""
"""every task on a node of its own, with all that comes in; SIGTERM is passed on to all processes of the tasks"""
SCONTROL = """#!/bin/sh
case "$1 $2" in
  "show hostnames") printf '127.0.0.1\\n127.0.0.2\\n' ;;
  requeue*) echo "$2" > {folder}/requeued ;;
  *) exit 64 ;;
esac
"""


@contextmanager
def node(script: str, words: list[str], environ: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A machine on which a script runs; what is left of it at the end is killed."""
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
    """Processes that live in a folder below ``homes``."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"\0HOME={homes}/".encode() in b"\0" + (place / "environ").read_bytes():
                found.append(int(place.name))
    return found


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and what it said."""
    said, _ = process.communicate(timeout=LONG_S)
    return process.returncode, said


def until(reached: Callable[[], object], *processes: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + LONG_S
    while not reached():
        assert time.monotonic() < deadline and all(process.poll() is None for process in processes)
        time.sleep(0.05)


def assert_finished(run: Path, homes: Path) -> None:
    """It was trained to its end, in two parts, with a machine that joined in each; nothing is left on the machines."""
    record = read_run(run)
    kinds = [type(fact) for _, fact in record.history]
    assert planaria.load(run).outcome == "finished" and max(m.step for m in record.trained) == STEPS - 1
    assert kinds.count(e.RunStarted) == 2 and kinds.count(e.HostJoined) == 2
    assert prove_exactly_once(record) == []
    assert (run / "model").is_dir()
    assert left(homes) == []
    left_over = {file.name for home in homes.iterdir() for file in (home / "tmp").iterdir()}
    assert all(name.startswith("torchinductor_") for name in left_over), (
        "keys and caches are removed; torch leaves its own"
    )


@pytest.mark.slow
def test_slurm_trains_to_the_end_of_its_time_and_goes_on_when_it_is_requeued(tmp_path: Path) -> None:
    commands, port = real(tmp_path), free_port()
    homes, checkpoints = tmp_path / "homes", tmp_path / "runs" / "mine" / "checkpoints"
    shell(commands / "srun", SRUN.format(python=sys.executable, homes=str(homes)))
    shell(commands / "scontrol", SCONTROL.format(folder=tmp_path))
    about = {"SLURM_JOB_ID": f"51{port - 20000:04}", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
    environ = environment(commands, homes / "batch", WORKERS="2", **about)
    words = [str(recipe(tmp_path)), "--out", str(tmp_path / "runs")]
    with node(read("slurm.sh"), words, environ) as first:
        until(lambda: list(checkpoints.glob("step-*[0-9]")), first)
        first.send_signal(signal.SIGUSR1)
        code, said = ended(first)
    assert code == 1 and "stopped by SIGTERM" in said, said
    assert (tmp_path / "requeued").read_text() == f"{about['SLURM_JOB_ID']}\n"
    (tmp_path / "requeued").unlink()
    with node(read("slurm.sh"), words, environ) as second:
        code, said = ended(second)
    assert code == 0 and not (tmp_path / "requeued").exists(), said
    assert_finished(tmp_path / "runs" / "mine", homes)


@pytest.mark.slow
def test_a_job_of_slurm_that_cannot_be_done_is_not_requeued(tmp_path: Path) -> None:
    commands, homes = real(tmp_path), tmp_path / "homes"
    shell(commands / "srun", SRUN.format(python=sys.executable, homes=str(homes)))
    shell(commands / "scontrol", SCONTROL.format(folder=tmp_path))
    about = {"SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
    with node(read("slurm.sh"), ["no_such_recipe"], environment(commands, homes / "batch", **about)) as process:
        code, said = ended(process)
        until(lambda: not left(homes))
    assert code == 2 and "no such recipe" in said and not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_skypilot_goes_on_elsewhere_when_all_nodes_are_taken_away(tmp_path: Path) -> None:
    commands, task = real(tmp_path), skypilot()
    mirror = Mirror(f"file://{tmp_path / 'store'}", "mine")
    given = {
        **task["envs"],
        "RECIPE": str(recipe(tmp_path)),
        "STORE": f"file://{tmp_path / 'store'}",
        "PLANARIA_KEY": KEY,
    }
    given |= {"PORT": str(free_port()), "WORKERS": "2", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    before, after = tmp_path / "before", tmp_path / "after"
    with ExitStack() as nodes:
        join, lead = (
            nodes.enter_context(node(task["run"], [], environment(commands, before / n, SKYPILOT_NODE_RANK=n, **given)))
            for n in "10"
        )
        until(mirror.newest, lead, join)
        for process in (lead, join):
            os.killpg(process.pid, signal.SIGKILL)
    with ExitStack() as nodes:
        lead, join = (
            nodes.enter_context(node(task["run"], [], environment(commands, after / n, SKYPILOT_NODE_RANK=n, **given)))
            for n in "01"
        )
        told, heard = ended(lead), ended(join)
    assert told[0] == heard[0] == 0, told[1] + heard[1]
    assert "fetching step-" in told[1] and heard[1].endswith("the run is over\n")
    assert mirror.newest() == f"step-{STEPS:08}"
    assert_finished(after / "0" / "runs" / "mine", after)
