"""``planaria watch``: runs, comparisons and swarms in a browser, live or played back; ``planaria train --live``."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Option

from planaria.cli.flags import command, switch
from planaria.cli.http_flags import (
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
    from planaria.report.live_page.app import InjectFault
    from planaria.report.live_page.http_server import ServerAddress

START_S = 30.0
"""seconds that the server of a new run may take to start; after that, the run continues without it"""
END_S = 8.0
"""seconds that the server may take to send the end of the run to its watchers"""
NICE = 10
"""niceness of the page's server relative to the run's workers"""
SLOW_FACTOR = 5.0
"""slowdown of the page's fault "slow" """
SLOW_S = 20.0
"""its duration, seconds"""
CUT_S = 5.0
"""duration of the page's fault "cut", seconds"""


PageContext = Callable[[Path], AbstractContextManager[object]]
"""serves the page of the run in a folder while its context lasts"""


def live_page(live: bool, at: str | None, names: list[str], token_file: Path | None, chaos: bool) -> PageContext | None:
    """Return the live page of ``train``, or None without --live.

    :raises UserError: if a flag is given that requires --live.
    """
    if not live:
        others = {"live-at": at, "live-name": names or None, "live-token-file": token_file, "live-chaos": chaos or None}
        if extra := next((name for name, given in others.items() if given is not None), None):
            raise UserError(f"--{extra} requires --live")
        return None
    require_server("--live")
    if token_file is not None:
        read_token(token_file)
    where = address(at, names, "--live-at")
    return lambda folder: serve_page(folder, where, token_file, chaos, print)


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
    require_server("watch")
    return _serve_until_closed(runs, address(at, name or [], "--at"), token_file, chaos, until_closed)


def _serve_until_closed(
    folders: Sequence[Path], address: ServerAddress, token_file: Path | None, chaos: bool, until_closed: bool
) -> int:
    """Serve the page of these runs until Ctrl-C; return the exit code.

    :raises UserError: before serving, if a folder is not a run, or another argument is invalid.
    """
    from planaria.report.live_page.app import FolderFollower, Page
    from planaria.report.live_page.guard import new_token
    from planaria.report.live_page.http_server import Server, serve
    from planaria.report.live_page.limits import MAX_RUNS

    if len(folders) > MAX_RUNS:
        raise UserError(f"watch: shows at most {MAX_RUNS} runs, not {len(folders)}")
    token = new_token() if token_file is None else read_token(token_file)
    if until_closed:
        os.nice(NICE)
    sources = [FolderFollower(folder, name) for folder, name in zip(folders, display_names(folders), strict=True)]
    page = Page(sources, _fault_injector() if chaos else None)

    def announce(where: str) -> None:
        print(where if until_closed else f"live page     {where}", flush=True)

    try:
        serve(Server(page, address, token, announce), sys.stdin.fileno() if until_closed else None)
    except KeyboardInterrupt:
        return 0
    return 0


def display_names(folders: Sequence[Path]) -> list[str]:
    """Return names of these runs: the last parts of their paths, or whole paths if those are not unique.

    :raises UserError: if a folder is listed twice.
    """
    whole = [folder.resolve() for folder in folders]
    if repeated := next((folder for i, folder in enumerate(whole) if folder in whole[:i]), None):
        raise UserError(f"{repeated} is listed twice; list each run once")
    short = [folder.name for folder in whole]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


def _fault_injector() -> InjectFault:
    """Return a function that injects the page's faults as ``planaria run chaos`` does; its imports run in a thread."""
    ready = threading.Thread(target=importlib.import_module, args=("planaria.cli.fault_injection",), daemon=True)
    ready.start()

    def inject_fault(folder: Path, worker: str, incarnation: int, fault: str) -> str:
        ready.join()
        from planaria.cli import fault_injection

        target = f"worker={worker}"
        fault_injection.require_incarnation(folder, worker, incarnation)
        match fault:
            case "kill":
                return fault_injection.send_signal(folder, "kill", target)
            case "freeze":
                return fault_injection.send_signal(folder, "stop", target)
            case "slow":
                return fault_injection.request_fault(
                    folder, target, {"signal": "slow", "strength": SLOW_FACTOR, "resume_after_s": SLOW_S}
                )
            case _:
                return fault_injection.request_fault(folder, target, {"signal": "cut", "resume_after_s": CUT_S})

    return inject_fault


@contextmanager
def serve_page(
    folder: Path, address: ServerAddress, token_file: Path | None, chaos: bool, notify: Callable[[str], None]
) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the page of a run in a separate process while the context lasts.

    If the server does not start, report that and continue.
    """
    arguments = ["watch", str(folder), "--at", f"{address.host}:{address.port}", "--until-closed"]
    arguments += [word for name in address.names for word in ("--name", name)] + ["--chaos"] * chaos
    arguments += ["--token-file", str(token_file)] if token_file is not None else []
    process = subprocess.Popen(
        [sys.executable, "-m", "planaria", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # a terminal's Ctrl-C stops the run, while the page shows its end
    )
    try:
        answer = _first_line(process)
        up = answer.startswith("http")
        notify(f"live page     {answer}" if up else f"live page     none: {answer or 'its server did not start'}")
        yield process
    finally:
        _stop_server(process)
        notify(f"watch again   planaria watch {folder}")


def _first_line(process: subprocess.Popen[bytes]) -> str:
    """Return the server's first line: its address, or why it failed."""
    assert process.stdout is not None
    timer = threading.Timer(START_S, process.kill)
    timer.start()
    try:
        return process.stdout.readline().decode(errors="replace").strip()
    finally:
        timer.cancel()


def _stop_server(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
