"""What a checkpoint's folder holds: how its run was cut, what each replica saved, and whether each file is right."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.runtime.checkpoint import recut
from planaria.runtime.checkpoint.cut import Cut, holders
from planaria.runtime.checkpoint.stage_file import Contents, contents, require_stage, stage_file
from planaria.runtime.checkpoint.store import Manifest, read_manifest, replica_folder


def cut_of(manifest: Manifest) -> Cut:
    """How the run of a checkpoint was spread."""
    return Cut(manifest.model, manifest.pipeline_stages, replicas_in(manifest), manifest.exchange)


def cut_for(config: RunConfig) -> Cut:
    """How a run is to be spread."""
    return Cut(config.model, config.pipeline.stages, config.exchange.replicas, config.exchange)


def replicas_in(manifest: Manifest) -> int:
    """Replicas that took part. Those that exchange gradients may be saved as one, with their outer states beside it."""
    if manifest.replicas == 1 and manifest.exchange is not None:
        return manifest.exchange.replicas
    return manifest.replicas if manifest.replicas > 1 else len(_places(manifest, manifest.stages[0]))


def _places(manifest: Manifest, stage: int) -> list[int]:
    """The nodes of a stage that have a file in the folder of the checkpoint; those that died before lack theirs."""
    before = f"{stage_file(Path(), stage).stem}-at-"
    others = [Path(file).stem.removeprefix(before) for file in manifest.digests if file.startswith(before)]
    return [0, *sorted(map(int, others))]


def copies_for(folder: Path, manifest: Manifest, wanted: Cut, stage: int) -> dict[int, recut.Copy]:
    """What each replica has saved of all that a wanted stage holds something of."""
    saved = cut_of(manifest)
    stages = holders(saved, wanted, stage)
    if missing := sorted(set(stages) - set(manifest.stages)):
        raise UserError(
            f"{folder}: stages {missing} are missing, and only a whole checkpoint can be re-cut; choose another "
            f"checkpoint, or go on with --pipeline.stages {saved.stages}"
        )
    return copies_of(folder, manifest, stages)


def copies_of(folder: Path, manifest: Manifest, stages: Sequence[int]) -> dict[int, recut.Copy]:
    """What each replica has saved of these stages.

    :raises UserError: when a file cannot be read, or is of another checkpoint.
    """

    def look(held: Path, stage: int, place: int = 0) -> Contents:
        _digest(folder, manifest, held, stage, place)
        return contents(held, stage, manifest.step, place)

    there = {stage: _holding(folder, manifest, stage) for stage in stages}
    if manifest.replicas == 1:
        whole = {stage: look(folder, stage) for stage in stages}
        places = set.intersection(*({*_places(manifest, stage)} for stage in stages))
        return {
            place: recut.Copy(whole, {s: look(folder, s, place) for s in stages} if place else whole)
            for place in sorted(places)
        }
    numbers = [n for n in sorted(manifest.standings) if all(replica_folder(folder, n) in there[s] for s in stages)]
    found = {n: {stage: look(replica_folder(folder, n), stage) for stage in stages} for n in numbers}
    if not found:
        raise UserError(f"{folder}: no replica has all of the stages {list(stages)}; choose another checkpoint")
    return {n: recut.Copy(held, held) for n, held in found.items()}


def require_file(folder: Path, held: Contents) -> None:
    """Read a file; hold it against its digest in the manifest, and its tensors against theirs, where they have any."""
    sha256 = _digest(folder, read_manifest(folder), held.path.parent, held.stage, held.place)
    require_stage(held.path.parent, held.stage, held.label.step, sha256, held.place)


def _holding(folder: Path, manifest: Manifest, stage: int) -> list[Path]:
    """The folders that hold a stage; one at least, or reading it says what is missing."""
    if manifest.replicas == 1:
        return [folder]
    own = [replica_folder(folder, replica) for replica in sorted(manifest.standings)]
    there = [
        held
        for held in own
        if stage_file(held, stage).exists()
        or stage_file(held, stage).relative_to(folder).as_posix() in manifest.digests
    ]
    return there or [folder]


def _digest(folder: Path, manifest: Manifest, held: Path, stage: int, place: int = 0) -> str:
    """What the manifest says of a stage's file; empty where an older planaria wrote it.

    :raises UserError: when the manifest knows of others, but not of this.
    """
    name = stage_file(held, stage, place).relative_to(folder).as_posix()
    if manifest.digests and name not in manifest.digests:
        raise UserError(f"{folder / name}: missing from its manifest.json; choose another checkpoint of this run")
    return manifest.digests.get(name, "")
