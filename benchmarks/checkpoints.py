"""Checkpoints: speed and memory of saving and loading, saves in the background, memory of activations."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from benchmarks.common import RUNS, Claim, Row, conclude, interleaved, parser, start
from benchmarks.fleet_run import bytes_data, require_finished, run_fleet
from planaria.common.errors import UserError
from planaria.config.schema import (
    CheckpointConfig,
    FleetConfig,
    OptimConfig,
    PipelineConfig,
    RecoveryConfig,
    RunConfig,
    TrainConfig,
)
from planaria.control import decisions as d

if TYPE_CHECKING:
    from torch import Tensor

    from planaria.config.schema import RunConfig
    from planaria.control.run_record import RunRecord
    from planaria.models.state import StageState
    from planaria.runtime.checkpoint.store import Saved


CHECKPOINTS_NAME = "checkpoints"
STEP = 1000
CHUNK = 16 << 20
FAST, LITTLE, NO_COPY = Claim(low=0.8), Claim(high=1.05), Claim(high=1.1)


def shaped(layers: int, dim: int, stages: int, vocab: int) -> RunConfig:
    """A recipe whose model has this shape."""
    from planaria.config.schema import RunConfig

    model = {"layers": layers, "dim": dim, "heads": dim // 64, "hidden": dim * 11 // 4, "vocab": vocab, "context": 8}
    return RunConfig.model_validate({"engine": "inline", "model": model, "pipeline": {"stages": stages}})


def state(config: RunConfig, stage: int) -> StageState:
    """Random numbers in the shape of a trained stage."""
    import torch

    from planaria.models.families import build_stage
    from planaria.models.optimizers.adamw import KEYS
    from planaria.models.state import StageState

    built = build_stage(config.model, config.pipeline.stages, stage, 0, "meta")
    draw = torch.Generator().manual_seed(stage)
    made = {
        name: [torch.empty(p.shape).uniform_(-1, 1, generator=draw) for _ in range(3)]
        for name, p in built.named_parameters()
    }
    moments = {
        name: dict(zip(KEYS, (first, second.square_()), strict=True)) for name, (_, first, second) in made.items()
    }
    return StageState({name: weight for name, (weight, _, _) in made.items()}, moments, dict.fromkeys(made, STEP))


@contextmanager
def peak(found: list[float]) -> Iterator[None]:
    """Adds the bytes that the process took at most, above what it had."""
    from planaria.common.memory_pool import trim

    gc.collect()
    trim()  # what was given back would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    yield
    found.append(_memory("VmHWM") - before)


def _memory(field: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


def timed(work: Callable[[], object]) -> float:
    """Seconds."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def seal(store_folder: Path, config: RunConfig, digests: dict[str, str]) -> Saved:
    from planaria.runtime.checkpoint.store import CheckpointStore, Manifest

    stages = config.pipeline.stages
    manifest = Manifest(
        step=STEP, stages=list(range(stages + 1)), pipeline_stages=stages, digests=digests, model=config.model
    )
    return CheckpointStore(store_folder).seal(f"step-{STEP:08d}", manifest, 1)


def write_one(store_folder: Path, stage: int, held: StageState) -> dict[str, str]:
    from planaria.runtime.checkpoint.stage_file import write_stage
    from planaria.runtime.checkpoint.store import CheckpointStore, stage_name

    written = write_stage(CheckpointStore(store_folder).unfinished(STEP), stage, STEP, held)
    return {stage_name(stage, 0, 1): written.sha256}


def write_plainly(path: Path, held: StageState) -> None:
    """The same tensors' bytes, and fsync."""
    from planaria.runtime.transport.wire import as_bytes

    pairs = [tensor for pair in held.moments.values() for tensor in pair.values()]
    with path.open("wb") as file:
        for tensor in (*held.weights.values(), *pairs):
            file.write(as_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())


