"""Compare four peers of a swarm, one peer, and TRL's GRPOTrainer on one machine from one start model.

All learn the task `sums` by its own verifier, from the same problems in the same order, with as many completions per
update, the same sampling and AdamW at a constant rate; other settings are defaults. The rate is searched for TRL and
for the single peer on a separate seed (--search); the four peers use the single peer's. The start model is pre-trained
and given to all sides as a Hugging Face folder. Every process has one thread.

Processor time is the kernel's, over all processes. The time of a run with one update, measured just before, is
subtracted as the cost of start and end. One examiner puts held-out sums to the saved models of all sides.

TRL has its own environment and is never imported here. To create it, in the repository's root:

    python3 -m venv ../venv-trl && ../venv-trl/bin/pip install -c constraints.txt "trl>=1.16"
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import shutil
import subprocess
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.harness import ROOT, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, gaps, ratios, start
from benchmarks.processes import children, cli, reap_children
from planaria.common.errors import RunStopped, UserError
from planaria.config.recipe import dump
from planaria.runtime.fleet.process import adopt_orphans
from planaria.swarm.assemble import make_policy, make_task
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.peer.evaluation import Examiner
from planaria.swarm.peer.random_draws import shared_problems
from planaria.swarm.policy.base import Policy
from planaria.swarm.policy.policies import LlamaPolicy, open_policy
from planaria.swarm.trained_policy import trained_state

NAME = "trl"
FOUR, ALONE, TRL = "four peers", "one peer alone", "TRL"
SIDES = {FOUR: 4, ALONE: 1, TRL: 0}  # side → its peers
CHECKS = "claims, support, surprisal, duplicates"  # no judge, who would see false steps that TRL's reward does not
LIMIT_S = 1800
ENTRY = (
    "import json, sys; sys.path[:0] = sys.argv[1:3]; "
    "from benchmarks.trl_trainer import main; main(json.loads(sys.argv[3]))"
)


@dataclass(frozen=True)
class Job:
    """One training run, as sent to TRL's process."""

    folder: str
    start: str
    problems: list[int]  # of all updates, in order
    rounds: int
    prompts: int
    group: int
    every: int  # updates between saved models
    max_new: int
    top_k: int
    lr: float
    seed: int


@dataclass(frozen=True)
class Ran:
    curve: list[float]  # held-out accuracy before the first update and at every look
    seconds: float  # processor time of all processes


def recipe(args: Namespace, peers: int, rounds: int, lr: float, seed: int, **policy: Any) -> SwarmConfig:
    counts = {"count": rounds, "prompts": args.prompts, "group": args.group, "keep": args.every, "kept": rounds}
    sections = {
        "name": NAME,
        "size": peers,
        "seed": seed,
        "policy": policy,
        "warmup": {"steps": args.warmup},
        "rounds": {**counts, "timeout_s": 600},
        "optim": {"lr": lr},
        "evaluate": {"every": 0, "problems": 1},
        "defence": {"checks": CHECKS},
    }
    return SwarmConfig.model_validate(sections)


def started(args: Namespace) -> Path:
    config = recipe(args, 1, 1, 1e-3, 0)
    policy = make_policy(config, make_task(config), print)
    assert isinstance(policy, LlamaPolicy)
    shutil.rmtree(folder := RUNS / NAME / "start", ignore_errors=True)
    policy.export(folder)
    return folder


def ran(args: Namespace, side: str, begun: Path, rounds: int, lr: float, seed: int) -> Ran:
    """Run one side and examine its models, outside its time."""
    shutil.rmtree(folder := RUNS / NAME / f"{side.replace(' ', '-')}-{seed}-{lr:g}", ignore_errors=True)
    folder.mkdir(parents=True)
    peers = SIDES[side]
    config = recipe(args, max(1, peers), rounds, lr, seed, kind="pretrained", options={"path": str(begun)})
    seconds = swarm(config, folder) if peers else trainer(args, config, folder)
    looks = range(args.every, rounds + 1, args.every)
    models = (_of_peer(folder / "run", number) if peers else _of_trl(folder, begun, number) for number in looks)
    curve = [examined(config, _opened(begun)), *(examined(config, model) for model in models)]
    print(f"{side}, seed {seed}, rate {lr:g}: {' '.join(f'{x:.3f}' for x in curve)}; {seconds:.2f} s", flush=True)
    return Ran(curve, seconds)


