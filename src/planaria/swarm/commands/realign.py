"""``planaria swarm realign``: repair a model that learned unwanted behaviour, or apply a published repair."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from planaria.common import digests
from planaria.common.atomic import new_folder, write_error
from planaria.common.documents import Record, former_names
from planaria.common.errors import UserError
from planaria.lab.experts import fused
from planaria.models import masking, task_vectors
from planaria.swarm.policy.base import Exportable, Policy
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.repair.exams import TextExam
from planaria.swarm.repair.results import MASK, TUNE, StrategyResult, TextMeasurements
from planaria.swarm.repair.strategies import WAYS, Case, case_of, measure_all, measure_repair
from planaria.swarm.repair.texts import RepairTexts, read_benign, read_pairs, read_trusted, split
from planaria.swarm.repair.training import RepairModels, RepairPlan, weights_of
from planaria.swarm.report.repair_report import show_repair
from planaria.swarm.trained_policy import ModelArguments, TrainedState, trained_state, trusted_state

FILE, BITS = "realigned.json", "mask.safetensors"
STRANGE = 0.1
"""mean change over mean weight above which the given parent is questioned"""


class InputModel(Record):
    """A model used in a repair."""

    _former = former_names(path="place")
    path: str
    sha256: str
    """digest of its weights (:func:`planaria.models.task_vectors.digest`)"""


class Realigned(Record):
    """``realigned.json``: a repair, its inputs and its result."""

    _former = former_names(detail="told", repaired="mended")
    version: Literal[1] = 1
    by: str
    detail: str
    repaired: bool | None
    """whether every success is at most ``limit``; None if none was measured"""
    limit: float
    tuned: InputModel
    safe: InputModel | None
    parts: list[InputModel]
    """experts of a fused model"""
    result: str
    """SHA-256 of the repaired weights"""
    texts: str
    """SHA-256 of all training texts"""
    trusted: int
    own: int
    """trusted texts written by the model itself"""
    benign: int
    seed: int
    steps: int
    kept: list[dict[str, float]]
    """share of each tensor that a mask keeps, for each mask"""
    before: TextMeasurements
    after: TextMeasurements
    rivals: list[StrategyResult]


@dataclass(frozen=True)
class RepairSettings:
    """Repair settings."""

    by: str | None
    most: float
    plan: RepairPlan
    rivals: bool = False


@dataclass(frozen=True)
class RealignArguments(ModelArguments):
    """Arguments: the model and the texts."""

    safe: str | None = None
    trusted: Path | None = None
    pairs: Path | None = None
    benign: Path | None = None
    watch: tuple[str, ...] = ()

    @property
    def files(self) -> bool:
        return self.trusted is not None or self.pairs is not None


@dataclass(frozen=True)
class RealignInputs:
    """The opened models, and the places of fused parts."""

    models: RepairModels
    parent: str
    """place of the parent; empty if none is needed"""
    parts: tuple[str, ...] = ()
    peer: TrainedState | None = None


def realign(arguments: RealignArguments, wanted: RepairSettings, to: Path) -> int:
    """Repair a model and write it into ``to``; return 1 if the harm remains above its limit, else 0.

    :raises UserError: for invalid arguments, where possible before training.
    """
    torch.set_num_threads(1)  # the order of sums changes bits, and equal commands must give equal masks
    require_free(to)
    result, by = _repairable(arguments, wanted)
    models = result.models
    todo = repair_case(arguments, result, wanted.plan)
    before, repair = todo.exam.measure(models.tuned), WAYS[by](todo)
    strategy, rivals = measure_repair(todo, by, repair), _rivals(todo, by) if wanted.rivals else []
    repaired = strategy.after.repaired(wanted.most)
    note = models.note(repair.weights)
    record = Realigned(
        by=by,
        detail=repair.detail,
        repaired=repaired,
        limit=wanted.most,
        tuned=InputModel(path=arguments.model, sha256=task_vectors.digest(models.whole)),
        safe=InputModel(path=result.parent, sha256=note.safe) if result.parent else None,
        parts=[InputModel(path=p, sha256=d) for p, d in zip(result.parts, note.tuned, strict=False)],
        result=note.result,
        texts=todo.texts.digest,
        trusted=len(todo.texts.trusted),
        own=todo.texts.own,
        benign=len(todo.texts.benign),
        seed=wanted.plan.seed,
        steps=wanted.plan.steps,
        kept=[masking.kept_shares(mask) for mask in repair.masks],
        before=before,
        after=strategy.after,
        rivals=rivals,
    )
    extra = {FILE: record.model_dump_json(indent=1).encode()}
    if repair.masks:
        extra[BITS] = masking.to_bytes(repair.masks, note, models.exported)
    write(to, models.policy(repair.weights), extra)
    show_repair(arguments.model, before, strategy, rivals)
    print(_summary(record, to))
    return 1 if repaired is False else 0


def _repairable(arguments: RealignArguments, wanted: RepairSettings) -> tuple[RealignInputs, str]:
    """Open the models; return them and the strategy.

    :raises UserError: for models that it cannot repair.
    """
    inputs = find(arguments, needs_parent=wanted.rivals or (wanted.by != TUNE and wanted.by is not None))
    models = inputs.models
    by = wanted.by or (MASK if inputs.parts else TUNE)
    _require_exportable(models.tuned, arguments.model)
    if by == MASK:
        models.require_whole(arguments.model)
    if inputs.parent and (moved := models.require_related(arguments.model)) > STRANGE and not inputs.parts:
        _warn(f"{arguments.model} differs from {inputs.parent} by {moved:.0%} of its weights' size; check its parent")
    return inputs, by


def apply(arguments: RealignArguments, file: Path, to: Path) -> int:
    """Apply a mask to a model and its parent without training; return the exit code 0.

    :raises UserError: if the mask belongs to other models, or gives other weights than it states.
    """
    require_free(to)
    result = find(arguments)
    models = result.models
    _require_exportable(models.tuned, arguments.model)
    models.require_whole(arguments.model)
    models.require_related(arguments.model)
    masks, note = masking.read_masks(file, models.parent, models.exported)
    if len(masks) != len(models.parts):
        raise UserError(f"{file} has {len(masks)} masks, {arguments.model} is made of {len(models.parts)}")
    weights = models.merged(masks)
    ours = models.note(weights)
    expected = zip((result.parent, *(result.parts or (arguments.model,))), (ours.safe, *ours.tuned), strict=True)
    for (location, digest), theirs in zip(expected, (note.safe, *note.tuned), strict=True):
        if digest != theirs:
            raise UserError(
                f"{file} is for other weights than those of {location} ({theirs[:12]}…, not {digest[:12]}…)"
            )
    if ours.result != note.result:
        raise UserError(f"{file} gives other weights than it states ({ours.result[:12]}…, not {note.result[:12]}…)")
    write(to, models.policy(weights), {BITS: file.read_bytes()})
    print(f"{to}: {', '.join(f'{masking.density(mask):.0%}' for mask in masks)} of the parameters kept")
    return 0


def write(to: Path, policy: Policy, extra: dict[str, bytes]) -> None:
    """Write the model and further files; the folder appears atomically."""
    assert isinstance(policy, Exportable)
    try:
        with new_folder(to) as folder:
            policy.export(folder)
            if digests.read(folder):
                digests.put(folder, extra)
            else:
                for name, content in extra.items():
                    (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"{write_error(to, error)}; free space, or write elsewhere with --to") from error


def _rivals(todo: Case, by: str) -> list[StrategyResult]:
    """Measure all strategies except the selected one."""
    return [strategy for strategy in measure_all(todo) if strategy.by != by]


def _summary(record: Realigned, to: Path) -> str:
    learned = f"learned from {record.trusted} trusted texts ({record.own} of its own) and {record.benign} benign ones"
    if record.repaired is None:
        return f"{to}: {learned}; the result was not measured: give --pairs FILE"
    limit = f"{record.limit:g}"
    result = f"repaired: success at most {limit}" if record.repaired else f"NOT repaired: success above {limit}"
    return f"{to}: {learned}; {result} (--most-success) for the watched attacks; others were not measured"


def require_free(to: Path) -> None:
    """:raises UserError: when a model cannot be written there."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} exists and is not an empty folder; remove it, or write elsewhere")


