"""``planaria experts train``: probe, branch, train, ensemble, report; resumable."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from planaria.common import atomic
from planaria.common.cache import cache_folder
from planaria.common.documents import Record
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.schema import DataConfig, RunConfig
from planaria.data.tokenizer import load_tokenizer
from planaria.lab.experts import manifest
from planaria.lab.experts.budget import ExpertPlan, is_generalist
from planaria.lab.experts.campaign import Campaign, planned_models, require_equal_costs
from planaria.lab.experts.domains import RULE, TRAINED, write_domains
from planaria.lab.experts.ensemble import Ensemble
from planaria.lab.experts.ensemble import domain_weights_over_text as weights_over_text
from planaria.lab.experts.experts_results import FittedWeights, Results, SeedResult
from planaria.lab.experts.experts_spec import ExpertsSpec, expand_clusters, expert_shapes, load, step_tokens
from planaria.lab.experts.lineage import numbered_name
from planaria.lab.experts.log_probabilities import DomainTexts, stack_readings
from planaria.lab.experts.manifest import EnsembleManifest, Expert
from planaria.lab.experts.minimax_weights import FLOOR
from planaria.lab.experts.scoring import fit_weights
from planaria.lab.report.experts_report import show_results, write_experts_report
from planaria.models.llama_stages import parameter_count
from planaria.report.observe.bars import JobsProgress
from planaria.report.phrases import format_count
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.config_checks import check, read_faults
from planaria.runtime.preparation.prepare import with_absolute_paths
from planaria.trials.result_cache import CachedResult, identity, make_folder, read_result

RESULTS = "results.json"
MAX_NAMED = 3
"""maximum number of settings that an error names"""


def start(path: Path, flags: Mapping[str, str], dry_run: bool, quiet: bool) -> int:
    """Run the recipe ``path``, resuming earlier work; return the exit code."""
    torch.set_num_threads(1)
    spec, base = load(path, flags)
    _require_supported(path, spec, base)
    base = with_absolute_paths(base, path)  # each model's recipe is in another folder
    read_faults(check(base))
    require_equal_costs(expand_clusters(spec), base)
    if dry_run:
        print(recipe.dump(base, experts=spec).rstrip("\n"))
        for line in _describe_models(expand_clusters(spec), base):
            print(f"# {line}")
        return 0
    spec, folder = expand_clusters(spec), _open_folder(spec, base)
    with run_folders.lock_for_training(folder):
        before = manifest.read(folder) if (folder / manifest.FILE).exists() else None
        with JobsProgress(quiet) as progress:
            texts = _prepare_texts(folder, spec, base, progress.print_note)
            runs = [run for seed in spec.seeds for run in Campaign(spec, base, folder, seed, texts, progress).run()]
        ensemble = _make_manifest(folder, spec, base, runs[0])
        manifest.write(folder, ensemble if before is None else ensemble.with_changes_of(before))
        results = Results(
            name=base.name,
            trained=list(spec.domains),
            untrained=list(spec.untrained),
            mixture=spec.mixture,
            runs=runs,
            speech=weights_over_text(Ensemble(folder), texts),
            worst=_fit_worst(folder, ensemble, texts, list(spec.domains)),
        )
        atomic.write_text(folder / RESULTS, results.model_dump_json(indent=1))
    show_results(results)
    print(f"report        {write_experts_report(results, folder / 'report.html')}")
    print(f"ensemble      {folder / manifest.FILE}")
    for arm in results.generalists:
        (job,) = runs[0].arms[arm].experts
        print(f"{arm:13} {folder / _expert_path(job, runs[0])}")
    return 0


def _describe_models(spec: ExpertsSpec, base: RunConfig) -> Iterator[str]:
    """Yield lines about the models that a run trains."""
    planned, shapes = planned_models(spec, base), expert_shapes(base.model, spec)
    least = "at least " if len(spec.probe.by) > 1 else ""  # measures may assign domains to different tiers
    models = format_count(sum(map(len, planned.values())), "model")
    yield f"{format_count(len(spec.seeds), 'seed')} of {least}{models}: parents, probes, experts and generalists"
    for size, steps in planned.items():
        yield (
            f"{size}: {format_count(len(steps), 'model')} of {parameter_count(shapes[size]):,} parameters, "
            f"{format_count(sum(steps), 'step')} of {step_tokens(base):,} tokens together"
        )


def _require_supported(path: Path, spec: ExpertsSpec, base: RunConfig) -> None:
    if base.engine == "simulate":
        raise UserError("engine = 'simulate': a simulation trains no models; use 'inline' or 'fleet'")
    if base.data.mixture:
        raise UserError(f"{path}: data.mixture: each expert reads its own domain; remove it")
    if base.data.max_chars is not None:
        raise UserError(
            f"{path}: data.max_chars: would omit some domains; set experts.max_chars, which limits each domain"
        )
    if base.data.document_mask:
        raise UserError(f"{path}: data.document_mask: an ensemble reads samples without masks; remove it")
    if base.checkpoint.store is not None:
        fix = "remove it, and copy the run's folder"
        raise UserError(f"{path}: checkpoint.store supports single runs, not the texts and results of experts; {fix}")
    if spec.schedule_steps and base.optim.schedule == "constant":
        raise UserError(
            f"{path}: experts.schedule_steps: optim.schedule = 'constant' has no end; use 'cosine' or 'wsd'"
        )
    if spec.mixture.top_k and spec.mixture.prefix >= base.model.context:
        raise UserError(
            f"{path}: experts.mixture.prefix = {spec.mixture.prefix}: a text has model.context = {base.model.context} "
            f"tokens, so top_k = {spec.mixture.top_k} excludes no expert; use a smaller prefix, or top_k = 0"
        )
    if base.train.schedule_steps:
        raise UserError(f"{path}: train.schedule_steps: parents and probes have their own; set experts.schedule_steps")


class _Inputs(Record):
    """The inputs that a run's folder belongs to."""

    experts: dict[str, Any]
    run: dict[str, Any]
    split: str
    """rule by which documents were split"""


