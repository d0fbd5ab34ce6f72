"""Checks of a configuration before any data is read or any worker starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from planaria.common.errors import UserError
from planaria.config.model_config import AdapterConfig
from planaria.config.schema import RunConfig
from planaria.control.log.quorum import SCHEME, parse_quorum_location
from planaria.exchange.coded.coded_worker import coded_steps
from planaria.exchange.compress.checks import require_messages
from planaria.exchange.registry import make_exchange
from planaria.faults.checks import require_edges, require_readers, require_receivers
from planaria.faults.trace import Trace
from planaria.faults.trace import read as read_trace
from planaria.models.families import check_shapes, make_family
from planaria.models.optimizers import make_optimizer
from planaria.pipeline.codecs import make_codec
from planaria.pipeline.plan.check import require
from planaria.pipeline.routing import make_routing
from planaria.recovery import RECOVERIES
from planaria.runtime.fleet.local import devices_here
from planaria.runtime.preparation.requirements import device_needs, require_network
from planaria.runtime.preparation.run_start import START, run_started
from planaria.runtime.resolved_run import ResolvedRun


def check(config: RunConfig) -> ResolvedRun:
    """Resolve a configuration, and check it without reading data.

    :raises UserError: if a setting is invalid; the message names it and a valid value.
    """
    resolved = ResolvedRun(config)
    require_sound(resolved)
    require(resolved.training(0))
    control = resolved.recovery.control_strategy
    if control and config.engine == "fleet":
        does = RECOVERIES.find(control).control_description
        raise UserError(
            f"recovery.strategy = {control!r} is a control for comparisons and {does}; use --engine inline, "
            "which keeps the state of lost workers, or another strategy"
        )
    if config.engine == "inline":
        require_device(config)
    elif config.engine == "fleet" and config.fleet.kind == "local":
        devices_here(device_needs(config), run_started(resolved, START).own_workers)
    if config.exchange.replicas > 1:
        _check_replicas(config)
    if config.engine == "fleet":
        require_network(config.fleet, run_started(resolved, START))
    if config.engine == "fleet" and config.pipeline.layers == "auto":
        _check_sized(config)
    if config.fleet.standby != "off":
        _check_standby(config)
    if config.fleet.shared_log is not None:
        check_shared_log(config)
    if config.exchange.max_replicas is not None:
        _check_joining_replicas(resolved)
    if config.checkpoint.every == "best":
        _check_best_interval(config)
    return resolved


def _check_joining_replicas(resolved: ResolvedRun) -> None:
    """Raise UserError if no replica can join the run."""
    config = resolved.config
    if config.engine == "inline":
        raise UserError(
            "exchange.max_replicas: no machines join a run in one process; remove it, or use --engine fleet"
        )
    if resolved.replicas == 1 and config.engine == "fleet":
        raise UserError(
            f"exchange.max_replicas = {config.exchange.max_replicas}: replicas can join only a run with exchange "
            "rounds; use exchange.replicas = 2 or more, and an exchange.kind other than 'allreduce'"
        )


def _check_best_interval(config: RunConfig) -> None:
    """Raise UserError if no interval between checkpoints is best."""
    if config.engine != "fleet":
        raise UserError(
            f"checkpoint.every = 'best' measures real saves; set a number of steps for engine {config.engine!r}"
        )
    if not config.network.hourly_failure_probability:
        raise UserError(
            "network.hourly_failure_probability = 0: without failures no interval is best; set checkpoint.every to a "
            "number"
        )


def _check_sized(config: RunConfig) -> None:
    """Check the requirements for timing the machines before the run."""
    setting, fleet = "pipeline.layers = 'auto'", config.fleet
    if config.exchange.replicas > 1 or config.exchange.max_replicas is not None:
        raise UserError(f"{setting} is for one replica; with exchange.replicas use numbers, such as [7, 8, 8, 7]")
    if config.network.emulate is True:
        raise UserError(f"{setting} times real passes, and network.emulate = true has none; use numbers")
    here = fleet.local_workers is None or fleet.local_workers > config.pipeline.stages
    if not here and not (fleet.port and fleet.key):
        raise UserError(
            f"{setting} with fleet.local_workers = {fleet.local_workers}: machines that join are timed and then "
            "reconnect; set fleet.port and fleet.key, and let them join by address"
        )


def require_sound(resolved: ResolvedRun) -> None:
    """Check the settings that matter to every engine, including a custom one.

    :raises UserError: if a setting is invalid; the message names it and a valid value.
    """
    config = resolved.config
    make_optimizer(config.optim)
    _check_shared_steps(resolved)
    require_messages(config)
    coded_steps(resolved)
    if config.exchange.replicas > 1 and resolved.schedule is not None:
        raise UserError("routing.schedule: a schedule is for one replica; remove exchange.replicas")
    _check_strategies(resolved)
    if make_routing(config).exchanges_stages and (
        why := make_family(config.model).stage_difference(config.model, config.pipeline.stages)
    ):
        raise UserError(
            f"routing.kind = {config.routing.kind!r} swaps block stages, which must be alike: {why}; or remove it"
        )
    _check_shared(config)
    if config.pipeline.has_uneven_stages and resolved.schedule is not None:
        raise UserError("routing.schedule: requires block stages of equal size; remove pipeline.layers")
    _check_model(config)


def _check_shared_steps(resolved: ResolvedRun) -> None:
    """Check settings of replicas and links against codecs, copies and schedules."""
    config, chain = resolved.config, resolved.recovery
    codec = make_codec(config.pipeline.wire)
    if codec.random and config.exchange.coded:
        raise UserError(
            f"pipeline.wire = {config.pipeline.wire!r}: rounds gradients at random; coded steps need equal sums from "
            'replicas; use "bf16", or { kind = "groups", rounding = "nearest" }'
        )
    if chain.slots and config.exchange.replicas > 1:
        raise UserError(
            f"recovery.strategy = {config.recovery.strategy!r} keeps copies of stages at other stages' workers; with "
            "exchange.replicas, a lost stage is copied from another replica: use 'checkfree' or 'checkpoint'"
        )
    if resolved.exchange.weighing is not None and config.routing.mixed:
        raise UserError(
            "exchange.robust.scope = 'replica' with routing.mixed = true: a replica's updates depend on "
            "passes through other replicas, so a replica cannot be judged alone; remove one of them"
        )
    if resolved.schedule is not None and (config.network.inbound == "shared" or config.network.latency_queued):
        raise UserError("network.inbound = 'shared', network.latency_queued: a schedule has its own links; remove them")


def _check_strategies(resolved: ResolvedRun) -> None:
    """Check that each recovery strategy supports the routes, and stages of these sizes."""
    config = resolved.config
    kind = config.routing.kind if resolved.schedule is None else "a schedule"
    for name, strategy in resolved.recovery.strategies.items():
        requirements, meanwhile = strategy.requirements, config.recovery.meanwhile
        required = (
            ("routing.kind", requirements.routing, kind),
            ("recovery.meanwhile", requirements.meanwhile, meanwhile),
        )
        for setting, needed, value in required:
            if needed not in ("", value):
                raise UserError(
                    f"recovery.strategy = {config.recovery.strategy!r}: {name} needs {setting} = {needed!r}, not "
                    f"{value!r}: {requirements.why}"
                )
        if requirements.unshared and config.model.share > 1:
            raise UserError(
                f"model.share = {config.model.share}: recovery {name!r} changes single matrices, and these are shared; "
                "use 'random'"
            )
        if requirements.one_array and not config.model.one_array:
            raise UserError(
                f"recovery.strategy: {name!r} needs model.share_over = 'model', where every stage has all weights; "
                "set it, or use another strategy"
            )
        if requirements.alike and config.pipeline.has_uneven_stages:
            raise UserError(
                f"recovery.strategy = {config.recovery.strategy!r}: {name} rebuilds a block stage from others of the "
                f"same size; these have pipeline.layers = {config.pipeline.cut}; use 'echo, checkpoint' or 'snapshot'"
            )
        if requirements.alike and (
            why := make_family(config.model).stage_difference(config.model, config.pipeline.stages)
        ):
            raise UserError(
                f"recovery.strategy = {config.recovery.strategy!r}: {name} rebuilds a block stage from others like it: "
                f"{why}; or use 'echo, checkpoint' or 'snapshot'"
            )


def _check_model(config: RunConfig) -> None:
    """Check what the family of models supports: masks, adapters, subspaces and this cut."""
    if config.data.document_mask and not make_family(config.model).accepts_document_mask:
        packed = config.data.dialogues and config.data.pack
        fix = "set data.pack = false, which needs none" if packed else "remove it"
        raise UserError(f"data.document_mask: model.family = {config.model.family!r} takes no masks; {fix}")
    chosen, lora = make_family(config.model), config.model.lora
    if lora.rank and not chosen.supports_adapters:
        raise UserError(
            f"model.lora.rank = {lora.rank}: model.family = {config.model.family!r} has no adapters; set it to "
            "'transformers'"
        )
    plain = AdapterConfig()
    unused = [name for name in ("alpha", "targets", "precision") if getattr(lora, name) != getattr(plain, name)]
    if unused and not lora.rank:
        raise UserError(f"model.lora.{unused[0]} has no effect without model.lora.rank; remove it")
    if config.model.subspace is not None and not chosen.supports_subspaces:
        raise UserError(f'pipeline.wire: model.family = {config.model.family!r} has no subspace projections; use "6/4"')
    chosen.check(config.model, config.pipeline.stages, config.data.document_mask)
    if not chosen.has_global_names:
        check_shapes(config.model, config.pipeline.stages)


def _check_shared(config: RunConfig) -> None:
    """Check settings that interact with shared weights."""
    setting = f"model.share = {config.model.share}"
    if config.model.share > 1 and not make_optimizer(config.optim).elementwise:
        raise UserError(f"{setting}: optim.kind = {config.optim.kind!r} does not support shared matrices; use 'adamw'")
    if not config.model.one_array:
        return
    setting = "model.share_over = 'model'"
    if config.exchange.replicas > 1 or config.exchange.max_replicas is not None:
        raise UserError(f"{setting}: all stages of one replica share; remove exchange.replicas")
    if config.routing.schedule is not None or not make_routing(config).visits_all_stages:
        raise UserError(f"{setting}: every stage has to see every microbatch; use routing.kind = 'full' or 'swapped'")
    if config.pipeline.layers == "auto":
        raise UserError(f"{setting}: every stage holds all weights, whatever its layers; set pipeline.layers")


def require_device(config: RunConfig) -> None:
    """Require the device of an engine that computes in this process; UserError if there is no CUDA device."""
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device = 'cuda': this machine has no CUDA device; use 'cpu'")


def _check_standby(config: RunConfig) -> None:
    """Raise UserError if the run's workers cannot outlive its controller."""
    named = f"fleet.standby = {config.fleet.standby!r}"
    if config.engine != "fleet":
        raise UserError(
            f"{named}: the workers of engine = {config.engine!r} end with its process; use engine = 'fleet'"
        )
    if config.fleet.kind != "local":
        raise UserError(
            f"{named}: the actors of fleet.kind = {config.fleet.kind!r} end with their driver; use fleet.shared_log, "
            "and `planaria join --ray` for nodes of a Ray cluster"
        )
    if config.fleet.orphan_s <= config.fleet.lease_s:
        raise UserError(
            f"fleet.orphan_s = {config.fleet.orphan_s:g}: use more than fleet.lease_s = {config.fleet.lease_s:g}"
        )
    if sys.platform != "linux":
        raise UserError(f"{named} needs Linux; remove it, and resume a lost run from its newest checkpoint")


