"""``planaria swarm join``: join a swarm as one peer, through its board."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from planaria.cli.commands.swarm import sum_up
from planaria.common.errors import UserError
from planaria.config import recipe
from planaria.config.names import require_name
from planaria.config.registry import blaming
from planaria.runtime.engine import runs
from planaria.swarm.assemble import assemble, own_classes
from planaria.swarm.board.board import Board
from planaria.swarm.board.identity import Identity
from planaria.swarm.config import SwarmConfig
from planaria.swarm.records.lines import LOG, PEERS, follow
from planaria.swarm.report.progress import SwarmProgress
from planaria.swarm.setting import AGREED


def take_part(path: Path | None, flags: Mapping[str, str], called: str, quiet: bool) -> int:
    """Join the swarm on ``--board`` and take part until its last round; the exit code.

    What the run on the board has agreed on goes before the recipe; everything else is this peer's own choice.
    """
    require_name(called, "--as")
    config = _config(path, flags)
    torch.set_num_threads(config.policy.threads)
    folder = Path(config.out) / config.name
    identity = Identity.kept(folder / PEERS / called / "identity.pem")
    told = None if quiet else print
    with blaming(partial(own_classes, config)):
        peer = assemble(config, called, folder, config.board, identity, late=True, told=told)
    if not (folder / "config.json").is_file():
        runs.keep_config(folder, config)
    news = follow(folder / PEERS / called / LOG)
    news()  # of an earlier visit
    with SwarmProgress(config.rounds.count, quiet) as progress:

        def tell() -> None:
            for record in news():
                progress.told(called, record)

        with blaming(partial(own_classes, config)):
            peer.run(tell)
        tell()
    sum_up(folder, config)
    return 0


def _config(path: Path | None, flags: Mapping[str, str]) -> SwarmConfig:
    place = path or Path("swarm")
    tree: dict[str, Any] = recipe.read(path) if path else {}
    if path:
        recipe.require_kind(tree, path, "swarm", "drill")
    tree.pop("drill", None)
    own = recipe.resolve(SwarmConfig, tree, flags, place)
    if not own.board:
        raise UserError("swarm join: where is the board? give --board FOLDER or URL")
    try:
        there = dict(Board.open(own.board).rules.rules)
    except UserError:
        if path is None:
            raise
        return own  # nobody has founded the run yet: this peer will
    said = there.get("task", {})
    task: dict[str, Any] = said if isinstance(said, dict) else {}
    kind = task.get("name")
    if own.task.name != kind:
        raise UserError(f"task.name = {own.task.name!r}: this run's task is {kind!r}; give --task {kind}")
    # Only what peers agree on is the founder's to say: not where files go, nor which model to fetch.
    agreed = {key: there[key] for key in AGREED if key in there and key != "task"}
    agreed["task"] = {key: value for key, value in task.items() if key in AGREED["task"]}
    merged = recipe.resolve(
        SwarmConfig, recipe.overlaid(own.model_dump(mode="json"), agreed), {}, place, f"board {own.board}"
    )
    given, now = recipe.flat(own), recipe.flat(merged)
    for name in flags:
        if (mine := given.get(name)) != (theirs := now.get(name)):
            raise UserError(f"--{name} {mine}: this run was founded with {theirs}; leave the flag out")
    return merged
