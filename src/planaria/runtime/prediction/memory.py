"""Memory of a run's stages, on CUDA devices and CPUs: predicted before the run, and settings that make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from planaria.common.errors import UserError
from planaria.config.names import WorkerId
from planaria.config.schema import RunConfig
from planaria.models.activations import PassMode
from planaria.models.families import frozen_parameters, make_family, trained_parameters
from planaria.pipeline.network.costs import FP32_BYTES, message_bytes
from planaria.pipeline.plan.build import max_in_flight
from planaria.runtime.fleet.devices import NO_INVENTORY, Inventory, device_of, free_memory, inventory
from planaria.runtime.prediction.copy_costs import copies_held, shadowed_stages
from planaria.runtime.prediction.traffic import exchange_costs
from planaria.runtime.preparation.requirements import stage_state_bytes
from planaria.runtime.preparation.run_start import START, run_started
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.transport.staging import DEPTH

CONTEXT = 800_000_000
"""bytes of a process's CUDA context, with the workspaces of cuBLAS and cuDNN; 0.80 GB on an H100"""
USABLE = 0.92
"""share of a device's memory to plan with; the allocator's fragments take the rest"""
PROCESS = 290_000_000
"""resident bytes of a worker on a CPU before it has a stage: Python and PyTorch"""
PRELOADED = 100_000_000
"""further ones, if the family imports a library"""
CONTROLLER = 120_000_000
"""further ones of an inline run: workers are forked with what the first step imports, the controller reports the run"""
SHARED = 190_000_000
"""bytes of :data:`PROCESS` that all workers of a machine share"""
HEAP = 1.1
"""resident bytes of a CPU's heap relative to its tensors"""


class DoesNotFit(UserError):
    """A run takes more memory than there is."""

    def __init__(self, message: str, config: RunConfig) -> None:
        super().__init__(message)
        self.config = config
        """the smallest configuration that was tried"""


class StageMemory(NamedTuple):
    """Predicted peak of one stage in bytes."""

    state: int
    """weights, gradients and moments; on a CPU also copies of other stages, outer state and updates of replicas"""
    kept: int
    """bytes kept by microbatches between their forward and backward pass"""
    working: int
    """temporary tensors of a pass, and messages in transit"""
    start: int
    """tensors of the block stage with which every worker compiles and times a pass when it starts"""
    process: int = CONTEXT
    """bytes of the process itself"""
    heap: float = 1.0
    """bytes of the process relative to its tensors"""
    stacked: bool = False
    """whether the process keeps the freed memory of the start, in pieces that these tensors do not fit"""

    @property
    def tensors(self) -> int:
        """Peak of all tensors."""
        training = self.state + self.kept + self.working
        return training + self.start if self.stacked else max(training, self.start)

    @property
    def peak(self) -> int:
        """Peak of the process."""
        return int(self.heap * self.tensors) + self.process


def stage_memory(config: RunConfig, device_bytes: int = 0) -> tuple[StageMemory, ...]:
    """Return the predicted peaks of stages 0..S on devices of ``device_bytes``, 0 on CPUs; empty if they are unknown.

    All microbatches in flight may wait at one stage. ``recompute = "auto"`` counts as false.
    """
    model, pipeline, train = config.model, config.pipeline, config.train
    if config.network.emulate is True:  # passes sleep
        return ()
    passes = PassMode(
        samples=pipeline.microbatch_size,
        device_bytes=device_bytes,
        bf16=train.precision == "bf16",
        bf16_weights=train.bf16_weights,
        compiled=train.compile,
        recompute=train.recompute is True,
        masked=config.data.document_mask,
    )
    microbatches = max_in_flight(pipeline, pipeline.microbatches)
    losses = microbatches if pipeline.order == "gpipe" else 1
    transit = DEPTH * sum(message_bytes(model, pipeline))
    stages = range(pipeline.stages + 1)
    needed = [
        pass_bytes
        for n in stages
        if (pass_bytes := make_family(model).pass_bytes(model, pipeline.stages, n, passes)) is not None
    ]
    if len(needed) < len(stages):
        return ()
    states, first = stage_state_bytes(config), needed[1]
    weights = FP32_BYTES * trained_parameters(model, pipeline.stages, 1)
    weights += frozen_parameters(model, pipeline.stages, 1)[1]
    start = weights + first.kept + first.working
    peaks = [
        StageMemory(state, microbatches * each.kept + losses * each.loss, each.working + transit, start)
        for state, each in zip(states, needed, strict=True)
    ]
    return tuple(peaks if device_bytes else _on_cpu(config, peaks, [each.kept for each in needed]))


