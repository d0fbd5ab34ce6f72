"""Trackers: calls recorded by stand-ins with the libraries' documented interface, files, options, and settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from planaria import cli
from planaria.common.errors import UserError
from planaria.config.options import Options
from planaria.config.schema import ObserveConfig, RunConfig
from planaria.report.observe import tracker as base
from planaria.report.observe.tracker import SECRET, Tracker, settings
from planaria.report.observe.trackers import trackers
from planaria.report.observe.trackers.tensorboard import TensorBoard

IDENTITY = "0123456789abcdef" * 2
SETTINGS = {"train.steps": 3, "name": "mine", "prompt": "", "optim.lr": 0.5}


class Calls:
    """Answers every method and records the calls."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self._answers = answers

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            return self._answers.get(name)

        return call

    def of(self, name: str) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
        return [(args, kwargs) for called, args, kwargs in self.calls if called == name]


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


def test_wandb_has_one_run_with_a_custom_axis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, settings = Calls(), SimpleNamespace()
    module = Calls(init=run, login=True, Settings=settings)
    library(monkeypatch, "wandb", init=module.init, login=module.login, Settings=module.Settings)
    follow(chosen("wandb", project="p", entity="e"), tmp_path)
    ((_, options),) = module.of("init")
    assert (options["id"], options["resume"], options["mode"]) == (IDENTITY, "allow", "online")
    assert (options["project"], options["entity"], options["name"]) == ("p", "e", tmp_path.name)
    assert (options["dir"], options["config"], options["settings"]) == (str(tmp_path), SETTINGS, settings)
    assert run.calls == [
        ("define_metric", ("*",), {"step_metric": "step"}),
        ("log", ({"step": 7, "loss": 2.5, "recovery_s/notice": 0.25},), {}),
        ("finish", (), {}),
    ]
    ((_, settled),) = module.of("Settings")
    assert settled["console"] == "off" and settled["silent"], "the terminal is the run's"


def test_wandb_without_a_key_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
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
    printed = [("Param", "train.steps", "3"), ("Param", "name", "mine"), ("Param", "optim.lr", "0.5")]
    assert params == (("r1",), {"params": printed})
    assert [(m[1], m[2], m[4]) for m in metrics[1]["metrics"]] == [("loss", 2.5, 7), ("recovery_s/notice", 0.25, 7)]
    assert client.of("set_terminated") == [(("r1",), {})]


def test_mlflow_resumes_the_run_with_the_tag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow parameters are immutable, so changed values become tags."""
    known = run_of_mlflow(name="mine", **{"train.steps": "2"})
    client = Calls(get_experiment_by_name=SimpleNamespace(experiment_id="3"), search_runs=[known])
    mlflow(monkeypatch, client)
    follow(chosen("mlflow"), tmp_path)
    ((args, options),) = client.of("search_runs")
    assert args == (["3"],) and options["filter_string"] == f"tags.`planaria.run` = '{IDENTITY}'"
    assert not client.of("create_run") and not client.of("create_experiment")
    assert client.of("update_run") == [(("r1",), {"status": "RUNNING"})]
    params, tags, _ = client.of("log_batch")
    assert params[1] == {"params": [("Param", "optim.lr", "0.5")]}
    assert tags[1] == {"tags": [("RunTag", "resumed.train.steps", "3")]}


def test_mlflow_without_a_database_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
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
    ((_, options),) = module.of("init")
    assert (options["name"], options["resume"]) == (f"{tmp_path.name}-01234567", "allow")
    assert (options["project"], options["space_id"], options["server_url"]) == ("planaria", "me/board", None)
    assert options["config"] == SETTINGS
    assert not (options["auto_log_gpu"] or options["auto_log_cpu"] or options["embed"])
    assert run.calls == [("log", ({"loss": 2.5, "recovery_s/notice": 0.25},), {"step": 7}), ("finish", (), {})]


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


def test_tensorboard_reads_the_scalars_back(tmp_path: Path) -> None:
    tracker = TensorBoard()
    tracker.identify("0" * 32, {"train.steps": 3})
    tracker.open(tmp_path)
    for step in range(3):
        tracker.scalars(step, {"loss": 3.0 - step, "gradient/stage 1": 0.5})
    tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    # Depending on its version, TensorBoard migrates scalars to tensors while reading.
    assert {*events.Tags()["scalars"], *events.Tags()["tensors"]} == {
        "loss", "gradient/stage 1", "configuration",
    }  # fmt: skip
    (reported,) = events.Tensors("configuration")
    assert b"| train.steps | 3 |" in reported.tensor_proto.string_val[0]
    points = [(e.step, e.value) for e in events.Scalars("loss")]
    assert points == [(0, 3.0), (1, 2.0), (2, 1.0)]


def test_trackers_are_known_and_listed_once() -> None:
    assert trackers(ObserveConfig()) == {"tensorboard": TensorBoard()} and not trackers(ObserveConfig(trackers=""))
    for config, line in (
        (ObserveConfig(trackers="tensorbord"), r"^observe\.trackers = 'tensorbord': no such choice; did you mean"),
        (ObserveConfig(trackers="tensorboard, tensorboard"), r"'tensorboard' is listed twice; remove one"),
        (ObserveConfig(options=Options({"flush_s": 1})), r"^observe\.options\.flush_s: no option of 'tensorboard'"),
    ):
        with pytest.raises(UserError, match=line):
            trackers(config)


@pytest.mark.slow
def test_logs_displays_and_trackers_import_no_torch() -> None:
    run = "event_lines, recoveries, sample_ledger, stage_holders, perfetto"
    code = (
        "import sys; from planaria.control.log import reader; "
        "from planaria.report.observe import trackers, progress, prometheus; "
        f"from planaria.report.run import {run}; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_setting_is_reported_by_dotted_name() -> None:
    reported = settings(RunConfig.model_validate({"name": "mine", "train": {"steps": 7}, "optim": {"lr": 0.5}}))
    assert (reported["name"], reported["train.steps"], reported["optim.lr"]) == ("mine", 7, 0.5)
    assert reported["data.tokenizer"] != SECRET and reported["model.vocab"] == RunConfig().model.vocab
    json.dumps(reported)


SHAPES = (
    {"fleet": {"key": "{}"}},
    {"checkpoint": {"store": "s3://user:{}@host/bucket"}},
    {"checkpoint": {"store": "https://host/bucket?sig={}&x=1"}},
    {"data": {"source": "https://me:{}@host/corpus.txt?token={}"}},
    {"observe": {"trackers": "mine:Own", "options": {"api_key": "{}"}}},
    {"observe": {"options": {"wandb": {"auth": {"nested": "{}"}}}}},
    {"observe": {"options": {"hosts": [{"password": "{}"}, "https://a:{}@b/c"]}}},
)


def filled(shape: object, secret: str) -> object:
    if isinstance(shape, dict):
        return {key: filled(value, secret) for key, value in shape.items()}
    if isinstance(shape, list):
        return [filled(value, secret) for value in shape]
    return shape.replace("{}", secret) if isinstance(shape, str) else shape


@given(
    shape=st.sampled_from(SHAPES), secret=st.from_regex(r"[A-Za-z0-9_.-]{1,3}Q7x[A-Za-z0-9_.-]{0,20}", fullmatch=True)
)
def test_no_secret_is_reported(shape: object, secret: str) -> None:
    reported = settings(RunConfig.model_validate(filled(shape, secret)))
    assert secret not in repr(reported)
    assert any(SECRET in str(value) or "//host/bucket" in str(value) for value in reported.values())
