"""What a peer trains: a registry of ways to come by a policy, each one class."""

from __future__ import annotations

from planaria.config.registry import Registry
from planaria.swarm.policy.sources import PolicySource, Pretrained, Small

POLICIES: Registry[PolicySource] = Registry(
    "policy",
    "policy.kind",
    PolicySource,  # type: ignore[type-abstract]
    {"small": Small, "pretrained": Pretrained},
)