def swarm(config: SwarmConfig, folder: Path) -> float:
    file = folder / "recipe.toml"
    file.write_text(dump(config.model_copy(update={"name": "run", "out": str(folder)})))
    return metered(cli("swarm", "train", file), folder / "out.txt")


def trainer(args: Namespace, config: SwarmConfig, folder: Path) -> float:
    """Run TRL's trainer with the recipe's settings; return its processor seconds."""
    rounds, training = config.rounds, make_task(config).training
    drawn = (shared_problems(config.seed, number, training, rounds.prompts) for number in range(rounds.count))
    job = Job(
        folder=str(folder),
        start=str(config.policy.options["path"]),
        problems=list(itertools.chain.from_iterable(drawn)),
        rounds=rounds.count,
        prompts=rounds.prompts,
        group=rounds.group,
        every=args.every,
        max_new=config.sampling.max_new,
        top_k=config.sampling.support(config.policy.model.vocab),
        lr=config.optim.lr,
        seed=config.seed,
    )
    # Isolated, so that this folder's trl.py does not stand before the library.
    command = [str(args.python), "-I", "-c", ENTRY, str(ROOT / "src"), str(ROOT), json.dumps(asdict(job))]
    return metered(command, folder / "out.txt")


def metered(command: Sequence[str], out: Path) -> float:
    """Return the processor seconds of a command and its descendants; its output goes to ``out``.

    :raises RunStopped: if it fails, takes too long, or leaves a process that does not end.
    """
    before, others = used(), children()
    quiet = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    with adopt_orphans(), out.open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **quiet})
        try:
            code = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            raise RunStopped(f"{command[0]}: not done after {LIMIT_S} s; its output is in {out}") from None
        finally:
            process.terminate()  # a swarm then ends its peers too
            reaped = reap_children(others)
    if code or not reaped:
        how = f"ended with {code}" if code else "left a process that does not end"
        raise RunStopped(f"{command[0]}: {how}; its output is in {out}")
    return used() - before


def used() -> float:
    found = resource.getrusage(resource.RUSAGE_CHILDREN)
    return found.ru_utime + found.ru_stime


# Examining


def examined(config: SwarmConfig, policy: Policy) -> float:
    task = make_task(config)
    asked = config.model_copy(update={"evaluate": config.evaluate.model_copy(update={"problems": task.held_out})})
    return Examiner(task, asked, "p0").examine(policy).accuracy.rate or 0.0


def _opened(folder: Path) -> Policy:
    return open_policy(str(folder))


def _of_peer(run: Path, number: int) -> Policy:
    return trained_state(run, "p0", number).policy


def _of_trl(folder: Path, begun: Path, number: int) -> Policy:
    saved = folder / f"checkpoint-{number}"
    for name in ("tokenizer.json", "generation_config.json"):  # its own are the same, written by another version
        shutil.copyfile(begun / name, saved / name)
    return _opened(saved)


INSTALL = 'python3 -m venv ../venv-trl && ../venv-trl/bin/pip install -c constraints.txt "trl>=1.16"'
LEARNS, COSTS = Claim(low=-0.03), Claim(high=1.0)
Floats = Sequence[float]


def at(curve: Floats, place: float) -> float:
    """Interpolate a curve at ``place``, in points; its end beyond that."""
    left = min(int(place), len(curve) - 1)
    right = min(left + 1, len(curve) - 1)
    return curve[left] + (min(place, len(curve) - 1) - left) * (curve[right] - curve[left])


def searched(args: Namespace, begun: Path) -> tuple[dict[str, float], list[Row]]:
    """Return each side's best rate by the mean of its curve on the search seed, and the rows of the search."""
    found: dict[str, dict[float, list[float]]] = {ALONE: {}, TRL: {}}
    for lr, side in itertools.product(args.rates, found):
        found[side][lr] = ran(args, side, begun, args.rounds, lr, args.search).curve
    best = {side: max(curves, key=lambda lr, of=curves: (fmean(of[lr]), -lr)) for side, curves in found.items()}
    rows = []
    for side, curves in found.items():
        means = {f"rate {lr:g}": fmean(curve) for lr, curve in curves.items()}
        what = f"search, {side}: mean accuracy at the best rate"
        rows.append(Row(what, [fmean(curves[best[side]])], "all: 1", columns=means))
    return best | {FOUR: best[ALONE]}, rows