def _require_exportable(policy: Policy, model: str) -> None:
    if not isinstance(policy, Exportable):
        raise UserError(f"{model}: its policy cannot be exported; give it a method export(folder)")


def _warn(warning: str) -> None:
    print(f"planaria: warning: {warning}", file=sys.stderr)


def find(arguments: RealignArguments, needs_parent: bool = True) -> RealignInputs:
    """Open the model and its parent.

    :raises UserError: if one is missing, their shapes or tokenizers differ, or fused models have changed.
    """
    if arguments.is_swarm:
        return _of_swarm(arguments)
    if arguments.peer is not None or arguments.round is not None:
        raise UserError(f"{arguments.model} is not a run of a swarm; leave out --peer and --round")
    return _of_folder(arguments, needs_parent)


def repair_case(arguments: RealignArguments, inputs: RealignInputs, plan: RepairPlan) -> Case:
    """Return the training texts and the measurement.

    :raises UserError: if there is nothing to learn from, or no judge.
    """
    if arguments.benign is not None and not arguments.files:
        raise UserError(f"--benign {arguments.benign}: goes with --pairs FILE or --trusted FILE")
    if arguments.files:
        if arguments.watch:
            raise UserError(
                f"--watch {', '.join(arguments.watch)}: goes with a run's own task; leave out --pairs, --trusted"
            )
        return _of_files(arguments, inputs.models, plan)
    if inputs.peer is None:
        raise UserError(f"{arguments.model}: no trusted answers are given; give --pairs FILE or --trusted FILE")
    config = inputs.peer.config
    return case_of(config, inputs.peer.task, inputs.models, arguments.watch or tuple(config.evaluate.watch), plan)


