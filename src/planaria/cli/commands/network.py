"""``planaria network``: measure the links between nodes; forward edges between workers that cannot connect."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from planaria.cli.flags import Quiet, command, flag, recipe_argument
from planaria.cli.settings import Settings
from planaria.common.errors import UserError
from planaria.common.signals import interrupt_on_stop

if TYPE_CHECKING:
    from planaria.config.schema import RunConfig
    from planaria.pipeline.network.measurement import MeasuredLink, NodePair, Quartiles
    from planaria.pipeline.network.topology import Node, Topology

MAX_NODES = 128
"""maximum number of nodes; each runs as a process of this machine"""


@command("network measure", cls=Settings)
def _measure(
    recipe: Annotated[Path, recipe_argument("; its network.topology names the nodes, if given")],
    *,
    to: Annotated[Path, flag("DIR", "folder to write the topology to")],
    nodes: Annotated[int | None, flag("N", "without a topology: local nodes (default: one per stage)")] = None,
    quiet: Quiet = False,
    settings: dict[str, str],
) -> int:
    """Measure latency and bandwidth between nodes, and write a topology."""
    from planaria.config.recipe import load

    return _measure_links(load(recipe, settings, "train"), recipe, to, nodes, quiet)


@command("network relay", code=False, logged=True)
def _relay(
    *,
    key_file: Annotated[Path, flag("FILE", "the run's fleet.key; created if missing")],
    host: Annotated[str, flag("HOST", "address to listen on")] = "127.0.0.1",
    port: Annotated[int, flag("N", "port to listen on (default: any free one)", show_default=False)] = 0,
) -> int:
    """Forward edges between workers that cannot connect, until Ctrl-C."""
    return _forward_edges(key_file, host, port)


def _measure_links(config: RunConfig, recipe: Path | None, to: Path, count: int | None, quiet: bool) -> int:
    """Measure every pair of the recipe's nodes, and write three files into the folder ``to``; return the exit code.

    :raises UserError: before any node starts, if the nodes are too few or too many, or ``to`` is not writable.
    :raises RunStopped: if a node exits or a pair cannot connect; then nothing is written.
    """
    from planaria.pipeline.network.costs import MBIT
    from planaria.pipeline.network.measurement import emulated_link, links_of_sites, topology_files
    from planaria.report.observe.bars import SurveyProgress
    from planaria.runtime.engine.link_survey import survey

    topology, nodes = _nodes_to_measure(config, recipe, count)
    _require_folder(to)
    ordered = permutations(range(len(nodes)), 2)
    lines = {(a, b): emulated_link(config.network, topology, nodes[a], nodes[b]) for a, b in ordered}
    with SurveyProgress(len(lines) // 2, quiet) as progress:

        def report(pair: NodePair, there: MeasuredLink, back: MeasuredLink) -> None:
            a, b = (nodes[n].name for n in pair)
            rates = " and ".join(_digits(link.bandwidth.value / MBIT) for link in (there, back))
            progress.update(f"{a} – {b}, {_digits(there.latency.value * 1000)} ms, {rates} Mbit/s there and back")

        measured = survey(config.fleet, [node.name for node in nodes], lines, report)
    links = links_of_sites(nodes, measured)
    write_all(to, topology_files(nodes, links, queueing=topology is None or topology.queueing))
    _show(nodes, links)
    print(f"topology      {to / 'topology.toml'}")
    return 0


def _nodes_to_measure(
    config: RunConfig, recipe: Path | None, count: int | None
) -> tuple[Topology | None, tuple[Node, ...]]:
    """Return the recipe's topology and its nodes; without one, None and nodes of this machine, each at its own site."""
    from planaria.cli.plan_search import topology_of
    from planaria.pipeline.network.topology import Node, NodeGroup

    topology = None
    number = config.pipeline.stages + 1
    setting = "pipeline.stages + 1"
    if config.network.topology is not None:
        topology = topology_of(config, recipe)
        number, setting = len(topology.nodes), f"network.topology: {len(topology.nodes)} nodes"
        if count is not None:
            raise UserError(f"--nodes {count}: network.topology already lists the nodes; remove one of them")
        if topology.path_network is not None:
            raise UserError(
                "network.topology: only one connection of two nodes is measured, but [[link]] lists several paths; "
                "use a topology without [[link]], and add the paths to the result"
            )
    elif count is not None:
        number, setting = count, f"--nodes {count}"
    if not 2 <= number <= MAX_NODES:
        raise UserError(f"{setting}: 2 to {MAX_NODES} nodes can be measured on this machine")
    if topology is not None:
        return topology, topology.nodes
    plain = NodeGroup(site="")
    names = [f"node {n}" for n in range(number)]
    return None, tuple(Node(name, name, plain.speed, plain.memory, plain.role) for name in names)


def write_all(folder: Path, texts: Mapping[str, str]) -> None:
    """Write all files or none: each is complete under another name before the first is renamed."""
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = {folder / name: folder / f".{name}.{os.getpid()}" for name in texts}
    try:
        for written, text in zip(unfinished.values(), texts.values(), strict=True):
            written.write_text(text, encoding="utf-8")
        for path, written in unfinished.items():
            written.replace(path)
    finally:
        for written in unfinished.values():
            written.unlink(missing_ok=True)


def _require_folder(to: Path) -> None:
    """Raise UserError if the folder is not writable, before the measurement."""
    existing = next(path for path in (to, *to.absolute().parents) if path.exists())
    if not existing.is_dir():
        raise UserError(f"--to {to}: {existing} is not a folder; use an existing or new folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UserError(f"--to {to}: {existing} is not writable; use another folder")


def _show(nodes: Sequence[Node], links: Mapping[tuple[str, str], MeasuredLink]) -> None:
    from planaria.pipeline.network.costs import MBIT
    from planaria.report.tables import Table, show

    rows = [
        [a, b, _format_quartiles(k.latency, 1000), _format_quartiles(k.bandwidth, 1 / MBIT)]
        for (a, b), k in sorted(links.items())
    ]
    head = ["from", "to", "latency, ms", "bandwidth, Mbit/s"]
    show([Table(f"{len(nodes)} nodes: median (quartiles)", head, rows, numbers_from=2)])


def _format_quartiles(spread: Quartiles, unit: float) -> str:
    middle, low, high = (_digits(number * unit) for number in spread)
    return f"{middle} ({low} … {high})"


def _digits(number: float) -> str:
    return f"{number:.4g}" if number < 1000 else f"{number:,.0f}"


def _forward_edges(key: Path, host: str, port: int) -> int:
    """Forward edges between workers that prove the key in the file ``key``, until Ctrl-C; return the exit code.

    Create the file if it is missing.

    :raises UserError: if it cannot listen there, or the file has no key.
    """
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port}: use 1 to 65535, or 0 for any free port")
    from planaria.runtime.fleet.joining import read_or_create_key
    from planaria.runtime.transport.relay import relay_at
    from planaria.runtime.transport.secure import new_key

    is_new = not key.exists()
    secret = read_or_create_key(key, new_key())
    try:
        listener, relay = relay_at(host, port, secret)
    except UserError:
        advice = "use an address of this machine and a free port (0: any)"
        raise UserError(f"--host {host} --port {port}: cannot listen there; {advice}") from None
    print(f"relay         {listener.address}", flush=True)
    if is_new:
        print(f"key           {key} is new; copy it to the run's folder as fleet.key", flush=True)
    try:
        with interrupt_on_stop():
            threading.Event().wait()
    except KeyboardInterrupt:
        return 0
    finally:
        listener.close()
        relay.close()
    return 0
