"""What a recipe's stages take on a CUDA device."""

from __future__ import annotations

from planaria.config import RunConfig
from planaria.fleet.devices import ON_CPUS, Needs
from planaria.model.families import stage_parameters
from planaria.network.costs import FP32_BYTES

COPIES = 4
"""fp32 numbers for each parameter: the weight, its gradient, and AdamW's two moments"""


def needs(config: RunConfig) -> Needs:
    """16 bytes for each parameter of each stage; nothing on CPUs.

    A lower bound: activations, copies that recovery keeps, and CUDA's own half a gigabyte for each process come on top.
    """
    if config.train.device != "cuda":
        return ON_CPUS
    stages = config.pipeline.stages
    counts = (stage_parameters(config.model, stages, stage) for stage in range(stages + 1))
    return Needs(tuple(COPIES * FP32_BYTES * count for count in counts))
