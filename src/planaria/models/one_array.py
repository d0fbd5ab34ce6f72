"""Stages of one shared array: parameters per matrix, an array per layer, or one array for the whole model.

With one array for the whole model, every stage (stage 0 too) has the same parameters by the same names: the array from
which all layers' matrices are cut, the gains of all norms, the embedding table, and the head unless it is tied. Each
computes with its own layers only. Their gradients are summed in every step, so all stages stay equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import prod
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn

from planaria.config.model_config import ModelConfig
from planaria.models.llama_layers import DecoderLayer, RMSNorm, matrix_numbers
from planaria.models.sharing import MatrixCut, SharedNorm, stored_count, unfold
from planaria.models.subspace import dense_parts

SHARED, GAINS = "shared", "gains"
ROWS = ("input_layernorm.weight", "post_attention_layernorm.weight")
"""a layer's norms, in the order of their rows among all gains"""


def add_array(stage: nn.Module, config: ModelConfig) -> None:
    """Give a stage the array and the gains of the whole model."""
    stage.shared = nn.Parameter(torch.empty(stored_count(config.layers * matrix_numbers(config), config.share)))
    stage.gains = nn.Parameter(torch.ones(len(ROWS) * config.layers + 1, config.dim))


def layers_of(stage: nn.Module, config: ModelConfig, numbers: range) -> nn.ModuleList:
    """Return a stage's decoder layers, numbered ``numbers`` in the whole model."""
    if not config.one_array:
        return nn.ModuleList(DecoderLayer(config) for _ in numbers)
    return nn.ModuleList(DecoderLayer(config, _matrix_cut(stage, config, number)) for number in numbers)


def _matrix_cut(stage: nn.Module, config: ModelConfig, number: int) -> MatrixCut:
    rows = iter(range(len(ROWS) * number, len(ROWS) * (number + 1)))
    return MatrixCut(stage, lambda _, eps: SharedNorm(stage, next(rows), eps), number * matrix_numbers(config))


def final_norm(stage: nn.Module, config: ModelConfig) -> nn.Module:
    """Return the norm before the head; its gains are the last row."""
    if config.one_array:
        return SharedNorm(stage, len(ROWS) * config.layers, config.norm_eps)
    return RMSNorm(config.dim, config.norm_eps)


class StoredParameter(NamedTuple):
    """The origin of a dense model's parameter."""

    stored_name: str
    """the stored parameter, by global name"""
    shape: tuple[int, ...]
    extract: Callable[[Tensor], Tensor]
    """stored parameter → parameter"""


def stored_parameters(config: ModelConfig, names: Iterable[tuple[str, tuple[int, ...]]]) -> dict[str, StoredParameter]:
    """Return the location of each parameter of ``config.dense``, given the stored ones by global name and shape."""
    located = {
        name: StoredParameter(name, shape, lambda array: array)
        for name, shape in names
        if name.rpartition(".")[2] not in (SHARED, GAINS)
    }
    if config.subspace is not None:
        shapes = {name: location.shape for name, location in located.items()}
        located |= {name: StoredParameter(name, *location) for name, location in dense_parts(config, shapes)}
    for number in range(config.layers if config.share > 1 else 0):
        layer = f"model.layers.{number}"
        begin = number * matrix_numbers(config) if config.one_array else 0
        for name, shape in _matrices(config).items():
            array = f"{'model' if config.one_array else layer}.{SHARED}"
            located[f"{layer}.{name}"] = StoredParameter(array, shape, partial(unfold, begin=begin, shape=shape))
            begin += prod(shape)
        if config.one_array:
            rows = enumerate(ROWS, len(ROWS) * number)
            located |= {f"{layer}.{name}": _gain(config, row) for row, name in rows}
    if config.one_array:
        located["model.norm.weight"] = _gain(config, len(ROWS) * config.layers)
    return located


def _gain(config: ModelConfig, row: int) -> StoredParameter:
    return StoredParameter(f"model.{GAINS}", (config.dim,), itemgetter(row))


def _matrices(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a layer's matrices, in the order in which they are cut."""
    with torch.device("meta"):
        layer = DecoderLayer(config.dense)
    return {name: tuple(p.shape) for name, p in layer.named_parameters() if p.dim() > 1}
