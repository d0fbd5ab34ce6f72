"""The door of a run: a file in its folder that says where machines may join, readable by the run's owner alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from planaria.errors import UserError

FILE = "door.json"
MAX_BYTES = 1 << 16


class Door(BaseModel):
    """Where to call, and the key that both ends show that they know."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    at: str
    """HOST:PORT"""
    key: Annotated[str, Field(pattern="^([0-9a-f]{2})+$")]
    """hexadecimal"""


def open_door(folder: Path, address: str, key: bytes) -> Path:
    """Write the file; the caller removes it when the run is over."""
    path, unfinished = folder / FILE, folder / f"{FILE}.unfinished"
    unfinished.unlink(missing_ok=True)
    handle = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(handle, Door(at=address, key=key.hex()).model_dump_json().encode())
    os.close(handle)
    unfinished.replace(path)
    return path


def read_door(folder: Path) -> Door:
    """The door of the run in ``folder``.

    :raises UserError: when the run is over, or its door is another's.
    """
    path = folder / FILE
    try:
        return Door.model_validate_json(path.read_bytes()[:MAX_BYTES])
    except FileNotFoundError:
        raise UserError(
            f"{folder}: nobody is training it on a fleet; start it with `planaria train --resume {folder}`"
        ) from None
    except PermissionError:
        raise UserError(f"{path}: only the run's owner may read it; join as that user") from None
    except ValidationError:
        raise UserError(f"{path}: damaged, or of another version of planaria") from None
