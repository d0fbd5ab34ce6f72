"""A swarm on one machine: every peer is a process that may exit without affecting the others."""

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
from planaria.common.logs import DEFAULT, LogSettings, configure, from_environment
from planaria.common.signals import describe_exit, interrupt_on_stop
from planaria.config.registry import blame_custom_code
from planaria.runtime.fleet.process import WorkerProcess
from planaria.runtime.fleet.spawner import spawner
from planaria.swarm.assemble import assemble, selected_custom_classes
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import peer_config, peer_names
from planaria.swarm.records.lines import LOG, PEERS, Finished, Log, LogRecord, follow

PRELOAD = [__name__]
"""modules that the fork server imports for peers"""
POLL_S = 0.1
GRACE_S = 5.0
"""seconds for peers to stop after SIGTERM"""

OnRecord = Callable[[str, LogRecord], None]
OnExit = Callable[[str, str], None]


def board_address(config: SwarmConfig, folder: Path) -> str:
    """Return the board's address, by default a folder of the run."""
    return config.board or str(folder / "board")


def own_identity(config: SwarmConfig, name: str, folder: Path) -> PeerIdentity:
    """Return the identity of a peer that this machine starts.

    On the run's own board it is derived from the seed, so that runs repeat to the bit: ids order the completions.
    On a shared board it is drawn at random and saved in the peer's folder.
    """
    if config.board:
        return PeerIdentity.load_or_create(folder / PEERS / name / "identity.pem")
    secret = sha256(f"planaria drill {config.seed} {name}".encode()).digest()
    return PeerIdentity(Ed25519PrivateKey.from_private_bytes(secret))


class LiveSwarm:
    """The processes of one run."""

    def __init__(self, config: SwarmConfig, folder: Path) -> None:
        self.config, self.folder = config, folder
        self._spawner = spawner()
        self.processes: dict[str, WorkerProcess] = {}

    def start(self, name: str) -> None:
        """Start or restart a peer; it catches up from the board."""
        config = peer_config(self.config, name)
        target = partial(_run_peer, config.model_dump_json(), name, self.folder, from_environment())
        self.processes[name] = self._spawner.spawn(name, target, PRELOAD)

    def run(self, on_record: OnRecord, on_exit: OnExit) -> dict[str, int]:
        """Start all peers and follow their records until the last one exits; return each one's exit code.

        ``on_exit`` may restart a peer that failed. No process of the run is left in any case.

        :raises KeyboardInterrupt: at Ctrl-C, SIGTERM and the like.
        """
        readers = {name: follow(self.folder / PEERS / name / LOG) for name in peer_names(self.config)}
        with interrupt_on_stop():
            try:
                for name in peer_names(self.config):
                    self.start(name)
                ended: set[WorkerProcess] = set()
                while running := set(self.processes.values()) - ended:
                    time.sleep(POLL_S)
                    exited = {process for process in running if process.exitcode is not None}
                    for name, reader in readers.items():
                        for record in reader():
                            on_record(name, record)
                    for process in sorted(exited, key=lambda process: process.name):
                        if process.exitcode:
                            on_exit(process.name, process.failure or describe_exit(process.exitcode))
                    ended |= exited
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


def describe_failures(codes: Mapping[str, int]) -> list[str]:
    return [f"{name} {describe_exit(code)}" for name, code in sorted(codes.items()) if code]


def _run_peer(config_json: str, name: str, folder: Path, logs: LogSettings = DEFAULT) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the swarm stops peers with SIGTERM
    config = SwarmConfig.model_validate_json(config_json)
    configure(logs.level or "warning", logs.json, run=config.name, peer=name)
    torch.set_num_threads(config.policy.threads)
    try:
        identities = {peer: own_identity(config, peer, folder) for peer in peer_names(config)}
        local_peers = {identity.peer for identity in identities.values()} if config.rounds.gather else set()
        with blame_custom_code(partial(selected_custom_classes, config)):
            assemble(config, name, folder, board_address(config, folder), identities[name], known=local_peers).run()
    except (UserError, RunStopped) as error:
        Log(folder / PEERS / name / LOG).append(Finished(reason=str(error)))
        print(f"planaria: {name}: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)
    except OSError as error:  # the disk may be full, so the log may have no room either
        print(f"planaria: {name}: {error.filename or folder}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)
