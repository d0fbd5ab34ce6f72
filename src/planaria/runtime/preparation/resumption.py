"""Resumption of a stopped run from its last state or an earlier checkpoint, and the checks before it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from planaria.common import digests, documents
from planaria.common.errors import UserError
from planaria.common.stdio import Notify
from planaria.config import recipe
from planaria.config.options import Options
from planaria.config.schema import ChaosConfig, OptimConfig, RunConfig
from planaria.control.facts.events import Recut, ReplicaPosition, RunShape
from planaria.control.log.reader import EVENTS
from planaria.control.log.state_file import read_state
from planaria.data.tokenizer import Tokenizer
from planaria.exchange.compress.checks import require_same_feedback
from planaria.exchange.registry import make_exchange
from planaria.runtime.checkpoint import recut
from planaria.runtime.checkpoint.cut import CUT, RunCut, require_alike
from planaria.runtime.checkpoint.loading import check_stages, cut_for, cut_of
from planaria.runtime.checkpoint.store import CheckpointStore, SealedCheckpoint
from planaria.runtime.preparation import run_folders
from planaria.runtime.preparation.prepare import PreparedRun, on_schedule, with_absolute_paths, with_code_embedded
from planaria.runtime.preparation.run_start import Origin
from planaria.runtime.preparation.snapshot_recall import recall_point
from planaria.runtime.resolved_run import ResolvedRun
from planaria.runtime.worker.learning_rate import learning_rate

FIXED = ("seed", "model", "data")
"""settings of a run that cannot change, except for the model's cut and ``vocab``, and the ``epochs`` and location of
sources
"""
SHAPE = ("model", "pipeline", "routing", "exchange", "network")
"""settings whose changes are reported on resumption"""


@dataclass(frozen=True)
class Resumption:
    """A stopped run's configuration, and where it continues."""

    config: RunConfig
    store: CheckpointStore
    saved: SealedCheckpoint | None
    """the checkpoint, or None if nothing has been saved"""
    origin: Origin

    @property
    def done(self) -> bool:
        """Whether no steps are left."""
        return self.origin.step >= self.config.train.steps


def resumption_of(folder: Path, changes: Mapping[str, object], checkpoint: str | None, notify: Notify) -> Resumption:
    """Return where the run in ``folder`` continues, with ``changes`` (setting → value) applied to its configuration.

    ``checkpoint``: a name; default: the newest. ``notify`` receives warnings.

    :raises UserError: if there is no such run or checkpoint, it is damaged, or a changed setting is fixed.
    """
    before = run_folders.config_of(folder, *run_folders.RUN_FILES)
    config = with_flags(before, changes, folder)
    if differing := _difference(before, config):
        notify(f"{folder}: continues with {differing}")
    run, store = ResolvedRun(config), CheckpointStore(folder / "checkpoints")
    store.bring_back()
    saved = choose(store, checkpoint)
    with _naming_another(store, saved):
        origin = _origin(store, folder, saved, run, notify)
        check_stages(store.folder, origin.load, config)
    if checkpoint is None:
        origin = recall_point(origin, saved, run, folder, notify)
    if jump := rate_change(before, config, origin.step):
        notify(f"{folder}: {jump}")
    return Resumption(config, store, saved, origin)


@contextmanager
def _naming_another(store: CheckpointStore, saved: SealedCheckpoint | None) -> Iterator[None]:
    """Add the flag for another whole checkpoint to an error in the files of ``saved``."""
    try:
        yield
    except UserError as error:
        if saved is None or str(saved.folder) not in str(error):
            raise
        alternatives = [
            checkpoint.folder.name
            for checkpoint in store.list()
            if checkpoint.whole and checkpoint.folder != saved.folder
        ]
        hint = f"--checkpoint {alternatives[-1]}" if alternatives else "there is no other, so start a new run"
        raise UserError(f"{error}: {hint}") from None


