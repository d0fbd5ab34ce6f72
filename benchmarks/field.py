"""Beside the field: planaria, torchft and torchrun train the same model while their processes are killed.

All start from planaria's weights (a LLaMA of some million parameters that learns the bytes of Python's own library) and
read planaria's samples in planaria's order, handed over as files; batch, AdamW and clipping are the same, and nothing
is measured unless the first losses agree within 1e-4. Each system has four processes that train, one thread each. A
SIGKILL strikes one of them in every interval, at a time and place that the seed draws, the same for all systems;
coordinators (planaria's controller, torch's agents, torchft's lighthouse) are spared. The arms:

    pipeline   planaria: ends and three block stages, each with a twin at its neighbour, and a spare
    replicas   planaria: two replicas of two processes that average gradients in every step, and a spare
    torchft    four replicas of the whole model; lighthouse, limits and samples as its own pages have them
    tuned      the same with shorter limits, and samples given out so that none is passed over
    torchrun   DistributedDataParallel, all started again from the newest checkpoint; Daly's best interval

The time to the next step is from a kill to the first new update that began after it. The claims: planaria's is at most
a fifth of torchft's, tuned or not, and planaria loses no sample. What else differs is shown: throughput, memory, idle
processes. The trainers are field_peer.py (torchrun) and field_torchft.py. torchft lives in an environment of its own,
and is never imported here; it is a nightly build, as its DistributedDataParallel of 0.2.0 takes all replicas down
with one. To make it, in the repository's root:

    python3 -m venv ../venv-torchft && ../venv-torchft/bin/pip install torch==2.13.0 torchft-nightly safetensors
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from benchmarks.common import ROOT, RUNS, Claim, Row, conclude, parser, start
from benchmarks.field_runs import NAME, Ran, folder_of, ran
from benchmarks.field_systems import (
    Planaria,
    System,
    Torchft,
    Torchrun,
    Update,
    apart,
    loss_at,
    lost,
    next_steps,
    rate,
    standing,
    strikes,
    to_target,
    versions,
    whole_lines,
)
from planaria.common.errors import RunStopped, UserError
from planaria.common.signals import interrupted
from planaria.config.options import Options
from planaria.config.schema import (
    CheckpointConfig,
    DataConfig,
    ExchangeConfig,
    FleetConfig,
    ModelConfig,
    ObserveConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)

if TYPE_CHECKING:
    from benchmarks.field_peer import Job


PIPELINE, REPLICAS = "planaria, a pipeline", "planaria, replicas"
TORCHFT, TUNED, TORCHRUN = "torchft", "torchft, tuned", "torchrun"
ARMS = {"pipeline": PIPELINE, "replicas": REPLICAS, "torchft": TORCHFT, "tuned": TUNED, "torchrun": TORCHRUN}
"""flag → name"""
OURS, THEIRS = (PIPELINE, REPLICAS), (TORCHFT, TUNED)
PLACES = 4
"""processes that train, in each of them; planaria has a spare beside"""
MICROBATCHES = 4
"""of planaria's step, all replicas together"""
ENDLESS = 1_000_000
MOST_RATE = 25
"""updates a second for which samples are laid out"""
DOCUMENTED = ("--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000")
"""as torchft's own page starts its lighthouse; who is silent for 5 s is dead"""
SHORT = ("--min_replicas", "1", "--quorum_tick_ms", "10")
PROBE_S = 10.0


