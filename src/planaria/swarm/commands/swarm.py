"""``planaria swarm train``, ``swarm join`` and ``swarm show``.

They run local processes as peers, join one peer to a board, and trace every completion that a peer examined.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planaria.common.errors import RunStopped, UserError, suggestion
from planaria.config import kinds, recipe
from planaria.config.names import require_name
from planaria.config.registry import blame_custom_code
from planaria.report.tables import Table, show
from planaria.runtime.fleet.spawner import fork_server
from planaria.runtime.preparation import run_folders
from planaria.swarm.assemble import assemble, make_policy, make_task, select_device, selected_custom_classes
from planaria.swarm.attacks.attacker import refuse_ineffective_attack
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import PeerIdentity
from planaria.swarm.board.receipts import Agreement, Committee
from planaria.swarm.checks import make_layers
from planaria.swarm.completions.client import Client
from planaria.swarm.config.swarm_config import SwarmConfig
from planaria.swarm.config.swarm_recipe import SHARED_SETTINGS, load, peer_config, peer_names, run_config
from planaria.swarm.learning.advantages import group_advantages
from planaria.swarm.policy import POLICIES
from planaria.swarm.records.lines import (
    LOG,
    PEERS,
    SAMPLES,
    PeerStarted,
    RoundDone,
    SampleRecord,
    follow,
    read_log,
    read_samples,
)
from planaria.swarm.records.outcome import RunOutcome, accounts, debts, read_outcome
from planaria.swarm.report.progress import SwarmProgress
from planaria.swarm.report.swarm_report import show_outcome, write_swarm_report
from planaria.swarm.swarm_processes import PRELOAD, LiveSwarm, board_address, describe_failures


def start(path: Path, flags: Mapping[str, str], dry_run: bool, quiet: bool) -> int:
    """Run the swarm in the recipe ``path``; return the exit code."""
    config = load(path, flags, "swarm")
    fork_server([] if dry_run else PRELOAD)
    prepare(config, quiet, warmup=not dry_run)
    if dry_run:
        print(recipe.dump(config), end="")
        return 0
    folder = run_folders.create(config)
    with run_folders.lock_for_training(folder), SwarmProgress(config.rounds.count, quiet) as progress:
        codes = LiveSwarm(config, folder).run(progress.update, progress.show_exit)
    report_outcome(folder, config)
    if broken := describe_failures(codes):
        raise RunStopped(f"{folder}: {', '.join(broken)}; see their output in {folder / 'peers'}")
    return 0


def report_outcome(folder: Path, config: SwarmConfig) -> None:
    """Print the result of the run in ``folder`` and write its report, if an honest peer has started."""
    outcome = read_outcome(folder)
    if outcome.honest:
        show_outcome(outcome, config)
        print(f"report        {write_swarm_report(folder, config, outcome)}")
        print(f"export        planaria export {folder} --peer {outcome.honest[0].name} --to FOLDER")


def recorded_outcome(run: Path) -> tuple[SwarmConfig, RunOutcome]:
    """Return a run's configuration and its outcome so far; UserError if no peer has recorded one."""
    config, outcome = run_config(run), read_outcome(run)
    if not outcome.honest:
        raise UserError(f"{run}: no peer has been evaluated; wait for the first evaluation")
    return config, outcome


def prepare(config: SwarmConfig, quiet: bool, warmup: bool = True) -> None:
    """Check every peer's configuration before one is started.

    :param warmup: also run the warm-ups here, one at a time
    :raises UserError: if a setting is invalid
    """
    torch.set_num_threads(1)
    _require_foreign_groups(config)
    for name in peer_names(config):
        own = peer_config(config, name)
        task = make_task(own)
        POLICIES.make(own.policy.kind, own.policy.options)
        make_layers(own)
        select_device(own.policy)
        if own.policy.server:
            Client(own.policy).model(own.policy.serving.model)
        with blame_custom_code(partial(selected_custom_classes, own)):
            refuse_ineffective_attack(own.attack, task)
            if warmup:
                make_policy(own, task, None if quiet else print)


def _require_foreign_groups(config: SwarmConfig) -> None:
    """Raise UserError if peers would draw more groups than the others write. Further peers may join an own board."""
    rounds = config.rounds
    written = rounds.prompts // config.size * (config.size - 1)
    if not config.board and (rounds.foreign or 0) > written:
        raise UserError(
            f"rounds.foreign = {rounds.foreign}: the other peers write {written} groups (rounds.prompts = "
            f"{rounds.prompts}, size = {config.size}); use at most as many, or increase rounds.prompts"
        )


