"""Flags of the commands that serve HTTP: the address to listen on, and the file with the token."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import Option

from planaria.common.errors import UserError, install_command

if TYPE_CHECKING:
    from planaria.report.live_page.http_server import ServerAddress

ANYWHERE = "127.0.0.1:0"
MIN_TOKEN = 16
"""minimum length of a token"""
MAX_TOKEN = 200

CHAOS = "let watchers kill, freeze, slow and cut workers"
_AT = "where to listen (default: a free port of 127.0.0.1, which no other machine can reach)"
_NAMED = "another name that browsers may call the server by, such as a proxy's; can be repeated"
_TOKEN = "use the token in this file (default: a new one)"


def address_option(flag: str = "--at", panel: str | None = None) -> Any:
    """Return the flag of the address."""
    return Option(flag, metavar="HOST:PORT", help=_AT, rich_help_panel=panel)


def name_option(flag: str = "--name", panel: str | None = None) -> Any:
    """Return the flag for additional names, a list."""
    return Option(flag, metavar="HOST[:PORT]", help=_NAMED, rich_help_panel=panel)


def token_option(flag: str = "--token-file", panel: str | None = None) -> Any:
    """Return the flag of the file with the token."""
    return Option(flag, metavar="FILE", help=_TOKEN, rich_help_panel=panel)


def address(at: str | None, names: list[str], flag: str) -> ServerAddress:
    """Parse the HOST:PORT of ``flag``; UserError if ``at`` is not an address."""
    from planaria.report.live_page.http_server import ServerAddress

    host, colon, port = (at or ANYWHERE).rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UserError(f"{flag} {at}: not an address; use HOST:PORT, such as 127.0.0.1:8080")
    return ServerAddress(host.removeprefix("[").removesuffix("]"), int(port), tuple(names))


def require_server(word: str) -> None:
    """:raises UserError: if the packages that serve HTTP are not installed."""
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{word} needs {' and '.join(missing)}; install them with: {install_command('live')}")


def read_token(file: Path) -> str:
    """Read the token from a file; UserError if other users can read the file, or it does not hold a token."""
    from planaria.common import documents

    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~(stat.S_IRGRP | stat.S_IXGRP):
            raise UserError(f"{file}: other users can read or change it; fix that with `chmod 600 {file}`")
        with file.open("rb") as opened:
            token = documents.read_bounded(opened, 4 * MAX_TOKEN).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    plain = token.isascii() and token.replace("-", "").replace("_", "").isalnum()
    if not plain or not MIN_TOKEN <= len(token) <= MAX_TOKEN:
        kinds = f"{MIN_TOKEN} to {MAX_TOKEN} letters, digits, - and _"
        raise UserError(f"{file} has no token ({kinds}); create one with `openssl rand -hex 32 > {file}`")
    return token
