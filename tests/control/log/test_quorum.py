"""A log at a quorum of holders has one leader per term and loses no durable line, whatever the network does."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.common.object_store import BadObject, StoreUnreachable
from planaria.control.log import quorum
from planaria.control.log.quorum import (
    NONE,
    Answer,
    Ballot,
    QuorumLocation,
    QuorumMember,
    Round,
    Rounds,
    Slot,
    Vote,
    parse_quorum_location,
)
from planaria.control.log.quorum_store import QuorumStore
from support.control.simulated_quorum import Client, Leaders, Network

EVENTS = 700
HOLDERS = "a:1", "b:2", "c:3"


@pytest.mark.parametrize("size", [3, 5])
def test_no_durable_line_is_lost_and_each_term_has_one_leader(size: int) -> None:
    """Messages are lost, repeated and reordered; holders crash, and as many as may be lose their folders."""
    elected, durable, emptied = 0, 0, 0
    for seed in range(120):
        leaders = Leaders(Network(seed, size))
        leaders.run(EVENTS)
        elected, durable = elected + len(leaders.elected), durable + len(leaders.durable)
        emptied += leaders.network.emptied
    assert elected > 100 and durable > 500 and emptied > 20, (elected, durable, emptied)


def _accept_all(member: QuorumMember, slot: Slot, request: Vote) -> tuple[Slot, Answer]:
    if request.kind == "accept":
        slot = slot._replace(promised=NONE)
    return quorum.vote(member, slot, request)


def _hide_accepted(member: QuorumMember, slot: Slot, request: Vote) -> tuple[Slot, Answer]:
    slot, answer = quorum.vote(member, slot, request)
    if request.kind == "promise":
        answer = answer.model_copy(update={"accepted": NONE})
    return slot, answer


def _trust_one(holders: Sequence[str]) -> Rounds[quorum.Roster]:
    """Use a roster that one holder knows, without telling the others."""
    rounds = quorum.found_run(holders)
    requested = next(rounds)
    while True:
        answers = yield requested
        for answer in answers.values():
            if answer.member is not None and answer.member.founded:
                return answer.member.roster
        requested = rounds.send(answers)


class BelievesOne(QuorumStore):
    """Takes the answer of a single holder for that of a majority."""

    def _is_granted(self, answers: quorum.Answers) -> bool:
        return any(answer.ok for answer in answers.values())


class ReportsAbsence(QuorumStore):
    """Reports that a batch is missing once one holder lacks it."""

    def _common(self, answers: quorum.Answers) -> Ballot | None:
        missing = any(answer.accepted == NONE for answer in answers.values())
        return NONE if missing else super()._common(answers)


class ReportsAccepted(QuorumStore):
    """Takes a value for chosen that one holder has accepted."""

    def _common(self, answers: quorum.Answers) -> Ballot | None:
        return max((answer.accepted for answer in answers.values()), default=None)


class SkipsPromises(QuorumStore):
    """Proposes every batch without promises."""

    def write(self, path: str, data: bytes) -> bool:
        self._reserved = int(path.removeprefix("log/"))
        return super().write(path, data)


@pytest.mark.parametrize(
    ("network", "store"),
    [
        pytest.param(
            {"stored": lambda slot: slot._replace(promised=slot.accepted)}, QuorumStore, id="promise-unstored"
        ),
        pytest.param({"vote": _accept_all}, QuorumStore, id="promise-broken"),
        pytest.param({"vote": _hide_accepted}, QuorumStore, id="accepted-value-ignored"),
        pytest.param({"keeps_id": True}, QuorumStore, id="emptied-holder-votes"),
        pytest.param({"found": _trust_one}, QuorumStore, id="founding-untold"),
        pytest.param({}, BelievesOne, id="one-grant-suffices"),
        pytest.param({}, ReportsAbsence, id="one-absence-suffices"),
        pytest.param({}, ReportsAccepted, id="accepted-taken-for-chosen"),
        pytest.param({}, SkipsPromises, id="every-batch-reserved"),
    ],
)
def test_a_mutant_of_the_protocol_breaks_an_invariant(network: dict[str, Any], store: type[QuorumStore]) -> None:
    for seed in range(600):
        try:
            Leaders(Network(seed, **network), store).run(EVENTS)
        except (AssertionError, UserError):  # the second: no holder knows the roster any more
            return
    pytest.fail("no invariant was broken")


@pytest.mark.parametrize("size", [3, 5])
def test_a_register_never_returns_to_an_older_version(size: int) -> None:
    """One client writes 1, 2, 3, …; a read returns at least the last write that ended before, and the last read."""
    reads = 0
    for seed in range(100):
        network, written, seen = Network(seed, size), [0], [0]

        def write(client: Client, written: list[int] = written) -> None:
            with suppress(StoreUnreachable):
                store = client.opened()
                for number in range(1, 12):
                    store.replace("lease.json", b"%d" % number)
                    written[0] = number

        def read(client: Client, written: list[int] = written, seen: list[int] = seen) -> None:
            with suppress(StoreUnreachable):
                store = client.opened()
                for _ in range(6):
                    least = max(written[0], seen[0])
                    value = int(store.read("lease.json", 100) or b"0")
                    assert value >= least
                    seen[0] = max(seen[0], value)

        network.start(write)
        for _ in range(EVENTS):
            if len(network.clients) < 3 and network.random.random() < 0.05:
                network.start(read)
            network.step()
        assert int(network.finish(lambda client: client.opened().read("lease.json", 100)) or b"0") >= written[0]
        reads += seen[0]
    assert reads > 300


class Direct:
    """A client of holders that all answer; counts rounds."""

    def __init__(self, network: Network) -> None:
        self.network, self.rounds = network, Counter[str]()
        self.roster = self.conduct("opening", quorum.found_run([*network.holders]), {})

    def conduct(self, operation: str, rounds: Rounds[Any], roster: dict[str, str] | None = None) -> Any:
        try:
            requested: Round = next(rounds)
            while True:
                self.rounds[requested.request.kind] += 1
                roster = self.roster if roster is None else roster
                ids = {at: roster.get(at, "") for at in self.network.holders}
                answers = {
                    at: holder.answer(quorum.with_folder_id(requested.request, ids[at]))
                    for at, holder in self.network.holders.items()
                }
                requested = rounds.send({at: answer for at, answer in answers.items() if not answer.error})
        except StopIteration as end:
            return end.value

    def store(self, writer: str) -> QuorumStore:
        return QuorumStore("direct", len(self.network.holders), writer * 32, self.conduct)


def test_a_leader_appends_in_one_round() -> None:
    direct = Direct(Network(0))
    leader = direct.store("a")
    assert leader.write("log/000000000001", b"1")
    direct.rounds.clear()
    for number in range(2, 12):
        assert leader.write(f"log/{number:012d}", b"%d" % number)
    assert direct.rounds == {"accept": 10}
    assert not direct.store("b").write("log/000000000005", b"other")
    assert (
        direct.store("c").read("log/000000000011", 100) == b"11"
        and direct.store("c").read("log/000000000012", 1) is None
    )


def test_a_repeated_write_is_without_effect_and_reserves_no_batch_twice() -> None:
    direct = Direct(Network(0))
    leader, path = direct.store("a"), "log/00000000000{}".format
    assert leader.write(path(1), b"1") and leader.write(path(2), b"2") and leader.write(path(1), b"1")
    direct.rounds.clear()
    assert not leader.write(path(2), b"another value in the same ballot")
    assert direct.rounds["promise"] == 1 and direct.store("b").read(path(2), 9) == b"2"


def test_the_last_of_several_writers_wins_a_register() -> None:
    direct = Direct(Network(0))
    one, other = direct.store("a"), direct.store("b")
    assert one.read("files/config.json", 100) is None
    for number in range(5):
        (one, other)[number % 2].replace("files/config.json", b"%d" % number)
        assert one.read("files/config.json", 100) == other.read("files/config.json", 100) == b"%d" % number
    with pytest.raises(BadObject, match="oversized"):
        one.read("files/config.json", 0)


def test_the_first_start_of_a_run_needs_all_holders_with_their_folders() -> None:
    network = Network(0)
    first, *others = network.holders.values()
    roster = {at: holder.member.id for at, holder in network.holders.items()}
    assert first.answer(quorum.Enrolment(kind="enrol", roster=roster)).ok
    assert not first.answer(quorum.Enrolment(kind="enrol", roster=roster | {"h1": "0" * 32})).ok, "it is enrolled"
    assert not others[0].answer(quorum.Enrolment(kind="found", roster=roster)).ok, "it is not enrolled"
    others[0].member = QuorumMember(id="0" * 32)
    with pytest.raises(UserError, match="holder h1 has lost its folder; empty all holders' folders"):
        Direct(network)


@pytest.mark.parametrize(
    "name",
    ["", "log", "log/1", "log/../../x", "files/../x", "files/.x", "files/", "/etc/passwd", "files/a/b", "lease.json\n"],
)
def test_a_holder_serves_the_objects_of_a_log_only(name: str) -> None:
    with pytest.raises(ValidationError):
        Vote.model_validate_json(f'{{"kind": "read", "name": {json.dumps(name)}}}')


def test_a_location_lists_its_holders() -> None:
    assert parse_quorum_location("quorum://a:1,b:2, c:3/run", "x") == QuorumLocation(HOLDERS, "run")
    trial = "127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3", "localhost:4", "[::1]:5"
    assert parse_quorum_location(f"quorum://{','.join(trial)}/", "x") == QuorumLocation(trial, "")


@pytest.mark.parametrize(
    ("holders", "line"),
    [
        ("", "0 holders; use 3"),
        ("a:1,b:2", "2 holders; use 3"),
        ("a:1,b:2,c:3,d:4", "4 holders; use 3, of which one may be lost, or 5"),
        ("a:1,b:2,c", "holder 'c' is not an address; use HOST:PORT"),
        ("a:1,b:2,c:70000", "holder 'c:70000' is not an address"),
        ("a:1,b:2,a:3", "a has two holders, which one loss would end; use another machine"),
        ("127.0.0.1:1,b:2,127.0.0.1:1", "127.0.0.1 has two holders"),
        ("a:1,b:2,c:3/../x", "run '../x': not a valid name"),
    ],
)
def test_holders_that_would_not_survive_a_loss_are_refused(holders: str, line: str) -> None:
    with pytest.raises(UserError, match=line):
        parse_quorum_location(f"quorum://{holders}", "fleet.shared_log")
