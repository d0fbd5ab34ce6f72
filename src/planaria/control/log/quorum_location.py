"""``quorum://HOST:PORT,HOST:PORT,HOST:PORT``: the location of a shared log at holders."""

from __future__ import annotations

import re
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.config.names import require_name

SCHEME = "quorum://"
_SIZES = (3, 5)
_ADDRESS = re.compile(r"([^/\s:,]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_LOOPBACK = re.compile(r"127\..*|localhost|\[::1\]")
"""hosts that may have several holders, for a trial on one machine"""


class QuorumLocation(NamedTuple):
    """A parsed location."""

    holders: tuple[str, ...]
    """HOST:PORT of each"""
    run: str
    """name of the run; empty for ``fleet.shared_log``"""


def parse_quorum_location(url: str, setting: str) -> QuorumLocation:
    """Parse ``quorum://HOST:PORT,HOST:PORT,HOST:PORT[/RUN]``.

    :raises UserError: naming ``setting``, if it is malformed, or its holders would not survive the loss of a machine.
    """
    listed, _, run = url.removeprefix(SCHEME).rstrip("/").partition("/")
    holders = tuple(at.strip() for at in listed.split(",") if at.strip())
    hosts = list[str]()
    for at in holders:
        address = _ADDRESS.fullmatch(at)
        if address is None or not 1 <= int(address[2]) <= 65535:
            raise UserError(f"{setting}: holder {at!r} is not an address; use HOST:PORT")
        if holders.count(at) > 1 or (address[1] in hosts and not _LOOPBACK.fullmatch(address[1])):
            raise UserError(f"{setting}: {address[1]} has two holders, which one loss would end; use another machine")
        hosts.append(address[1])
    if len(holders) not in _SIZES:
        raise UserError(f"{setting}: {len(holders)} holders; use 3, of which one may be lost, or 5, of which two may")
    if run:
        require_name(run, f"{setting}: run")
    return QuorumLocation(holders, run)
