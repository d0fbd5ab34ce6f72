"""Decisions about rounds of the exchange: groups, begin and end, and replicas that missed one."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from planaria.control.facts.members import MemberLink
from planaria.control.facts.run_started import Fact


class DrawGroups(Fact):
    """A replica reached a round of the exchange: these are the groups of the round."""

    kind: Literal["draw_groups"] = "draw_groups"
    round: int
    groups: list[list[int]]


class RoundOrder(Fact):
    """Base of orders to the members of a round."""

    kind: str
    round: int
    members: list[int]
    """replicas"""
    generations: list[int]
    """their generations"""
    links: list[MemberLink]
    """connections between nodes of different members"""


class OpenPrefetchLinks(RoundOrder):
    """The members of a group will meet in this round: prefetched parts are sent from now on."""

    kind: Literal["open_prefetch_links"] = "open_prefetch_links"


class BeginRound(RoundOrder):
    """A round of the exchange: members exchange updates, stage by stage."""

    kind: Literal["begin_round"] = "begin_round"


class Settle(Fact):
    """The members combine the updates of a round."""

    kind: Literal["settle"] = "settle"
    round: int
    members: list[int]
    generations: list[int]
    left_out: dict[int, str] = Field(default_factory=dict)
    """replicas excluded from the round because of equivocation or repeated invalid updates, with the reason"""
    byzantine: list[int] = Field(default_factory=list)
    """those of them with proof"""
    counted: dict[int, dict[int, float]] = Field(default_factory=dict)
    """weight of each update in a member's result (member → update → weight), if updates are weighted over all stages"""
    contributors: list[int] = Field(default_factory=list)
    """replicas whose updates they combine; empty: the members themselves"""
    rivals: dict[str, dict[int, float]] = Field(default_factory=dict)
    """another rule → its weights for the first member, of updates with small weights"""


class Adopt(Fact):
    """A replica missed an agreement of the others and continues with a copy of one of them; in a decoupled exchange, of
    the rounds that it missed."""

    kind: Literal["adopt"] = "adopt"
    replica: int
    reason: str
