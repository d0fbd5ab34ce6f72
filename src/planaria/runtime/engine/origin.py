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

from planaria import __version__
from planaria.config.schema import RunConfig
from planaria.control.events import Recut, RunStarted, Standing
from planaria.control.saving import PROBE
from planaria.control.started import Provenance, SnapshotLabel
from planaria.pipeline.network.costs import MBIT
from planaria.pipeline.routing import change, routes
from planaria.runtime.engine.needs import needs, work
from planaria.runtime.engine.resolved import ResolvedRun


def provenance() -> Provenance:
    """Describe this process."""
    return Provenance(
        version=f"planaria {__version__}, Python {platform.python_version()}, PyTorch {metadata.version('torch')}",
        machine=f"{platform.node()} ({platform.machine()}, {os.cpu_count()} processors)",
        command=command_line(sys.argv),
    )


def command_line(arguments: Sequence[str]) -> str:
    """Return a command line with the program's name alone, and without passwords, tokens and queries of URLs."""
    program, *rest = arguments or ["python"]
    public = (re.sub(r"(://)[^/@\s]*@|\?.*$", r"\1", word) if "://" in word else word for word in rest)
    return shlex.join([Path(program).name, *public])


@dataclass(frozen=True)
class Origin:
    """Committed steps, the last generation, and the checkpoint folder that each stage is loaded from.

    Stages that ``load`` does not name start from the seed's initial weights.
    """

    step: int = 0
    generation: int = 0
    load: Mapping[int, str] = field(default_factory=dict)
    samples: int | None = None
    """used in those steps; as many as the recipe says for each, unless given"""
    struck: bool = False
    """the faults of ``step`` have struck already: they are why the run stopped there"""
    first_block: int | None = None
    """all blocks of samples before this one are used; those of the steps, unless given"""
    blocks_ahead: Sequence[int] = ()
    """and these beyond"""
    recalled: SnapshotLabel | None = None
    """the snapshot in memory from which the nodes in ``remembering`` begin, in place of what they load"""
    remembering: Sequence[int] = ()
    durable_step: int | None = None
    """that of the checkpoint in ``load``, where it is older than ``step``"""
    standings: Mapping[int, Standing] = field(default_factory=dict)
    """where replicas that are not all at ``step`` take up"""
    recut: Recut | None = None
    """what became of a checkpoint of another shape"""

    @property
    def next_fault(self) -> int:
        """The first step whose faults are still to come."""
        return self.step + 1 if self.struck else self.step

    def samples_in_all(self, config: RunConfig) -> int:
        """Those of the steps so far, and of those that are left."""
        return self.sample_offset(config) + config.train.steps * config.samples

    def sample_offset(self, config: RunConfig) -> int:
        """What to add to the number of a sample, if all steps before had taken as many as the recipe says."""
        return 0 if self.samples is None else self.samples - self.step * config.samples


START = Origin()


def run_started(resolved: ResolvedRun, origin: Origin) -> RunStarted:
    """The first event of a run: all of the recipe that its decisions depend on."""
    config, pipeline, replicas = resolved.config, resolved.config.pipeline, resolved.replicas
    ways = routes(config, 0) if resolved.schedule is None and replicas > 1 else resolved.routes(0)
    walked, stages = [list(route) for route in ways], range(pipeline.stages + 1)
    shared = resolved.schedule is not None or resolved.column(0).shared
    met = list(combinations(stages, 2)) if change(config) and not shared else []
    if resolved.at_once > 1:  # each sends all others its gradient, or its offer
        met = [pair for stage in stages for pair in combinations(resolved.arrangement.nodes(stage), 2)]
    if config.routing.mixed:  # which nodes follow one another is drawn for each step
        met = list(combinations(sorted(resolved.arrangement.stage), 2))
    if config.model.one_array:  # any may be the one that is left to give to all
        met = list(combinations(stages, 2))
    copies = [slot.copy for slot in resolved.recovery.slots]
    columns = [[resolved.arrangement.nodes(stage)[r] for stage in stages] for r in range(resolved.most_replicas)]
    return RunStarted(
        name=config.name,
        part=secrets.token_hex(8),
        seed=config.seed,
        stages=config.pipeline.stages,
        steps=config.train.steps,
        first_step=origin.step,
        first_generation=origin.generation,
        samples_per_step=config.samples,
        first_sample=origin.samples,
        first_block=origin.first_block,
        blocks_ahead=list(origin.blocks_ahead),
        replicas=replicas,
        columns=columns if replicas > 1 else [],
        standings=dict(origin.standings),
        exchange=config.exchange,
        wall_time=time.time(),
        provenance=provenance(),
        load=dict(origin.load),
        recalled=-1 if origin.recalled is None else origin.recalled.step,
        recalled_from=origin.recalled,
        remembering=list(origin.remembering),
        durable_step=origin.durable_step,
        recut=origin.recut,
        eval_every=config.train.eval_every,
        save_every=PROBE if config.checkpoint.every == "best" else config.checkpoint.every,
        save_in_background=config.checkpoint.background,
        spares=config.fleet.spares,
        own=config.fleet.own,
        replace=config.fleet.replace,
        routes=walked if shared else sorted(map(list, {tuple(route) for route in walked})),
        arrangement=[list(resolved.arrangement.nodes(s)) for s in stages] if shared else [],
        pairs=sorted({*met, *(pair for copy in copies for pair in copy.pairs)}),
        recovery=config.recovery,
        diagnose=config.fleet.diagnose,
        relays={name: relay.bandwidth_mbit * MBIT for name, relay in config.fleet.relays.items()},
        work=work(config) if config.pipeline.unlike else [],
        memory_needs=list(needs(config).stages) if config.pipeline.unlike else [],
    )