def check_shared_log(config: RunConfig) -> None:
    """Raise UserError if another machine could not lead the run."""
    fleet, named = config.fleet, f"fleet.shared_log = {config.fleet.shared_log!r}"
    if config.engine != "fleet" or fleet.kind != "local":
        raise UserError(
            f"{named}: only a run with engine = 'fleet' and fleet.kind = 'local' can be led elsewhere; nodes of a Ray "
            "cluster join it with `planaria join --ray`"
        )
    if fleet.standby != "off":
        raise UserError(f"{named}: remove fleet.standby; the standbys are those of fleet.standby_at")
    if str(fleet.shared_log).startswith(SCHEME):
        if parse_quorum_location(str(fleet.shared_log), "fleet.shared_log").run:
            raise UserError(f"{named}: list the holders only; the run's name is added")
    elif "::" in str(fleet.shared_log):
        raise UserError(f"{named}: chained file systems are not supported; name a folder or a bucket")
    elif "://" not in (location := str(fleet.shared_log)):
        if not Path(location).is_absolute():
            raise UserError(f"{named}: other machines need an absolute path; use one, such as /mnt/shared/runs")
        if Path(location).exists() and not Path(location).is_dir():
            raise UserError(f"{named}: is not a folder; use one that all machines mount")
    if not fleet.standby_addresses:
        raise UserError(f"{named}: list the machines that may lead in fleet.standby_at, such as '10.0.0.2:7010'")
    _check_standby_addresses(fleet.standby_addresses)
    if fleet.key is None or not fleet.port:
        raise UserError(f"{named}: machines that lead or return need fleet.key (a file) and fleet.port")
    if fleet.orphan_s <= 2 * fleet.lease_s:
        raise UserError(f"fleet.orphan_s = {fleet.orphan_s:g}: use more than 2 × fleet.lease_s = {2 * fleet.lease_s:g}")