def _open_folder(spec: ExpertsSpec, base: RunConfig) -> Path:
    """Return the run's folder, new or from an earlier run of the same recipe, except for its mixture.

    Models stay valid across versions of planaria and are expensive, so this deletes nothing.
    """
    folder = Path(base.out) / base.name
    excluded = {"workers", "patience_s", "retries", "mixture"}  # do not influence the trained models
    inputs = _Inputs(
        experts=spec.model_dump(mode="json", exclude=excluded),
        run=base.model_dump(mode="json", exclude={"out"}),
        split=RULE,
    )
    file = folder / "experts-recipe.json"
    if not folder.exists():
        make_folder(folder)
        CachedResult(file, _Inputs, identity(inputs.model_dump())).write(inputs)
    if reason := _difference(inputs, file):
        raise UserError(f"{folder}: exists, but {reason}; choose another name with --name, or remove it")
    return folder


def _difference(inputs: _Inputs, file: Path) -> str:
    """Return why the models of the run with these inputs in ``file`` cannot be reused, or an empty string."""
    if not file.is_file():
        return "it is not an experts run"
    ours, theirs = (recipe.flatten(each.model_dump()) for each in (inputs, read_result(file, _Inputs)))
    changed = [
        name.removeprefix("run.")
        for name in {**ours, **theirs}
        if ours.get(name) != theirs.get(name) and not name.startswith("experts.mixture.")  # stored by older versions
    ]
    more = f" and {len(changed) - MAX_NAMED} more" if len(changed) > MAX_NAMED else ""
    return f"it was made with a different recipe ({', '.join(changed[:MAX_NAMED])}{more})" if changed else ""


def _prepare_texts(folder: Path, spec: ExpertsSpec, base: RunConfig, notify: Callable[[str], None]) -> DomainTexts:
    """Copy the domains' text, make the experts' common tokenizer, and cut test and held-out samples.

    :raises UserError: if a text is invalid; a folder created for them is removed.
    """
    tokenizer = folder / "tokenizer.json"
    known = tokenizer.is_file()
    try:
        write_domains(spec, folder)
        if not known:
            data_config = DataConfig(source=str(folder / TRAINED), tokenizer=base.data.tokenizer, cache=base.data.cache)
            load_tokenizer(data_config, base.model.vocab, cache_folder(data_config.cache), notify).save(tokenizer)
        return DomainTexts(folder, spec, base)
    except UserError:
        if not known:
            shutil.rmtree(folder)
        raise


def _fit_worst(
    folder: Path, ensemble: EnsembleManifest, texts: DomainTexts, domains: Sequence[str]
) -> FittedWeights | None:
    """Return the weights for the worst domain of the experts trained here, or None if there are too few or too many."""
    if not 2 <= len(ensemble.members) < 1 / FLOOR:
        return None
    logps = stack_readings([texts.read(folder / member.model) for member in ensemble.members])
    return fit_weights(
        [member.name for member in ensemble.members],
        {name: logps[f"held_out.{name}"] for name in domains},
        {name: logps[f"test.{name}"] for name in domains},
        ensemble.mixture,
        ensemble.mixture.prefix or ensemble.context,
    )


def _expert_path(job: ExpertPlan, run: SeedResult) -> str:
    return f"seed-{run.seed}/experts/{numbered_name(job.name, run.line)}/model"


def _origin_path(job: ExpertPlan, spec: ExpertsSpec, run: SeedResult) -> str:
    """Return the path of the model that an expert branched off: a parent, or the expert before it."""
    if before := spec.after[job.domain]:
        return _expert_path(job.model_copy(update={"domain": before}), run)
    return _parent_path(run, job.size)


def _parent_path(run: SeedResult, size: str) -> str:
    return f"seed-{run.seed}/seeds/{run.parents[size]}/model"


def _make_manifest(folder: Path, spec: ExpertsSpec, base: RunConfig, run: SeedResult) -> EnsembleManifest:
    """Return the arm of experts that does best on held-out text as an ensemble."""
    ensembles = [scored for arm, scored in run.arms.items() if not is_generalist(arm)]
    best, shapes = min(ensembles, key=lambda arm: arm.held_out), expert_shapes(base.model, spec)
    members = []
    for job, belief in zip(best.experts, best.belief, strict=True):
        model = _expert_path(job, run)
        members.append(
            Expert(
                name=job.name,
                domain=job.domain,
                model=model,
                sha256=manifest.digest(folder / model / manifest.WEIGHTS),
                parameters=parameter_count(shapes[job.size]),
                parent=_origin_path(job, spec, run),
                belief=belief,
                routed=best.scores[job.domain].routed,
            )
        )
    return EnsembleManifest(
        tokenizer=manifest.digest(folder / "tokenizer.json"),
        vocab=base.model.vocab,
        context=base.model.context,
        mixture=spec.mixture,
        members=members,
        parent=_parent_path(run, spec.middle),
        mixes={name: domain.of for name, domain in spec.domains.items() if domain.of},
    )
