"""``planaria checkpoint`` and ``planaria export``: list, verify and convert checkpoints; export and import folders of
other programs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Option

from planaria.cli.flags import Run, command, flag, reject_flags, run_argument, switch
from planaria.cli.settings import Settings
from planaria.common.errors import UserError
from planaria.config import folders
from planaria.config.shipped import find

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.report.tables import Table
    from planaria.runtime.checkpoint.recut import SavedReplica
    from planaria.runtime.checkpoint.stage_file import StageContents
    from planaria.runtime.checkpoint.store import CheckpointStore, SealedCheckpoint

SOURCE = "a run; with --from, the folder of another program"
FROM = "format of another program's folder: dcp (torch.distributed.checkpoint) or universal (DeepSpeed's)"
RECIPE = "with --from: the new run's recipe, or a run with that recipe"
NAMES = "with --from: JSON of the folder's tensor names → parameters, if not those of Hugging Face"
Format = Literal["hf", "dcp", "universal"]
Checkpoint = Annotated[str | None, flag("NAME", "this checkpoint of the run (default: the newest)")]


Precision = Literal["fp32", "bf16"]
FORMATS = (
    "hf: Hugging Face, only weights; with moments and clocks: dcp, of torch.distributed.checkpoint, or universal, "
    "DeepSpeed's"
)
DIGITS = 12
"""number of digits of a digest in tables"""
SHARD_MB = 4096
"""default maximum size of a file of weights, MB"""


@command("checkpoint show")
def _show(
    run: Run,
    *,
    checkpoint: Checkpoint = None,
    verify: Annotated[
        bool, switch("--verify", "read the run's checkpoints instead, or the named one, and check every digest")
    ] = False,
) -> int:
    """List the parameters of a checkpoint, with clocks, sizes and digests."""
    from planaria.report import tables

    if verify:
        for line in verify_checkpoints(run, checkpoint):
            print(line)
    else:
        tables.show(_tabulate(run, checkpoint))
    return 0


@command("checkpoint convert", cls=Settings)
def _convert(
    run: Annotated[Path, run_argument(SOURCE)],
    *,
    to: Annotated[Path | None, flag("FOLDER", "for a run: folder of checkpoints to write the converted one to")] = None,
    checkpoint: Checkpoint = None,
    kind: Annotated[Format | None, Option("--from", metavar="dcp|universal", help=FROM)] = None,
    recipe: Annotated[Path | None, flag("RECIPE", RECIPE, parser=find)] = None,
    names: Annotated[Path | None, flag("FILE", NAMES)] = None,
    settings: dict[str, str],
) -> int:
    """Convert a run's checkpoint to other settings, or another program's checkpoint to a new run."""
    if kind is None:
        reject_flags({"recipe": recipe, "names": names}, "requires --from, the format of another program's folder")
        if to is None:
            raise UserError(f"checkpoint convert {run}: pass --to FOLDER, or --from FORMAT for another program's")
        notes = _convert_run(run, checkpoint, settings, to)
    else:
        reject_flags(
            {"to": to, "checkpoint": checkpoint}, "is for a checkpoint of a run; --from writes a run, OUT/NAME"
        )
        if recipe is None:
            raise UserError(f"--from {kind}: pass --recipe RECIPE, the new run's recipe or a run with that recipe")
        notes = _start_from_folder(run, recipe, settings, kind, names)
    print("\n".join(notes))
    return 0


@command("export")
def _export(
    run: Annotated[Path, run_argument("a run, or a Llama: a model's folder, a GGUF file or hf:NAME")],
    *,
    to: Annotated[Path, flag("FOLDER", "folder to write")],
    kind: Annotated[Format, Option("--format", help=FORMATS)] = "hf",
    checkpoint: Checkpoint = None,
    precision: Annotated[Precision | None, Option(help="hf: type of weights (default fp32)")] = None,
    shard: Annotated[
        int | None,
        Option(metavar="MIB", min=1, max=1 << 20, help="hf: largest file, unless a tensor or layer is larger (4096)"),
    ] = None,
    merge: Annotated[bool, switch("--merge", "hf: add LoRA adapters to the weights of their base model")] = False,
    peer: Annotated[str | None, flag("NAME", "in a swarm's run: the model of this peer")] = None,
    number: Annotated[
        int | None, flag("N", "with --peer: after N rounds (default: the newest kept)", "--round")
    ] = None,
) -> int:
    """Export a run's model as a Hugging Face folder, or its checkpoint for another program."""
    from planaria.models.huggingface import is_exported
    from planaria.runtime.api.import_export import export_again
    from planaria.runtime.preparation.weight_sources import HUB

    swarm, model = folders.find_kind("swarm"), is_exported(run) or run.is_file() or str(run).startswith(HUB)
    if peer is None and (swarm.matches(run) or number is not None):
        raise UserError(f"{run}: pass --peer, such as --peer p0")
    if peer is None and not model:
        print("\n".join(_export_run(run, checkpoint, kind, to, precision, shard, merge)))
        return 0
    source = "a swarm's peer" if peer is not None else "a model"
    options = {
        "format": None if kind == "hf" else kind,
        "checkpoint": checkpoint,
        "precision": precision,
        "shard": shard,
        "merge": merge or None,
    }
    reject_flags(options, f"is for a run's checkpoint, and {run} is {source}; remove it")
    print(export_again(run, to) if peer is None else swarm.function("export_peer")(run, peer, to, number, print))
    return 0


