"""Closings and receipts of a round: which set of messages all peers learn from.

Peers with equal weights stay equal only while they learn from the same messages. A message that arrives as a round
times out is there for one peer and not yet for another. So each peer publishes a closing, which lists by digest what
it received, and all peers follow the same closing (:func:`majority_list`).

A receipt is what a member of a committee signs. A committee is a list of ids in the run's rules. Of its n members at
most f = ⌊(n − 1) / 3⌋ may be Byzantine. A certificate is the signed receipts of n − f members with one digest. Any two
sets of n − f members share more than f, so an honest one, which signs one digest: no two certificates of a round
differ. A round may stay without a certificate (consistent broadcast: Bracha and Toueg, J. ACM 32, 1985).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from planaria.swarm.board.board import Board
from planaria.swarm.board.claims import ClaimLedger, Hex32, Hex64, Round, StrictModel, canonical, digest_of, of_round
from planaria.swarm.board.envelope import unseal
from planaria.swarm.board.limits import LIMITS
from planaria.swarm.board.message import BadMessage, Closing, Receipt, RunRules

MessageList = Mapping[str, str]
"""peer → SHA-256 of its message in a round"""


def text_of(messages: MessageList) -> str:
    """Return the canonical text of a message list, as signed in a receipt."""
    return canonical(dict(messages))


def majority_list(
    closings: Mapping[str, MessageList], voters: Set[str], awaited: Set[str], quorum: int, early: Set[str]
) -> MessageList | None:
    """Return the message list that most ``voters`` published; None if no list counts.

    ``closings``: by author. A list counts if it names ``quorum`` of the ``awaited`` peers and each awaited peer that
    arrived ``early``, or if more than half of the voters agree on it. Ties go to the longer list, then to the smaller
    digest.

    A closing is only a claim. An early one may omit a peer, but a peer that arrived early is omitted only by a majority
    of the voters. A late one is one vote among earlier ones. Two closings of one author prove equivocation
    (:class:`planaria.swarm.board.claims.Proof`), and the author loses its vote.
    """
    votes = Counter(text_of(messages) for author, messages in closings.items() if author in voters)
    lists = {text_of(messages): messages for messages in closings.values()}
    counted = [
        text
        for text, count in votes.items()
        if len(lists[text].keys() & awaited) >= quorum
        and (awaited & early <= lists[text].keys() or 2 * count > len(voters))
    ]
    if not counted:
        return None
    return lists[min(counted, key=lambda text: (-votes[text], -len(lists[text]), digest_of(text)))]


About = Literal["round", "rewards", "weights"]
Completed = tuple[str, int, int]
"""a completion: peer, problem, index"""


@dataclass(frozen=True)
class Committee:
    """The peers whose receipts count."""

    members: frozenset[str]

    @classmethod
    def named(cls, rules: Mapping[str, object]) -> Committee | None:
        """Parse the committee of a run's rules; None if they name none."""
        section = rules.get("receipts")
        named = section.get("committee") if isinstance(section, dict) else None
        if not isinstance(named, str) or not named:
            return None
        return cls(frozenset(part.strip() for part in named.split(",")))

    @property
    def faulty(self) -> int:
        """Maximum number of Byzantine members: f = ⌊(n − 1) / 3⌋."""
        return (len(self.members) - 1) // 3

    @property
    def quorum(self) -> int:
        """Number of receipts in a certificate: n − f."""
        return len(self.members) - self.faulty


def quorum_digest(receipts: Iterable[Receipt], committee: Committee) -> str | None:
    """Return the digest signed by a quorum of the committee; None if there is none.

    With more than f Byzantine members there may be two; then nothing is certified.
    """
    by = {(receipt.peer, receipt.digest) for receipt in receipts if receipt.peer in committee.members}
    counts = Counter(digest for _, digest in by)
    results = [digest for digest, count in counts.items() if count >= committee.quorum]
    return results[0] if len(results) == 1 else None


def cannot_reach_quorum(receipts: Iterable[Receipt], committee: Committee, outstanding: int) -> bool:
    """Return whether no digest can reach a quorum with ``outstanding`` more receipts."""
    counts = Counter(receipt.digest for receipt in receipts)
    return max(counts.values(), default=0) + outstanding < committee.quorum


_LIST: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


def message_list_in(text: str) -> MessageList:
    """Parse the text of :func:`text_of`; empty if it is invalid."""
    try:
        return _LIST.validate_json(text)
    except ValidationError:
        return {}


