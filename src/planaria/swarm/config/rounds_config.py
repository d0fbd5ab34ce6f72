"""Rounds section of a recipe. Imports no torch: every command's help reads this module."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from planaria.config import bounds
from planaria.config.bounds import Natural, Positive
from planaria.config.schema import Section
from planaria.swarm.board.message_limits import LAST_ROUND

MAX_COMPLETIONS = 1 << 16
"""maximum completions in a round of all peers, as every peer reads them all"""
Rounds = Annotated[int, Field(gt=0), bounds.at_most(LAST_ROUND + 1, "a message's number of its round has six digits")]
Completions = Annotated[
    int, Field(gt=0), bounds.at_most(MAX_COMPLETIONS, "every peer reads all completions of a round")
]
Share = Annotated[float, Field(gt=0, le=1)]


class RoundsConfig(Section):
    count: Rounds = 80
    """rounds in the run"""
    mode: Literal["horizontal", "vertical"] = "horizontal"
    """all peers complete the same problems (horizontal), or each completes groups of separate problems (vertical)"""
    prompts: Completions = 16
    """problems per round, of all peers together"""
    group: Completions = 12
    """completions per problem"""
    gather: bool = True
    """learn from the other peers' completions too; otherwise each learns alone"""
    quorum: Share = 0.5
    """share of the known peers with which a round closes after its timeout"""
    timeout_s: Annotated[float, Field(gt=0)] = 60.0
    """time that a round waits for missing peers"""
    patience_s: Annotated[float, Field(gt=0)] = 600.0
    """time that a round waits for its quorum before the run stops"""
    keep: Natural = 10
    """rounds between saved states, for restarts and exports; the state after the last round is saved too; 0: never"""
    kept: Positive = 1
    """number of newest saved states to keep"""
    trusted: Natural = 0
    """round after which a state is kept permanently as the target of repairs; 0: none, repairs use the initial state"""
    ahead: Natural = 0
    """rounds between the weights that draw a round's completions and those that learn from them; a server
    (policy.server) draws while the peer learns. 0: drawing and learning take turns"""
    own: Natural | None = None
    """vertical: number of own groups that a peer draws to learn from in each round; default: all of all peers"""
    foreign: Natural | None = None
    """vertical: number of the other peers' groups to draw; fewer if fewer are available"""
    drop_flat: Literal["foreign", "all", "none"] = "foreign"
    """groups without effect (all rewards equal) to drop before the draw: other peers', all, or none"""

    @model_validator(mode="after")
    def _check_ahead(self) -> Self:
        if self.ahead >= self.count:
            raise ValueError(
                f"rounds.ahead = {self.ahead}: all rounds (rounds.count = {self.count}) would be drawn with the "
                "initial weights; use a smaller value, such as 1"
            )
        return self

    @model_validator(mode="after")
    def _check_own_and_foreign(self) -> Self:
        if self.own is None or self.foreign is None:
            set_field, missing = ("own", "foreign") if self.foreign is None else ("foreign", "own")
            if getattr(self, set_field) is not None:
                raise ValueError(
                    f"rounds.{set_field} = {getattr(self, set_field)} needs rounds.{missing}; set both, or neither"
                )
            if self.drop_flat != "foreign":
                raise ValueError(f"rounds.drop_flat = {self.drop_flat!r} needs rounds.own and rounds.foreign; set both")
            return self
        if self.mode != "vertical":
            raise ValueError(
                f"rounds.own, rounds.foreign: with rounds.mode = {self.mode!r} a group has completions of all peers; "
                "set rounds.mode = 'vertical'"
            )
        if not self.own and not self.foreign:
            raise ValueError("rounds.own = 0 and rounds.foreign = 0: nothing to learn from; increase one of them")
        unchanged = {"all": "own", "none": "foreign"}.get(self.drop_flat, "")
        if unchanged and not getattr(self, unchanged):
            raise ValueError(
                f"rounds.drop_flat = {self.drop_flat!r} differs from 'foreign' only for {unchanged} groups, and has no "
                f"effect with rounds.{unchanged} = 0; remove it"
            )
        if self.foreign and not self.gather:
            raise ValueError(f"rounds.foreign = {self.foreign}: rounds.gather = false receives no groups; set it to 0")
        return self
