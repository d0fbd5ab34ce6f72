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
from planaria.models import fused, masking, task_vectors
from planaria.swarm.policy.base import Exportable, Policy
from planaria.swarm.policy.policies import open_policy
from planaria.swarm.repair.exams import TextExam
from planaria.swarm.repair.repair_results import MASK, TUNE, StrategyResult, TextMeasurements
from planaria.swarm.repair.repair_training import RepairModels, RepairPlan, weights_of
from planaria.swarm.repair.strategies import STRATEGIES, Case, make_case, measure_all, measure_repair
from planaria.swarm.repair.texts import RepairTexts, read_benign, read_pairs, read_trusted, split_held_out
from planaria.swarm.report.repair_report import show_repair
from planaria.swarm.trained_policy import ModelArguments, TrainedState, trained_state, trusted_state

FILE, MASK_FILE = "realigned.json", "mask.safetensors"
UNUSUAL_CHANGE = 0.1
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
    """whether every success is at most ``limit``, or None if none was measured"""
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
    """The opened models, and the paths of fused parts."""

    models: RepairModels
    parent: str
    """path of the parent; empty if none is needed"""
    parts: tuple[str, ...] = ()
    peer: TrainedState | None = None


def realign(
    arguments: RealignArguments, to: Path, by: str | None, max_success: float, plan: RepairPlan, compare: bool
) -> int:
    """Repair a model and write it into ``to``; return 1 if the harm remains above its limit, else 0.

    :param by: default: mask for fused models, else tune
    :param compare: also measure all other strategies

    :raises UserError: for invalid arguments, where possible before training.
    """
    torch.set_num_threads(1)  # the order of sums changes bits, and equal commands must give equal masks
    require_free(to)
    result, by = _open_repairable(arguments, by, compare)
    models = result.models
    case = repair_case(arguments, result, plan)
    before, repair = case.exam.measure(models.tuned), STRATEGIES[by](case)
    strategy = measure_repair(case, by, repair)
    rivals = [rival for rival in measure_all(case) if rival.by != by] if compare else []
    repaired = strategy.after.repaired(max_success)
    provenance = models.note(repair.weights)
    record = Realigned(
        by=by,
        detail=repair.detail,
        repaired=repaired,
        limit=max_success,
        tuned=InputModel(path=arguments.model, sha256=task_vectors.digest(models.whole)),
        safe=InputModel(path=result.parent, sha256=provenance.safe) if result.parent else None,
        parts=[InputModel(path=p, sha256=d) for p, d in zip(result.parts, provenance.tuned, strict=False)],
        result=provenance.result,
        texts=case.texts.digest,
        trusted=len(case.texts.trusted),
        own=case.texts.own,
        benign=len(case.texts.benign),
        seed=plan.seed,
        steps=plan.steps,
        kept=[masking.kept_shares(mask) for mask in repair.masks],
        before=before,
        after=strategy.after,
        rivals=rivals,
    )
    extra = {FILE: record.model_dump_json(indent=1).encode()}
    if repair.masks:
        extra[MASK_FILE] = masking.to_bytes(repair.masks, provenance, models.exported)
    write_model(to, models.policy(repair.weights), extra)
    show_repair(arguments.model, before, strategy, rivals)
    print(_summary(record, to))
    return 1 if repaired is False else 0


def _open_repairable(arguments: RealignArguments, by: str | None, compare: bool) -> tuple[RealignInputs, str]:
    """Open the models; return them and the strategy.

    :raises UserError: for models that it cannot repair.
    """
    inputs = open_inputs(arguments, needs_parent=compare or (by != TUNE and by is not None))
    models = inputs.models
    by = by or (MASK if inputs.parts else TUNE)
    _require_exportable(models.tuned, arguments.model)
    if by == MASK:
        models.require_whole(arguments.model)
    if inputs.parent and (moved := models.require_related(arguments.model)) > UNUSUAL_CHANGE and not inputs.parts:
        differs = f"{arguments.model} differs from {inputs.parent} by {moved:.0%} of its weights' size"
        print(f"planaria: warning: {differs}; check its parent", file=sys.stderr)
    return inputs, by


def apply_mask(arguments: RealignArguments, file: Path, to: Path) -> int:
    """Apply a mask to a model and its parent without training; return the exit code 0.

    :raises UserError: if the mask belongs to other models, or its result differs from its record.
    """
    require_free(to)
    result = open_inputs(arguments)
    models = result.models
    _require_exportable(models.tuned, arguments.model)
    models.require_whole(arguments.model)
    models.require_related(arguments.model)
    masks, provenance = masking.read_masks(file, models.parent, models.exported)
    if len(masks) != len(models.parts):
        raise UserError(f"{file} has {len(masks)} masks, {arguments.model} is made of {len(models.parts)}")
    weights = models.merge(masks)
    ours = models.note(weights)
    expected = zip((result.parent, *(result.parts or (arguments.model,))), (ours.safe, *ours.tuned), strict=True)
    for (location, digest), theirs in zip(expected, (provenance.safe, *provenance.tuned), strict=True):
        if digest != theirs:
            raise UserError(
                f"{file} does not belong to {location}: it is for the weights {theirs[:12]}…, not {digest[:12]}…"
            )
    if ours.result != provenance.result:
        raise UserError(
            f"{file}: the masked weights are {ours.result[:12]}…, not {provenance.result[:12]}… as recorded"
        )
    write_model(to, models.policy(weights), {MASK_FILE: file.read_bytes()})
    print(f"{to}: {', '.join(f'{masking.density(mask):.0%}' for mask in masks)} of the parameters kept")
    return 0


