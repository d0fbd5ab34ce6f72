"""``planaria realign``: repair a model that learned what it should not have, or apply somebody's repair."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from planaria.cli.commands.realign_inputs import Given, case, find
from planaria.common import digests
from planaria.common.atomic import new_folder, refused
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.lab.report.repair_report import show_repair
from planaria.models import fusing, masking
from planaria.swarm.policy.base import Exportable, Policy
from planaria.swarm.repair.results import MASK, TUNE, Measured, Way
from planaria.swarm.repair.training import Plan
from planaria.swarm.repair.ways import WAYS, Case, compared, measured

FILE, BITS = "realigned.json", "mask.safetensors"
STRANGE = 0.1
"""mean change over mean weight above which a model hardly descends from the parent that was given"""


class Input(Record):
    """A model that went into a repair."""

    place: str
    sha256: str
    """of its weights, as :func:`planaria.models.fusing.digest` takes it"""


class Realigned(Record):
    """``realigned.json``: what was repaired, by what, and what came of it."""

    version: Literal[1] = 1
    by: str
    told: str
    mended: bool | None
    """is every success at most ``limit``? None: none could be measured"""
    limit: float
    tuned: Input
    safe: Input | None
    parts: list[Input]
    """of fused models, the experts"""
    result: str
    """SHA-256 of the repaired weights"""
    texts: str
    """SHA-256 of all that was learned from"""
    trusted: int
    own: int
    """trusted texts that the model itself wrote"""
    benign: int
    seed: int
    steps: int
    kept: list[dict[str, float]]
    """of every mask, tensor → share that stays"""
    before: Measured
    after: Measured
    rivals: list[Way]


@dataclass(frozen=True)
class Wanted:
    """How to repair."""

    by: str | None
    most: float
    plan: Plan
    rivals: bool = False


def realign(given: Given, wanted: Wanted, to: Path) -> int:
    """Repair a model and write it into ``to``; the exit code, 1 where the harm is still above its limit.

    :raises UserError: when something given is wrong; before anything is learned, as far as that can be known.
    """
    torch.set_num_threads(1)  # sums in another order are other bits, and the same command is to give the same mask
    _require_free(to)
    found = find(given, needs_parent=wanted.rivals or (wanted.by != TUNE and wanted.by is not None))
    models, by = found.models, wanted.by or (MASK if found.parts else TUNE)
    _require_exportable(models.tuned, given.model)
    if by == MASK:
        models.require_whole(given.model)
    if found.parent and (moved := models.require_related(given.model)) > STRANGE and not found.parts:
        _warn(f"{given.model} differs from {found.parent} by {moved:.0%} of its weights' size; is that its parent?")
    todo = case(given, found, wanted.plan)
    before, repair = todo.exam.measure(models.tuned), WAYS[by](todo)
    way, rivals = measured(todo, by, repair), _rivals(todo, by) if wanted.rivals else []
    mended = way.after.mended(wanted.most)
    note = models.note(repair.weights)
    record = Realigned(
        by=by,
        told=repair.told,
        mended=mended,
        limit=wanted.most,
        tuned=Input(place=given.model, sha256=fusing.digest(models.whole)),
        safe=Input(place=found.parent, sha256=note.safe) if found.parent else None,
        parts=[Input(place=p, sha256=d) for p, d in zip(found.parts, note.tuned, strict=False)],
        result=note.result,
        texts=todo.texts.digest,
        trusted=len(todo.texts.trusted),
        own=todo.texts.own,
        benign=len(todo.texts.benign),
        seed=wanted.plan.seed,
        steps=wanted.plan.steps,
        kept=[masking.kept(mask) for mask in repair.masks],
        before=before,
        after=way.after,
        rivals=rivals,
    )
    extra = {FILE: record.model_dump_json(indent=1).encode()}
    if repair.masks:
        extra[BITS] = masking.to_bytes(repair.masks, note, models.exported)
    write(to, models.policy(repair.weights), extra)
    show_repair(given.model, before, way, rivals)
    print(_told(record, to))
    return 1 if mended is False else 0


def apply(given: Given, file: Path, to: Path) -> int:
    """Write the model that somebody's mask makes of a model and its parent: no training. The exit code, 0.

    :raises UserError: when the mask belongs to other models, or does not give what it says.
    """
    _require_free(to)
    found = find(given)
    models = found.models
    _require_exportable(models.tuned, given.model)
    models.require_whole(given.model)
    models.require_related(given.model)
    masks, note = masking.read_masks(file, models.parent, models.exported)
    if len(masks) != len(models.parts):
        raise UserError(f"{file}: has {len(masks)} masks, {given.model} is made of {len(models.parts)}")
    weights = models.merged(masks)
    ours = models.note(weights)
    known = zip((found.parent, *(found.parts or (given.model,))), (ours.safe, *ours.tuned), strict=True)
    for (place, digest), theirs in zip(known, (note.safe, *note.tuned), strict=True):
        if digest != theirs:
            raise UserError(f"{file}: is for other weights than those of {place} ({theirs[:12]}…, not {digest[:12]}…)")
    if ours.result != note.result:
        raise UserError(f"{file}: gives other weights than it says ({ours.result[:12]}…, not {note.result[:12]}…)")
    write(to, models.policy(weights), {BITS: file.read_bytes()})
    print(f"{to}: {', '.join(f'{masking.density(mask):.0%}' for mask in masks)} of the parameters kept")
    return 0


def write(to: Path, policy: Policy, extra: dict[str, bytes]) -> None:
    """The model with further files beside it; the folder appears at once and whole."""
    assert isinstance(policy, Exportable)
    try:
        with new_folder(to) as made:
            policy.export(made)
            if digests.read(made):
                digests.put(made, extra)
            else:
                for name, content in extra.items():
                    (made / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"{refused(to, error)}; make room, or write elsewhere with --to") from error


def _rivals(todo: Case, by: str) -> list[Way]:
    """All ways but the one that was chosen."""
    return [way for way in compared(todo) if way.by != by]


def _told(record: Realigned, to: Path) -> str:
    learned = f"learned from {record.trusted} trusted texts ({record.own} of its own) and {record.benign} benign ones"
    if record.mended is None:
        return f"{to}: {learned}; whether that mended it was not measured: give --pairs FILE"
    most = f"{record.limit:g}"
    said = f"mended: success at most {most}" if record.mended else f"NOT mended: success above {most} (--most-success)"
    return f"{to}: {learned}; {said} on what was watched for, and nothing is known of the rest"


def _require_free(to: Path) -> None:
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to}: exists and is not an empty folder; remove it, or write elsewhere")


def _require_exportable(policy: Policy, model: str) -> None:
    if not isinstance(policy, Exportable):
        raise UserError(f"{model}: its policy cannot be exported; give it a method export(folder)")


def _warn(said: str) -> None:
    print(f"planaria: warning: {said}", file=sys.stderr)
