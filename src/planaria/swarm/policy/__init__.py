"""Registry of the sources of a peer's policy."""

from __future__ import annotations

from planaria.config.registry import Registry
from planaria.swarm.policy.sources import PolicySource, Pretrained, Small

POLICIES: Registry[PolicySource] = Registry(
    "policy",
    "policy.kind",
    PolicySource,  # type: ignore[type-abstract]
    {"small": Small, "pretrained": Pretrained},
)
