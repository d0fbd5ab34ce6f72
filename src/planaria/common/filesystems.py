"""Remote file systems: any that fsspec supports, by URL."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec.core
from fsspec import AbstractFileSystem

from planaria.common.errors import UserError, missing_package

_PIECE = 8 << 20
_EXTRAS = {"s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3"), "http": ("aiohttp", "http"), "https": ("aiohttp", "http")}
"""protocol → the package that reads it, and the extra that installs it"""


def is_url(text: str) -> bool:
    """Whether ``text`` is a URL or a chain of URLs (``zip://::https://…``), not a path."""
    return "://" in text or "::" in text


def without_password(url: str) -> str:
    return re.sub(r"//[^/@]*@", "//", url)


def filesystem(url: str, setting: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """Return a URL's file system, without caching, and the path on it; ``options`` are passed to fsspec.

    :raises UserError: if its protocol is unknown or needs a missing package; ``setting`` names the URL.
    :raises OSError: if it cannot be reached.
    """
    with wrap_errors(url, "open it"):
        try:
            system, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            if isinstance(error, ImportError):
                raise _missing(url, setting, error) from None
            fix = "use a folder, or a kind of URL known to fsspec"
            raise UserError(f"{setting} = {without_password(url)!r}: {_line(error)}; {fix}") from None
    return system, str(path)


def _missing(url: str, setting: str, error: ImportError) -> UserError:
    """Return the error for a protocol whose package is not installed; rare protocols have no extra."""
    label = f"{setting} = {without_password(url)!r}"
    for protocol in re.findall(r"(\w+)://", url):
        if protocol in _EXTRAS:
            return missing_package(label, *_EXTRAS[protocol])
    return UserError(f"{label}: {_line(error)}")


@contextmanager
def wrap_errors(url: str, label: str) -> Iterator[None]:
    """Turn any failure of a file system into an OSError that names the location and the operation."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # for an unreachable web server, only the cause has the reason
        reason = "there is nothing" if isinstance(cause, FileNotFoundError) else _line(cause)
        raise OSError(f"{without_password(url)}: cannot {label} ({reason})") from error


@contextmanager
def require_reachable(setting: str) -> Iterator[None]:
    """Turn an OSError into a UserError that names the user's ``setting``."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{setting}: {error}; check the address, your permissions and the network") from error


def fetch(system: AbstractFileSystem, path: str, to: Path, max_bytes: int) -> None:
    """Copy a file of at most ``max_bytes`` bytes, reading no more than its announced size.

    :raises UserError: if it is larger, its size differs from the announced one, or ``to`` has no room.
    """
    size, location = system.info(path)["size"], without_password(system.unstrip_protocol(path))
    if not isinstance(size, int) or not 0 <= size <= max_bytes:
        raise UserError(
            f"{location}: its size is {size}, which must be at most {max_bytes} bytes; check that planaria wrote it"
        )
    to.parent.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(to.parent).free):
        raise UserError(f"{location} takes {size} bytes, and {to.parent} has {free} free; free some space")
    left = size
    with system.open(path, "rb", block_size=_PIECE) as source, to.open("wb") as target:
        while piece := source.read(min(_PIECE, left + 1)):
            if len(piece) > left:
                raise UserError(f"{location} has more than the {size} bytes that its store announces; it is damaged")
            left -= len(piece)
            target.write(piece)
    if left:
        raise UserError(f"{location}: ends after {size - left} of {size} bytes; it is damaged")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
