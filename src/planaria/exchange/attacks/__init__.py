"""Updates of Byzantine replicas: a registry of attacks.

A fault in a trace selects one:
``{ "signal": "corrupt_update", "attack": "sign_flip", "strength": 10, "until": 200, … }``.
"""

from __future__ import annotations

from pydantic import ValidationError

from planaria.common.errors import UserError, nearest
from planaria.exchange.attacks.base import UpdateAttack
from planaria.exchange.attacks.update_attacks import (
    Alie,
    Equivocate,
    Huge,
    Inf,
    Ipm,
    LabelFlip,
    Mimic,
    Nan,
    OwnFlip,
    Random,
    SignFlip,
    Stale,
    WrongSize,
    WrongType,
    Zero,
)

ATTACKS: dict[str, type[UpdateAttack]] = {
    "sign_flip": SignFlip,
    "own_flip": OwnFlip,
    "zero": Zero,
    "random": Random,
    "equivocate": Equivocate,
    "alie": Alie,
    "ipm": Ipm,
    "mimic": Mimic,
    "stale": Stale,
    "label_flip": LabelFlip,
    "nan": Nan,
    "inf": Inf,
    "huge": Huge,
    "wrong_size": WrongSize,
    "wrong_type": WrongType,
}
"""attacks by name; only planaria's own, because a trace may be untrusted and must not import classes"""

DEFAULT_ATTACK = "nan"
"""attack of a fault without ``attack``"""


def make_attack(name: str | None, strength: float | None) -> UpdateAttack:
    """Return the attack of a fault with its strength.

    :raises UserError: for an unknown attack or an invalid strength.
    """
    name = DEFAULT_ATTACK if name is None else name
    if name not in ATTACKS:
        raise UserError(f"attack = {name!r}: no such choice; {nearest(name, ATTACKS)}")
    chosen = ATTACKS[name]
    if strength is None:
        return chosen()
    if "strength" not in chosen.model_fields:
        raise UserError(f"attack {name!r} has no strength; remove it")
    try:
        return chosen.model_validate({"strength": strength})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]["msg"]
        raise UserError(f"strength = {strength:g} of attack {name!r}: {problem}") from None
