"""The command that makes an advised run: settings that differ from the recipe as flags, and how machines join."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from itertools import pairwise
from pathlib import Path
from typing import Any

from planaria.config import recipe
from planaria.config.options import NAME
from planaria.config.schema import RunConfig
from planaria.lab.commands.placed_strategy import Strategy
from planaria.pipeline.network.topology import Topology

JOINED = {"fleet.host": "0.0.0.0", "fleet.advertise": "ADDRESS", "fleet.port": 7001, "fleet.key": "key"}
"""settings with which other machines can join, for those that the recipe lacks (docs/machines.md)"""


def train_command(path: Path, config: RunConfig, run: RunConfig, given: Mapping[str, str]) -> str:
    """Return the command that trains ``run``.

    :param config: the recipe in ``path`` with the flags ``given``
    """
    own, wanted = (dict(_settings(each)) for each in (config, run))
    changed = {name: flag_text(value) for name, value in wanted.items() if name not in own or own[name] != value}
    kept = {name: text for name, text in given.items() if name != "network.topology"}
    words = [word for name, text in (kept | changed).items() for word in (f"--{name}", text)]
    return f"planaria train {shlex.join([str(path), *words])}"


def deployed(strategy: Strategy, topology: Topology) -> RunConfig:
    """Return the run of an advised strategy on its machines, without injected faults.

    Its costs in ``network`` are those of its machines, and of the slowest link between neighbouring stages.
    """
    run = strategy.config
    flags: dict[str, object] = {"chaos.trace": None} if run.chaos.trace else {}
    if strategy.sends:
        flags |= {name: value for name, value in JOINED.items() if _setting(run, name) == _setting(RunConfig(), name)}
        flags |= {"fleet.local_workers": strategy.workers, **_link(strategy, topology)}
    if set(strategy.speeds) != {1.0}:
        flags |= _pass_costs(run, strategy.speeds)
    return recipe.with_flags(run, flags)


def _link(strategy: Strategy, topology: Topology) -> dict[str, object]:
    """Return latency and bandwidth between neighbouring stages; stages of a replica are on one machine."""
    if not strategy.is_pipeline:
        return {"network.latency_s": 0.0, "network.bandwidth": None}
    sites = [machine.site for machine in strategy.machines]
    edges = [edge for a, b in pairwise([*sites, sites[0]]) for edge in ((a, b), (b, a))]
    bandwidth = min(topology.link(*edge)[1] for edge in edges) / topology.scale
    return {"network.latency_s": max(topology.latency_s(*edge) for edge in edges), "network.bandwidth": bandwidth}


def _pass_costs(run: RunConfig, speeds: Sequence[float]) -> dict[str, object]:
    flags: dict[str, object] = {}
    for name in ("forward_s", "backward_s"):
        seconds, entry = getattr(run.network, name), f"entry_{name}"
        costs = seconds if len(seconds) > 1 else list(seconds) * len(speeds)
        flags[f"network.{name}"] = [each / speed for each, speed in zip(costs, speeds, strict=True)]
        flags |= {f"network.{entry}": cost / speeds[0]} if (cost := getattr(run.network, entry)) else {}
    return flags


def join_command(run: RunConfig) -> str:
    """Return the command for each further machine of a deployed run."""
    fleet = run.fleet
    key = Path(fleet.key or "key").name
    return (
        f"planaria join {fleet.advertise or fleet.host}:{fleet.port} --key-file {key} --workers {fleet.local_workers}"
    )


def _settings(config: RunConfig) -> Iterator[tuple[str, Any]]:
    """Yield all settings by dotted name, with the options of choices."""
    for name, _ in recipe.fields():
        value = _setting(config, name)
        if name.endswith(f".{NAME}"):
            yield from ((f"{name}.{option}", each) for option, each in value.items())
        else:
            yield name, value


def _setting(config: RunConfig, name: str) -> Any:
    return reduce(getattr, name.split("."), config)


def flag_text(value: object) -> str:
    """Return a setting as the text of a flag.

    >>> flag_text("6/4"), flag_text({"kind": "subspace", "rank": 160})
    ('6/4', '{kind = "subspace", rank = 160}')
    """
    if value is None:
        return "none"
    return value if isinstance(value, str) else _toml(value)


def _toml(value: object) -> str:
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{name} = {_toml(inner)}' for name, inner in value.items())}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)
