"""Receipts: what a quorum of named members has found alike, signed, for others to take over or to check without them.

A committee is a list of ids that the run's founder wrote into the rules. Of its n members at most f = ⌊(n − 1) / 3⌋ may
lie. A certificate is the signed receipts of n − f of them with one digest. Any two sets of n − f members have more than
f in common, so an honest one among them, and it signs one digest: no two certificates of one round differ. That none is
made is possible at any time; nobody waits for one long (consistent broadcast: Bracha and Toueg, J. ACM 32, 1985).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, TypeAdapter, ValidationError

from planaria.swarm.board.closing import Heard
from planaria.swarm.board.difference import canonical
from planaria.swarm.board.envelope import unseal
from planaria.swarm.board.limits import LIMITS
from planaria.swarm.board.message import BadMessage, Receipt, Rules
from planaria.swarm.board.word import Hex32, Hex64, Round, Word

About = Literal["round", "rewards", "weights"]
Completed = tuple[str, int, int]
"""a completion: peer, problem, index"""


@dataclass(frozen=True)
class Committee:
    """Whose receipts count."""

    members: frozenset[str]

    @classmethod
    def named(cls, rules: Mapping[str, object]) -> Committee | None:
        """The one that a run's rules name; None if they name none."""
        section = rules.get("receipts")
        named = section.get("committee") if isinstance(section, dict) else None
        if not isinstance(named, str) or not named:
            return None
        return cls(frozenset(part.strip() for part in named.split(",")))

    @property
    def faulty(self) -> int:
        """How many members may lie: f = ⌊(n − 1) / 3⌋."""
        return (len(self.members) - 1) // 3

    @property
    def quorum(self) -> int:
        """How many receipts a certificate has: n − f."""
        return len(self.members) - self.faulty


def agreed(receipts: Iterable[Receipt], committee: Committee) -> str | None:
    """The digest that a quorum of the committee has signed, in receipts about one thing; None if there is none.

    Where more than f members lie there may be two, and nothing is certified then.
    """
    by = {(receipt.peer, receipt.digest) for receipt in receipts if receipt.peer in committee.members}
    counts = Counter(digest for _, digest in by)
    found = [digest for digest, count in counts.items() if count >= committee.quorum]
    return found[0] if len(found) == 1 else None


def hopeless(receipts: Iterable[Receipt], committee: Committee, still: int) -> bool:
    """Whether no digest can get a quorum, with at most ``still`` further receipts to come."""
    counts = Counter(receipt.digest for receipt in receipts)
    return max(counts.values(), default=0) + still < committee.quorum


_HEARD: TypeAdapter[dict[str, str]] = TypeAdapter(dict[str, str])


def heard_in(text: str) -> Heard:
    """What :func:`planaria.swarm.board.closing.text_of` wrote; empty when it is something else."""
    try:
        return _HEARD.validate_json(text)
    except ValidationError:
        return {}


def rewards_text(heard: str, rewards: Mapping[Completed, float]) -> str:
    """The one text of a round's rewards: ``heard`` is the digest of whom they are of."""
    rows = [[*place, reward] for place, reward in sorted(rewards.items())]
    return canonical({"heard": heard, "rewards": rows})  # type: ignore[dict-item]


Index = Annotated[int, Field(ge=0, lt=1 << 63)]


class _Rewards(Word):
    heard: Hex64
    rewards: list[tuple[Hex32, Index, Index, Annotated[FiniteFloat, Field(ge=0, le=1)]]] = Field(strict=False)


def rewards_in(text: str, heard: str) -> dict[Completed, float]:
    """What :func:`rewards_text` wrote of those whom ``heard`` is the digest of; empty when it is something else."""
    try:
        found = _Rewards.model_validate_json(text)
    except ValidationError:
        return {}
    return {(peer, problem, index): reward for peer, problem, index, reward in found.rewards if found.heard == heard}


class Certificate(Word):
    """A run's rules and a quorum's receipts, each as it lies on the board: to be checked by anybody, without it."""

    about: About
    round: Round
    digest: Hex64
    rules: str
    """the founder's envelope"""
    receipts: tuple[str, ...] = Field(strict=False, max_length=256)
    """members' envelopes"""


@dataclass(frozen=True)
class Certified:
    """What a certificate says that holds."""

    rules: Rules
    committee: Committee
    signers: Sequence[str]


def check(certificate: Certificate) -> Certified:
    """What a certificate proves.

    :raises BadMessage: saying which of its parts is wrong, and why.
    """
    try:
        rules = unseal(certificate.rules.encode(), LIMITS, Rules)
    except BadMessage as error:
        raise BadMessage(f"the rules are {error.reason}") from None
    committee = Committee.named(rules.rules)
    if committee is None:
        raise BadMessage("the rules name no committee")
    signers: list[str] = []
    for place, raw in enumerate(certificate.receipts):
        try:
            receipt = unseal(raw.encode(), LIMITS, Receipt, run=rules.run)
        except BadMessage as error:
            raise BadMessage(f"receipt {place} is {error.reason}") from None
        if why := _unfit(receipt, certificate, committee, signers):
            raise BadMessage(f"receipt {place} is {why}")
        signers.append(receipt.peer)
    if len(signers) < committee.quorum:
        raise BadMessage(f"{len(signers)} receipts, of at least {committee.quorum}")
    return Certified(rules, committee, tuple(signers))


def _unfit(receipt: Receipt, certificate: Certificate, committee: Committee, before: Sequence[str]) -> str:
    """Why a receipt is none of the certificate's; empty if it is."""
    if receipt.peer not in committee.members:
        return f"of {receipt.peer[:8]}, who is no member of the committee"
    if receipt.peer in before:
        return f"the second of {receipt.peer[:8]}"
    for what, said, wanted in (
        ("what", receipt.about, certificate.about),
        ("round", receipt.round, certificate.round),
        ("digest", receipt.digest, certificate.digest),
    ):
        if said != wanted:
            return f"about another {what}" if what != "what" else f"about {said}, not {wanted}"
    return ""
