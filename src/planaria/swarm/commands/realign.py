"""``planaria realign``: repair a model that learned what it should not have, or apply somebody's repair."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from planaria.common import digests
from planaria.common.atomic import new_folder, refused
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.lab.experts import fused
from planaria.models import fusing, masking
from planaria.swarm.learned import Learned, learned, trusted
from planaria.swarm.policy.base import Exportable, Policy
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.records.lines import PEERS
from planaria.swarm.repair.exams import TextExam
from planaria.swarm.repair.results import MASK, TUNE, Measured, Way
from planaria.swarm.repair.texts import Texts, read_benign, read_pairs, read_trusted, split
from planaria.swarm.repair.training import Models, Plan, weights_of
from planaria.swarm.repair.ways import WAYS, Case, case_of, compared, measured
from planaria.swarm.report.repair_report import show_repair

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


@dataclass(frozen=True)
class Given:
    """What the user named."""

    model: str
    """a swarm's run, or a model"""
    peer: str | None = None
    round: int | None = None
    safe: str | None = None
    trusted: Path | None = None
    pairs: Path | None = None
    benign: Path | None = None
    watch: tuple[str, ...] = ()

    @property
    def files(self) -> bool:
        return self.trusted is not None or self.pairs is not None

    @property
    def is_swarm(self) -> bool:
        return (Path(self.model) / PEERS).is_dir()


@dataclass(frozen=True)
class Found:
    """The models that were named, and where the parts of fused ones lie."""

    models: Models
    parent: str
    """where the parent came from; empty: there is none, and none is needed"""
    parts: tuple[str, ...] = ()
    peer: Learned | None = None


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


def find(given: Given, needs_parent: bool = True) -> Found:
    """Open the model and its parent.

    :raises UserError: when something is missing, they are not of one shape or tokenizer, or fused models have changed.
    """
    if given.is_swarm:
        found = _of_swarm(given)
    elif given.peer is not None or given.round is not None:
        raise UserError(f"{given.model}: is no run of a swarm; leave out --peer and --round")
    else:
        found = _of_folder(given, needs_parent)
    return found


def case(given: Given, found: Found, plan: Plan) -> Case:
    """What there is to learn from, and how it is measured.

    :raises UserError: when there is nothing to learn from, or nobody to judge it.
    """
    if given.benign is not None and not given.files:
        raise UserError(f"--benign {given.benign}: goes with --pairs FILE or --trusted FILE")
    if given.files:
        if given.watch:
            raise UserError(
                f"--watch {', '.join(given.watch)}: goes with a run's own task; leave out --pairs, --trusted"
            )
        return _of_files(given, found.models, plan)
    if found.peer is None:
        raise UserError(f"{given.model}: what can be trusted? give --pairs FILE or --trusted FILE")
    config = found.peer.config
    return case_of(config, found.peer.task, found.models, given.watch or tuple(config.evaluate.watch), plan)


def _of_swarm(given: Given) -> Found:
    if given.peer is None:
        raise UserError(f"{given.model}: which peer's model? give --peer, such as --peer p0")
    run = Path(given.model)
    peer = learned(run, given.peer, given.round)
    if given.safe is not None:
        return Found(Models(open_policy(given.safe), peer.policy), given.safe, peer=peer)
    before = trusted(peer.config, run, given.peer)
    return Found(Models(before.policy, peer.policy), f"{run}, {given.peer} after round {before.round}", peer=peer)


def _of_folder(given: Given, needs_parent: bool) -> Found:
    known, tuned = fused.read_whole(Path(given.model)), open_policy(given.model)
    if known is not None:
        return _of_fused(given, known, tuned)
    if given.safe is None and needs_parent:
        raise UserError(f"{given.model}: which model does it descend from? give --safe MODEL, or repair it --by tune")
    if given.safe is None:
        return Found(Models(tuned, tuned), "")
    return Found(Models(open_policy(given.safe), tuned), given.safe)


def _of_fused(given: Given, known: fused.Fused, tuned: Policy) -> Found:
    place = given.safe or known.parent.place
    safe, experts = open_policy(place), [open_policy(part.place) for part in known.parts]
    parent = weights_of(safe)
    for policy, part in zip((safe, *experts), (known.parent, *known.parts), strict=True):
        if fusing.digest(weights_of(policy)) != part.sha256:
            raise UserError(f"{part.place}: is not the model that {given.model} was made of; bring that back")
    contributions = fused.contributions(known, parent, [weights_of(one) for one in experts])
    if fusing.digest(fusing.fused(parent, contributions)) != fusing.digest(weights_of(tuned)):
        raise UserError(
            f"{given.model}: has changed since it was put together; make it anew with `planaria experts fuse`"
        )
    domains = {part.domain or part.name: one for part, one in zip(known.parts, experts, strict=True)}
    return Found(Models(safe, tuned, contributions, domains), place, tuple(part.place for part in known.parts))


def _of_files(given: Given, models: Models, plan: Plan) -> Case:
    policy = models.tuned
    told = [] if given.trusted is None else read_trusted(given.trusted, policy)
    pairs = [] if given.pairs is None else read_pairs(given.pairs, policy)
    benign = [] if given.benign is None else read_benign(given.benign, policy)
    (known, measured), (stay, read) = split(len(pairs)), split(len(benign))
    learnt = [pairs[n] for n in known]
    trusted = [*told, *(pair.chosen for pair in learnt)]
    exam = TextExam([pairs[n] for n in measured], [benign[n].text for n in read], learnt, trusted)
    return Case(models, Texts(trusted, [benign[n] for n in stay]), plan, exam)
