"""Calls of shipped trackers, recorded by stand-ins with the libraries' documented interface."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from planaria import cli
from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ObserveConfig
from planaria.report.observe import tracker as base
from planaria.report.observe.tracker import Tracker
from planaria.report.observe.trackers import trackers

IDENTITY = "0123456789abcdef" * 2
SETTINGS = {"train.steps": 3, "name": "mine", "prompt": "", "optim.lr": 0.5}


class Calls:
    """Answers every method, and remembers what was asked."""

    def __init__(self, **answers: Any) -> None:
        self.made: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.made.append((name, args, kwargs))
            return self._answers.get(name)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for asked, args, kwargs in self.made if asked == name]


def library(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> None:
    module = ModuleType(name)
    vars(module).update(contents)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture(autouse=True)
def _all_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: name)


def chosen(name: str, **options: Any) -> Tracker:
    return trackers(ObserveConfig(trackers=name, options=Options(options)))[name]


def follow(tracker: Tracker, folder: Path) -> None:
    tracker.identify(IDENTITY, SETTINGS)
    tracker.open(folder)
    tracker.scalars(7, {"loss": 2.5, "recovery_s/notice": 0.25})
    tracker.close()


def test_wandb_has_one_run_with_an_axis_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, settings = Calls(), SimpleNamespace()
    module = Calls(init=run, login=True, Settings=settings)
    library(monkeypatch, "wandb", init=module.init, login=module.login, Settings=module.Settings)
    follow(chosen("wandb", project="p", entity="e"), tmp_path)
    ((_, asked),) = module.of("init")
    assert (asked["id"], asked["resume"], asked["mode"]) == (IDENTITY, "allow", "online")
    assert (asked["project"], asked["entity"], asked["name"]) == ("p", "e", tmp_path.name)
    assert (asked["dir"], asked["config"], asked["settings"]) == (str(tmp_path), SETTINGS, settings)
    assert run.made == [
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"step": 7, "loss": 2.5, "recovery_s/notice": 0.25},), {}),
        ("finish", (), {}),
    ]
    ((_, settled),) = module.of("Settings")
    assert settled["console"] == "off" and settled["silent"], "the terminal is the run's"


def test_wandb_without_a_key_is_told_of_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, "wandb", login=lambda prompt, verify: False)
    with pytest.raises(
        UserError, match=r"'wandb' has no key; run `wandb login`, or --observe\.options\.wandb\.mode off"
    ):
        chosen("wandb")
    assert chosen("wandb", wandb={"mode": "offline"})
    with pytest.raises(UserError, match=r"^observe\.options\.mode = 'ofline'"):
        chosen("wandb", mode="ofline")


def mlflow(monkeypatch: pytest.MonkeyPatch, client: Calls) -> None:
    def entity(kind: str) -> Any:
        return lambda *values: (kind, *values)

    library(monkeypatch, "mlflow", MlflowClient=lambda tracking_uri: client, get_tracking_uri=lambda: "sqlite:///a.db")
    kinds = {kind: entity(kind) for kind in ("Metric", "Param", "RunTag")}
    library(monkeypatch, "mlflow.entities", **kinds)


def run_of_mlflow(**params: str) -> SimpleNamespace:
    return SimpleNamespace(info=SimpleNamespace(run_id="r1"), data=SimpleNamespace(params=params))


def test_mlflow_has_a_new_run_with_a_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Calls(create_experiment="3", search_runs=[], create_run=run_of_mlflow())
    mlflow(monkeypatch, client)
    follow(chosen("mlflow", experiment="mine"), tmp_path)
    assert client.of("create_experiment") == [(("mine",), {})]
    tag = {"tags": {"planaria.run": IDENTITY}, "run_name": tmp_path.name}
    assert client.of("create_run") == [(("3",), tag)]
    params, metrics = client.of("log_batch")
    said = [("Param", "train.steps", "3"), ("Param", "name", "mine"), ("Param", "optim.lr", "0.5")]
    assert params == (("r1",), {"params": said})
    assert [(m[1], m[2], m[4]) for m in metrics[1]["metrics"]] == [("loss", 2.5, 7), ("recovery_s/notice", 0.25, 7)]
    assert client.of("set_terminated") == [(("r1",), {})]


def test_mlflow_goes_on_with_the_run_that_has_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow parameters are immutable, so changed values become tags."""
    known = run_of_mlflow(name="mine", **{"train.steps": "2"})
    client = Calls(get_experiment_by_name=SimpleNamespace(experiment_id="3"), search_runs=[known])
    mlflow(monkeypatch, client)
    follow(chosen("mlflow"), tmp_path)
    ((args, asked),) = client.of("search_runs")
    assert args == (["3"],) and asked["filter_string"] == f"tags.`planaria.run` = '{IDENTITY}'"
    assert not client.of("create_run") and not client.of("create_experiment")
    assert client.of("update_run") == [(("r1",), {"status": "RUNNING"})]
    params, tags, _ = client.of("log_batch")
    assert params[1] == {"params": [("Param", "optim.lr", "0.5")]}
    assert tags[1] == {"tags": [("RunTag", "resumed.train.steps", "3")]}


