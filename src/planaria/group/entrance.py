"""Access to a group: the start of its controller, and a member's connection to it."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import RunStopped, UserError
from planaria.runtime.engine.machine_service import KnownRunAccess
from planaria.runtime.fleet.joined_machine import own_name

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
    killer = threading.Timer(START_S, process.kill)
    killer.start()
    line = process.stdout.readline()
    killer.cancel()
    answer = json.loads(line) if line else {"error": "group: its controller did not start; see its error above"}
    if "error" in answer:
        raise UserError(answer["error"])
    return answer["address"], Path(answer["folder"])


@dataclass(frozen=True)
class GroupAccess(KnownRunAccess):
    """Access to a group's controller."""

    patience_s: float

    def no_answer_error(self, error: OSError) -> Exception:
        return RunStopped(
            f"{self.at}: no answer for {self.patience_s:g} s ({error.strerror or error}); check the "
            "address, and that the host's loop has begun"
        )
