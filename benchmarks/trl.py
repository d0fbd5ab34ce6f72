"""Beside TRL: four peers of a swarm, one peer alone, and TRL's GRPOTrainer, on one machine and from one start model.

All learn the task `sums` by its own verifier, from the same problems in the same order, with as many completions in an
update, drawn alike and learned from by the same AdamW at a constant rate; what neither side is told is its default. The
rate is searched for TRL and for the one peer, on a seed apart (--search); the four peers take the one peer's. The start
model has been to school, and is given to all sides as a Hugging Face folder. Every process has one thread.

Processor time is that of all processes together, as the kernel counts it. The time of a run of one update, made just
before, is taken off as what it costs to start and end. Held-out sums are put to saved models afterwards, by one
examiner for all sides.

TRL lives in an environment of its own, and is never imported here. To make it, in the repository's root:

    python3 -m venv ../venv-trl && ../venv-trl/bin/pip install -c constraints.txt "trl>=1.16"
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.common import ROOT, RUNS, Claim, Row, conclude, parser, start
from planaria.common.errors import UserError

if TYPE_CHECKING:
    from planaria.swarm.config import SwarmConfig
    from planaria.swarm.policy.base import Policy


NAME = "trl"
FOUR, ALONE, TRL = "four peers", "one peer alone", "TRL"
SIDES = {FOUR: 4, ALONE: 1, TRL: 0}
"""side → its peers"""
CHECKS = "claims, support, surprisal, duplicates"
"""no judge, who would see false steps that TRL's reward does not"""
LIMIT_S = 1800
ENTRY = (
    "import json, sys; sys.path[:0] = sys.argv[1:3]; "
    "from benchmarks.trl_trainer import main; main(json.loads(sys.argv[3]))"
)


@dataclass(frozen=True)
class Job:
    """One training run; what TRL's process is told."""

    folder: str
    start: str
    problems: list[int]
    """of all updates, in their order"""
    rounds: int
    prompts: int
    group: int
    every: int
    """updates between models that are saved"""
    max_new: int
    top_k: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Ran:
    """What came of it."""

    curve: list[float]
    """held-out accuracy before the first update, and after every so many"""
    seconds: float
    """processor time of all processes"""


def recipe(given: argparse.Namespace, peers: int, rounds: int, lr: float, seed: int, **policy: Any) -> SwarmConfig:
    from planaria.swarm.config import SwarmConfig

    return SwarmConfig.model_validate(
        {
            "name": NAME,
            "size": peers,
            "seed": seed,
            "policy": policy,
            "school": {"steps": given.school},
            "rounds": {
                "count": rounds,
                "prompts": given.prompts,
                "group": given.group,
                "keep": given.every,
                "kept": rounds,
                "timeout_s": 600,
            },
            "optim": {"lr": lr},
            "evaluate": {"every": 0, "problems": 1},
            "defence": {"checks": CHECKS},
        }
    )


def started(given: argparse.Namespace) -> Path:
    """The folder of the model that all sides begin with."""
    from planaria.swarm.assemble import policy_of, task_of
    from planaria.swarm.policy.policies import LlamaPolicy

    config = recipe(given, 1, 1, 1e-3, 0)
    policy = policy_of(config, task_of(config), print)
    assert isinstance(policy, LlamaPolicy)
    shutil.rmtree(folder := RUNS / NAME / "start", ignore_errors=True)
    policy.export(folder)
    return folder


def ran(given: argparse.Namespace, side: str, begun: Path, rounds: int, lr: float, seed: int) -> Ran:
    """One run of one side, and its models' examinations, which are not in its time."""
    shutil.rmtree(folder := RUNS / NAME / f"{side.replace(' ', '-')}-{seed}-{lr:g}", ignore_errors=True)
    folder.mkdir(parents=True)
    peers = SIDES[side]
    config = recipe(given, max(1, peers), rounds, lr, seed, kind="pretrained", options={"path": str(begun)})
    seconds = swarm(config, folder) if peers else trainer(given, config, folder)
    looks = range(given.every, rounds + 1, given.every)
    models = (_of_peer(folder / "run", number) if peers else _of_trl(folder, begun, number) for number in looks)
    curve = [examined(config, _opened(begun)), *(examined(config, model) for model in models)]
    print(f"{side}, seed {seed}, rate {lr:g}: {' '.join(f'{x:.3f}' for x in curve)}; {seconds:.2f} s", flush=True)
    return Ran(curve, seconds)


def swarm(config: SwarmConfig, folder: Path) -> float:
    """Processor seconds of a swarm whose run is ``folder``/run."""
    from planaria.config.recipe import dump

    file = folder / "recipe.toml"
    file.write_text(dump(config.model_copy(update={"name": "run", "out": str(folder)})))
    return metered([sys.executable, "-m", "planaria", "swarm", str(file)], folder / "out.txt")


