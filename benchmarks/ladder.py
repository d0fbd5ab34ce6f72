"""Loss after losing stages, and of models with skipped stages, shared layers or bf16 on the wire."""

from __future__ import annotations

import argparse
import copy
import math
import multiprocessing
import os
import shutil
import statistics
import sysconfig
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product, repeat
from pathlib import Path
from typing import Any

import torch

from benchmarks.common import RUNS, Claim, Row, conclude, parser, start
from planaria.common.errors import RunStopped, UserError
from planaria.config.options import Options
from planaria.config.schema import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RoutingConfig,
    RunConfig,
    TrainConfig,
)
from planaria.data.shards import prepare
from planaria.data.stream import Stream
from planaria.lab.compare.race import Point
from planaria.lab.compare.race_results import smoothed, ticks_to
from planaria.lab.compare.race_spec import SMOOTHED
from planaria.lab.inline.engine import InlineEngine
from planaria.models.stages import Llama, global_name, parameter_count
from planaria.pipeline.routing.skipping import visits
from planaria.recovery.echo import Echo
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage
from planaria.runtime.engine.omission import omissions
from planaria.runtime.engine.samples import batches

LADDER_NAME = "ladder"
ORDER, LATER = Claim(high=0.95), Claim(high=0.05)
AVERAGES = ("checkfree", "checkfree as in its code", "uniform")
# Twins are as exact without their forward passes, and half as slow.
RULES = {
    "checkfree": RecoveryConfig(),
    "checkfree as in its code": RecoveryConfig(options=Options({"omega": "l2", "measured": "postclip"})),
    "uniform": RecoveryConfig(strategy="uniform"),
    "copy": RecoveryConfig(strategy="copy"),
    "random": RecoveryConfig(strategy="random"),
    "identity": RecoveryConfig(strategy="identity"),
    "echo, 8 bits": RecoveryConfig(strategy="echo", options=Options({"bits": 8})),
    "echo, 4 bits": RecoveryConfig(strategy="echo", options=Options({"bits": 4})),
    "echo, 2 bits": RecoveryConfig(strategy="echo", options=Options({"bits": 2})),
    "redundant": RecoveryConfig(strategy="redundant", options=Options({"forward": False})),
}
WARM = Echo().every
"""steps after which every copy is whole"""


@dataclass(frozen=True)
class Harm:
    """Validation losses above the run's that lost nothing, in nats, for each middle stage."""

    at_once: list[float]
    later: list[float]


