"""Which run this is, wherever its folder lies and however often it is resumed."""

from __future__ import annotations

import secrets
from pathlib import Path

from planaria.common import digests, documents

ID = "run.id"
"""a file that tells whether two places hold the same run"""


def identity(folder: Path) -> str:
    """32 hexadecimal digits that no other run has: drawn when they are first asked for, and kept in the folder.

    :raises OSError: when they cannot be written down.
    :raises UserError: when the file is not as the run wrote it.
    """
    mark = folder / ID
    if not mark.exists():
        draw(folder)
    return documents.text(mark)


def draw(folder: Path, known: bytes | None = None) -> None:
    """Write the identity down: a new one, or that of a run which is ``known`` to be the same."""
    digests.put(folder, {ID: known or secrets.token_hex(16).encode()})