def trainer(given: argparse.Namespace, config: SwarmConfig, folder: Path) -> float:
    """Processor seconds of TRL's trainer, which is told what the recipe says."""
    from planaria.swarm.assemble import task_of
    from planaria.swarm.draws import shared_problems

    rounds, training = config.rounds, task_of(config).training
    drawn = (shared_problems(config.seed, number, training, rounds.prompts) for number in range(rounds.count))
    job = Job(
        folder=str(folder),
        start=str(config.policy.options["path"]),
        problems=list(itertools.chain.from_iterable(drawn)),
        rounds=rounds.count,
        prompts=rounds.prompts,
        group=rounds.group,
        every=given.every,
        max_new=config.sampling.max_new,
        top_k=config.sampling.support(config.policy.model.vocab),
        lr=config.optim.lr,
        seed=config.seed,
    )
    # Isolated, so that this folder's trl.py does not stand before the library.
    command = [str(given.python), "-I", "-c", ENTRY, str(ROOT / "src"), str(ROOT), json.dumps(asdict(job))]
    return metered(command, folder / "out.txt")


def metered(command: Sequence[str], out: Path) -> float:
    """Processor seconds of a command and of all that it bore, orphans included; what it prints goes to ``out``.

    :raises RunStopped: when it fails, takes too long, or leaves a process behind that does not end.
    """
    from planaria.common.errors import RunStopped
    from planaria.runtime.fleet.process import adopting

    before, others = used(), children()
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with adopting(), out.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **quiet})
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RunStopped(f"{command[0]}: not done after {LIMIT_S} s; what it said is in {out}") from None
        finally:
            process.terminate()  # a swarm then ends its peers too
            buried = bury(others)
    if code or not buried:
        how = f"ended with {code}" if code else "left a process that does not end"
        raise RunStopped(f"{command[0]}: {how}; what it said is in {out}")
    return used() - before


def bury(others: frozenset[int], patience_s: float = 10.0) -> bool:
    """Wait for all children but ``others``, or their time would not be counted; whether none of them is left."""
    until = time.monotonic() + patience_s
    while left := children() - others:
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # another thread has waited for it
                os.waitpid(pid, os.WNOHANG)
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True


def children() -> frozenset[int]:
    """Process ids of this process's children, of those that have ended but were not waited for too."""
    lists = Path("/proc/self/task").glob("*/children")
    return frozenset(int(pid) for file in lists for pid in file.read_text().split())


def used() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


# Examining


def examined(config: SwarmConfig, policy: Policy) -> float:
    """Share of all held-out sums that are solved, one draw each; the same draws for all sides of a seed."""
    from planaria.swarm.assemble import task_of
    from planaria.swarm.evaluation import Examiner

    task = task_of(config)
    asked = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"problems": task.held_out})})
    return Examiner(task, asked, "p0").examine(policy).accuracy.rate or 0.0


def _opened(folder: Path) -> Policy:
    from planaria.swarm.policy.policies import open_policy

    return open_policy(str(folder))


def _of_peer(run: Path, number: int) -> Policy:
    from planaria.swarm.learned import learned

    return learned(run, "p0", number).policy


def _of_trl(folder: Path, begun: Path, number: int) -> Policy:
    saved = folder / f"checkpoint-{number}"
    for name in ("tokenizer.json", "generation_config.json"):  # its own are the same, written by another version
        shutil.copyfile(begun / name, saved / name)
    return _opened(saved)


INSTALL = 'python3 -m venv ../venv-trl && ../venv-trl/bin/pip install -c constraints.txt "trl>=1.16"'
LEARNS, COSTS = Claim(low=-0.03), Claim(high=1.0)
Floats = Sequence[float]


def at(curve: Floats, place: float) -> float:
    """A curve at ``place``, counted in its points, with straight lines between them; its end beyond that."""
    left = min(int(place), len(curve) - 1)
    right = min(left + 1, len(curve) - 1)
    return curve[left] + (min(place, len(curve) - 1) - left) * (curve[right] - curve[left])


def searched(given: argparse.Namespace, begun: Path) -> tuple[dict[str, float], list[Row]]:
    """Each side's best rate by the mean of its curve on the seed of the search, and what was found on the way."""
    found: dict[str, dict[float, list[float]]] = {ALONE: {}, TRL: {}}
    for lr, side in itertools.product(given.rates, found):
        found[side][lr] = ran(given, side, begun, given.rounds, lr, given.search).curve
    best = {side: max(curves, key=lambda lr, of=curves: (fmean(of[lr]), -lr)) for side, curves in found.items()}
    rows = [
        Row(
            f"search, {side}: mean accuracy at the best rate",
            [fmean(curves[best[side]])],
            "all: 1",
            beside={f"rate {lr:g}": fmean(curve) for lr, curve in curves.items()},
        )
        for side, curves in found.items()
    ]
    return best | {FOUR: best[ALONE]}, rows


def less(one: Floats, other: Floats) -> list[float]:
    return [a - b for a, b in zip(one, other, strict=True)]


