"""Flags of the commands that serve HTTP: the address to listen on, and the file with the token."""

from __future__ import annotations

import importlib.util
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planaria.common.errors import UserError, install

if TYPE_CHECKING:
    from planaria.report.live_page.serving import Address

ANYWHERE = "127.0.0.1:0"
SHORTEST_TOKEN, LONGEST_TOKEN = 16, 200


def add_place(parser: Any, prefix: str) -> None:
    """Add the flags of the address, with names that start with ``prefix``."""
    help_text = "where to listen (default: a free port of 127.0.0.1, which no other machine can reach)"
    parser.add_argument(f"{prefix}at", metavar="HOST:PORT", help=help_text)
    named = "another name that browsers may call the server by, such as a proxy's; can be given several times"
    parser.add_argument(f"{prefix}name", metavar="HOST[:PORT]", action="append", default=[], help=named)
    token = "use the token in this file (default: a new one)"
    parser.add_argument(f"{prefix}token-file", type=Path, metavar="FILE", help=token)


def address(at: str | None, names: list[str], flag: str) -> Address:
    """Parse the HOST:PORT of ``flag``; UserError if ``at`` is not an address."""
    from planaria.report.live_page.serving import Address

    host, colon, port = (at or ANYWHERE).rpartition(":")
    if not (colon and host and port.isascii() and port.isdigit() and int(port) < 1 << 16):
        raise UserError(f"{flag} {at}: not an address; write HOST:PORT, such as 127.0.0.1:8080")
    return Address(host.removeprefix("[").removesuffix("]"), int(port), tuple(names))


def require_server(word: str) -> None:
    """:raises UserError: if the packages that serve HTTP are not installed."""
    if missing := [name for name in ("starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        raise UserError(f"{word}: needs {' and '.join(missing)}; install them with: {install('live')}")


def token_in(file: Path) -> str:
    """Read the token from a file; UserError if other users can read the file, or it does not hold a token."""
    from planaria.common import documents

    try:
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO) & ~(stat.S_IRGRP | stat.S_IXGRP):
            raise UserError(f"{file}: other users can read or change it; fix that with `chmod 600 {file}`")
        with file.open("rb") as opened:
            token = documents.bounded(opened, 4 * LONGEST_TOKEN).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read ({getattr(error, 'strerror', None) or error})") from None
    plain = token.isascii() and token.replace("-", "").replace("_", "").isalnum()
    if not plain or not SHORTEST_TOKEN <= len(token) <= LONGEST_TOKEN:
        kinds = f"{SHORTEST_TOKEN} to {LONGEST_TOKEN} letters, digits, - and _"
        raise UserError(f"{file}: has no token ({kinds}); create one with `openssl rand -hex 32 > {file}`")
    return token