def read_plainly(path: Path) -> None:
    buffer = bytearray(CHUNK)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def forget(paths: list[Path]) -> None:
    """Take files out of the system's cache."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def small(place: Path, megabytes: int, repeats: int) -> list[Row]:
    """Ratios, repeat by repeat, of a state of so many megabytes at four stages."""
    from planaria.models.stages import parameter_count

    layers = 12
    sized = ((12 * parameter_count(shaped(layers, dim, 4, 2048).model), dim) for dim in range(64, 8192, 64))
    dim = next(dim for size, dim in sized if size >= megabytes << 20)
    cuts = [shaped(layers, dim, stages, 2048) for stages in (4, 3)]
    return [saving(place, cuts[0], repeats), *loading(place / "ours" / f"step-{STEP:08d}", cuts, repeats)]


def saving(place: Path, config: RunConfig, repeats: int) -> Row:
    """With digests and manifest, over the same bytes written plainly; torch's way beside."""
    held = {stage: state(config, stage) for stage in range(config.pipeline.stages + 1)}

    def save() -> None:
        digests: dict[str, str] = {}
        for stage, one in held.items():
            digests |= write_one(place / "ours", stage, one)
        seal(place / "ours", config, digests)

    def plainly() -> None:
        (place / "plain").mkdir(exist_ok=True)
        for stage, one in held.items():
            write_plainly(place / "plain" / str(stage), one)

    def torchs() -> None:
        import torch.distributed.checkpoint as dcp

        tree = {str(stage): {**one.weights, **_flat(one)} for stage, one in held.items()}
        dcp.save(tree, checkpoint_id=place / "torch", no_dist=True)  # type: ignore[attr-defined]

    sides = [lambda work=work: timed(work) for work in (save, plainly, torchs)]
    saved, plain, other = interleaved(sides, repeats)
    size = f"{sum(one.nbytes for one in held.values()) / 1e6:.0f} MB"
    beside = {"seconds": min(saved), "plainly": min(plain), "torch DCP": min(other)}
    over = [a / b for a, b in zip(saved, plain, strict=True)]
    return Row(f"{size}: saved with digests and manifest, over written plainly", over, "1", Claim(high=1.10), beside)


def loading(folder: Path, cuts: list[RunConfig], repeats: int) -> list[Row]:
    """At the cut that was saved and at another, and the memory that one stage of the other takes."""
    from planaria.runtime.checkpoint.loading import stage_for

    def load(config: RunConfig) -> float:
        return timed(lambda: [stage_for(folder, config, stage) for stage in range(config.pipeline.stages + 1)])

    took: list[float] = []
    with peak(took):  # before others leave memory behind
        merged = stage_for(folder, cuts[1], 1)
    same, cut = interleaved([lambda config=config: load(config) for config in cuts], repeats)
    share = took[0] / (merged.nbytes + max(weight.nbytes for weight in merged.weights.values()))
    over = [a / b for a, b in zip(cut, same, strict=True)]
    return [
        Row("the same loaded at another cut, over its own", over, "1", Claim(high=1.25), {"seconds": min(same)}),
        Row("memory of a stage of that, over it and its largest tensor", [share], "1", LITTLE),
    ]


def _flat(one: StageState) -> dict[str, object]:
    return {f"{name}.{place}": moment for name, pair in one.moments.items() for place, moment in pair.items()}