def join_swarm(path: Path | None, flags: Mapping[str, str], names_by_id: str, quiet: bool) -> int:
    """Join the swarm on ``--board`` until its last round; return the exit code.

    The rules on the board take precedence over the recipe; other settings are this peer's own.
    """
    require_name(names_by_id, "--as")
    config = _joining_config(path, flags)
    torch.set_num_threads(config.policy.threads)
    folder = Path(config.out) / config.name
    identity = PeerIdentity.load_or_create(folder / PEERS / names_by_id / "identity.pem")
    on_progress = None if quiet else print
    with blame_custom_code(partial(selected_custom_classes, config)):
        peer = assemble(config, names_by_id, folder, config.board, identity, late=True, on_progress=on_progress)
    if not (folder / "config.json").is_file():
        run_folders.write_config(folder, config)
    new_records = follow(folder / PEERS / names_by_id / LOG)
    new_records()  # skip the records of an earlier start
    with SwarmProgress(config.rounds.count, quiet) as progress:

        def show_new_records() -> None:
            for record in new_records():
                progress.update(names_by_id, record)

        with blame_custom_code(partial(selected_custom_classes, config)):
            peer.run(show_new_records)
        show_new_records()
    report_outcome(folder, config)
    return 0


def _joining_config(path: Path | None, flags: Mapping[str, str]) -> SwarmConfig:
    folder = path or Path("swarm")
    tree: dict[str, Any] = recipe.read(path) if path else {}
    if path:
        kinds.require_kind(tree, path, "swarm", "drill")
    tree.pop("drill", None)
    own = recipe.resolve(SwarmConfig, tree, flags, folder)
    if not own.board:
        raise UserError("swarm join: no board is set; pass --board FOLDER or URL")
    try:
        board_rules = dict(Board(own.board).rules.rules)
    except UserError:
        if path is None:
            raise
        return own  # this peer will create the run
    section = board_rules.get("task", {})
    task: dict[str, Any] = section if isinstance(section, dict) else {}
    kind = task.get("name")
    if own.task.name != kind:
        raise UserError(f"task.name = {own.task.name!r}: this run's task is {kind!r}; pass --task {kind}")
    # The rules on the board contain only shared settings, no paths or models.
    shared = {key: board_rules[key] for key in SHARED_SETTINGS if key in board_rules and key != "task"}
    shared["task"] = {key: value for key, value in task.items() if key in SHARED_SETTINGS["task"]}
    both = recipe.merge_tables(own.model_dump(mode="json"), shared, SwarmConfig)
    merged = recipe.resolve(SwarmConfig, both, {}, folder, f"board {own.board}")
    own_settings, merged_settings = recipe.flatten(own), recipe.flatten(merged)
    for name in flags:
        if (mine := own_settings.get(name)) != (theirs := merged_settings.get(name)):
            raise UserError(f"--{name} {mine}: the run was created with {theirs}; remove the flag")
    return merged


MAX_LINES = 200
"""maximum number of lines shown"""


def show_completions(
    run: Path, peer: str, number: int | None, problem: int | None, source: str | None, rejected: bool
) -> None:
    """Print a line per selected completion that ``peer`` examined; None and False select all.

    :raises UserError: if there is no such run, peer, source or recorded round.
    """
    config = run_config(run)
    peers = sorted(path.name for path in (run / PEERS).iterdir() if (path / SAMPLES).is_file())
    if peer not in peers:
        raise UserError(f"{run} has no records of peer {peer!r}; {suggestion(peer, peers)}")
    names = {
        record.id: path.name
        for path in (run / PEERS).iterdir()
        for record in read_log(path / LOG)
        if isinstance(record, PeerStarted)
    }
    lines = list(read_samples(run / PEERS / peer / SAMPLES))
    sources = {name for line in lines for name in (names.get(line.peer), line.peer) if name}
    if source is not None and source not in sources:
        raise UserError(f"--source {source}: sent {peer} nothing; {suggestion(source, sorted(sources))}")
    rounds = sorted({line.round for line in lines})
    if rounds and number is not None and number not in rounds:
        raise UserError(f"--round {number}: {peer} recorded rounds {rounds[0]} to {rounds[-1]}; choose one")
    results = [
        line
        for line in lines
        if number in (None, line.round)
        and problem in (None, line.problem)
        and source in (None, names.get(line.peer), line.peer)
        and (not rejected or line.layer)
    ]
    texts = _read_texts(config, run, results) if problem is not None else {}
    unused = unused_reasons(config, lines)
    _print_completions(peer, results, names, texts, unused, run / PEERS / peer / SAMPLES)


