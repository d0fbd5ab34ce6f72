"""Alike decoder layers and block stages: only these can be averaged with, or copied from, their neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from planaria.config.schema import ModelConfig
from planaria.models.llama_stages import stage_layers

_INDEX = ("layer_idx", "layer_id", "layer_number", "layer_index", "idx", "index", "block_idx")
"""attributes that number a layer, whatever it computes"""
Signature = tuple[object, ...]


def signature(layer: nn.Module) -> Signature:
    """Return the properties that two equal layers share: class, plain attributes and parameter shapes of each
    submodule."""
    return tuple(
        (
            name,
            type(module).__qualname__,
            tuple(sorted((key, repr(value)) for key, value in vars(module).items() if _is_plain_setting(key, value))),
            tuple((key, tuple(parameter.shape)) for key, parameter in module.named_parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


def _is_plain_setting(key: str, value: object) -> bool:
    named = not key.startswith("_") and key not in _INDEX and key != "training"
    return named and isinstance(value, str | int | float | bool | None)


def kinds(layers: Sequence[nn.Module]) -> tuple[int, ...]:
    """Return the kind of each layer: equal numbers for equal signatures, in the order of their first layer."""
    numbers: dict[Signature, int] = {}
    return tuple(numbers.setdefault(signature(layer), len(numbers)) for layer in layers)


def unlike_stages(of_layers: Sequence[int], config: ModelConfig, stages: int) -> str:
    """Return how the block stages differ, and the next cut with equal ones, or an empty string if they are alike.

    ``of_layers``: the kind of each layer of the model.
    """
    sequences = _kinds_by_stage(of_layers, config, stages)
    if len(set(sequences)) == 1:
        return ""
    first = sequences[0]
    differing = next(sequence for sequence in sequences if sequence != first)
    shown = " and ".join("".join(map(letter, sequence)) for sequence in (first, differing))
    return f"block stages have different kinds of layers ({shown}); {_next_cut(of_layers, config, stages)}"


def letter(kind: int) -> str:
    """Return a letter for a kind of layer.

    >>> letter(0), letter(1)
    ('A', 'B')
    """
    return chr(ord("A") + kind % 26)


def _kinds_by_stage(of_layers: Sequence[int], config: ModelConfig, stages: int) -> list[tuple[int, ...]]:
    cut = (stage_layers(config, stages, stage) for stage in range(1, stages + 1))
    return [tuple(of_layers[number] for number in layers) for layers in cut]


def _next_cut(of_layers: Sequence[int], config: ModelConfig, stages: int) -> str:
    """Return the settings nearest to ``stages`` and ``ends_layers`` under which block stages are alike."""
    cuts = [
        (abs(count - stages) + abs(ends - config.ends_layers), -count, ends)
        for count in range(2, len(of_layers) + 1)
        for ends in range(len(of_layers) - count + 1)
        if _are_alike(of_layers, config, count, ends)
    ]
    if not cuts:
        return "no cut has equal ones"
    _, count, ends = min(cuts)
    equal = " and without pipeline.layers" if config.block_layers else ""
    return f"they are alike with pipeline.stages = {-count}, model.ends_layers = {ends}{equal}"


def _are_alike(of_layers: Sequence[int], config: ModelConfig, stages: int, ends: int) -> bool:
    if (len(of_layers) - ends) % stages:
        return False
    cut = config.model_copy(update={"ends_layers": ends, "block_layers": None})
    return len(set(_kinds_by_stage(of_layers, cut, stages))) == 1
