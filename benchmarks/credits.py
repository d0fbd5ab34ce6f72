"""Credits settled along a route: all or nothing, without clocks and by deadlines, and over a board.

- Without clocks, simulated: f of 3f + 1 members of each committee are Byzantine (silent, garbage, equivocation), or
  f + 1.
- Messages of one order, counted: all to all n²(4h − 2) + n; with one relaying member n(6h − 1).
- By deadlines, simulated: a party and f members of each committee fail with delays up to Δ; no failure with delays up
  to 8 Δ.
- Over a board in a folder: three processes, each the committee of a channel; one is killed before or after each of its
  files and restarted.

Claims: with f Byzantine members all runs end, none is paid in part, nothing is lost, and a dry hop cancels the order;
with f + 1 none is paid in part; within Δ no honest party loses; a killed process continues to the same end.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import fmean

from pydantic import ValidationError

from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, start
from planaria.common.errors import RunStopped, UserError
from planaria.common.object_store import Retry, Store
from planaria.swarm.board import identity
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.message import BadMessage
from planaria.swarm.credits.messages import MESSAGE, Committees, CreditOrder, Letter, MemberVote, StatementCertificate
from planaria.swarm.credits.payment_simulation import PaymentOutcome, PaymentScene, SyncScene, simulate, simulate_sync
from planaria.swarm.credits.psync import CommitteeMember, CreditChannel

# ---- a board in a folder: one write-once file per message, no other state
#
#     {board}/credits/{channel}/{number}/order.json                      by the operator
#     {board}/credits/{channel}/{number}/lock/{member}.json              a vote, also settle/
#     {board}/credits/{channel}/{number}/from-{channel}-lock/{member}.json   a neighbour's certificate, also -settle/
#
# A restarted member reads the files, its own votes first, and continues. Since files are never replaced, it cannot
# contradict its earlier votes.

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
            raise UserError(f"{store.location}/{path}: another order has this number; take the channel's next one")


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
        if isinstance(message, MemberVote):
            path = f"{_slot(letter.channel, message.statement.number)}/{message.statement.phase}/{me}.json"
        else:
            assert isinstance(message, StatementCertificate), (
                "members do not forward orders, and nothing is relayed on a board"
            )
            about, order = message.statement, message.order
            at = _slot(letter.channel, order.numbers[order.channels.index(letter.channel)])
            path = f"{at}/from-{about.channel}-{about.phase}/{me}.json"
        self._store.write(path, message.model_dump_json().encode())


def join_swarm(
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


# ---- routes

HOPS, MEMBERS, AMOUNT, EACH = 3, 4, 3, 10
DEADLINE_S = 60.0
WRITES = (12, 16, 12)
"""files of each channel's committee for a paid order: votes to lock and to settle, forwarded votes"""


def expected(scene: PaymentScene) -> int:
    """Messages of one paid order without Byzantine members: n²(4h − 2) + n; with a relay n(6h − 1)."""
    n, h = scene.members, scene.hops
    return n * (6 * h - 1) if scene.relay else n * n * (4 * h - 2) + n


class Dying(Store):
    """A store that kills its process before or after its ``at``-th file."""

    def __init__(self, url: str, at: int, after: bool) -> None:
        super().__init__(url, "board", Retry())
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
    """The keys of all participants."""

    keys: list[list[PeerSigner]]
    operator: PeerSigner
    dry: int = -1

    @classmethod
    def generate(cls, dry: int = -1) -> Route:
        keys = [[PeerSigner(PeerIdentity.generate()) for _ in range(MEMBERS)] for _ in range(HOPS)]
        return cls(keys, PeerSigner(PeerIdentity.generate()), dry)

    def committees(self) -> dict[str, tuple[str, ...]]:
        return {f"c{hop}": tuple(key.name for key in keys) for hop, keys in enumerate(self.keys)}

    def order(self) -> CreditOrder:
        parties, channels = (tuple(f"{kind}{n}" for n in range(HOPS + more)) for kind, more in (("p", 1), ("c", 0)))
        return CreditOrder(parties=parties, channels=channels, numbers=(0,) * HOPS, amount=AMOUNT).with_signature(
            self.operator
        )

    def sit(self, hop: int, store: Store, results: Connection) -> None:
        has = (0 if hop == self.dry else EACH, EACH)
        channel = CreditChannel(f"c{hop}", (f"p{hop}", f"p{hop + 1}"), has)
        members = [
            CommitteeMember(key, channel, self.committees(), self.operator.name, verify_peer) for key in self.keys[hop]
        ]
        join_swarm([BoardMember(member, self.committees(), store) for member in members], 1, DEADLINE_S)
        results.send([(member.settled[0], member.channel.has) for member in members])


def plain(board: Path) -> Store:
    return Store(str(board), "board", Retry())


def settled(
    board: Path, dies: int, at: int, after: bool, dry: int = -1
) -> tuple[bool, list[bool], list[tuple[int, int]]]:
    """Kill one process at its ``at``-th file and restart it.

    Return whether it was killed, the members' results, and the final credits.
    """
    route, fork = Route.generate(dry), multiprocessing.get_context("fork")
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
    settled = [member for pipe, _ in pipes for member in pipe.recv()]
    return killed, [paid for paid, _ in settled], [has for _, has in settled]


