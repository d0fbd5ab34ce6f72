"""The command that shows runs in a browser, and the live page of ``train``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from typer import Argument, Option

from planaria.cli.flags import command, switch
from planaria.cli.serving import (
    CHAOS,
    address,
    address_option,
    name_option,
    read_token,
    require_server,
    token_option,
)
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.report.live_page.serving import ServerAddress


class Live(NamedTuple):
    """The flags of ``train`` for its live page: the first, and those that require it."""

    live: bool
    at: str | None
    name: list[str]
    token_file: Path | None
    chaos: bool


def live_address(flags: Live) -> ServerAddress | None:
    """Return the address of the live page of ``train``, or None without --live.

    :raises UserError: if a flag is given that requires --live.
    """
    if not flags.live:
        if extra := [flag for flag in flags._fields if getattr(flags, flag)]:
            raise UserError(f"--live-{extra[0].replace('_', '-')} requires --live")
        return None
    require_server("--live")
    if flags.token_file is not None:
        read_token(flags.token_file)
    return address(flags.at, flags.name, "--live-at")


@command("watch")
def _watch(
    runs: Annotated[list[Path], Argument(metavar="RUN", help="the run's folder; several are side by side")],
    *,
    at: Annotated[str | None, address_option()] = None,
    name: Annotated[list[str] | None, name_option()] = None,
    token_file: Annotated[Path | None, token_option()] = None,
    chaos: Annotated[bool, switch("--chaos", CHAOS)] = False,
    until_closed: Annotated[bool, Option("--until-closed", hidden=True)] = False,
) -> int:
    """Show runs in a browser, live or played back."""
    from planaria.cli.commands.watch import watch

    require_server("watch")
    return watch(runs, address(at, name or [], "--at"), token_file, chaos, until_closed)