def recipe(given: argparse.Namespace, seed: int, recovery: RecoveryConfig) -> RunConfig:
    """One layer a stage; the corpus and its tokenizer come from the user's cache if they are there."""
    return RunConfig(
        name=LADDER_NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(
            vocab=given.vocab, dim=given.dim, layers=given.stages, hidden=given.dim * 11 // 4, context=64
        ),
        pipeline=PipelineConfig(stages=given.stages, microbatches=2, microbatch_size=given.samples // 2),
        optim=OptimConfig(lr=2e-3, warmup=20),
        train=TrainConfig(eval_microbatches=16),
        recovery=recovery,
    )


def engine_for(config: RunConfig) -> InlineEngine:
    """An engine on one thread, with the corpus' two streams."""
    torch.set_num_threads(1)
    dataset = prepare(config.data, config.model.vocab)
    context = config.model.context
    return InlineEngine(
        config, Stream(dataset, "train", context, config.seed), Stream(dataset, "validation", context, config.seed)
    )


def trained(seed: int) -> Path:
    """Where the state lies that all rules start from."""
    return RUNS / LADDER_NAME / f"seed-{seed}"


def train(given: argparse.Namespace, seed: int) -> None:
    """Train up to the steps that strategies with copies take themselves."""
    engine = engine_for(recipe(given, seed, RecoveryConfig()))
    for _ in range(given.steps - WARM):
        engine.train_step()
    for stage, runner in engine.runners.items():
        write_stage(trained(seed), stage, engine.step, runner.state())


def losses_of(given: argparse.Namespace, seed: int, rule: str | None) -> list[tuple[float, float]]:
    """Validation losses (at once, later) for each middle stage that is lost; with no rule, once, losing nothing."""
    engine = engine_for(recipe(given, seed, RULES[rule] if rule else RecoveryConfig()))
    state = {stage: read_stage(trained(seed), stage, given.steps - WARM) for stage in engine.runners}
    found = []
    for stage in range(2, given.stages) if rule else [None]:
        engine.step = given.steps - WARM
        engine.become(state)
        for _ in range(WARM):
            engine.train_step()
        if stage is not None and (plan := engine.lose([stage])).reason:
            raise RunStopped(f"{rule}: {plan.reason}")
        at_once = engine.evaluate()
        for _ in range(given.after):
            engine.train_step()
        found.append((at_once, engine.evaluate()))
    return found


def measure(given: argparse.Namespace) -> tuple[dict[int, tuple[float, float]], dict[str, dict[int, Harm]]]:
    """The losses of the run that lost nothing, by seed, and each rule's harm, by seed."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        list(pool.map(train, repeat(given), given.seeds))
        print(f"trained {len(given.seeds)} seeds for {given.steps - WARM} steps", flush=True)
        arms = list(product([None, *RULES], given.seeds))
        rules, seeds = [rule for rule, _ in arms], [seed for _, seed in arms]
        losses: dict[tuple[str | None, int], list[tuple[float, float]]] = {}
        for (rule, seed), found in zip(arms, pool.map(losses_of, repeat(given), seeds, rules), strict=True):
            losses[rule, seed] = found
            print(f"seed {seed}, {rule or 'nothing lost'}: {shown(found)}", flush=True)
    free = {seed: losses[None, seed][0] for seed in given.seeds}
    harm = {
        rule: {
            seed: Harm(
                [now - free[seed][0] for now, _ in losses[rule, seed]],
                [later - free[seed][1] for _, later in losses[rule, seed]],
            )
            for seed in given.seeds
        }
        for rule in RULES
    }
    return free, harm


def shown(losses: list[tuple[float, float]]) -> str:
    return ", ".join(f"{now:.3f} → {later:.3f}" for now, later in losses)


def rows_of(harm: dict[str, dict[int, Harm]]) -> list[Row]:
    """A row for each rule, and the order of the two simplest."""
    rows = []
    for rule, by_seed in harm.items():
        at_once = [x for each in by_seed.values() for x in each.at_once]
        later = [x for each in by_seed.values() for x in each.later]
        rows.append(
            Row(
                what=rule,
                values=[statistics.mean(each.later) for each in by_seed.values()],
                limit="nothing lost: 0",
                claim=LATER if rule in AVERAGES else None,
                beside={
                    "at once": f"{statistics.mean(at_once):+.3f}",
                    "at once, each": f"{min(at_once):+.3f} … {max(at_once):+.3f}",
                    "later": f"{statistics.mean(later):+.3f}",
                    "later, each": f"{min(later):+.3f} … {max(later):+.3f}",
                },
                judged="worst",
            )
        )
    means = {rule: [statistics.mean(each.at_once) for each in harm[rule].values()] for rule in ("uniform", "copy")}
    ratios = [uniform / copy for uniform, copy in zip(means["uniform"], means["copy"], strict=True)]
    return [*rows, Row("at once: uniform / copy", ratios, "none known", ORDER, judged="worst")]


def run_ladder() -> int:
    """What each rule makes of a lost middle stage: how much worse the model is at once, and 50 steps later.

    A small model learns Python from Python's own standard library, once for each seed. From the same trained state,
    with the same data to come, each middle stage in turn is lost and brought back by each rule: CheckFree's average,
    the same as its published code weighs it, the plain average, a neighbour's copy, new random weights, nothing at all
    (identity), and the strategies that keep copies. These train the last few steps before the loss themselves, so that
    their copies are whole; so does the run that loses nothing, which all are held against.

    The claims, as means over the middle stages and in every seed: the plain average does at most 0.95 of the harm at
    once that a neighbour's copy does, and 50 steps after the loss averages leave at most 0.05 nats. There is none on
    random weights: at a million parameters a fresh residual stage is nearly the identity, in large models it is said to
    be far worse than anything here.
    """
    flags = parser(LADDER_NAME, run_ladder.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=300, help="before the loss")
    flags.add_argument("--after", type=int, default=50, help="steps after the loss")
    flags.add_argument("--stages", type=int, default=6, help="block stages of one layer each")
    flags.add_argument("--dim", type=int, default=96, help="width of the model; 96 is 0.8 million parameters")
    flags.add_argument(
        "--vocab", type=int, default=1024, help="that of the recipe recovery, whose tokenizer may be in the cache"
    )
    flags.add_argument("--samples", type=int, default=10, help="in one step, of 64 tokens each")
    flags.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    given = flags.parse_args()
    if given.steps < WARM:
        raise UserError(f"--steps {given.steps}: copies are whole after {WARM} steps; give {WARM} or more")
    prepare(recipe(given, 0, RecoveryConfig()).data, given.vocab, print)
    free, harm = measure(given)
    notes = [
        f"measured: validation loss {given.after} steps after the loss of a stage, minus that of the run that lost "
        "nothing; nats per token, mean over the middle stages, worst seed",
        "the run that lost nothing: "
        + ", ".join(f"seed {seed} {now:.3f}, then {later:.3f}" for seed, (now, later) in free.items()),
    ]
    return conclude(LADDER_NAME, given, rows_of(harm), notes)


EDGES_NAME = "edges"
FIRST, LAST, STEPS = Claim(high=0.2), Claim(high=0.5), Claim(high=1.35)
VOCAB = 260
"""ids of bytes, and some"""
ROUTINGS = ("full", "swapped")


@dataclass(frozen=True)
class Course:
    """One model: its validations, and how much worse it is at once without its first and its last block stage."""

    points: list[Point]
    first: float
    last: float


def edges_recipe(given: argparse.Namespace, seed: int, routing: str) -> RunConfig:
    """Two layers a stage; half of the microbatches are one of two."""
    return RunConfig(
        name=EDGES_NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(vocab=VOCAB, dim=given.dim, layers=2 * given.stages, hidden=given.dim * 11 // 4, context=96),
        data=DataConfig(tokenizer="bytes"),
        pipeline=PipelineConfig(stages=given.stages, microbatches=2, microbatch_size=given.samples // 2),
        routing=RoutingConfig(kind=routing),
        optim=OptimConfig(lr=2e-3, warmup=20),
        train=TrainConfig(steps=given.steps),
        recovery=RecoveryConfig(strategy="copy"),
    )


def edges_train(given: argparse.Namespace, seed: int, routing: str) -> Course:
    """Train one model, then lose either edge of it."""
    engine = engine_for(edges_recipe(given, seed, routing))
    points = []
    for step in range(1, given.steps + 1):
        engine.train_step()
        if step % given.every == 0:
            points.append(Point(tick=step, step=step, loss=engine.evaluate()))
    whole, state = engine.evaluate(), {s: copy.deepcopy(runner.state()) for s, runner in engine.runners.items()}
    harm = []
    for stage in (1, given.stages):
        engine.become(state)
        if (plan := engine.lose([stage])).reason:
            raise RunStopped(plan.reason)
        harm.append(engine.evaluate() - whole)
    return Course(points, *harm)


def steps_ratio(full: list[Point], swapped: list[Point]) -> float:
    """Steps to equal loss, swapped over full: to the best loss that both reach."""
    target = max(min(loss for _, loss in smoothed(points)) for points in (full, swapped))
    ticks = [ticks_to(points, target) for points in (full, swapped)]
    assert ticks[0] is not None and ticks[1] is not None, "both reach the worse of their best losses"
    return ticks[1] / ticks[0]


def edges_rows_of(pairs: list[tuple[Course, Course]], stages: int) -> list[Row]:
    """The three claims, a value for each seed; ``pairs`` are (full, swapped)."""
    rows = []
    for what, claim, side in (("stage 1", FIRST, "first"), (f"stage {stages}", LAST, "last")):
        harms = [(getattr(full, side), getattr(swapped, side)) for full, swapped in pairs]
        rows.append(
            Row(
                what=f"{what} lost, copied from its partner",
                values=[swapped / full for full, swapped in harms],
                limit="no harm: 0",
                claim=claim,
                beside={
                    "full": f"{statistics.mean(full for full, _ in harms):+.3f}",
                    "swapped": f"{statistics.mean(swapped for _, swapped in harms):+.3f}",
                },
            )
        )
    finals = [statistics.mean(smoothed(each[side].points)[-1][1] for each in pairs) for side in (0, 1)]
    ratios = [steps_ratio(full.points, swapped.points) for full, swapped in pairs]
    beside = {"full": f"loss {finals[0]:.3f}", "swapped": f"loss {finals[1]:.3f}"}
    return [*rows, Row("steps to equal loss", ratios, "none known", STEPS, beside)]


def edges_measure(given: argparse.Namespace) -> list[tuple[Course, Course]]:
    """Both models of every seed."""
    arms = list(product(given.seeds, ROUTINGS))
    seeds, routings = [seed for seed, _ in arms], [routing for _, routing in arms]
    courses: list[Course] = []
    with ProcessPoolExecutor(given.workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for arm, course in zip(arms, pool.map(edges_train, repeat(given), seeds, routings), strict=True):
            courses.append(course)
            loss = course.points[-1].loss
            print(
                f"seed {arm[0]}, {arm[1]}: loss {loss:.3f}, stage 1 lost {course.first:+.3f}, "
                f"stage {given.stages} lost {course.last:+.3f}",
                flush=True,
            )
    return list(zip(courses[::2], courses[1::2], strict=True))


def run_edges() -> int:
    """Measure swapped routing (CheckFree+): harm of losing an outer stage, and steps to equal loss.

    Two models start from the same weights and read the same data; one is trained in natural order, in the other half of
    the microbatches meet the two outer stages at either end in swapped order. Then the first block stage becomes a copy
    of the second, or the last one a copy of the last but one. The claims: in the swapped model the first stage's loss
    does at most 0.2 of the harm at once that it does in the other, the last stage's at most 0.5; and without any loss
    the swapped model takes at most 1.35 times as many steps to the same validation loss.

    The models read bytes, of which they learn enough in so few steps for the last stage to matter at all. Its claim is
    the doubtful one: trials at other sizes, seeds and learning rates gave 0.37 to 1.06, since losing it does little
    harm (0.1 to 0.3 nats) under either routing. The first stage's needs two layers a stage: with one, trials gave 0.15
    to 0.54.
    """
    flags = parser(EDGES_NAME, run_edges.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--steps", type=int, default=500)
    flags.add_argument("--every", type=int, default=25, help=f"steps between validations; {SMOOTHED} make one loss")
    flags.add_argument("--stages", type=int, default=6, help="block stages of two layers each")
    flags.add_argument("--dim", type=int, default=64, help="width of the model; 64 is 0.6 million parameters")
    flags.add_argument("--samples", type=int, default=20, help="in one step, of 96 bytes each")
    flags.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    given = flags.parse_args()
    if given.steps < SMOOTHED * given.every:
        raise UserError(
            f"--steps {given.steps}: a loss is the mean of {SMOOTHED} validations; lower --every or train on"
        )
    prepare(edges_recipe(given, 0, "full").data, VOCAB, print)
    notes = [
        "measured: swapped / full, the median seed",
        "full, swapped: validation loss minus that of the same model at the same step with all its stages, nats per "
        "byte, mean of the seeds; in the last row validation losses at the end",
    ]
    return conclude(EDGES_NAME, given, edges_rows_of(edges_measure(given), given.stages), notes)


SKIPPING_NAME = "skipping"
FULL, QUARTER, THIRD, SHALLOW = "full", "a quarter skipped", "a third skipped", "a third shallower"
SKIP = {FULL: 0.0, QUARTER: 0.25, THIRD: 0.33, SHALLOW: 0.0}
OMITTED = (0.25, 0.5)
SUBSETS = 24


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed."""

    at_steps: float
    """validation loss in nats after as many steps as the full arm took"""
    at_compute: float
    """validation loss in nats after as much computing"""
    omitted: dict[float, float]
    """share of the stages left out → perplexity over that of the whole model, at equal steps"""


def skipping_recipe(given: argparse.Namespace, arm: str, seed: int) -> RunConfig:
    layers = given.layers - round(given.layers / 3) if arm == SHALLOW else given.layers
    return RunConfig(
        name=SKIPPING_NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(
            vocab=given.vocab, dim=given.dim, layers=layers, ends_layers=1, hidden=given.dim * 11 // 4, context=64
        ),
        pipeline=PipelineConfig(stages=layers - 1, microbatches=6, microbatch_size=given.samples // 6),
        routing=RoutingConfig(kind="skipping", skip=SKIP[arm]) if SKIP[arm] else RoutingConfig(),
        optim=OptimConfig(lr=given.lr, warmup=20),
        train=TrainConfig(eval_microbatches=24),
    )


def compute(config: RunConfig) -> float:
    """Parameters that one token meets in a step of training: its layers and the head."""
    model, stages = config.model, config.pipeline.stages
    layer = parameter_count(model.model_copy(update={"layers": 2})) - parameter_count(
        model.model_copy(update={"layers": 1})
    )
    return model.vocab * model.dim + layer * (1 + visits(stages, config.routing.skip))


def skipping_train(given: argparse.Namespace, arm: str, seed: int) -> Outcome:
    config = skipping_recipe(given, arm, seed)
    engine = engine_for(config)
    budget = round(given.steps * compute(skipping_recipe(given, FULL, seed)) / compute(config))
    while engine.step < given.steps:
        engine.train_step()
    at_steps = engine.evaluate()
    omitted = left_out(engine)
    while engine.step < budget:
        engine.train_step()
    return Outcome(at_steps, engine.evaluate(), omitted)


def left_out(engine: InlineEngine) -> dict[float, float]:
    config = engine.config
    stages = config.pipeline.stages
    weights = {
        global_name(config.model, stages, stage, name): tensor.clone()
        for stage, runner in engine.runners.items()
        for name, tensor in runner.state().weights.items()
    }
    model = Llama(config.model, stages, initialise=False)
    model.load_global_state(weights)
    stream = Stream(prepare(config.data, config.model.vocab), "validation", config.model.context, config.seed)
    size = config.pipeline.microbatch_size
    with torch.inference_mode():
        found = omissions(model, batches(stream, 0, size), 24, OMITTED, SUBSETS, config.seed)
    return {one.share: one.over_full for one in found if one.stages}


def skipping_measure(given: argparse.Namespace) -> dict[str, list[Outcome]]:
    spawn = multiprocessing.get_context("spawn")
    arms = list(product(given.arms, given.seeds))
    found: dict[str, list[Outcome]] = {arm: [] for arm in given.arms}
    with ProcessPoolExecutor(given.workers, mp_context=spawn) as pool:
        outcomes = pool.map(skipping_train, repeat(given), [arm for arm, _ in arms], [seed for _, seed in arms])
        for (arm, seed), one in zip(arms, outcomes, strict=True):
            found[arm].append(one)
            print(
                f"seed {seed}, {arm}: {one.at_steps:.3f} at equal steps, {one.at_compute:.3f} at equal compute",
                flush=True,
            )
    return found


def skipping_rows_of(given: argparse.Namespace, found: dict[str, list[Outcome]]) -> list[Row]:
    rows = []
    claims = {THIRD: (Claim(high=1.12), Claim(high=1.0))}
    for arm, outcomes in found.items():
        config, full = skipping_recipe(given, arm, 0), compute(skipping_recipe(given, FULL, 0))
        beside: dict[str, float | int | str] = {
            "steps": f"{given.steps}, {round(given.steps * full / compute(config))}",
            "perplexity": _perplexities([o.at_steps for o in outcomes], [o.at_compute for o in outcomes]),
        }
        steps = [math.exp(o.at_steps - f.at_steps) for o, f in zip(outcomes, found[FULL], strict=True)]
        cost = [math.exp(o.at_compute - f.at_steps) for o, f in zip(outcomes, found[FULL], strict=True)]
        at_steps, at_compute = claims.get(arm, (None, None))
        rows.append(Row(f"{arm} ÷ full, equal steps", steps, "1", at_steps, beside, "worst"))
        rows.append(Row(f"{arm} ÷ full, equal compute", cost, "1", at_compute, {}, "worst"))
    bears = {(THIRD, 0.5): Claim(high=1.1), (THIRD, 0.25): Claim(high=1.03), (FULL, 0.5): Claim(low=1.4)}
    for arm, share in product(found, OMITTED):
        ratios = [outcome.omitted[share] for outcome in found[arm]]
        rows.append(
            Row(f"{arm}: {share:.0%} of the stages left out", ratios, "1", bears.get((arm, share)), {}, "worst")
        )
    return rows


def _perplexities(*losses: list[float]) -> str:
    return ", ".join(f"{math.exp(statistics.mean(each)):.2f}" for each in losses)


def run_skipping() -> int:
    """Measure perplexity with a quarter or a third of the stages skipped, or a shallower model.

    A small model learns Python from Python's own standard library, three seeds an arm, all on the same samples. The
    first of its layers stays with the ends, the others are stages of one layer each; a quarter and a third are shares
    of all of them, as SkipPipe counts. The shallow arm simply has a third fewer layers. All arms are validated whole,
    in natural order, after as many steps as the full arm (equal steps) and after as much computing, counted in
    floating-point operations of layers and head (equal compute). Then stages are left out of the trained models: a
    quarter and a half of them, over subsets drawn alike for all arms.

    The claims, as ratios of perplexities: a third skipped over full at most 1.12 at equal steps and 1.00 at equal
    compute; with half of the stages left out, at most 1.10 of the whole model's for the arm that skipped a third, and
    at least 1.40 for the full one; with a quarter left out, at most 1.03 for the arm that skipped.
    """
    flags = parser(SKIPPING_NAME, run_skipping.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--arms", nargs="+", default=list(SKIP), choices=list(SKIP), help="full must be among them")
    flags.add_argument("--steps", type=int, default=500, help="of the full arm")
    flags.add_argument("--layers", type=int, default=12, help="one of them at the ends")
    flags.add_argument("--dim", type=int, default=96, help="width; with 12 layers, 96 is 1.4 million parameters")
    flags.add_argument("--vocab", type=int, default=1024)
    flags.add_argument("--lr", type=float, default=1e-3, help="of all arms: full's best of 5e-4, 1e-3, 2e-3, 4e-3")
    flags.add_argument("--samples", type=int, default=18, help="in one step, of 64 tokens each")
    flags.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="processes at the same time")
    given = flags.parse_args()
    prepare(skipping_recipe(given, FULL, 0).data, given.vocab, print)
    notes = ["measured: perplexity over the full arm's after its steps, or over the whole model's; the worst seed"]
    return conclude(SKIPPING_NAME, given, skipping_rows_of(given, skipping_measure(given)), notes)


SHARING_NAME = "sharing"
SHAPE = {"vocab": 260, "dim": 64, "layers": 4, "heads": 4, "hidden": 176, "context": 128}
SMALL = {**SHAPE, "dim": 28, "hidden": 66, "heads": 2}
"""dense, and of as many numbers as the models of an eighth, tables included"""
ARMS: dict[str, dict[str, Any]] = {
    "dense": SHAPE,
    "an eighth, by layer": {**SHAPE, "share": 8},
    "an eighth, one array": {**SHAPE, "share": 8, "share_over": "model"},
    "dense, as many numbers": SMALL,
}


def sources(megabytes: float = 4.0) -> Path:
    """Python's library, one file after the other."""
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / "python.txt"
    if not path.exists():
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "\n".join(file.read_text(errors="ignore") for file in files)[: int(megabytes * 1e6)]
        path.write_text(text)
    return path


def sharing_train(arm: str, seed: int, given: argparse.Namespace) -> tuple[float, float]:
    """The last validation loss, in nats a byte; seconds of processor time."""
    import planaria
    from planaria.config.schema import RunConfig

    config = RunConfig.model_validate(
        {
            "name": f"{SHARING_NAME}-{arm.replace(' ', '-').replace(',', '')}-{seed}",
            "out": str(RUNS),
            "engine": "inline",
            "seed": seed,
            "model": ARMS[arm],
            "pipeline": {"stages": 4, "microbatches": 2, "microbatch_size": 4},
            "data": {"source": str(sources()), "tokenizer": "bytes", "cache": str(RUNS / "cache"), "validation": 0.05},
            "optim": {"lr": 2e-3, "warmup": 50},
            "train": {"steps": given.steps, "eval_every": given.steps, "eval_microbatches": 32},
            "recovery": {"strategy": "checkpoint"},
            "checkpoint": {"every": 0},
        }
    )
    began = time.process_time()
    shutil.rmtree(RUNS / config.name, ignore_errors=True)
    run = planaria.train(config, progress=False)
    return list(run.validations.values())[-1], time.process_time() - began


def run_sharing() -> int:
    """Compare shared weights with dense models of one shape and of one stored size.

    One process trains all arms on the same samples: the dense model of the shape; the same with an eighth of its
    layers' numbers, an array for each layer or one for all; and a dense model that stores as many numbers. The claim:
    with an array for each layer the last validation loss is at least 0.03 nats below that of the dense model of as many
    numbers, with every seed.
    """
    from planaria.config.schema import ModelConfig
    from planaria.models.stages import parameter_count

    flags = parser(SHARING_NAME, run_sharing.__doc__)
    flags.add_argument("--steps", type=int, default=600)
    flags.add_argument("--seeds", type=int, default=3)
    given = flags.parse_args()
    sharing_train("dense", 0, argparse.Namespace(steps=2))  # what is loaded for the first run is no arm's
    found = {arm: [sharing_train(arm, seed, given) for seed in range(1, given.seeds + 1)] for arm in ARMS}
    loss = {arm: [one for one, _ in values] for arm, values in found.items()}

    def less(arm: str) -> list[float]:
        return [small - own for small, own in zip(loss["dense, as many numbers"], loss[arm], strict=True)]

    rows = [
        Row("nats below a dense model of as many numbers: by layer", less("an eighth, by layer"), "", Claim(low=0.03),
            judged="least"),
        Row("the same, one array for all stages", less("an eighth, one array"), ""),
        Row("the same, dense model of the shape", less("dense"), "the most there is to gain"),
    ]  # fmt: skip
    for arm in ARMS:
        stored = {"stored": parameter_count(ModelConfig.model_validate(ARMS[arm]))}
        rows.append(Row(f"validation loss, {arm}", loss[arm], "", beside=stored))
    for arm in ("an eighth, by layer", "an eighth, one array"):
        ratio = [own / dense for (_, own), (_, dense) in zip(found[arm], found["dense"], strict=True)]
        rows.append(Row(f"processor time over dense: {arm}", ratio, "1"))
    return conclude(SHARING_NAME, given, rows)


WIRE_NAME = "wire"
CLAIM = Claim(high=0.01)


def wire_recipe(given: argparse.Namespace, wire: str, seed: int, rate: float = 2e-3) -> RunConfig:
    return RunConfig(
        name=WIRE_NAME,
        out=str(RUNS),
        seed=seed,
        model=ModelConfig(
            vocab=257, dim=given.dim, layers=given.stages, heads=4, hidden=given.dim * 11 // 4, context=64
        ),
        pipeline=PipelineConfig.model_validate(
            {"stages": given.stages, "microbatches": 4, "microbatch_size": 8, "wire": wire}
        ),
        data=DataConfig(source=str(given.text), tokenizer="bytes", cache=str(RUNS / "cache")),
        optim=OptimConfig(lr=rate, warmup=20, schedule="cosine"),
        train=TrainConfig(steps=given.steps, eval_every=0, eval_microbatches=32),
    )


def validated(config: RunConfig) -> float:
    """The validation loss at the end of training, in nats."""
    engine = engine_for(config)
    for _ in range(config.train.steps):
        engine.train_step()
    return engine.evaluate()


def wire_rows_of(given: argparse.Namespace) -> list[Row]:
    whole = [validated(wire_recipe(given, "fp32", seed)) for seed in given.seeds]
    limit = f"0; fp32 by seed: {', '.join(f'{loss:.4f}' for loss in whole)}"

    def gaps(*arm: Any) -> list[float]:
        others = [validated(wire_recipe(given, arm[0], seed, *arm[1:])) for seed in given.seeds]
        return [other - loss for other, loss in zip(others, whole, strict=True)]

    return [
        Row("validation loss, bf16 - fp32, nats", gaps("bf16"), limit, CLAIM),
        Row("control: fp32 at another rate - fp32", gaps("fp32", 2e-3 * (1 + 1e-6)), limit),
    ]


def run_wire() -> int:
    """What does rounding to bf16 on the wire do to training? A small byte model on real text, with and without.

    Both arms of a seed start alike and see the same samples; the fleet's workers round in the same places, so one
    process is enough. The claim: with bf16 activations and gradients on the wire, the median over seeds of the
    validation loss at the end is at most 0.01 nats above that of fp32. Beside it a control: fp32 again, with the
    learning rate a millionth higher. So far apart come two runs between which no rounding matters.
    """
    flags = parser(WIRE_NAME, run_wire.__doc__)
    text = Path(os.environ.get("PLANARIA_DATA", "data")) / "tinyshakespeare.txt"
    flags.add_argument("--text", type=Path, default=text)
    flags.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    flags.add_argument("--steps", type=int, default=400)
    flags.add_argument("--dim", type=int, default=64, help="width of the model")
    flags.add_argument("--stages", type=int, default=4, help="block stages of one layer each")
    return conclude(WIRE_NAME, given := flags.parse_args(), wire_rows_of(given))


if __name__ == "__main__":
    start(ladder=run_ladder, edges=run_edges, skipping=run_skipping, sharing=run_sharing, wire=run_wire)
