"""Checkpoints: speed and memory of saving and loading, saves in the background, memory of activations."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from benchmarks.fleet_run import bytes_data, finished
from benchmarks.harness import (
    RUNS,
    Claim,
    Flag,
    Measurement,
    Result,
    Row,
    benchmark,
    interleaved,
    ratios,
    run_config,
    start,
)
from benchmarks.processes import memory
from planaria.common.errors import UserError
from planaria.common.memory_pool import trim
from planaria.config.recipe import load
from planaria.config.schema import ModelConfig, RunConfig
from planaria.config.shipped import find
from planaria.control.facts import decisions as d
from planaria.control.log.run_record import RunRecord
from planaria.models import chunked_loss
from planaria.models.families import build_stage
from planaria.models.llama_stages import parameter_count
from planaria.models.optimizers.adamw import KEYS
from planaria.models.state import StageState
from planaria.runtime.checkpoint.loading import load_stage
from planaria.runtime.checkpoint.stage_file import write_stage
from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore, SealedCheckpoint, stage_name
from planaria.runtime.transport.wire import as_bytes

STEP = 1000
CHUNK = 16 << 20
FAST, LITTLE, NO_COPY = Claim(low=0.8), Claim(high=1.05), Claim(high=1.1)


def shaped(layers: int, dim: int, stages: int, vocab: int) -> RunConfig:
    model = {"layers": layers, "dim": dim, "heads": dim // 64, "hidden": dim * 11 // 4, "vocab": vocab, "context": 8}
    return RunConfig.model_validate({"engine": "inline", "model": model, "pipeline": {"stages": stages}})


def state(config: RunConfig, stage: int) -> StageState:
    """Return a random state in the shape of a trained stage."""
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
    """Append the peak memory of the block above the initial memory, in bytes."""
    gc.collect()
    trim()  # freed memory would hide allocations
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("self", "VmRSS")
    yield
    found.append(memory("self") - before)


def timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def seal(store_folder: Path, config: RunConfig, digests: dict[str, str]) -> SealedCheckpoint:
    stages = config.pipeline.stages
    manifest = CheckpointManifest(
        step=STEP, stages=list(range(stages + 1)), pipeline_stages=stages, digests=digests, model=config.model
    )
    return CheckpointStore(store_folder).seal(f"step-{STEP:08d}", manifest, 1)


def write_one(store_folder: Path, stage: int, held: StageState) -> dict[str, str]:
    written = write_stage(CheckpointStore(store_folder).unfinished(STEP), stage, STEP, held)
    return {stage_name(stage, 0, 1): written.sha256}


def write_plainly(path: Path, held: StageState) -> None:
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
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def small(place: Path, megabytes: int, repeats: int) -> list[Row]:
    layers = 12
    sized = ((12 * parameter_count(shaped(layers, dim, 4, 2048).model), dim) for dim in range(64, 8192, 64))
    dim = next(dim for size, dim in sized if size >= megabytes << 20)
    cuts = [shaped(layers, dim, stages, 2048) for stages in (4, 3)]
    return [saving(place, cuts[0], repeats), *loading(place / "ours" / f"step-{STEP:08d}", cuts, repeats)]


def saving(place: Path, config: RunConfig, repeats: int) -> Row:
    """Saving with digests and manifest over plain writes of the same bytes, and torch's time."""
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
        tree = {str(stage): {**one.weights, **_flat(one)} for stage, one in held.items()}
        dcp.save(tree, checkpoint_id=place / "torch", no_dist=True)  # type: ignore[attr-defined]

    sides = [lambda work=work: timed(work) for work in (save, plainly, torchs)]
    saved, plain, other = interleaved(sides, repeats)
    size = f"{sum(one.nbytes for one in held.values()) / 1e6:.0f} MB"
    columns = {"seconds": min(saved), "plainly": min(plain), "torch DCP": min(other)}
    what = f"{size}: saved with digests and manifest, over written plainly"
    return Row(what, ratios(saved, plain), "1", Claim(high=1.10), columns)


