"""A model, or a replica of it, from a checkpoint. Of several replicas, the model is the mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.config.schema import RunConfig
from planaria.exchange.consensus import consensus
from planaria.models.families import family
from planaria.models.one_array import Part, parts
from planaria.models.stages import Llama
from planaria.models.state import StageState
from planaria.runtime.checkpoint import recut
from planaria.runtime.checkpoint.cut import Cut, atom_name, declared, holders, require_alike
from planaria.runtime.checkpoint.holdings import copies_for, cut_for, cut_of, require_file
from planaria.runtime.checkpoint.stage_file import READING, Contents, reading, stage_file
from planaria.runtime.checkpoint.store import Saved, read_manifest


def load_model(saved: Saved, stages: int = 1) -> Llama:
    """The model that a whole checkpoint holds, cut into so many block stages.

    :raises UserError: when stages are missing or damaged.
    """
    weights = {atom.name: atom.read("weights") for atom in weights_of(saved)}
    model = Llama(saved.manifest.model.dense, stages, initialise=False)
    model.load_global_state(weights)
    return model


@dataclass(frozen=True)
class Atom:
    """A parameter with its moments, which stay in their files until :meth:`read`."""

    name: str
    shape: tuple[int, ...]
    clock: int | None
    """updates that its moments have seen; None: it has none yet"""
    scale: float
    """of its learning rate"""
    how: Mapping[str, recut.Made]
    """weights, exp_avg and exp_avg_sq, by kind"""

    def read(self, kind: str) -> Tensor:
        """fp32, of the atom's shape; of several replicas the mean. UserError when it is damaged."""
        with making({source.held.path: source.held for source in self.how[kind].of}.values()) as make:
            return make(self.how[kind])


