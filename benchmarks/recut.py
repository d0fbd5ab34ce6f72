"""Continue a run with other stages and replicas: state, losses and optimizer moments."""

from __future__ import annotations

import hashlib
import math
import random
import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import planaria
from benchmarks.fleet_run import bytes_data, losses_by_step
from benchmarks.harness import Claim, Flag, Measurement, Result, Row, benchmark, gaps, run_config, start
from planaria.common.errors import RunStopped
from planaria.config.schema import RunConfig
from planaria.control.log.reader import read_run
from planaria.report.observe.progress import NoProgress
from planaria.report.observe.run_observer import RunObserver
from planaria.report.run.sample_ledger import prove_exactly_once
from planaria.runtime.checkpoint.loading import atoms_of_model, cut_of
from planaria.runtime.checkpoint.store import CheckpointStore
from planaria.runtime.engine.train_prepared import train_prepared
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import prepare
from planaria.runtime.preparation.resumption import resumption_of
from planaria.runtime.worker.runner import StageRunner

ARMS = {"averaged": 3, "fresh": 3, "undisturbed": 4}  # replicas after the change


def begin(args: Namespace, seed: int, place: Path) -> Path:
    """Train the run that all arms continue; return its folder."""
    model = {"vocab": 260, "dim": args.dim, "layers": 4, "heads": 4, "hidden": args.dim * 11 // 4, "context": 64}
    made: dict[str, Any] = {
        "out": str(place),
        "engine": "inline",
        "seed": seed,
        "model": model,
        "pipeline": {"stages": 2, "microbatches": 1, "microbatch_size": args.samples},
        "data": {"tokenizer": "bytes"},
        "optim": {"lr": args.lr, "warmup": 20},
        "train": {"steps": args.before, "eval_every": args.before + args.after, "eval_microbatches": 16},
        "exchange": {"kind": "noloco", "replicas": ARMS["undisturbed"], "options": {"every": args.every}},
        "observe": {"trackers": ""},
    }
    planaria.train(run_config(f"seed-{seed}", **made), progress=False)
    return place / f"seed-{seed}"


@contextmanager
def fresh_moments() -> Iterator[None]:
    """Load stages without moments, as after an exchange of weights alone."""
    real = StageRunner.load

    def bare(self: StageRunner, state: Any) -> None:
        real(self, state.part(lambda name: True, moments=False))

    StageRunner.load = bare  # type: ignore[method-assign]
    try:
        yield
    finally:
        StageRunner.load = real  # type: ignore[method-assign]


def updated(args: Namespace, source: Path, arm: str) -> float:
    folder = Path(shutil.copytree(source, source.with_name(f"{source.name}-{arm}")))
    settings: Mapping[str, object] = {"train.steps": args.before + args.after, "exchange.replicas": ARMS[arm]}
    with fresh_moments() if arm == "fresh" else nullcontext():
        planaria.train(folder, resume=True, settings=settings, progress=False)
    return list(read_run(folder).validated)[-1].val_loss


@benchmark(
    "moments",
    seeds=[1, 2, 3],
    before=Flag(150, "steps of the four"),
    after=Flag(20, "steps until the validation"),
    every=Flag(10, "steps between rounds"),
    dim=64,
    samples=Flag(8, "of a replica's step"),
    lr=3e-3,
)
def run_moments(args: Namespace) -> Measurement:
    """Compare averaged with fresh moments when a run continues with fewer replicas.

    Four replicas with gossip train; then three use averaged or with fresh moments, and four undisturbed. A few
    steps later the averaged model is validated. Claim: with averaged moments the loss is at most 0.01 nats above that
    with fresh ones, with every seed.
    """
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="planaria-") as place:
        for seed in args.seeds:
            source = begin(args, seed, Path(place))
            for arm, losses in found.items():
                losses.append(updated(args, source, arm))
            print(f"seed {seed}: " + ", ".join(f"{arm} {losses[-1]:.4f}" for arm, losses in found.items()), flush=True)
    rows = [
        Row("averaged − fresh, nats", gaps(found["averaged"], found["fresh"]), "", Claim(high=0.01), judged="worst")
    ]
    rows += [Row(f"{arm} ({count} replicas), nats", found[arm], "") for arm, count in ARMS.items()]
    return rows


SAMPLES = 6  # per step, divisible by 1, 2 and 3 replicas
MILLIONTH = 1e-6
NONE = Claim(high=0.0)
Losses = Mapping[int, float]
Atoms = Mapping[tuple[str, str], tuple[int | None, float, str]]
"""(parameter, kind of tensor) → clock, learning-rate scale, digest"""


