"""Registry of attacks for drills and evaluations."""

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
    RewriteAttack,
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
        "rewrite": RewriteAttack,
    },
)
HONEST = "none"
"""kind of a peer that does not attack"""


def measured_attack(kind: str, phrases: Mapping[str, str]) -> Attack:
    """Return the attack of a kind to measure, with its payload from ``phrases`` if given."""
    options: Mapping[str, Any] = {"payload": phrases[kind]} if kind in phrases else {}
    return ATTACKS.make(kind, options)