def unused_reasons(config: SwarmConfig, lines: list[SampleRecord]) -> dict[tuple[str, int, int, int], str]:
    """Return accepted completion → why it was not learned from; ``lines`` holds all that a peer examined."""
    groups = defaultdict[tuple[int, int, str], list[SampleRecord]](list)
    for line in lines:
        groups[line.round, line.problem, line.peer if config.rounds.mode == "vertical" else ""].append(line)
    rejected, penalized, drawn = config.defence.rejected, config.loss.overlong > 0, config.rounds.own is not None
    reasons = {}
    for group in groups.values():
        flat = group_advantages([line.reward for line in group if rejected == "zero" or not line.layer]) is None
        reason = "its group was not drawn"
        if flat or not drawn:
            reason = "all rewards of its group are equal" + (f", or {reason}" if drawn and penalized else "")
        reasons.update({line.name: reason for line in group})
    return reasons


def _read_texts(config: SwarmConfig, run: Path, lines: list[SampleRecord]) -> dict[tuple[str, int, int, int], str]:
    """Return the texts of the completions, from the board, where all messages remain."""
    board = Board(board_address(config, run))
    return {
        (peer, number, group.problem, index): completion.text
        for number in {line.round for line in lines}
        for peer, message in board.gather(number, {line.peer for line in lines}).found.items()
        for group in message.groups
        for index, completion in enumerate(group.completions)
    }


def _print_completions(
    peer: str,
    lines: list[SampleRecord],
    names: dict[str, str],
    texts: dict[tuple[str, int, int, int], str],
    unused: dict[tuple[str, int, int, int], str],
    file: Path,
) -> None:
    title = f"{peer}: {len(lines)} completions, {sum(line.advantage is not None for line in lines)} learned from"
    head = ["round", "problem", "from", "reward", "passed", "result", *(["text"] if texts else [])]
    rows = [list(_cells(line, names, texts, unused[line.name])) for line in lines[:MAX_LINES]]
    show([Table(title, head, rows, numbers_from=len(head))])
    if len(lines) > MAX_LINES:
        print(f"{len(lines) - MAX_LINES} more in {file}; narrow the list with --round, --problem or --source")


def _cells(
    line: SampleRecord, names: dict[str, str], texts: dict[tuple[str, int, int, int], str], unused: str
) -> Iterator[str]:
    result = f"rejected by {line.layer}: {line.reason}" if line.layer else f"not used: {unused}"
    if line.advantage is not None:
        result = f"learned from, advantage {line.advantage:+z.2f}"
    yield str(line.round)
    yield str(line.problem)
    yield f"{names.get(line.peer, line.peer[:8])} #{line.index}"
    yield f"{line.reward:g}"
    yield ", ".join(line.passed)
    yield result
    if texts:
        yield repr(texts.get(line.name, ""))


def show_credits(run: Path) -> None:
    """Print the credits of each peer of the swarm in ``run``, by the certificates on its board.

    :raises UserError: if it is not a swarm's run, has no committee, or no records.
    """
    config = run_config(run)
    if not config.receipts.committee:
        raise UserError(f"{run}: its recipe has no committee, so nothing is certified; set receipts.committee")
    logs = {path.parent: read_log(path) for path in sorted((run / PEERS).glob(f"*/{LOG}"))}
    names = {folder: r for folder, log in logs.items() for r in log if isinstance(r, PeerStarted)}
    if not names:
        raise UserError(f"{run}: no peer has completed a round; wait for the first round")
    rounds = {record.round for log in logs.values() for record in log if isinstance(record, RoundDone)}
    board = Board(board_address(config, run))
    agreement = Agreement(board, "", Committee.from_rules(board.rules.rules), 0.0)
    certified = {number for number in sorted(rounds) if agreement.certified_text("round", number) is not None}
    names_by_id = {started.id: started.name for started in names.values()}
    samples = {started.id: list(read_samples(folder / SAMPLES)) for folder, started in names.items()}
    rows = [
        [names_by_id.get(peer, peer[:8]), peer, str(value.certified), str(value.other), f"{value.part:.3f}"]
        for peer, value in accounts(samples, certified).items()
    ]
    head = ["peer", "id", "accepted, certified", "not certified", "share of Σ|Â|"]
    title = f"{config.name}: {len(certified)} of {len(rounds)} rounds are certified"
    tables = [Table(title, head, rows, numbers_from=2)]
    if price := config.receipts.price:
        pending = [
            [names_by_id.get(a, a[:8]), names_by_id.get(b, b[:8]), str(credits)]
            for (a, b), credits in debts(samples, certified, price).items()
        ]
        title = f"residual, at {price} for each"
        tables.append(Table(title, ["owes", "to", "credits"], pending, numbers_from=2))
    show(tables)
