"""Closings and receipts of a round: which set of messages all peers learn from.

All peers of a round follow the same closing (:func:`majority_list`), a list of the digests of received messages.

A receipt is a digest signed by a committee member. The run's rules list the ids of the committee. At most
f = ⌊(n − 1) / 3⌋ of its n members may be Byzantine. A certificate consists of the receipts of n − f members with one
digest. Any two sets of n − f members share more than f members, so at least one honest member, which signs only one
digest. No two certificates of a round therefore differ. A round may stay without a certificate (consistent broadcast:
Bracha and Toueg, J. ACM 32, 1985).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from planaria.common.errors import UserError
from planaria.swarm.board.board import AlreadyPublished, Board
from planaria.swarm.board.claims import ClaimLedger, Hex32, Hex64, StrictModel, canonical_json, digest_of, round_path
from planaria.swarm.board.envelope import Message
from planaria.swarm.board.message import Closing, Receipt

MessageList = Mapping[str, str]
"""peer → SHA-256 of its message in a round"""


def list_text(messages: MessageList) -> str:
    """Return the canonical text of a message list, as signed in a receipt."""
    return canonical_json(dict(messages))


def majority_list(
    closings: Mapping[str, MessageList], voters: Set[str], awaited: Set[str], quorum: int, early: Set[str]
) -> MessageList | None:
    """Return the message list that most ``voters`` published, or None if no list counts.

    A list counts if it contains ``quorum`` of the ``awaited`` peers and every awaited peer that arrived ``early``. Any
    list of more than half of the voters also counts. Ties go to the longer list, then to the smaller digest.

    Closings are only claims. An early closing may omit a peer, but only a majority of the voters can omit a peer that
    arrived early. A late closing is one vote among earlier ones. An author of two closings equivocates
    (:class:`planaria.swarm.board.claims.Proof`) and loses its vote.

    :param closings: author → its message list
    """
    votes = Counter(list_text(messages) for author, messages in closings.items() if author in voters)
    lists = {list_text(messages): messages for messages in closings.values()}
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
    def from_rules(cls, rules: Mapping[str, object]) -> Committee | None:
        """Parse the committee of a run's rules; return None if they have none."""
        section = rules.get("receipts")
        committee = section.get("committee") if isinstance(section, dict) else None
        if not isinstance(committee, str) or not committee:
            return None
        return cls(frozenset(part.strip() for part in committee.split(",")))

    @property
    def max_faulty(self) -> int:
        """Maximum number of Byzantine members: f = ⌊(n − 1) / 3⌋."""
        return (len(self.members) - 1) // 3

    @property
    def quorum(self) -> int:
        """Number of receipts in a certificate: n − f."""
        return len(self.members) - self.max_faulty


def quorum_digest(receipts: Iterable[Receipt], committee: Committee) -> str | None:
    """Return the digest signed by a quorum of the committee, or None if there is none.

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


def parse_message_list(text: str) -> MessageList:
    """Parse the text of :func:`list_text`; empty if it is invalid."""
    try:
        return _LIST.validate_json(text)
    except ValidationError:
        return {}


def rewards_text(list_digest: str, rewards: Mapping[Completed, float]) -> str:
    """Return the canonical text of a round's rewards; ``list_digest`` belongs to its message list."""
    rows = [[*place, reward] for place, reward in sorted(rewards.items())]
    return canonical_json({"heard": list_digest, "rewards": rows})  # type: ignore[dict-item]


Index = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Rewards(StrictModel):
    received: Hex64 = Field(alias="heard")
    rewards: list[tuple[Hex32, Index, Index, Annotated[FiniteFloat, Field(ge=0, le=1)]]] = Field(strict=False)


