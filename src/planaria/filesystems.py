"""Places that are no folders of this machine: any that fsspec knows, by URL."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import fsspec.core
from fsspec import AbstractFileSystem

from planaria.errors import UserError


def is_url(text: str) -> bool:
    """Whether this is a URL, or one behind another (``zip://::https://…``), and no path."""
    return "://" in text or "::" in text


def shown(url: str) -> str:
    """The URL without the password that may be in it."""
    return re.sub(r"//[^/@]*@", "//", url)


def filesystem(url: str, setting: str) -> tuple[AbstractFileSystem, str]:
    """The file system of a URL, of which nothing is cached, and the path on it.

    :raises UserError: when its kind is not known, or needs a package that is missing; ``setting`` named the URL.
    """
    try:
        system, root = fsspec.core.url_to_fs(url, skip_instance_cache=True, use_listings_cache=False)
    except (ImportError, ValueError) as error:
        mend = "; for S3 `pip install -e '.[s3]'`" if isinstance(error, ImportError) else ""
        raise UserError(f"{setting} = {shown(url)!r}: {_line(error)}{mend}") from None
    return system, root.rstrip("/")


@contextmanager
def reached(url: str, what: str) -> Iterator[None]:
    """Any failure of a file system, which may be of any kind, as an OSError that names the place and what was done."""
    try:
        yield
    except Exception as error:
        reason = "there is nothing" if isinstance(error, FileNotFoundError) else _line(error)
        raise OSError(f"{shown(url)}: cannot {what} ({reason})") from error


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
