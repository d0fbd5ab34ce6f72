"""Commands that show runs in a browser: watch, and the flags of train --live."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from planaria.cli.flags import Commands, command
from planaria.cli.serving import add_place, address, require_server, token_in
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.report.live_page.serving import Address


def add(commands: Commands) -> None:
    watch = command(commands, "watch", "show runs in a browser, live or played back", _watch)
    watch.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="the run's folder; several are side by side")
    add_place(watch, "--")
    watch.add_argument("--chaos", action="store_true", help="let watchers kill, freeze, slow and cut workers")
    watch.add_argument("--until-closed", action="store_true", help=argparse.SUPPRESS)


def add_live(train: argparse.ArgumentParser) -> None:
    """Add the flags of ``train`` for its live page."""
    live = train.add_argument_group("live page")
    live.add_argument("--live", action="store_true", help="show the run in a browser, at the address that is printed")
    add_place(live, "--live-")
    live.add_argument("--live-chaos", action="store_true", help="let watchers kill, freeze, slow and cut workers")


def live_of(given: argparse.Namespace) -> Address | None:
    """Return the address of the live page of ``train``; None without --live.

    :raises UserError: if a flag is given that requires --live.
    """
    if not given.live:
        flags = ("at", "name", "token-file", "chaos")
        if extra := [flag for flag in flags if getattr(given, f"live_{flag}".replace("-", "_"))]:
            raise UserError(f"--live-{extra[0]}: requires --live")
        return None
    require_server("--live")
    if given.live_token_file is not None:
        token_in(given.live_token_file)
    return address(given.live_at, given.live_name, "--live-at")


def _watch(given: argparse.Namespace) -> int:
    from planaria.cli.commands.watch import watch

    require_server("watch")
    return watch(given.runs, address(given.at, given.name, "--at"), given.token_file, given.chaos, given.until_closed)
