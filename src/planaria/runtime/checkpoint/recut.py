"""Conversion of a checkpoint's tensors to a run with another cut or other replicas. Pure.

A parameter with its moments, clock and learning-rate scale is an *atom*. Its name (``cut.atom_name``) is the same in
every cut, so stages are re-cut by name. :func:`copy_rules` combines the copies of several replicas, after the patterns
of Universal Checkpointing (arXiv 2406.18820): take one of equal copies, each its own, or their mean. Error feedback
counts in a mean over replicas, so with another number of replicas each starts with the mean.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from planaria.common.errors import UserError
from planaria.config.schema import ExchangeConfig
from planaria.exchange.base import SECANTS, Sharing
from planaria.exchange.registry import make_exchange
from planaria.models.packing import PackedTensor
from planaria.runtime.checkpoint.cut import RunCut, atom_name, declared_tensors
from planaria.runtime.checkpoint.stage_file import StageContents

FIX = "choose another checkpoint"


@dataclass(frozen=True)
class SavedReplica:
    """Files of some stages in one replica's checkpoint; its outer state may be in separate files."""

    stages: Mapping[int, StageContents]
    outer: Mapping[int, StageContents]


class FileTensor(NamedTuple):
    held: StageContents
    key: str


class TensorOrigin(NamedTuple):
    """The origin of a tensor: a copy, the mean of several, or their sum divided by ``among``."""

    how: Literal["copy", "mean", "sum"]
    tensors: tuple[FileTensor, ...]
    among: int = 1
    rows: int = 0
    """number of rows if the vocabulary's size differs; new rows are the mean of all saved ones"""


@dataclass(frozen=True)
class StagePlan:
    """The origin of a stage's state, by local names, as in ``StageState``; ``rounds`` belongs to its outer state."""

    weights: Mapping[str, TensorOrigin]
    moments: Mapping[str, Mapping[str, TensorOrigin]]
    clocks: Mapping[str, int]
    lr_scale: float
    scales: Mapping[str, float]
    norms: tuple[float | None, float | None]
    generators: Mapping[str, FileTensor] = field(default_factory=dict)
    outer: Mapping[str, TensorOrigin] = field(default_factory=dict)
    rounds: FileTensor | None = None

    @property
    def origins(self) -> dict[tuple[str, str], TensorOrigin]:
        """The origins of all tensors by kind and name."""
        single = {("generators", kind): source for kind, source in self.generators.items()}
        if self.rounds is not None:
            single["rounds", ""] = self.rounds
        return {
            **{("weights", name): origin for name, origin in self.weights.items()},
            **{(key, name): origin for name, held in self.moments.items() for key, origin in held.items()},
            **{("outer", name): origin for name, origin in self.outer.items()},
            **{at: TensorOrigin("copy", (source,)) for at, source in single.items()},
        }

    @property
    def files(self) -> dict[str, StageContents]:
        sources = (source for origin in self.origins.values() for source in origin.tensors)
        return {str(source.held.path): source.held for source in sources}


class ReplicaStarts(NamedTuple):
    """The state with which replicas start."""

    weights: Literal["own", "copy", "mean"]
    """and moments: each its own; any of equal copies; or the mean of all"""
    outer: Literal["own", "shared", "reset"]
    """each its own; the mean of shared parts and error feedback; or none"""


def copy_rules(saved: RunCut, wanted: RunCut, copies: int) -> ReplicaStarts:
    """Return the rules for ``copies`` of the weights.

    Replicas that must be equal cannot keep their own weights without an outer state that synchronises them.
    """
    same, lasting = saved.replicas == wanted.replicas, same_outer(saved.exchange, wanted.exchange)
    outer: Literal["own", "shared", "reset"] = "own" if same and lasting else "reset"
    if 1 in (saved.replicas, wanted.replicas):
        outer = "reset"
    elif not same and lasting and saved.exchange is not None:
        outer = "shared"
    if copies == 1:
        return ReplicaStarts("copy", outer)
    now = None if wanted.exchange is None else make_exchange(wanted.exchange)
    held_equal = now is None or now.interval == 0 or now.synchronised
    if same and (outer == "own" or not held_equal):
        return ReplicaStarts("own", outer)
    return ReplicaStarts("copy" if equal_copies(saved) else "mean", outer)


def same_outer(saved: ExchangeConfig | None, wanted: ExchangeConfig | None) -> bool:
    """Return whether the outer state has the same meaning in both; unknown exchanges were checked when they were
    written.
    """
    if saved is None or wanted is None:
        return True
    was, now = make_exchange(saved), make_exchange(wanted)
    return type(was) is type(now) and all(getattr(was, name) == getattr(now, name) for name in was.fixed_on_resume)


def equal_copies(saved: RunCut) -> bool:
    return saved.exchange is not None and make_exchange(saved.exchange).interval == 0