def _tabulate(folder: Path, name: str | None) -> list[Table]:
    """Return a table of every parameter in a checkpoint (default: the newest)."""
    from planaria.report.tables import Table
    from planaria.runtime.checkpoint.cut import atom_name, require_known
    from planaria.runtime.checkpoint.loading import copies_of_stages, cut_of
    from planaria.runtime.checkpoint.recut import equal_copies

    saved = _choose_checkpoint(folder, name)
    manifest, cut = saved.manifest, cut_of(saved.manifest)
    require_known(cut, saved.folder)
    copies = copies_of_stages(saved.folder, manifest, manifest.stages)
    pattern = "unique" if cut.replicas == 1 else "replicated" if equal_copies(cut) else "average"
    first = next(iter(copies.values())).stages
    rows = [
        (atom_name(cut, stage, local), str(stage), pattern, *_atom(contents, local))
        for stage, contents in first.items()
        for local in contents.names("weights")
    ]
    agree = "" if manifest.exchange is None or cut.replicas == 1 else f" ({manifest.exchange.kind})"
    title = f"{saved.folder}: step {saved.step}, {cut.stages} stages, replicas: {cut.replicas}{agree}, "
    title += f"{sum(contents.path.stat().st_size for contents in _files(copies)):,} bytes"
    head = ("parameter", "stage", "pattern", "type", "updates", "lr scale", "bytes", "weights' SHA-256")
    return [Table(title, head, rows, 4)]


def _atom(contents: StageContents, local: str) -> tuple[str, ...]:
    """Return the type, clock, scale, bytes with moments, and digest of a file's parameter."""
    entry, clock = contents.entries[f"weights.{local}"], contents.clocks.get(local)
    size = sum(
        contents.entries[key].nbytes
        for kind in ("weights", *contents.state)
        if (key := f"{kind}.{local}") in contents.entries
    )
    scale = contents.scales.get(local, contents.lr_scale)
    return (
        str(entry),
        "-" if clock is None else str(clock),
        f"{scale:g}",
        f"{size:,}",
        entry.sha256.hex()[:DIGITS] or "-",
    )


def verify_checkpoints(folder: Path, name: str | None) -> Iterator[str]:
    """Read the checkpoints of a run (or only the one with this name); yield a line for each valid one.

    :raises UserError: for the first file or parameter that is missing, damaged or inconsistent.
    """
    from planaria.runtime.checkpoint.cut import require_known
    from planaria.runtime.checkpoint.loading import copies_of_stages, cut_of, require_file
    from planaria.runtime.checkpoint.recut import require_whole
    from planaria.runtime.checkpoint.store import CheckpointStore

    checkpoint = _choose_checkpoint(folder, name)
    for saved in CheckpointStore(folder / "checkpoints").list() if name is None else [checkpoint]:
        cut = cut_of(saved.manifest)
        require_known(cut, saved.folder)
        copies = copies_of_stages(saved.folder, saved.manifest, saved.manifest.stages)
        require_whole(cut, copies)
        files = _files(copies)
        for file in files:
            require_file(saved.folder, file)
        count = sum(len(file.entries) for file in files)
        note = "" if saved.whole else " (partial)"
        note += "" if saved.manifest.digests else "; without digests (written by an older planaria)"
        yield f"{saved.folder.name}{note}: {len(files)} files, {count} tensors: unchanged"