def atoms_of(saved: Saved) -> list[Atom]:
    """The one model of a whole checkpoint, stage by stage, without reading any weights.

    :raises UserError: when stages are missing or damaged, or cannot be one model.
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
    one, found = Cut(manifest.model, manifest.pipeline_stages), list[Atom]()
    for stage in manifest.stages if not manifest.model.one_array else (0,):
        made = planned(saved.folder, one, stage, whole=True)
        for local, entry in declared(one, stage).items():
            tensors = (made.weights[local], *made.moments.get(local, ()))
            how = dict(zip(("weights", *recut.MOMENTS), tensors, strict=False))
            scale = made.scales.get(local, made.lr_scale)
            found.append(Atom(atom_name(one, stage, local), entry.shape, made.clocks.get(local), scale, how))
    return found


@dataclass(frozen=True)
class _Taken(Atom):
    """A weight that is cut from numbers which it shares; their moments are not its own."""

    source: Atom
    part: Part

    def read(self, kind: str) -> Tensor:
        assert kind == "weights", "moments belong to what is stored"
        return self.part.taken(self.source.read(kind)).contiguous()


def weights_of(saved: Saved) -> list[Atom]:
    """The same of a model whose weights all have numbers of their own: dense, whatever is stored.

    :raises UserError: as :func:`atoms_of`.
    """
    atoms, model = {atom.name: atom for atom in atoms_of(saved)}, saved.manifest.model
    if model.share == 1:
        return list(atoms.values())
    found = parts(model, [(atom.name, atom.shape) for atom in atoms.values()])
    own = ((name, part, atoms[part.of]) for name, part in found.items())
    return [_Taken(name, part.shape, None, atom.scale, {}, atom, part) for name, part, atom in own]


def stage_for(folder: Path, config: RunConfig, stage: int, replica: int = 0) -> StageState:
    """The stage of a replica of a run that goes on as ``config`` says, made of a checkpoint of any cut (``recut``).

    Read tensor by tensor: beside the state itself there is never more than one parameter's tensor of each replica.

    :raises UserError: when something is missing or damaged, or does not fit together.
    """
    return carry_out(planned(folder, cut_for(config), stage, replica))


def files_for(folder: Path, config: RunConfig, stage: int) -> list[str]:
    """The files, as the manifest names them, that a stage of a run that goes on as ``config`` says is made of.

    :raises UserError: when the manifest cannot be read, or its checkpoint does not fit the run.
    """
    manifest = read_manifest(folder)
    saved, wanted = cut_of(manifest), cut_for(config)
    require_alike(saved, wanted, str(folder))
    begins = tuple(f"{stage_file(Path(), held).stem}{end}" for held in holders(saved, wanted, stage) for end in ".-")
    return sorted(file for file in manifest.digests if Path(file).name.startswith(begins))


def planned(folder: Path, wanted: Cut, stage: int, replica: int = 0, whole: bool = False) -> recut.StagePlan:
    """What a stage of that cut is made of; UserError as in :func:`stage_for`.

    Files are held against their digests where their tensors have none, or where ``whole`` asks for it.
    """
    manifest = read_manifest(folder)
    copies = copies_for(folder, manifest, wanted, stage)
    made = recut.plan(cut_of(manifest), wanted, stage, replica, copies)
    for held in made.files.values():
        if whole or not held.digested:
            require_file(folder, held)
    return made


@contextmanager
def making(files: Iterable[Contents]) -> Iterator[Callable[[recut.Made], Tensor]]:
    """How tensors are made of those of these files, each held against its digest."""
    with ExitStack() as opened:
        one_by_one = Lock()
        read = {held.path: opened.enter_context(reading(held)) for held in files}

        def tensor(source: recut.Source) -> Tensor:
            return read[source.held.path](source.key)

        def make(how: recut.Made) -> Tensor:
            if how.how == "copy" and not how.rows:
                return tensor(how.of[0])
            with one_by_one:  # what it is made of takes memory beside it
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

        yield make


def carry_out(made: recut.StagePlan) -> StageState:
    """Read what a stage is made of, and make it: several tensors at once."""
    hows = dict(_hows(made))
    with making(made.files.values()) as make, ThreadPoolExecutor(READING) as beside:
        tensors = dict(zip(hows, beside.map(make, hows.values()), strict=True))

    def of(kind: str, names: Iterable[str]) -> dict[str, Tensor]:
        return {name: tensors[kind, name] for name in names}

    first, second = (of(kind, made.moments) for kind in recut.MOMENTS)
    moments = {name: (first[name], second[name]) for name in made.moments}
    outer = of("outer", made.outer)
    if outer or made.rounds is not None:
        outer["rounds"] = tensors.get(("rounds", ""), torch.tensor(0))
    generators = of("generators", made.generators)
    clocks, scales = dict(made.clocks), dict(made.scales)
    weights = of("weights", made.weights)
    return StageState(weights, moments, clocks, made.lr_scale, *made.norms, generators, outer, scales)


def _hows(made: recut.StagePlan) -> Iterator[tuple[tuple[str, str], recut.Made]]:
    """All tensors of a stage, by kind and name, and how each is made."""
    for name, how in made.weights.items():
        yield ("weights", name), how
    for name, pair in made.moments.items():
        for kind, how in zip(recut.MOMENTS, pair, strict=True):
            yield (kind, name), how
    for name, how in made.outer.items():
        yield ("outer", name), how
    if made.rounds is not None:
        yield ("rounds", ""), recut.Made("copy", (made.rounds,))
    for kind, source in made.generators.items():
        yield ("generators", kind), recut.Made("copy", (source,))


def _of_rows(tensor: Tensor, count: int) -> Tensor:
    """The first so many rows, and the mean of all in place of those that are missing. [rows, …] → [count, …]"""
    more = tensor.mean(0, keepdim=True).expand(max(0, count - len(tensor)), *tensor.shape[1:])
    return torch.cat([tensor[:count], more])


def check_stages(checkpoints: Path, load: Mapping[int, str], config: RunConfig) -> None:
    """Can a run begin from these checkpoints (stage → folder's name)? Nothing is kept in memory.

    :raises UserError: naming the first file that is missing, damaged or has changed, or does not fit the run.
    """
    found: dict[Path, tuple[Path, Contents]] = {}
    for stage, name in load.items():
        manifest = read_manifest(checkpoints / name)
        saved, wanted = cut_of(manifest), cut_for(config)
        require_alike(saved, wanted, str(checkpoints / name))
        copies = copies_for(checkpoints / name, manifest, wanted, stage)
        for replica in range(config.exchange.replicas):
            for held in recut.plan(saved, wanted, stage, replica, copies).files.values():
                found[held.path] = checkpoints / name, held
    for place, held in found.values():
        require_file(place, held)
