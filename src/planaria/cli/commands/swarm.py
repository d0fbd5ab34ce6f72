"""``planaria swarm``: peers as local processes, on a board of their own or a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import torch

from planaria.common.errors import RunStopped, UserError
from planaria.config import recipe
from planaria.config.registry import blaming
from planaria.runtime.engine import runs
from planaria.runtime.fleet.births import fork_server
from planaria.swarm.assemble import own_classes, policy_of, task_of
from planaria.swarm.attacks.idle import refuse_idle
from planaria.swarm.checks import layers
from planaria.swarm.config import SwarmConfig
from planaria.swarm.live import PRELOAD, LiveSwarm, failures
from planaria.swarm.policy import POLICIES
from planaria.swarm.policy.placing import device_of
from planaria.swarm.records.outcome import Outcome, read_outcome
from planaria.swarm.report.progress import SwarmProgress
from planaria.swarm.report.swarm_report import show_outcome, write_swarm_report
from planaria.swarm.serving.client import Client
from planaria.swarm.setting import load, names, of_peer, of_run


def start(path: Path, flags: Mapping[str, str], dry_run: bool, quiet: bool) -> int:
    """Run the swarm in the recipe ``path``; the exit code."""
    config = load(path, flags, "swarm")
    fork_server([] if dry_run else PRELOAD)
    prepare(config, quiet, schools=not dry_run)
    if dry_run:
        print(recipe.dump(config), end="")
        return 0
    folder = runs.create(config)
    with runs.held(folder), SwarmProgress(config.rounds.count, quiet) as progress:
        codes = LiveSwarm(config, folder).run(progress.told, progress.died)
    sum_up(folder, config)
    if broken := failures(codes):
        raise RunStopped(f"{folder}: {', '.join(broken)}; what they said is in {folder / 'peers'}")
    return 0


def sum_up(folder: Path, config: SwarmConfig) -> None:
    """Print what came of the run in ``folder``, and write its report, if any honest peer came so far."""
    outcome = read_outcome(folder)
    if outcome.honest:
        show_outcome(outcome, config)
        print(f"report        {write_swarm_report(folder, config, outcome)}")
        print(f"take a model  planaria export {folder} --peer {outcome.honest[0].name} --to FOLDER")


def noted(run: Path) -> tuple[SwarmConfig, Outcome]:
    """The configuration of a swarm's run and what came of it so far; UserError when that is nothing yet."""
    config, outcome = of_run(run), read_outcome(run)
    if not outcome.honest:
        raise UserError(f"{run}: no peer has noted anything yet; wait for its first evaluation")
    return config, outcome


def prepare(config: SwarmConfig, quiet: bool, schools: bool = True) -> None:
    """Everything that can go wrong with any peer, before one is started.

    ``schools``: attend them here, one at a time; else what is quick alone is looked at.

    :raises UserError: naming what is wrong.
    """
    torch.set_num_threads(1)
    for name in names(config):
        own = of_peer(config, name)
        task = task_of(own)
        POLICIES.make(own.policy.kind, own.policy.options)
        layers(own)
        device_of(own.policy)
        if own.policy.server:
            Client(own.policy).model(own.policy.serving.model)
        with blaming(partial(own_classes, own)):
            refuse_idle(own.attack, task)
            if schools:
                policy_of(own, task, None if quiet else print)
