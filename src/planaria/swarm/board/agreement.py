"""What peers tell each other about a round: whom each heard in it, and what a committee has found alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Set

from planaria.swarm.board.board import Board
from planaria.swarm.board.closing import Heard, text_of
from planaria.swarm.board.equivocation import Ledger
from planaria.swarm.board.message import Closing, Receipt
from planaria.swarm.board.receipts import About, Committee, agreed, heard_in, hopeless
from planaria.swarm.board.word import digest_of, of_round

LOOKS = 10
"""at what another peer is about to say"""


class Agreement:
    """The closings and receipts of a run, as one of its peers reads and writes them."""

    def __init__(self, board: Board, me: str, committee: Committee | None, poll_s: float) -> None:
        self.committee = committee
        self._board, self._me, self._poll_s = board, me, poll_s
        self._closings: dict[tuple[str, int], Closing] = {}
        self._receipts: dict[tuple[str, int], dict[str, Receipt]] = defaultdict(dict)
        self._shared: Ledger | None = None

    def guilty(self) -> dict[str, str]:
        """Peers that are proven, by what lies on the board for all, to have said two things: where."""
        shared = self._ledger
        return {peer: f"said two things in {proof.one.place}" for peer, proof in shared.proofs.items()}

    def look(self, number: int, authors: Iterable[str]) -> None:
        """Read the closings of a round by these peers, those of them that are there."""
        unread = [peer for peer in authors if (peer, number) not in self._closings]
        for peer, found in sorted(self._board.closings(number, unread).items()):
            self._closings[peer, number] = found
            for said in found.words:
                self._ledger.hear(said)
            self._ledger.convict(found.proofs)

    def lists(self, number: int, authors: Iterable[str]) -> dict[str, Heard]:
        """Author → whom it heard in a round, without those who are proven to have said two things."""
        self.look(number, authors)
        guilty = self._ledger.proofs.keys()
        return {
            peer: {who: digest for who, digest in self._closings[peer, number].heard.items() if who not in guilty}
            for peer in authors
            if (peer, number) in self._closings and peer not in guilty
        }

    def settle(self, done: Callable[[], bool]) -> None:
        """Wait a few looks for what others are about to say."""
        for _ in range(LOOKS):
            if done():
                return
            self._board.pause(self._poll_s)

    def close(self, number: int, heard: Heard) -> None:
        """Say whom this peer heard, and what else it has read."""
        ledger = self._board.ledger
        places = [(peer, of_round("rounds", number)) for peer in sorted(heard)]
        places += [(p, of_round("closings", n)) for p, n in sorted(self._closings) if n == number - 1]
        places += [
            (peer, of_round("receipts/round", number - 1)) for peer in sorted(self._receipts["round", number - 1])
        ]
        words = tuple(said for place in places if (said := ledger.said(*place)) is not None)
        proofs = tuple((dict(ledger.proofs) | dict(self._ledger.proofs)).values())[:256]
        run = self._board.rules.run
        self._board.conclude(Closing(run=run, peer=self._me, round=number, words=words, proofs=proofs))
        self._forget(number - 1)

    def testify(self, about: About, number: int, digest: str, text: str = "") -> None:
        """Sign a receipt, as a member of the committee; nobody else's would count."""
        if self.committee is None or self._me not in self.committee.members:
            return
        run = self._board.rules.run
        said = Receipt(run=run, peer=self._me, round=number, about=about, digest=digest, text=text)
        self._board.conclude(said)

    def certified(self, about: About, number: int) -> str | None:
        """The text that a quorum of the committee signed; None if there is no such yet."""
        if self.committee is None:
            return None
        found = self._receipts[about, number]
        if agreed(found.values(), self.committee) is None:
            for peer in sorted(self.committee.members - found.keys()):
                if (read := self._board.receipt(peer, about, number)) is not None:
                    found[peer] = read[0]
        digest = agreed(found.values(), self.committee)
        texts = [receipt.text for receipt in found.values() if receipt.digest == digest]
        return max(texts, key=len, default=None)

    def signers(self, about: About, number: int) -> list[str]:
        """The members that are known to have signed what is certified; none if nothing is."""
        found = self._receipts[about, number]
        digest = None if self.committee is None else agreed(found.values(), self.committee)
        return sorted(peer for peer, receipt in found.items() if receipt.digest == digest)

    def await_round(self, number: int, heard: Set[str]) -> Heard | None:
        """Whom a round's certificate names, if there is one soon; of members that were not heard nothing is awaited."""

        def done() -> bool:
            if self.committee is None or self.certified("round", number) is not None:
                return True
            found = self._receipts["round", number]
            still = (self.committee.members & heard) - found.keys()
            return hopeless(found.values(), self.committee, len(still))

        self.settle(done)
        return self.named(number)

    def named(self, number: int) -> Heard | None:
        """Whom a round's certificate names; None if there is none."""
        text = self.certified("round", number)
        return heard_in(text) or None if text else None

    def sign_round(self, number: int, heard: Heard) -> None:
        text = text_of(heard)
        self.testify("round", number, digest_of(text), text)

    @property
    def _ledger(self) -> Ledger:
        """What peers have named in their closings: the same for all who have read the same."""
        if self._shared is None:
            self._shared = Ledger(self._board.rules.run)
        return self._shared

    def _forget(self, before: int) -> None:
        self._closings = {key: closing for key, closing in self._closings.items() if key[1] >= before}
        for key in [key for key in self._receipts if key[1] < before]:
            del self._receipts[key]
        self._ledger.forget(before)
        self._board.ledger.forget(before)


def matching(heard: Heard, there: Mapping[str, str]) -> bool:
    """Whether all that is named is there, with these very contents."""
    return all(there.get(peer) == digest for peer, digest in heard.items())
