"""Conversion of a foreign folder into stage files, without running code from the folder.

Called by ``common/child_process.py`` in a child process, whose memory is limited before the folder is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from planaria.common.errors import UserError
from planaria.models.families import make_family
from planaria.models.optimizers import adamw
from planaria.models.state import StageState
from planaria.runtime.checkpoint.cut import RunCut, atom_name, declared_tensors
from planaria.runtime.checkpoint.foreign import ReadReply, ReadRequest, names
from planaria.runtime.checkpoint.foreign.dcp import Dcp
from planaria.runtime.checkpoint.foreign.folder import (
    KINDS,
    NOTE,
    WEIGHTS,
    ExportNote,
    ForeignFolder,
    Sizes,
    TensorMetadata,
    detached_parameters,
    find_note,
    require_equal,
    require_match,
    require_moments,
    tensor_digest,
)
from planaria.runtime.checkpoint.foreign.names import NamedTensor, TensorAssignment
from planaria.runtime.checkpoint.foreign.universal import Universal
from planaria.runtime.checkpoint.stage_file import write_stage

FORMATS: Mapping[str, Callable[[Path], ForeignFolder]] = {"dcp": Dcp, "universal": Universal}
LISTED = 3
"""number of left-out names in a message"""


class FolderStages:
    """One folder, as the stages of a model."""

    def __init__(self, job: ReadRequest) -> None:
        """Read the folder's metadata; UserError if it does not hold the model."""
        self._folder, self._to = Path(job.folder), Path(job.to)
        self._cut = RunCut(job.model, job.stages)
        self._locals = {
            stage: {local: atom_name(self._cut, stage, local) for local in declared_tensors(self._cut, stage)}
            for stage in self._all
        }
        self._shapes = {
            name: declared_tensors(self._cut, stage)[local].shape
            for stage, held in self._locals.items()
            for local, name in held.items()
        }
        self._note = find_note(self._folder, job.model)
        self._foreign = FORMATS[job.format](self._folder)
        source = None if job.names is None else Path(job.names)
        rules = () if source is None else names.read(source)
        self._table, head = make_family(job.model).tables(job.model)
        self._plan = names.assign(self._folder, self._foreign.kinds, self._shapes, head, rules, source)
        used = {whole.name: self._foreign.kinds[whole.name] for whole in self._plan.wholes}
        self._trained = require_moments(self._folder, used, self._foreign.clocks)
        self._step = _step_of(self._folder, self._foreign, self._plan, self._note)

    @property
    def _all(self) -> range:
        return range(self._cut.stages + 1)

    def carry_out(self) -> ReadReply:
        if self._plan.head is not None:
            self._require_tied(self._plan.head)
        digests = tuple(write_stage(self._to, stage, self._step, self._stage(stage)).sha256 for stage in self._all)
        samples = self._note.samples if self._note is not None else self._foreign.samples
        return ReadReply(step=self._step, samples=samples, digests=digests, notes=tuple(self._notes()))

    def _stage(self, stage: int) -> StageState:
        """Return the initial state of a stage, reading only the tensors that it needs."""
        local = {name: local_name for local_name, name in self._locals[stage].items()}
        kinds: dict[str, dict[str, Tensor]] = {kind: {} for kind in KINDS}
        clocks: dict[str, int] = {}
        for whole in self._plan.wholes:
            if not local.keys() & set(whole.parts):
                continue
            for kind in KINDS if self._trained else (WEIGHTS,):
                parts = detached_parameters(self._read(whole, kind), whole, self._shapes)
                self._require_known(parts, kind, self._foreign.clocks.get(whole.name))
                kinds[kind] |= {local[name]: tensor for name, tensor in parts.items() if name in local}
            if self._trained:
                clocks |= {local[n]: self._foreign.clocks[whole.name] for n in whole.parts if n in local}
        moments = {name: {key: kinds[key][name] for key in adamw.KEYS} for name in kinds[adamw.FIRST]}
        scales = {} if self._note is None else self._note.scales
        stage_scales = {local[name]: scale for name, scale in scales.items() if name in local}
        return StageState(kinds[WEIGHTS], moments, clocks, scales=stage_scales)

    def _require_known(self, parts: Mapping[str, Tensor], kind: str, clock: int | None) -> None:
        digests = {} if self._note is None else self._note.sums
        for name, tensor in parts.items():
            actual, label = tensor_digest(tensor, kind, name, clock), f"{kind} of {name}"
            if digests.get(label, actual) != actual:
                fix = f"restore it, or remove {NOTE} if another program has trained it since"
                raise UserError(f"{self._folder}: {label} is not what planaria wrote there; {fix}")

    def _read(self, whole: NamedTensor, kind: str) -> Tensor:
        def check(shape: Sizes, marks: TensorMetadata, location: str) -> None:
            require_match(whole, shape, marks, self._shapes, location)

        tensor = self._foreign.read(whole.name, kind, check)
        if tensor.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise UserError(f"{self._folder}: {kind} of {whole.name} is {tensor.dtype}; fp32, bf16 and fp16 are read")
        return tensor

    def _require_tied(self, head: str) -> None:
        """Require that a tied model's head, if it is in the folder, equals the embedding table."""
        (table,) = (whole for whole in self._plan.wholes if self._table in whole.parts)
        tied_head = NamedTensor(head, table.parts, table.slices, table.padded)
        for kind in sorted(self._foreign.kinds[head]):
            label = f"{self._folder}: {kind} of {head} and of {table.name}, which is tied to it,"
            require_equal(self._read(tied_head, kind), self._read(table, kind), label)

    def _notes(self) -> list[str]:
        lines = [] if self._trained else ["without moments: they are reset"]
        if unused := sorted({*self._plan.left, *self._foreign.left}):
            rest = f" and {len(unused) - LISTED} more" if len(unused) > LISTED else ""
            lines.append(f"left out: {', '.join(unused[:LISTED])}{rest}")
        return lines


def _step_of(folder: Path, foreign: ForeignFolder, plan: TensorAssignment, note: ExportNote | None) -> int:
    """Return the step of the folder's state: its own, or the most updates of a parameter.

    :raises UserError: if a parameter has more updates than steps.
    """
    latest = max((foreign.clocks.get(whole.name, 0) for whole in plan.wholes), default=0)
    stated, location = (note.step, NOTE) if note is not None else (foreign.step, "its own counter")
    if stated is not None and latest > stated:
        fix = (
            f"remove {NOTE} if another program has trained it since" if note is not None else "use an undamaged folder"
        )
        raise UserError(f"{folder} has {latest} updates, but {location} has step {stated}; {fix}")
    return latest if stated is None else stated


def answer_request(argument: bytes) -> bytes:
    """Run a :class:`ReadRequest` (JSON), and return the :class:`ReadReply` (JSON).

    :raises UserError: if the folder does not hold the model.
    """
    job = ReadRequest.model_validate_json(argument)
    try:
        return FolderStages(job).carry_out().model_dump_json().encode()
    except MemoryError:
        raise UserError(f"{job.folder} needs more memory than its model has; use an undamaged folder") from None