def large(place: Path, layers: int, dim: int, vocab: int) -> list[Row]:
    """A state that never is in memory as a whole, written and read stage by stage; the disk's own speed in turns."""
    from planaria.models.stages import parameter_count
    from planaria.runtime.checkpoint.loading import stage_for

    config, digests = shaped(layers, dim, layers, vocab), dict[str, str]()
    saved, plain, loaded, read, sizes = ([] for _ in range(5))
    writing, loading = list[float](), list[float]()
    (place / "plain").mkdir(exist_ok=True)
    for stage in range(layers + 1):
        held = state(config, stage)
        sizes.append(held.nbytes)
        if stage % 2:
            plain.append(timed(lambda h=held, s=stage: write_plainly(place / "plain" / str(s), h)))
        with peak(writing):
            saved.append(timed(lambda h=held, s=stage: digests.update(write_one(place / "ours", s, h))))
        if not stage % 2:
            plain.append(timed(lambda h=held, s=stage: write_plainly(place / "plain" / str(s), h)))
        del held
    folder = seal(place / "ours", config, digests).folder
    for stage in range(layers + 1):
        ours, theirs = folder / f"stage-{stage:04d}.safetensors", place / "plain" / str(stage)
        forget([ours, theirs])
        with peak(loading):
            loaded.append(timed(lambda s=stage: stage_for(folder, config, s)))
        read.append(timed(lambda t=theirs: read_plainly(t)))
    largest, every = max(sizes), sum(sizes)
    name = f"{parameter_count(config.model) / 1e9:.2f}B parameters, {every / 1e9:.1f} GB"
    disk = [{"disk MB/s": round(every / 1e6 / sum(each))} for each in (plain, read)]
    used = {"largest stage, MB": round(largest / 1e6)}
    return [
        Row(f"{name}: saved, of the disk's speed", [sum(plain) / sum(saved)], "1", FAST, disk[0]),
        Row(f"{name}: loaded, of the disk's speed", [sum(read) / sum(loaded)], "1", FAST, disk[1]),
        Row("memory of saving it, over the largest stage", [1 + max(writing) / largest], "1", NO_COPY, used),
        Row("memory of loading it, over the largest stage", [max(loading) / largest], "1", NO_COPY, used),
    ]


def arguments() -> argparse.Namespace:
    flags = parser(CHECKPOINTS_NAME, run_checkpoints.__doc__)
    flags.add_argument("--megabytes", type=int, default=256)
    flags.add_argument("--repeats", type=int, default=7)
    flags.add_argument("--layers", type=int, default=28, help="of the large model, each a stage")
    flags.add_argument("--dim", type=int, default=2048)
    flags.add_argument("--vocab", type=int, default=49152)
    flags.add_argument("--place", type=Path, help="a folder on the disk to be measured, with room for twice the state")
    return flags.parse_args()


def run_checkpoints() -> int:
    """What do checkpoints cost: digests, another cut, memory?

    A state of 256 MB is saved with its manifest and digests, and the same bytes are written plainly, with fsync; it is
    loaded at the same cut and at another. Then a state shaped like a model of 1.5 billion parameters, stage by stage,
    against the disk's own speed for the same bytes; what is read is not in the system's cache. Peaks of memory are the
    process's, above what it had before. torch's distributed checkpoints of the same tensors stand beside, for
    comparison.
    """
    given = arguments()
    place = Path(tempfile.mkdtemp(prefix="planaria-", dir=given.place))
    try:
        rows = small(place, given.megabytes, given.repeats)
        shutil.rmtree(place)
        place.mkdir()
        rows += large(place, given.layers, given.dim, given.vocab)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return conclude(CHECKPOINTS_NAME, given, rows)


SAVES_NAME = "saves"
SAVES_LITTLE = Claim(high=0.1)


class Arm:
    """Runs with one kind of save, and what their logs say."""

    def __init__(self, given: argparse.Namespace, background: bool) -> None:
        self.config = recipe(given, background)
        self.waits: list[float] = []
        """of each save but the last of a run, which always is waited for"""
        self.plain: list[float] = []
        """steps beside which nothing is written"""
        self.beside: list[float] = []

    def run(self) -> float:
        """The mean wait of one more run; seconds."""
        record = run_fleet(self.config)
        require_finished(record)
        waits = self._read(record)
        shutil.rmtree(record.folder)
        self.waits += waits
        return fmean(waits)

    def _read(self, record: RunRecord) -> list[float]:
        waits, ordered, began, writing = [], None, 0.0, False
        for t, fact in record.history:
            if isinstance(fact, d.Save):
                ordered, writing = t, True
            elif isinstance(fact, d.Seal):
                writing = False
            elif isinstance(fact, d.RunStep):
                waits += [] if ordered is None else [t - ordered]
                ordered, began = None, t
            elif isinstance(fact, d.Commit):
                (self.beside if writing else self.plain).append(t - began)
        return waits


