"""Results of trials on disk: written whole, with a digest, and read back only for the same identity."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from planaria.common import atomic, documents
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.lab.trials.identity import Identity

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