def require_whole(cut: RunCut, copies: Mapping[int, SavedReplica]) -> None:
    """Raise UserError for any saved parameter, as :func:`plan`."""
    indices = {number: _index(cut, copy.stages) for number, copy in copies.items()}
    for stage, held in ((s, held) for copy in copies.values() for s, held in copy.outer.items()):
        list(_outer_parts(cut, stage, held))
    if equal_copies(cut):
        _require_equal(indices)


def plan(saved: RunCut, wanted: RunCut, stage: int, replica: int, copies: Mapping[int, SavedReplica]) -> StagePlan:
    """Return the origin of ``stage`` of ``replica`` from the ``copies`` (by replica) of the stages that overlap it.

    :raises UserError: for the first parameter that is missing, unknown, of another shape or type, or differs between
        copies that must be equal; it names the file and what was expected.
    """
    indices = {number: _index(saved, copy.stages) for number, copy in copies.items()}
    rule = copy_rules(saved, wanted, len(copies))
    if rule.weights == "copy":
        _require_equal(indices)
    single_source = rule.weights == "copy" or (rule.weights == "own" and replica in copies)
    used = list(indices.values())
    if single_source:
        used = [indices[replica if replica in indices else min(indices)]]
    shapes = declared_tensors(wanted, stage)
    names = {local: atom_name(wanted, stage, local) for local in shapes}
    atoms = {local: [index[name] for index in used] for local, name in names.items()}
    clocks = {local: clock for local, of in atoms.items() if (clock := _one_clock(of)) is not None}
    scale, scales = _common_scale({local: _one_scale(of) for local, of in atoms.items()}, used)
    part = copies[replica if replica in copies else min(copies)].stages if single_source else {}
    whole = {a.name for s in part for a in _atoms(saved, s, part[s])} == set(names.values())
    single = next(iter(part.values())) if len(part) == 1 and whole else None
    return StagePlan(
        {local: _tensor_origin(of, "weights", shapes[local]) for local, of in atoms.items()},
        {local: _moment_origins(atoms[local], shapes[local]) for local in clocks},
        clocks,
        scale,
        scales,
        _total_norms(list(part.values())) if whole else (None, None),
        {kind: FileTensor(single, key) for kind, key in single.generators.items()} if single is not None else {},
        *_recut_outer(saved, wanted, stage, replica, copies, rule.outer),
    )


class _Atom(NamedTuple):
    name: str
    held: StageContents
    local: str

    @property
    def clock(self) -> int | None:
        return self.held.clocks.get(self.local)

    @property
    def scale(self) -> float:
        return self.held.scales.get(self.local, self.held.lr_scale)

    @property
    def digests(self) -> tuple[object, ...]:
        """The values that equal copies share."""
        keys = [f"{kind}.{self.local}" for kind in ("weights", *self.held.state)]
        return self.clock, self.scale, *(self.held.entries[key] for key in keys if key in self.held.entries)


def _atoms(cut: RunCut, stage: int, held: StageContents) -> Iterator[_Atom]:
    return (_Atom(atom_name(cut, stage, local), held, local) for local in held.names("weights"))


def _index(cut: RunCut, stages: Mapping[int, StageContents]) -> dict[str, _Atom]:
    """Return a copy's atoms by name, after checking them against the cut."""
    atoms: dict[str, _Atom] = {}
    for stage, held in stages.items():
        expected = declared_tensors(cut, stage)
        for local, entry in expected.items():
            _require(held, f"weights.{local}", entry, atom_name(cut, stage, local))
        for atom in _atoms(cut, stage, held):
            if atom.local not in expected:
                raise UserError(f"{held.path}: {atom.name} ({atom.local}) is not of this model; {FIX}")
            atoms[atom.name] = atom
            for kind in held.state:
                if atom.clock is not None:
                    _require(held, f"{kind}.{atom.local}", expected[atom.local], f"{kind} of {atom.name}")
    return atoms


def _require(held: StageContents, key: str, expected: PackedTensor, name: str) -> None:
    entry = held.entries.get(key)
    if entry is None:
        raise UserError(f"{held.path}: {name} is missing; it should be {expected}; {FIX}")
    if entry[:2] != expected[:2]:
        raise UserError(f"{held.path}: {name} is {entry}, not {expected}; {FIX}")


def _require_equal(indices: Mapping[int, Mapping[str, _Atom]]) -> None:
    """Require that copies declared equal are equal."""
    (first, first_atoms), *others = indices.items()
    for number, atoms in others:
        for name, atom in first_atoms.items():
            if atom.digests != atoms[name].digests:
                raise UserError(
                    f"{atoms[name].held.path}: {name} differs between replicas {first} and {number}, which agree on "
                    f"every step's gradient and must be equal; {FIX}"
                )


def _moment_origins(atoms: Sequence[_Atom], expected: PackedTensor) -> dict[str, TensorOrigin]:
    return {key: _tensor_origin(atoms, key, expected) for key in atoms[0].held.state}


def _tensor_origin(atoms: Sequence[_Atom], kind: str, expected: PackedTensor) -> TensorOrigin:
    sources = tuple(FileTensor(atom.held, f"{kind}.{atom.local}") for atom in atoms)
    return _fit_rows(TensorOrigin("copy" if len(sources) == 1 else "mean", sources), expected)


