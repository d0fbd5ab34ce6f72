"""``planaria join``: add this machine to a live run."""

from __future__ import annotations

from pathlib import Path

from planaria.engine import runs
from planaria.engine.join import join
from planaria.errors import UserError
from planaria.fleet.visit import MAX_WORKERS


def lend(folder: Path, workers: int | None, patience_s: float) -> None:
    """Give the run in ``folder`` so many workers, or as many as one replica has, until it is over or Ctrl-C.

    :raises UserError: when there is no such run under way, or it cannot be joined from here.
    :raises RunStopped: when the run has not answered for ``patience_s``.
    """
    config = runs.config_of(folder)
    count = config.pipeline.stages + 1 if workers is None else workers
    if not 1 <= count <= MAX_WORKERS:
        raise UserError(f"--workers {count}: give 1 to {MAX_WORKERS}")
    if patience_s < 0:
        raise UserError(f"--patience {patience_s:g}: give seconds, 0 or more")
    join(folder, count, patience_s, lambda line: print(line, flush=True), lambda: not runs.is_held(folder))
