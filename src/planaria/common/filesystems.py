"""Places that are no folders of this machine: any that fsspec knows, by URL."""

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
"""protocol → the package that reads it, and the extra that brings this package"""


def is_url(text: str) -> bool:
    """Whether this is a URL, or one behind another (``zip://::https://…``), and no path."""
    return "://" in text or "::" in text


def shown(url: str) -> str:
    """The URL without the password that may be in it."""
    return re.sub(r"//[^/@]*@", "//", url)


def filesystem(url: str, setting: str, **options: Any) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, of which nothing is cached, and the path on it; ``options`` are its kind's own.

    :raises UserError: when its kind is not known, or needs a package that is missing; ``setting`` named the URL.
    :raises OSError: when it cannot be reached.
    """
    with reached(url, "open it"):
        try:
            system, path = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False, **options)
        except (ImportError, ValueError) as error:
            if isinstance(error, ImportError):
                raise _missing(url, setting, error) from None
            fix = "name a folder, or a kind of URL known to fsspec"
            raise UserError(f"{setting} = {shown(url)!r}: {_line(error)}; {fix}") from None
    return system, str(path)


def _missing(url: str, setting: str, error: ImportError) -> UserError:
    """Return the error for a protocol whose package is not installed; no extra brings those of rare protocols."""
    what = f"{setting} = {shown(url)!r}"
    for protocol in re.findall(r"(\w+)://", url):
        if protocol in _EXTRAS:
            return missing_package(what, *_EXTRAS[protocol])
    return UserError(f"{what}: {_line(error)}")


@contextmanager
def reached(url: str, what: str) -> Iterator[None]:
    """Any failure of a file system, which may be of any kind, as an OSError that names the place and what was done."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        cause = error.__cause__ or error  # of a web server that is out of reach, only the cause says so
        reason = "there is nothing" if isinstance(cause, FileNotFoundError) else _line(cause)
        raise OSError(f"{shown(url)}: cannot {what} ({reason})") from error


@contextmanager
def required(setting: str) -> Iterator[None]:
    """What cannot be reached is the user's to mend, who named it in ``setting``: an OSError becomes a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{setting}: {error}; check address, rights and network") from error


def fetch(system: AbstractFileSystem, path: str, to: Path, most: int) -> None:
    """Copy a file that should have at most so many bytes, and read no more of it than it says it has.

    :raises UserError: when it has more, or more or fewer than it says, or ``to`` has no room for it.
    """
    size, place = system.info(path)["size"], shown(system.unstrip_protocol(path))
    if not isinstance(size, int) or not 0 <= size <= most:
        raise UserError(f"{place}: has {size} bytes where at most {most} can be; is that planaria's, and undamaged?")
    to.parent.mkdir(parents=True, exist_ok=True)
    if size > (free := shutil.disk_usage(to.parent).free):
        raise UserError(f"{place}: takes {size} bytes, and {to.parent} has room for {free}; make room")
    left = size
    with system.open(path, "rb", block_size=_PIECE) as there, to.open("wb") as here:
        while piece := there.read(min(_PIECE, left + 1)):
            if len(piece) > left:
                raise UserError(f"{place}: has more than the {size} bytes that its store announces; it is damaged")
            left -= len(piece)
            here.write(piece)
    if left:
        raise UserError(f"{place}: ends after {size - left} of {size} bytes; it is damaged")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
