"""Loading a model, or a stage of it, from a checkpoint's folder. The model of several replicas is their mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor, nn

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.exchange.weight_message import consensus
from planaria.models.families import build_stage, make_family
from planaria.models.family import Pipelined
from planaria.models.llama_stages import Llama, require_llama
from planaria.models.one_array import StoredParameter, stored_parameters
from planaria.models.optimizers import make_optimizer
from planaria.models.state import StageState
from planaria.runtime.checkpoint import recut
from planaria.runtime.checkpoint.cut import RunCut, atom_name, declared_tensors, overlapping_stages, require_alike
from planaria.runtime.checkpoint.stage_file import (
    READ_THREADS,
    StageContents,
    checked_reader,
    read_contents,
    require_stage,
    stage_file,
)
from planaria.runtime.checkpoint.store import CheckpointManifest, SealedCheckpoint, read_manifest, replica_folder


def cut_of(manifest: CheckpointManifest) -> RunCut:
    return RunCut(manifest.model, manifest.pipeline_stages, replicas_in(manifest), manifest.exchange)


def cut_for(config: RunConfig) -> RunCut:
    return RunCut(config.model, config.pipeline.stages, config.exchange.replicas, config.exchange)


def replicas_in(manifest: CheckpointManifest) -> int:
    """Return the number of replicas; those that exchange gradients may be saved as one, with separate outer states."""
    if manifest.replicas == 1 and manifest.exchange is not None:
        return manifest.exchange.replicas
    return manifest.replicas if manifest.replicas > 1 else len(_saved_nodes(manifest, manifest.stages[0]))


def _saved_nodes(manifest: CheckpointManifest, stage: int) -> list[int]:
    """Return the nodes of a stage with a file in the checkpoint; lost nodes have none."""
    before = f"{stage_file(Path(), stage).stem}-at-"
    indices = [Path(file).stem.removeprefix(before) for file in manifest.digests if file.startswith(before)]
    return [0, *sorted(map(int, indices))]


def saved_copies(
    folder: Path, manifest: CheckpointManifest, wanted: RunCut, stage: int
) -> dict[int, recut.SavedReplica]:
    """Return what each replica saved of the stages that overlap a wanted stage."""
    saved = cut_of(manifest)
    stages = overlapping_stages(saved, wanted, stage)
    if missing := sorted(set(stages) - set(manifest.stages)):
        raise UserError(
            f"{folder}: stages {missing} are missing, and only a whole checkpoint can be re-cut; choose another "
            f"checkpoint, or resume with --pipeline.stages {saved.stages}"
        )
    return copies_of_stages(folder, manifest, stages)


def copies_of_stages(
    folder: Path, manifest: CheckpointManifest, stages: Sequence[int]
) -> dict[int, recut.SavedReplica]:
    """Return what each replica saved of these stages.

    :raises UserError: if a file cannot be read, or belongs to another checkpoint.
    """

    def look(held: Path, stage: int, index: int = 0) -> StageContents:
        _digest_in_manifest(folder, manifest, held, stage, index)
        return read_contents(held, stage, manifest.step, index)

    folders = {stage: _folders_of_stage(folder, manifest, stage) for stage in stages}
    if manifest.replicas == 1:
        whole = {stage: look(folder, stage) for stage in stages}
        indices = set.intersection(*({*_saved_nodes(manifest, stage)} for stage in stages))
        return {
            index: recut.SavedReplica(whole, {s: look(folder, s, index) for s in stages} if index else whole)
            for index in sorted(indices)
        }
    numbers = [n for n in sorted(manifest.positions) if all(replica_folder(folder, n) in folders[s] for s in stages)]
    contents_of = {n: {stage: look(replica_folder(folder, n), stage) for stage in stages} for n in numbers}
    if not contents_of:
        raise UserError(f"{folder}: no replica has all of the stages {list(stages)}; choose another checkpoint")
    return {n: recut.SavedReplica(held, held) for n, held in contents_of.items()}


def require_file(folder: Path, held: StageContents) -> None:
    """Read a file, and check it against the manifest's digest and its own."""
    sha256 = _digest_in_manifest(folder, read_manifest(folder), held.path.parent, held.stage, held.index)
    require_stage(held.path.parent, held.stage, held.label.step, sha256, held.index)


def _folders_of_stage(folder: Path, manifest: CheckpointManifest, stage: int) -> list[Path]:
    """Return the folders that hold a stage; if there is none, the checkpoint's: reading it reports the missing file."""
    if manifest.replicas == 1:
        return [folder]
    replica_folders = [replica_folder(folder, replica) for replica in sorted(manifest.positions)]
    holding = [
        held
        for held in replica_folders
        if stage_file(held, stage).exists()
        or stage_file(held, stage).relative_to(folder).as_posix() in manifest.digests
    ]
    return holding or [folder]