def per_update(runs: Sequence[Ran], short: Sequence[Ran], rounds: int) -> list[float]:
    """Processor seconds of one update, seed by seed: of runs of ``rounds``, less those of one."""
    return [(run.seconds - first.seconds) / (rounds - 1) for run, first in zip(runs, short, strict=True)]


def learning_rows(
    given: argparse.Namespace, runs: Mapping[str, Sequence[Ran]], cost: Mapping[str, Floats]
) -> list[Row]:
    """How much is learned: of as many completions, and of as much processor time as the cheapest side takes for them.

    ``runs``: of each side, seed by seed. ``cost``: processor seconds of their updates.
    """
    least = given.rounds * min(map(fmean, cost.values()))
    kinds: list[tuple[str, Claim | None, dict[str, list[float]]]] = [
        (
            f"accuracy after {given.rounds * given.prompts * given.group:,} completions",
            LEARNS,
            {side: [run.curve[-1] for run in found] for side, found in runs.items()},
        ),
        (
            "mean accuracy on the way there",
            LEARNS,
            {side: [fmean(run.curve) for run in found] for side, found in runs.items()},
        ),
        (
            f"accuracy after {least:.1f} CPU s of training",
            None,
            {
                side: [at(run.curve, least / c / given.every) for run, c in zip(found, cost[side], strict=True)]
                for side, found in runs.items()
            },
        ),
    ]
    rows = [Row("accuracy at the start", [run.curve[0] for run in runs[TRL]], "all: 1")]
    for what, claim, found in kinds:
        rows += [Row(f"{what}: {side}", found[side], "all: 1") for side in SIDES]
        rows += [
            Row(f"{what}: {side} less TRL", less(found[side], found[TRL]), "as TRL: 0", claim) for side in (ALONE, FOUR)
        ]
    return rows


def cost_rows(given: argparse.Namespace, short: Mapping[str, Sequence[Ran]], cost: Mapping[str, Floats]) -> list[Row]:
    """What learning takes, and what it takes to start. ``short``: runs with one update."""
    thousand = 1000 / (given.prompts * given.group)
    what = "CPU s of 1,000 completions, generated and learned from"
    rows = [Row(f"{what}: {side}", [thousand * c for c in cost[side]], "unknown") for side in SIDES]
    for side, claim in ((ALONE, COSTS), (FOUR, None)):
        ratios = [a / b for a, b in zip(cost[side], cost[TRL], strict=True)]
        rows.append(Row(f"CPU time of training: {side} over TRL", ratios, "as TRL: 1", claim))
    what = "CPU s of a run with one update"
    return rows + [Row(f"{what}: {side}", [run.seconds for run in short[side]], "unknown") for side in SIDES]


def refuse_senseless(given: argparse.Namespace) -> None:
    """:raises UserError: when nothing could be measured like that."""
    if not given.python.is_file():
        raise UserError(f"--python {given.python}: no such file; make TRL's environment: {INSTALL}")
    if given.rounds < 2 or given.every < 1 or given.rounds % given.every:
        raise UserError(f"--rounds {given.rounds}: must be 2 or more, and a multiple of --every {given.every}")
    if given.search in given.seeds:
        raise UserError(
            f"--search {given.search}: is among --seeds; give another, or rates are tuned to what they are judged on"
        )


def main() -> int:
    flags = parser(NAME, __doc__)
    flags.add_argument("--python", type=Path, default=ROOT.parent / "venv-trl/bin/python", help="that can import TRL")
    flags.add_argument("--rates", type=float, nargs="+", default=[1e-4, 3e-4, 1e-3], help="learning rates to try")
    flags.add_argument("--search", type=int, default=100, help="seed that they are tried on")
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of problems and draws")
    flags.add_argument("--rounds", type=int, default=30, help="updates of a run")
    flags.add_argument("--every", type=int, default=5, help="updates between examinations")
    flags.add_argument("--prompts", type=int, default=16, help="problems of an update")
    flags.add_argument("--group", type=int, default=12, help="completions of a problem; divides by four")
    flags.add_argument("--school", type=int, default=800, help="steps of the start model's pre-training")
    given = flags.parse_args()
    refuse_senseless(given)
    import torch

    torch.set_num_threads(1)
    begun = started(given)
    best, rows = searched(given, begun)
    short: dict[str, list[Ran]] = {side: [] for side in SIDES}
    runs: dict[str, list[Ran]] = {side: [] for side in SIDES}
    for seed, side in itertools.product(given.seeds, SIDES):  # in turns: the machine may be busier at one time
        short[side].append(ran(given, side, begun, 1, best[side], seed))
        runs[side].append(ran(given, side, begun, given.rounds, best[side], seed))
    cost = {side: per_update(runs[side], short[side], given.rounds) for side in SIDES}
    notes = [
        "rates: " + ", ".join(f"{side} {lr:g}" for side, lr in best.items()),
        "accuracy: share of all 810 held-out sums solved, one draw each, which is their mean reward",
    ]
    return conclude(NAME, given, [*learning_rows(given, runs, cost), *cost_rows(given, short, cost), *rows], notes)


if __name__ == "__main__":
    start(main)
