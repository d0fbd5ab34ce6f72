"""``planaria run check --accept``: accept manual changes to a run's folder, or to an exported model's."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.control.logs import ID
from planaria.models.huggingface import is_exported
from planaria.runtime.engine import run_folders
from planaria.swarm.records.lines import PEERS


def accept(folder: Path) -> list[str]:
    """Rewrite the folder's list of digests; return a line for each changed file.

    Checkpoints are excluded, since no run should continue from a damaged one.

    :raises UserError: if the folder is neither a run nor an exported model, or its configuration is invalid.
    """
    if is_exported(folder):
        names = [file.name for file in folder.iterdir() if file.name != digests.FILE and not file.name.startswith(".")]
        return _accepted(folder, names)
    if not (folder / run_folders.CONFIG).is_file():
        raise UserError(f"{folder}: neither a run nor an exported model; give the folder of one, such as runs/NAME")
    with run_folders.held(folder):
        if not (folder / PEERS).is_dir():
            recipe.parse(documents.text(folder / run_folders.CONFIG), str(folder / run_folders.CONFIG))
        return _accepted(folder, (*run_folders.KEPT, ID))


def _accepted(folder: Path, names: Iterable[str]) -> list[str]:
    changed = digests.accept(folder, names)
    return [f"{folder / name}: accepted in its current state" for name in changed] or [f"{folder}: nothing had changed"]
