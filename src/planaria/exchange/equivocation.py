"""Who told several members different things in one round, by what each of them says it has said and heard. Pure.

Every member tells the digest of what it has said, and of what it has heard from each other. If all are honest, what
somebody has said is what all others have heard. With at most f liars among all members:

- If more than f have heard otherwise than the sender says, the sender lies: an honest one is contradicted by liars
  alone.
- If fewer have, each pair of the sender and one of these has a liar in it. Both are left out. Of n members with f liars
  that leaves n − 2 with at most f − 1, and a rule that bears f of n bears these: its least number of members falls by
  two with each liar less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from planaria.exchange.base import Offer

Heard = Mapping[int, Mapping[int, str]]
"""member → member → digest of what it has heard from it; from itself, of what it has said"""
_BYTES = 16
"""of a digest, so that nobody finds two messages that share one"""


class Findings(NamedTuple):
    """Whom a round goes on without."""

    liars: tuple[int, ...] = ()
    """members who equivocate, in order"""
    disputes: tuple[tuple[int, int], ...] = ()
    """pairs of which one or both members lie"""
    useless: tuple[int, ...] = ()
    """members whose offers were of no use so often that they are asked no more, in order"""

    @property
    def least(self) -> int:
        """So many members lie, at least."""
        return len(self.liars) + len(self.disputes) + len(self.useless)

    @property
    def all(self) -> list[tuple[int, ...]]:
        """Each by itself, of those that follow from what members have heard."""
        return [*((member,) for member in self.liars), *self.disputes]

    @property
    def left_out(self) -> dict[int, str]:
        """Member → why its offer is left out."""
        found = dict.fromkeys(self.useless, "what it has said was of no use too often")
        found |= dict.fromkeys(self.liars, "others have heard different things from it")
        for sender, other in self.disputes:
            found[sender] = f"replica {other} has heard otherwise from it"
            found[other] = f"it has heard otherwise from replica {sender} than that says"
        return dict(sorted(found.items()))


def digest(offer: Offer) -> str:
    """SHA-256 of all parts of an offer, with their types and sizes; the first 16 bytes, hex."""
    hashed = hashlib.sha256()
    for part in (offer.prefetched, offer.blocking):
        hashed.update(b"none" if part is None else f"{part.dtype} {part.numel()}:".encode())
        if part is not None and part.numel():
            hashed.update(part.contiguous().view(torch.uint8).numpy().data)
    return hashed.digest()[:_BYTES].hex()


def findings(heard: Heard, members: Collection[int], liars: int) -> Findings:
    """What follows from what ``members`` have ``heard``, if at most so many of them are ``liars``.

    What they have heard from others than these is not looked at; what one does not tell contradicts nobody.
    """
    proved, contradicted = [], dict[int, list[int]]()
    for sender in sorted(members):
        said = heard.get(sender, {}).get(sender)
        contradicted[sender] = [m for m in sorted(members) if heard.get(m, {}).get(sender, said) != said]
        if len(contradicted[sender]) > liars:
            proved.append(sender)
    settled, disputes = set(proved), []
    for sender, by in contradicted.items():
        other = next((member for member in by if member not in settled), None)
        if sender not in settled and other is not None:
            disputes.append((sender, other))
            settled |= {sender, other}
    return Findings(tuple(proved), tuple(disputes))


def joined(told: Iterable[Mapping[int, str]]) -> dict[int, str]:
    """What one member has heard from each, of what it has heard stage by stage, in order."""
    found: dict[int, str] = {}
    for of_stage in told:
        for member, heard in of_stage.items():
            found[member] = f"{found.get(member, '')} {heard}"
    return found
