"""Who said two things in one place: two signatures prove it to anybody, whatever those who show them are worth.

A store can show two readers two contents of one file, and a peer that helps it can sign both. Each reader alone sees
nothing odd. But each names in its closing, by digest and signature, what it has read, and two such names for one place
are the proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from pydantic import model_validator

from planaria.swarm.board.word import Said, Word


class Proof(Word):
    """Two things that one peer said in one place. Whether both signatures stand is for :meth:`stands` to say."""

    one: Said
    other: Said

    @model_validator(mode="after")
    def _two_things(self) -> Proof:
        one, other = self.one, self.other
        if (one.key, one.place) != (other.key, other.place) or one.digest == other.digest:
            raise ValueError("two digests of one peer's for one place")
        return self

    @property
    def peer(self) -> str:
        return self.one.peer

    def stands(self, run: str) -> bool:
        return self.one.stands(run) and self.other.stands(run)


class Ledger:
    """What is known to have been said in a run, and who is proven to have said two things."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._said: dict[tuple[str, str], Said] = {}
        self._proofs: dict[str, Proof] = {}

    @property
    def proofs(self) -> Mapping[str, Proof]:
        """By the peer that is proven to have said two things."""
        return self._proofs

    def said(self, peer: str, place: str) -> Said | None:
        """What was heard last of what a peer said in a place."""
        return self._said.get((peer, place))

    def hear(self, said: Said, checked: bool = False) -> None:
        """Take note. What is not ``checked`` is looked at when it differs from what is known: a lie about what another
        said proves nothing, and does not take the place of the truth."""
        known = self._said.get((said.peer, said.place))
        if known is not None and known.digest != said.digest:
            self.convict([Proof(one=known, other=said)])
            if not checked and (known.stands(self._run) or not said.stands(self._run)):
                return
        self._said[said.peer, said.place] = said

    def convict(self, proofs: Iterable[Proof]) -> None:
        """Take over proofs, those of them that stand."""
        for proof in proofs:
            if proof.peer not in self._proofs and proof.stands(self._run):
                self._proofs[proof.peer] = proof

    def forget(self, before: int) -> None:
        """What was said of rounds ``before`` a number; proofs stay."""
        self._said = {key: said for key, said in self._said.items() if not _older(key[1], before)}


def _older(place: str, before: int) -> bool:
    number = place.rpartition("/")[2].removesuffix(".json")
    return number.isdigit() and int(number) < before
