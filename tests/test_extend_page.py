"""The members that docs/extend.md names exist in the classes of its sections."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from planaria.config.registry import Choice
from planaria.exchange.aggregate import AggregatingExchange
from planaria.exchange.base import Exchange
from planaria.exchange.gossip import Gossip
from planaria.models.family import EndsStage, Family
from planaria.models.optimizers.base import Optimizer
from planaria.pipeline.codecs.base import WireCodec
from planaria.recovery.base import Recovery
from planaria.report.observe.tracker import Tracker
from planaria.swarm.checks.base import Check
from planaria.swarm.tasks.base import Task

PAGE = Path(__file__).parents[1] / "docs/extend.md"
CLASSES: dict[str, tuple[type, ...]] = {
    "A recovery strategy": (Recovery,),
    "An exchange": (Exchange, AggregatingExchange, Gossip),
    "A codec between stages": (WireCodec,),
    "An optimizer": (Optimizer,),
    "A model family": (Family, EndsStage),
    "A tracker": (Tracker,),
    "A task and a check": (Task, Check),
}
NO_MEMBERS = {"step", "echo", "steps"}
"""names in the text that are no members of the classes: a key of an optimizer's state, a strategy, a check"""


def sections() -> dict[str, str]:
    """Return the text below each heading of the page."""
    _, *parts = PAGE.read_text().split("\n## ")
    return dict(part.split("\n", 1) for part in parts)


@pytest.mark.parametrize("heading", CLASSES)
def test_each_named_member_exists(heading: str) -> None:
    named = re.findall(r"`([a-z_]+)(?:\([a-z_, ]*\))?`", sections()[heading])
    owners = [base for owner in CLASSES[heading] for base in owner.__mro__]
    known = {member for owner in owners for member in [*vars(owner), *vars(owner).get("__annotations__", ())]}
    assert len({*named} & known) >= 2, f"docs/extend.md, {heading}: names no members"
    assert not {*named} - known - NO_MEMBERS


def test_each_optional_member_of_a_family_is_described() -> None:
    described = set(re.findall(r"`([a-z_]+)", sections()["A model family"]))
    members = {name for name in vars(Family) if not name.startswith("_") and name not in vars(Choice)}
    assert not members - described
