"""Registry of checks that completions pass before a policy learns from them."""

from __future__ import annotations

from planaria.common.errors import UserError
from planaria.config.registry import Registry
from planaria.swarm.checks.base import Check
from planaria.swarm.checks.consensus import ConsensusReward, Filter
from planaria.swarm.checks.judge import Judge, Noisy, Steps
from planaria.swarm.checks.prompted_judge import Prompted
from planaria.swarm.checks.tokens import ClaimsCheck, DuplicatesCheck, ImprobableCheck, SupportCheck, SurprisalCheck
from planaria.swarm.config.swarm_config import CONSENSUS, DefenceConfig, SwarmConfig

CHECKS: Registry[Check] = Registry(
    "check",
    "defence.checks",
    Check,  # type: ignore[type-abstract]
    {
        "claims": ClaimsCheck,
        "support": SupportCheck,
        "surprisal": SurprisalCheck,
        "improbable": ImprobableCheck,
        "duplicates": DuplicatesCheck,
        "steps": Steps,
        "noisy": Noisy,
        "model": Prompted,
    },
)


def check_names(config: DefenceConfig) -> list[str]:
    """Return the checks that a recipe names, in order of execution."""
    return [name.strip() for name in config.checks.split(",") if name.strip()]


def make_checks(config: DefenceConfig) -> list[Check]:
    """Return the checks of a recipe. UserError for an unknown check or option, or a repeated layer."""
    result = list(CHECKS.make_all(check_names(config), config.options).values())
    layers = [check.name for check in result]
    if len({*layers}) < len(check_names(config)):
        raise UserError(f"defence.checks = {config.checks!r}: every layer ({', '.join(layers)}) can occur only once")
    return result


def make_layers(config: SwarmConfig) -> list[Check]:
    """Return a peer's checks, with the vote, if any, before the judge. UserError as in :func:`make_checks`."""
    result, agreement = make_checks(config.defence), config.task.agreement
    voting = config.task.reward == CONSENSUS
    if not voting and not config.defence.consensus:
        return result
    index = next((n for n, check in enumerate(result) if isinstance(check, Judge)), len(result))
    return [
        *result[:index],
        ConsensusReward(agreement=agreement) if voting else Filter(agreement=agreement),
        *result[index:],
    ]
