"""Reading a swarm's recipe: the rules of all peers, and each peer's own configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planaria.common import documents
from planaria.common.errors import UserError, suggestion
from planaria.config import kinds, recipe
from planaria.runtime.preparation import run_folders
from planaria.swarm.attacks import ATTACKS, HONEST, measured_attack
from planaria.swarm.config.swarm_config import CONSENSUS, SwarmConfig
from planaria.swarm.records.lines import PEERS
from planaria.swarm.tasks.base import Task

SHARED_SETTINGS: Any = {
    "seed": True,
    "size": True,
    "task": {"name", "reward", "agreement"},
    "rounds": {"count", "mode", "prompts", "group", "ahead"},
    "sampling": True,
    "receipts": True,
}
"""settings that all peers must share, so that honest completions can be recognised"""


def load(path: Path, flags: Mapping[str, str], *commands: str) -> SwarmConfig:
    """Read the swarm in the recipe ``path`` with ``flags`` applied, and check every peer's configuration.

    :param commands: accepted kinds of recipe; by default any
    :raises UserError: with file, peer, key and fix
    """
    tree = recipe.read(path)
    if commands:
        kinds.require_kind(tree, path, *commands)
    tree.pop("drill", None)  # the recipe's other use
    return check_peers(recipe.resolve(SwarmConfig, tree, flags, path), str(path))


def check_peers(config: SwarmConfig, location: str) -> SwarmConfig:
    """Return ``config`` if all its peers' configurations are valid; UserError otherwise."""
    for name in config.peers:
        if name not in peer_names(config):
            raise UserError(f"{location}: peers.{name}: there is no such peer; {suggestion(name, peer_names(config))}")
    has_rate = "optim" in config.model_fields_set and "lr" in config.optim.model_fields_set
    if config.task.reward == CONSENSUS and not has_rate:
        raise UserError(
            f"{location}: task.reward = 'consensus': set a learning rate (optim.lr): too large an update makes peers "
            "worse, and the majority of worse peers then sets the labels; begin with 2e-4 and warm-up"
        )
    for name in peer_names(config):
        peer_config(config, name, location)
    return config


def run_config(run: Path) -> SwarmConfig:
    """Read the configuration of a swarm's run; UserError if the folder is not one."""
    file = run / "config.json"
    if not (run / PEERS).is_dir() or not file.is_file():
        raise UserError(f"{run} is not a swarm's run; start one with `planaria swarm train RECIPE`")
    run_folders.verify_digests(run, run_folders.CONFIG)
    return documents.read_model(file, SwarmConfig, fix="restore it as the run wrote it")


def peer_names(config: SwarmConfig) -> list[str]:
    """Return the names of a swarm's peers on one machine."""
    return [f"p{number}" for number in range(config.size)]


def peer_config(config: SwarmConfig, name: str, location: str = "recipe") -> SwarmConfig:
    """Return the configuration of ``name``: the recipe with its own tables applied.

    :raises UserError: for unknown keys, values out of range, and rules that one peer cannot change alone.
    """
    changes = config.peers.get(name, {})
    if "peers" in changes:
        raise UserError(f"{location}: peers.{name}.peers cannot be nested; write [peers.NAME] for each peer")
    own = config.model_dump(mode="json", exclude={"peers"})
    both = recipe.merge_tables(own, changes, SwarmConfig)
    merged = recipe.resolve(SwarmConfig, both, {}, Path(location), f"peers.{name}")
    ours, theirs = shared_settings(config), shared_settings(merged)
    if ours != theirs:
        key = next(key for key in ours if ours[key] != theirs[key])
        raise UserError(f"{location}: peers.{name}.{key}: all peers must have the same; set it for the whole swarm")
    _refuse_invalid_attacks(merged, f"{location}: peers.{name}" if changes else location)
    return merged


def _refuse_invalid_attacks(config: SwarmConfig, location: str) -> None:
    """Check the attacks before a peer starts."""
    attack, key = config.attack, ""
    if attack.kind == HONEST and attack.options:
        raise UserError(f"{location}: attack.options: attack.kind = {HONEST!r} has no options; remove them")
    try:
        if attack.kind != HONEST:
            ATTACKS.make(attack.kind, attack.options)
        for kind in [*config.evaluate.watch, *config.evaluate.phrases]:
            key = f"evaluate.phrases.{kind}: " if kind in config.evaluate.phrases else "evaluate.watch: "
            measured_attack(kind, config.evaluate.phrases)
    except UserError as error:
        raise UserError(f"{location}: {key}{error}") from None


def run_rules(config: SwarmConfig, task: Task) -> dict[str, Any]:
    """Return the rules of a run as JSON: the shared settings, and the identity of the problems."""
    return shared_settings(config) | {"problems": task.identity}


def shared_settings(config: SwarmConfig) -> dict[str, Any]:
    """Return the settings that all peers of a run share."""
    # Without the task's options: a path is local to a machine, and the fingerprint identifies the problems.
    result = config.model_dump(mode="json", include=SHARED_SETTINGS)
    if not config.rounds.ahead:  # as in rules that are older than this setting
        del result["rounds"]["ahead"]
    return result
