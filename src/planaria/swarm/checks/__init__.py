"""What is examined before anything is learned: a registry of checks."""

from __future__ import annotations

from planaria.common.errors import UserError
from planaria.config.registry import Registry
from planaria.swarm.checks.base import Check
from planaria.swarm.checks.consensus import Filter, Reward
from planaria.swarm.checks.judge import Judge, Noisy, Steps
from planaria.swarm.checks.prompted_judge import Prompted
from planaria.swarm.checks.tokens import ClaimsCheck, DuplicatesCheck, SupportCheck, SurprisalCheck
from planaria.swarm.config import CONSENSUS, DefenceConfig, SwarmConfig

CHECKS: Registry[Check] = Registry(
    "check",
    "defence.checks",
    Check,  # type: ignore[type-abstract]
    {
        "claims": ClaimsCheck,
        "support": SupportCheck,
        "surprisal": SurprisalCheck,
        "duplicates": DuplicatesCheck,
        "steps": Steps,
        "noisy": Noisy,
        "model": Prompted,
    },
)


def names(config: DefenceConfig) -> list[str]:
    """The checks that a recipe names, in the order in which completions pass them."""
    return [name.strip() for name in config.checks.split(",") if name.strip()]


def checks(config: DefenceConfig) -> list[Check]:
    """The checks that the recipe names.

    :raises UserError: naming the check or option that is unknown, or what else keeps a check from being made.
    """
    made = list(CHECKS.make_all(names(config), config.options).values())
    layers = [check.name for check in made]
    if len({*layers}) < len(names(config)):
        raise UserError(f"defence.checks = {config.checks!r}: every layer ({', '.join(layers)}) can be there but once")
    return made


def layers(config: SwarmConfig) -> list[Check]:
    """All layers of a peer: the checks that its recipe names and, behind all but the judge, the vote if there is one.

    Whom an earlier layer refuses has no vote, and the judge reads what the vote rewards. UserError as :func:`checks`.
    """
    made, agreement = checks(config.defence), config.task.agreement
    voting = config.task.reward == CONSENSUS
    if not voting and not config.defence.consensus:
        return made
    place = next((n for n, check in enumerate(made) if isinstance(check, Judge)), len(made))
    return [*made[:place], Reward(agreement=agreement) if voting else Filter(agreement=agreement), *made[place:]]
