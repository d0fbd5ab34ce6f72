"""Survivor: where all stages hold one array (``model.share_over = "model"``), copy any surviving stage.

Every stage has all stored numbers of the model with their moments and applies the same updates. So nothing is sent or
kept besides training, and one survivor restores all others bit for bit.
"""

from __future__ import annotations

from typing import ClassVar

from planaria.recovery.base import DamagedReplica, Recovery, StrategyPlan, StrategyRequirements


class Survivor(Recovery):
    """Copy the nearest surviving stage."""

    requirements: ClassVar[StrategyRequirements] = StrategyRequirements(one_array=True)
    exact: ClassVar[bool] = True
    caption: ClassVar[str] = "{donors} has the same weights, and sends them"

    def donors(self, lost: frozenset[int], replica: DamagedReplica) -> StrategyPlan:
        left = [stage for stage in range(replica.stages + 1) if stage not in lost]
        if not left:
            return StrategyPlan(refused=dict.fromkeys(lost, "all stages are lost"))
        return StrategyPlan({stage: (min(left, key=lambda s: (abs(s - stage), s)),) for stage in sorted(lost)})
