"""Memory and work of a decoder's stages: one layer of each kind is counted, and stages are sums of layers."""

from __future__ import annotations

import logging
from contextlib import suppress
from functools import lru_cache

import torch

from planaria.config.schema import ModelConfig
from planaria.models.activations import PassBytes, PassMode
from planaria.models.counting import Count, count
from planaria.models.llama_stages import stage_layers
from planaria.models.transformers.decoder import Decoder

log = logging.getLogger(__name__)
_PLAIN = PassMode(samples=1, device_bytes=0)


def pass_bytes(decoder: Decoder, model: ModelConfig, stages: int, stage: int, passes: PassMode) -> PassBytes | None:
    """Return the memory of a stage's passes, or None if one of its layers cannot be counted.

    Memory that layers share, such as rotary tables, counts for each of them.
    """
    counts = [_count_layer(decoder, model, number, passes) for number in stage_layers(model, stages, stage)]
    if stage == 0:
        counts.append(_count_ends(decoder, model, passes))
    passes_of = [layer.bytes for layer in counts if layer is not None]
    if len(passes_of) < len(counts):
        return None
    kept = sum(layer.kept for layer in passes_of)
    working = max(layer.working for layer in passes_of)
    if passes.recompute and stage:  # one layer at a time keeps its tensors, in its backward pass
        alone = [
            _count_layer(decoder, model, n, passes._replace(recompute=False))
            for n in stage_layers(model, stages, stage)
        ]
        working = max(working, *(layer.bytes.kept + layer.bytes.working for layer in alone if layer is not None))
    return PassBytes(kept, passes_of[-1].loss if stage == 0 else 0, working)


def layer_work(decoder: Decoder, model: ModelConfig) -> tuple[float, ...]:
    """Return the FLOPs of each layer's passes of one sample; their parameters where these cannot be counted."""
    counts = [_count_layer(decoder, model, number, _PLAIN) for number in range(model.layers)]
    if any(layer is None for layer in counts):
        return tuple(map(float, layer_parameters(decoder, model)))
    return tuple(layer.work for layer in counts if layer is not None)


def layer_parameters(decoder: Decoder, model: ModelConfig) -> tuple[int, ...]:
    """Return the number of parameters of each layer, frozen ones included."""
    kinds = decoder.facts.kinds
    alone = _one_layer_stages(decoder, model)
    return tuple(_layer_size(decoder, kinds.index(kinds[number]), alone) for number in range(model.layers))


def _one_layer_stages(decoder: Decoder, model: ModelConfig) -> ModelConfig:
    """Return the whole model with one layer in each stage."""
    return model.model_copy(update={"layers": decoder.facts.layers, "ends_layers": 0, "block_layers": None})


@lru_cache(maxsize=256)
def _layer_size(decoder: Decoder, number: int, alone: ModelConfig) -> int:
    with torch.device("meta"):
        built = decoder.build(alone, alone.layers, number + 1)
    frozen = built.layers.buffers() if decoder.lora is not None else ()
    return sum(tensor.numel() for tensor in (*built.layers.parameters(), *frozen))


def _count_layer(decoder: Decoder, model: ModelConfig, number: int, passes: PassMode) -> Count | None:
    kinds = decoder.facts.kinds
    return _count_stage(decoder, _one_layer_stages(decoder, model), kinds.index(kinds[number]) + 1, passes)


def _count_ends(decoder: Decoder, model: ModelConfig, passes: PassMode) -> Count | None:
    return _count_stage(decoder, _one_layer_stages(decoder, model), 0, passes)


@lru_cache(maxsize=256)
def _count_stage(decoder: Decoder, alone: ModelConfig, stage: int, passes: PassMode) -> Count | None:
    """Count a stage of one layer, or the ends without layers; return None if an operation cannot be counted."""
    try:
        with torch.device("meta"):
            built = decoder.build(alone, alone.layers, stage)
        built.recompute = passes.recompute and stage > 0
        with suppress(ValueError):  # of a model without experts
            built.frame.model.set_experts_implementation("grouped_mm")  # type: ignore[operator]  # as in training
        return count(built, stage == 0, decoder.facts.width, alone.context, passes)
    except Exception as error:  # the library may raise anything
        log.debug("stage %d of %s cannot be counted: %s", stage, decoder.config.model_type, error)
        return None
