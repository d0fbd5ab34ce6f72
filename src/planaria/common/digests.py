"""What was written, by digest: SHA-256 of files, and lists of them that say what has changed since.

A run's folder, and an exported model's, has such a list, ``planaria.sha256``. `sha256sum -c planaria.sha256` reads it
too: its first line, a digest of the others, is a comment to that.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from planaria.common import atomic, documents
from planaria.common.errors import UserError

FILE = "planaria.sha256"
MAX_BYTES = 1 << 20
_LINE = re.compile(r"([0-9a-f]{64})  (\S.*)")
Sums = dict[str, tuple[str, ...]]
"""file of a folder → digests that it may have: while it is being replaced, the old one and the new"""


def of(content: bytes) -> str:
    """SHA-256 (hex)."""
    return hashlib.sha256(content).hexdigest()


def of_file(path: Path) -> str:
    """SHA-256 (hex) of a file of any size, read in pieces; other threads run meanwhile.

    :raises OSError: when it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(folder: Path) -> Sums:
    """The list of a folder; empty without one.

    :raises UserError: when it is damaged.
    """
    path, mend = folder / FILE, f"bring it back, or make it anew with `planaria accept {folder}`"
    if not path.is_file():
        return {}
    head, _, body = documents.text(path, MAX_BYTES, mend).partition("\n")
    lines = [_LINE.fullmatch(line) for line in body.splitlines()]
    if head != _head(body) or not all(lines):
        raise UserError(f"{path}: damaged; {mend}")
    found: Sums = {}
    for line in filter(None, lines):
        found[line[2]] = (*found.get(line[2], ()), line[1])
    return found


def write(folder: Path, sums: Mapping[str, Iterable[str]]) -> None:
    """Replace the list of a folder."""
    body = "".join(f"{digest}  {name}\n" for name, digests in sorted(sums.items()) for digest in digests)
    atomic.write_text(folder / FILE, f"{_head(body)}\n{body}")


def put(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder and its list, each whole; who is killed in between leaves no file that looks changed.

    :raises OSError: when the folder cannot be written to, or its disk is full.
    """
    new: Sums = {name: (of(content),) for name, content in files.items()}
    before = read(folder)
    write(folder, before | {name: (*before.get(name, ()), *digest) for name, digest in new.items()})
    for name, content in files.items():
        atomic.write_bytes(folder / name, content)
    write(folder, before | new)


def accept(folder: Path, names: Iterable[str]) -> list[str]:
    """Make the list of a folder anew, from those of these files that are there; the names of what had changed."""
    try:
        before = read(folder)
    except UserError:
        before = {}
    now = {name: (of_file(folder / name),) for name in names if (folder / name).is_file()}
    write(folder, now)
    return sorted(name for name in {*before, *now} if now.get(name, ("",))[0] not in before.get(name, ()))


def require(folder: Path, names: Iterable[str], sums: Sums) -> None:
    """UserError naming the first of these files that is not as the list ``sums`` of its folder says."""
    for name in names:
        path, known = folder / name, sums.get(name, ())
        mend = f"bring it back, or accept that with `planaria accept {folder}`"
        if not path.exists():
            if known:
                raise UserError(f"{path}: is gone; {mend}")
            continue
        if not known:
            raise UserError(f"{path}: {FILE} does not name it, so something else wrote it; {mend}")
        require_file(path, known, mend)


def require_file(path: Path, known: Iterable[str], mend: str) -> None:
    """UserError, ending with ``mend``, when a file cannot be read or has none of the digests that are known of it."""
    try:
        found = of_file(path)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({(error.strerror or str(error)).lower()}); {mend}") from None
    expected = tuple(known)
    if found not in expected:
        raise UserError(
            f"{path}: has changed since it was written (SHA-256 {found[:12]}…, then {expected[-1][:12]}…); {mend}"
        )


def _head(body: str) -> str:
    return f"# of the lines below: {of(body.encode())}"
