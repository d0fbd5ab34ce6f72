"""Who signs what a round was, and what a certified one costs."""

from __future__ import annotations

import re
from typing import Annotated, Self

from pydantic import BeforeValidator, model_validator

from planaria.config.bounds import Natural
from planaria.config.schema import Section
from planaria.swarm.board.limits import LIMITS

Committee = Annotated[str, BeforeValidator(lambda given: ",".join(given) if _all_text(given) else given)]
"""a recipe may write it as a list"""
ALL_PEERS = "all"
"""as a committee: the peers that one machine starts"""
_PEER_ID = re.compile("[0-9a-f]{32}")


def _all_text(given: object) -> bool:
    return isinstance(given, list) and all(isinstance(part, str) for part in given)


class ReceiptsConfig(Section):
    """Founder's rules: which peers' signatures, together, settle what a round was."""

    committee: Committee = ""
    """ids of the members, separated by commas, or all: the peers that this machine starts; empty: none. At most a third
    of them, less one, may lie"""
    price: Natural = 0
    """credits that a peer owes for each accepted completion of another's in a certified round; 0: none"""

    @property
    def members(self) -> list[str]:
        """The ids, as far as they are named."""
        return [] if self.committee in ("", ALL_PEERS) else [part.strip() for part in self.committee.split(",")]

    @model_validator(mode="after")
    def _names_peers(self) -> Self:
        members = self.members
        for peer in members:
            if not _PEER_ID.fullmatch(peer):
                raise ValueError(f"committee: {peer[:40]!r} is no peer's id; write 32 hexadecimal digits, or 'all'")
        if twice := [peer for peer in members if members.count(peer) > 1]:
            raise ValueError(f"committee: {twice[0]} is named twice; name each member once")
        if len(members) > LIMITS.peers:
            raise ValueError(f"committee: {len(members)} members, of at most {LIMITS.peers}; name fewer")
        if self.price and not self.committee:
            raise ValueError(f"price = {self.price}: only certified rounds are priced; name a committee")
        return self
