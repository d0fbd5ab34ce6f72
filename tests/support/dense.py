"""Conversion of a model in one array to an ordinary one."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from planaria.config.schema import ModelConfig
from planaria.models.one_array import stored_parameters


def dense_state(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Return weights by global name as a model of ``config.dense`` has them."""
    shapes = [(name, tuple(tensor.shape)) for name, tensor in state.items()]
    return {name: part.extract(state[part.stored_name]) for name, part in stored_parameters(config, shapes).items()}
