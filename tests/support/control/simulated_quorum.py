"""Holders and clients of a quorum in one thread, on a network that loses, repeats, delays and reorders messages.

Each client is a greenlet that runs the code of real controllers (``SharedLog``, ``LogAppender``, ``QuorumStore``). It
switches to the scheduler in each round, and is resumed with the answers that have arrived.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from greenlet import getcurrent, greenlet

from planaria.common.object_store import StoreUnreachable
from planaria.control.log import quorum
from planaria.control.log.quorum import Answer, Answers, Enrolment, QuorumMember, Request, Round, Rounds, Slot, Vote
from planaria.control.log.quorum_store import QuorumStore
from planaria.control.log.shared_log import Batch, Deposed, LogAppender, SharedLog

T = TypeVar("T")
ROUNDS = 40
"""rounds after which an operation fails"""
_END = 20_000
"""events after which a simulation that heals counts as stuck"""


def digits(rng: random.Random) -> str:
    return f"{rng.getrandbits(128):032x}"


class SimulatedHolder:
    """A holder. A crash loses its memory, not its disk."""

    def __init__(self, rng: random.Random, stored: Callable[[Slot], Slot], vote: Callable[..., tuple[Slot, Answer]]):
        self._stored, self._vote = stored, vote
        self.member = QuorumMember(id=digits(rng))
        self.slots, self.disk = dict[str, Slot](), dict[str, Slot]()
        self.up = True

    def answer(self, request: Request) -> Answer:
        if isinstance(request, Enrolment):
            self.member, answer = quorum.enrol(self.member, request)
            return answer
        slot, answer = self._vote(self.member, self.slots.get(request.name, Slot()), request)
        self.slots[request.name], self.disk[request.name] = slot, self._stored(slot)
        return answer

    def restart(self) -> None:
        self.slots, self.up = dict(self.disk), True


class Message(NamedTuple):
    client: Client
    round: int
    holder: str
    content: Request | Answer


class Client:
    """A client; ``work`` is its program."""

    def __init__(self, network: Network, work: Callable[[Client], object]) -> None:
        self.network, self.writer = network, digits(network.random)
        self.roster = dict[str, str]()
        self.waiting: Round | None = None
        self.round, self.answers = 0, Answers()
        self.process = greenlet(lambda: work(self))

    def conduct(self, operation: str, rounds: Rounds[T], /) -> T:
        try:
            requested = next(rounds)
            for _ in range(ROUNDS):
                requested = rounds.send(self._ask(requested))
        except StopIteration as end:
            result: T = end.value
            return result
        raise StoreUnreachable("simulated", operation, ROUNDS, TimeoutError())

    def opened(self, kind: type[QuorumStore] = QuorumStore) -> QuorumStore:
        self.roster = self.conduct("opening", self.network.found([*self.network.holders]))
        return kind("simulated", len(self.network.holders), self.writer, self.conduct)

    def _ask(self, requested: Round) -> Answers:
        self.round, self.answers, self.waiting = next(self.network.numbers), Answers(), requested
        for at in self.network.holders:
            request = quorum.with_folder_id(requested.request, self.roster.get(at, ""))
            self.network.messages.append(Message(self, self.round, at, request))
        self.network.scheduler.switch()
        return self.answers


@dataclass
class Network:
    """Holders, clients and the messages between them."""

    seed: int
    size: int = 3
    stored: Callable[[Slot], Slot] = lambda slot: slot
    vote: Callable[..., tuple[Slot, Answer]] = quorum.vote
    found: Callable[[Sequence[str]], Rounds[quorum.Roster]] = quorum.found_run
    keeps_id: bool = False
    """whether an emptied holder passes for the one that was lost"""
    may_empty: bool = False
    """whether holders may lose their folders: not before the run is founded"""
    calm: bool = False
    """deliver every message in order"""
    messages: list[Message] = field(default_factory=list)
    clients: list[Client] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.numbers = itertools.count(1)
        self.scheduler = getcurrent()
        self.holders = {f"h{n}": self._new() for n in range(self.size)}
        self.emptied = 0
        self.rates = [self.random.uniform(*bounds) for bounds in ((0, 0.08), (0.002, 0.02), (0, 0.1), (0, 0.1))]
        """probabilities in an event: a holder fails or returns, a deadline ends; of a message: it is lost, repeated"""

    def _new(self) -> SimulatedHolder:
        return SimulatedHolder(self.random, self.stored, self.vote)

    def start(self, work: Callable[[Client], object]) -> Client:
        client = Client(self, work)
        self.clients.append(client)
        client.process.switch()
        return client

    def finish(self, work: Callable[[Client], T]) -> T:
        """Heal the network and the holders, and run a client to its end; other clients stop."""
        self.calm, self.clients, self.messages = True, [], []
        for holder in self.holders.values():
            holder.restart()
        results = list[T]()
        client = self.start(lambda one: results.append(work(one)))
        for _ in range(_END):
            if client.process.dead:
                return results[0]
            self.step()
        raise AssertionError("stuck")

    def step(self) -> None:
        """Let one thing happen."""
        self.clients = [client for client in self.clients if not client.process.dead]
        fails, late, lost, repeated = (not self.calm and self.random.random() < rate for rate in self.rates)
        if fails:
            self._fail()
        elif self.clients and (late or not self.messages):
            self.random.choice(self.clients).process.switch()
        elif self.messages:
            message = self.messages.pop(0 if self.calm else self.random.randrange(len(self.messages)))
            if repeated:
                self.messages.append(message)
            if not lost:
                self._deliver(message)

    def _fail(self) -> None:
        at = self.random.choice([*self.holders])
        holder = self.holders[at]
        if not holder.up or self.random.random() < 0.6:  # the second: it crashes and returns immediately
            holder.restart()
        elif self.random.random() < 0.1 and self.emptied < (self.size - 1) // 2 and self.may_empty:
            self.emptied += 1
            new = self.holders[at] = self._new()
            if self.keeps_id:
                new.member = holder.member
        elif sum(one.up for one in self.holders.values()) > self.size // 2:
            holder.up = False

    def _deliver(self, message: Message) -> None:
        client, holder = message.client, self.holders[message.holder]
        if isinstance(message.content, Enrolment | Vote):
            if holder.up:
                answer = holder.answer(message.content)
                self.messages.append(message._replace(content=answer))
        elif message.round == client.round and not message.content.error and not client.process.dead:
            client.answers[message.holder] = message.content
            if client.waiting is not None and client.waiting.enough(client.answers):
                client.waiting = None
                client.process.switch()


class Leaders:
    """Controllers of one run that are elected and append; checks the invariants of the shared log."""

    def __init__(self, network: Network, kind: type[QuorumStore] = QuorumStore) -> None:
        self.network, self._kind = network, kind
        self.elected = dict[int, str]()
        """term → leader"""
        self.batches = dict[int, Batch]()
        self.durable = dict[str, int]()
        """line whose flush returned → term"""
        self.lines = itertools.count()
        self.failed = 0

    def run(self, events: int) -> None:
        """Let controllers come and go for some events; then read the log."""
        for _ in range(events):
            if len(self.network.clients) < 3 and self.network.random.random() < 0.05:
                self.network.start(self._control)
            self.network.step()
        kept = self.network.finish(lambda client: self._read(SharedLog(client.opened(self._kind)), 1))
        lines = [line for batch in kept for line in batch.lines]
        assert {*self.durable} <= {*lines} and len({*lines}) == len(lines), "I3: a durable line is lost"
        terms = [batch.term for batch in kept]
        assert terms == sorted(terms), "terms fall"
        assert all(self.elected.get(batch.term, batch.leader) == batch.leader for batch in kept), "I1: two leaders"

    def _read(self, log: SharedLog, number: int) -> list[Batch]:
        found = list[Batch]()
        for batch in log.since(number):
            assert self.batches.setdefault(number + len(found), batch) == batch, "I2: two logs differ"
            found.append(batch)
        return found

    def _control(self, client: Client) -> None:
        try:
            self._lead(SharedLog(client.opened(self._kind)))
        except (StoreUnreachable, Deposed):
            self.failed += 1

    def _lead(self, log: SharedLog) -> None:
        rng, known = self.network.random, list[Batch]()
        while True:
            known += self._read(log, len(known) + 1)
            term = known[-1].term + 1 if known else 1
            appender = LogAppender(log, term, len(known) + 1, digits(rng))
            if appender.stand():
                break
        lines = [line for batch in known for line in batch.lines]
        assert self.elected.setdefault(term, appender.leader) == appender.leader, "I1: two leaders of a term"
        self.network.may_empty = True
        assert {line for line in self.durable if self.durable[line] < term} <= {*lines}, "I3: a durable line is lacking"
        for _ in range(rng.randrange(8)):
            added = [f"line {next(self.lines)}" for _ in range(rng.randint(1, 2))]
            for line in added:
                appender.add(line)
            appender.flush()
            self.durable |= dict.fromkeys(added, term)
