"""What is said of a payment along channels: orders, votes of committee members, and certificates made of votes.

A certificate is n − ⌊(n−1)/3⌋ votes of distinct members for one statement (2f+1 of n = 3f+1). Two certificates that
contradict each other for one channel and number cannot exist while at most f members lie and honest ones vote once.
"""

from __future__ import annotations

import hashlib
import hmac
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Literal, NamedTuple, Protocol, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

from planaria.swarm.board import identity

LAST_NUMBER = 999_999
MOST_HOPS = 64
MOST_MEMBERS = 256

Name = Annotated[str, Field(pattern=r"^[0-9A-Za-z_-]{1,64}$")]
Number = Annotated[int, Field(ge=0, le=LAST_NUMBER, strict=True)]
Credits = Annotated[int, Field(gt=0, le=10**15, strict=True)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Signature = Annotated[str, Field(pattern=r"^[0-9a-f]{0,256}$")]
Phase = Literal["lock", "settle"]


class Signer(Protocol):
    """Somebody's own key."""

    @property
    def name(self) -> str: ...

    def sign(self, data: bytes) -> str:
        """A signature, in hex."""
        ...


Verify = Callable[[str, str, bytes], bool]
"""(name, signature, data) → whether this is that name's signature of the data"""


class StandIn:
    """Signatures for simulations: an HMAC by a key made of the name. Cheap, and no protection: each holder of this
    object could sign for all. A simulated liar is given one :class:`Signer`, so it can lie only as itself."""

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


class PeerSigner:
    """Ed25519 by a peer's own identity; its name is the peer's id, a digest of the key, which the signature brings."""

    def __init__(self, own: identity.Identity) -> None:
        self.name, self._own = own.peer, own

    def sign(self, data: bytes) -> str:
        return (self._own.public + self._own.sign(data)).hex()


def verify_peer(name: str, signature: str, data: bytes) -> bool:
    """:data:`Verify` of what a :class:`PeerSigner` signs."""
    if len(signature) != 2 * (32 + 64):
        return False
    public, signed = bytes.fromhex(signature[:64]), bytes.fromhex(signature[64:])
    return identity.peer_id(public) == name and identity.verify(public, signed, data)


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def said(self) -> bytes:
        """What is signed."""
        return f"planaria credits {type(self).__name__} {self.model_dump_json(exclude={'signature'})}".encode()


class Order(_Plain):
    """So many credits are to go from the first party to the last, over one channel after the other: all or nothing."""

    kind: Literal["order"] = "order"
    parties: Annotated[tuple[Name, ...], Field(min_length=2, max_length=MOST_HOPS + 1)]
    channels: Annotated[tuple[Name, ...], Field(min_length=1, max_length=MOST_HOPS)]
    """between each party and the next"""
    numbers: Annotated[tuple[Number, ...], Field(max_length=MOST_HOPS)]
    """the place of this order in each channel's row: 0, 1, 2, …"""
    amount: Credits
    signature: Signature = ""
    """of the operator, who gives numbers"""

    @model_validator(mode="after")
    def _is_a_route(self) -> Self:
        if not len(self.parties) - 1 == len(self.channels) == len(self.numbers):
            raise ValueError("an order has one channel and one number for each party but the last")
        if len({*self.parties}) < len(self.parties) or len({*self.channels}) < len(self.channels):
            raise ValueError("a route passes each party and each channel once")
        return self

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.said()).hexdigest()

    def signed(self, by: Signer) -> Order:
        return self.model_copy(update={"signature": by.sign(self.said())})

    def hop(self, channel: str, number: int) -> int:
        """The place of a channel on the route; −1 if the order does not have this number there."""
        hops = zip(self.channels, self.numbers, strict=True)
        return next((place for place, hop in enumerate(hops) if hop == (channel, number)), -1)


class Statement(_Plain):
    """What a member finds: the order can be locked or is refused, or is settled for good as paid or as dropped."""

    phase: Phase
    channel: Name
    number: Number
    order: Digest
    yes: bool


class Vote(_Plain):
    """A member's word."""

    kind: Literal["vote"] = "vote"
    statement: Statement
    member: Name
    signature: Signature = ""

    @classmethod
    def of(cls, statement: Statement, by: Signer) -> Vote:
        return cls(statement=statement, member=by.name, signature=by.sign(statement.said()))


class Certificate(_Plain):
    """Votes of enough members for one statement, with the order that it is about."""

    kind: Literal["certificate"] = "certificate"
    statement: Statement
    order: Order
    votes: Annotated[tuple[tuple[Name, Signature], ...], Field(max_length=MOST_MEMBERS)]


Message = Order | Vote | Certificate
MESSAGE: TypeAdapter[Message] = TypeAdapter(Annotated[Message, Field(discriminator="kind")])


class Letter(NamedTuple):
    """A message for some members of a channel's committee."""

    channel: str
    to: tuple[str, ...]
    message: Message


Committees = Mapping[str, tuple[str, ...]]
"""channel → the names of its members, in order"""


def quorum(members: int) -> int:
    """n − ⌊(n−1)/3⌋: any two such sets share more members than may lie, and honest ones alone are as many."""
    return members - (members - 1) // 3


def valid(certificate: Certificate, committees: Committees, verify: Verify) -> bool:
    """Did enough distinct members of the statement's committee sign it, about the order that is with it?"""
    statement, order = certificate.statement, certificate.order
    members = committees.get(statement.channel, ())
    if not members or statement.order != order.digest or order.hop(statement.channel, statement.number) < 0:
        return False
    said, needed = statement.said(), quorum(len(members))
    signers = {name: signature for name, signature in certificate.votes if name in members}
    good = (name for name, signature in signers.items() if verify(name, signature, said))
    return sum(1 for _ in itertools.islice(good, needed)) == needed