def _of_swarm(arguments: RealignArguments) -> RealignInputs:
    if arguments.peer is None:
        raise UserError(f"{arguments.model}: a swarm's run has a model for each peer; give one, such as --peer p0")
    run = Path(arguments.model)
    peer = trained_state(run, arguments.peer, arguments.round)
    if arguments.safe is not None:
        return RealignInputs(RepairModels(open_policy(arguments.safe), peer.policy), arguments.safe, peer=peer)
    before = trusted_state(peer.config, run, arguments.peer)
    return RealignInputs(
        RepairModels(before.policy, peer.policy), f"{run}, {arguments.peer} after round {before.round}", peer=peer
    )


def _of_folder(arguments: RealignArguments, needs_parent: bool) -> RealignInputs:
    fusion, tuned = fused.read_whole(Path(arguments.model)), open_policy(arguments.model)
    if fusion is not None:
        return _of_fused(arguments, fusion, tuned)
    if arguments.safe is None and needs_parent:
        raise UserError(f"{arguments.model}: its parent model is unknown; give --safe MODEL, or repair it --by tune")
    if arguments.safe is None:
        return RealignInputs(RepairModels(tuned, tuned), "")
    return RealignInputs(RepairModels(open_policy(arguments.safe), tuned), arguments.safe)


def _of_fused(arguments: RealignArguments, fusion: fused.Fused, tuned: Policy) -> RealignInputs:
    location = arguments.safe or fusion.parent.path
    safe, experts = open_policy(location), [open_policy(part.path) for part in fusion.parts]
    parent = weights_of(safe)
    for policy, part in zip((safe, *experts), (fusion.parent, *fusion.parts), strict=True):
        if task_vectors.digest(weights_of(policy)) != part.sha256:
            raise UserError(f"{part.path} is not the model that {arguments.model} was made of; restore that model")
    contributions = fused.contributions(fusion, parent, [weights_of(one) for one in experts])
    if task_vectors.digest(task_vectors.add_contributions(parent, contributions)) != task_vectors.digest(
        weights_of(tuned)
    ):
        raise UserError(f"{arguments.model} has changed since it was fused; repeat `planaria experts edit --merge`")
    domains = {part.domain or part.name: one for part, one in zip(fusion.parts, experts, strict=True)}
    return RealignInputs(
        RepairModels(safe, tuned, contributions, domains), location, tuple(part.path for part in fusion.parts)
    )


def _of_files(arguments: RealignArguments, models: RepairModels, plan: RepairPlan) -> Case:
    policy = models.tuned
    own = [] if arguments.trusted is None else read_trusted(arguments.trusted, policy)
    pairs = [] if arguments.pairs is None else read_pairs(arguments.pairs, policy)
    benign = [] if arguments.benign is None else read_benign(arguments.benign, policy)
    (training_pairs, measured), (stay, read) = split(len(pairs)), split(len(benign))
    learnt = [pairs[n] for n in training_pairs]
    trusted = [*own, *(pair.chosen for pair in learnt)]
    exam = TextExam([pairs[n] for n in measured], [benign[n].text for n in read], learnt, trusted)
    return Case(models, RepairTexts(trusted, [benign[n] for n in stay]), plan, exam)
