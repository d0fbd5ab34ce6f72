"""A swarm on one machine: every peer a process of its own, which may die without taking the others along."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from planaria.common.errors import RunStopped, UserError
from planaria.common.signals import ending, interrupted
from planaria.config.registry import blaming
from planaria.runtime.fleet.process import Child
from planaria.runtime.fleet.spawner import spawner
from planaria.swarm.assemble import assemble, own_classes
from planaria.swarm.board.identity import Identity
from planaria.swarm.config import SwarmConfig
from planaria.swarm.records.lines import LOG, PEERS, Finished, Log, Record, follow
from planaria.swarm.setting import names, of_peer

PRELOAD = [__name__]
"""modules that the fork server imports for peers"""
POLL_S = 0.1
GRACE_S = 5.0
"""how long peers that are asked to stop may take"""

Told = Callable[[str, Record], None]
Died = Callable[[str, str], None]


def board_of(config: SwarmConfig, folder: Path) -> str:
    """Where the peers publish."""
    return config.board or str(folder / "board")


def own_identity(config: SwarmConfig, name: str, folder: Path) -> Identity:
    """The identity of a peer that this machine starts itself.

    On a board of the run's own it follows from the seed, so that a run repeats to the bit: peers' ids order what is
    learned from. Elsewhere, among strangers, it is drawn at random and kept in the peer's folder.
    """
    if config.board:
        return Identity.kept(folder / PEERS / name / "identity.pem")
    secret = sha256(f"planaria drill {config.seed} {name}".encode()).digest()
    return Identity(Ed25519PrivateKey.from_private_bytes(secret))


class LiveSwarm:
    """The processes of one run, from their start to their end."""

    def __init__(self, config: SwarmConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._spawner = spawner()
        self.processes: dict[str, Child] = {}

    def start(self, name: str) -> None:
        """Start a peer, or start it again: it then catches up with the others by what is on the board."""
        config = of_peer(self.config, name)
        be = partial(_be, config.model_dump_json(), name, self.folder)
        self.processes[name] = self._spawner.spawn(name, be, PRELOAD)

    def run(self, told: Told, died: Died) -> dict[str, int]:
        """Start all peers and follow what they note until the last one ends: exit code of each.

        ``died`` may start a peer again. However this ends, no process of the run is left.

        :raises KeyboardInterrupt: at Ctrl-C, SIGTERM and the like.
        """
        readers = {name: follow(self.folder / PEERS / name / LOG) for name in names(self.config)}
        with interrupted():
            try:
                for name in names(self.config):
                    self.start(name)
                ended: set[Child] = set()
                while going := set(self.processes.values()) - ended:
                    time.sleep(POLL_S)
                    gone = {process for process in going if process.exitcode is not None}
                    for name, reader in readers.items():
                        for record in reader():
                            told(name, record)
                    for process in sorted(gone, key=lambda process: process.name):
                        if process.exitcode:
                            died(process.name, process.failure or ending(process.exitcode))
                    ended |= gone
            finally:
                self.stop()
        return {name: process.exitcode or 0 for name, process in self.processes.items()}

    def stop(self) -> None:
        """Ask all peers to stop, and kill those that do not."""
        for process in self.processes.values():
            if process.exitcode is None:
                process.signal(signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        for process in self.processes.values():
            if process.join(max(0.0, until - time.monotonic())) is None:
                process.signal(signal.SIGKILL)
                process.join()


def failures(codes: Mapping[str, int]) -> list[str]:
    return [f"{name} {ending(code)}" for name, code in sorted(codes.items()) if code]


def _be(config_json: str, name: str, folder: Path) -> None:
    """A peer's process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # by which the swarm asks it to stop
    config = SwarmConfig.model_validate_json(config_json)
    torch.set_num_threads(config.policy.threads)
    try:
        identities = {peer: own_identity(config, peer, folder) for peer in names(config)}
        known = {identity.peer for identity in identities.values()} if config.rounds.gather else set()
        with blaming(partial(own_classes, config)):
            assemble(config, name, folder, board_of(config, folder), identities[name], known=known).run()
    except (UserError, RunStopped) as error:
        Log(folder / PEERS / name / LOG).note(Finished(reason=str(error)))
        print(f"planaria: {name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:  # a full disk: there may be no room for a word in the log either
        print(f"planaria: {name}: {error.filename or folder}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