def _on_cpu(config: RunConfig, peaks: Sequence[StageMemory], kept: Sequence[int]) -> Iterator[StageMemory]:
    """Yield the peaks of the same stages in processes on CPUs, which also hold copies for recovery.

    ``kept``: bytes that each stage keeps of one microbatch.
    """
    model, stages = config.model, config.pipeline.stages
    process = PROCESS + (PRELOADED if make_family(model).modules_to_preload else 0)
    gradient = FP32_BYTES * trained_parameters(model, stages, 1)
    start = max(stage_state_bytes(config)[1], peaks[1].start + gradient)
    run, updates = ResolvedRun(config), exchange_costs(config)
    copies, parts = copies_held(run), len(run.exchange.parts) if updates else 0
    also = {host: sum(kept[n] for n in sources) for host, sources in shadowed_stages(run).items()}
    for stage, memory in enumerate(peaks):
        trained = trained_parameters(model, stages, stage)
        # A tied head that is trained has a separate gradient until a step ends.
        apart = model.vocab * model.dim if model.tied and not stage and trained and not model.lora.rank else 0
        received = int(updates[stage].total) if updates and trained else 0
        state = memory.state + FP32_BYTES * (apart + parts * trained) + received + copies.get(stage, 0)
        waiting = memory.kept + config.pipeline.microbatches * also.get(stage, 0)
        yield memory._replace(state=state, kept=waiting, start=start, process=process, heap=HEAP, stacked=stage == 0)


def predicted_peaks(config: RunConfig, devices: Inventory = NO_INVENTORY) -> tuple[StageMemory, ...]:
    """Return the peaks of a run's stages on its device; on the smallest one of ``devices``, if they are known."""
    if config.train.device == "cpu":
        return stage_memory(config)
    return stage_memory(config, min(device.memory for device in devices.devices)) if devices.devices else ()


def predicted_bytes(config: RunConfig) -> list[int]:
    """Return the peaks of stages as workers report them; empty if they are unknown.

    See :class:`planaria.runtime.worker.measurements.Peaks`.
    """
    return [
        memory.tensors if config.train.device == "cuda" else memory.peak
        for memory in predicted_peaks(config, devices_of(config))
    ]


def fit_to_this_machine(config: RunConfig) -> tuple[RunConfig, str]:
    """Return ``config`` fitted to this machine's devices (:func:`fit_to_memory`), since others' are not known yet,
    and a line about what was chosen.

    :raises DoesNotFit: if the settings do not fit into its memory.
    """
    if config.train.device != "cuda":
        resolved = _resolve_recompute(config, False)
        require_room(resolved, own_workers(resolved), NO_INVENTORY, free_memory())
        return resolved, ""
    return fit_to_memory(config, devices_of(config), own_workers(config))


def own_workers(config: RunConfig) -> int:
    """Return the number of workers that the run starts on this machine; 0 on a cluster."""
    local = config.engine == "inline" or config.fleet.kind == "local"
    return run_started(ResolvedRun(config), START).own_workers if local else 0


def devices_of(config: RunConfig) -> Inventory:
    """Return the CUDA devices of this machine that the run uses."""
    if config.train.device != "cuda" or not (config.engine == "inline" or config.fleet.kind == "local"):
        return NO_INVENTORY
    devices = inventory()
    # In one process, the first device computes.
    return Inventory(devices.devices[:1], devices.lacks) if config.engine == "inline" else devices


def require_room(config: RunConfig, workers: int, devices: Inventory, free: int, called: str = "this machine") -> None:
    """Require that ``workers`` fit into the memory of the machine ``called`` so.

    :param devices: its CUDA devices
    :param free: the bytes that new processes can use there; 0: unknown
    :raises DoesNotFit: if they do not fit.
    """
    memory, device = predicted_peaks(config, devices), config.train.device
    rooms = {cuda_device.name: int(USABLE * cuda_device.memory) for cuda_device in devices.devices}
    crowds = {f"on device {name} of {called}": (rooms[name], n) for name, n in homes_of(devices, workers).items()}
    if config.pipeline.has_uneven_stages:  # stages are assigned by size
        crowds = {}
    if device == "cpu":
        crowds = {f"on {called}": (free, workers)}
    for where, (room, crowd) in crowds.items() if memory and workers else ():
        if room and (needed := combined_peak(config, memory, crowd)) > room:
            many = f"{crowd} workers" if crowd > 1 else "a worker"
            raise DoesNotFit(
                f"train.device = {device!r}: {many} {where} would take {needed / 1e9:.1f} GB, and {room / 1e9:.1f} GB "
                f"are free: {how_to_reduce(config, memory)}",
                config,
            )


def combined_peak(config: RunConfig, memory: Sequence[StageMemory], crowd: int) -> int:
    """Return the peak of ``crowd`` workers on one device, or of all stages in one process."""
    replicas = config.exchange.max_replicas or config.exchange.replicas
    if config.engine == "inline":
        tensors = sum(stage.state + stage.kept + stage.working for stage in memory)
        own = memory[0].process + (0 if config.train.device == "cuda" else CONTROLLER)
        return int(memory[0].heap * replicas * tensors) + own
    shared = 0 if config.train.device == "cuda" else SHARED
    return _together(memory, crowd, replicas) - (crowd - 1) * shared


