"""Names of files and folders, chosen by a user or received from another machine; names of workers, stages, replicas.

A user names runs, peers, experts and sources of text (``Name``, ``Key``). Another machine or a downloaded file names
files (``FileName``): such a name is one component of a path, so nothing is written outside the folder that it is joined
to.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from planaria.common.errors import UserError

RULE = "use 1 to 100 letters (a-z), digits, '-', '_' and '.', and do not begin with '-' or '.'"
KEY_RULE = "use 1 to 64 letters (a-z), digits, '-' and '_', and do not begin with '-'"
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}")
_KEY = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


def is_key(name: str) -> bool:
    """Return whether ``name`` can be a part of a dotted setting, such as a source in ``data.mixture``."""
    return _KEY.fullmatch(name) is not None


def require_name(name: str, setting: str) -> None:
    """:raises UserError: if ``name``, the value of ``setting``, is not a valid name."""
    if not _NAME.fullmatch(name):
        raise UserError(f"{setting} {name!r}: not a valid name; {RULE}")


def name_of_recipe(stem: str) -> str:
    """Return the name of a recipe that is called ``stem`` and does not state one: other characters become '-'."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).lstrip(".-")[:100] or "run"


def expand_home(path: str | Path) -> Path:
    """Return ``path`` with a leading ``~`` or ``~USER`` expanded; unchanged if that folder is unknown."""
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises where the user is unknown)


def _name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise PydanticCustomError("name", "not a valid name; {rule}", {"rule": RULE})
    return name


def _key(name: str) -> str:
    if not is_key(name):
        raise PydanticCustomError("name", "not a valid name; {rule}", {"rule": KEY_RULE})
    return name


Name = Annotated[str, AfterValidator(_name)]
Key = Annotated[str, AfterValidator(_key)]
"""a name without dots, a part of a dotted setting"""

MAX_NAME_BYTES = 200
"""bytes of a file name; file systems have 255, and suffixes such as ``.unfinished`` are added"""
STAGE_FILE = r"stage-[0-9]{4,}(-at-[0-9]+)?\.safetensors"
"""pattern of the file of a stage in a checkpoint"""


def path_component(name: str) -> str:
    """Return ``name`` if it is one visible component of a path.

    :raises PydanticCustomError: if it is not.
    """
    if not name.isprintable() or name[:1] in ("", ".") or "/" in name or len(name.encode()) > MAX_NAME_BYTES:
        text = "must be a plain name: 1 to {most} bytes, printable, without '/', not starting with '.'"
        raise PydanticCustomError("file_name", text, {"most": MAX_NAME_BYTES})
    return name


def _require_plain_name(path: Path) -> Path:
    path_component(path.name)
    return path


FileName = Annotated[str, AfterValidator(path_component)]
"""one component of a path"""
NamedPath = Annotated[Path, AfterValidator(_require_plain_name)]
"""a path whose last component may be used as the name of another file"""


class WorkerId(NamedTuple):
    """A process of a run: a worker, and how often it has been started."""

    worker: str
    incarnation: int


def replica_name(replica: int) -> str:
    """Return the name of a replica's folder in a checkpoint."""
    return f"replica-{replica}"


def stages(numbers: Iterable[int]) -> str:
    """Return 'stage 2', 'stages 1, 3'."""
    return _format_numbers("stage", numbers)


def replicas(numbers: Iterable[int]) -> str:
    """Return 'replica 2', 'replicas 1, 3'."""
    return _format_numbers("replica", numbers)


def _format_numbers(noun: str, numbers: Iterable[int]) -> str:
    ordered = sorted(numbers)
    return f"{noun}{'s' if len(ordered) != 1 else ''} {', '.join(map(str, ordered))}"