def rewards_text(list_digest: str, rewards: Mapping[Completed, float]) -> str:
    """Return the canonical text of a round's rewards; ``list_digest`` belongs to its message list."""
    rows = [[*place, reward] for place, reward in sorted(rewards.items())]
    return canonical({"heard": list_digest, "rewards": rows})  # type: ignore[dict-item]


Index = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Rewards(StrictModel):
    received: Hex64 = Field(alias="heard")
    rewards: list[tuple[Hex32, Index, Index, Annotated[FiniteFloat, Field(ge=0, le=1)]]] = Field(strict=False)


def rewards_in(text: str, list_digest: str) -> dict[Completed, float]:
    """Parse the text of :func:`rewards_text` for the list with digest ``list_digest``; empty if it is invalid."""
    try:
        result = _Rewards.model_validate_json(text)
    except ValidationError:
        return {}
    if result.received != list_digest:
        return {}
    return {(peer, problem, index): reward for peer, problem, index, reward in result.rewards}


class RunCertificate(StrictModel):
    """The rules and a quorum's receipts as on the board; can be verified without the board."""

    about: About
    round: Round
    digest: Hex64
    rules: str
    """envelope of the founder"""
    receipts: tuple[str, ...] = Field(strict=False, max_length=256)
    """envelopes of the members"""


@dataclass(frozen=True)
class Certified:
    """The content of a valid certificate."""

    rules: RunRules
    committee: Committee
    signers: Sequence[str]


def check(certificate: RunCertificate) -> Certified:
    """Verify a certificate.

    :raises BadMessage: naming the invalid part and the reason.
    """
    try:
        rules = unseal(certificate.rules.encode(), LIMITS, RunRules)
    except BadMessage as error:
        raise BadMessage(f"the rules are {error.reason}") from None
    committee = Committee.named(rules.rules)
    if committee is None:
        raise BadMessage("the rules name no committee")
    signers: list[str] = []
    for index, raw in enumerate(certificate.receipts):
        try:
            receipt = unseal(raw.encode(), LIMITS, Receipt, run=rules.run)
        except BadMessage as error:
            raise BadMessage(f"receipt {index} is {error.reason}") from None
        if why := _mismatch(receipt, certificate, committee, signers):
            raise BadMessage(f"receipt {index} is {why}")
        signers.append(receipt.peer)
    if len(signers) < committee.quorum:
        raise BadMessage(f"{len(signers)} receipts, but at least {committee.quorum} are required")
    return Certified(rules, committee, tuple(signers))


def _mismatch(receipt: Receipt, certificate: RunCertificate, committee: Committee, before: Sequence[str]) -> str:
    """Return why a receipt does not belong to the certificate; empty if it does."""
    if receipt.peer not in committee.members:
        return f"of {receipt.peer[:8]}, who is no member of the committee"
    if receipt.peer in before:
        return f"the second of {receipt.peer[:8]}"
    for label, value, wanted in (
        ("what", receipt.about, certificate.about),
        ("round", receipt.round, certificate.round),
        ("digest", receipt.digest, certificate.digest),
    ):
        if value != wanted:
            return f"about another {label}" if label != "what" else f"about {value}, not {wanted}"
    return ""


MAX_POLLS = 10
"""maximum number of reads while waiting for other peers"""


