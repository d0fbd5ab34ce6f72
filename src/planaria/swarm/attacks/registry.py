"""The attacks by name."""

from __future__ import annotations

from typing import Literal, get_args

from planaria.swarm.attacks.base import Attack
from planaria.swarm.attacks.equation import EquationAttack
from planaria.swarm.attacks.length import LengthAttack
from planaria.swarm.attacks.library import LibraryAttack
from planaria.swarm.attacks.phrase import PhraseAttack

Kind = Literal["text", "math", "dos", "code"]
KINDS: tuple[Kind, ...] = get_args(Kind)


def open_attack(kind: Kind, payload: str = "", placement: Literal["start", "every"] = "start") -> Attack:
    """The attack ``kind`` with its own payload unless one is given; UserError when that makes no sense."""
    if kind == "text":
        return PhraseAttack(payload, placement)
    if kind == "math":
        return EquationAttack(payload)
    return LengthAttack() if kind == "dos" else LibraryAttack(payload)
