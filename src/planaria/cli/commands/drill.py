"""``planaria drill``: compare attacks and defences from the same starting weights; resumable."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

from planaria.cli.commands.drill_repair import repaired
from planaria.cli.commands.swarm import prepare
from planaria.common import atomic
from planaria.common.errors import RunStopped
from planaria.lab.report.drill_report import show_drill, write_drill_report
from planaria.lab.trials.arms import of_arm
from planaria.lab.trials.identity import identity
from planaria.lab.trials.kept import Kept, make_folder
from planaria.runtime.engine import runs
from planaria.runtime.fleet.births import fork_server
from planaria.swarm.assemble import own_classes
from planaria.swarm.config import SwarmConfig
from planaria.swarm.drills.drill_results import Drill, Drilled, Run
from planaria.swarm.drills.drill_spec import load
from planaria.swarm.live import PRELOAD, LiveSwarm, failures
from planaria.swarm.records.outcome import Outcome, read_outcome
from planaria.swarm.repair.results import Repaired
from planaria.swarm.report.progress import SwarmProgress
from planaria.swarm.setting import names, of_peer


def drill(path: Path, flags: Mapping[str, str], quiet: bool, repair: bool = False) -> int:
    """Run the drill in the recipe ``path`` (or what is left of it), and tell what it found; the exit code."""
    spec, arms = load(path, flags, repair)
    fork_server(PRELOAD)
    folder = Path(arms[0].config.out) / f"{arms[0].config.name}-drill"
    for arm in arms:
        with of_arm(f"{path}: drill.arms.{arm.name}"):
            prepare(arm.config, quiet, schools=False)
    found, repairs = {arm.name: list[Run]() for arm in arms}, list[Repaired]()
    make_folder(folder)
    with runs.held(folder):
        for seed in spec.seeds:
            for arm in arms:
                if not quiet:
                    print(f"{arm.name}, seed {seed}", flush=True)
                place = folder / arm.folder / f"seed-{seed}"
                found[arm.name].append(Run(seed=seed, outcome=_outcome(arm.seeded(seed), place, quiet)))
                if spec.repair and (one := repaired(arm.seeded(seed), place, arm.name)) is not None:
                    repairs.append(one)
    drilled = [
        Drilled(name=arm.name, control=arm.control, attackers=arm.attackers, runs=found[arm.name]) for arm in arms
    ]
    watch = list(arms[0].config.evaluate.watch)
    result = Drill(name=arms[0].config.name, last=spec.last, watch=watch, arms=drilled, repairs=repairs)
    atomic.write_text(folder / "drill.json", result.model_dump_json(indent=1))
    show_drill(result)
    print(f"report        {write_drill_report(result, folder / 'report.html')}\nnumbers       {folder / 'drill.json'}")
    return 0


def _outcome(config: SwarmConfig, folder: Path, quiet: bool) -> Outcome:
    """One arm with one seed: run, unless an earlier drill has run just this. Its processes are the peers.

    :raises RunStopped: when a peer of it broke down: half an arm is no comparison.
    """
    asked = config.model_dump(mode="json", exclude={"out"})  # where it lies is no part of what is run
    code = [chosen for name in names(config) for chosen in own_classes(of_peer(config, name))]
    kept = Kept(folder / "outcome.json", Outcome, identity(asked, code))
    outcome, stale = kept.read()
    if outcome is not None:
        return outcome
    if stale and not quiet:
        print(f"run again, {stale}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    prepare(config, quiet)
    make_folder(folder)
    atomic.write_text(folder / "config.json", config.model_dump_json(indent=2, exclude={"out"}))
    with SwarmProgress(config.rounds.count, quiet) as progress:
        codes = LiveSwarm(config, folder).run(progress.told, progress.died)
    if broken := failures(codes):
        raise RunStopped(f"{folder}: {', '.join(broken)}; run the drill again to go on")
    outcome = read_outcome(folder)
    kept.write(outcome)
    return outcome
