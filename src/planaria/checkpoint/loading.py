"""A model, or a replica of it, from a checkpoint. Of several replicas, the model is the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import torch
from torch import Tensor

from planaria.checkpoint import recut
from planaria.checkpoint.cut import Cut, holders, require_alike
from planaria.checkpoint.stage_file import HASHING, Contents, contents, read_stage, reading, require_stage, stage_file
from planaria.checkpoint.store import Manifest, Saved, read_manifest, replica_folder
from planaria.config import RunConfig
from planaria.errors import UserError
from planaria.exchange.consensus import consensus
from planaria.model.families import family
from planaria.model.stages import Llama, global_name
from planaria.model.state import StageState


def load_model(saved: Saved, stages: int = 1) -> Llama:
    """The model that a whole checkpoint holds, cut into so many block stages.

    :raises UserError: when stages are missing or damaged.
    """
    manifest = saved.manifest
    if not saved.whole:
        missing = sorted(set(range(manifest.pipeline_stages + 1)) - set(manifest.stages))
        raise UserError(f"{saved.folder}: stages {missing} are missing; resume the run, or choose a whole checkpoint")
    if not family(manifest.model).whole:
        raise UserError(
            f"{saved.folder}: its model.family = {manifest.model.family!r} cannot be made one model; read the "
            "stages' files, which are safetensors"
        )
    weights = {}
    for stage in manifest.stages:
        for name, tensor in _of_all(saved.folder, manifest, stage).weights.items():
            weights[global_name(manifest.model, manifest.pipeline_stages, stage, name)] = tensor
    model = Llama(manifest.model, stages, initialise=False)
    model.load_global_state(weights)
    return model


def stage_for(folder: Path, config: RunConfig, stage: int, replica: int = 0) -> StageState:
    """The stage of a replica of a run that goes on as ``config`` says, made of a checkpoint of any cut (``recut``).

    Read tensor by tensor: beside the state itself there is never more than one parameter's tensor of each replica.

    :raises UserError: when something is missing or damaged, or does not fit together.
    """
    manifest, wanted = read_manifest(folder), cut_for(config)
    copies = _copies_for(folder, manifest, wanted, stage)
    made = recut.plan(cut_of(manifest), wanted, stage, replica, copies)
    for held in made.files.values():
        if not held.digested:
            require_file(folder, held)
    return carry_out(made)


def carry_out(made: recut.StagePlan) -> StageState:
    """Read what a stage is made of, and make it."""
    with ExitStack() as opened:
        read = {path: opened.enter_context(reading(held)) for path, held in made.files.items()}

        def tensor(source: recut.Source) -> Tensor:
            return read[str(source.held.path)](source.key)

        def make(how: recut.Made) -> Tensor:
            return _of_rows(combined(how), how.rows) if how.rows else combined(how)

        def combined(how: recut.Made) -> Tensor:
            if how.how == "copy":
                return tensor(how.of[0])
            if how.how == "mean":
                return consensus([{"": tensor(source)} for source in how.of])[""]
            total = tensor(how.of[0]).clone()
            for source in how.of[1:]:
                total += tensor(source)
            return total / how.among

        weights = {name: make(how) for name, how in made.weights.items()}
        moments = {name: (make(first), make(second)) for name, (first, second) in made.moments.items()}
        outer = {name: make(how) for name, how in made.outer.items()}
        if outer or made.rounds is not None:
            outer["rounds"] = torch.tensor(0) if made.rounds is None else tensor(made.rounds)
        generators = {kind: tensor(source) for kind, source in made.generators.items()}
    clocks, scales = dict(made.clocks), dict(made.scales)
    return StageState(weights, moments, clocks, made.lr_scale, *made.norms, generators, outer, scales)


def _of_rows(tensor: Tensor, count: int) -> Tensor:
    """The first so many rows, and the mean of all in place of those that are missing. [rows, …] → [count, …]"""
    more = tensor.mean(0, keepdim=True).expand(max(0, count - len(tensor)), *tensor.shape[1:])
    return torch.cat([tensor[:count], more])


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


def _places(manifest: Manifest, stage: int) -> range:
    """The nodes of a stage that have a file in a folder of the checkpoint."""
    count = 1
    while stage_file(Path(), stage, count).name in manifest.digests:
        count += 1
    return range(count)


def check_stages(checkpoints: Path, load: Mapping[int, str], config: RunConfig) -> None:
    """Can a run begin from these checkpoints (stage → folder's name)? Nothing is kept in memory.

    :raises UserError: naming the first file that is missing, damaged or has changed, or does not fit the run.
    """
    found: dict[Path, tuple[Path, Contents]] = {}
    for stage, name in load.items():
        manifest = read_manifest(checkpoints / name)
        saved, wanted = cut_of(manifest), cut_for(config)
        require_alike(saved, wanted, str(checkpoints / name))
        copies = _copies_for(checkpoints / name, manifest, wanted, stage)
        for replica in range(config.exchange.replicas):
            for held in recut.plan(saved, wanted, stage, replica, copies).files.values():
                found[held.path] = checkpoints / name, held
    with ThreadPoolExecutor(HASHING) as beside:
        list(beside.map(lambda place: require_file(*place), found.values()))


def _copies_for(folder: Path, manifest: Manifest, wanted: Cut, stage: int) -> dict[int, recut.Copy]:
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
        found = contents(held, stage, place)
        if found.step != manifest.step:
            raise UserError(
                f"{found.path}: is of step {found.step}, not {manifest.step}: of another checkpoint; choose another"
            )
        return found

    there = {stage: _holding(folder, manifest, stage) for stage in stages}
    if manifest.replicas == 1:
        whole = {stage: look(folder, stage) for stage in stages}
        places = range(min(len(_places(manifest, stage)) for stage in stages))
        return {
            place: recut.Copy(whole, {s: look(folder, s, place) for s in stages} if place else whole)
            for place in places
        }
    numbers = [n for n in sorted(manifest.standings) if all(replica_folder(folder, n) in there[s] for s in stages)]
    found = {n: {stage: look(replica_folder(folder, n), stage) for stage in stages} for n in numbers}
    if not found:
        raise UserError(f"{folder}: no replica has all of the stages {list(stages)}; choose another checkpoint")
    return {n: recut.Copy(held, held) for n, held in found.items()}


def require_file(folder: Path, held: Contents) -> None:
    """Read a file; hold it against its digest in the manifest, and its tensors against theirs, where they have any."""
    sha256 = _digest(folder, read_manifest(folder), held.path.parent, held.stage, held.place)
    require_stage(held.path.parent, held.stage, sha256, held.place)


def _of_all(folder: Path, manifest: Manifest, stage: int) -> StageState:
    states = [
        read_stage(held, stage, _digest(folder, manifest, held, stage)) for held in _holding(folder, manifest, stage)
    ]
    if len(states) == 1 and manifest.replicas == 1:
        return states[0]
    mean = consensus([state.weights for state in states])
    return StageState(mean, lr_scale=states[0].lr_scale)


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
