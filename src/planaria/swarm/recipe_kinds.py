"""The swarm's kinds of recipe."""

from __future__ import annotations

from planaria.config.kinds import RecipeKind
from planaria.swarm.config.swarm_config import SwarmConfig

KINDS = (RecipeKind("swarm", SwarmConfig, "swarm train"), RecipeKind("drill", SwarmConfig, "compare", has_table=True))
