"""``planaria compare`` with a drill: attacks and defences from the same starting weights; resumable."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from planaria.common import atomic
from planaria.common.errors import RunStopped
from planaria.report.phrases import format_count
from planaria.report.tables import Table, show
from planaria.runtime.fleet.spawner import fork_server
from planaria.runtime.preparation import run_folders
from planaria.swarm.assemble import selected_custom_classes
from planaria.swarm.attacks import HONEST
from planaria.swarm.commands.swarm import prepare
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import peer_config, peer_names
from planaria.swarm.drill_arms import Drill, DrillArm, DrilledArm, DrillRun, DrillSpec, load
from planaria.swarm.records.outcome import RunOutcome, read_outcome
from planaria.swarm.repair import strategies
from planaria.swarm.repair.repair_results import Repaired
from planaria.swarm.repair.repair_training import RepairModels, RepairPlan
from planaria.swarm.repair.strategies import make_case
from planaria.swarm.report.drill_report import show_drill, write_drill_report
from planaria.swarm.report.progress import SwarmProgress
from planaria.swarm.swarm_processes import PRELOAD, LiveSwarm, describe_failures
from planaria.swarm.trained_policy import learned_state, trusted_state
from planaria.trials.arms import prefix_errors
from planaria.trials.result_cache import CachedResult, identity, make_folder
from planaria.trials.spread import format_seeds

FILE = "repaired.json"
MAX_SUCCESS = 0.02
"""largest success of a repaired model"""


def drill(
    path: Path,
    flags: Mapping[str, str],
    quiet: bool,
    overrides: Mapping[str, object] | None = None,
    only: str | None = None,
    dry_run: bool = False,
) -> int:
    """Run the drill in the recipe ``path``, or the rest of it, and print its result; return the exit code.

    ``overrides`` overrides settings of the [drill] table; ``only`` selects arms. With ``dry_run``, check everything and
    print what would run.
    """
    spec, arms = load(path, flags, overrides, only)
    fork_server([] if dry_run else PRELOAD)
    folder = Path(arms[0].config.out) / f"{arms[0].config.name}-drill"
    for arm in arms:
        with prefix_errors(f"{path}: drill.arms.{arm.name}"):
            prepare(arm.config, quiet, warmup=False)
    if dry_run:
        _show_plan(spec, arms, folder)
        return 0
    runs, repairs = {arm.name: list[DrillRun]() for arm in arms}, list[Repaired]()
    make_folder(folder)
    with run_folders.lock_for_training(folder):
        for seed in spec.seeds:
            for arm in arms:
                if not quiet:
                    print(f"{arm.name}, seed {seed}", flush=True)
                run_folder = _run_folder(folder, arm, seed)
                runs[arm.name].append(DrillRun(seed=seed, outcome=_run_or_load(arm.with_seed(seed), run_folder, quiet)))
                if spec.repair and (one := repair_run(arm.with_seed(seed), run_folder, arm.name)) is not None:
                    repairs.append(one)
    drilled = [
        DrilledArm(name=arm.name, control=arm.control, attackers=arm.attackers, runs=runs[arm.name]) for arm in arms
    ]
    watch = list(arms[0].config.evaluate.watch)
    result = Drill(name=arms[0].config.name, last=spec.last, watch=watch, arms=drilled, repairs=repairs)
    atomic.write_text(folder / "drill.json", result.model_dump_json(indent=1))
    show_drill(result)
    print(f"report        {write_drill_report(result, folder / 'report.html')}\nnumbers       {folder / 'drill.json'}")
    return 0


def _show_plan(spec: DrillSpec, arms: Sequence[DrillArm], folder: Path) -> None:
    """Print the arms of a drill and how many of their runs are finished."""
    config, head = arms[0].config, ["arm", "control", "attackers", "rounds", "peers", "kept"]
    rows = []
    for arm in arms:
        caches = (_cache(arm.with_seed(seed), _run_folder(folder, arm, seed)) for seed in spec.seeds)
        kept = sum(cache.read()[0] is not None for cache in caches)
        counts = [str(arm.config.rounds.count), str(len(peer_names(arm.config))), f"{kept} of {len(spec.seeds)}"]
        rows.append([arm.name, arm.control or "–", ", ".join(arm.attackers) or "–", *counts])
    title = f"{config.name}: {format_count(len(arms), 'arm')}, {format_seeds(spec.seeds)}"
    console = show([Table(title, head, rows, numbers_from=3)])
    if spec.repair:
        console.print("repair        a peer of each attacked arm, by all strategies", highlight=False)
    console.print(f"would be in   {folder}", highlight=False)


def _run_folder(folder: Path, arm: DrillArm, seed: int) -> Path:
    return folder / arm.folder / f"seed-{seed}"


def _cache(config: SwarmConfig, folder: Path) -> CachedResult[RunOutcome]:
    """Return the cached outcome of one arm with one seed."""
    requested = config.model_dump(mode="json", exclude={"out"})  # the location does not affect the result
    code = [chosen for name in peer_names(config) for chosen in selected_custom_classes(peer_config(config, name))]
    return CachedResult(folder / "outcome.json", RunOutcome, identity(requested, code))


def _run_or_load(config: SwarmConfig, folder: Path, quiet: bool) -> RunOutcome:
    """Return the outcome of one arm with one seed; run it unless a previous drill did.

    :raises RunStopped: if one of its peers failed.
    """
    cache = _cache(config, folder)
    outcome, stale = cache.read()
    if outcome is not None:
        return outcome
    if stale and not quiet:
        print(f"run again, {stale}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    prepare(config, quiet)
    make_folder(folder)
    atomic.write_text(folder / "config.json", config.model_dump_json(indent=2, exclude={"out"}))
    with SwarmProgress(config.rounds.count, quiet) as progress:
        codes = LiveSwarm(config, folder).run(progress.update, progress.show_exit)
    if broken := describe_failures(codes):
        raise RunStopped(f"{folder}: {', '.join(broken)}; run the drill again to resume")
    outcome = read_outcome(folder)
    cache.write(outcome)
    return outcome


def repair_run(config: SwarmConfig, folder: Path, arm: str) -> Repaired | None:
    """Repair the first honest peer of a run with all strategies; return None without an attack.

    It is repaired of its attackers' behaviour, which a drill knows. All honest peers learned the same.
    """
    own = {name: peer_config(config, name) for name in peer_names(config)}
    kinds = sorted({one.attack.kind for one in own.values() if one.attack.kind != HONEST and one.attack.dose})
    honest = next((name for name, one in own.items() if one.attack.kind == HONEST), None)
    watch = [kind for kind in kinds if kind in config.evaluate.watch]
    if not watch or honest is None:
        return None
    peer = own[honest]
    requested = {"repair": 1, "config": config.model_dump(mode="json", exclude={"out"}), "limit": MAX_SUCCESS}
    cache = CachedResult(folder / FILE, Repaired, identity(requested, selected_custom_classes(peer)))
    result, _ = cache.read()
    if result is None:
        result = _repair_peer(peer, folder, honest, arm, watch)
        cache.write(result)
    return result


def _repair_peer(config: SwarmConfig, folder: Path, name: str, arm: str, watch: list[str]) -> Repaired:
    torch.set_num_threads(config.policy.threads)
    poisoned, before = learned_state(config, folder, name), trusted_state(config, folder, name)
    models = RepairModels(before.policy, poisoned.policy)
    case = make_case(config, poisoned.task, models, watch, RepairPlan(seed=config.seed))
    return Repaired(
        arm=arm,
        seed=config.seed,
        peer=name,
        limit=MAX_SUCCESS,
        trusted=len(case.texts.trusted),
        own=case.texts.own,
        benign=len(case.texts.benign),
        before=case.exam.measure(models.tuned),
        strategies=strategies.measure_all(case),
    )