class Shape(NamedTuple):
    stages: int
    replicas: int
    engine: str

    def __str__(self) -> str:
        return f"{self.stages}x{self.replicas} {self.engine}"

    @property
    def settings(self) -> dict[str, object]:
        return {
            "pipeline.stages": self.stages,
            "pipeline.microbatches": SAMPLES // self.replicas,
            "exchange.replicas": self.replicas,
            "engine": self.engine,
        }


SHAPES = [Shape(*given) for given in product((1, 2, 4, 7), (1, 2, 3), ("inline", "fleet"))]


class Unbroken(NamedTuple):
    """An uninterrupted run of one shape; its checkpoints are in ``folder``."""

    folder: Path
    losses: Losses


@dataclass(frozen=True)
class Pair:
    """One shape continued from another's state."""

    source: Shape
    target: Shape
    atoms: int
    loaded: int  # tensors that differ from the saved ones
    ended: int  # tensors that differ from the source's at the end
    apart: float  # largest relative difference of a loss from the source's
    control: float  # the same for the target's uninterrupted run
    wrong: int  # problems of the ledger

    @property
    def same(self) -> bool:
        return self.source.replicas == self.target.replicas


@benchmark(
    "recut",
    pairs=Flag(len(SHAPES), "of the ring, for a short look"),
    seed=Flag(34107, "of the ring"),
    before=Flag(10, "steps of the source"),
    after=Flag(50, "steps of the target"),
)
def run_recut(args: Namespace) -> Measurement:
    """Continue runs of {1, 2, 4, 7} stages x {1, 2, 3} replicas x {inline, fleet} in another of these shapes.

    ``--seed`` orders the 24 shapes in a ring; a pair leads from each to the next. All runs are real. The state saved by
    an uninterrupted run of each shape is loaded in the next shape, by that one's engine:

    - Saved again at once, weights, moments, clocks and learning-rate scales are equal byte for byte.
    - With as many replicas, all further losses and the final state equal the uninterrupted run's to the last bit; with
      others, gradients are summed in another order.

    Controls: the difference of two uninterrupted runs of both shapes (rounding), and that with fresh moments (a
    mistake). Replicas exchange gradients without clipping, so all shapes use the same samples per step.
    """
    ring = random.Random(args.seed).sample(SHAPES, len(SHAPES))
    chosen = list(zip(ring, ring[1:] + ring[:1], strict=True))[: args.pairs]
    with tempfile.TemporaryDirectory(prefix="planaria-") as place:
        unbroken = {}
        for shape in dict.fromkeys(shape for pair in chosen for shape in pair):
            run = planaria.train(recipe(args, shape, Path(place)), progress=False)
            unbroken[shape] = Unbroken(run.folder, losses(run.folder))
            print(f"unbroken {shape}: loss {unbroken[shape].losses[args.before + args.after - 1]:.6f}", flush=True)
        pairs = []
        for source, target in chosen:
            pairs.append(cross(args, source, target, unbroken))
            print(_summary_line(pairs[-1]), flush=True)
        first = chosen[0][0]
        anew = forgotten(args, first, unbroken[first])
    return Result(list(_rows(pairs, anew)), [_summary_line(pair) for pair in pairs])


def recipe(args: Namespace, shape: Shape, place: Path) -> RunConfig:
    """28 layers, divisible by 1, 2, 4 and 7 stages, with long time limits for many processes on few cores."""
    steps = args.before + args.after
    made = {
        "name": str(shape).replace(" ", "-"),
        "out": str(place),
        "model": {"vocab": 260, "dim": 8, "layers": 28, "heads": 2, "hidden": 16, "context": 16},
        "pipeline": {"microbatch_size": 1},
        "data": bytes_data(64, place).model_dump(),
        "optim": {"lr": 3e-3, "clip": 0.0},
        "train": {"steps": steps, "eval_every": 0},
        "fleet": {"spares": 0, "missed_heartbeats": 240, "timeout_s": 120.0},
        "checkpoint": {"every": args.before, "keep": steps},
        "observe": {"trackers": ""},
    }
    return planaria.configure(RunConfig.model_validate(made), settings=shape.settings)


def cross(args: Namespace, source: Shape, target: Shape, unbroken: Mapping[Shape, Unbroken]) -> Pair:
    """Load the source's state in the target's shape: once to save it at once, once to continue training."""
    was, last = unbroken[source], args.before + args.after
    saved = atoms(was.folder, args.before, source)
    with copied(was.folder) as folder:
        save_at_once(folder, args.before, target)
        loaded = differing(atoms(folder, args.before, target), saved)
    with copied(was.folder) as folder:
        recut_go_on(folder, args.before, target)
        return Pair(
            source,
            target,
            len(saved),
            loaded,
            differing(atoms(folder, last, target), atoms(was.folder, last, source)),
            apart(losses(folder), was.losses, args.before),
            apart(unbroken[target].losses, was.losses, args.before),
            len(prove_exactly_once(read_run(folder))),
        )


