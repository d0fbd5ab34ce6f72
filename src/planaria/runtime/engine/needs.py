"""What a recipe's stages take of the machines they are on: memory of a CUDA device, and work."""

from __future__ import annotations

from planaria.config.schema import RunConfig
from planaria.models.families import stage_parameters
from planaria.models.stages import stage_layers
from planaria.pipeline.network.costs import FP32_BYTES
from planaria.runtime.fleet.devices import ON_CPUS, Needs

COPIES = 4
"""fp32 numbers for each parameter: the weight, its gradient, and AdamW's two moments"""


def needs(config: RunConfig) -> Needs:
    """16 bytes for each parameter of each stage; nothing on CPUs.

    A lower bound: activations, copies that recovery keeps, and CUDA's own half a gigabyte for each process come on top.
    """
    if config.train.device != "cuda":
        return ON_CPUS
    config = least(config) if config.pipeline.layers == "auto" else config
    taken = (COPIES * FP32_BYTES * count for count in _parameters(config))
    return Needs(tuple(taken), sized=config.pipeline.unlike)


def work(config: RunConfig) -> list[float]:
    """What a pass of stages 0..S takes, in passes of a decoder layer: the head's as its product with the embeddings is
    to a layer's parameters."""
    model, stages = config.model, config.pipeline.stages
    held = [len(stage_layers(model, stages, stage)) for stage in range(stages + 1)]
    layer = _parameters(config)[1] / held[1]
    return [held[0] + model.vocab * model.dim / layer, *map(float, held[1:])]


def least(config: RunConfig) -> RunConfig:
    """The recipe with one layer in each block stage: what any machine must have room for."""
    stages, model = config.pipeline.stages, config.model
    sizes = {"layers": model.ends_layers + stages, "block_layers": (1,) * stages}
    return config.model_copy(update={"model": model.model_copy(update=sizes)})


def _parameters(config: RunConfig) -> list[int]:
    """Of stages 0..S."""
    stages = config.pipeline.stages
    return [stage_parameters(config.model, stages, stage) for stage in range(stages + 1)]
