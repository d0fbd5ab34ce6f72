"""Committee members that communicate over a board: one write-once file per message, no other state.

::

    {board}/credits/{channel}/{number}/order.json                      by the operator
    {board}/credits/{channel}/{number}/lock/{member}.json              a vote, also settle/
    {board}/credits/{channel}/{number}/from-{channel}-lock/{member}.json   a neighbour's certificate, also -settle/

A restarted member reads the files, its own votes first, and continues. Since files are never replaced, it cannot
contradict its earlier votes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from pydantic import ValidationError

from planaria.common.errors import RunStopped, UserError
from planaria.common.object_store import Store
from planaria.swarm.board import identity
from planaria.swarm.board.message import BadMessage
from planaria.swarm.credits.messages import MESSAGE, Committees, CreditOrder, Letter, StatementCertificate, Vote
from planaria.swarm.credits.psync import CommitteeMember

MAX_BYTES = 2**18
"""maximum size of a message; a certificate of 256 members has about 80 KB"""
PAUSE_S = 0.02


class PeerSigner:
    """Ed25519 by a peer's identity. The name is the peer id, a digest of the key; the signature contains the key."""

    def __init__(self, own: identity.PeerIdentity) -> None:
        self.name, self._own = own.peer, own

    def sign(self, data: bytes) -> str:
        return (self._own.public + self._own.sign(data)).hex()


def verify_peer(name: str, signature: str, data: bytes) -> bool:
    """:data:`Verify` for the signatures of a :class:`PeerSigner`."""
    if len(signature) != 2 * (32 + 64):
        return False
    public, signed = bytes.fromhex(signature[:64]), bytes.fromhex(signature[64:])
    return identity.peer_id(public) == name and identity.verify(public, signed, data)


def publish(store: Store, order: CreditOrder) -> None:
    """Publish an order to each committee on its route.

    :raises UserError: if another order has one of its numbers.
    """
    data = order.model_dump_json().encode()
    for channel, number in zip(order.channels, order.numbers, strict=True):
        path = f"{_slot(channel, number)}/order.json"
        if not store.write(path, data) and store.read(path, MAX_BYTES) != data:
            raise UserError(f"{store.place}/{path}: another order has this number; take the channel's next one")


class BoardMember:
    """One member that reads from and writes to a board."""

    def __init__(self, member: CommitteeMember, committees: Committees, store: Store) -> None:
        self.member, self._committees, self._store = member, committees, store
        self._seen: set[str] = set()

    def look(self) -> bool:
        """Process new messages of the current order and write the replies; return whether there were any."""
        number, news = self.member.channel.next, False
        for path in self._paths(number):
            if path in self._seen:
                continue
            letters = self._read(path)
            if letters is None:
                continue
            news = True
            self._seen.add(path)
            for letter in letters:
                self._write(letter)
            if self.member.channel.next > number:
                self._seen.clear()
                break
        return news

    def _paths(self, number: int) -> Iterator[str]:
        """Paths of possible messages for this member, its own votes first."""
        channel, me = self.member.channel.name, self.member.name
        at = _slot(channel, number)
        own = sorted(self._committees[channel], key=lambda name: name != me)
        yield from (f"{at}/{phase}/{me}.json" for phase in ("lock", "settle"))
        yield f"{at}/order.json"
        yield from (f"{at}/{phase}/{name}.json" for phase in ("lock", "settle") for name in own if name != me)
        order = self.member.order(number)
        hop = -1 if order is None else order.hop(channel, number)
        for index, phases in ((hop - 1, ("lock", "settle")), (hop + 1, ("settle",))):
            if order is not None and 0 <= index < len(order.channels):
                neighbour = order.channels[index]
                for phase in phases:
                    yield from (f"{at}/from-{neighbour}-{phase}/{n}.json" for n in self._committees[neighbour])

    def _read(self, path: str) -> list[Letter] | None:
        """Return the replies to the message at ``path``; None if there is no file, empty if it is invalid."""
        try:
            data = self._store.read(path, MAX_BYTES)
            return None if data is None else self.member.receive(MESSAGE.validate_json(data))
        except (BadMessage, ValidationError):
            return []

    def _write(self, letter: Letter) -> None:
        message, me = letter.message, self.member.name
        if isinstance(message, Vote):
            path = f"{_slot(letter.channel, message.statement.number)}/{message.statement.phase}/{me}.json"
        else:
            assert isinstance(message, StatementCertificate), (
                "members do not forward orders, and nothing is relayed on a board"
            )
            about, order = message.statement, message.order
            at = _slot(letter.channel, order.numbers[order.channels.index(letter.channel)])
            path = f"{at}/from-{about.channel}-{about.phase}/{me}.json"
        self._store.write(path, message.model_dump_json().encode())


def take_part(
    seats: Sequence[BoardMember],
    orders: int,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Run these seats until all have settled ``orders`` orders.

    :raises RunStopped: after ``deadline_s``; calling again resumes.
    """
    began = clock()
    while waiting := [seat for seat in seats if seat.member.channel.next < orders]:
        news = [seat.look() for seat in waiting]
        if not any(news):
            if clock() - began > deadline_s:
                channels = ", ".join(sorted({seat.member.channel.name for seat in waiting}))
                raise RunStopped(f"credits: {channels} not settled within {deadline_s:g} s; start again to resume")
            sleep(PAUSE_S)


def _slot(channel: str, number: int) -> str:
    return f"credits/{channel}/{number:06d}"