def standby_warnings(config: RunConfig) -> Iterator[str]:
    """Yield a warning if another machine could lead the run, but not roll it back."""
    if config.fleet.shared_log is not None and config.checkpoint.store is None:
        yield (
            "warning: fleet.shared_log without checkpoint.store: if this machine is lost, its checkpoints are too; a "
            "rollback then ends the run"
        )


def _check_standby_addresses(addresses: Sequence[str]) -> None:
    """Raise UserError unless each is HOST:PORT, once."""
    for at in addresses:
        is_address = re.fullmatch(r"([^/\s:]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}", at)
        if not is_address or not 0 < int(at.rpartition(":")[2]) < 65536:
            raise UserError(f"fleet.standby_at: {at!r} is not an address; use HOST:PORT")
        if addresses.count(at) > 1:
            raise UserError(f"fleet.standby_at: {at} is listed twice; list each machine once")


def _check_replicas(config: RunConfig) -> None:
    """Check settings that interact with replicas."""
    if config.exchange.steps_between_rounds and config.routing.mixed:
        raise UserError(
            "exchange.steps_between_rounds: with routing.mixed all replicas step together; set exchange.options.every"
        )
    if config.routing.mixed and make_exchange(config.exchange).decoupled:
        raise UserError(
            f"exchange.kind = {config.exchange.kind!r}: with routing.mixed all replicas step together, so no round "
            "begins without all; use 'streaming_diloco'"
        )
    if config.exchange.steps_between_rounds and not make_exchange(config.exchange).has_rounds:
        raise UserError(
            f"exchange.steps_between_rounds: with exchange.kind = {config.exchange.kind!r} there are no rounds, so no "
            "inner steps between them; remove it"
        )
    own, overlap = config.exchange.steps_between_rounds, make_exchange(config.exchange).overlap
    if own and min(own) <= overlap:
        raise UserError(
            f"exchange.steps_between_rounds = {list(own)}: a round with exchange.options.delay = {overlap} must be "
            f"settled before the next begins; use more than {overlap} steps, or a shorter delay"
        )
    if config.recovery.meanwhile == "skip":
        raise UserError(
            "recovery.meanwhile = 'skip': with exchange.replicas a lost stage is copied from another replica; use "
            "'wait'"
        )
    if config.routing.mixed and config.exchange.robust and make_exchange(config.exchange).has_rounds:
        raise UserError(
            "exchange.robust with routing.mixed: microbatches pass through all replicas, so an update does not "
            "belong to one; remove one of them"
        )
    if config.engine != "fleet":
        return
    if config.routing.mixed:
        raise UserError(
            "routing.mixed = true trains replicas in lockstep, and on the fleet they do not wait for each other; "
            "use --engine inline"
        )
    if config.checkpoint.every == "best":
        raise UserError(
            "checkpoint.every = 'best' is for one replica; with exchange.replicas = "
            f"{config.exchange.replicas} set it to a number"
        )


def read_faults(run: ResolvedRun) -> Trace:
    """Return the recipe's trace of faults; empty if it names none.

    :raises UserError: if it cannot be read, or names a node, edge or reader that this run lacks.
    """
    config = run.config
    if config.chaos.trace is None:
        return Trace(faults=())
    # Edges are those of a fleet even if one process trains with the same trace.
    trace, resolved = read_trace(Path(config.chaos.trace)), ResolvedRun(config, together=False)
    last = len(resolved.arrangement.stage) - 1
    location = "stage" if last == config.pipeline.stages and resolved.schedule is None else "node"
    for fault in trace.faults:
        if fault.stage > last:
            raise UserError(
                f"{config.chaos.trace}: a fault at {location} {fault.stage}, but this run has {location}s 0..{last}; "
                "set chaos.trace to none or to a trace for this pipeline (`python -m planaria.lab.commands.trace`)"
            )
    require_edges(resolved, trace.faults, str(config.chaos.trace))
    require_readers(resolved, trace.faults, str(config.chaos.trace))
    require_receivers(config, trace.faults, config.chaos.trace)
    return trace