def test_mlflow_without_a_database_is_told_of_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The small package has none, and a file in the present folder is the default."""
    mlflow(monkeypatch, Calls())
    monkeypatch.setattr(base, "find_spec", lambda name: None if name == "sqlalchemy" else name)
    with pytest.raises(
        UserError, match=r"'mlflow' keeps runs in 'sqlite:///a\.db' with the whole package only; pip install"
    ):
        chosen("mlflow")
    assert chosen("mlflow", uri="http://127.0.0.1:5000")


def test_mlflow_takes_many_parameters_a_hundred_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Calls(create_experiment="3", search_runs=[], create_run=run_of_mlflow())
    mlflow(monkeypatch, client)
    tracker = chosen("mlflow")
    tracker.identify(IDENTITY, {f"s{n}": "v" * 600 for n in range(250)})
    tracker.open(tmp_path)
    batches = [fields["params"] for _, fields in client.of("log_batch")]
    assert [len(batch) for batch in batches] == [100, 100, 50]
    assert {len(value) for batch in batches for _, _, value in batch} == {500}


def test_trackio_has_one_run_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Calls()
    module = Calls(init=run)
    library(monkeypatch, "trackio", init=module.init)
    follow(chosen("trackio", space="me/board"), tmp_path)
    ((_, asked),) = module.of("init")
    assert (asked["name"], asked["resume"]) == (f"{tmp_path.name}-01234567", "allow")
    assert (asked["project"], asked["space_id"], asked["server_url"]) == ("planaria", "me/board", None)
    assert asked["config"] == SETTINGS and not (asked["auto_log_gpu"] or asked["auto_log_cpu"] or asked["embed"])
    assert run.made == [("log", ({"loss": 2.5, "recovery_s/notice": 0.25},), {"step": 7}), ("finish", (), {})]


@pytest.mark.parametrize("name", ["wandb", "mlflow", "trackio"])
def test_a_library_that_is_missing_is_named_before_the_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(base, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", "demo", "--out", str(tmp_path), "--observe.trackers", f"tensorboard, {name}"])
    (line,) = capsys.readouterr().err.splitlines()
    fix = f"needs the package {name!r}; install it with: pip install 'planaria[{name}]'"
    assert ended.value.code == 2 and line == f"planaria: observe.trackers: {name!r} {fix}"
    assert not list(tmp_path.iterdir())


def test_each_tracker_has_its_own_options() -> None:
    made = trackers(ObserveConfig(trackers="mlflow, trackio", options=Options({"uri": "http://here", "project": "p"})))
    assert getattr(made["mlflow"], "uri") == "http://here" and getattr(made["trackio"], "project") == "p"  # noqa: B009