def recipe(given: argparse.Namespace, seed: int, arm: str) -> RunConfig:
    """Ends and three block stages with twins, or two replicas of ends and one block stage; the same model."""
    replicas = 2 if arm == REPLICAS else 1
    twins = RecoveryConfig(strategy="redundant, checkpoint", options=Options({"forward": False}))
    return RunConfig(
        name=NAME,
        seed=seed,
        model=ModelConfig(
            vocab=260,
            dim=given.dim,
            layers=given.layers,
            hidden=given.dim * 11 // 4,
            context=given.context,
            tied=False,
        ),
        pipeline=PipelineConfig(
            stages=PLACES // replicas - 1,
            microbatches=MICROBATCHES // replicas,
            microbatch_size=given.batch // MICROBATCHES,
        ),
        data=DataConfig(source=given.source, tokenizer="bytes"),
        optim=OptimConfig(lr=given.lr, clip_by="layer"),
        train=TrainConfig(steps=ENDLESS, eval_every=0),
        recovery=RecoveryConfig(strategy="checkpoint") if arm == REPLICAS else twins,
        exchange=ExchangeConfig(replicas=replicas),
        fleet=FleetConfig(spares=1),
        checkpoint=CheckpointConfig(every=given.save_every),
        observe=ObserveConfig(trackers=""),
    )


def job(given: argparse.Namespace, seed: int) -> Job:
    """What the peers are told: planaria's start and samples as files, and the recipe's numbers."""
    from benchmarks.field_peer import Job, Sizes

    config = recipe(given, seed, PIPELINE)
    model, optim = config.model, config.optim
    weights, samples = laid_out(given, config)
    return Job(
        folder="",
        weights=str(weights),
        samples=str(samples),
        sizes=Sizes(
            model.vocab,
            model.dim,
            model.layers,
            model.heads,
            model.hidden,
            model.context,
            model.rope_theta,
            model.norm_eps,
        ),
        batch=given.batch,
        groups=groups(model.layers, weights),
        clip=optim.clip,
        lr=optim.lr,
        betas=(optim.beta1, optim.beta2),
        eps=optim.eps,
        ranks=PLACES,
        save_every=given.interval,
    )


def laid_out(given: argparse.Namespace, config: RunConfig) -> tuple[Path, Path]:
    """Files of the weights that planaria starts from, and of its samples in their order."""
    import torch
    from safetensors.torch import save_file

    from planaria.data.shards import prepare
    from planaria.data.stream import Stream
    from planaria.models.stages import Llama

    (folder := RUNS / NAME).mkdir(parents=True, exist_ok=True)
    weights, samples = folder / f"weights-{config.seed}.safetensors", folder / f"samples-{config.seed}.safetensors"
    save_file(Llama(config.model, 1, config.seed).global_state(), weights)
    stream = Stream(prepare(config.data, config.model.vocab), "train", config.model.context, config.seed)
    count = round((given.kills + 1) * given.every * MOST_RATE) * given.batch
    windows = torch.stack([stream.sample(n).to(torch.int16) for n in range(count)])
    save_file({"samples": windows}, samples)
    return weights, samples


def groups(layers: int, weights: Path) -> list[list[str]]:
    """Names of parameters that are clipped together, as ``optim.clip_by = "layer"`` says."""
    from safetensors import safe_open

    with safe_open(weights, "pt") as file:
        names = list(file.keys())
    within = [[name for name in names if name.startswith(f"model.layers.{n}.")] for n in range(layers)]
    return within + [[name] for name in names if not name.startswith("model.layers.")]


def systems(given: argparse.Namespace, seed: int) -> dict[str, System]:
    """The arms that are asked for, by name."""
    told = job(given, seed)
    tuned = (*SHORT, "--join_timeout_ms", str(given.join_ms), "--heartbeat_timeout_ms", str(given.heartbeat_ms))
    short = replace(told, tuned=True, limits=(given.gloo_s, told.limits[1]))
    made: dict[str, System] = {
        PIPELINE: Planaria(PIPELINE, PLACES, recipe(given, seed, PIPELINE)),
        REPLICAS: Planaria(REPLICAS, PLACES, recipe(given, seed, REPLICAS)),
        TORCHFT: Torchft(TORCHFT, PLACES, told, given.python, DOCUMENTED),
        TUNED: Torchft(TUNED, PLACES, short, given.python, tuned),
        TORCHRUN: Torchrun(TORCHRUN, PLACES, told, given.torchrun),
    }
    return {name: made[name] for flag, name in ARMS.items() if flag in given.arms}


