"""Members of a committee that lie, for simulations: silent, talking garbage, or telling two stories."""

from __future__ import annotations

import random
from typing import Protocol

from planaria.swarm.credits.messages import Certificate, Letter, Message, Order, Signer, Statement, Vote
from planaria.swarm.credits.psync import Member


class Node(Protocol):
    """Anybody in a committee: a member, or a liar in its place."""

    @property
    def name(self) -> str: ...

    def receive(self, message: Message) -> list[Letter]: ...

    def prompt(self) -> list[Letter]: ...


class Silent:
    """Says nothing."""

    def __init__(self, inner: Member, me: Signer, chance: random.Random) -> None:
        self.name, self.inner, self.me, self.chance = inner.name, inner, me, chance

    def receive(self, message: Message) -> list[Letter]:
        return []

    def prompt(self) -> list[Letter]:
        return []


class Garbage(Silent):
    """Answers with other members' names on its own signature, unsigned votes, and certificates of its own word."""

    def receive(self, message: Message) -> list[Letter]:
        return [
            Letter(letter.channel, letter.to, self._spoilt(letter.message)) for letter in self.inner.receive(message)
        ]

    def _spoilt(self, message: Message) -> Message:
        match message:
            case Vote():
                other = _turned(message.statement)
                forged = Vote.of(other, self.me).signature
                return message.model_copy(update={"member": self.chance.choice(["x", self.name]), "signature": forged})
            case Certificate():
                said, own = _turned(message.statement), Vote.of(_turned(message.statement), self.me).signature
                signers = tuple((name, own) for name, _ in message.votes)
                return message.model_copy(update={"statement": said, "votes": signers})
            case Order():
                return message


class TwoStories(Silent):
    """Votes one way to some and the other way to the rest, signing both; what it passes on, some never get."""

    def receive(self, message: Message) -> list[Letter]:
        return [told for letter in self.inner.receive(message) for told in self._stories(letter)]

    def _stories(self, letter: Letter) -> list[Letter]:
        to = list(letter.to)
        some = set(self.chance.sample(to, self.chance.randint(0, len(to))))
        told = [Letter(letter.channel, tuple(name for name in to if name in some), letter.message)]
        if isinstance(letter.message, Vote):
            other = Vote.of(_turned(letter.message.statement), self.me)
            told.append(Letter(letter.channel, tuple(name for name in to if name not in some), other))
        return told


def _turned(statement: Statement) -> Statement:
    return statement.model_copy(update={"yes": not statement.yes})


LIARS = (Silent, Garbage, TwoStories)
