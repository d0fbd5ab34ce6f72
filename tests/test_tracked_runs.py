"""Runs with the real tracker libraries, offline; skipped where a library is missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import planaria
from planaria.control.log.reader import identity, read_run
from support.tiny_recipe import written

Curve = list[tuple[int, float]]

TRAIN = """
import sys, planaria
recipe, folder, steps, trackers, *options = sys.argv[1:]
settings = {"observe.trackers": trackers, **dict(option.split("=", 1) for option in options)}
if folder:
    planaria.train(folder, resume=True, progress=False, settings={"train.steps": steps})
else:
    planaria.train(recipe, progress=False, settings={"train.steps": steps, **settings})
"""
WANDB = """
import json, sys
from pathlib import Path
from wandb.proto.wandb_internal_pb2 import Record

def records(data):
    # LevelDB's log: blocks of 32 KiB with parts of records, each with checksum (4 bytes), length (2), kind (1).
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # all of a record, or its last part
            yield Record.FromString(whole)
            whole = b""

found = {"runs": [], "points": [], "config": {}}
for file in sys.argv[1:]:
    for record in records(Path(file).read_bytes()):
        if record.run.run_id:
            found["runs"].append([record.run.run_id, record.run.project, record.run.display_name])
            found["config"].update((u.key, json.loads(u.value_json)) for u in record.run.config.update)
        if record.history.item:
            items = {i.key or ".".join(i.nested_key): json.loads(i.value_json) for i in record.history.item}
            found["points"].append(items)
print(json.dumps(found))
"""
TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage
names = [r["name"] if isinstance(r, dict) else r for r in SQLiteStorage.get_runs("planaria")]
logs = {name: SQLiteStorage.get_logs("planaria", name) for name in names}
print(json.dumps({"logs": logs, "config": {name: SQLiteStorage.get_run_config("planaria", name) for name in names}}))
"""


def python(code: str, *arguments: object, env: dict[str, str]) -> str:
    """Return the output of a separate process: these libraries have global state and write at exit."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **env}, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def of_wandb(runs: Path, identity: str, env: dict[str, str]) -> tuple[dict[str, Curve], dict[str, Any]]:
    found = json.loads(python(WANDB, *sorted(runs.glob("wandb/offline-run-*/run-*.wandb")), env=env))
    assert {tuple(run) for run in found["runs"]} == {(identity, "planaria", runs.name)}
    curves: dict[str, Curve] = {}
    for point in found["points"]:
        for name, value in point.items():
            if not name.startswith("_") and name != "step":
                curves.setdefault(name, []).append((point["step"], value))
    return curves, found["config"]


def of_mlflow(folder: Path, identity: str, env: dict[str, str]) -> tuple[dict[str, Curve], dict[str, Any]]:
    mlflow = pytest.importorskip("mlflow")
    os.environ.update(env)
    client = mlflow.MlflowClient(tracking_uri=env["STORE"])
    experiment = client.get_experiment_by_name("planaria")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.tags["planaria.run"] == identity and run.info.run_name == folder.name
    assert run.info.status == "FINISHED" and run.data.tags["resumed.train.steps"] == "8"
    history = {name: client.get_metric_history(run.info.run_id, name) for name in run.data.metrics}
    return {name: [(m.step, m.value) for m in metrics] for name, metrics in history.items()}, run.data.params


def of_trackio(folder: Path, identity: str, env: dict[str, str]) -> tuple[dict[str, Curve], dict[str, Any]]:
    found = json.loads(python(TRACKIO, env=env))
    name = f"{folder.name}-{identity[:8]}"
    assert found["logs"].keys() == {name}
    curves: dict[str, Curve] = {}
    for point in found["logs"][name]:
        for key, value in point.items():
            if key not in ("timestamp", "step"):
                curves.setdefault(key, []).append((point["step"], value))
    return curves, found["config"][name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tracker", "options", "read"),
    [
        ("wandb", ["observe.options.mode=offline"], of_wandb),
        ("mlflow", ["observe.options.uri={store}"], of_mlflow),
        ("trackio", [], of_trackio),
    ],
)
def test_a_resumed_run_is_one_run_of_its_tracker(
    tracker: str, options: list[str], read: Callable[..., tuple[dict[str, Curve], dict[str, Any]]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if find_spec(tracker) is None:
        pytest.skip(f"{tracker} is not installed")
    store = (tmp_path / "store").as_uri()
    env = {"TRACKIO_DIR": str(tmp_path / "trackio"), "MLFLOW_ALLOW_FILE_STORE": "true", "STORE": store}
    for name in env:
        monkeypatch.setenv(name, env[name])
    recipe = written(tmp_path)
    given = [option.format(store=store) for option in options]
    python(TRAIN, recipe, "", 5, f"tensorboard, {tracker}", *given, env=env)
    folder = tmp_path / "runs" / "tiny"
    python(TRAIN, recipe, folder, 8, "", env=env)
    record = read_run(folder)
    curves, config = read(folder, identity(folder), env)
    assert sorted(curves["loss"]) == [(m.step, m.loss) for m in record.trained]
    assert [step for step, _ in sorted(curves["tokens_per_s"])] == list(range(8))
    assert sorted(curves["val_loss"]) == [(m.step, m.val_loss) for m in record.validated]
    assert max(value for _, value in curves["steps"]) == 8
    assert str(config["optim.lr"]) == str(record.config.optim.lr)
    assert "continuing without" not in (folder / "events.jsonl").read_text()
    assert planaria.load(folder).outcome == "finished"
