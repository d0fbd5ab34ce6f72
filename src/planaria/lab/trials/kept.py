"""Results of trials on disk: written whole, with a digest, and read back only for the same identity.

The identity of a trial is planaria's version, the configuration and the chosen code: all that its result depends on.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from planaria import __version__
from planaria.common import atomic, digests, documents
from planaria.common.documents import Record
from planaria.common.errors import UserError

_OURS = {"planaria"} | sys.stdlib_module_names
"""packages whose code a version stands for"""


class Identity(Record):
    """Two trials with the same identity have the same result, so one of them need not be run."""

    version: str
    recipe: str
    """SHA-256 of the configuration and all other inputs"""
    code: dict[str, str]
    """module of chosen code → SHA-256 of its source file"""

    def difference(self, kept: Identity, versions: bool = True) -> str:
        """Why a result of the identity ``kept`` is none of this one; empty if it is. ``versions``: do they count?"""
        if versions and kept.version != self.version:
            return f"planaria {kept.version} made it, this is {self.version}"
        if kept.recipe != self.recipe:
            return "it was made with another recipe"
        changed = [name for name in {**self.code, **kept.code} if self.code.get(name) != kept.code.get(name)]
        return f"the code of {', '.join(changed)} has changed since" if changed else ""

    def require_current(self) -> None:
        """UserError when a source file has changed since this identity was made: it is unknown which of both ran."""
        if changed := [name for name, digest in self.code.items() if _digest(name) != digest]:
            raise UserError(f"{_file(changed[0])}: was changed while a trial ran with it; start the command again")


def identity(asked: object, code: Iterable[type | ModuleType] = ()) -> Identity:
    """The identity of a trial.

    ``asked``: the configuration and all other inputs, as a value that JSON can hold, without paths that say only where
    results go. ``code``: classes (or modules) outside planaria that it chooses, ``module:Class`` in a recipe; of a
    class, the files of those it inherits from count too. What such a file imports does not.

    :raises UserError: when code has no source file, as in a notebook's cell: a trial's process could not import it.
    """
    names = sorted({name for one in code for name in _modules(one)})
    return Identity(version=__version__, recipe=documents.digest(asked), code={name: _digest(name) for name in names})


def _modules(one: type | ModuleType) -> Iterator[str]:
    names = [one.__name__] if isinstance(one, ModuleType) else [base.__module__ for base in one.__mro__]
    return (name for name in names if name == "__main__" or name.partition(".")[0] not in _OURS)


def _file(module: str) -> Path:
    found = None if module == "__main__" else getattr(importlib.import_module(module), "__file__", None)
    if found is None:
        raise UserError(f"{module}: has no source file that another process could import; write the class into a file")
    return Path(found)


def _digest(module: str) -> str:
    return digests.of(documents.data(_file(module)))


Found = TypeVar("Found", bound=BaseModel)


class _Sealed(Record):
    identity: Identity
    found: dict[str, Any]


@dataclass(frozen=True)
class Kept(Generic[Found]):
    """The file for one trial's result."""

    file: Path
    kind: type[Found]
    identity: Identity

    def read(self, *, versions: bool = True) -> tuple[Found | None, str]:
        """The result, if there is one of this identity; otherwise None, and why the one that is there does not count.

        ``versions``: whether a result of another version of planaria is another's.

        :raises UserError: when the file is damaged, or was changed since it was written.
        """
        if not self.file.is_file():
            return None, ""
        mend = "remove it to run this again"
        tree = documents.parse_json(documents.data(self.file, mend=mend), self.file, mend)
        if isinstance(tree, dict) and "identity" not in tree:
            return None, "an older planaria made it"
        sealed = documents.unsealed(self.file, _Sealed, mend=mend)
        if reason := self.identity.difference(sealed.identity, versions):
            return None, reason
        return documents.parse_model(self.kind, json.dumps(sealed.found), self.file, mend), ""

    def write(self, found: Found) -> None:
        """The result appears whole or not at all."""
        sealed = _Sealed(identity=self.identity, found=found.model_dump(mode="json"))
        atomic.write_text(self.file, documents.sealed(sealed))


def found_in(file: Path, kind: type[Found]) -> Found:
    """The result in a file, of whatever identity: for those who show what is there.

    :raises UserError: when the file is damaged, or was changed since it was written.
    """
    mend = "remove it to run this again"
    sealed = documents.unsealed(file, _Sealed, mend=mend)
    return documents.parse_model(kind, json.dumps(sealed.found), file, mend)


def make_folder(folder: Path) -> None:
    """Make a folder for results unless it is there; UserError when that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); choose another folder with --out") from None