def loading(folder: Path, cuts: list[RunConfig], repeats: int) -> list[Row]:
    """Loading at the saved cut and at another, and the memory of one stage of the other."""

    def load(config: RunConfig) -> float:
        return timed(lambda: [load_stage(folder, config, stage) for stage in range(config.pipeline.stages + 1)])

    took: list[float] = []
    with peak(took):  # before others leave memory behind
        merged = load_stage(folder, cuts[1], 1)
    same, cut = interleaved([lambda config=config: load(config) for config in cuts], repeats)
    share = took[0] / (merged.nbytes + max(weight.nbytes for weight in merged.weights.values()))
    return [
        Row(
            "the same loaded at another cut, over its own",
            ratios(cut, same),
            "1",
            Claim(high=1.25),
            {"seconds": min(same)},
        ),
        Row("memory of a stage of that, over it and its largest tensor", [share], "1", LITTLE),
    ]


def _flat(one: StageState) -> dict[str, object]:
    return {f"{name}.{place}": moment for name, pair in one.moments.items() for place, moment in pair.items()}


def large(place: Path, layers: int, dim: int, vocab: int) -> list[Row]:
    """Write and read a large state stage by stage, alternating with plain disk access."""
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
            loaded.append(timed(lambda s=stage: load_stage(folder, config, s)))
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


@benchmark(
    "checkpoints",
    megabytes=256,
    repeats=7,
    layers=Flag(28, "of the large model, each a stage"),
    dim=2048,
    vocab=49152,
    place=Flag(None, "a folder on the disk to be measured, with room for twice the state", type=Path),
)
def run_checkpoints(args: Namespace) -> Measurement:
    """Measure checkpoints: digests, loading at another cut, speed and memory.

    A state of 256 MB is saved with manifest and digests, and the same bytes plainly with fsync; it is loaded at the
    same cut and at another. Then a state of a 1.5B model is written and read stage by stage against the disk's speed,
    uncached. Memory is the process's peak above its start. torch's distributed checkpoints are shown.
    """
    place = Path(tempfile.mkdtemp(prefix="planaria-", dir=args.place))
    try:
        rows = small(place, args.megabytes, args.repeats)
        shutil.rmtree(place)
        place.mkdir()
        rows += large(place, args.layers, args.dim, args.vocab)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return rows


SAVES_LITTLE = Claim(high=0.1)


class Arm:
    """Runs with one kind of save."""

    def __init__(self, args: Namespace, background: bool) -> None:
        self.config = recipe(args, background)
        self.waits: list[float] = []  # of each save but the last of a run, which is always in the foreground
        self.plain: list[float] = []  # steps without a concurrent write
        self.while_writing: list[float] = []

    def run(self) -> float:
        """Return the mean wait of one more run in seconds."""
        record = finished(self.config)
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
                (self.while_writing if writing else self.plain).append(t - began)
        return waits


def recipe(args: Namespace, background: bool) -> RunConfig:
    """Return the recipe smollm2 without its weights."""
    model = load(find("smollm2"), {}).model
    if args.layers < 6 or (args.layers - model.ends_layers) % 4:
        raise UserError(f"--layers {args.layers}: two at the ends and as many in each of four stages; give 6, 10, …")
    return run_config(
        f"saves-{'background' if background else 'foreground'}",
        out=str(args.out),
        model=model.model_copy(update={"layers": args.layers, "context": args.context}),
        pipeline={"stages": 4, "microbatches": 4, "microbatch_size": 1},
        optim={"lr": 1e-5},
        data=bytes_data(),
        train={"steps": args.every * (args.saves + 1), "eval_every": 0},
        recovery={"strategy": "checkpoint"},
        fleet={"spares": 0},
        checkpoint={"every": args.every, "keep": 1, "background": background},
    )