def with_flags(before: RunConfig, flags: Mapping[str, object], folder: Path) -> RunConfig:
    """Return the run's configuration with ``flags`` applied; UserError if a fixed setting changes."""
    config = recipe.with_flags(_without_replaced(before, flags), flags)
    recut_model = before.model.model_copy(update={name: getattr(config.model, name) for name in CUT | {"vocab"}})
    as_before = before.model_copy(update={"model": recut_model, "data": before.data.sample_settings})
    as_changed = config.model_copy(update={"data": config.data.sample_settings})
    for name in FIXED:
        if getattr(as_changed, name) != getattr(as_before, name):
            flag = next(f for f in flags if f.partition(".")[0] == name and not f.endswith(".epochs"))
            raise UserError(f"--{flag} {flags[flag]}: cannot change when {folder} is resumed; start a new run for that")
    if config.optim.kind != before.optim.kind:
        raise UserError(
            f"--optim.kind {config.optim.kind}: the moments of {folder} are {before.optim.kind}'s; start a run with "
            f"its weights: --train.start {folder}"
        )
    require_same_feedback(before, config, folder)
    config = with_code_embedded(_with_tokenizer(config, before, folder), None)
    if config.engine == "simulate":
        raise UserError("--engine simulate: a simulation cannot be resumed; see `planaria plan`")
    if config.routing.schedule is not None:
        if "routing.schedule" not in flags:  # the folder may have been moved
            config = on_schedule(config, (folder / run_folders.SCHEDULE).absolute())
        config = with_absolute_paths(config, None)
    if "chaos.trace" not in flags and config.chaos.trace is not None:
        return config.model_copy(update={"chaos": ChaosConfig(trace=str(folder / run_folders.TRACE))})
    return config


def _with_tokenizer(config: RunConfig, before: RunConfig, folder: Path) -> RunConfig:
    """Return the configuration with the run's tokenizer if a changed vocabulary would create another.

    :raises UserError: if the vocabulary is too small for it.
    """
    kept, size = (folder / run_folders.TOKENIZER).absolute(), config.model.vocab
    if size != before.model.vocab and (least := Tokenizer.open(kept).vocab) > size:
        raise UserError(f"--model.vocab {size}: {folder}'s tokenizer has {least} ids; use {least} or more")
    chosen = config.data.tokenizer
    if (chosen == "bpe" and size != before.model.vocab) or (
        Path(chosen).name == kept.name and not Path(chosen).exists()
    ):
        return config.model_copy(update={"data": config.data.model_copy(update={"tokenizer": str(kept)})})
    return config


def _without_replaced(before: RunConfig, flags: Mapping[str, object]) -> RunConfig:
    """Return the configuration without the options of a routing or exchange that ``flags`` replace."""
    changes = {}
    for name in ("routing", "exchange"):
        section = getattr(before, name)
        if flags.get(f"{name}.kind", section.kind) != section.kind:
            changes[name] = section.model_copy(update={"options": Options()})
    return before.model_copy(update=changes)


def _difference(before: RunConfig, config: RunConfig) -> str:
    """Return the changed settings of a run's shape, or an empty string if there are none."""
    was, now = (recipe.flatten({name: getattr(run_config, name) for name in SHAPE}) for run_config in (before, config))
    differing = (name for name in was | now if was.get(name) != now.get(name) and name != "routing.schedule")
    changes = [f"{name} = {now.get(name)!r} (was {was.get(name)!r})" for name in differing]
    if (before.routing.schedule is None) != (config.routing.schedule is None):
        changes.append("no schedule" if config.routing.schedule is None else "a schedule")
    return ", ".join(changes)


def require_same_data(folder: Path, prepared: PreparedRun) -> None:
    """Raise UserError if the text or the tokenizer changed."""
    kept = folder / run_folders.DATA
    if not kept.is_file():
        return
    fix = f"restore it, or remove it and accept that with `planaria run check {folder} --accept`"
    now = prepared.dataset.meta
    was = documents.read_model(kept, type(now), fix=fix)
    unlike = any(old != new for old, new in zip(was.digests, now.digests, strict=False) if old and new)
    if unlike or was.content != now.content:
        data = prepared.config.data
        source = "data.mixture" if data.mixture else f"data.source = {data.source!r}"
        raise UserError(
            f"{folder}: the text of {source}, or its tokenizer, has changed since "
            "this run started; restore the old text, or start a new run"
        )


