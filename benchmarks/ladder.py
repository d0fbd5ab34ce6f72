"""Loss after losing stages, and of models with skipped stages, shared layers or bf16 on the wire."""

from __future__ import annotations

import copy
import math
import shutil
import sysconfig
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

import planaria
from benchmarks.harness import (
    CORES,
    DATA,
    RUNS,
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    by_case,
    gaps,
    ratios,
    run_config,
    start,
)
from planaria.common.errors import RunStopped, UserError
from planaria.config.schema import ModelConfig, RunConfig
from planaria.data.shards import tokenise_corpus
from planaria.data.stream import Stream
from planaria.lab.compare.race import ValidationPoint
from planaria.lab.compare.race_results import smoothed_losses, ticks_to
from planaria.lab.compare.race_spec import SMOOTHING_WINDOW
from planaria.lab.reference.engine import ReferenceEngine
from planaria.models.family import Pipelined
from planaria.models.llama_stages import Llama, global_name, parameter_count
from planaria.pipeline.routing.skipping import visits_per_microbatch
from planaria.recovery.echo import Echo
from planaria.runtime.api.stage_omission import omissions
from planaria.runtime.checkpoint.stage_file import read_stage, write_stage
from planaria.runtime.worker.step_samples import batches

WORKERS = Flag(CORES, "processes at the same time")
VOCAB = 260  # ids of bytes