def _fit_rows(origin: TensorOrigin, expected: PackedTensor) -> TensorOrigin:
    """Set the number of rows if it differs; other differences are rejected elsewhere."""
    (held, key), shape = origin.tensors[0], expected.shape
    return origin if held.entries[key].shape == shape else origin._replace(rows=shape[0])


def _one_clock(atoms: Sequence[_Atom]) -> int | None:
    """Return the least clock, or None if the moments of an atom have not started."""
    clocks = [atom.clock for atom in atoms if atom.clock is not None]
    return min(clocks) if len(clocks) == len(atoms) else None


def _one_scale(atoms: Sequence[_Atom]) -> float:
    scales = {atom.scale for atom in atoms}
    return scales.pop() if len(scales) == 1 else math.fsum(atom.scale for atom in atoms) / len(atoms)


def _common_scale(each: Mapping[str, float], used: Sequence[Mapping[str, _Atom]]) -> tuple[float, dict[str, float]]:
    """Return the stage's learning-rate scale, and the scales of parameters with another one."""
    if not each:  # frozen ends
        return 1.0, {}
    before = {atom.held.lr_scale for index in used for atom in index.values()}
    most = before.pop() if len(before) == 1 else Counter(each[name] for name in sorted(each)).most_common(1)[0][0]
    return most, {name: scale for name, scale in each.items() if scale != most}


def _total_norms(stages: Sequence[StageContents]) -> tuple[float | None, float | None]:
    """Return the gradient norms of stages taken together: √Σ n²."""
    if len(stages) == 1:
        return stages[0].norms
    both = [[norm for held in stages if (norm := held.norms[index]) is not None] for index in (0, 1)]
    grad_norm, clipped_norm = (math.hypot(*norms) if len(norms) == len(stages) else None for norms in both)
    return grad_norm, clipped_norm


def _recut_outer(
    saved: RunCut, wanted: RunCut, stage: int, replica: int, copies: Mapping[int, SavedReplica], rule: str
) -> tuple[dict[str, TensorOrigin], FileTensor | None]:
    """Return the outer state of a stage by local names, and its settled rounds."""
    held = replica in copies
    if rule == "reset" or (rule == "own" and not held and not equal_copies(saved)):
        return {}, None
    used = [copies[replica if held else min(copies)]] if rule == "own" else list(copies.values())
    each = [{at: source for s, held in c.outer.items() for at, source in _outer_parts(saved, s, held)} for c in used]
    rounds, numbers = (
        [FileTensor(held, key) for held in used[0].outer.values() if key in held.entries]
        for key in ("outer.rounds", f"outer.{SECANTS}")
    )
    shapes = declared_tensors(wanted, stage)
    local = {atom_name(wanted, stage, own): own for own in shapes}
    origins: dict[str, TensorOrigin] = {}
    lacking = equal_copies(saved) and len(copies) < saved.replicas  # then all estimates are reset
    parts: Mapping[str, Sharing] = make_exchange(wanted.exchange).parts if wanted.exchange is not None else {}
    for part, name in dict.fromkeys(at for tensors in each for at in tensors):
        sources = tuple(tensors[part, name] for tensors in each if (part, name) in tensors)
        if name not in local:
            continue
        if rule == "own":  # an equal copy was saved as another, which has the shared parts
            if parts.get(part) == "shared" or (held and not (parts.get(part) == "estimate" and lacking)):
                origins[f"{part}/{local[name]}"] = TensorOrigin("copy", sources)
        elif parts.get(part) == "own":  # Σ e / n is preserved; a missing one is zero
            origins[f"{part}/{local[name]}"] = TensorOrigin("sum", sources, len(each))
        elif parts.get(part) == "shared":
            if len(sources) < len(each):
                raise UserError(f"{sources[0].held.path}: not all replicas have an outer {part} of {name}; {FIX}")
            origins[f"{part}/{local[name]}"] = TensorOrigin("mean", sources)
    origins = {at: _fit_rows(made, shapes[at.partition("/")[2]]) for at, made in origins.items()}
    if rule == "own" and numbers and len(used[0].outer) == 1:  # of one stage; re-cut stages measure again
        origins[SECANTS] = TensorOrigin("copy", (numbers[0],))
    return origins, rounds[0] if rounds and rule == "own" else None


def _outer_parts(cut: RunCut, stage: int, held: StageContents) -> Iterator[tuple[tuple[str, str], FileTensor]]:
    """Yield the tensors of a file's outer state by part and atom, after checking their shapes."""
    for at in held.names("outer"):
        part, slash, local = at.partition("/")
        if slash:
            name = atom_name(cut, stage, local)
            if local not in declared_tensors(cut, stage):
                raise UserError(f"{held.path}: an outer {part} belongs to {name}, which is missing; {FIX}")
            _require(
                held,
                f"outer.{at}",
                PackedTensor("F32", declared_tensors(cut, stage)[local].shape),
                f"outer {part} of {name}",
            )
            yield (part, name), FileTensor(held, f"outer.{at}")