def per_update(runs: Sequence[Ran], short: Sequence[Ran], rounds: int) -> list[float]:
    """Return the processor seconds of one update by seed, from runs of ``rounds`` and of one."""
    return [(run.seconds - first.seconds) / (rounds - 1) for run, first in zip(runs, short, strict=True)]


def learning_rows(args: Namespace, runs: Mapping[str, Sequence[Ran]], cost: Mapping[str, Floats]) -> list[Row]:
    """Accuracy after equal completions, and after the processor time of the cheapest side for them."""
    least = args.rounds * min(map(fmean, cost.values()))
    ends, ways, equal = {}, {}, {}
    for side, found in runs.items():
        ends[side], ways[side] = [run.curve[-1] for run in found], [fmean(run.curve) for run in found]
        equal[side] = [at(run.curve, least / c / args.every) for run, c in zip(found, cost[side], strict=True)]
    rows = [Row("accuracy at the start", [run.curve[0] for run in runs[TRL]], "all: 1")]
    for what, claim, values in (
        (f"accuracy after {args.rounds * args.prompts * args.group:,} completions", LEARNS, ends),
        ("mean accuracy on the way there", LEARNS, ways),
        (f"accuracy after {least:.1f} CPU s of training", None, equal),
    ):
        rows += [Row(f"{what}: {side}", values[side], "all: 1") for side in SIDES]
        for side in (ALONE, FOUR):
            rows.append(Row(f"{what}: {side} less TRL", gaps(values[side], values[TRL]), "as TRL: 0", claim))
    return rows


def cost_rows(args: Namespace, short: Mapping[str, Sequence[Ran]], cost: Mapping[str, Floats]) -> list[Row]:
    """The processor time of training and of starting. ``short``: runs with one update."""
    thousand = 1000 / (args.prompts * args.group)
    what = "CPU s of 1,000 completions, generated and learned from"
    rows = [Row(f"{what}: {side}", [thousand * c for c in cost[side]], "unknown") for side in SIDES]
    for side, claim in ((ALONE, COSTS), (FOUR, None)):
        rows.append(Row(f"CPU time of training: {side} over TRL", ratios(cost[side], cost[TRL]), "as TRL: 1", claim))
    what = "CPU s of a run with one update"
    return rows + [Row(f"{what}: {side}", [run.seconds for run in short[side]], "unknown") for side in SIDES]


def check_rewards(args: Namespace) -> None:
    """:raises UserError: for flags that cannot be measured."""
    if not args.python.is_file():
        raise UserError(f"--python {args.python}: no such file; make TRL's environment: {INSTALL}")
    if args.rounds < 2 or args.every < 1 or args.rounds % args.every:
        raise UserError(f"--rounds {args.rounds} must be 2 or more, and a multiple of --every {args.every}")
    if args.search in args.seeds:
        raise UserError(
            f"--search {args.search}: is among --seeds; give another, or rates are tuned to what they are judged on"
        )


@benchmark(
    NAME,
    python=Flag(ROOT.parent / "venv-trl/bin/python", "that can import TRL"),
    rates=Flag([1e-4, 3e-4, 1e-3], "learning rates to try"),
    search=Flag(100, "seed that they are tried on"),
    seeds=Flag([1, 2, 3], "of problems and draws"),
    rounds=Flag(30, "updates of a run"),
    every=Flag(5, "updates between examinations"),
    prompts=Flag(16, "problems of an update"),
    group=Flag(12, "completions of a problem; divides by four"),
    warmup=Flag(800, "steps of the start model's pre-training"),
)
def main(args: Namespace) -> Measurement:
    check_rewards(args)
    torch.set_num_threads(1)
    begun = started(args)
    best, rows = searched(args, begun)
    short: dict[str, list[Ran]] = {side: [] for side in SIDES}
    runs: dict[str, list[Ran]] = {side: [] for side in SIDES}
    for seed, side in itertools.product(args.seeds, SIDES):  # in turns: the machine may be busier at one time
        short[side].append(ran(args, side, begun, 1, best[side], seed))
        runs[side].append(ran(args, side, begun, args.rounds, best[side], seed))
    cost = {side: per_update(runs[side], short[side], args.rounds) for side in SIDES}
    notes = [
        "rates: " + ", ".join(f"{side} {lr:g}" for side, lr in best.items()),
        "accuracy: share of all 810 held-out sums solved, one draw each, which is their mean reward",
    ]
    return Result([*learning_rows(args, runs, cost), *cost_rows(args, short, cost), *rows], notes)


if __name__ == "__main__":
    start(main)
