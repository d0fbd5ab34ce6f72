"""Decisions about the rounds of the exchange: who meets whom, and what becomes of what they say."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planaria.record.members import Link
from planaria.record.started import Fact


class DrawGroups(Fact):
    """Somebody has come to a round of the exchange: these are the groups in which replicas meet in it."""

    kind: Literal["draw_groups"] = "draw_groups"
    round: int
    groups: list[list[int]]


class Introduce(Fact):
    """The members of a group will meet in this round: what can be said ahead is said from now on."""

    kind: Literal["introduce"] = "introduce"
    round: int
    members: list[int]
    """replicas"""
    generations: list[int]
    """theirs"""
    links: list[Link]
    """between nodes of different members"""


class Meet(Fact):
    """A round of the exchange: each member makes its peers an offer and hears theirs, stage by stage."""

    kind: Literal["meet"] = "meet"
    round: int
    members: list[int]
    generations: list[int]
    links: list[Link]
    """between nodes of different members"""


class Settle(Fact):
    """The members make of a round what all offers come to."""

    kind: Literal["settle"] = "settle"
    round: int
    members: list[int]
    generations: list[int]
    left_out: dict[int, str] = Field(default_factory=dict)
    """replicas that have told others different things, or may have, or have said what is of no use too often, and why:
    the round is gone on without them"""
    liars: list[int] = Field(default_factory=list)
    """those of them of which that is proved"""
    counted: dict[int, dict[int, float]] = Field(default_factory=dict)
    """where offers are judged over all stages: member → what those of each count in what it makes of the round"""
    rivals: dict[str, dict[int, float]] = Field(default_factory=dict)
    """another rule → what it would have counted, for the first member, of those that count little"""


class Adopt(Fact):
    """A replica has missed what others agreed upon: it goes on with a copy of one of them."""

    kind: Literal["adopt"] = "adopt"
    replica: int
    reason: str
