"""Access to a group: the start of its controller, and a member's connection to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import RunConfig
from planaria.runtime.engine.machine_service import KnownRunAccess
from planaria.runtime.fleet.joined_machine import own_name
from planaria.runtime.fleet.joining import standby_commands

START_S = 60.0
"""limit for the controller's start"""


def start_controller(config: str, key: bytes) -> tuple[str, Path]:
    """Start the controller of a group; return its HOST:PORT and its folder.

    :raises UserError: if it cannot start.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", "planaria.group.controller"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps({"config": config, "key": key.hex(), "host": own_name()}) + "\n")
    process.stdin.close()
    killer = threading.Timer(START_S, os.killpg, (process.pid, signal.SIGKILL))  # with the controller that it forks
    killer.start()
    line = process.stdout.readline()
    killer.cancel()
    lost = "host: the group's controller ended before others could join; start again"
    answer = json.loads(line) if line else {"error": lost}
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["address"], Path(answer["folder"])


def invitation(config: RunConfig, name: str, address: str, key: str) -> Iterator[str]:
    """Yield the lines that tell how others join a group, or stand by to lead it.

    :param name: of the group's folder
    :param key: file with the key
    """
    home = str(Path.home())
    key = f"~{key.removeprefix(home)}" if key.startswith(f"{home}/") else key
    yield f"group at {address}; others join with planaria.join({address!r}) and a copy of {key}"
    for command in standby_commands(config.fleet, name, key):
        yield f"other machines may lead: with a copy of the key, `{command}`"
    if config.exchange.replicas > 1:
        yield f"the first step waits at most {config.fleet.join_s:g} s for {config.exchange.replicas} members"


@dataclass(frozen=True)
class GroupAccess(KnownRunAccess):
    """Access to a group's controller."""

    patience_s: float

    def no_answer_error(self, error: OSError) -> Exception:
        return RunStopped(
            f"{self.at}: no answer for {self.patience_s:g} s ({error.strerror or error}); check the "
            "address, that the host's loop has begun, and that the group has not ended"
        )