def compare(args: Namespace) -> Row:
    behind, before = Arm(args, True), Arm(args, False)
    short, long = interleaved([behind.run, before.run], args.repeats)
    size = 12 * parameter_count(before.config.model) / 1e9
    columns = {
        "background": f"{median(behind.waits):.3f} s, at most {max(behind.waits):.3f} s",
        "foreground": f"{median(before.waits):.2f} s",
        "a step": f"{median(behind.plain):.2f} s",
        "a step while writing": f"{median(behind.while_writing):.2f} s" if behind.while_writing else "none",
    }
    what = f"{size:.1f} GB at five workers: wait in the background / in the foreground"
    return Row(what, ratios(short, long), "memory / disk", SAVES_LITTLE, columns)


@benchmark(
    "saves",
    repeats=Flag(3, "runs of each kind"),
    saves=Flag(3, "of a run, in addition to the one at its end"),
    every=Flag(12, "steps between saves"),
    layers=Flag(30, "fewer take less room: 6 half a gigabyte"),
    context=Flag(16, "tokens of a sample; short steps make short runs"),
    out=Flag(RUNS, "a folder on the disk that is written to"),
)
def run_saves(args: Namespace) -> Measurement:
    """Measure the wait for a background checkpoint over that for a foreground one.

    The fleet trains a model of SmolLM2-135M's shapes with each kind of save in turns. A wait is from the order to save
    to the order of the next step. Claim: all waits of a run in the background, including the first, which touches fresh
    memory, take at most 1/10 of those in the foreground. The cost for concurrent steps is shown. A checkpoint is 1.6 GB
    (12 bytes per parameter); a run needs room for two (``--out``).
    """
    return Result([compare(args)], ["measured: mean wait of a run's saves in either way"])


WHOLE = 1 << 60
ALLOCATOR = "MALLOC_MMAP_THRESHOLD_"

Side = Callable[[], "list[Tensor]"]  # one microbatch; the gradients


def ends(tokens: int, dim: int, vocab: int) -> tuple[Side, Side]:
    """Return the loss with all logits at once and in chunks."""
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
    """Return a block stage's microbatch with kept and with recomputed activations."""
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
    """Compare memory, gradients and time of both sides."""
    used: list[float] = []
    for side in (after, before):  # memory freed by the larger one would hide the smaller one's
        side()
        with peak(used):
            found = side()
        kept = sum(gradient.nbytes for gradient in found)
        used[-1] -= kept  # the copy made here
        del found
    old, new = before(), after()
    apart = max(float((a - b).norm() / b.norm()) for a, b in zip(new, old, strict=True))
    slow, quick = interleaved([lambda: timed(before), lambda: timed(after)], repeats)
    columns = {"before, MB": round(used[1] / 1e6), "now, MB": round(used[0] / 1e6)}
    return [
        Row(f"{name}: peak memory over before", [used[0] / used[1]], "1", Claim(high=most), columns),
        Row(f"{name}: gradients, apart from before", [apart], "1", Claim(high=1e-6)),
        Row(f"{name}: seconds over before", ratios(quick, slow), "1", None, {"seconds": round(median(quick), 3)}),
    ]


@benchmark(
    "activations",
    tokens=Flag(4096, "of one microbatch"),
    dim=256,
    vocab=32768,
    layers=8,
    repeats=3,
)
def run_activations(args: Namespace) -> Measurement:
    """Measure the memory and time of chunked logits and recomputed activations.

    The ends of a model with a vocabulary of 32,768 and a block stage of eight layers run one microbatch forward and
    backward: peak memory, gradients and seconds, with and without. glibc's malloc keeps freed holes (0.49 for the
    layers by default), so the process is restarted with ``MALLOC_MMAP_THRESHOLD_`` = 256 KB, which returns large
    memory at once but costs time: 2.7 s instead of 1.7 for eight layers.
    """
    if ALLOCATOR not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.checkpoints", "activations", *sys.argv[1:]],
            os.environ | {ALLOCATOR: str(256 << 10)},
        )
    loss = measured("the ends' loss", *ends(args.tokens, args.dim, args.vocab), 0.35, args.repeats)
    stage = measured("a block stage", *block(args.layers, args.dim, args.tokens), 0.4, args.repeats)
    return [*loss, *stage]


if __name__ == "__main__":
    start(checkpoints=run_checkpoints, saves=run_saves, activations=run_activations)