ALL, NONE = Claim(low=1.0), Claim(high=0.0)


def of(scene: PaymentScene, seeds: int) -> list[PaymentOutcome]:
    return [simulate(scene, seed) for seed in range(seeds)]


def sound(what: str, found: Sequence[PaymentOutcome], paid: int, seeds: str) -> list[Row]:
    return [
        Row(f"{what}: share that ends", [fmean(one.ended for one in found)], seeds, ALL),
        Row(f"{what}: share where {paid} paid", [fmean(one.paid == paid for one in found)], seeds, ALL),
        Row(f"{what}: share paid in part", [fmean(one.mixed for one in found)], seeds, NONE),
        Row(f"{what}: share where credits are lost", [fmean(not one.conserved for one in found)], seeds, NONE),
    ]


def without_clocks(args: Namespace) -> list[Row]:
    rows, seeds = [], f"{args.seeds} seeds"
    for scene, what in (
        (PaymentScene(byzantine=1), "4 hops, 1 of 4 lies"),
        (PaymentScene(hops=6, tolerated=2, byzantine=2), "6 hops, 2 of 7 lie"),
        (PaymentScene(byzantine=1, relay=True), "4 hops, 1 of 4 lies, one relays"),
    ):
        rows += sound(what, of(scene, args.seeds), 1, seeds)
    rows += sound("4 hops, 1 of 4 lies, hop 2 dry", of(PaymentScene(byzantine=1, dry=2), args.seeds), 0, seeds)
    rows += sound("the same, 6 orders to and fro", of(PaymentScene(byzantine=1, orders=6), args.seeds), 6, seeds)
    beyond = of(PaymentScene(byzantine=2), args.seeds)
    rows.append(Row("2 of 4 lie: share paid in part", [fmean(one.mixed for one in beyond)], seeds, NONE))
    rows.append(Row("2 of 4 lie: share where credits are lost", [fmean(not o.conserved for o in beyond)], seeds, NONE))
    rows.append(Row("2 of 4 lie: share that never ends", [fmean(not one.ended for one in beyond)], "not borne"))
    return rows


def counted(args: Namespace) -> list[Row]:
    rows = []
    for scene in (
        PaymentScene(),
        PaymentScene(hops=8),
        PaymentScene(tolerated=2),
        PaymentScene(relay=True),
        PaymentScene(hops=8, relay=True),
    ):
        want, how = expected(scene), "one relays" if scene.relay else "all to all"
        found = [float(one.messages) for one in of(scene, 20)]
        what = f"messages, {scene.hops} hops, committees of {scene.members}, {how}"
        rows += [Row(f"{what}: {end}", [pick(found)], str(want), Claim(want, want)) for end, pick in ENDS.items()]
    return rows


ENDS = {"least": min, "most": max}


def in_time(args: Namespace) -> list[Row]:
    seeds, rows = f"{args.seeds} seeds", []
    for what, scene, claim in (
        ("within Δ, no failure", SyncScene(faulty=False), NONE),
        ("within Δ, a party and 1 of 4 members fail", SyncScene(), NONE),
        ("up to 2 Δ, no failure", SyncScene(faulty=False, longest=2.0), None),
        ("up to 8 Δ, no failure", SyncScene(faulty=False, longest=8.0), None),
    ):
        found = [simulate_sync(scene, seed) for seed in range(args.seeds)]
        loses = [fmean(o.losers > 0 for o in found)]
        rows.append(Row(f"{what}: share where an honest party loses", loses, seeds, claim))
        rows.append(Row(f"{what}: share paid", [fmean(o.paid for o in found)], seeds))
    return rows


def over_board(args: Namespace) -> list[Row]:
    """Kill each process before and after each of its files, every ``given.every``-th."""
    killed, same = [], []
    points = [(hop, at, after) for hop in range(HOPS) for at in range(1, WRITES[hop] + 1) for after in (False, True)]
    for hop, at, after in points[:: args.every]:
        with tempfile.TemporaryDirectory() as board:
            was, paid, has = settled(Path(board), hop, at, after)
        killed.append(was)
        same.append(all(paid) and set(has) == {(EACH - AMOUNT, EACH + AMOUNT)} and len(paid) == HOPS * MEMBERS)
    points_of = f"{len(killed)} places"
    return [
        Row("over a board: share killed at the planned place", [fmean(killed)], points_of, ALL),
        Row("over a board: share that continued to the same end", [fmean(same)], points_of, ALL),
    ]


@benchmark(
    "credits",
    seeds=Flag(200, "simulated runs of each case"),
    every=Flag(1, "of the places to be killed at, every so-manieth"),
)
def main(args: Namespace) -> Measurement:
    rows = [*without_clocks(args), *counted(args), *in_time(args), *over_board(args)]
    return Result(rows, ["simulated signatures are stand-ins (HMAC); over the board they are Ed25519"])


if __name__ == "__main__":
    start(main)
