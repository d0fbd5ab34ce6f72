"""Checks of a configuration before any data is read or any worker starts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import torch

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig, RunConfig
from planaria.exchange.aggregate import Averaging
from planaria.exchange.compress.compression import Compression
from planaria.exchange.compress.sparse import Sparse
from planaria.exchange.kinds import exchange
from planaria.faults.checks import require_edges, require_listeners, require_readers
from planaria.faults.trace import Trace
from planaria.faults.trace import read as read_trace
from planaria.models.families import check_shapes, family, stage_parameters
from planaria.models.optimizers import optimizer
from planaria.pipeline.plan.check import require
from planaria.recovery import RECOVERIES
from planaria.runtime.engine.needs import needs, require_network
from planaria.runtime.engine.origin import START, run_started
from planaria.runtime.engine.resolved import ResolvedRun
from planaria.runtime.engine.step_work import step_work
from planaria.runtime.fleet.local import devices_here


def check(config: RunConfig) -> ResolvedRun:
    """Resolve a configuration, and check everything that can be wrong with it by itself, before any data is touched.

    :raises UserError: naming the setting, and what goes instead.
    """
    resolved = ResolvedRun(config)
    require_sound(resolved)
    require(resolved.training(0))
    control = resolved.recovery.control
    if control and config.engine == "fleet":
        does = RECOVERIES.find(control).control
        raise UserError(
            f"recovery.strategy = {control!r}: is a control of comparisons and {does}; use --engine inline, where "
            "what a worker had can be had again, or another strategy"
        )
    if config.engine == "inline":
        require_device(config)
    elif config.engine == "fleet" and config.fleet.kind == "local":
        devices_here(needs(config), run_started(resolved, START).own_workers)
    if config.exchange.replicas > 1:
        _check_replicas(config)
    if config.engine == "fleet":
        require_network(config.fleet, run_started(resolved, START))
    if config.engine == "fleet" and config.pipeline.layers == "auto":
        _check_sized(config)
    if config.exchange.most is not None and config.engine == "inline":
        raise UserError("exchange.most: no machines join a run in one process; leave it out, or use --engine fleet")
    if config.exchange.most is not None and resolved.replicas == 1 and config.engine == "fleet":
        raise UserError(
            f"exchange.most = {config.exchange.most}: replicas that come later agree with others now and then; begin "
            "with exchange.replicas = 2 or more, and an exchange.kind other than 'allreduce'"
        )
    if config.checkpoint.every == "best" and config.engine != "fleet":
        raise UserError(
            f"checkpoint.every = 'best' measures real saves; give engine {config.engine!r} a number of steps"
        )
    if config.checkpoint.every == "best" and not config.network.hourly:
        raise UserError("network.hourly = 0: without failures no interval is best; give checkpoint.every a number")
    return resolved


def _check_sized(config: RunConfig) -> None:
    """What it takes to time the machines before the run begins."""
    said, fleet = "pipeline.layers = 'auto'", config.fleet
    if config.exchange.replicas > 1 or config.exchange.most is not None:
        raise UserError(f"{said}: is for one replica; with exchange.replicas give numbers, such as [7, 8, 8, 7]")
    if config.network.emulate is True:
        raise UserError(f"{said}: times real passes, and network.emulate = true has none; give numbers")
    here = fleet.own is None or fleet.own > config.pipeline.stages
    if not here and not (fleet.port and fleet.key):
        raise UserError(
            f"{said} with fleet.own = {fleet.own}: machines that join are timed and then call again; give fleet.port "
            "and fleet.key, so that they find the run, and let them join by address"
        )


def require_sound(resolved: ResolvedRun) -> None:
    """What must hold for any engine, also for one that a program steps by itself.

    :raises UserError: naming the setting, and what goes instead.
    """
    config, chain = resolved.config, resolved.recovery
    optimizer(config.optim)
    if chain.slots and config.exchange.replicas > 1:
        raise UserError(
            f"recovery.strategy = {config.recovery.strategy!r} keeps copies of stages at other stages' workers; with "
            "exchange.replicas, a lost stage is copied from another replica: use 'checkfree' or 'checkpoint'"
        )
    if resolved.exchange.weighing is not None and config.routing.mixed:
        raise UserError(
            "exchange.robust.scope = 'replica' beside routing.mixed = true: what a replica's stages say follows from "
            "passes through those of others, so that it is no unit of trust; leave one of them out"
        )
    require_messages(config)
    step_work(resolved)
    if config.exchange.replicas > 1 and resolved.schedule is not None:
        raise UserError("routing.schedule: a schedule is for one replica; leave exchange.replicas out")
    kind = config.routing.kind if resolved.schedule is None else "a schedule"
    for name, strategy in chain.strategies.items():
        needs, meanwhile = strategy.needs, config.recovery.meanwhile
        asked = (("routing.kind", needs.routing, kind), ("recovery.meanwhile", needs.meanwhile, meanwhile))
        for setting, needed, found in asked:
            if needed not in ("", found):
                raise UserError(
                    f"recovery.strategy = {config.recovery.strategy!r}: {name} needs {setting} = {needed!r}, not "
                    f"{found!r}: {needs.why}"
                )
        if needs.alike and config.pipeline.unlike:
            raise UserError(
                f"recovery.strategy = {config.recovery.strategy!r}: {name} makes a block stage of others; these have "
                f"pipeline.layers = {config.pipeline.cut}; use 'echo, checkpoint' or 'snapshot'"
            )
    _check_shared(config, [*chain.strategies])
    if config.pipeline.unlike and resolved.schedule is not None:
        raise UserError("routing.schedule: was planned for block stages of as many layers; leave pipeline.layers out")
    if config.data.document_mask and not family(config.model).masks:
        raise UserError(f"data.document_mask: model.family = {config.model.family!r} takes no masks; leave it out")
    if not family(config.model).whole:
        check_shapes(config.model, config.pipeline.stages)


def _check_shared(config: RunConfig, strategies: Sequence[str]) -> None:
    """What weights that share their numbers go together with."""
    said = f"model.share = {config.model.share}"
    if config.model.share > 1 and not optimizer(config.optim).elementwise:
        raise UserError(f"{said}: optim.kind = {config.optim.kind!r} is for matrices of their own; use 'adamw'")
    if config.model.share > 1 and "identity" in strategies:
        raise UserError(f"{said}: recovery 'identity' sets single matrices to zero, and they share; use 'random'")
    if not config.model.one_array:
        if "survivor" in strategies:
            raise UserError(
                "recovery.strategy: 'survivor' needs model.share_over = 'model', where every stage has all; set it, or "
                "use another strategy"
            )
        return
    said = "model.share_over = 'model'"
    if config.exchange.replicas > 1 or config.exchange.most is not None:
        raise UserError(f"{said}: all stages of one replica share; leave exchange.replicas out")
    if config.routing.schedule is not None or config.routing.kind not in ("full", "swapped"):
        raise UserError(f"{said}: every stage has to see every microbatch; use routing.kind = 'full' or 'swapped'")
    if config.pipeline.layers == "auto":
        raise UserError(f"{said}: stages hold the same whatever their layers; give pipeline.layers numbers")


def require_device(config: RunConfig) -> None:
    """What an engine needs that computes in this process.

    :raises UserError: when there is no CUDA device for it.
    """
    if config.train.device == "cuda" and not torch.cuda.is_available():
        raise UserError("train.device = 'cuda': this machine has no CUDA device; use 'cpu'")


def _check_replicas(config: RunConfig) -> None:
    """What replicas need of the engine that trains them."""
    if config.exchange.inner and config.routing.mixed:
        raise UserError("exchange.inner: with routing.mixed all replicas step together; give exchange.options.every")
    if config.exchange.inner and not exchange(config.exchange).interval:
        raise UserError(
            f"exchange.inner: with exchange.kind = {config.exchange.kind!r} replicas have no rounds to make steps "
            "between; leave it out"
        )
    if config.recovery.meanwhile == "skip":
        raise UserError(
            "recovery.meanwhile = 'skip': with exchange.replicas a lost stage is copied from another replica; use "
            "'wait'"
        )
    if config.routing.mixed and config.exchange.robust and exchange(config.exchange).interval:
        raise UserError(
            "exchange.robust beside routing.mixed: microbatches pass through all replicas, so no update is of one "
            "alone; leave one of them out"
        )
    if config.engine != "fleet":
        return
    if config.routing.mixed:
        raise UserError(
            "routing.mixed = true binds the replicas together in every step, and on the fleet none waits for all; use "
            "--engine inline"
        )
    if config.checkpoint.every == "best":
        raise UserError(
            "checkpoint.every = 'best' is for one replica; with exchange.replicas = "
            f"{config.exchange.replicas} give it a number"
        )


def read_faults(run: ResolvedRun) -> Trace:
    """The recipe's trace of faults; an empty one where it names none.

    :raises UserError: when it cannot be read, or strikes what this run does not have.
    """
    config = run.config
    if config.chaos.trace is None:
        return Trace(faults=())
    # Edges are those of a fleet, also where one process trains with the same trace.
    trace, resolved = read_trace(Path(config.chaos.trace)), ResolvedRun(config, together=False)
    last = len(resolved.arrangement.stage) - 1
    place = "stage" if last == config.pipeline.stages and resolved.schedule is None else "node"
    for fault in trace.faults:
        if fault.stage > last:
            raise UserError(
                f"{config.chaos.trace}: a fault at {place} {fault.stage}, but this run has {place}s 0..{last}; set "
                "chaos.trace to none or to a trace for this pipeline (`planaria trace`)"
            )
    require_edges(resolved, trace.faults, str(config.chaos.trace))
    require_readers(resolved, trace.faults, str(config.chaos.trace))
    require_listeners(config, trace.faults, config.chaos.trace)
    return trace


def compression_in(config: ExchangeConfig) -> Compression | None:
    """How messages are made shorter; None where nothing is lost of them, or nothing said."""
    made = exchange(config) if config.replicas > 1 else None
    return None if not isinstance(made, Averaging) or made.compression.exact else made.compression


def require_messages(config: RunConfig) -> None:
    """:raises UserError: when messages cannot be made shorter as the recipe says, at some stage or on its routes."""
    compression = compression_in(config.exchange)
    if compression is None:
        return
    if config.routing.mixed:
        raise UserError(
            "routing.mixed = true beside shorter messages (exchange.compress, or bits): a debt or an estimate is of a "
            "replica's own samples, and mixed routes pass those of others; leave one of them out"
        )
    if not isinstance(compression.compressor, Sparse):
        return
    keep = compression.compressor.keep
    for stage in range(config.pipeline.stages + 1):
        count = stage_parameters(config.model, config.pipeline.stages, stage)
        if keep * count < 1.0 - 1e-9:
            digits = 2 + math.floor(math.log10(count))
            least = math.ceil(10**digits / count) / 10**digits
            raise UserError(
                f"exchange.compress.keep = {keep:g}: of the {count:,} numbers of stage {stage} less than one would be "
                f"sent; give {least:g} or more"
            )


def require_same_debts(before: RunConfig, config: RunConfig, folder: Path) -> None:
    """What replicas owe each other, and know of each other, goes by one compressor and one feedback. As many replicas
    of the same exchange go on with it, so they go on with these too.

    :raises UserError: when the run in ``folder`` is to go on with others.
    """
    old, new = before.exchange, config.exchange
    if (old.replicas, old.kind) != (new.replicas, new.kind):
        return
    was = compression_in(old)
    if was is not None and was.parts and was != compression_in(new):
        raise UserError(
            f"{folder}: {_said(new)} (was {_said(old)}): what its replicas owe each other is of the old one; leave "
            f"that as it was, or begin a run with its weights: --train.start {folder}"
        )


def _said(config: ExchangeConfig) -> str:
    if config.compress:
        return f"exchange.compress = {config.compress!r}"
    return f"exchange.options.bits = {config.options.get('bits', 32)}"
