"""Memory of a run's stages on CUDA devices: predicted before the run, and settings that make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.models.activations import Passes
from planaria.models.families import family, stage_parameters
from planaria.models.optimizers import optimizer
from planaria.pipeline.network.costs import FP32_BYTES, message_bytes
from planaria.pipeline.plan.build import in_flight
from planaria.runtime.engine.origin import START, run_started
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.fleet.devices import NO_INVENTORY, Inventory, device_of, inventory
from planaria.runtime.transport.staging import DEPTH

CONTEXT = 800_000_000
"""bytes of a process's CUDA context, with the workspaces of cuBLAS and cuDNN; 0.80 GB on an H100"""
USABLE = 0.92
"""share of a device's memory to plan with; the allocator's fragments take the rest"""


class StageMemory(NamedTuple):
    """Predicted peak of one stage in bytes."""

    state: int
    """weights, gradients and moments"""
    kept: int
    """by microbatches between their forward and backward pass"""
    working: int
    """temporary tensors of a pass, and messages in transit"""
    start: int
    """tensors of the block stage with which every worker compiles and times a pass when it starts"""

    @property
    def tensors(self) -> int:
        """Peak of all tensors."""
        return max(self.state + self.kept + self.working, self.start)

    @property
    def peak(self) -> int:
        """Peak of the process."""
        return self.tensors + CONTEXT


def stage_memory(config: RunConfig, device_bytes: int) -> tuple[StageMemory, ...]:
    """Return the predicted peaks of stages 0..S on devices of ``device_bytes``; empty if the family gives no formula.

    All microbatches in flight may wait at one stage. ``recompute = "auto"`` counts as false.
    """
    model, pipeline, train = config.model, config.pipeline, config.train
    passes = Passes(
        samples=pipeline.microbatch_size,
        device_bytes=device_bytes,
        bf16=train.precision == "bf16",
        compiled=train.compile,
        recompute=train.recompute is True,
        masked=config.data.document_mask,
    )
    held = in_flight(pipeline, pipeline.microbatches)
    losses = held if pipeline.order == "gpipe" else 1
    copies, transit = 2 + len(optimizer(config.optim).keys), 2 * DEPTH * message_bytes(model, pipeline)
    stages = range(pipeline.stages + 1)
    needed = [one for n in stages if (one := family(model).pass_bytes(model, pipeline.stages, n, passes)) is not None]
    if len(needed) < len(stages):
        return ()
    weights = [FP32_BYTES * stage_parameters(model, pipeline.stages, stage) for stage in stages]
    start = weights[1] + needed[1].kept + needed[1].working
    return tuple(
        StageMemory(copies * size, held * one.kept + losses * one.loss, one.working + transit, start)
        for size, one in zip(weights, needed, strict=True)
    )


def fitted_here(config: RunConfig) -> tuple[RunConfig, str]:
    """Return ``config`` fitted to this machine's devices (:func:`fitted`), since others' are not known yet, and a line
    about it; "" on CPUs.
    """
    if config.train.device != "cuda":
        return _settled(config, False), ""
    found = inventory() if config.engine == "inline" or config.fleet.kind == "local" else NO_INVENTORY
    if config.engine == "inline":  # which computes on the first device
        found = Inventory(found.devices[:1], found.lacks)
    return fitted(config, found, run_started(ResolvedRun(config), START).own_workers)


def fitted(config: RunConfig, found: Inventory, workers: int) -> tuple[RunConfig, str]:
    """Return ``config`` with ``pipeline.in_flight`` and ``train.recompute`` chosen so that ``workers`` fit the devices,
    and a line about it.

    The microbatches in flight are reduced first, down to one more than there are devices; then, under ``recompute =
    "auto"``, activations are recomputed; then microbatches are reduced to one. Settings that the recipe gives stay.

    :raises UserError: if the given settings do not fit.
    """
    if not found.devices:
        return _settled(config, False), ""
    room = min(device.memory for device in found.devices)
    crowd, replicas = _most_workers(found, workers), config.exchange.most or config.exchange.replicas
    for choice in _choices(config, len(found.devices)):
        memory = stage_memory(choice, room)
        if not memory or _together(memory, crowd, replicas) <= USABLE * room:
            return choice, _line(choice, config, memory)
    raise UserError(_refusal(config, room, crowd, _together(memory, crowd, replicas)))


def _choices(config: RunConfig, devices: int) -> Iterator[RunConfig]:
    """Yield settings from the fastest to the smallest."""
    pipeline, automatic = config.pipeline, config.train.recompute == "auto"
    most = in_flight(pipeline, pipeline.microbatches)
    counts: Sequence[int | None] = [pipeline.in_flight] if pipeline.in_flight else [None, *range(most - 1, 0, -1)]
    flowing = [count for count in counts if count is None or count > devices or count == pipeline.in_flight]
    for recompute, allowed in ((False, flowing), (True, flowing), (True, counts)) if automatic else ((None, counts),):
        for count in allowed:
            settled = _settled(config, recompute)
            yield settled.model_copy(update={"pipeline": pipeline.model_copy(update={"in_flight": count})})


def _settled(config: RunConfig, recompute: bool | None) -> RunConfig:
    """Return ``config`` with a decision in place of ``train.recompute = "auto"``."""
    if config.train.recompute != "auto" or recompute is None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"recompute": recompute})})


def _most_workers(found: Inventory, workers: int) -> int:
    """Return the number of workers on the fullest device."""
    homes: dict[tuple[str, int], str] = {}
    for number in range(workers):
        homes[str(number), 1] = device_of(str(number), found.devices, homes)
    return max(Counter(homes.values()).values())


def _together(memory: Sequence[StageMemory], crowd: int, replicas: int) -> int:
    """Return the peak of ``crowd`` workers on one device: the largest stages of all replicas, then spares."""
    peaks = sorted((one.peak for one in memory for _ in range(replicas)), reverse=True)
    return sum(peaks[:crowd]) + max(0, crowd - len(peaks)) * (memory[0].start + CONTEXT)


def _line(choice: RunConfig, config: RunConfig, memory: Sequence[StageMemory]) -> str:
    """Return the prediction, and what was chosen."""
    if not memory:
        return ""
    block = max(one.peak for one in memory[1:])
    chosen = []
    if choice.pipeline.in_flight != config.pipeline.in_flight:
        chosen.append(f"pipeline.in_flight = {choice.pipeline.in_flight}")
    if choice.train.recompute and config.train.recompute == "auto":
        chosen.append("train.recompute = true")
    so = f"; to fit the devices: {', '.join(chosen)}" if chosen else ""
    return f"memory        predicted: ends {memory[0].peak / 1e9:.1f} GB, block stage {block / 1e9:.1f} GB{so}"


def _refusal(config: RunConfig, room: int, crowd: int, wanted: int) -> str:
    """Return why even the smallest choice, of ``wanted`` bytes, does not fit, with a fix."""
    given, fix = config.pipeline.in_flight, "lower pipeline.microbatch_size, or use more pipeline.stages"
    if given and given > 1:
        fix = f"lower pipeline.in_flight = {given}, or leave it out"
    elif not config.train.recompute:
        fix = 'set train.recompute = "auto"'
    many = f"{crowd} workers" if crowd > 1 else "a worker"
    return (
        f"train.device = 'cuda': {many} on one device of {room / 1e9:.1f} GB would take {wanted / 1e9:.1f} GB with "
        f"activations: {fix}"
    )
