"""``planaria run check``: replay a run's log, or accept manual changes to a folder."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from planaria.cli.flags import command, run_argument, switch
from planaria.common.errors import RunStopped, UserError

if TYPE_CHECKING:
    from planaria.control.log.state_file import StateFile


@command("run check")
def _check(
    run: Annotated[Path, run_argument("a run; with --accept also an exported model")],
    *,
    losses: Annotated[
        bool, switch("--losses", "also repeat the training in this process, and compare every loss")
    ] = False,
    accept: Annotated[bool, switch("--accept", "accept manual changes to the folder, and check nothing")] = False,
) -> int:
    """Replay a run's log, and compare the decisions."""
    if accept:
        print("\n".join(_accept_changes(run)))
        return 0
    print(replay_run(run))
    if losses:
        print(repeat_training(run))
    return 0


def replay_run(folder: Path) -> str:
    """Replay a run's log; return a description of the result.

    :raises RunStopped: if a decision or the final state differs.
    :raises UserError: if the run had no controller.
    """
    from planaria.control.facts.decisions import Spawn
    from planaria.control.log.reader import EVENTS, read_run
    from planaria.control.log.state_file import describe, read_state
    from planaria.control.replay import replay
    from planaria.runtime.preparation import run_folders

    if (folder / run_folders.CONFIG).is_file():
        run_folders.verify_digests(folder, run_folders.CONFIG)
    record = read_run(folder)
    if not record.starts:
        raise UserError(f"{folder / EVENTS} has no start of a run, so it cannot be replayed; restore the log")
    if not any(isinstance(fact, Spawn) for _, fact in record.history):
        raise UserError(
            f"{folder} was trained inline by an older planaria, without a controller, so it cannot be replayed"
        )
    replayed = replay(fact for _, fact in record.history)
    problems = list(replayed.problems)
    saved, recomputed = _comparable(read_state(folder)), _comparable(describe(replayed.state))
    if replayed.state.over:  # before the end, the log is ahead of the state
        problems += [
            f"state.json: {k} is {saved[k]!r}, replayed {recomputed[k]!r}" for k in saved if saved[k] != recomputed[k]
        ]
    if problems:
        raise RunStopped("\n".join([f"{folder}: the log does not explain the run:", *problems[:10]]))
    end = "the same final state" if replayed.state.over else "a run that has not ended"
    answer = (
        f"{replayed.events} events led to the same {replayed.decisions} decisions and {end}: "
        f"step {recomputed['step']}, generation {recomputed['generation']}, {recomputed['phase']}"
    )
    shapes = [
        f"continued in another shape: {started.recut}" for _, started in record.starts if started.recut is not None
    ]
    return "\n".join([answer, *shapes])


def repeat_training(folder: Path) -> str:
    """Repeat a run in this process, in the order of its log; return a description of the result.

    :raises RunStopped: if a loss or gradient norm differs.
    :raises UserError: if the run cannot be repeated.
    """
    import tempfile

    from planaria.control.log.reader import read_run
    from planaria.runtime.engine.repetition import repeat_run

    record = read_run(folder)
    with tempfile.TemporaryDirectory() as scratch:
        repeated = repeat_run(record.config, record.history, folder, Path(scratch))
    if repeated.differing:
        shown = "; ".join(repeated.differing[:10])
        raise RunStopped(f"{folder}: {len(repeated.differing)} of {repeated.compared} results differ: {shown}")
    left_out = f"; not covered: {'; '.join(repeated.not_covered)}" if repeated.not_covered else ""
    count, steps = f"{repeated.compared} losses and gradient norms", ", ".join(repeated.steps)
    return f"{count} of steps {steps} were reproduced bit for bit{left_out}"


def _comparable(state: StateFile) -> dict[str, object]:
    """Return the fields that a replay determines: all except process ids and start times."""
    return state.model_dump(exclude={"controller": True, "workers": {"__all__": {"start_ticks"}}})


def _accept_changes(folder: Path) -> list[str]:
    """Rewrite the folder's list of digests; return a line for each changed file.

    Checkpoints are excluded, since no run should continue from a damaged one.

    :raises UserError: if the folder is neither a run nor an exported model, or its configuration is invalid.
    """
    from planaria.common import digests, documents
    from planaria.config import folders, recipe
    from planaria.control.log.reader import ID
    from planaria.models.huggingface import is_exported
    from planaria.runtime.preparation import run_folders

    if is_exported(folder):
        names = [file.name for file in folder.iterdir() if file.name != digests.FILE and not file.name.startswith(".")]
        return _accept_files(folder, names)
    if not (folder / run_folders.CONFIG).is_file():
        raise UserError(f"{folder}: neither a run nor an exported model; use the folder of one, such as runs/NAME")
    with run_folders.lock_for_training(folder):
        kind = folders.kind_of(folder)
        if kind is None or not kind.has_own_config:
            recipe.parse(documents.read_text(folder / run_folders.CONFIG), str(folder / run_folders.CONFIG))
        return _accept_files(folder, (*run_folders.RUN_FILES, ID))


def _accept_files(folder: Path, names: Iterable[str]) -> list[str]:
    from planaria.common import digests

    changed = digests.replace_list(folder, names)
    return [f"{folder / name}: accepted in its current state" for name in changed] or [f"{folder}: nothing changed"]
