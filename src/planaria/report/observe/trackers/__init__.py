"""Trackers by name: shipped, from a package, or a user's class."""

from __future__ import annotations

from planaria.common.errors import UserError
from planaria.config.registry import Registry
from planaria.config.schema import ObserveConfig
from planaria.report.observe.tracker import Tracker
from planaria.report.observe.trackers.mlflow import MLflow
from planaria.report.observe.trackers.tensorboard import TensorBoard
from planaria.report.observe.trackers.trackio import Trackio
from planaria.report.observe.trackers.wandb import WandB

TRACKERS: Registry[Tracker] = Registry(
    "tracker",
    "observe.trackers",
    Tracker,  # type: ignore[type-abstract]
    {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio},
)


def trackers(config: ObserveConfig) -> dict[str, Tracker]:
    """Return the recipe's trackers by name, unopened.

    :raises UserError: if a tracker or option is unknown, an option is invalid, or a requirement is missing.
    """
    names = [name.strip() for name in config.trackers.split(",")] if config.trackers.strip() else []
    if repeated := next((name for name in names if names.count(name) > 1), None):
        raise UserError(f"observe.trackers = {config.trackers!r}: {repeated!r} is listed twice; remove one")
    chosen = TRACKERS.make_all(names, config.options)
    for tracker in chosen.values():
        tracker.require()
    return chosen
