"""Registration of features that keep state for the current training step; each owns a package."""

from __future__ import annotations

from typing import Any

from planaria.control.state.run import RunState
from planaria.exchange.coded import progress

INITIAL_PROGRESS_OF_FEATURES = (progress.initial_progress,)
"""functions that return a feature's initial state of a training step, or None if the feature is off"""


def initial_progress(run: RunState) -> Any:
    """Return the initial ``ReplicaState.progress`` of a training step."""
    return next((kept for feature in INITIAL_PROGRESS_OF_FEATURES if (kept := feature(run)) is not None), None)
