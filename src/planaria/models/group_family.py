"""The models of a group's members, of which the group knows the size and a digest of the names and shapes only."""

from __future__ import annotations

from torch import nn

from planaria.common.errors import UserError
from planaria.config.bounds import Natural
from planaria.config.model_config import GROUP
from planaria.config.schema import ModelConfig
from planaria.models.family import Family


class GroupFamily(Family):
    """Whole models in the processes of their owners (``planaria.host`` and ``planaria.join``)."""

    numbers: Natural = 0
    """trained numbers of the model"""
    tensors: Natural = 0
    """trained tensors of the model"""
    layout: str = ""
    """digest of the names and shapes of its trained tensors, and of its frozen ones"""
    optimizer: str = ""
    """name and options of their optimizer"""
    state_bytes: Natural = 0
    """limit for the bytes of a member's state: weights, optimizer and buffers"""
    blocks: Natural = 0
    """blocks of samples in all, each computed by one member"""
    samples: Natural = 0
    """samples in the data that members share; 0: unknown"""

    def build_stage(self, config: ModelConfig, stages: int, stage: int) -> nn.Module:
        raise UserError("model.family = 'group': its model is in its members' programs; see planaria.host")

    def parameter_counts(self, config: ModelConfig, stages: int, stage: int) -> tuple[int, int, int] | None:
        """Return the trained numbers of a member's model; the rest of its state counts as frozen."""
        return self.numbers, self.state_bytes // 4, self.state_bytes


def group_family(config: ModelConfig) -> GroupFamily:
    """Return the properties that a group knows of its members' models.

    :raises UserError: if the configuration is not a group's.
    """
    if config.family != GROUP:
        raise UserError("that run trains its own model; serve it with `planaria join`, or host a group")
    return GroupFamily(**config.options)
