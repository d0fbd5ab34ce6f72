"""Compare planaria, torchft and torchrun, which train the same model while their processes are killed.

All start from planaria's weights (a LLaMA of some million parameters on the bytes of Python's library) and read its
samples in order, from files; batch, AdamW and clipping are equal, and the first losses must agree within 1e-4. Each
system has four single-threaded training processes. In every interval a SIGKILL hits one of them at a seeded time and
place, equal for all systems; coordinators (planaria's controller, torch's agents, torchft's lighthouse) are spared.

    pipeline   planaria: ends and three block stages, each with a twin at its neighbour, and a spare
    replicas   planaria: two replicas of two processes that average gradients in every step, and a spare
    group      planaria as a library: four loops of one's own, whose optimizers a group wraps (planaria.join)
    torchft    four replicas of the complete model; lighthouse, limits and samples as in its documentation
    tuned      the same with shorter limits, and samples assigned so that none is skipped
    torchrun   DistributedDataParallel, all restarted from the newest checkpoint; Daly's best interval

The time to the next step is from a kill to the first new update that began after it. Claims: planaria's is at most 1/5
of torchft's, tuned or not, and planaria loses no sample. Throughput, memory and idle processes are shown. Trainers:
field_peer.py (torchrun, torchft and group). torchft has its own environment and is never imported here;
it is a nightly build, because DistributedDataParallel of 0.2.0 takes all replicas down with one. To create it:

    python3 -m venv ../venv-torchft && ../venv-torchft/bin/pip install torch==2.13.0 torchft-nightly safetensors
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.field_systems import (
    NAME,
    GroupMembers,
    Planaria,
    Ran,
    System,
    Torchft,
    Torchrun,
    Update,
    apart,
    folder_of,
    loss_at,
    lost,
    next_steps,
    ran,
    rate,
    standing,
    strikes,
    to_target,
    versions,
    whole_lines,
)
from benchmarks.harness import ROOT, RUNS, Claim, Flag, Measurement, Result, Row, benchmark, parser, ratios, start
from planaria.common.errors import RunStopped, UserError
from planaria.common.signals import interrupt_on_stop
from planaria.config.schema import RunConfig

if TYPE_CHECKING:
    from benchmarks.field_peer import Job


PIPELINE, REPLICAS, GROUP = "planaria, a pipeline", "planaria, replicas", "planaria, a group"
TORCHFT, TUNED, TORCHRUN = "torchft", "torchft, tuned", "torchrun"
ARMS = {
    "pipeline": PIPELINE,
    "replicas": REPLICAS,
    "group": GROUP,
    "torchft": TORCHFT,
    "tuned": TUNED,
    "torchrun": TORCHRUN,
}
"""flag → name"""
OURS, THEIRS = (PIPELINE, REPLICAS, GROUP), (TORCHFT, TUNED)
PLACES = 4  # training processes of each system; planaria also has a spare
MICROBATCHES = 4  # per step of planaria, over all replicas
ENDLESS = 1_000_000
MAX_RATE = 25  # updates per second for which samples are prepared
DOCUMENTED = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
"""flags of torchft's documentation; silence of 5 s means dead"""
SHORT = ("--min_replicas", "1", "--quorum_tick_ms", "10")
PROBE_S = 10.0


