"""What do checkpoints cost: digests, another cut, memory?

A state of 256 MB is saved with its manifest and digests, and the same bytes are written plainly, with fsync; it is
loaded at the same cut and at another. Then a state shaped like a model of 1.5 billion parameters, stage by stage,
against the disk's own speed for the same bytes; what is read is not in the system's cache. Peaks of memory are the
process's, above what it had before. torch's distributed checkpoints of the same tensors stand beside, for comparison.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.common import Claim, Row, conclude, interleaved, parser, start

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.models.state import StageState
    from planaria.runtime.checkpoint.store import Saved

NAME = "checkpoints"
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
    flags = parser(NAME, __doc__)
    flags.add_argument("--megabytes", type=int, default=256)
    flags.add_argument("--repeats", type=int, default=7)
    flags.add_argument("--layers", type=int, default=28, help="of the large model, each a stage")
    flags.add_argument("--dim", type=int, default=2048)
    flags.add_argument("--vocab", type=int, default=49152)
    flags.add_argument("--place", type=Path, help="a folder on the disk to be measured, with room for twice the state")
    return flags.parse_args()


def main() -> int:
    given = arguments()
    place = Path(tempfile.mkdtemp(prefix="planaria-", dir=given.place))
    try:
        rows = small(place, given.megabytes, given.repeats)
        shutil.rmtree(place)
        place.mkdir()
        rows += large(place, given.layers, given.dim, given.vocab)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return conclude(NAME, given, rows)


if __name__ == "__main__":
    start(main)
