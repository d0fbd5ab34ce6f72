"""A recipe for a swarm taken apart: the rules that hold for all peers, and each peer's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planaria.common import documents
from planaria.common.errors import UserError, nearest
from planaria.config import recipe
from planaria.runtime.engine import runs
from planaria.swarm.attacks import ATTACKS, HONEST, watched
from planaria.swarm.config import CONSENSUS, SwarmConfig
from planaria.swarm.records.lines import PEERS
from planaria.swarm.tasks.base import Task

AGREED: Any = {
    "seed": True,
    "size": True,
    "task": {"name", "reward", "agreement"},
    "rounds": {"count", "mode", "prompts", "group"},
    "sampling": True,
    "receipts": True,
}
"""what peers must have in common, or they could not tell an honest completion from another"""


def load(path: Path, flags: Mapping[str, str], *commands: str) -> SwarmConfig:
    """The swarm in the recipe ``path`` with ``flags`` laid over it, every peer's configuration checked.

    ``commands``: of which it must be a recipe; any, unless given.

    :raises UserError: naming file, peer, key and what to write instead.
    """
    tree = recipe.read(path)
    if commands:
        recipe.require_kind(tree, path, *commands)
    tree.pop("drill", None)  # what else a recipe is for
    return checked(recipe.resolve(SwarmConfig, tree, flags, path), str(path))


def checked(config: SwarmConfig, place: str) -> SwarmConfig:
    """``config``, if all its peers' configurations are right too; UserError otherwise."""
    for name in config.peers:
        if name not in names(config):
            raise UserError(f"{place}: peers.{name}: there is no such peer; {nearest(name, names(config))}")
    if config.task.reward == CONSENSUS and not {"lr"} & _said(config, "optim"):
        raise UserError(
            f"{place}: task.reward = 'consensus': name a learning rate yourself (optim.lr): too large an "
            "update makes peers worse, and what they then agree on becomes the truth; begin with 2e-4 and warm-up"
        )
    for name in names(config):
        of_peer(config, name, place)
    return config


def _said(config: SwarmConfig, section: str) -> set[str]:
    """The settings of a section that somebody wrote, rather than left as they are."""
    found: Any = getattr(config, section)
    return found.model_fields_set if section in config.model_fields_set else set()


def of_run(run: Path) -> SwarmConfig:
    """The configuration of a swarm's run; UserError when the folder is none."""
    file = run / "config.json"
    if not (run / PEERS).is_dir() or not file.is_file():
        raise UserError(f"{run}: is no run of a swarm; start one with `planaria swarm RECIPE`")
    runs.require(run, runs.CONFIG)
    return documents.model(file, SwarmConfig, mend="bring it back as the run wrote it")


def names(config: SwarmConfig) -> list[str]:
    """The peers of a swarm on one machine."""
    return [f"p{number}" for number in range(config.size)]


def of_peer(config: SwarmConfig, name: str, place: str = "recipe") -> SwarmConfig:
    """What ``name`` runs with: the recipe with its own tables laid over.

    :raises UserError: for unknown keys and values out of range, and for rules that one peer cannot change alone.
    """
    changes = config.peers.get(name, {})
    if "peers" in changes:
        raise UserError(f"{place}: peers.{name}.peers: a peer has none of its own; write [peers.NAME] for each")
    own = config.model_dump(mode="json", exclude={"peers"})
    merged = recipe.resolve(SwarmConfig, recipe.overlaid(own, changes), {}, Path(place), f"peers.{name}")
    ours, theirs = agreed(config), agreed(merged)
    if ours != theirs:
        key = next(key for key in ours if ours[key] != theirs[key])
        raise UserError(f"{place}: peers.{name}.{key}: all peers must have the same; set it for the whole swarm")
    _refuse_senseless(merged, f"{place}: peers.{name}" if changes else place)
    return merged


def _refuse_senseless(config: SwarmConfig, place: str) -> None:
    """Attacks that cannot be made: found here, not by a peer that has already begun."""
    attack, key = config.attack, ""
    if attack.kind == HONEST and attack.options:
        raise UserError(f"{place}: attack.options: attack.kind = {HONEST!r} has none; leave them out")
    try:
        if attack.kind != HONEST:
            ATTACKS.make(attack.kind, attack.options)
        for kind in [*config.evaluate.watch, *config.evaluate.phrases]:
            key = f"evaluate.phrases.{kind}: " if kind in config.evaluate.phrases else "evaluate.watch: "
            watched(kind, config.evaluate.phrases)
    except UserError as error:
        raise UserError(f"{place}: {key}{error}") from None


def rules(config: SwarmConfig, task: Task) -> dict[str, Any]:
    """What all peers of a run agree on, as plain JSON: the same settings, and the very same problems."""
    return agreed(config) | {"problems": task.identity}


def agreed(config: SwarmConfig) -> dict[str, Any]:
    """The settings that all peers of a run have in common."""
    # A task's options are not among them: a file's path is this machine's own affair, and the problems' fingerprint
    # tells whether it is the same file.
    return config.model_dump(mode="json", include=AGREED)