def recipe(args: Namespace, seed: int, arm: str) -> RunConfig:
    """Ends and three block stages with twins, or two replicas of ends and one block stage; the same model."""
    replicas = 2 if arm == REPLICAS else 1
    shape = {"vocab": 260, "dim": args.dim, "layers": args.layers, "hidden": args.dim * 11 // 4}
    microbatches = {"microbatches": MICROBATCHES // replicas, "microbatch_size": args.batch // MICROBATCHES}
    twins = {"strategy": "redundant, checkpoint", "options": {"forward": False}}
    return RunConfig.model_validate(
        {
            "name": NAME,
            "seed": seed,
            "model": {**shape, "context": args.context, "tied": False},
            "pipeline": {"stages": PLACES // replicas - 1, **microbatches},
            "data": {"source": args.source, "tokenizer": "bytes"},
            "optim": {"lr": args.lr, "clip_by": "layer"},
            "train": {"steps": ENDLESS, "eval_every": 0},
            "recovery": {"strategy": "checkpoint"} if arm == REPLICAS else twins,
            "exchange": {"replicas": replicas},
            "fleet": {"spares": 1},
            "checkpoint": {"every": args.save_every},
            "observe": {"trackers": ""},
        }
    )


def job(args: Namespace, seed: int) -> Job:
    """Return the peers' job: planaria's start weights and samples as files, and the recipe's numbers."""
    from benchmarks.field_peer import Job, Sizes

    config = recipe(args, seed, PIPELINE)
    model, optim = config.model, config.optim
    weights, samples = laid_out(args, config)
    return Job(
        folder="",
        weights=str(weights),
        samples=str(samples),
        sizes=Sizes(**{field.name: getattr(model, field.name) for field in fields(Sizes)}),
        batch=args.batch,
        groups=groups(model.layers, weights),
        clip=optim.clip,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        ranks=PLACES,
        save_every=args.interval,
    )


def laid_out(args: Namespace, config: RunConfig) -> tuple[Path, Path]:
    """Write planaria's start weights and its samples in order."""
    import torch
    from safetensors.torch import save_file

    from planaria.data.shards import tokenise_corpus
    from planaria.data.stream import Stream
    from planaria.models.llama_stages import Llama

    (folder := RUNS / NAME).mkdir(parents=True, exist_ok=True)
    weights, samples = folder / f"weights-{config.seed}.safetensors", folder / f"samples-{config.seed}.safetensors"
    save_file(Llama(config.model, 1, config.seed).global_state(), weights)
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "train", config.model.context, config.seed)
    count = round((args.kills + 1) * args.every * MAX_RATE) * args.batch
    windows = torch.stack([stream.sample(n).to(torch.int16) for n in range(count)])
    save_file({"samples": windows}, samples)
    return weights, samples


def groups(layers: int, weights: Path) -> list[list[str]]:
    """Return the parameters clipped together under ``optim.clip_by = "layer"``."""
    from safetensors import safe_open

    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    within = [[name for name in names if name.startswith(f"model.layers.{n}.")] for n in range(layers)]
    return within + [[name] for name in names if not name.startswith("model.layers.")]


def systems(args: Namespace, seed: int) -> dict[str, System]:
    """Return the chosen arms by name."""
    job_spec = job(args, seed)
    tuned = (*SHORT, "--join_timeout_ms", str(args.join_ms), "--heartbeat_timeout_ms", str(args.heartbeat_ms))
    short = replace(job_spec, tuned=True, limits=(args.gloo_s, job_spec.limits[1]))
    made: dict[str, System] = {
        PIPELINE: Planaria(PIPELINE, PLACES, recipe(args, seed, PIPELINE)),
        REPLICAS: Planaria(REPLICAS, PLACES, recipe(args, seed, REPLICAS)),
        GROUP: GroupMembers(GROUP, PLACES, job_spec, Path(sys.executable)),
        TORCHFT: Torchft(TORCHFT, PLACES, job_spec, args.python, DOCUMENTED),
        TUNED: Torchft(TUNED, PLACES, short, args.python, tuned),
        TORCHRUN: Torchrun(TORCHRUN, PLACES, job_spec, args.torchrun),
    }
    return {name: made[name] for flag, name in ARMS.items() if flag in args.arms}


def best_interval(args: Namespace, seed: int) -> tuple[int, float]:
    """Return torchrun's best checkpoint interval (Daly) in updates, and the seconds of a save, from a short run."""
    from planaria.recovery.checkpoint import best_interval as daly

    probe = Torchrun(TORCHRUN, PLACES, replace(job(args, seed), save_every=5), args.torchrun)
    found = ran(probe, "probe", (), PROBE_S)
    lines = (json.loads(line) for line in whole_lines(folder_of(probe, "probe") / "0.jsonl"))
    save_s = median(line["saved"] for line in lines if "saved" in line)
    step_s = PROBE_S / sum(found.begin < update.t <= found.end for update in found.updates)
    return max(1, round(daly(save_s, args.every) / step_s)), save_s


SOONER, NONE, EXACT = Claim(high=0.2), Claim(0, 0), Claim(high=1e-6)
AT = 0.8  # the target is the loss at this share of the slowest arm's updates


@dataclass(frozen=True)
class Pair:
    """An arm with one seed."""

    free: Ran
    faulty: Ran

    @property
    def nexts(self) -> list[float]:
        return next_steps(self.faulty.updates, self.faulty.kills)


ByArm = Mapping[str, Sequence[Pair]]  # arm → seed by seed


def paces(runs: Iterable[Ran], batch: int) -> list[float]:
    return [rate(one.updates, one.begin, one.end, batch) for one in runs]


def rows_of(args: Namespace, found: ByArm) -> list[Row]:
    free = {arm: paces((pair.free for pair in pairs), args.batch) for arm, pairs in found.items()}
    return [
        *next_rows(found, free),
        *goodput_rows(args.batch, found, free),
        *sample_rows(args.batch, found),
        *same_rows(found),
        *target_rows(found),
        *price_rows(found, free),
    ]


def next_rows(found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    rows = []
    for arm, pairs in found.items():
        nexts = [seconds for pair in pairs for seconds in pair.nexts]
        step = 1 / median(free[arm])
        rows.append(Row(f"s from a kill to the next step: {arm}", nexts, f"≥ a step: {step:.2f}"))
    for ours in [arm for arm in OURS if arm in found]:
        for theirs in [arm for arm in found if arm not in OURS]:
            pairs_ = zip(found[ours], found[theirs], strict=True)
            over = [median(a.nexts) / median(b.nexts) for a, b in pairs_]
            claim = SOONER if theirs in THEIRS else None
            rows.append(Row(f"  {ours} over {theirs}, medians", over, "equal: 1", claim))
    return rows


def goodput_rows(batch: int, found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    rows = []
    faulty = {arm: paces((pair.faulty for pair in pairs), batch) for arm, pairs in found.items()}
    against = PIPELINE if PIPELINE in found else next(iter(found))
    for arm in found:
        own = ratios(faulty[arm], free[arm])
        rows.append(Row(f"useful steps a second over the same without kills: {arm}", own, "no time lost: 1"))
    for arm in found:
        rows.append(Row(f"  over {against} without kills: {arm}", ratios(faulty[arm], free[against]), "unknown"))
    return rows


def sample_rows(batch: int, found: ByArm) -> list[Row]:
    rows = []
    for arm, pairs in found.items():
        runs = [(*standing(pair.faulty.updates), len(pair.faulty.kills)) for pair in pairs]
        gone = [float(lost(stand)) for stand, _, _ in runs]
        columns = {
            "kills": sum(kills for _, _, kills in runs),
            "samples": sum(stand[-1].upto for stand, _, _ in runs),
            "computed again": sum(update.used for _, undone, _ in runs for update in undone),
            "smaller steps": sum(update.used < batch for stand, _, _ in runs for update in stand),
        }
        rows.append(Row(f"samples lost: {arm}", gone, "0", NONE if arm in OURS else None, columns, "worst"))
        if arm in OURS:
            problems = [len(pair.faulty.problems) + len(pair.free.problems) for pair in pairs]
            rows.append(Row(f"  what its ledger has to say: {arm}", problems, "0", NONE, judged="worst"))
    return rows


def target_rows(found: ByArm) -> list[Row]:
    """Updates and seconds to the first arm's loss at an update that all reached."""
    reached: dict[str, list[tuple[int, float]]] = {arm: [] for arm in found}
    for runs in zip(*found.values(), strict=True):
        least = min(pair.faulty.updates[-1].step for pair in runs)
        target = loss_at(runs[0].faulty.updates, round(AT * least))
        for arm, pair in zip(found, runs, strict=True):
            at = None if target is None else to_target(pair.faulty.updates, pair.faulty.begin, target)
            reached[arm] += [at] if at is not None else []
    return [
        Row(f"{what} to the same loss: {arm}", [at[place] for at in ends], f"{len(ends)} runs came to it")
        for place, what in enumerate(("steps", "seconds"))
        for arm, ends in reached.items()
    ]


def same_rows(found: ByArm) -> list[Row]:
    rows = []
    for arm, pairs in found.items():
        gaps = [apart(pair.free.updates, pair.faulty.updates) for pair in pairs]
        claim = EXACT if arm in OURS else None
        what = f"nats from the same run without kills: {arm}"
        rows.append(Row(what, gaps, "0: nothing lost", claim, {}, "worst"))
    return rows


def price_rows(found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    """The cost of each system without failures."""
    memory = {arm: [median(p.free.memory) / 1e9 for p in pairs] for arm, pairs in found.items()}
    begun = {arm: [p.free.started for p in pairs] for arm, pairs in found.items()}
    cpu = {
        arm: [p.free.cpu / (p.free.end - p.free.begin) / pace for p, pace in zip(pairs, free[arm], strict=True)]
        for arm, pairs in found.items()
    }
    kinds = {
        "steps a second without kills": free,
        "GB of memory, all processes": memory,
        "processor seconds of a step": cpu,
        "s from the command to the first step": begun,
    }
    return [Row(f"{what}: {arm}", values, "unknown") for what, each in kinds.items() for arm, values in each.items()]


INSTALL = "python3 -m venv ../venv-torchft && ../venv-torchft/bin/pip install torch==2.13.0 torchft-nightly safetensors"
FIRST, APART = 3, 1e-4  # updates whose losses are compared, and the tolerance in nats for sums in another order


def first_losses(updates: Sequence[Update], batch: int) -> list[float]:
    """Return the losses of the first updates that all processes reported."""
    stand, _ = standing(updates)
    most = max(update.by for update in updates)
    early = itertools.takewhile(lambda update: (update.used, update.by) == (batch, most), stand[:FIRST])
    return [update.loss for update in early]


def require_alike(found: Mapping[str, Ran], batch: int) -> None:
    """:raises RunStopped: if the arms' first losses differ."""
    first = {arm: first_losses(one.updates, batch) for arm, one in found.items()}
    of, against = next(iter(first.items()))
    for arm, losses in first.items():
        if not losses:
            raise RunStopped(f"{arm}: not all processes took part in the first update; nothing is measured")
        apart = max(abs(a - b) for a, b in zip(losses, against, strict=False))
        if not apart <= APART:
            raise RunStopped(f"{arm}: its first losses are up to {apart:.2g} nats from {of}'s; nothing is measured")


def measured(args: Namespace, seed: int) -> dict[str, Pair]:
    """Measure every arm with one seed, without and with kills."""
    free: dict[str, Ran] = {}
    faulty: dict[str, Ran] = {}
    arms = systems(args, seed)
    for name, system in arms.items():
        free[name] = ran(system, f"free-{seed}", (), args.free)
        print(f"seed {seed}, {name}: {summary(free[name])}", flush=True)
    require_alike(free, args.batch)
    planned = strikes(seed, args.kills, args.every)
    for name, system in arms.items():
        faulty[name] = ran(system, f"faulty-{seed}", planned, (args.kills + 1) * args.every)
        print(f"seed {seed}, {name}: {summary(faulty[name])}", flush=True)
    return {name: Pair(free[name], faulty[name]) for name in free}


def summary(one: Ran) -> str:
    stand, undone = standing(update for update in one.updates if update.t <= one.end)
    return f"{len(stand)} updates in {one.end - one.begin:.0f} s, {len(undone)} undone, {len(one.kills)} kills"


def missing(args: Namespace) -> list[str]:
    asked = [name for flag, name in ARMS.items() if flag in args.arms and name in THEIRS]
    return asked if asked and versions(args.python) is None else []


def refuse_senseless(args: Namespace) -> None:
    """:raises UserError: for flags that cannot be measured."""
    if lacking := missing(args):
        rest = " ".join(flag for flag, name in ARMS.items() if flag in args.arms and name not in lacking)
        raise UserError(
            f"--python {args.python}: has no torchft; make its environment ({INSTALL}), or remove it: --arms {rest}"
        )
    if args.kills < 1:
        raise UserError(f"--kills {args.kills}: nothing to recover from; give at least 1")
    if args.batch % PLACES:
        raise UserError(f"--batch {args.batch}: is shared among {PLACES} processes; give a multiple of {PLACES}")
    if args.layers % (PLACES - 1):
        raise UserError(f"--layers {args.layers} must be a multiple of {PLACES - 1}, the block stages of the pipeline")


def left_out(args: Namespace) -> list[Row]:
    how = dict.fromkeys(THEIRS, f"not measured; its environment: {INSTALL}")
    absent = [name for flag, name in ARMS.items() if flag not in args.arms]
    return [Row(name, [], how.get(name, "not measured: not among --arms")) for name in absent]


FLAGS = {
    "python": Flag(ROOT.parent / "venv-torchft/bin/python", "that has torchft", type=Path),
    "torchrun": Flag(Path(sys.executable), "that runs the arm torchrun", type=Path),
    "arms": Flag(list(ARMS), choices=ARMS),
    "seeds": Flag([1, 2, 3], "of weights, samples and kills"),
    "kills": Flag(10, "of each run with faults"),
    "every": Flag(15.0, "seconds from one kill to the next", metavar="S"),
    "free": Flag(30.0, "seconds of a run without kills", metavar="S"),
    "heartbeat_ms": Flag(500, "tuned: silence after which a replica is dead"),
    "join_ms": Flag(1000, "tuned: how long a quorum waits for its former members"),
    "gloo_s": Flag(0.3, "tuned: time limit of an average", metavar="S"),
    "save_every": Flag(100, "planaria: steps between checkpoints"),
    "source": Flag("stdlib", "training text, as data.source of a recipe"),
    "dim": Flag(256, "width of the model"),
    "layers": Flag(3),
    "context": Flag(64, "tokens of a sample"),
    "batch": Flag(16, "samples of an update, in all processes together"),
    "lr": Flag(1e-3),
}


def command_line() -> argparse.ArgumentParser:
    return parser(NAME, __doc__, FLAGS)


@benchmark(NAME, **FLAGS)
def main(args: Namespace) -> Measurement:
    refuse_senseless(args)
    import torch

    torch.set_num_threads(1)
    notes = [f"{name} {version}" for name, version in (versions(args.python) or {}).items()]
    args.interval = 1
    if "torchrun" in args.arms:
        args.interval, save_s = best_interval(args, args.seeds[0])
        notes.append(f"{TORCHRUN} saves every {args.interval} updates; a save takes {save_s * 1e3:.0f} ms")
    with interrupt_on_stop():  # otherwise started processes would outlive this one
        pairs = [measured(args, seed) for seed in args.seeds]
    by_arm = {name: [found[name] for found in pairs] for name in pairs[0]}
    return Result([*rows_of(args, by_arm), *left_out(args)], [", ".join(notes)])


if __name__ == "__main__":
    start(main)
