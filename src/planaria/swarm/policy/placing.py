"""Where a policy computes, and how much at once: a peer's own affair, as its machine is."""

from __future__ import annotations

import torch

from planaria.common.errors import UserError
from planaria.swarm.config import PolicyConfig
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.wording import Wording

BYTES = 4
"""of one number of logits"""


def device_of(config: PolicyConfig) -> torch.device:
    """The device that a configuration chooses on this machine.

    :raises UserError: when there is none of that kind, or it is too slow in the precision asked for.
    """
    cuda = config.device != "cpu" and torch.cuda.is_available()
    if config.device == "cuda" and not cuda:
        raise UserError(
            "policy.device = 'cuda': this machine has no CUDA device that PyTorch can use; write 'auto' or 'cpu'"
        )
    if config.precision == "bf16" and not cuda:
        raise UserError(
            "policy.precision = 'bf16' needs a CUDA device (policy.device): on CPUs it is many times slower"
        )
    return torch.device("cuda" if cuda else "cpu")


def placed(policy: Policy, config: PolicyConfig) -> Policy:
    """``policy``, moved to where it is to compute, with the room that it is given.

    :raises UserError: as :func:`device_of` does, and when a policy of one's own knows no other precision.
    """
    policy.module.to(device_of(config))
    if isinstance(policy, Wording):
        policy.room, policy.bf16 = (config.logits_mb << 20) // BYTES, config.precision == "bf16"
    elif config.precision != "fp32":
        raise UserError(
            f"policy.precision = {config.precision!r}: {type(policy).__name__} computes as it likes; leave it"
        )
    return policy
