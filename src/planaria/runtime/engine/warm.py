"""A worker's first passes, before it has a stage: they warm it up, and say how fast it is."""

from __future__ import annotations

import time

import torch

from planaria.config.schema import RunConfig
from planaria.models.llama import document_mask
from planaria.models.stages import stage_layers
from planaria.runtime.engine.runner import StageRunner
from planaria.runtime.engine.sleeper import new_runner

_TIMED_S, _LEAST = 0.5, 3
"""for how long passes are timed, and how many at least"""


def warm_runner(config: RunConfig) -> StageRunner:
    """A block stage that has seen one pass and one update: first calls are slow, and a rebirth should not pay."""
    runner = new_runner(config, 1, initialise=True)
    _pass(config, runner)
    runner.finish()
    runner.commit(0)
    return runner


def layer_seconds(config: RunConfig, runner: StageRunner) -> float:
    """Seconds that one layer's forward and backward pass of a microbatch take: the least of several.

    On CPUs it is processor time, divided by the threads: workers that start beside this one would be taken for its
    slowness.
    """
    threads, clock = (1, time.monotonic) if config.train.device == "cuda" else (config.fleet.threads, time.process_time)
    layers, until = len(stage_layers(config.model, config.pipeline.stages, 1)), time.monotonic() + _TIMED_S
    taken: list[float] = []
    while len(taken) < _LEAST or time.monotonic() < until:
        began = clock()
        _pass(config, runner)
        if config.train.device == "cuda":
            torch.cuda.synchronize()
        taken.append(clock() - began)
        runner.drop()
    return min(taken) / threads / layers


def device_memory(config: RunConfig) -> int:
    """Bytes of this worker's CUDA device, as far as the recipe lets it have them; 0 on CPUs."""
    if config.train.device != "cuda":
        return 0
    _, there = torch.cuda.mem_get_info()
    return int(there * config.fleet.gpu_share)


def _pass(config: RunConfig, runner: StageRunner) -> None:
    x = torch.zeros(config.pipeline.microbatch_size, config.model.context, config.model.dim)
    mask = document_mask(x[..., 0], separator=-1)
    runner.begin(None, True, 1, (lambda _: mask) if config.data.document_mask else None)
    runner.forward(0, 1, x)
    runner.backward(0, 1, x)