def write_model(to: Path, policy: Policy, extra: dict[str, bytes]) -> None:
    """Write the model and further files; the folder appears atomically."""
    assert isinstance(policy, Exportable)
    try:
        with new_folder(to) as folder:
            policy.export(folder)
            if digests.read(folder):
                digests.write_files(folder, extra)
            else:
                for name, content in extra.items():
                    (folder / name).write_bytes(content)
    except OSError as error:
        raise UserError(f"{write_error(to, error)}; free space, or pass another folder with --to") from error


def _summary(record: Realigned, to: Path) -> str:
    learned = f"learned from {record.trusted} trusted texts ({record.own} its own) and {record.benign} benign ones"
    if record.repaired is None:
        return f"{to}: {learned}; the result was not measured; pass --pairs FILE"
    limit = f"{record.limit:g}"
    result = f"repaired: success at most {limit}" if record.repaired else f"NOT repaired: success above {limit}"
    return f"{to}: {learned}; {result} (--max-success) for the watched attacks; others were not measured"


def require_free(to: Path) -> None:
    """:raises UserError: when a model cannot be written there."""
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise UserError(f"--to {to} exists and is not an empty folder; remove it, or pass another folder")


def _require_exportable(policy: Policy, model: str) -> None:
    if not isinstance(policy, Exportable):
        raise UserError(f"{model}: its policy cannot be exported; add a method export(folder)")


def open_inputs(arguments: RealignArguments, needs_parent: bool = True) -> RealignInputs:
    """Open the model and its parent.

    :raises UserError: if one is missing, their shapes or tokenizers differ, or fused models have changed.
    """
    if (peer := arguments.required_peer()) is not None:
        return _open_swarm_inputs(arguments, peer)
    fusion, tuned = fused.read_whole(Path(arguments.model)), open_policy(arguments.model)
    if fusion is not None:
        return _open_fused_inputs(arguments, fusion, tuned)
    if arguments.safe is None and needs_parent:
        raise UserError(f"{arguments.model}: its parent model is unknown; pass --safe MODEL, or repair it --by tune")
    safe = tuned if arguments.safe is None else open_policy(arguments.safe)
    return RealignInputs(RepairModels(safe, tuned), arguments.safe or "")


def repair_case(arguments: RealignArguments, inputs: RealignInputs, plan: RepairPlan) -> Case:
    """Return the training texts and the measurement.

    :raises UserError: if there is nothing to learn from, or no judge.
    """
    if arguments.benign is not None and not arguments.files:
        raise UserError(f"--benign {arguments.benign} requires --pairs FILE or --trusted FILE")
    if arguments.files:
        if arguments.watch:
            raise UserError(
                f"--watch {', '.join(arguments.watch)}: requires a run's own task; remove --pairs and --trusted"
            )
        return _case_from_files(arguments, inputs.models, plan)
    if inputs.peer is None:
        raise UserError(f"{arguments.model}: there are no trusted answers; pass --pairs FILE or --trusted FILE")
    config = inputs.peer.config
    return make_case(config, inputs.peer.task, inputs.models, arguments.watch or tuple(config.evaluate.watch), plan)


def _open_swarm_inputs(arguments: RealignArguments, name: str) -> RealignInputs:
    run = Path(arguments.model)
    peer = trained_state(run, name, arguments.round)
    if arguments.safe is not None:
        return RealignInputs(RepairModels(open_policy(arguments.safe), peer.policy), arguments.safe, peer=peer)
    before = trusted_state(peer.config, run, name)
    parent = f"{run}, {name} after round {before.round}"
    return RealignInputs(RepairModels(before.policy, peer.policy), parent, peer=peer)


def _open_fused_inputs(arguments: RealignArguments, fusion: fused.Fused, tuned: Policy) -> RealignInputs:
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


def _case_from_files(arguments: RealignArguments, models: RepairModels, plan: RepairPlan) -> Case:
    policy = models.tuned
    own = [] if arguments.trusted is None else read_trusted(arguments.trusted, policy)
    pairs = [] if arguments.pairs is None else read_pairs(arguments.pairs, policy)
    benign = [] if arguments.benign is None else read_benign(arguments.benign, policy)
    learned_pairs, measured_pairs = split_held_out(pairs)
    learned_benign, measured_benign = split_held_out(benign)
    trusted = [*own, *(pair.chosen for pair in learned_pairs)]
    exam = TextExam(measured_pairs, [one.text for one in measured_benign], learned_pairs, trusted)
    return Case(models, RepairTexts(trusted, learned_benign), plan, exam)