def recut_go_on(folder: Path, step: int, shape: Shape) -> None:
    planaria.train(folder, resume=True, checkpoint=_name(step), settings=shape.settings, progress=False)


def save_at_once(folder: Path, step: int, shape: Shape) -> None:
    """Load in that shape, save, and stop before the first step."""
    saved = folder / "checkpoints" / _name(step)
    before = saved.stat().st_ino
    there = resumption_of(folder, shape.settings, _name(step), lambda line: None)
    prepared = prepare(there.config, begins=False)
    with run_folders.lock_for_training(folder):
        run_folders.write_run_files(folder, there.config, prepared.dataset, prepared.trace)
        watch = RunObserver(folder, there.config.samples * there.config.model.context, NoProgress())
        try:
            train_prepared(prepared, folder, watch, replace(there.origin, durable_step=step - 1), lambda: True)
        finally:
            watch.close()
    if saved.stat().st_ino == before:
        raise RunStopped(f"{saved}: {shape} has not saved it anew")


def atoms(folder: Path, step: int, shape: Shape) -> Atoms:
    """Return all saved tensors of a run.

    :raises RunStopped: if the checkpoint has another shape.
    """
    saved = next(s for s in CheckpointStore(folder / "checkpoints").list() if s.folder.name == _name(step))
    cut = cut_of(saved.manifest)
    if (cut.stages, cut.replicas) != shape[:2]:
        raise RunStopped(f"{saved.folder}: of {cut.stages} stages and {cut.replicas} replicas, not of {shape}")
    return {
        (atom.name, kind): (atom.clock, atom.scale, hashlib.sha256(atom.read(kind).numpy().tobytes()).hexdigest())
        for atom in atoms_of_model(saved)
        for kind in atom.how
    }


def losses(folder: Path) -> Losses:
    return losses_by_step(read_run(folder))


def forgotten(args: Namespace, shape: Shape, was: Unbroken) -> float:
    with copied(was.folder) as folder, fresh_moments():
        recut_go_on(folder, args.before, shape._replace(engine="inline"))
        return apart(losses(folder), was.losses, args.before)


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-goes-on")))
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def apart(found: Losses, expected: Losses, first: int) -> float:
    """Return the largest relative difference of losses from a step on, or infinity for different steps."""
    if found.keys() != expected.keys():
        return math.inf
    return max(abs(found[step] - loss) / abs(loss) for step, loss in expected.items() if step >= first)


def differing(found: Atoms, expected: Atoms) -> int:
    return sum(found.get(at) != expected.get(at) for at in {*found, *expected})


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _rows(pairs: Sequence[Pair], forgotten: float) -> Iterator[Row]:
    tensors = f"0 of {pairs[0].atoms}"
    yield Row("tensors not as they were saved", [pair.loaded for pair in pairs], tensors, NONE, judged="worst")
    yield Row("what the ledger finds wrong", [pair.wrong for pair in pairs], "0", NONE, judged="worst")
    for same, engines in product((True, False), (True, False)):
        kind = [p for p in pairs if p.same == same and (p.source.engine == p.target.engine) == engines]
        if not kind:
            continue
        how = f"{'same' if same else 'other'} replicas, {'same' if engines else 'other'} engine"
        found, controls = ([x / MILLIONTH for x in xs] for xs in ([p.apart for p in kind], [p.control for p in kind]))
        columns = {
            "pairs": len(kind),
            "losses equal": sum(p.apart == 0 for p in kind),
            "unbroken, both": f"{max(controls):.3f}",
        }
        claim = NONE if same else Claim(high=1.0)
        yield Row(f"losses apart / 1e-6: {how}", found, "", claim, columns, "worst")
        if same:
            ends, count = [p.ended for p in kind], dict[str, Any](pairs=len(kind))
            yield Row(f"tensors apart at the end: {how}", ends, tensors, NONE, count, "worst")
    yield Row("losses apart / 1e-6: moments begun anew", [forgotten / MILLIONTH], "", Claim(low=100.0))


def _summary_line(pair: Pair) -> str:
    ends = f", {pair.ended} tensors at the end" if pair.same else ""
    return (
        f"{pair.source} -> {pair.target}: {pair.loaded} of {pair.atoms} tensors apart, losses {pair.apart:.2e}, "
        f"unbroken runs {pair.control:.2e}{ends}"
    )


if __name__ == "__main__":
    start(moments=run_moments, recut=run_recut)