def rate_change(before: RunConfig, config: RunConfig, step: int) -> str:
    """Return a warning if another schedule changes the learning rate of update ``step``, with a fix; else ""."""
    lengths = [each.train.schedule_steps or each.train.steps for each in (before, config)]
    was, now = (learning_rate(c.optim, min(step, n), n) for c, n in zip((before, config), lengths, strict=True))
    if not 0 < step < config.train.steps or math.isclose(was, now, rel_tol=1e-6):
        return ""
    jump = f"the learning rate of step {step} is {now:.4g}, and was {was:.4g} by the former schedule"
    kept = config.model_copy(update={"optim": before.optim})
    if before.optim != config.optim and not rate_change(before, kept, step):
        return f"{jump}; leave optim unchanged to keep that"
    if lengths[0] >= config.train.steps:
        return f"{jump}; --train.schedule_steps {lengths[0]} keeps that"
    if step < config.optim.warmup:
        return f"{jump}; to extend a run later, set train.schedule_steps when it starts"
    return (
        f"{jump}; --optim.schedule constant --optim.lr {was:.4g} holds that rate. To extend a run along its schedule, "
        "set train.schedule_steps when it starts"
    )


def _first_block(saved: SealedCheckpoint, run: ResolvedRun) -> int | None:
    """Return the first block that is not used completely, or None if it follows from the samples.

    :raises UserError: if replicas were at different steps, and the changed ones train in lockstep or have another
        block size, since samples would be used twice.
    """
    config, manifest = run.config, saved.manifest
    block = manifest.block or config.pipeline.samples
    apart = run.replicas > 1 or config.exchange.replicas == 1
    even = manifest.first_block is None or manifest.first_block == (manifest.samples or 0) // block
    if even and not manifest.blocks_ahead:
        return manifest.first_block if block == run.block else None
    if not apart:
        raise UserError(
            f"{saved.folder}: its replicas were not all at one step, so they cannot continue in lockstep; "
            "resume with an exchange.kind other than 'allreduce', and without routing.mixed"
        )
    if block != run.block:
        raise UserError(
            f"{saved.folder}: its replicas were not all at one step, so the {block} samples of a replica's step cannot "
            f"become {run.block}; leave pipeline.microbatches and pipeline.microbatch_size as they were"
        )
    return manifest.first_block


def choose(store: CheckpointStore, name: str | None) -> SealedCheckpoint | None:
    """Return the checkpoint of this name, or the newest, or None if there is none yet.

    :raises UserError: if there is none of this name.
    """
    if name is None:
        return store.newest()
    by_name = {saved.folder.name: saved for saved in store.list()}
    if name not in by_name:
        raise UserError(f"--checkpoint {name}: no such checkpoint; there are: {', '.join(by_name) or 'none'}")
    return by_name[name]


def _generation(folder: Path, saved: SealedCheckpoint | None, config: RunConfig) -> int:
    """Return the run's last generation; 0 if it never had a controller.

    :raises UserError: if its state file is damaged or missing, since generations could repeat.
    """
    path = folder / "state.json"
    led = (folder / EVENTS).exists() and config.engine == run_folders.config_of(folder).engine == "fleet"
    if saved is not None and led and not path.exists():
        raise UserError(f"{path} is missing; restore it, or resume with --engine inline")
    return read_state(folder).generation if path.exists() else 0


def _origin(
    store: CheckpointStore, folder: Path, saved: SealedCheckpoint | None, run: ResolvedRun, notify: Notify
) -> Origin:
    """Return where to continue; stages missing in a partial checkpoint come from the newest whole one before it."""
    config = run.config
    generation = _generation(folder, saved, config)
    if saved is None:
        notify(f"{folder}: nothing has been saved; starting again from step 0")
        return Origin(generation=generation)
    if not saved.manifest.digests or not digests.read(folder):
        notify(f"{folder}: written by an older planaria, without digests; damage may go unnoticed")
    manifest = saved.manifest
    was, now = cut_of(manifest), cut_for(config)
    require_alike(was, now, str(saved.folder))
    load = _load(store, saved, was.lines == now.lines, range(now.stages + 1), notify)
    first_block = _first_block(saved, run)
    rule = recut.copy_rules(was, now, len(manifest.positions) if manifest.replicas > 1 else 1)
    notes = _notes(was, now, rule, config.optim)
    for line in notes:
        notify(f"{saved.folder.name}: {line}")
    positions = manifest.positions if run.replicas == manifest.replicas > 1 and rule.weights == "own" else {}
    if rule.outer != "own":
        positions = {number: ReplicaPosition(step=position.step) for number, position in positions.items()}
    return Origin(
        saved.step,
        generation,
        load,
        manifest.samples,
        faults_injected=not saved.whole,
        first_block=first_block,
        blocks_ahead=manifest.blocks_ahead,
        positions=positions,
        recut=Recut(checkpoint=saved.folder.name, was=_shape(was), now=_shape(now), notes=notes) if notes else None,
    )


