"""Draw of a peer's own and other peers' groups to learn from: SAPO (arXiv 2509.08721)."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import replace

from planaria.swarm.config.rounds_config import RoundsConfig
from planaria.swarm.learning.advantages import Advantages
from planaria.swarm.peer.random_draws import derive_seed
from planaria.swarm.peer.rollout import Rollout

log = logging.getLogger(__name__)
GroupName = tuple[int, str]
"""(problem, peer) of a group in vertical mode"""


def group_of(rollout: Rollout) -> GroupName:
    return rollout.problem.number, rollout.peer


def draw_groups(
    own: Sequence[GroupName], foreign: Sequence[GroupName], rounds: RoundsConfig, *purpose: object
) -> tuple[list[GroupName], list[GroupName]]:
    """Return I = ``rounds.own`` of the own and J = ``rounds.foreign`` of the foreign groups, or all if there are fewer.

    Draws are uniform without replacement, and repeat for equal groups in equal order and an equal ``purpose``, which
    contains the run's seed. The two draws are independent of each other.
    """
    wanted = {"own": (own, rounds.own or 0), "foreign": (foreign, rounds.foreign or 0)}
    first, second = (
        random.Random(derive_seed("mixing", *purpose, kind)).sample(groups, min(count, len(groups)))
        for kind, (groups, count) in wanted.items()
    )
    return first, second


def mix(
    advantages: Advantages, rollouts: Sequence[Rollout], me: str, rounds: RoundsConfig, *purpose: object
) -> Advantages:
    """Return the completions of the drawn groups, in the order of ``advantages``.

    Flat groups, which have no advantages, are dropped before the draw as ``rounds.drop_flat`` requires. Flat groups
    that are drawn count as drawn, without effect. If there are fewer groups than required, that is logged.

    :param rollouts: the round's completions, rewarded by this peer
    :param me: this peer's id
    """
    learnable = {group_of(rollout) for rollout in advantages.rollouts}
    groups = sorted({group_of(rollout) for rollout in rollouts})
    own = [group for group in groups if group[1] == me and (rounds.drop_flat != "all" or group in learnable)]
    foreign = [group for group in groups if group[1] != me and (rounds.drop_flat == "none" or group in learnable)]
    own_drawn, foreign_drawn = draw_groups(own, foreign, rounds, *purpose)
    for key, wanted, got in (("own", rounds.own, len(own_drawn)), ("foreign", rounds.foreign, len(foreign_drawn))):
        if got < (wanted or 0):
            log.info("learns from %d groups of rounds.%s = %d: no more are available", got, key, wanted)
    chosen = {*own_drawn, *foreign_drawn}
    rollouts = [rollout for rollout in advantages.rollouts if group_of(rollout) in chosen]
    return replace(advantages, rollouts=rollouts, groups=len(chosen & learnable))
