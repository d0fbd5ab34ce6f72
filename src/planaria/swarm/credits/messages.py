"""Messages of a payment along channels: orders, votes of committee members, and certificates made of votes.

A certificate is n − ⌊(n−1)/3⌋ votes of distinct members for one statement (2f+1 of n = 3f+1). Two contradictory
certificates for one channel and number cannot exist while at most f members are Byzantine and honest ones vote once.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

LAST_NUMBER = 999_999
MAX_HOPS = 64
MAX_MEMBERS = 256

Name = Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
Number = Annotated[int, Field(ge=0, le=LAST_NUMBER, strict=True)]
Credits = Annotated[int, Field(gt=0, le=10**15, strict=True)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{0,256}$")]
Phase = Literal["lock", "settle"]


class Signer(Protocol):
    """A private key with a name."""

    @property
    def name(self) -> str: ...

    def sign(self, data: bytes) -> str:
        """Return a signature, in hex."""
        ...


Verify = Callable[[str, str, bytes], bool]
"""(name, signature, data) → whether the signature of the data is valid for the name"""


class StandIn:
    """Insecure, cheap signatures for simulations: an HMAC keyed by the name. A simulated Byzantine member gets one
    :class:`Signer`, so it can sign only as itself."""

    class _Key:
        def __init__(self, name: str) -> None:
            self.name, self._key = name, hashlib.sha256(f"stand-in {name}".encode()).digest()

        def sign(self, data: bytes) -> str:
            return hmac.digest(self._key, data, "sha256").hex()

    def __init__(self) -> None:
        self._keys: dict[str, StandIn._Key] = {}

    def signer(self, name: str) -> Signer:
        return self._keys.setdefault(name, StandIn._Key(name))

    def verify(self, name: str, signature: str, data: bytes) -> bool:
        return name in self._keys and hmac.compare_digest(self._keys[name].sign(data), signature)


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def signed_bytes(self) -> bytes:
        """Return the data that a signature covers."""
        return f"planaria credits {type(self).__name__} {self.model_dump_json(exclude={'signature'})}".encode()


class CreditOrder(_Plain):
    """Transfer credits from the first party to the last over consecutive channels: all or nothing."""

    kind: Literal["order"] = "order"
    parties: Annotated[tuple[Name, ...], Field(min_length=2, max_length=MAX_HOPS + 1)]
    channels: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MAX_HOPS)]
    """channels between consecutive parties"""
    numbers: Annotated[tuple[Number, ...], Field(max_length=MAX_HOPS)]
    """sequence number of this order in each channel: 0, 1, 2, …"""
    amount: Credits
    signature: Signature = ""
    """signature of the operator, which assigns the numbers"""

    @model_validator(mode="after")
    def _check_route(self) -> Self:
        if not len(self.parties) - 1 == len(self.channels) == len(self.numbers):
            raise ValueError("an order has one channel and one number for each party but the last")
        if len({*self.parties}) < len(self.parties) or len({*self.channels}) < len(self.channels):
            raise ValueError("a route passes each party and each channel once")
        return self

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.signed_bytes()).hexdigest()

    def with_signature(self, by: Signer) -> CreditOrder:
        return self.model_copy(update={"signature": by.sign(self.signed_bytes())})

    def hop(self, channel: str, number: int) -> int:
        """Return the index of a channel on the route; −1 if the order does not have this number there."""
        hops = zip(self.channels, self.numbers, strict=True)
        return next((index for index, hop in enumerate(hops) if hop == (channel, number)), -1)


class Statement(_Plain):
    """A member's finding. Lock phase: the order can be locked or not. Settle phase: it is paid or dropped."""

    phase: Phase
    channel: Name
    number: Number
    order: Digest
    yes: bool


class MemberVote(_Plain):
    """A member's signed statement."""

    kind: Literal["vote"] = "vote"
    statement: Statement
    member: Name
    signature: Signature = ""

    @classmethod
    def of(cls, statement: Statement, by: Signer) -> MemberVote:
        return cls(statement=statement, member=by.name, signature=by.sign(statement.signed_bytes()))


class StatementCertificate(_Plain):
    """A quorum's votes for one statement, with its order."""

    kind: Literal["certificate"] = "certificate"
    statement: Statement
    order: CreditOrder
    votes: Annotated[tuple[tuple[Name, Signature], ...], Field(max_length=MAX_MEMBERS)]


Message = CreditOrder | MemberVote | StatementCertificate
MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


class Letter(NamedTuple):
    """A message for members of a channel's committee."""

    channel: str
    to: tuple[str, ...]
    message: Message


Committees = Mapping[str, tuple[str, ...]]
"""channel → names of its members, in order"""


def quorum(members: int) -> int:
    """n − ⌊(n−1)/3⌋: two such sets share more than f members, and the honest members alone form one."""
    return members - (members - 1) // 3


def is_valid(certificate: StatementCertificate, committees: Committees, verify: Verify) -> bool:
    """Return whether a quorum of the statement's committee signed it for the enclosed order."""
    statement, order = certificate.statement, certificate.order
    members = committees.get(statement.channel, ())
    if not members or statement.order != order.digest or order.hop(statement.channel, statement.number) < 0:
        return False
    data, needed = statement.signed_bytes(), quorum(len(members))
    signers = {name: signature for name, signature in certificate.votes if name in members}
    good = (name for name, signature in signers.items() if verify(name, signature, data))
    return sum(1 for _ in itertools.islice(good, needed)) == needed