def _shape(cut: RunCut) -> RunShape:
    kind = "" if cut.exchange is None else cut.exchange.kind
    model = cut.model
    return RunShape(
        stages=cut.stages,
        ends_layers=model.ends_layers,
        block_layers=list(model.block_layers or ()),
        vocab=model.vocab,
        replicas=cut.replicas,
        exchange=kind,
    )


def _load(
    store: CheckpointStore, saved: SealedCheckpoint, same_cut: bool, stages: Sequence[int], notify: Notify
) -> dict[int, str]:
    """Return the folder that each of ``stages`` is loaded from; missing ones start from the seed.

    :raises UserError: if a partial checkpoint would have to be re-cut.
    """
    missing = sorted(set(range(saved.manifest.pipeline_stages + 1)) - set(saved.manifest.stages))
    if not missing:
        return dict.fromkeys(stages, saved.folder.name)
    if not same_cut:
        raise UserError(
            f"{saved.folder}: stages {missing} are missing, and only a whole checkpoint can be re-cut; choose another "
            f"with --checkpoint, or resume with --pipeline.stages {saved.manifest.pipeline_stages}"
        )
    whole = next((s for s in reversed(store.list()) if s.whole and s.step <= saved.step), None)
    replacement = f"their state of step {whole.step}" if whole else "the seed's initial weights"
    notify(f"{saved.folder.name}: stages {missing} were lost; they continue from {replacement}")
    replacements = dict.fromkeys(missing, whole.folder.name) if whole is not None else {}
    return dict.fromkeys(saved.manifest.stages, saved.folder.name) | replacements


def _notes(was: RunCut, now: RunCut, rule: recut.ReplicaStarts, optim: OptimConfig) -> list[str]:
    """Return a line for each notable conversion of a run that continues in another shape."""
    lines = []
    if was.lines != now.lines:
        cuts = f"{_shape(was).cut}, now {_shape(now).cut}"
        lines.append(f"of {cuts}: re-cut by parameter, with moments, clocks and learning-rate scales")
        if optim.clip and optim.clip_by == "stage":
            lines.append(
                f"optim.clip = {optim.clip:g} bounds each stage's gradient: the new cut may clip "
                "differently than the old one; --optim.clip_by layer does not depend on the cut"
            )
    if more := now.model.vocab - was.model.vocab:
        rows = f"get {more} new rows, each the mean of all others" if more > 0 else f"lose their last {-more} rows"
        lines.append(f"of {was.model.vocab} tokens, now {now.model.vocab}: embedding and head {rows}")
    if was.replicas != now.replicas:
        counts = " now ".join(f"{n} replica{'s' * (n > 1)}," for n in (was.replicas, now.replicas)).rstrip(",")
        label = "the mean of weights and moments" if rule.weights == "mean" else "copies of the one model"
        outer = _OUTER[rule.outer] if _has_outer(was) or _has_outer(now) else ""
        lines.append(f"of {counts}: they begin from {label}{outer}")
    elif was.replicas > 1 and rule.outer == "reset":
        label = ", all start from the mean of weights and moments" if rule.weights == "mean" else ""
        lines.append(f"the outer state belongs to another exchange; it is reset{label}")
    return lines


def _has_outer(cut: RunCut) -> bool:
    return cut.replicas > 1 and (cut.exchange is None or bool(make_exchange(cut.exchange).parts))


_OUTER = {
    "own": "",
    "reset": ", and with a fresh outer state",
    "shared": ", and of the outer state; each gets the mean error feedback",
}
