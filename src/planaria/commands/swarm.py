"""``planaria swarm``: peers as processes of this machine, on a board of their own or a shared one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from planaria import recipe
from planaria.commands import runs
from planaria.errors import RunStopped
from planaria.observe.swarm_progress import SwarmProgress
from planaria.observe.swarm_report import show_outcome, write_swarm_report
from planaria.swarm.assemble import judge_of, policy_of, task_of
from planaria.swarm.config import SwarmConfig
from planaria.swarm.live import LiveSwarm, failures
from planaria.swarm.outcome import read_outcome
from planaria.swarm.setting import load, names, of_peer


def start(path: Path, flags: Mapping[str, str], dry_run: bool, quiet: bool) -> int:
    """Run the swarm in the recipe ``path``; the exit code."""
    config = load(path, flags)
    if dry_run:
        print(recipe.dump(config), end="")
        return 0
    prepare(config, quiet)
    folder = runs.create(config)
    with runs.held(folder), SwarmProgress(config.rounds.count, quiet) as progress:
        codes = LiveSwarm(config, folder).run(progress.told, progress.died)
    outcome = read_outcome(folder)
    if outcome.peers:
        show_outcome(outcome, config)
        print(f"report        {write_swarm_report(folder, config, outcome)}")
    if broken := failures(codes):
        raise RunStopped(f"{folder}: {', '.join(broken)}; what they said is in {folder / 'peers'}")
    return 0


def prepare(config: SwarmConfig, quiet: bool) -> None:
    """Everything that can go wrong with any peer, before one is started; schools are attended here, one at a time.

    :raises UserError: naming what is wrong.
    """
    torch.set_num_threads(1)
    for name in names(config):
        own = of_peer(config, name)
        task = task_of(own)
        judge_of(own, task)
        policy_of(own, task, None if quiet else print)