def best_interval(given: argparse.Namespace, seed: int) -> tuple[int, float]:
    """Updates between torchrun's checkpoints that lose least (Daly), and the seconds that one takes: by a short run."""
    from planaria.recovery.checkpoint import best_interval as daly

    probe = Torchrun(TORCHRUN, PLACES, replace(job(given, seed), save_every=5), given.torchrun)
    found = ran(probe, "probe", (), PROBE_S)
    lines = (json.loads(line) for line in whole_lines(folder_of(probe, "probe") / "0.jsonl"))
    save_s = median(line["saved"] for line in lines if "saved" in line)
    step_s = PROBE_S / sum(found.begin < update.t <= found.end for update in found.updates)
    return max(1, round(daly(save_s, given.every) / step_s)), save_s


SOONER, NONE, EXACT = Claim(high=0.2), Claim(0, 0), Claim(high=1e-6)
AT = 0.8
"""the target is the loss at this share of the updates that the slowest arm made"""


@dataclass(frozen=True)
class Pair:
    """An arm with one seed."""

    free: Ran
    struck: Ran

    @property
    def nexts(self) -> list[float]:
        return next_steps(self.struck.updates, self.struck.kills)


ByArm = Mapping[str, Sequence[Pair]]
"""arm → seed by seed"""


def paces(runs: Iterable[Ran], batch: int) -> list[float]:
    """Useful updates a second."""
    return [rate(one.updates, one.begin, one.end, batch) for one in runs]