def parse_rewards(text: str, list_digest: str) -> dict[Completed, float]:
    """Parse the text of :func:`rewards_text` for the list with digest ``list_digest``; empty if it is invalid."""
    try:
        result = _Rewards.model_validate_json(text)
    except ValidationError:
        return {}
    if result.received != list_digest:
        return {}
    return {(peer, problem, index): reward for peer, problem, index, reward in result.rewards}


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

    def equivocators(self) -> dict[str, str]:
        """Return the peers with a proof of equivocation on the board, with its place."""
        return {peer: f"equivocated in {proof.one.place}" for peer, proof in self._ledger.proofs.items()}

    def read_closings(self, round_number: int, authors: Iterable[str]) -> None:
        """Read the closings of a round by these peers."""
        unread = [peer for peer in authors if (peer, round_number) not in self._closings]
        for peer, value in sorted(self._board.closings(round_number, unread).items()):
            self._closings[peer, round_number] = value
            for claim in value.words:
                self._ledger.record(claim)
            self._ledger.add_proofs(value.proofs)

    def message_lists(self, round_number: int, authors: Iterable[str]) -> dict[str, MessageList]:
        """Return author → message list, without equivocators."""
        self.read_closings(round_number, authors)
        equivocators = self._ledger.proofs.keys()
        return {
            peer: {
                sender: digest
                for sender, digest in self._closings[peer, round_number].received.items()
                if sender not in equivocators
            }
            for peer in authors
            if (peer, round_number) in self._closings and peer not in equivocators
        }

    def poll_until(self, done: Callable[[], bool]) -> None:
        """Poll until ``done`` returns true, at most :data:`MAX_POLLS` times."""
        for _ in range(MAX_POLLS):
            if done():
                return
            self._board.pause(self._poll_s)

    def publish_closing(self, round_number: int, messages: MessageList) -> None:
        """Publish the closing of a round."""
        ledger = self._board.ledger
        positions = [(peer, round_path("rounds", round_number)) for peer in sorted(messages)]
        positions += [(p, round_path("closings", n)) for p, n in sorted(self._closings) if n == round_number - 1]
        positions += [
            (peer, round_path("receipts/round", round_number - 1))
            for peer in sorted(self._receipts["round", round_number - 1])
        ]
        words = tuple(claim for index in positions if (claim := ledger.claim(*index)) is not None)
        proofs = tuple((dict(ledger.proofs) | dict(self._ledger.proofs)).values())[:256]
        run = self._board.rules.run
        self._publish(Closing(run=run, peer=self._me, round=round_number, words=words, proofs=proofs))
        self._drop_before(round_number - 1)

    def publish_receipt(self, about: About, round_number: int, digest: str, text: str = "") -> None:
        """Publish a receipt if this peer is a member of the committee."""
        if self.committee is None or self._me not in self.committee.members:
            return
        run = self._board.rules.run
        self._publish(Receipt(run=run, peer=self._me, round=round_number, about=about, digest=digest, text=text))

    def _publish(self, message: Message) -> None:
        """Publish a message if possible: a round does not depend on one peer's closing or receipt."""
        with suppress(AlreadyPublished, UserError):
            self._board.publish(message)

    def certified_text(self, about: About, round_number: int) -> str | None:
        """Return the text signed by a quorum of the committee, or None without a certificate."""
        if self.committee is None:
            return None
        result = self._receipts[about, round_number]
        if quorum_digest(result.values(), self.committee) is None:
            for peer in sorted(self.committee.members - result.keys()):
                if (read := self._board.read_receipt(peer, about, round_number)) is not None:
                    result[peer] = read[0]
        digest = quorum_digest(result.values(), self.committee)
        texts = [receipt.text for receipt in result.values() if receipt.digest == digest]
        return max(texts, key=len, default=None)

    def signers(self, about: About, round_number: int) -> list[str]:
        """Return the members known to have signed the certified text; empty if there is none."""
        result = self._receipts[about, round_number]
        digest = None if self.committee is None else quorum_digest(result.values(), self.committee)
        return sorted(peer for peer, receipt in result.items() if receipt.digest == digest)

    def await_certificate(self, round_number: int, received: Set[str]) -> MessageList | None:
        """Wait briefly for a round's certificate; do not wait for members outside ``received``."""

        def done() -> bool:
            if self.committee is None or self.certified_text("round", round_number) is not None:
                return True
            result = self._receipts["round", round_number]
            outstanding = (self.committee.members & received) - result.keys()
            return cannot_reach_quorum(result.values(), self.committee, len(outstanding))

        self.poll_until(done)
        return self.certified_list(round_number)

    def certified_list(self, round_number: int) -> MessageList | None:
        """Return the message list of a round's certificate, or None if there is none."""
        text = self.certified_text("round", round_number)
        return parse_message_list(text) or None if text else None

    def sign_round(self, round_number: int, messages: MessageList) -> None:
        """Publish this member's receipt of a round's message list."""
        text = list_text(messages)
        self.publish_receipt("round", round_number, digest_of(text), text)

    @cached_property
    def _ledger(self) -> ClaimLedger:
        """Claims in published closings: equal for all peers that read the same closings."""
        return ClaimLedger(self._board.rules.run)

    def _drop_before(self, before: int) -> None:
        self._closings = {key: closing for key, closing in self._closings.items() if key[1] >= before}
        for key in [key for key in self._receipts if key[1] < before]:
            del self._receipts[key]
        self._ledger.forget(before)
        self._board.ledger.forget(before)


def contains_all(messages: MessageList, found: Mapping[str, str]) -> bool:
    """Return whether all listed messages were found, with these digests."""
    return all(found.get(peer) == digest for peer, digest in messages.items())
