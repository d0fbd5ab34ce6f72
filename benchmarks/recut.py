"""Continue a run with other stages and replicas: state, losses and optimizer moments."""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common import Cell, Claim, Row, conclude, parser, start
from benchmarks.fleet_run import bytes_data

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig


MOMENTS_NAME = "moments"
ARMS = {"averaged": 3, "fresh": 3, "undisturbed": 4}
"""replicas that go on"""


def begin(given: argparse.Namespace, seed: int, place: Path) -> Path:
    """The run that all arms go on with; its folder."""
    import planaria
    from planaria.config.schema import RunConfig

    model = {"vocab": 260, "dim": given.dim, "layers": 4, "heads": 4, "hidden": given.dim * 11 // 4, "context": 64}
    made = {
        "name": f"seed-{seed}",
        "out": str(place),
        "engine": "inline",
        "seed": seed,
        "model": model,
        "pipeline": {"stages": 2, "microbatches": 1, "microbatch_size": given.samples},
        "data": {"tokenizer": "bytes"},
        "optim": {"lr": given.lr, "warmup": 20},
        "train": {"steps": given.before, "eval_every": given.before + given.after, "eval_microbatches": 16},
        "exchange": {"kind": "noloco", "replicas": ARMS["undisturbed"], "options": {"every": given.every}},
        "observe": {"trackers": ""},
    }
    planaria.train(RunConfig.model_validate(made), progress=False)
    return place / f"seed-{seed}"


@contextmanager
def fresh_moments() -> Iterator[None]:
    """Stages that are loaded begin without moments, as after an exchange of weights alone."""
    from planaria.runtime.engine.runner import StageRunner

    real = StageRunner.load

    def bare(self: StageRunner, state: Any) -> None:
        real(self, state.part(lambda name: True, moments=False))

    StageRunner.load = bare  # type: ignore[method-assign]
    try:
        yield
    finally:
        StageRunner.load = real  # type: ignore[method-assign]


def go_on(given: argparse.Namespace, source: Path, arm: str) -> float:
    """The validation loss of the one model, in nats."""
    import planaria
    from planaria.control.logs import read_run

    folder = Path(shutil.copytree(source, source.with_name(f"{source.name}-{arm}")))
    settings: Mapping[str, object] = {"train.steps": given.before + given.after, "exchange.replicas": ARMS[arm]}
    if arm == "fresh":
        with fresh_moments():
            planaria.train(folder, resume=True, settings=settings, progress=False)
    else:
        planaria.train(folder, resume=True, settings=settings, progress=False)
    return list(read_run(folder).validated)[-1].val_loss


def run_moments() -> int:
    """Do moments matter when a run goes on with another number of replicas?

    Four replicas that gossip learn for a while; then three go on, with the mean of the moments, or with fresh ones, and
    the four themselves, undisturbed. A few steps later each arm's one model is validated. The claim: with averaged
    moments the loss is at most 0.01 nats above that with fresh ones, in each of three seeds.
    """
    flags = parser(MOMENTS_NAME, run_moments.__doc__)
    flags.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    flags.add_argument("--before", type=int, default=150, help="steps of the four")
    flags.add_argument("--after", type=int, default=20, help="steps until the validation")
    flags.add_argument("--every", type=int, default=10, help="steps between rounds")
    flags.add_argument("--dim", type=int, default=64)
    flags.add_argument("--samples", type=int, default=8, help="of a replica's step")
    flags.add_argument("--lr", type=float, default=3e-3)
    given = flags.parse_args()
    found: dict[str, list[float]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory(prefix="planaria-") as place:
        for seed in given.seeds:
            source = begin(given, seed, Path(place))
            for arm, losses in found.items():
                losses.append(go_on(given, source, arm))
            print(f"seed {seed}: " + ", ".join(f"{arm} {losses[-1]:.4f}" for arm, losses in found.items()), flush=True)
    apart = [own - other for own, other in zip(found["averaged"], found["fresh"], strict=True)]
    rows = [Row("averaged − fresh, nats", apart, "", Claim(high=0.01), judged="worst")]
    rows += [Row(f"{arm} ({count} replicas), nats", found[arm], "") for arm, count in ARMS.items()]
    return conclude(MOMENTS_NAME, given, rows)


RECUT_NAME = "recut"
SAMPLES = 6
"""of a step, which 1, 2 and 3 replicas share"""
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


@dataclass(frozen=True)
class Unbroken:
    """A run of one shape from the first step to the last; its checkpoints are in ``folder``."""

    folder: Path
    losses: Losses


@dataclass(frozen=True)
class Pair:
    """What one shape made of another's state."""

    source: Shape
    target: Shape
    atoms: int
    loaded: int
    """tensors that were not what the source had saved"""
    ended: int
    """tensors that were not the source's at the end"""
    apart: float
    """largest relative difference of a loss from the source's"""
    control: float
    """the same of the target's unbroken run"""
    wrong: int
    """sentences of the ledger on samples that were not used once"""

    @property
    def same(self) -> bool:
        """Is the arithmetic the same?"""
        return self.source.replicas == self.target.replicas


def run_recut() -> int:
    """Runs of {1, 2, 4, 7} stages x {1, 2, 3} replicas x {inline, fleet} go on in each other's shape.

    The 24 shapes stand in a ring, drawn by ``--seed``; a pair leads from each to the next, so each is left once and
    come to once. All runs are real, those of the fleet with a process for every stage of every replica. Of each shape
    there is a run that is never broken. The state that it saves on its way is taken up at the next shape, by that one's
    engine:

    - Saved again before any step, it is what it was: weights, both moments, clocks and learning-rate scales, byte for
      byte.
    - With as many replicas as before, the losses of all steps that follow are those of the unbroken run, to the last
      bit, and so is the state at the end. With others, gradients are added up in another order; losses may differ by
      that.

    The controls: how far apart two unbroken runs are that have these two shapes, which is what rounding does; and how
    far apart it gets when moments begin anew, which is what a mistake would do. Replicas exchange gradients and nothing
    is clipped, so every shape takes the same samples in a step, and makes the same of them.
    """
    flags = parser(RECUT_NAME, run_recut.__doc__)
    flags.add_argument("--pairs", type=int, default=len(SHAPES), help="of the ring, for a short look")
    flags.add_argument("--seed", type=int, default=34107, help="of the ring")
    flags.add_argument("--before", type=int, default=10, help="steps of the source")
    flags.add_argument("--after", type=int, default=50, help="steps of the target")
    given = flags.parse_args()
    ring = random.Random(given.seed).sample(SHAPES, len(SHAPES))
    chosen = list(zip(ring, ring[1:] + ring[:1], strict=True))[: given.pairs]
    with tempfile.TemporaryDirectory(prefix="planaria-") as place:
        unbroken = {}
        for shape in dict.fromkeys(shape for pair in chosen for shape in pair):
            unbroken[shape] = train(given, shape, Path(place))
            print(f"unbroken {shape}: loss {unbroken[shape].losses[given.before + given.after - 1]:.6f}", flush=True)
        pairs = []
        for source, target in chosen:
            pairs.append(cross(given, source, target, unbroken))
            print(_told(pairs[-1]), flush=True)
        first = chosen[0][0]
        anew = forgotten(given, first, unbroken[first])
    return conclude(RECUT_NAME, given, list(_rows(pairs, anew)), [_told(pair) for pair in pairs])


def train(given: argparse.Namespace, shape: Shape, place: Path) -> Unbroken:
    import planaria

    run = planaria.train(recipe(given, shape, place), progress=False)
    return Unbroken(run.folder, losses(run.folder))


def recipe(given: argparse.Namespace, shape: Shape, place: Path) -> RunConfig:
    """28 layers, which 1, 2, 4 and 7 stages share. Time limits are wide: few cores have many processes."""
    import planaria
    from planaria.config.schema import RunConfig

    steps = given.before + given.after
    made = {
        "name": str(shape).replace(" ", "-"),
        "out": str(place),
        "model": {"vocab": 260, "dim": 8, "layers": 28, "heads": 2, "hidden": 16, "context": 16},
        "pipeline": {"microbatch_size": 1},
        "data": bytes_data(64, place).model_dump(),
        "optim": {"lr": 3e-3, "clip": 0.0},
        "train": {"steps": steps, "eval_every": 0},
        "fleet": {"spares": 0, "missed": 240, "timeout_s": 120.0},
        "checkpoint": {"every": given.before, "keep": steps},
        "observe": {"trackers": ""},
    }
    return planaria.configure(RunConfig.model_validate(made), settings=shape.settings)


def cross(given: argparse.Namespace, source: Shape, target: Shape, unbroken: Mapping[Shape, Unbroken]) -> Pair:
    """Take the source's state up at the target's shape: once to save it at once, and once to train on."""
    from planaria.control.logs import read_run
    from planaria.report.run.ledger import prove_exactly_once

    was, last = unbroken[source], given.before + given.after
    saved = atoms(was.folder, given.before, source)
    with copied(was.folder) as folder:
        save_at_once(folder, given.before, target)
        loaded = differing(atoms(folder, given.before, target), saved)
    with copied(was.folder) as folder:
        recut_go_on(folder, given.before, target)
        return Pair(
            source,
            target,
            len(saved),
            loaded,
            differing(atoms(folder, last, target), atoms(was.folder, last, source)),
            apart(losses(folder), was.losses, given.before),
            apart(unbroken[target].losses, was.losses, given.before),
            len(prove_exactly_once(read_run(folder))),
        )


def recut_go_on(folder: Path, step: int, shape: Shape) -> None:
    import planaria

    planaria.train(folder, resume=True, checkpoint=_name(step), settings=shape.settings, progress=False)


def save_at_once(folder: Path, step: int, shape: Shape) -> None:
    """Go on in that shape, and stop before the first step. What is loaded counts as unsaved, so it must be saved."""
    from planaria.common.errors import RunStopped
    from planaria.report.live.progress import Quiet
    from planaria.report.live.watch import Watch
    from planaria.runtime.engine import fleet, runs
    from planaria.runtime.engine.prepare import prepare
    from planaria.runtime.engine.resumption import take_up

    saved = folder / "checkpoints" / _name(step)
    before = saved.stat().st_ino
    there = take_up(folder, shape.settings, _name(step), lambda line: None)
    prepared = prepare(there.config, begins=False)
    with runs.held(folder):
        runs.keep(folder, there.config, prepared.dataset, prepared.trace)
        watch = Watch(folder, there.config.samples * there.config.model.context, Quiet())
        try:
            fleet.train(prepared, folder, watch, replace(there.origin, durable_step=step - 1), lambda: True)
        finally:
            watch.close()
    if saved.stat().st_ino == before:
        raise RunStopped(f"{saved}: {shape} has not saved it anew")


def atoms(folder: Path, step: int, shape: Shape) -> Atoms:
    """All that a run of that shape has saved of its one model; RunStopped when the checkpoint is of another shape."""
    from planaria.common.errors import RunStopped
    from planaria.runtime.checkpoint.loading import atoms_of, cut_of
    from planaria.runtime.checkpoint.store import CheckpointStore

    saved = next(s for s in CheckpointStore(folder / "checkpoints").list() if s.folder.name == _name(step))
    cut = cut_of(saved.manifest)
    if (cut.stages, cut.replicas) != shape[:2]:
        raise RunStopped(f"{saved.folder}: of {cut.stages} stages and {cut.replicas} replicas, not of {shape}")
    return {
        (atom.name, kind): (atom.clock, atom.scale, hashlib.sha256(atom.read(kind).numpy().tobytes()).hexdigest())
        for atom in atoms_of(saved)
        for kind in atom.how
    }


def losses(folder: Path) -> Losses:
    """By step; of a step that was done again, the last one."""
    from planaria.control.logs import read_run

    return {metric.step: metric.loss for metric in read_run(folder).trained}


def forgotten(given: argparse.Namespace, shape: Shape, was: Unbroken) -> float:
    """How far losses get apart when moments begin anew. Inline, where this process can leave them out."""
    with copied(was.folder) as folder, fresh_moments():
        recut_go_on(folder, given.before, shape._replace(engine="inline"))
        return apart(losses(folder), was.losses, given.before)


@contextmanager
def copied(folder: Path) -> Iterator[Path]:
    """A copy of a run that goes another way."""
    copy = Path(shutil.copytree(folder, folder.with_name(f"{folder.name}-goes-on")))
    try:
        yield copy
    finally:
        shutil.rmtree(copy)


def apart(found: Losses, expected: Losses, first: int) -> float:
    """Largest relative difference of two runs' losses from a step on; infinite where one has steps fewer."""
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
        beside: dict[str, Cell] = {
            "pairs": len(kind),
            "losses equal": sum(p.apart == 0 for p in kind),
            "unbroken, both": f"{max(controls):.3f}",
        }
        claim = NONE if same else Claim(high=1.0)
        yield Row(f"losses apart / 1e-6: {how}", found, "", claim, beside, "worst")
        if same:
            ends, count = [p.ended for p in kind], dict[str, Cell](pairs=len(kind))
            yield Row(f"tensors apart at the end: {how}", ends, tensors, NONE, count, "worst")
    yield Row("losses apart / 1e-6: moments begun anew", [forgotten / MILLIONTH], "", Claim(low=100.0))


def _told(pair: Pair) -> str:
    ends = f", {pair.ended} tensors at the end" if pair.same else ""
    return (
        f"{pair.source} -> {pair.target}: {pair.loaded} of {pair.atoms} tensors apart, losses {pair.apart:.2e}, "
        f"unbroken runs {pair.control:.2e}{ends}"
    )


if __name__ == "__main__":
    start(moments=run_moments, recut=run_recut)