def recipe(given: argparse.Namespace, background: bool) -> RunConfig:
    """The recipe smollm2 without its weights."""
    from planaria.config.recipe import load
    from planaria.config.shipped import find

    model = load(find("smollm2"), {}).model
    if given.layers < 6 or (given.layers - model.ends_layers) % 4:
        raise UserError(f"--layers {given.layers}: two at the ends and as many in each of four stages; give 6, 10, …")
    return RunConfig(
        name=f"{SAVES_NAME}-{'background' if background else 'foreground'}",
        out=str(given.out),
        model=model.model_copy(update={"layers": given.layers, "context": given.context}),
        pipeline=PipelineConfig(stages=4, microbatches=4, microbatch_size=1),
        optim=OptimConfig(lr=1e-5),
        data=bytes_data(),
        train=TrainConfig(steps=given.every * (given.saves + 1), eval_every=0),
        recovery=RecoveryConfig(strategy="checkpoint"),
        fleet=FleetConfig(spares=0),
        checkpoint=CheckpointConfig(every=given.every, keep=1, background=background),
    )


def compare(given: argparse.Namespace) -> Row:
    from planaria.models.stages import parameter_count

    behind, before = Arm(given, True), Arm(given, False)
    short, long = interleaved([behind.run, before.run], given.repeats)
    size = 12 * parameter_count(before.config.model) / 1e9
    beside = {
        "background": f"{median(behind.waits):.3f} s, at most {max(behind.waits):.3f} s",
        "foreground": f"{median(before.waits):.2f} s",
        "a step": f"{median(behind.plain):.2f} s",
        "beside writing": f"{median(behind.beside):.2f} s" if behind.beside else "none",
    }
    ratios = [a / b for a, b in zip(short, long, strict=True)]
    what = f"{size:.1f} GB at five workers: wait in the background / in the foreground"
    return Row(what, ratios, "memory / disk", SAVES_LITTLE, beside)


def run_saves() -> int:
    """How long does training wait for a checkpoint that is written in the background, over one that it waits for?

    The fleet trains a model of SmolLM2-135M's shapes, from random weights, once with each kind of save in turns. A wait
    is from the order to save to the order of the next step, as the run's log has it. The claim: all waits of a run in
    the background, the first included, which copies to memory that was never touched, take at most 1/10 of as many in
    the foreground. What the writing costs the steps beside it is shown.

    A checkpoint has 12 bytes a parameter, 1.6 GB; a run needs room for two of them (``--out``).
    """
    flags = parser(SAVES_NAME, run_saves.__doc__)
    flags.add_argument("--repeats", type=int, default=3, help="runs of each kind")
    flags.add_argument("--saves", type=int, default=3, help="of a run, beside the one at its end")
    flags.add_argument("--every", type=int, default=12, help="steps between saves")
    flags.add_argument("--layers", type=int, default=30, help="fewer take less room: 6 half a gigabyte")
    flags.add_argument("--context", type=int, default=16, help="tokens of a sample; short steps make short runs")
    flags.add_argument("--out", type=Path, default=RUNS, help="a folder on the disk that is written to")
    given = flags.parse_args()
    return conclude(SAVES_NAME, given, [compare(given)], ["measured: mean wait of a run's saves in either way"])


ACTIVATIONS_NAME = "activations"
WHOLE = 1 << 60
ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"

Side = Callable[[], "list[Tensor]"]
"""one microbatch; the gradients"""


