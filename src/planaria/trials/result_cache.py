"""Results of trials on disk: written atomically with a digest, and reused only for the same identity.

The identity of a trial covers everything that its result depends on: planaria's version, the configuration and custom
code.
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
from planaria.common.documents import Record, former_names
from planaria.common.errors import UserError

_OURS = {"planaria"} | sys.stdlib_module_names
"""packages whose code is identified by a version"""


_REMOVE = "remove it to run this again"


class TrialIdentity(Record):
    """Identity of a trial; trials with equal identities have equal results."""

    version: str
    recipe: str
    """SHA-256 of the configuration and all other inputs"""
    code: dict[str, str]
    """module of custom code → SHA-256 of its source file"""

    def difference(self, kept: TrialIdentity, versions: bool = True) -> str:
        """Return why a result of the identity ``kept`` is not valid for this one, or an empty string if it is."""
        if versions and kept.version != self.version:
            return f"it was made by planaria {kept.version}, this is {self.version}"
        if kept.recipe != self.recipe:
            return "it was made with a different recipe"
        changed = [name for name in {**self.code, **kept.code} if self.code.get(name) != kept.code.get(name)]
        return f"the code of {', '.join(changed)} has changed since" if changed else ""

    def require_current(self) -> None:
        """Raise UserError if a source file has changed since this identity was made."""
        if changed := [name for name, digest in self.code.items() if _digest(name) != digest]:
            raise UserError(f"{_file(changed[0])} changed during a trial; start the command again")


def identity(requested: object, code: Iterable[type | ModuleType] = ()) -> TrialIdentity:
    """Return the identity of a trial.

    ``requested``: the configuration and all other inputs as a JSON value, without output paths. ``code``: classes or
    modules outside planaria that it names (``module:Class``); files of base classes count too, but not their imports.

    :raises UserError: when code has no source file, as in a notebook: a trial's process could not import it.
    """
    names = sorted({name for owner in code for name in _modules(owner)})
    return TrialIdentity(
        version=__version__, recipe=documents.digest(requested), code={name: _digest(name) for name in names}
    )


def _modules(owner: type | ModuleType) -> Iterator[str]:
    names = [owner.__name__] if isinstance(owner, ModuleType) else [base.__module__ for base in owner.__mro__]
    return (name for name in names if name == "__main__" or name.partition(".")[0] not in _OURS)


def _file(module: str) -> Path:
    file = None if module == "__main__" else getattr(importlib.import_module(module), "__file__", None)
    if file is None:
        raise UserError(f"{module} has no source file that another process could import; move the class to a file")
    return Path(file)


def _digest(module: str) -> str:
    return digests.of(documents.read_bytes(_file(module)))


ResultType = TypeVar("ResultType", bound=BaseModel)


class _Sealed(Record):
    _former = former_names(result="found")
    identity: TrialIdentity
    result: dict[str, Any]


@dataclass(frozen=True)
class CachedResult(Generic[ResultType]):
    """The file of one trial's result."""

    file: Path
    kind: type[ResultType]
    identity: TrialIdentity

    def read(self, *, versions: bool = True) -> tuple[ResultType | None, str]:
        """Return the result if it has this identity, otherwise None and the reason why an existing one is invalid.

        ``versions``: whether results of other versions of planaria are invalid.

        :raises UserError: when the file is damaged or was modified.
        """
        if not self.file.is_file():
            return None, ""
        tree = documents.parse_json(documents.read_bytes(self.file, fix=_REMOVE), self.file, _REMOVE)
        if isinstance(tree, dict) and "identity" not in tree:
            return None, "it was made by an older planaria"
        sealed = documents.read_sealed(self.file, _Sealed, fix=_REMOVE)
        if reason := self.identity.difference(sealed.identity, versions):
            return None, reason
        return documents.parse_model(self.kind, json.dumps(sealed.result), self.file, _REMOVE), ""

    def write(self, outcome: ResultType) -> None:
        """Write the result atomically."""
        sealed = _Sealed(identity=self.identity, result=outcome.model_dump(mode="json"))
        atomic.write_text(self.file, documents.seal(sealed))


def read_result(file: Path, kind: type[ResultType]) -> ResultType:
    """Return the result in a file, whatever its identity.

    :raises UserError: when the file is damaged or was modified.
    """
    sealed = documents.read_sealed(file, _Sealed, fix=_REMOVE)
    return documents.parse_model(kind, json.dumps(sealed.result), file, _REMOVE)


def make_folder(folder: Path) -> None:
    """Make a folder for results if it does not exist; raise UserError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{folder} cannot be created ({error.strerror}); choose another folder with --out") from None