def shape(vocab: int, dim: int, layers: int, context: int = 64, **more: Any) -> dict[str, Any]:
    return {"vocab": vocab, "dim": dim, "layers": layers, "hidden": dim * 11 // 4, "context": context, **more}


def engine_for(config: RunConfig) -> ReferenceEngine:
    """Return an engine on one thread with the training and validation streams of the corpus."""
    torch.set_num_threads(1)
    dataset = tokenise_corpus(config.data, config.model.vocab)
    context = config.model.context
    return ReferenceEngine(
        config, Stream(dataset, "train", context, config.seed), Stream(dataset, "validation", context, config.seed)
    )


def lose(engine: ReferenceEngine, stage: int) -> None:
    if (plan := engine.lose([stage])).reason:
        raise RunStopped(plan.reason)


# ---- a lost middle stage

AVERAGES = ("checkfree", "checkfree as in its code", "uniform")
RULES: dict[str, dict[str, Any]] = {
    "checkfree": {},
    "checkfree as in its code": {"options": {"omega": "l2", "measured": "postclip"}},
    "uniform": {"strategy": "uniform"},
    "copy": {"strategy": "copy"},
    "random": {"strategy": "random"},
    "identity": {"strategy": "identity"},
    "echo, 8 bits": {"strategy": "echo", "options": {"bits": 8}},
    "echo, 4 bits": {"strategy": "echo", "options": {"bits": 4}},
    "echo, 2 bits": {"strategy": "echo", "options": {"bits": 2}},
    # Twins are as exact without their forward passes, and half as slow.
    "redundant": {"strategy": "redundant", "options": {"forward": False}},
}
WARM = Echo().every  # steps after which every copy is complete
Losses = list[tuple[float, float]]  # at once and later, by lost stage


def ladder_recipe(args: Namespace, seed: int, rule: str | None = None) -> RunConfig:
    """One layer per stage; the corpus and its tokenizer are read from the user's cache if present."""
    return run_config(
        "ladder",
        seed=seed,
        model=shape(args.vocab, args.dim, args.stages),
        pipeline={"stages": args.stages, "microbatches": 2, "microbatch_size": args.samples // 2},
        optim={"lr": 2e-3, "warmup": 20},
        train={"eval_microbatches": 16},
        recovery=RULES[rule] if rule else {},
    )


def trained(seed: int) -> Path:
    return RUNS / "ladder" / f"seed-{seed}"


def ladder_train(args: Namespace, seed: int) -> None:
    """Train up to the steps that strategies with copies take themselves, and write every stage."""
    engine = engine_for(ladder_recipe(args, seed))
    for _ in range(args.steps - WARM):
        engine.train_step()
    for stage, runner in engine.runners.items():
        write_stage(trained(seed), stage, engine.step, runner.state())


def losses_of(args: Namespace, rule: str | None, seed: int) -> Losses:
    """Return the validation losses for each lost middle stage; without a rule, of the run that loses nothing."""
    engine = engine_for(ladder_recipe(args, seed, rule))
    state = {stage: read_stage(trained(seed), stage, args.steps - WARM) for stage in engine.runners}
    found = []
    for stage in range(2, args.stages) if rule else [None]:
        engine.step = args.steps - WARM
        engine.load_states(state)
        for _ in range(WARM):
            engine.train_step()
        if stage is not None:
            lose(engine, stage)
        at_once = engine.evaluate()
        for _ in range(args.after):
            engine.train_step()
        found.append((at_once, engine.evaluate()))
    return found


def ladder_rows(losses: dict[tuple[str | None, int], Losses], seeds: Sequence[int]) -> Iterator[Row]:
    means: dict[str, list[float]] = {}
    for rule in RULES:
        base = {seed: losses[None, seed][0] for seed in seeds}
        at_once = [[now - base[seed][0] for now, _ in losses[rule, seed]] for seed in seeds]
        later = [[after - base[seed][1] for _, after in losses[rule, seed]] for seed in seeds]
        means[rule] = [fmean(each) for each in at_once]
        columns = {}
        for what, by_seed in (("at once", at_once), ("later", later)):
            flat = [x for each in by_seed for x in each]
            columns |= {what: f"{fmean(flat):+.3f}", f"{what}, each": f"{min(flat):+.3f} … {max(flat):+.3f}"}
        claim = Claim(high=0.05) if rule in AVERAGES else None
        yield Row(rule, [fmean(each) for each in later], "nothing lost: 0", claim, columns, judged="worst")
    over = ratios(means["uniform"], means["copy"])
    yield Row("at once: uniform / copy", over, "none known", Claim(high=0.95), judged="worst")


@benchmark(
    "ladder",
    seeds=[1, 2, 3],
    steps=Flag(300, "before the loss"),
    after=Flag(50, "steps after the loss"),
    stages=Flag(6, "block stages of one layer each"),
    dim=Flag(96, "width of the model; 96 is 0.8 million parameters"),
    vocab=Flag(1024, "that of the recipe recovery, whose tokenizer may be in the cache"),
    samples=Flag(10, "in one step, of 64 tokens each"),
    workers=WORKERS,
)
def run_ladder(args: Namespace) -> Measurement:
    """Measure the harm of losing a middle stage under each recovery rule, at once and 50 steps later.

    A small model learns Python's standard library. From the same trained state and with the same data, each middle
    stage in turn is lost and rebuilt by each rule. The base is a run that loses nothing. Strategies that keep copies
    train the last steps before the loss themselves, so that their copies are complete; so does the base.

    Claims, for means over the middle stages, in every seed: the plain average does at most 0.95 of a copy's harm at
    once; averages leave at most 0.05 nats 50 steps later. Random weights have no claim: at this size a fresh residual
    stage is nearly the identity.
    """
    if args.steps < WARM:
        raise UserError(f"--steps {args.steps}: copies are complete after {WARM} steps; give {WARM} or more")
    tokenise_corpus(ladder_recipe(args, 0).data, args.vocab, print)
    by_case(args.workers, ladder_train, product(args.seeds), args)
    losses = by_case(args.workers, losses_of, product([None, *RULES], args.seeds), args)
    free = [(seed, *losses[None, seed][0]) for seed in args.seeds]
    notes = [
        f"measured: validation loss {args.after} steps after the loss of a stage, minus that of the run that lost "
        "nothing; nats per token, mean over the middle stages, worst seed",
        "the run that lost nothing: "
        + ", ".join(f"seed {seed} {now:.3f}, then {later:.3f}" for seed, now, later in free),
    ]
    return Result(list(ladder_rows(losses, args.seeds)), notes)


# ---- a lost outer stage


@dataclass(frozen=True)
class Course:
    """One model: its validations, and the harm of losing its first and its last block stage, in nats."""

    points: list[ValidationPoint]
    first: float
    last: float


def edges_recipe(args: Namespace, seed: int, routing: str) -> RunConfig:
    """Two layers per stage; half of the microbatches are one of two."""
    return run_config(
        "edges",
        seed=seed,
        model=shape(VOCAB, args.dim, 2 * args.stages, 96),
        data={"tokenizer": "bytes"},
        pipeline={"stages": args.stages, "microbatches": 2, "microbatch_size": args.samples // 2},
        routing={"kind": routing},
        optim={"lr": 2e-3, "warmup": 20},
        train={"steps": args.steps},
        recovery={"strategy": "copy"},
    )


def edges_train(args: Namespace, seed: int, routing: str) -> Course:
    """Train one model, then lose either outer stage."""
    engine = engine_for(edges_recipe(args, seed, routing))
    points = []
    for step in range(1, args.steps + 1):
        engine.train_step()
        if step % args.every == 0:
            points.append(ValidationPoint(tick=step, step=step, loss=engine.evaluate()))
    whole, state = engine.evaluate(), {s: copy.deepcopy(runner.state()) for s, runner in engine.runners.items()}
    harm = []
    for stage in (1, args.stages):
        engine.load_states(state)
        lose(engine, stage)
        harm.append(engine.evaluate() - whole)
    return Course(points, *harm)


def steps_ratio(full: list[ValidationPoint], swapped: list[ValidationPoint]) -> float:
    target = max(min(loss for _, loss in smoothed_losses(points)) for points in (full, swapped))
    ticks = [ticks_to(points, target) for points in (full, swapped)]
    assert ticks[0] is not None and ticks[1] is not None, "both reach the worse of their best losses"
    return ticks[1] / ticks[0]


@benchmark(
    "edges",
    seeds=[1, 2, 3],
    steps=500,
    every=Flag(25, f"steps between validations; {SMOOTHING_WINDOW} make one loss"),
    stages=Flag(6, "block stages of two layers each"),
    dim=Flag(64, "width of the model; 64 is 0.6 million parameters"),
    samples=Flag(20, "in one step, of 96 bytes each"),
    workers=WORKERS,
)
def run_edges(args: Namespace) -> Measurement:
    """Measure swapped routing (CheckFree+): harm of losing an outer stage, and steps to equal loss.

    Two models start from the same weights and read the same data, one in natural order, the other with the outer two
    stages at either end swapped for half of the microbatches. Then the first block stage becomes a copy of the second,
    or the last one a copy of the last but one. Claims: the harm of losing the first stage is at most 0.2 of that under
    full routing, of the last at most 0.5; without a loss, swapped routing takes at most 1.35 of the steps.

    The last stage's claim is doubtful: other sizes, seeds and rates gave 0.37 to 1.06, because losing it does little
    harm (0.1 to 0.3 nats). The first stage's claim needs two layers per stage: with one, trials gave 0.15 to 0.54.
    """
    if args.steps < SMOOTHING_WINDOW * args.every:
        raise UserError(
            f"--steps {args.steps}: a loss is the mean of {SMOOTHING_WINDOW} validations; lower --every or raise "
            "--steps"
        )
    tokenise_corpus(edges_recipe(args, 0, "full").data, VOCAB, print)
    courses = by_case(args.workers, edges_train, product(args.seeds, ("full", "swapped")), args)
    full, swapped = ([courses[seed, routing] for seed in args.seeds] for routing in ("full", "swapped"))
    rows = []
    for stage, high, side in ((1, 0.2, "first"), (args.stages, 0.5, "last")):
        harms = [[getattr(course, side) for course in arm] for arm in (full, swapped)]
        columns = {"full": f"{fmean(harms[0]):+.3f}", "swapped": f"{fmean(harms[1]):+.3f}"}
        what = f"stage {stage} lost, copied from its partner"
        rows.append(Row(what, ratios(harms[1], harms[0]), "no harm: 0", Claim(high=high), columns))
    finals = [fmean(smoothed_losses(course.points)[-1][1] for course in arm) for arm in (full, swapped)]
    steps = [steps_ratio(a.points, b.points) for a, b in zip(full, swapped, strict=True)]
    columns = {"full": f"loss {finals[0]:.3f}", "swapped": f"loss {finals[1]:.3f}"}
    notes = [
        "measured: swapped / full, the median seed",
        "full, swapped: validation loss minus that of the same model at the same step with all its stages, nats per "
        "byte, mean of the seeds; in the last row validation losses at the end",
    ]
    return Result([*rows, Row("steps to equal loss", steps, "none known", Claim(high=1.35), columns)], notes)


# ---- skipped stages

FULL, THIRD, SHALLOW = "full", "a third skipped", "a third shallower"
SKIP = {FULL: 0.0, "a quarter skipped": 0.25, THIRD: 0.33, SHALLOW: 0.0}
OMITTED = (0.25, 0.5)
SUBSETS = 24


@dataclass(frozen=True)
class Outcome:
    """One arm with one seed."""

    at_steps: float  # validation loss in nats after the full arm's steps
    at_compute: float  # validation loss in nats after the full arm's compute
    omitted: dict[float, float]  # share of omitted stages → perplexity over the complete model's, at equal steps


def skipping_recipe(args: Namespace, arm: str, seed: int) -> RunConfig:
    layers = args.layers - round(args.layers / 3) if arm == SHALLOW else args.layers
    return run_config(
        "skipping",
        seed=seed,
        model=shape(args.vocab, args.dim, layers, ends_layers=1),
        pipeline={"stages": layers - 1, "microbatches": 6, "microbatch_size": args.samples // 6},
        routing={"kind": "skipping", "skip": SKIP[arm]} if SKIP[arm] else {},
        optim={"lr": args.lr, "warmup": 20},
        train={"eval_microbatches": 24},
    )


def compute(config: RunConfig) -> float:
    """Return the parameters that one token uses in a training step: its layers and the head."""
    model, stages = config.model, config.pipeline.stages
    two, one = (parameter_count(model.model_copy(update={"layers": layers})) for layers in (2, 1))
    return model.vocab * model.dim + (two - one) * (1 + visits_per_microbatch(stages, config.routing.skip))


def skipping_train(args: Namespace, arm: str, seed: int) -> Outcome:
    config = skipping_recipe(args, arm, seed)
    engine = engine_for(config)
    budget = round(args.steps * compute(skipping_recipe(args, FULL, seed)) / compute(config))
    while engine.step < args.steps:
        engine.train_step()
    at_steps = engine.evaluate()
    omitted = left_out(engine)
    while engine.step < budget:
        engine.train_step()
    return Outcome(at_steps, engine.evaluate(), omitted)


def left_out(engine: ReferenceEngine) -> dict[float, float]:
    config = engine.config
    stages = config.pipeline.stages
    weights = {
        global_name(config.model, stages, stage, name): tensor.clone()
        for stage, runner in engine.runners.items()
        for name, tensor in runner.state().weights.items()
    }
    model = Llama(config.model, stages, initialise=False)
    model.load_global_state(weights)
    stream = Stream(tokenise_corpus(config.data, config.model.vocab), "validation", config.model.context, config.seed)
    with torch.inference_mode():
        samples = batches(stream, 0, config.pipeline.microbatch_size)
        found = omissions(Pipelined(model.ends, [*model.stages]), samples, 24, OMITTED, SUBSETS, config.seed)
    return {one.share: one.over_full for one in found if one.stages}


def skipping_rows(args: Namespace, found: dict[str, list[Outcome]]) -> Iterator[Row]:
    full = compute(skipping_recipe(args, FULL, 0))
    base = [outcome.at_steps for outcome in found[FULL]]
    for arm, outcomes in found.items():
        losses = [o.at_steps for o in outcomes], [o.at_compute for o in outcomes]
        columns = {
            "steps": f"{args.steps}, {round(args.steps * full / compute(skipping_recipe(args, arm, 0)))}",
            "perplexity": ", ".join(f"{math.exp(fmean(each)):.2f}" for each in losses),
        }
        claims = (Claim(high=1.12), Claim(high=1.0)) if arm == THIRD else (None, None)
        steps, cost = ([math.exp(gap) for gap in gaps(each, base)] for each in losses)
        yield Row(f"{arm} ÷ full, equal steps", steps, "1", claims[0], columns, "worst")
        yield Row(f"{arm} ÷ full, equal compute", cost, "1", claims[1], {}, "worst")
    bounds = {(THIRD, 0.5): Claim(high=1.1), (THIRD, 0.25): Claim(high=1.03), (FULL, 0.5): Claim(low=1.4)}
    for arm, share in product(found, OMITTED):
        over = [outcome.omitted[share] for outcome in found[arm]]
        yield Row(f"{arm}: {share:.0%} of the stages left out", over, "1", bounds.get((arm, share)), {}, "worst")


@benchmark(
    "skipping",
    seeds=[1, 2, 3],
    arms=Flag(list(SKIP), "full must be among them", choices=list(SKIP)),
    steps=Flag(500, "of the full arm"),
    layers=Flag(12, "one of them at the ends"),
    dim=Flag(96, "width; with 12 layers, 96 is 1.4 million parameters"),
    vocab=1024,
    lr=Flag(1e-3, "of all arms: full's best of 5e-4, 1e-3, 2e-3, 4e-3"),
    samples=Flag(18, "in one step, of 64 tokens each"),
    workers=WORKERS,
)
def run_skipping(args: Namespace) -> Measurement:
    """Measure perplexity with a quarter or a third of the stages skipped, or a shallower model.

    A small model learns Python's standard library; all arms read the same samples. The first layer stays with the ends,
    the others are stages of one layer each; shares count all layers, as in SkipPipe. The shallow arm has a third fewer
    layers. All arms are validated complete, in natural order, after the full arm's steps and after its compute (FLOPs
    of layers and head). Then a quarter and a half of the stages are left out, over the same subsets for all arms.

    Claims, as ratios of perplexities: a third skipped over full at most 1.12 at equal steps and 1.00 at equal compute;
    with half of the stages left out, over the complete model, at most 1.10 for that arm and at least 1.40 for the full
    one; with a quarter left out at most 1.03 for the arm that skipped.
    """
    tokenise_corpus(skipping_recipe(args, FULL, 0).data, args.vocab, print)
    results = by_case(args.workers, skipping_train, product(args.arms, args.seeds), args)
    found = {arm: [results[arm, seed] for seed in args.seeds] for arm in args.arms}
    note = "measured: perplexity over the full arm's after its steps, or over the whole model's; the worst seed"
    return Result(list(skipping_rows(args, found)), [note])


# ---- shared layers

SHAPE = {"vocab": VOCAB, "dim": 64, "layers": 4, "heads": 4, "hidden": 176, "context": 128}
ARMS: dict[str, dict[str, Any]] = {
    "dense": SHAPE,
    "an eighth, by layer": {**SHAPE, "share": 8},
    "an eighth, one array": {**SHAPE, "share": 8, "share_over": "model"},
    # stores as many numbers as the models of an eighth, tables included
    "dense, as many numbers": {**SHAPE, "dim": 28, "hidden": 66, "heads": 2},
}


def sources(megabytes: float = 4.0) -> Path:
    RUNS.mkdir(parents=True, exist_ok=True)
    path = RUNS / "python.txt"
    if not path.exists():
        files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
        text = "\n".join(file.read_text(errors="ignore") for file in files)[: int(megabytes * 1e6)]
        path.write_text(text)
    return path


def sharing_train(arm: str, seed: int, steps: int) -> tuple[float, float]:
    """Return the last validation loss, in nats per byte, and seconds of processor time."""
    config = run_config(
        f"sharing-{arm.replace(' ', '-').replace(',', '')}-{seed}",
        engine="inline",
        seed=seed,
        model=ARMS[arm],
        pipeline={"stages": 4, "microbatches": 2, "microbatch_size": 4},
        data={"source": str(sources()), "tokenizer": "bytes", "cache": str(RUNS / "cache"), "validation": 0.05},
        optim={"lr": 2e-3, "warmup": 50},
        train={"steps": steps, "eval_every": steps, "eval_microbatches": 32},
        recovery={"strategy": "checkpoint"},
        checkpoint={"every": 0},
    )
    began = time.process_time()
    shutil.rmtree(RUNS / config.name, ignore_errors=True)
    run = planaria.train(config, progress=False)
    return list(run.validations.values())[-1], time.process_time() - began


@benchmark("sharing", steps=600, seeds=3)
def run_sharing(args: Namespace) -> Measurement:
    """Compare shared weights with dense models of one shape and of one stored size.

    One process trains all arms on the same samples: the dense model of the shape; the same with an eighth of its
    layers' numbers, an array for each layer or one for all; and a dense model that stores as many numbers. Claim: with
    an array for each layer the last validation loss is at least 0.03 nats below that of the dense model of as many
    numbers, with every seed.
    """
    sharing_train("dense", 0, 2)  # loads modules that would count for the first arm
    found = {arm: [sharing_train(arm, seed, args.steps) for seed in range(1, args.seeds + 1)] for arm in ARMS}
    loss = {arm: [one for one, _ in values] for arm, values in found.items()}
    spent = {arm: [seconds for _, seconds in values] for arm, values in found.items()}
    layer, array, small = "an eighth, by layer", "an eighth, one array", loss["dense, as many numbers"]
    claim = Claim(low=0.03)
    by_layer = "nats below a dense model of as many numbers: by layer"
    rows = [
        Row(by_layer, gaps(small, loss[layer]), "", claim, judged="least"),
        Row("the same, one array for all stages", gaps(small, loss[array]), ""),
        Row("the same, dense model of the shape", gaps(small, loss["dense"]), "the most there is to gain"),
    ]
    for arm, made in ARMS.items():
        stored = {"stored": parameter_count(ModelConfig.model_validate(made))}
        rows.append(Row(f"validation loss, {arm}", loss[arm], "", columns=stored))
    for arm in (layer, array):
        rows.append(Row(f"processor time over dense: {arm}", ratios(spent[arm], spent["dense"]), "1"))
    return rows


# ---- bf16 on the wire


def wire_loss(args: Namespace, wire: str, seed: int, rate: float = 2e-3) -> float:
    """Return the validation loss at the end of training, in nats."""
    config = run_config(
        "wire",
        seed=seed,
        model=shape(257, args.dim, args.stages, heads=4),
        pipeline={"stages": args.stages, "microbatches": 4, "microbatch_size": 8, "wire": wire},
        data={"source": str(args.text), "tokenizer": "bytes", "cache": str(RUNS / "cache")},
        optim={"lr": rate, "warmup": 20, "schedule": "cosine"},
        train={"steps": args.steps, "eval_every": 0, "eval_microbatches": 32},
    )
    engine = engine_for(config)
    for _ in range(config.train.steps):
        engine.train_step()
    return engine.evaluate()


@benchmark(
    "wire",
    text=DATA / "tinyshakespeare.txt",
    seeds=[0, 1, 2],
    steps=400,
    dim=Flag(64, "width of the model"),
    stages=Flag(4, "block stages of one layer each"),
)
def run_wire(args: Namespace) -> Measurement:
    """Measure the effect of bf16 activations and gradients on the wire on the loss of a small byte model.

    Both arms of a seed start alike and read the same samples; one process rounds where the fleet's workers round.
    Claim: the median over seeds of the final validation loss is at most 0.01 nats above fp32's. The control is fp32
    with a learning rate higher by a millionth: the difference of two runs without any rounding.
    """
    base = [wire_loss(args, "fp32", seed) for seed in args.seeds]
    limit = f"0; fp32 by seed: {', '.join(f'{loss:.4f}' for loss in base)}"
    bf16 = [wire_loss(args, "bf16", seed) for seed in args.seeds]
    control = [wire_loss(args, "fp32", seed, 2e-3 * (1 + 1e-6)) for seed in args.seeds]
    return [
        Row("validation loss, bf16 - fp32, nats", gaps(bf16, base), limit, Claim(high=0.01)),
        Row("control: fp32 at another rate - fp32", gaps(control, base), limit),
    ]


if __name__ == "__main__":
    start(ladder=run_ladder, edges=run_edges, skipping=run_skipping, sharing=run_sharing, wire=run_wire)
