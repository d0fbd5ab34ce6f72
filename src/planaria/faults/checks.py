"""Check a trace against its run: edges, batch readers and update receivers must exist."""

from __future__ import annotations

from collections.abc import Iterable

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.control.state.replica import ReplicaState
from planaria.exchange.registry import make_exchange
from planaria.faults.trace import CORRUPT_UPDATE, Fault
from planaria.runtime.preparation.run_start import START, run_started
from planaria.runtime.resolved_run import ResolvedRun


def neighbours(resolved: ResolvedRun, node: int) -> set[int]:
    """Return the nodes at the other ends of a node's edges."""
    started = run_started(resolved, START)
    states = (ReplicaState.start(started, number) for number in range(started.max_replicas))
    pairs = {pair for state in states for pair in state.pairs_of(state.arrangement.stage)}
    return {peer for pair in pairs if node in pair for peer in pair} - {node}


def require_edges(resolved: ResolvedRun, faults: Iterable[Fault], where: str) -> None:
    """Check that the edge of each fault exists in this run.

    :raises UserError: naming the first fault, from ``where``, whose edge does not.
    """
    for fault in faults:
        if fault.peer is None:
            continue
        others = neighbours(resolved, fault.stage)
        if fault.peer not in others:
            listed = ", ".join(map(str, sorted(others))) or "none"
            raise UserError(
                f"{where}: a fault '{fault.signal}' of the edge {fault.peer} → {fault.stage}, which does not exist; "
                f"{fault.stage} has edges to: {listed}"
            )


def require_receivers(config: RunConfig, faults: Iterable[Fault], where: str) -> None:
    """Check that updates and labels corrupted by the faults reach other replicas.

    :raises UserError: naming the first fault, from ``where``, that has no effect.
    """
    stages = config.pipeline.stages + 1
    for fault in faults:
        if fault.signal != CORRUPT_UPDATE:
            continue
        location = f"{where}: a fault '{CORRUPT_UPDATE}' at stage {fault.stage}, step {fault.step}"
        if why := _why_update_unused(config):
            raise UserError(
                f"{location}: {why}, so no other replica receives the update; remove the fault, or use several "
                "replicas that exchange updates, such as exchange.kind = 'allreduce'"
            )
        if fault.attack == "label_flip" and fault.stage % stages:
            raise UserError(
                f"{location}: only stage 0 has labels; use a node of stage 0, such as "
                f"{fault.stage - fault.stage % stages}"
            )


def _why_update_unused(config: RunConfig) -> str:
    """Return why replicas receive no updates of a single replica, or an empty string if they do."""
    if config.exchange.replicas == 1 and config.exchange.max_replicas is None:
        return "there is one replica"
    if make_exchange(config.exchange).interval is None:
        return f"exchange.kind = {config.exchange.kind!r} exchanges no updates"
    if not make_exchange(config.exchange).has_blocking_part:
        return f"exchange.kind = {config.exchange.kind!r} sends updates one round later, when attacks no longer apply"
    if config.exchange.coded:
        return "exchange.coded determines the messages of replicas"
    if config.routing.mixed and make_exchange(config.exchange).has_rounds:
        return "with routing.mixed, microbatches pass through all replicas, and each update depends on several replicas"
    return ""


def require_readers(resolved: ResolvedRun, faults: Iterable[Fault], where: str) -> None:
    """Check that nodes with delayed batches read batches.

    :raises UserError: naming the first fault, from ``where``, whose node reads none.
    """
    stage_of = resolved.arrangement.stage
    readers = [node for node in sorted(stage_of) if not stage_of[node] or resolved.config.data.document_mask]
    for fault in faults:
        if fault.signal == "slow_data" and fault.stage not in readers:
            raise UserError(
                f"{where}: a fault 'slow_data' at {fault.stage}, which reads no batches; use one of these nodes: "
                f"{', '.join(map(str, readers))}"
            )
