"""Planaria accepts every command line in deploy/: scripts call a ``planaria`` that only records its command line,
and the records go through the real command line. Nothing is trained.
"""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from planaria import cli
from planaria.config import recipe
from planaria.config.schema import RunConfig
from planaria.runtime.engine.machine_service import AddressAccess, MachineOptions
from planaria.runtime.resolved_run import ResolvedRun
from support.clusters import DEPLOY, KEY, Call, environment, pod, read, recorded, recording, shell, skypilot

SRUN = """#!/bin/sh
while [ "${1#--}" != "$1" ]; do shift; done
exec "$@"
"""
"""one task"""
SLURM = {"SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
SKY = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n10.0.0.3", "SKYPILOT_NUM_NODES": "3", "PLANARIA_KEY": KEY}
LEAVES_IN_ORDER = """#!/bin/sh
trap 'echo asked; exit 0' TERM
echo ready
while :; do sleep 0.02; done
"""
"""a ``planaria join`` that leaves at SIGTERM"""


def script(text: str, folder: Path, *words: str, **more: str) -> None:
    """Run a script to its end, without errors."""
    commands = folder / "bin" if (folder / "bin").exists() else recording(folder)
    done = subprocess.run(
        ["bash", "-c", text, "script", *words], env=environment(commands, folder / "home", **more),
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert list((folder / "home" / "tmp").iterdir()) == [], "keys are removed"


def in_pod(part: str, folder: Path) -> list[str]:
    """Return the command of a pod's container, with folders of ``folder`` in place of its mounts."""
    places = {"/run/planaria": folder / "secret", "/tmp": folder / "tmp", "/work": folder, "/cache": folder}
    for place in places.values():
        place.mkdir(parents=True, exist_ok=True)
    for name in ("key", "token"):
        (folder / "secret" / name).write_text(KEY)
    (container,) = pod(part)["containers"]
    mounts = "|".join(places)
    (text,) = container["args"]
    return [*container["command"], re.sub(rf"(?<= )({mounts})(?=[/ ])", lambda found: str(places[found[1]]), text)]


def called_in_kubernetes(folder: Path) -> list[Call]:
    calls = []
    for part in ("controller", "machine"):
        commands = recording(folder / part)
        command = in_pod(part, folder / part)
        subprocess.run(command, env=environment(commands, folder / "home"), check=True, timeout=60)
        calls += recorded(folder / part)
    return calls


def slurm(folder: Path) -> Path:
    """Return a folder of commands for slurm.sh, in which a step is a process."""
    commands = recording(folder)
    shell(commands / "srun", SRUN)
    shell(commands / "scontrol", "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n")
    return commands


def called_in_slurm(folder: Path) -> list[Call]:
    slurm(folder)
    script(read("slurm.sh"), folder, "demo", "--train.steps", "500", **SLURM)
    return recorded(folder)


def called_in_skypilot(folder: Path) -> list[Call]:
    task = skypilot()
    made_up = {**task["envs"], "STORE": f"file://{folder / 'store'}", **SKY}
    for rank in ("0", "1"):
        script(task["run"], folder, SKYPILOT_NODE_RANK=rank, **made_up)
    return recorded(folder)


def in_comments(_: Path) -> list[Call]:
    """Return the commands in the comments of the files."""
    text = "".join(re.sub(r"\n#\s*", " ", file.read_text()) for file in sorted(DEPLOY.iterdir()))
    found = re.findall(r"planaria (train \w+(?: --?[\w.]+(?: [^-\s'#][^\s'#]*)?)*)", text)
    found += [f"train {words}" for words in re.findall(r"deploy/slurm\.sh (demo[^#\n]*?)(?=\s+sbatch|\s+What)", text)]
    return [Call(shlex.split(words), {}) for words in found]


def started(call: Call, folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[RunConfig, str]:
    """Return the run that ``planaria train`` would start, by a dry run, and its output."""
    assert cli.run([*call.words, "--dry-run"]) == 0
    output = capsys.readouterr().out
    (folder / "output.toml").write_text(output)
    return recipe.load(folder / "output.toml", {}), output


def joined(call: Call, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[AddressAccess, MachineOptions]:
    """Return the address and options with which ``planaria join`` would join."""
    found: list[Any] = []
    monkeypatch.setattr("planaria.runtime.engine.machine_service.join", lambda *given: found.append(given))
    assert cli.run(call.words) == 0
    ((access, update, _),) = found
    assert isinstance(access, AddressAccess)
    return access, update


@pytest.mark.parametrize(
    ("called", "machines"), [(called_in_kubernetes, 3), (called_in_slurm, 1), (called_in_skypilot, 2)]
)
def test_the_commands_to_train_and_to_join_match(
    called: Any, machines: int, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    train, *joins = called(tmp_path)
    assert train.words[0] == "train" and [call.words[0] for call in joins] == ["join"]
    ((mode, key),) = train.keys.values()
    assert mode == "0o600" and re.fullmatch("[0-9a-f]{64}", key), "fleet.key requires it"
    assert all(list(call.keys.values()) == [[mode, key]] for call in joins)
    config, output = started(train, tmp_path, capsys)
    assert "# --resume auto: starts a new run" in output
    access, update = joined(joins[0], tmp_path, monkeypatch)
    assert access.at == f"{config.fleet.advertise}:{config.fleet.port}"
    assert config.fleet.host == "0.0.0.0" and update.first_s >= 600 and update.cache is not None
    assert config.fleet.local_workers is not None
    if called is not called_in_slurm:
        needed = len(ResolvedRun(config).arrangement.stage) + config.fleet.spares
        assert config.fleet.local_workers + machines * update.workers == needed, (
            "the recipe finds room, and no more is rented"
        )
    else:
        assert config.train.steps == 500 and config.fleet.local_workers == update.workers == 1


def test_planaria_accepts_the_commands_in_comments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls = in_comments(tmp_path)
    assert len(calls) > 4
    for call in calls:
        if "--resume" not in call.words:
            started(call, tmp_path, capsys)


def test_every_command_is_tested() -> None:
    """The tests above call each of these once."""
    found = {file.name: len(re.findall(r"^[^#\n]*planaria (?:train|join) ", file.read_text(), re.MULTILINE))
             for file in DEPLOY.iterdir()}  # fmt: skip
    assert found == {
        "Dockerfile": 0, "grafana.json": 0, "kubernetes.yaml": 2, "kuberay.yaml": 1, "skypilot.yaml": 2, "slurm.sh": 2,
        "spot.yaml": 0,
    }  # fmt: skip


def test_a_machine_that_leaves_at_sigterm_reports_no_success(tmp_path: Path) -> None:
    """After a success its job would start no replacement."""
    shell(tmp_path / "bin" / "planaria", LEAVES_IN_ORDER)
    process = subprocess.Popen(
        in_pod("machine", tmp_path), env=environment(tmp_path / "bin", tmp_path), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert (process.returncode, output) == (143, "asked\n")


@pytest.mark.parametrize("code", [0, 1, 2])
def test_a_machine_returns_the_exit_code_of_planaria(code: int, tmp_path: Path) -> None:
    shell(tmp_path / "bin" / "planaria", f"#!/bin/sh\nexit {code}\n")
    done = subprocess.run(in_pod("machine", tmp_path), env=environment(tmp_path / "bin", tmp_path), timeout=60)
    assert done.returncode == code


@pytest.mark.parametrize(
    ("given", "workers"),
    [({"SLURM_CPUS_PER_TASK": "3"}, "3"), ({"SLURM_GPUS_ON_NODE": "8"}, "8"), ({"WORKERS": "5"}, "5")],
)
def test_slurm_starts_one_worker_per_device(given: dict[str, str], workers: str, tmp_path: Path) -> None:
    slurm(tmp_path)
    script(read("slurm.sh"), tmp_path, "demo", **SLURM, **given)
    train, join = (call.words for call in recorded(tmp_path))
    assert train[train.index("--fleet.local_workers") + 1] == join[join.index("--workers") + 1] == workers


def test_slurm_without_a_recipe_reports_its_usage(tmp_path: Path) -> None:
    environ = {**environment(tmp_path, tmp_path), **SLURM}
    done = subprocess.run(["bash", DEPLOY / "slurm.sh"], env=environ, capture_output=True, timeout=60)
    assert done.returncode != 0 and b"sbatch deploy/slurm.sh RECIPE" in done.stderr