def ends(tokens: int, dim: int, vocab: int) -> tuple[Side, Side]:
    """The loss of so many tokens, with all logits at once and in chunks."""
    import torch

    from planaria.config.schema import ModelConfig
    from planaria.models import chunked_loss
    from planaria.models.families import build_stage

    model = ModelConfig(vocab=vocab, dim=dim, layers=1, heads=dim // 64, context=tokens // 8, tied=False)
    module: Any = build_stage(model, 1, 0, 1)
    draw = torch.Generator().manual_seed(1)
    given = torch.randn(8, tokens // 8, dim, generator=draw)
    targets = torch.randint(vocab, (8, tokens // 8), generator=draw)
    usual = chunked_loss.CPU_BYTES

    def side(chunk: int) -> list[Tensor]:
        chunked_loss.CPU_BYTES = chunk
        module.zero_grad()
        x = given.clone().requires_grad_()
        module.loss(x, targets).backward()
        return [x.grad, module.lm_head.weight.grad.clone()]

    return lambda: side(WHOLE), lambda: side(usual)


def block(layers: int, dim: int, tokens: int) -> tuple[Side, Side]:
    """A block stage's microbatch, with all activations kept and recomputed."""
    import torch

    from planaria.config.schema import ModelConfig
    from planaria.models.families import build_stage

    model = ModelConfig(vocab=64, dim=dim, layers=layers, heads=dim // 64, hidden=dim * 11 // 4, context=tokens // 8)
    module: Any = build_stage(model, 1, 1, 1)
    given = torch.randn(8, tokens // 8, dim, generator=torch.Generator().manual_seed(1))

    def side(recompute: bool) -> list[Tensor]:
        module.recompute = recompute
        module.zero_grad()
        x = given.clone().requires_grad_()
        module(x).square().mean().backward()
        return [x.grad, *(parameter.grad.clone() for parameter in module.parameters())]

    return lambda: side(False), lambda: side(True)


def measured(name: str, before: Side, after: Side, most: float, repeats: int) -> list[Row]:
    """Memory, gradients and time of the new way over the old one."""
    used: list[float] = []
    for side in (after, before):  # what the larger one gives back would hide what the smaller one takes
        side()
        with peak(used):
            found = side()
        kept = sum(gradient.nbytes for gradient in found)
        used[-1] -= kept  # a copy that is made here
        del found
    old, new = before(), after()
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(new, old, strict=True))
    slow, quick = interleaved([lambda: timed(before), lambda: timed(after)], repeats)
    ratios = [new_s / old_s for new_s, old_s in zip(quick, slow, strict=True)]
    beside = {"before, MB": round(used[1] / 1e6), "now, MB": round(used[0] / 1e6)}
    return [
        Row(f"{name}: peak memory over before", [used[0] / used[1]], "1", Claim(high=most), beside),
        Row(f"{name}: gradients, apart from before", [apart], "1", Claim(high=1e-6)),
        Row(f"{name}: seconds over before", ratios, "1", None, {"seconds": round(median(quick), 3)}),
    ]


def activations_arguments() -> argparse.Namespace:
    flags = parser(ACTIVATIONS_NAME, run_activations.__doc__)
    flags.add_argument("--tokens", type=int, default=4096, help="of one microbatch")
    flags.add_argument("--dim", type=int, default=256)
    flags.add_argument("--vocab", type=int, default=32768)
    flags.add_argument("--layers", type=int, default=8)
    flags.add_argument("--repeats", type=int, default=3)
    return flags.parse_args()


def run_activations() -> int:
    """What do chunks of logits and recomputed activations save, and what do they cost?

    The ends of a model with a vocabulary of 32,768, and a block stage of eight layers, each with one microbatch forward
    and backward: the process's peak above what it had before, with and without; the gradients of both ways; seconds in
    turns.

    glibc's malloc keeps the holes that freed activations leave, and its peak says little of what is in use: by default
    eight recomputed layers take 0.49 of the memory. So the process is started with ``MALLOC_MMAP_THRESHOLD_`` = 256 KB,
    by which large memory goes back at once. Workers can be started so too; touching fresh pages takes time, though: a
    microbatch of eight layers 2.7 s in place of 1.7.
    """
    given = activations_arguments()
    if ALLOCATOR not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.checkpoints", "activations", *sys.argv[1:]],
            os.environ | {ALLOCATOR: str(256 << 10)},
        )
    loss = measured("the ends' loss", *ends(given.tokens, given.dim, given.vocab), 0.35, given.repeats)
    stage = measured("a block stage", *block(given.layers, given.dim, given.tokens), 0.4, given.repeats)
    return conclude(ACTIVATIONS_NAME, given, [*loss, *stage])


if __name__ == "__main__":
    start(checkpoints=run_checkpoints, saves=run_saves, activations=run_activations)