class Agreement:
    """Closings and receipts of a run, as read and written by one peer."""

    def __init__(self, board: Board, me: str, committee: Committee | None, poll_s: float) -> None:
        self.committee = committee
        self._board = board
        self._me = me
        self._poll_s = poll_s
        self._closings: dict[tuple[str, int], Closing] = {}
        self._receipts: dict[tuple[str, int], dict[str, Receipt]] = defaultdict(dict)
        self._shared: ClaimLedger | None = None

    def guilty(self) -> dict[str, str]:
        """Return the peers proven on the board to have equivocated, with the place."""
        return {peer: f"equivocated in {proof.one.place}" for peer, proof in self._ledger.proofs.items()}

    def look(self, number: int, authors: Iterable[str]) -> None:
        """Read the closings of a round by these peers."""
        unread = [peer for peer in authors if (peer, number) not in self._closings]
        for peer, value in sorted(self._board.closings(number, unread).items()):
            self._closings[peer, number] = value
            for claim in value.words:
                self._ledger.record(claim)
            self._ledger.add_proofs(value.proofs)

    def lists(self, number: int, authors: Iterable[str]) -> dict[str, MessageList]:
        """Author → message list, without equivocators."""
        self.look(number, authors)
        guilty = self._ledger.proofs.keys()
        return {
            peer: {
                sender: digest
                for sender, digest in self._closings[peer, number].received.items()
                if sender not in guilty
            }
            for peer in authors
            if (peer, number) in self._closings and peer not in guilty
        }

    def poll_until(self, done: Callable[[], bool]) -> None:
        """Poll until ``done`` returns true, at most :data:`MAX_POLLS` times."""
        for _ in range(MAX_POLLS):
            if done():
                return
            self._board.pause(self._poll_s)

    def close(self, number: int, messages: MessageList) -> None:
        """Publish the closing of a round."""
        ledger = self._board.ledger
        positions = [(peer, of_round("rounds", number)) for peer in sorted(messages)]
        positions += [(p, of_round("closings", n)) for p, n in sorted(self._closings) if n == number - 1]
        positions += [
            (peer, of_round("receipts/round", number - 1)) for peer in sorted(self._receipts["round", number - 1])
        ]
        words = tuple(claim for index in positions if (claim := ledger.claim(*index)) is not None)
        proofs = tuple((dict(ledger.proofs) | dict(self._ledger.proofs)).values())[:256]
        run = self._board.rules.run
        self._board.publish_closing_or_receipt(
            Closing(run=run, peer=self._me, round=number, words=words, proofs=proofs)
        )
        self._forget(number - 1)

    def publish_receipt(self, about: About, number: int, digest: str, text: str = "") -> None:
        """Publish a receipt if this peer is a member of the committee."""
        if self.committee is None or self._me not in self.committee.members:
            return
        run = self._board.rules.run
        self._board.publish_closing_or_receipt(
            Receipt(run=run, peer=self._me, round=number, about=about, digest=digest, text=text)
        )

    def certified(self, about: About, number: int) -> str | None:
        """Return the text signed by a quorum of the committee; None if there is none yet."""
        if self.committee is None:
            return None
        result = self._receipts[about, number]
        if quorum_digest(result.values(), self.committee) is None:
            for peer in sorted(self.committee.members - result.keys()):
                if (read := self._board.receipt(peer, about, number)) is not None:
                    result[peer] = read[0]
        digest = quorum_digest(result.values(), self.committee)
        texts = [receipt.text for receipt in result.values() if receipt.digest == digest]
        return max(texts, key=len, default=None)

    def signers(self, about: About, number: int) -> list[str]:
        """Return the members known to have signed the certified text; empty if there is none."""
        result = self._receipts[about, number]
        digest = None if self.committee is None else quorum_digest(result.values(), self.committee)
        return sorted(peer for peer, receipt in result.items() if receipt.digest == digest)

    def await_round(self, number: int, received: Set[str]) -> MessageList | None:
        """Wait briefly for a round's certificate; expect no receipts of members outside ``received``."""

        def done() -> bool:
            if self.committee is None or self.certified("round", number) is not None:
                return True
            result = self._receipts["round", number]
            outstanding = (self.committee.members & received) - result.keys()
            return cannot_reach_quorum(result.values(), self.committee, len(outstanding))

        self.poll_until(done)
        return self.named(number)

    def named(self, number: int) -> MessageList | None:
        """Return the message list of a round's certificate; None if there is none."""
        text = self.certified("round", number)
        return message_list_in(text) or None if text else None

    def sign_round(self, number: int, messages: MessageList) -> None:
        text = text_of(messages)
        self.publish_receipt("round", number, digest_of(text), text)

    @property
    def _ledger(self) -> ClaimLedger:
        """Claims in published closings: equal for all peers that read the same closings."""
        if self._shared is None:
            self._shared = ClaimLedger(self._board.rules.run)
        return self._shared

    def _forget(self, before: int) -> None:
        self._closings = {key: closing for key, closing in self._closings.items() if key[1] >= before}
        for key in [key for key in self._receipts if key[1] < before]:
            del self._receipts[key]
        self._ledger.forget(before)
        self._board.ledger.forget(before)


def matching(messages: MessageList, found: Mapping[str, str]) -> bool:
    """Whether all listed messages are there with these digests."""
    return all(found.get(peer) == digest for peer, digest in messages.items())