def _digest_in_manifest(folder: Path, manifest: CheckpointManifest, held: Path, stage: int, index: int = 0) -> str:
    """Return the manifest's digest of a stage's file; empty from an older planaria.

    :raises UserError: if the manifest has digests, but not of this file.
    """
    name = stage_file(held, stage, index).relative_to(folder).as_posix()
    if manifest.digests and name not in manifest.digests:
        raise UserError(f"{folder / name}: missing from its manifest.json; choose another checkpoint of this run")
    return manifest.digests.get(name, "")


def load_stages(saved: SealedCheckpoint) -> Pipelined:
    """Load all stages of a whole checkpoint, of any family whose parameters have names for all cuts.

    :raises UserError: if stages are missing or damaged, or the base model of adapters is missing.
    """
    cut = RunCut(saved.manifest.model.dense, saved.manifest.pipeline_stages)
    atoms, built = {atom.name: atom for atom in weights_of(saved)}, list[nn.Module]()
    for stage in range(cut.stages + 1):
        built.append(build_stage(cut.model, cut.stages, stage, 0, initialise=False).eval())
        with torch.no_grad():
            for local, parameter in built[-1].named_parameters():
                parameter.copy_(atoms[atom_name(cut, stage, local)].read("weights"))
    return Pipelined(built[0], built[1:])


def load_model(saved: SealedCheckpoint) -> Llama:
    """Load the LLaMA of a whole checkpoint as one block stage.

    :raises UserError: if stages are missing or damaged, or the model is of another family.
    """
    require_llama(saved.manifest.model, saved.folder)
    weights = {atom.name: atom.read("weights") for atom in weights_of(saved)}
    model = Llama(saved.manifest.model.dense, initialise=False)
    model.load_global_state(weights)
    return model


@dataclass(frozen=True)
class ParameterState:
    """A parameter with its moments, which stay in their files until :meth:`read`."""

    name: str
    shape: tuple[int, ...]
    clock: int | None
    """updates of its moments, or None without moments"""
    scale: float
    """learning-rate scale of the stage"""
    how: Mapping[str, recut.TensorOrigin]
    """origin of the weights and the optimizer's tensors, by kind"""

    def read(self, kind: str) -> Tensor:
        """Read a tensor in fp32, the mean of several replicas; UserError if it is damaged."""
        with tensor_maker({source.held.path: source.held for source in self.how[kind].tensors}.values()) as make:
            return make(self.how[kind])


def atoms_of_model(saved: SealedCheckpoint) -> list[ParameterState]:
    """Return the model of a whole checkpoint, stage by stage, without reading tensors.

    :raises UserError: if stages are missing or damaged, or cannot form a single model.
    """
    manifest = saved.manifest
    if not saved.whole:
        missing = sorted(set(range(manifest.pipeline_stages + 1)) - set(manifest.stages))
        raise UserError(f"{saved.folder}: stages {missing} are missing; resume the run, or choose a whole checkpoint")
    if not make_family(manifest.model).has_global_names:
        raise UserError(
            f"{saved.folder}: its model.family = {manifest.model.family!r} has no single model; read the "
            "stages' files, which are safetensors"
        )
    cut, atoms = RunCut(manifest.model, manifest.pipeline_stages), list[ParameterState]()
    for stage in manifest.stages if not manifest.model.one_array else (0,):
        plan = plan_stage(saved.folder, cut, stage, whole=True)
        for local, entry in declared_tensors(cut, stage).items():
            how = {"weights": plan.weights[local], **plan.moments.get(local, {})}
            scale = plan.scales.get(local, plan.lr_scale)
            atoms.append(ParameterState(atom_name(cut, stage, local), entry.shape, plan.clocks.get(local), scale, how))
    return atoms


@dataclass(frozen=True)
class _Taken(ParameterState):
    """A weight that follows from stored numbers; their moments are not its own."""

    source: ParameterState
    part: StoredParameter

    def read(self, kind: str) -> Tensor:
        assert kind == "weights", "moments belong to what is stored"
        return self.part.extract(self.source.read(kind)).contiguous()


def weights_of(saved: SealedCheckpoint) -> list[ParameterState]:
    """Return the weights of the equivalent model of whole matrices; UserError as :func:`atoms_of_model`."""
    atoms, model = {atom.name: atom for atom in atoms_of_model(saved)}, saved.manifest.model
    if not model.factored:
        return list(atoms.values())
    part_of = stored_parameters(model, [(atom.name, atom.shape) for atom in atoms.values()])
    taken = ((name, part, atoms[part.stored_name]) for name, part in part_of.items())
    return [_Taken(name, part.shape, None, atom.scale, {}, atom, part) for name, part, atom in taken]


def load_stage(folder: Path, config: RunConfig, stage: int, replica: int = 0) -> StageState:
    """Load a replica's stage of a run with this ``config`` from a checkpoint of any cut (``recut``).

    Besides the state, at most one parameter's tensors of all replicas are in memory.
    :raises UserError: if something is missing, damaged or inconsistent.
    """
    plan = plan_stage(folder, cut_for(config), stage, replica)
    _require_optimizer(plan, config, folder)
    return load_planned(plan)