def homes_of(devices: Inventory, workers: int) -> Mapping[str, int]:
    """Return the number of workers on each of the devices."""
    homes: dict[WorkerId, str] = {}
    for number in range(workers if devices.devices else 0):
        homes[WorkerId(str(number), 1)] = device_of(str(number), devices.devices, homes)
    return Counter(homes.values())


def fit_to_memory(config: RunConfig, devices: Inventory, workers: int) -> tuple[RunConfig, str]:
    """Return ``config`` with ``pipeline.in_flight`` and ``train.recompute`` chosen so that ``workers`` fit the devices,
    and a line about it.

    The microbatches in flight are reduced first, down to one more than there are devices; then, under ``recompute =
    "auto"``, activations are recomputed; then microbatches are reduced to one. Settings that the recipe gives stay.

    :raises DoesNotFit: if the given settings do not fit.
    """
    if not devices.devices:
        return _resolve_recompute(config, False), ""
    room = min(device.memory for device in devices.devices)
    crowd = max(homes_of(devices, workers).values(), default=0)
    replicas = config.exchange.max_replicas or config.exchange.replicas
    for choice in _choices(config, len(devices.devices)):
        memory = stage_memory(choice, room)
        if not memory or _together(memory, crowd, replicas) <= USABLE * room:
            return choice, _line(choice, config)
    raise DoesNotFit(_refusal(config, room, crowd, memory, _together(memory, crowd, replicas)), choice)


def _choices(config: RunConfig, devices: int) -> Iterator[RunConfig]:
    """Yield settings from the fastest to the smallest."""
    pipeline, automatic = config.pipeline, config.train.recompute == "auto"
    most = max_in_flight(pipeline, pipeline.microbatches)
    counts: Sequence[int | None] = [pipeline.in_flight] if pipeline.in_flight else [None, *range(most - 1, 0, -1)]
    flowing = [count for count in counts if count is None or count > devices or count == pipeline.in_flight]
    for recompute, allowed in ((False, flowing), (True, flowing), (True, counts)) if automatic else ((None, counts),):
        for count in allowed:
            resolved = _resolve_recompute(config, recompute)
            yield resolved.model_copy(update={"pipeline": pipeline.model_copy(update={"in_flight": count})})


def _resolve_recompute(config: RunConfig, recompute: bool | None) -> RunConfig:
    """Return ``config`` with a decision instead of ``train.recompute = "auto"``."""
    if config.train.recompute != "auto" or recompute is None:
        return config
    return config.model_copy(update={"train": config.train.model_copy(update={"recompute": recompute})})


def _together(memory: Sequence[StageMemory], crowd: int, replicas: int) -> int:
    """Return the peak of ``crowd`` workers on one device: the largest stages of all replicas, then spares."""
    peaks = sorted((stage.peak for stage in memory for _ in range(replicas)), reverse=True)
    return sum(peaks[:crowd]) + max(0, crowd - len(peaks)) * (int(memory[0].heap * memory[0].start) + memory[0].process)


def _line(choice: RunConfig, config: RunConfig) -> str:
    """Return a line with the chosen settings, or an empty string if the recipe gives all."""
    chosen = []
    if choice.pipeline.in_flight != config.pipeline.in_flight:
        chosen.append(f"pipeline.in_flight = {choice.pipeline.in_flight}")
    if choice.train.recompute and config.train.recompute == "auto":
        chosen.append("train.recompute = true")
    return f"memory        to fit the devices: {', '.join(chosen)}" if chosen else ""


def _refusal(config: RunConfig, room: int, crowd: int, memory: Sequence[StageMemory], wanted: int) -> str:
    """Return the error for a recipe whose smallest layout needs ``wanted`` bytes, more than there are; with a fix."""
    many = f"{crowd} workers" if crowd > 1 else "a worker"
    return (
        f"train.device = 'cuda': {many} on one device of {room / 1e9:.1f} GB would take {wanted / 1e9:.1f} GB with "
        f"activations: {how_to_reduce(config, memory)}"
    )


def how_to_reduce(config: RunConfig, memory: Sequence[StageMemory]) -> str:
    """Return the setting that saves most."""
    limit, model = config.pipeline.in_flight, config.model
    largest = max(memory, key=lambda stage: stage.tensors)
    if largest.state > largest.kept:
        adapters = make_family(model).supports_adapters and not model.lora.rank
        smaller = "train adapters only (model.lora.rank)" if adapters else "choose a smaller model"
        return f"{smaller}, or use more pipeline.stages on more machines"
    if limit and limit > 1:
        return f"lower pipeline.in_flight = {limit}, or remove it"
    if not config.train.recompute:
        return f"set train.recompute = {'true' if config.train.device == 'cpu' else chr(34) + 'auto' + chr(34)}"
    return "lower pipeline.microbatch_size, or use more pipeline.stages"
