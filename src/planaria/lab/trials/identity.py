"""The identity of a trial: planaria's version, the configuration and the chosen code, on which its result depends."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType

from planaria import __version__
from planaria.common import digests, documents
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