def _require_optimizer(plan: recut.StagePlan, config: RunConfig, folder: Path) -> None:
    wanted = {*make_optimizer(config.optim).keys}
    for name, held in plan.moments.items():
        if held.keys() != wanted:
            raise UserError(
                f"{folder} has optimizer state {', '.join(sorted(held)) or 'none'} for {name}, and optim.kind = "
                f"{config.optim.kind!r} needs {', '.join(sorted(wanted))}; leave optim.kind as it was, or start a run "
                "with the weights: --train.start"
            )


def files_for(folder: Path, config: RunConfig, stage: int) -> list[str]:
    """Return the files, as the manifest names them, that a stage of a run with this ``config`` needs.

    :raises UserError: if the manifest cannot be read, or does not match the run.
    """
    manifest = read_manifest(folder)
    saved, wanted = cut_of(manifest), cut_for(config)
    require_alike(saved, wanted, str(folder))
    begins = tuple(
        f"{stage_file(Path(), held).stem}{end}" for held in overlapping_stages(saved, wanted, stage) for end in ".-"
    )
    return sorted(file for file in manifest.digests if Path(file).name.startswith(begins))


def plan_stage(folder: Path, wanted: RunCut, stage: int, replica: int = 0, whole: bool = False) -> recut.StagePlan:
    """Return the origin of a stage of that cut; UserError as in :func:`load_stage`.

    Checks digests of whole files if their tensors have none, or if ``whole`` is set.
    """
    manifest = read_manifest(folder)
    copies = saved_copies(folder, manifest, wanted, stage)
    plan = recut.plan(cut_of(manifest), wanted, stage, replica, copies)
    for held in plan.files.values():
        if whole or not held.digested:
            require_file(folder, held)
    return plan


@contextmanager
def tensor_maker(files: Iterable[StageContents]) -> Iterator[Callable[[recut.TensorOrigin], Tensor]]:
    """Yield a function that reads and combines tensors of these files, checked against their digests."""
    with ExitStack() as opened:
        one_by_one = Lock()
        read = {held.path: opened.enter_context(checked_reader(held)) for held in files}

        def tensor(source: recut.FileTensor) -> Tensor:
            return read[source.held.path](source.key)

        def make(how: recut.TensorOrigin) -> Tensor:
            if how.how == "copy" and not how.rows:
                return tensor(how.tensors[0])
            with one_by_one:  # limits memory for its sources
                return _resize_rows(combined(how), how.rows) if how.rows else combined(how)

        def combined(how: recut.TensorOrigin) -> Tensor:
            if how.how == "copy":
                return tensor(how.tensors[0])
            if how.how == "mean":
                return consensus([{"": tensor(source)} for source in how.tensors])[""]
            total = tensor(how.tensors[0]).clone()
            for source in how.tensors[1:]:
                total += tensor(source)
            return total / how.among

        yield make


def load_planned(plan: recut.StagePlan) -> StageState:
    """Read and combine the tensors of a stage, several in parallel."""
    hows = plan.origins
    with tensor_maker(plan.files.values()) as make, ThreadPoolExecutor(READ_THREADS) as threads:
        tensors = dict(zip(hows, threads.map(make, hows.values()), strict=True))

    def of(kind: str, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: tensors[kind, name] for name in names}

    moments = {name: {key: tensors[key, name] for key in held} for name, held in plan.moments.items()}
    outer = of("outer", plan.outer)
    if outer or plan.rounds is not None:
        outer["rounds"] = tensors.get(("rounds", ""), torch.tensor(0))
    generators = of("generators", plan.generators)
    clocks, scales = dict(plan.clocks), dict(plan.scales)
    weights = of("weights", plan.weights)
    return StageState(weights, moments, clocks, plan.lr_scale, *plan.norms, generators, outer, scales)


def _resize_rows(tensor: Tensor, count: int) -> Tensor:
    """Return the first ``count`` rows, with the mean of all for missing ones. [rows, …] → [count, …]"""
    more = tensor.mean(0, keepdim=True).expand(max(0, count - len(tensor)), *tensor.shape[1:])
    return torch.cat([tensor[:count], more])


def check_stages(checkpoints: Path, load: Mapping[int, str], config: RunConfig) -> None:
    """Check that a run can start from these checkpoints (stage → folder's name), keeping nothing in memory.

    :raises UserError: for the first file that is missing, damaged, changed, or does not match the run.
    """
    files: dict[Path, tuple[Path, StageContents]] = {}
    for stage, name in load.items():
        manifest = read_manifest(checkpoints / name)
        saved, wanted = cut_of(manifest), cut_for(config)
        require_alike(saved, wanted, str(checkpoints / name))
        copies = saved_copies(checkpoints / name, manifest, wanted, stage)
        for replica in range(config.exchange.replicas):
            plan = recut.plan(saved, wanted, stage, replica, copies)
            _require_optimizer(plan, config, checkpoints / name)
            for held in plan.files.values():
                files[held.path] = checkpoints / name, held
    for path, held in files.values():
        require_file(path, held)
