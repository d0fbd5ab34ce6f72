"""Requirements of a run on its machines: memory of CUDA devices, work per stage, and an address that others reach."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import FleetConfig, ModelConfig, RunConfig
from planaria.control.facts.run_started import RunStarted
from planaria.models.bf16_weights import copied_bytes
from planaria.models.families import build_stage, frozen_parameters, make_family, stage_parameters
from planaria.models.llama_stages import stage_layers
from planaria.models.optimizers import make_optimizer
from planaria.pipeline.network.costs import FP32_BYTES
from planaria.runtime.fleet.devices import ON_CPUS, DeviceNeeds
from planaria.runtime.prediction.layer_division import LayerCost
from planaria.runtime.transport.listener import no_answer
from planaria.runtime.transport.secure import NO_PROC


def device_needs(config: RunConfig) -> DeviceNeeds:
    """Return the bytes of weights, gradients and moments of each stage; empty on CPUs.

    A lower bound, without activations, copies for recovery and the 0.5 GB of CUDA itself in each process.
    """
    if config.train.device != "cuda":
        return ON_CPUS
    config = smallest_layout(config) if config.pipeline.layers == "auto" else config
    return DeviceNeeds(stage_state_bytes(config), sized=config.pipeline.has_uneven_stages)


def stage_state_bytes(config: RunConfig) -> tuple[int, ...]:
    """Return the bytes of weights, gradients and moments of stages 0..S; frozen weights have only the first."""
    copies = 2 + len(make_optimizer(config.optim).keys)
    model, stages = config.model, config.pipeline.stages
    frozen = [frozen_parameters(model, stages, stage) for stage in range(stages + 1)]
    also = [_bytes_in_bf16(model, stages, stage) if config.train.bf16_weights else 0 for stage in range(stages + 1)]
    counts = zip(_parameters(config), frozen, also, strict=True)
    return tuple(FP32_BYTES * copies * (count - still) + nbytes + bf16 for count, (still, nbytes), bf16 in counts)


@lru_cache(maxsize=256)
def _bytes_in_bf16(model: ModelConfig, stages: int, stage: int) -> int:
    """Return the bytes of a stage's bf16 copies (``train.bf16_weights``)."""
    return copied_bytes(build_stage(model, stages, stage, 0, "meta"))


def stage_work(config: RunConfig) -> list[float]:
    """Return the work of a forward and backward pass of stages 0..S.

    The unit is the decoder layer that workers time (:func:`layer_loads`). The head counts as one matrix product.
    """
    model, stages = config.model, config.pipeline.stages
    loads = [load.work for load in _loads(config)]
    work = [sum(loads[number] for number in stage_layers(model, stages, stage)) for stage in range(stages + 1)]
    flops = make_family(model).layer_work(model)
    if flops is None:
        layer = _parameters(config)[1] / len(stage_layers(model, stages, 1))
        return [work[0] + model.vocab * model.dim / layer, *work[1:]]
    return [work[0] + 6 * model.vocab * model.dim * model.context / flops[model.ends_layers], *work[1:]]


def layer_loads(config: RunConfig) -> list[LayerCost]:
    """Return the work and memory of the decoder layers of block stages, compared with the first, which workers time."""
    return _loads(config)[config.model.ends_layers :]


def _loads(config: RunConfig) -> list[LayerCost]:
    model, chosen = config.model, make_family(config.model)
    loads, sizes = chosen.layer_work(model), chosen.layer_sizes(model)
    if loads is None or sizes is None:
        return [LayerCost()] * model.layers
    timed = model.ends_layers
    return [LayerCost(load / loads[timed], size / sizes[timed]) for load, size in zip(loads, sizes, strict=True)]


def smallest_layout(config: RunConfig) -> RunConfig:
    """Return the recipe with one layer in each block stage: the least that every machine must hold."""
    stages, model = config.pipeline.stages, config.model
    sizes = {"layers": model.ends_layers + stages, "block_layers": (1,) * stages}
    return config.model_copy(update={"model": model.model_copy(update=sizes)})


def _parameters(config: RunConfig) -> list[int]:
    stages = config.pipeline.stages
    return [stage_parameters(config.model, stages, stage) for stage in range(stages + 1)]


_EVERYWHERE = ("0.0.0.0", "::")


def require_network(fleet: FleetConfig, started: RunStarted) -> None:
    """Check the network settings of the fleet; UserError names a setting and a valid value."""
    if not Path("/proc/self/fd").is_dir():
        raise UserError(NO_PROC)
    if fleet.host in _EVERYWHERE and not fleet.advertise:
        raise UserError(
            f"fleet.host = {fleet.host!r} listens at every address of this machine: set fleet.advertise to the address "
            "or name that other machines use"
        )
    if fleet.advertise and not re.fullmatch(r"[A-Za-z0-9_.-]+|[0-9A-Fa-f:.]+", fleet.advertise):
        raise UserError(f"fleet.advertise = {fleet.advertise!r}: use a host name or an address; the port is fleet.port")
    if fleet.local_workers is not None and fleet.local_workers > started.all_workers:
        raise UserError(
            f"fleet.local_workers = {fleet.local_workers}: the run has {started.all_workers} workers with "
            "its spares; raise fleet.spares to have more"
        )
    if fleet.local_workers == 0 and fleet.kind == "ray":
        raise UserError("fleet.local_workers = 0 starts no worker on the Ray cluster; remove fleet.kind = 'ray'")
    _require_relays(fleet)
    if fleet.ports is None:
        return
    first, last = fleet.ports
    if last < first:
        raise UserError(f"fleet.ports = [{first}, {last}]: use the first and the last")
    if last - first + 1 < started.own_workers:
        raise UserError(
            f"fleet.ports = [{first}, {last}]: {last - first + 1} ports for {started.own_workers} workers; use "
            "one for each"
        )
    if first <= fleet.port <= last:
        raise UserError(f"fleet.ports = [{first}, {last}]: fleet.port = {fleet.port} is the controller's; remove it")


def _require_relays(fleet: FleetConfig) -> None:
    """Require a distinct address for each relay, and a key file."""
    seen: dict[str, str] = {}
    for name, relay in fleet.relays.items():
        where = f"fleet.relays.{name}.at = {relay.at!r}"
        address = re.fullmatch(r"([A-Za-z0-9_.-]+|\[[0-9A-Fa-f:.]+\]):([0-9]{1,5})", relay.at)
        if address is None or not 1 <= int(address[2]) <= 65535:
            raise UserError(f"{where}: use HOST:PORT, as `planaria network relay` prints it")
        if relay.at in seen:
            raise UserError(f"{where} is also that of fleet.relays.{seen[relay.at]}; remove one of them")
        seen[relay.at] = name
    if fleet.relays and fleet.key is None:
        raise UserError(
            "fleet.relays: relays require the run's key, which changes with every start; set "
            "fleet.key to the file that `planaria network relay --key-file` uses"
        )


def require_answers(fleet: FleetConfig, key: bytes) -> None:
    """Raise UserError for a relay that does not answer."""
    for name, relay in fleet.relays.items():
        if no_answer(relay.at, key):
            raise UserError(
                f"fleet.relays.{name}.at = {relay.at!r}: no relay with the run's key answers; start `planaria "
                "network relay --key-file FILE` there, with a copy of the file fleet.key"
            )
