"""MLflow: a tracking server or another store."""

from __future__ import annotations

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pydantic import PrivateAttr

from planaria.common.errors import UserError
from planaria.common.filesystems import without_password
from planaria.report.observe.tracker import Tracker, is_installed, require_library

_TAG = "planaria.run"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
"""stores that mlflow-skinny does not support"""
_MAX_VALUE = 500
"""maximum characters of a value in every version of MLflow"""
_MAX_BATCH = 100
"""maximum parameters or tags per call"""


class MLflow(Tracker):
    """One MLflow run per run, found by a tag with the run's identity when resumed."""

    uri: str = ""
    """URI of the tracking server or of a local store; MLflow's own default (`MLFLOW_TRACKING_URI`) if empty"""
    experiment: str = "planaria"
    """experiment of the run; created if absent"""
    _client: Any = PrivateAttr()
    _run: str = PrivateAttr()

    def require(self) -> None:
        require_library("mlflow", "mlflow", "mlflow")
        uri = self.uri or str(import_module("mlflow").get_tracking_uri())
        if uri.partition(":")[0].partition("+")[0] in _DATABASES and not is_installed("sqlalchemy"):
            raise UserError(
                f"observe.trackers: 'mlflow' keeps runs in {without_password(uri)!r} with the whole package only; "
                "pip install mlflow, or name a tracking server with --observe.options.uri http://HOST:PORT"
            )

    def open(self, folder: Path) -> None:
        self._client = import_module("mlflow").MlflowClient(tracking_uri=self.uri or None)
        recorded = self._find_or_create(folder)
        parameters = {name: str(value)[:_MAX_VALUE] for name, value in self._settings.items() if str(value)}
        # MLflow parameters are immutable; changed values of a resumed run become tags.
        self._write("params", "Param", {name: value for name, value in parameters.items() if name not in recorded})
        changed = {name: value for name, value in parameters.items() if recorded.get(name, value) != value}
        self._write("tags", "RunTag", {f"resumed.{name}": value for name, value in changed.items()})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        metric: Any = import_module("mlflow.entities").Metric
        now = int(1000 * time.time())
        self._client.log_batch(self._run, metrics=[metric(name, value, now, step) for name, value in values.items()])

    def close(self) -> None:
        self._client.set_terminated(self._run)

    def _find_or_create(self, folder: Path) -> Mapping[str, str]:
        """Find or create the MLflow run; return its parameters."""
        experiment = self._client.get_experiment_by_name(self.experiment)
        number = self._client.create_experiment(self.experiment) if experiment is None else experiment.experiment_id
        by_identity = f"tags.`{_TAG}` = '{self._identity}'"
        runs = self._client.search_runs([number], filter_string=by_identity, max_results=1)
        run = runs[0] if runs else self._client.create_run(number, tags={_TAG: self._identity}, run_name=folder.name)
        self._run = run.info.run_id
        self._client.update_run(self._run, status="RUNNING")
        return dict(run.data.params)

    def _write(self, argument: str, kind: str, parameters: Mapping[str, str]) -> None:
        entity = getattr(import_module("mlflow.entities"), kind)
        entities = [entity(name, value) for name, value in parameters.items()]
        for first in range(0, len(entities), _MAX_BATCH):
            self._client.log_batch(self._run, **{argument: entities[first : first + _MAX_BATCH]})
