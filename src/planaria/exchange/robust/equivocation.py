"""Detection of members that send different updates to different members of a round. Pure.

Each member reports the digest of the update it sent and of each it received. Among honest members they agree. Let at
most f members be Byzantine:

- If more than f members received an update other than the one that the sender reports, the sender is Byzantine: only
  Byzantine members contradict an honest one.
- If fewer did, each pair of the sender and a contradicting member contains a Byzantine one, and both are excluded. That
  leaves n − 2 members with at most f − 1 Byzantine, which a rule that tolerates f of n also tolerates: its minimum
  number of members falls by two with each Byzantine member less.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from planaria.exchange.base import Update

Received = Mapping[int, Mapping[int, str]]
"""member → member → digest of the update received from it; for itself, of the update it sent"""
_BYTES = 16
"""bytes of a digest; collision-resistant"""


class Exclusions(NamedTuple):
    """The members to exclude from a round."""

    byzantine: tuple[int, ...] = ()
    """members who equivocate, in order"""
    disputes: tuple[tuple[int, int], ...] = ()
    """pairs of which one or both members are Byzantine"""
    invalid: tuple[int, ...] = ()
    """members whose updates were invalid too often, in order"""

    @property
    def min_byzantine(self) -> int:
        """Minimum number of Byzantine members."""
        return len(self.byzantine) + len(self.disputes) + len(self.invalid)

    @property
    def all(self) -> list[tuple[int, ...]]:
        """Each finding from digests, as a tuple of members."""
        return [*((member,) for member in self.byzantine), *self.disputes]

    @property
    def left_out(self) -> dict[int, str]:
        """Member → reason for its exclusion."""
        reasons = dict.fromkeys(self.invalid, "its updates were invalid too often")
        reasons |= dict.fromkeys(self.byzantine, "it sent different updates to different members")
        for sender, accuser in self.disputes:
            reasons[sender] = f"replica {accuser} received a different update from it"
            reasons[accuser] = f"it reports a different update from replica {sender} than it was sent"
        return dict(sorted(reasons.items()))


def digest(update: Update) -> str:
    """Return the SHA-256 of all parts of an update with dtypes and sizes; the first 16 bytes, hex."""
    hashed = hashlib.sha256()
    for part in (update.prefetched, update.blocking):
        hashed.update(b"none" if part is None else f"{part.dtype} {part.numel()}:".encode())
        if part is not None and part.numel():
            hashed.update(part.contiguous().view(torch.uint8).numpy().data)
    return hashed.digest()[:_BYTES].hex()


def find_equivocations(received: Received, members: Collection[int], byzantine: int) -> Exclusions:
    """Return the findings from the digests that ``members`` report, with at most ``byzantine`` Byzantine ones.

    Digests of other senders are ignored; a missing digest contradicts no one.
    """
    proved, contradicted = [], dict[int, list[int]]()
    for sender in sorted(members):
        sent = received.get(sender, {}).get(sender)
        contradicted[sender] = [m for m in sorted(members) if received.get(m, {}).get(sender, sent) != sent]
        if len(contradicted[sender]) > byzantine:
            proved.append(sender)
    settled, disputes = set(proved), []
    for sender, by in contradicted.items():
        accuser = next((member for member in by if member not in settled), None)
        if sender not in settled and accuser is not None:
            disputes.append((sender, accuser))
            settled |= {sender, accuser}
    return Exclusions(tuple(proved), tuple(disputes))


def join_digests(stages: Iterable[Mapping[int, str]]) -> dict[int, str]:
    """Return one member's digests of all stages, joined in order of stage."""
    digests: dict[int, str] = {}
    for of_stage in stages:
        for member, digest_of_stage in of_stage.items():
            digests[member] = f"{digests.get(member, '')} {digest_of_stage}"
    return digests