def _convert_run(folder: Path, name: str | None, changes: Mapping[str, object], to: Path) -> list[str]:
    """Write a checkpoint of a run, as resumed with ``changes``, into a folder of checkpoints; return notes."""
    from planaria.control.facts.events import ReplicaPosition
    from planaria.runtime.checkpoint.store import CheckpointManifest, CheckpointStore
    from planaria.runtime.preparation.resumption import resumption_of
    from planaria.runtime.resolved_run import ResolvedRun

    notes: list[str] = []
    resumption = resumption_of(folder, changes, name, notes.append)
    if resumption.saved is None or not resumption.saved.whole:
        raise UserError(
            f"{folder} has no complete checkpoint to convert; continue training with `planaria train --resume {folder}`"
        )
    if to.resolve() == resumption.store.folder.resolve() or (to / resumption.saved.folder.name).exists():
        raise UserError(f"--to {to}: would replace a checkpoint; choose another folder")
    config = resumption.config
    before = resumption.saved.manifest
    store = CheckpointStore(to)
    replicas = config.exchange.replicas
    stages = config.pipeline.stages
    step = before.step
    positions = dict.fromkeys(range(replicas), ReplicaPosition(step=step)) if replicas > 1 else {}
    manifest = CheckpointManifest(
        step=step,
        stages=list(range(stages + 1)),
        pipeline_stages=stages,
        samples=before.samples,
        replicas=replicas,
        first_block=resumption.origin.first_block,
        blocks_ahead=before.blocks_ahead,
        positions=before.positions if before.replicas == replicas else positions,
        digests=_write_stages(store, resumption.saved.folder, config, step),
        model=config.model,
        exchange=config.exchange,
        block=ResolvedRun(config).block,
    )
    return [*notes, str(store.seal(resumption.saved.folder.name, manifest, config.checkpoint.keep).folder)]


def _export_run(
    folder: Path,
    name: str | None,
    kind: Format,
    to: Path,
    precision: Precision | None,
    shard_mb: int | None,
    merge: bool,
) -> list[str]:
    """Export a checkpoint (default: the newest whole one) for another program; return notes."""
    from planaria.runtime.api.import_export import export_run, export_state
    from planaria.runtime.preparation import run_folders

    run_folders.config_of(folder)
    saved = run_folders.newest_whole(folder) if name is None else _choose_checkpoint(folder, name)
    if kind == "hf":
        export_run(folder, to, saved, precision or "fp32", (shard_mb or SHARD_MB) << 20, merge)
        return [str(to)]
    reject_flags(
        {"precision": precision, "shard": shard_mb, "merge": merge or None},
        "requires --format hf; moments are exported with fp32 weights, tensor by tensor",
    )
    return [*export_state(folder, to, kind, saved), str(to)]


def _start_from_folder(
    folder: Path, origin: Path, changes: Mapping[str, str], kind: Format, names: Path | None
) -> list[str]:
    """Start a run from another program's folder with a recipe, or the configuration of a run; return notes."""
    if kind == "hf":
        raise UserError(
            f"--from hf: {folder} has no moments to resume with; start from its weights: `planaria train {origin} "
            f"--train.start {folder}`"
        )
    from planaria.runtime.api.configure import configure
    from planaria.runtime.api.import_export import import_run
    from planaria.runtime.preparation import run_folders

    recipe = _run_config(origin) if (origin / run_folders.CONFIG).is_file() else origin
    config = configure(recipe, settings=changes)
    imported, notes = import_run(folder, config, kind, names)
    return [*notes, f"resume with   planaria train --resume {imported}"]


def _run_config(folder: Path) -> RunConfig:
    """Return a run's configuration, with the faults and the schedule in its folder, and without starting weights."""
    from planaria.config.schema import ChaosConfig
    from planaria.runtime.preparation import run_folders
    from planaria.runtime.preparation.prepare import on_schedule

    config = run_folders.config_of(folder, *run_folders.RUN_FILES)
    config = config.model_copy(update={"train": config.train.model_copy(update={"start": None})})
    if config.routing.schedule is not None:
        config = on_schedule(config, (folder / run_folders.SCHEDULE).absolute())
    if config.chaos.trace is not None:
        config = config.model_copy(update={"chaos": ChaosConfig(trace=str((folder / run_folders.TRACE).absolute()))})
    return config


def _write_stages(store: CheckpointStore, source: Path, config: RunConfig, step: int) -> dict[str, str]:
    """Write every stage of every replica; return file → digest."""
    from planaria.runtime.checkpoint.loading import load_stage
    from planaria.runtime.checkpoint.stage_file import write_stage
    from planaria.runtime.checkpoint.store import stage_name

    replicas, digests = config.exchange.replicas, dict[str, str]()
    for replica in range(replicas):
        for stage in range(config.pipeline.stages + 1):
            state = load_stage(source, config, stage, replica)
            written = write_stage(store.unsealed_replica_folder(step, replicas, replica, 0), stage, step, state)
            digests[stage_name(stage, replica, replicas)] = written.sha256
    return digests


def _choose_checkpoint(folder: Path, name: str | None) -> SealedCheckpoint:
    from planaria.runtime.checkpoint.store import CheckpointStore
    from planaria.runtime.preparation import run_folders
    from planaria.runtime.preparation.resumption import choose

    run_folders.config_of(folder)
    saved = choose(CheckpointStore(folder / "checkpoints"), name)
    if saved is None:
        raise UserError(f"{folder} has no checkpoint; continue training with `planaria train --resume {folder}`")
    return saved


def _files(copies: Mapping[int, SavedReplica]) -> list[StageContents]:
    tables = [table for copy in copies.values() for table in (copy.stages, copy.outer)]
    return list({file.path: file for table in tables for file in table.values()}.values())
