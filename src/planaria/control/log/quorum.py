"""A quorum of holders: small processes that keep a run's shared log, of which any majority suffices.

Pure: the location of the holders, the messages, the answers of a holder (:func:`vote`, :func:`enrol`), and the
founding of a run (:func:`found_run`). ``control/log/quorum_store.py`` has the operations of clients;
``runtime/shared_log/`` does the I/O.

A holder that returns without its folder has forgotten its promises and must not vote again. Each folder has a random
id, the ids of all holders are the run's roster, and each request to vote names the id of the folder that may answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from typing import Annotated, Literal, NamedTuple, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from planaria.common.errors import UserError
from planaria.config.names import require_name
from planaria.control.log.shared_log import MAX_BATCH_BYTES, Hex32

SCHEME = "quorum://"
_SIZES = (3, 5)
"""supported numbers of holders"""
_ADDRESS = re.compile(r"([^/\s:,]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})")
_LOOPBACK = re.compile(r"127\..*|localhost|\[::1\]")
"""hosts that may have several holders, for a trial on one machine"""
WRITER_BYTES = 16
MAX_VALUE_BYTES = WRITER_BYTES + MAX_BATCH_BYTES
_FOREIGN = "its folder is not the one with which the run began, so it does not vote"
Roster = dict[str, Hex32]
"""HOST:PORT of each holder → random id of its folder"""
T = TypeVar("T")


class QuorumLocation(NamedTuple):
    """A parsed location."""

    holders: tuple[str, ...]
    """HOST:PORT of each"""
    run: str
    """name of the run; empty for ``fleet.shared_log``"""


def parse_quorum_location(url: str, setting: str) -> QuorumLocation:
    """Parse ``quorum://HOST:PORT,HOST:PORT,HOST:PORT[/RUN]``.

    :raises UserError: naming ``setting``, if it is malformed, or its holders would not survive the loss of a machine.
    """
    listed, _, run = url.removeprefix(SCHEME).rstrip("/").partition("/")
    holders = tuple(at.strip() for at in listed.split(",") if at.strip())
    hosts = list[str]()
    for at in holders:
        address = _ADDRESS.fullmatch(at)
        if address is None or not 1 <= int(address[2]) <= 65535:
            raise UserError(f"{setting}: holder {at!r} is not an address; use HOST:PORT")
        if holders.count(at) > 1 or (address[1] in hosts and not _LOOPBACK.fullmatch(address[1])):
            raise UserError(f"{setting}: {address[1]} has two holders, which one loss would end; use another machine")
        hosts.append(address[1])
    if len(holders) not in _SIZES:
        raise UserError(f"{setting}: {len(holders)} holders; use 3, of which one may be lost, or 5, of which two may")
    if run:
        require_name(run, f"{setting}: run")
    return QuorumLocation(holders, run)


class Ballot(NamedTuple):
    """Number of a proposal, or version of a register."""

    counter: Annotated[int, Field(ge=0, lt=1 << 62)]
    proposer: Annotated[str, Field(pattern="^([0-9a-f]{32})?$")]


NONE = Ballot(0, "")


class Slot(NamedTuple):
    """A holder's state of one object."""

    promised: Ballot = NONE
    """the holder accepts no lower ballot"""
    accepted: Ballot = NONE
    value: bytes = b""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class QuorumMember(_Record):
    """A holder's state of the run's membership."""

    id: Hex32
    """identifier of the server's folder"""
    roster: Roster = {}
    """the only one in which it enrols"""
    founded: bool = False
    """whether all holders of the roster have enrolled"""


class Enrolment(_Record):
    """Ask a holder for its membership, enrol it, or declare that all have enrolled."""

    kind: Literal["ask", "enrol", "found"]
    roster: Annotated[Roster, Field(max_length=max(_SIZES))] = {}


class Vote(_Record):
    """Read an object, or ask a holder to promise or accept a ballot."""

    kind: Literal["read", "promise", "accept"]
    name: Annotated[str, Field(pattern=r"^(log/[0-9]{12}|lease\.json|files/[A-Za-z0-9_][A-Za-z0-9._-]{0,99})$")]
    ballot: Ballot = NONE
    holder: str = ""
    """id of the folder that may answer"""
    value: Annotated[bytes, Field(exclude=True)] = b""


Request = Enrolment | Vote


