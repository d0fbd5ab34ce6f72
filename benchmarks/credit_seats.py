"""Three processes on a board in a folder, each the committee of one channel; one is killed at one of its messages."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from planaria.swarm.board.identity import Identity
from planaria.swarm.board.store import Retry, Store
from planaria.swarm.credits.messages import Order, PeerSigner, verify_peer
from planaria.swarm.credits.over_board import Seat, publish, take_part
from planaria.swarm.credits.psync import Channel, Member

HOPS, MEMBERS, AMOUNT, EACH = 3, 4, 3, 10
DEADLINE_S = 60.0
WRITES = (12, 16, 12)
"""files that each channel's committee writes for an order that is paid: votes to lock and to settle, and passed on"""


class Dying(Store):
    """Its process is killed before, or after, its so-manieth file."""

    def __init__(self, url: str, at: int, after: bool) -> None:
        super().__init__(url, Retry(), time.monotonic, time.sleep)
        self._left, self._after = at, after

    def write(self, path: str, data: bytes) -> bool:
        self._left -= 1
        if self._left == 0 and not self._after:
            os.kill(os.getpid(), signal.SIGKILL)
        written = super().write(path, data)
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return written


@dataclass
class Route:
    """Who takes part, with keys."""

    keys: list[list[PeerSigner]]
    operator: PeerSigner
    dry: int = -1

    @classmethod
    def fresh(cls, dry: int = -1) -> Route:
        keys = [[PeerSigner(Identity.fresh()) for _ in range(MEMBERS)] for _ in range(HOPS)]
        return cls(keys, PeerSigner(Identity.fresh()), dry)

    def committees(self) -> dict[str, tuple[str, ...]]:
        return {f"c{hop}": tuple(key.name for key in keys) for hop, keys in enumerate(self.keys)}

    def order(self) -> Order:
        parties, channels = (tuple(f"{kind}{n}" for n in range(HOPS + more)) for kind, more in (("p", 1), ("c", 0)))
        return Order(parties=parties, channels=channels, numbers=(0,) * HOPS, amount=AMOUNT).signed(self.operator)

    def sit(self, hop: int, store: Store, told: Connection) -> None:
        """In a process: the committee of a channel, to the end."""
        has = (0 if hop == self.dry else EACH, EACH)
        channel = Channel(f"c{hop}", (f"p{hop}", f"p{hop + 1}"), has)
        members = [Member(key, channel, self.committees(), self.operator.name, verify_peer) for key in self.keys[hop]]
        take_part([Seat(member, self.committees(), store) for member in members], 1, DEADLINE_S)
        told.send([(member.settled[0], member.channel.has) for member in members])


def plain(board: Path) -> Store:
    return Store(str(board), Retry(), time.monotonic, time.sleep)


def settled(
    board: Path, dies: int, at: int, after: bool, dry: int = -1
) -> tuple[bool, list[bool], list[tuple[int, int]]]:
    """One process is killed at its ``at``-th file and started again: (was it?, what members found, what ends have)."""
    route, fork = Route.fresh(dry), multiprocessing.get_context("fork")
    publish(plain(board), route.order())
    pipes = [fork.Pipe(duplex=False) for _ in range(HOPS)]

    def begun(hop: int, store: Store) -> BaseProcess:
        process = fork.Process(target=route.sit, args=(hop, store, pipes[hop][1]), daemon=True)
        process.start()
        return process

    running = [begun(hop, Dying(str(board), at, after) if hop == dies else plain(board)) for hop in range(HOPS)]
    running[dies].join(DEADLINE_S)
    killed = running[dies].exitcode == -signal.SIGKILL
    if killed:
        running[dies] = begun(dies, plain(board))
    for process in running:
        process.join(DEADLINE_S)
        if process.exitcode != 0:
            raise RuntimeError(f"a process ended with {process.exitcode}")
    told = [member for pipe, _ in pipes for member in pipe.recv()]
    return killed, [paid for paid, _ in told], [has for _, has in told]
