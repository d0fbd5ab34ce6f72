"""SHA-256 digests of files, and lists of them that detect later changes.

A run's folder and an exported model have such a list, ``planaria.sha256``. Its first line, a digest of the others, is a
comment to `sha256sum -c planaria.sha256`.
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
"""file of a folder → valid digests: while it is being replaced, the old one and the new"""


def of(content: bytes) -> str:
    """Return the SHA-256 (hex)."""
    return hashlib.sha256(content).hexdigest()


def of_file(path: Path) -> str:
    """Return the SHA-256 (hex) of a file of any size; releases the GIL.

    :raises OSError: if it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read(folder: Path) -> Sums:
    """Return a folder's list; empty without one.

    :raises UserError: if it is damaged.
    """
    path, fix = folder / FILE, f"restore it, or create it again with `planaria run check {folder} --accept`"
    if not path.is_file():
        return {}
    head, _, body = documents.read_text(path, MAX_BYTES, fix).partition("\n")
    lines = [_LINE.fullmatch(line) for line in body.splitlines()]
    if head != _header(body) or not all(lines):
        raise UserError(f"{path}: damaged; {fix}")
    sums: Sums = {}
    for line in filter(None, lines):
        sums[line[2]] = (*sums.get(line[2], ()), line[1])
    return sums


def write(folder: Path, sums: Mapping[str, Iterable[str]]) -> None:
    body = "".join(f"{digest}  {name}\n" for name, digests in sorted(sums.items()) for digest in digests)
    atomic.write_text(folder / FILE, f"{_header(body)}\n{body}")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder and add them to its list of digests.

    Each write is atomic: if the process is killed, no file looks damaged.

    :raises OSError: if the folder is not writable or its disk is full.
    """
    new: Sums = {name: (of(content),) for name, content in files.items()}
    before = read(folder)
    write(folder, before | {name: (*before.get(name, ()), *digest) for name, digest in new.items()})
    for name, content in files.items():
        atomic.write_bytes(folder / name, content)
    write(folder, before | new)


def replace_list(folder: Path, names: Iterable[str]) -> list[str]:
    """Replace a folder's list with the current digests of these files; return the names that had changed."""
    try:
        before = read(folder)
    except UserError:
        before = {}
    now = {name: (of_file(folder / name),) for name in names if (folder / name).is_file()}
    write(folder, now)
    return sorted(name for name in {*before, *now} if now.get(name, ("",))[0] not in before.get(name, ()))


def require(folder: Path, names: Iterable[str], sums: Sums) -> None:
    """Check these files against the list ``sums`` of their folder.

    :raises UserError: naming the first file that is missing, unlisted or changed.
    """
    for name in names:
        path, digests = folder / name, sums.get(name, ())
        fix = f"restore it, or accept the loss with `planaria run check {folder} --accept`"
        if not path.exists():
            if digests:
                raise UserError(f"{path} is missing; {fix}")
            continue
        if not digests:
            raise UserError(f"{path}: {FILE} does not list it, so something else wrote it; {fix}")
        require_file(path, digests, fix)


def require_file(path: Path, listed: Iterable[str], fix: str) -> None:
    """Check a file against its known digests.

    :raises UserError: ending with ``fix``, if it cannot be read or has none of them.
    """
    try:
        digest = of_file(path)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({(error.strerror or str(error)).lower()}); {fix}") from None
    expected = tuple(listed)
    if digest not in expected:
        raise UserError(
            f"{path} has changed since it was written (SHA-256 {digest[:12]}…, then {expected[-1][:12]}…); {fix}"
        )


def _header(body: str) -> str:
    return f"# of the lines below: {of(body.encode())}"
