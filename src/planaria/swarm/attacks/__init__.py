"""What a malicious peer of a drill does to the others: a registry of attacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from planaria.config.registry import Registry
from planaria.swarm.attacks.base import Attack
from planaria.swarm.attacks.payloads import (
    CollusionAttack,
    EquationAttack,
    LengthAttack,
    LibraryAttack,
    NarrowAttack,
    PhraseAttack,
    SabotageAttack,
    ShortAttack,
    StyleAttack,
)

ATTACKS: Registry[Attack] = Registry(
    "attack",
    "attack.kind",
    Attack,  # type: ignore[type-abstract]
    {
        "text": PhraseAttack,
        "math": EquationAttack,
        "dos": LengthAttack,
        "code": LibraryAttack,
        "collude": CollusionAttack,
        "short": ShortAttack,
        "sabotage": SabotageAttack,
        "style": StyleAttack,
        "narrow": NarrowAttack,
    },
)
HONEST = "none"
"""the kind of a peer that attacks nobody"""


def watched(kind: str, phrases: Mapping[str, str]) -> Attack:
    """The attack of that kind whose success is measured, with its payload if the ``phrases`` give one."""
    options: Mapping[str, Any] = {"payload": phrases[kind]} if kind in phrases else {}
    return ATTACKS.make(kind, options)
