"""The origin of a run: step, generation and checkpoint that it starts from, and its first event."""

from __future__ import annotations

import os
import platform
import re
import secrets
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from itertools import combinations
from pathlib import Path
from typing import Any

from planaria import __version__
from planaria.config.schema import RunConfig
from planaria.control.checkpoint_cadence import PROBE
from planaria.control.facts.events import Recut, ReplicaPosition, RunStarted
from planaria.control.facts.run_started import Provenance, SnapshotLabel
from planaria.pipeline.network.costs import MBIT
from planaria.pipeline.routing import routes, routes_vary
from planaria.runtime.preparation.requirements import device_needs, stage_work
from planaria.runtime.resolved_run import ResolvedRun


def provenance() -> Provenance:
    """Describe the versions, machine and command of this process."""
    return Provenance(
        version=f"planaria {__version__}, Python {platform.python_version()}, PyTorch {metadata.version('torch')}",
        machine=f"{platform.node()} ({platform.machine()}, {os.cpu_count()} processors)",
        command=command_line(sys.argv),
    )


def command_line(arguments: Sequence[str]) -> str:
    """Return a command line with a bare program name and URLs without credentials and queries."""
    program, *rest = arguments or ["python"]
    public = (re.sub(r"(://)[^/@\s]*@|\?.*$", r"\1", word) if "://" in word else word for word in rest)
    return shlex.join([Path(program).name, *public])


@dataclass(frozen=True)
class Origin:
    """Where a run starts: committed steps, last generation, and the checkpoint folder that each stage is loaded from.

    Stages missing in ``load`` start from the seed's initial weights.
    """

    step: int = 0
    generation: int = 0
    load: Mapping[int, str] = field(default_factory=dict)
    samples: int | None = None
    """samples used by those steps, or None for the recipe's number in each step"""
    faults_injected: bool = False
    """whether the faults of ``step`` were injected before the run stopped there"""
    first_block: int | None = None
    """first sample block that is not used completely, or None if it follows from the steps"""
    blocks_ahead: Sequence[int] = ()
    """used blocks beyond it"""
    recalled: SnapshotLabel | None = None
    """snapshot in memory from which the nodes in ``snapshot_nodes`` start, instead of loading"""
    snapshot_nodes: Sequence[int] = ()
    durable_step: int | None = None
    """step of the checkpoint in ``load``, if older than ``step``"""
    positions: Mapping[int, ReplicaPosition] = field(default_factory=dict)
    """start of replicas that are not at ``step``"""
    recut: Recut | None = None
    """description of a conversion from another shape"""

    @property
    def start_fields(self) -> dict[str, Any]:
        """The fields of :class:`RunStarted` that describe the origin."""
        return {
            "first_step": self.step,
            "first_generation": self.generation,
            "first_sample": self.samples,
            "first_block": self.first_block,
            "blocks_ahead": list(self.blocks_ahead),
            "positions": dict(self.positions),
            "checkpoint_of_stage": dict(self.load),
            "snapshot_step": -1 if self.recalled is None else self.recalled.step,
            "recalled_from": self.recalled,
            "snapshot_nodes": list(self.snapshot_nodes),
            "durable_step": self.durable_step,
            "recut": self.recut,
        }

    @property
    def next_fault(self) -> int:
        """The first step whose faults are not injected yet."""
        return self.step + 1 if self.faults_injected else self.step

    def total_samples(self, config: RunConfig) -> int:
        """Return the number of samples after the last step."""
        return self.sample_offset(config) + config.train.steps * config.samples

    def sample_offset(self, config: RunConfig) -> int:
        """Return the difference between the samples used so far and the recipe's number for these steps."""
        return 0 if self.samples is None else self.samples - self.step * config.samples


START = Origin()


def run_started(resolved: ResolvedRun, origin: Origin) -> RunStarted:
    """Return the first event of a run: the part of the recipe that decisions depend on."""
    config, independent = resolved.config, resolved.replicas_step_independently
    paths = routes(config, 0) if resolved.schedule is None and independent else resolved.routes(0)
    walked, stages = [list(route) for route in paths], range(config.pipeline.stages + 1)
    shared = resolved.schedule is not None or resolved.column(0).shared
    columns = [[resolved.arrangement.nodes(stage)[r] for stage in stages] for r in range(resolved.max_replicas)]
    return RunStarted(
        **origin.start_fields,
        name=config.name,
        part=secrets.token_hex(8),
        seed=config.seed,
        stages=config.pipeline.stages,
        steps=config.train.steps,
        samples_per_step=config.samples,
        replicas=resolved.replicas,
        nodes_by_replica=columns if independent else [],
        exchange=config.exchange,
        wall_time=time.time(),
        provenance=provenance(),
        eval_every=config.train.eval_every,
        save_every=PROBE if config.checkpoint.every == "best" else config.checkpoint.every,
        save_in_background=config.checkpoint.background,
        spares=config.fleet.spares,
        local_workers=config.fleet.local_workers,
        replace=config.fleet.replace,
        routes=walked if shared else sorted(map(list, {tuple(route) for route in walked})),
        arrangement=[list(resolved.arrangement.nodes(s)) for s in stages] if shared else [],
        extra_edges=_extra_edges(resolved, shared),
        recovery=config.recovery,
        diagnose=config.fleet.diagnose,
        relays={name: relay.bandwidth_mbit * MBIT for name, relay in config.fleet.relays.items()},
        stage_work=stage_work(config) if config.pipeline.has_uneven_stages else [],
        memory_needs=list(device_needs(config).stages) if config.pipeline.has_uneven_stages else [],
    )


def _extra_edges(resolved: ResolvedRun, shared: bool) -> list[tuple[int, int]]:
    """Return the pairs of nodes that need an edge besides those of the first step's routes.

    ``shared``: whether stages have several nodes, by a schedule or in replicas.
    """
    config, stages = resolved.config, range(resolved.config.pipeline.stages + 1)
    met = list(combinations(stages, 2)) if routes_vary(config) and not shared else []
    if resolved.replicas_per_plan > 1:  # each node sends its gradient or update to all others
        met = [pair for stage in stages for pair in combinations(resolved.arrangement.nodes(stage), 2)]
    if config.routing.mixed:  # routes are drawn for each step
        met = list(combinations(sorted(resolved.arrangement.stage), 2))
    if config.model.one_array:  # any stage may be the only survivor, which sends to all
        met = list(combinations(stages, 2))
    return sorted({*met, *(pair for slot in resolved.recovery.slots for pair in slot.copy.pairs)})