class Answer(_Record):
    ok: bool = False
    """whether the holder did what was asked"""
    promised: Ballot = NONE
    accepted: Ballot = NONE
    member: QuorumMember | None = None
    error: str = ""
    """why the holder could not answer; then it counts as silent"""
    value: Annotated[bytes, Field(exclude=True)] = b""


def with_folder_id(request: Request, holder: str) -> Request:
    """Return a request for the holder whose folder has this id."""
    return request.model_copy(update={"holder": holder}) if isinstance(request, Vote) else request


def vote(member: QuorumMember, slot: Slot, request: Vote) -> tuple[Slot, Answer]:
    """Return the new state of an object and the answer, which is sent once the state is on disk."""
    if request.holder != member.id:
        return slot, Answer(error=_FOREIGN)
    granted = request.kind == "read" or request.ballot >= slot.promised
    if granted and request.kind == "promise":
        slot = slot._replace(promised=request.ballot)
    elif granted and request.kind == "accept":
        slot = Slot(request.ballot, request.ballot, request.value)
    value = slot.value if granted and request.kind != "accept" else b""
    return slot, Answer(ok=granted, promised=slot.promised, accepted=slot.accepted, value=value)


def enrol(member: QuorumMember, request: Enrolment) -> tuple[QuorumMember, Answer]:
    """Return a holder's new membership and the answer, which is sent once the membership is on disk."""
    fits = member.roster in ({}, request.roster) and member.id in request.roster.values()
    if request.kind == "enrol" and fits:
        member = member.model_copy(update={"roster": request.roster})
    if request.kind == "found" and (fits := fits and member.roster != {}):
        member = member.model_copy(update={"founded": True})
    if request.kind == "ask" or fits:
        return member, Answer(ok=True, member=member)
    return member, Answer(error=_FOREIGN)


Answers = dict[str, Answer]
"""HOST:PORT of a holder → its answer"""


class Round(NamedTuple):
    """A request to all holders."""

    request: Request
    enough: Callable[[Answers], bool]
    """whether further answers are not needed"""
    patient: bool = False
    """whether to wait for it even if a majority has answered"""


Rounds = Generator[Round, Answers, T]
"""an operation of a client: yields rounds, and receives the answers to each"""


class Conduct(Protocol):
    """Conducts the rounds of an operation (``reading``, ``writing``); StoreUnreachable if too few holders answer."""

    def __call__(self, operation: str, rounds: Rounds[T], /) -> T: ...


def found_run(holders: Sequence[str]) -> Rounds[Roster]:
    """Return the run's roster; the first client of a run founds it, for which all holders must answer.

    A holder enrols in one roster, and a roster is founded when all its holders have enrolled. So no other roster with
    any of these folders is ever founded. Clients use a founded roster only; a folder that replaces a lost one is not in
    it.

    :raises UserError: if a holder has lost its folder before the run was founded.
    """
    majority, suspected = len(holders) // 2 + 1, list[str]()

    def everyone(answers: Answers) -> bool:
        return len(answers) == len(holders)

    def known(answers: Answers) -> bool:
        return len(answers) >= majority and bool(_roster_of(answers))

    while True:
        answers = yield Round(Enrolment(kind="ask"), lambda got: known(got) or everyone(got), patient=True)
        if known(answers):
            roster = _roster_of(answers)
        elif everyone(answers):
            roster, lost = _new_roster(answers)
            if lost and lost == suspected:
                raise UserError(f"holder {lost[0]} has lost its folder; empty all holders' folders, and start again")
            suspected = lost  # or another client has founded the run since a holder answered: ask again
            if not lost:
                answers = yield Round(Enrolment(kind="enrol", roster=roster), everyone, patient=True)
            if lost or not everyone(answers):
                continue
        else:
            continue
        answers = yield Round(Enrolment(kind="found", roster=roster), everyone)
        if len(answers) >= majority:  # so any majority has one that knows
            return roster


def _roster_of(answers: Answers) -> Roster:
    """Return the founded roster that a holder knows; empty if none does."""
    members = [answer.member for answer in answers.values() if answer.member is not None]
    return next((member.roster for member in members if member.founded), {})


def _new_roster(answers: Answers) -> tuple[Roster, list[str]]:
    """Return the roster in which a holder has enrolled, or one of all folders; and the holders that are not in it."""
    members = {at: answer.member for at, answer in answers.items() if answer.member is not None}
    roster = next((m.roster for m in members.values() if m.roster), {at: m.id for at, m in members.items()})
    return roster, [at for at, member in members.items() if member.id != roster.get(at)]