def rows_of(given: argparse.Namespace, found: ByArm) -> list[Row]:
    free = {arm: paces((pair.free for pair in pairs), given.batch) for arm, pairs in found.items()}
    return [
        *next_rows(found, free),
        *goodput_rows(given.batch, found, free),
        *sample_rows(given.batch, found),
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
            ratios = [median(a.nexts) / median(b.nexts) for a, b in pairs_]
            claim = SOONER if theirs in THEIRS else None
            rows.append(Row(f"  {ours} over {theirs}, medians", ratios, "equal: 1", claim))
    return rows


def goodput_rows(batch: int, found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    rows = []
    struck = {arm: paces((pair.struck for pair in pairs), batch) for arm, pairs in found.items()}
    against = PIPELINE if PIPELINE in found else next(iter(found))
    for arm in found:
        own = [a / b for a, b in zip(struck[arm], free[arm], strict=True)]
        rows.append(Row(f"useful steps a second over the same without kills: {arm}", own, "no time lost: 1"))
    for arm in found:
        ratios = [a / b for a, b in zip(struck[arm], free[against], strict=True)]
        rows.append(Row(f"  over {against} without kills: {arm}", ratios, "unknown"))
    return rows


def sample_rows(batch: int, found: ByArm) -> list[Row]:
    rows = []
    for arm, pairs in found.items():
        runs = [(*standing(pair.struck.updates), len(pair.struck.kills)) for pair in pairs]
        gone = [float(lost(stand)) for stand, _, _ in runs]
        beside = {
            "kills": sum(kills for _, _, kills in runs),
            "samples": sum(stand[-1].upto for stand, _, _ in runs),
            "computed again": sum(update.used for _, undone, _ in runs for update in undone),
            "smaller steps": sum(update.used < batch for stand, _, _ in runs for update in stand),
        }
        rows.append(Row(f"samples lost: {arm}", gone, "0", NONE if arm in OURS else None, beside, "worst"))
        if arm in OURS:
            problems = [len(pair.struck.problems) + len(pair.free.problems) for pair in pairs]
            rows.append(Row(f"  what its ledger has to say: {arm}", problems, "0", NONE, judged="worst"))
    return rows


def target_rows(found: ByArm) -> list[Row]:
    """Updates carried out, and seconds, until the loss that the first arm has at an update that all came to."""
    reached: dict[str, list[tuple[int, float]]] = {arm: [] for arm in found}
    for runs in zip(*found.values(), strict=True):
        least = min(pair.struck.updates[-1].step for pair in runs)
        target = loss_at(runs[0].struck.updates, round(AT * least))
        for arm, pair in zip(found, runs, strict=True):
            at = None if target is None else to_target(pair.struck.updates, pair.struck.begin, target)
            reached[arm] += [at] if at is not None else []
    return [
        Row(f"{what} to the same loss: {arm}", [at[place] for at in ends], f"{len(ends)} runs came to it")
        for place, what in enumerate(("steps", "seconds"))
        for arm, ends in reached.items()
    ]


def same_rows(found: ByArm) -> list[Row]:
    """How far the losses of a run that is struck are from those of the same run that is not."""
    rows = []
    for arm, pairs in found.items():
        gaps = [apart(pair.free.updates, pair.struck.updates) for pair in pairs]
        claim = EXACT if arm in OURS else None
        what = f"nats from the same run without kills: {arm}"
        rows.append(Row(what, gaps, "0: nothing lost", claim, {}, "worst"))
    return rows


def price_rows(found: ByArm, free: Mapping[str, Sequence[float]]) -> list[Row]:
    """What each system costs when nothing fails."""
    kinds = [
        ("steps a second without kills", free),
        ("GB of memory, all processes", {a: [median(p.free.memory) / 1e9 for p in ps] for a, ps in found.items()}),
        (
            "processor seconds of a step",
            {
                arm: [p.free.cpu / (p.free.end - p.free.begin) / pace for p, pace in zip(pairs, free[arm], strict=True)]
                for arm, pairs in found.items()
            },
        ),
        ("s from the command to the first step", {a: [p.free.started for p in ps] for a, ps in found.items()}),
    ]
    return [Row(f"{what}: {arm}", values, "unknown") for what, each in kinds for arm, values in each.items()]


INSTALL = "python3 -m venv ../venv-torchft && ../venv-torchft/bin/pip install torch==2.13.0 torchft-nightly safetensors"
FIRST, APART = 3, 1e-4
"""the updates whose losses say whether all do the same work, and by how many nats sums in another order may differ"""


def first_losses(updates: Sequence[Update], batch: int) -> list[float]:
    """Losses of the first updates, as far as all processes took part in them and told of them."""
    stand, _ = standing(updates)
    most = max(update.by for update in updates)
    early = itertools.takewhile(lambda update: (update.used, update.by) == (batch, most), stand[:FIRST])
    return [update.loss for update in early]


def require_alike(found: Mapping[str, Ran], batch: int) -> None:
    """:raises RunStopped: when an arm's first losses are not those of another: they do not do the same work."""
    first = {arm: first_losses(one.updates, batch) for arm, one in found.items()}
    of, against = next(iter(first.items()))
    for arm, losses in first.items():
        if not losses:
            raise RunStopped(f"{arm}: not all processes took part in the first update; nothing is measured")
        apart = max(abs(a - b) for a, b in zip(losses, against, strict=False))
        if not apart <= APART:
            raise RunStopped(f"{arm}: its first losses are up to {apart:.2g} nats from {of}'s; nothing is measured")


def measured(given: argparse.Namespace, seed: int) -> dict[str, Pair]:
    """Every arm with one seed, without kills and with them."""
    free: dict[str, Ran] = {}
    struck: dict[str, Ran] = {}
    arms = systems(given, seed)
    for name, system in arms.items():
        free[name] = ran(system, f"free-{seed}", (), given.free)
        print(f"seed {seed}, {name}: {told(free[name])}", flush=True)
    require_alike(free, given.batch)
    planned = strikes(seed, given.kills, given.every)
    for name, system in arms.items():
        struck[name] = ran(system, f"struck-{seed}", planned, (given.kills + 1) * given.every)
        print(f"seed {seed}, {name}: {told(struck[name])}", flush=True)
    return {name: Pair(free[name], struck[name]) for name in free}


def told(one: Ran) -> str:
    stand, undone = standing(update for update in one.updates if update.t <= one.end)
    return f"{len(stand)} updates in {one.end - one.begin:.0f} s, {len(undone)} undone, {len(one.kills)} kills"


def missing(given: argparse.Namespace) -> list[str]:
    """Arms that cannot be run here."""
    asked = [name for flag, name in ARMS.items() if flag in given.arms and name in THEIRS]
    return asked if asked and versions(given.python) is None else []


def refuse_senseless(given: argparse.Namespace) -> None:
    """:raises UserError: when nothing could be measured like that."""
    if lacking := missing(given):
        rest = " ".join(flag for flag, name in ARMS.items() if flag in given.arms and name not in lacking)
        raise UserError(
            f"--python {given.python}: has no torchft; make its environment ({INSTALL}), or leave it out: --arms {rest}"
        )
    if given.batch % PLACES:
        raise UserError(f"--batch {given.batch}: is shared among {PLACES} processes; give a multiple of {PLACES}")
    if given.layers % (PLACES - 1):
        raise UserError(
            f"--layers {given.layers}: must be a multiple of {PLACES - 1}, the block stages of the pipeline"
        )


def left_out(given: argparse.Namespace) -> list[Row]:
    """A line for each arm that was not asked for."""
    how = dict.fromkeys(THEIRS, f"not measured; its environment: {INSTALL}")
    absent = [name for flag, name in ARMS.items() if flag not in given.arms]
    return [Row(name, [], how.get(name, "not measured: not among --arms")) for name in absent]


def command_line() -> argparse.ArgumentParser:
    """Every flag that the arms read."""
    flags = parser(NAME, __doc__)
    flags.add_argument("--python", type=Path, default=ROOT.parent / "venv-torchft/bin/python", help="that has torchft")
    flags.add_argument("--torchrun", type=Path, default=Path(sys.executable), help="that runs the arm torchrun")
    flags.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="of weights, samples and kills")
    flags.add_argument("--kills", type=int, default=10, help="of each run that is struck")
    flags.add_argument("--every", type=float, default=15.0, metavar="S", help="seconds from one kill to the next")
    flags.add_argument("--free", type=float, default=30.0, metavar="S", help="seconds of a run without kills")
    flags.add_argument("--heartbeat-ms", type=int, default=500, help="tuned: who is silent for so long is dead")
    flags.add_argument("--join-ms", type=int, default=1000, help="tuned: how long a quorum waits for who was there")
    flags.add_argument("--gloo-s", type=float, default=0.3, metavar="S", help="tuned: in which an average must be done")
    flags.add_argument("--save-every", type=int, default=100, help="planaria: steps between checkpoints")
    flags.add_argument("--source", default="stdlib", help="what is learned, as data.source of a recipe")
    flags.add_argument("--dim", type=int, default=256, help="width of the model")
    flags.add_argument("--layers", type=int, default=3)
    flags.add_argument("--context", type=int, default=64, help="tokens of a sample")
    flags.add_argument("--batch", type=int, default=16, help="samples of an update, in all processes together")
    flags.add_argument("--lr", type=float, default=1e-3)
    return flags


def main() -> int:
    given = command_line().parse_args()
    refuse_senseless(given)
    import torch

    torch.set_num_threads(1)
    notes = [f"{name} {version}" for name, version in (versions(given.python) or {}).items()]
    given.interval = 1
    if "torchrun" in given.arms:
        given.interval, save_s = best_interval(given, given.seeds[0])
        notes.append(f"{TORCHRUN} saves every {given.interval} updates; a save takes {save_s * 1e3:.0f} ms")
    with interrupted():  # or what was started would outlive this process
        pairs = [measured(given, seed) for seed in given.seeds]
    by_arm = {name: [found[name] for found in pairs] for name in pairs[0]}
    return conclude(NAME, given, [*rows_of(given, by_arm), *left_out(given)], [", ".join(notes)])


if __name__ == "__main__":
    start(main)
