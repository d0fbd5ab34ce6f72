"""``planaria swarm explain``: the origin of every completion that a peer trained on, and the checks it passed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from planaria.common.errors import UserError, nearest
from planaria.report.tables import Table, show
from planaria.swarm.board.board import Board
from planaria.swarm.board.message import BadMessage
from planaria.swarm.config import SwarmConfig
from planaria.swarm.live import board_of
from planaria.swarm.records.lines import LOG, PEERS, SAMPLES, SampleRecord, Started, read_log, read_samples
from planaria.swarm.setting import of_run

MOST = 200
"""lines that are shown; the file has the others"""


@dataclass(frozen=True)
class Wanted:
    """Which completions are asked for; None and False: all."""

    round: int | None
    problem: int | None
    source: str | None
    refused: bool


def explain(run: Path, peer: str, wanted: Wanted) -> None:
    """Print a line for each completion that ``peer`` examined and that is wanted.

    :raises UserError: when there is no such run or peer.
    """
    config = of_run(run)
    known = sorted(path.name for path in (run / PEERS).iterdir() if (path / SAMPLES).is_file())
    if peer not in known:
        raise UserError(f"{run}: has no records of peer {peer!r}; {nearest(peer, known)}")
    names = {
        record.id: path.name
        for path in (run / PEERS).iterdir()
        for record in read_log(path / LOG)
        if isinstance(record, Started)
    }
    lines = list(read_samples(run / PEERS / peer / SAMPLES))
    sources = {name for line in lines for name in (names.get(line.peer), line.peer) if name}
    if wanted.source is not None and wanted.source not in sources:
        raise UserError(f"--source {wanted.source}: sent {peer} nothing; {nearest(wanted.source, sorted(sources))}")
    found = [line for line in lines if _fits(line, wanted, names)]
    texts = _texts(config, run, found) if wanted.problem is not None else {}
    _show(peer, found, names, texts, run / PEERS / peer / SAMPLES)


def _fits(line: SampleRecord, wanted: Wanted, names: dict[str, str]) -> bool:
    return (
        wanted.round in (None, line.round)
        and wanted.problem in (None, line.problem)
        and wanted.source in (None, names.get(line.peer), line.peer)
        and (not wanted.refused or bool(line.layer))
    )


def _texts(config: SwarmConfig, run: Path, lines: list[SampleRecord]) -> dict[tuple[str, int, int, int], str]:
    """What the completions said, from the board, where everything that was ever published still is."""
    board = Board.open(board_of(config, run))
    found = {}
    for peer, number in {(line.peer, line.round) for line in lines}:
        try:
            message = board.read(peer, number)
        except BadMessage:
            continue
        for group in message.groups if message is not None else ():
            for index, completion in enumerate(group.completions):
                found[peer, number, group.problem, index] = completion.text
    return found


def _show(
    peer: str,
    lines: list[SampleRecord],
    names: dict[str, str],
    texts: dict[tuple[str, int, int, int], str],
    file: Path,
) -> None:
    title = f"{peer}: {len(lines)} completions, {sum(line.advantage is not None for line in lines)} learned from"
    head = ["round", "problem", "from", "reward", "passed", "what became of it", *(["text"] if texts else [])]
    rows = [list(_cells(line, names, texts)) for line in lines[:MOST]]
    show([Table(title, head, rows, numbers_from=len(head))])
    if len(lines) > MOST:
        print(f"{len(lines) - MOST} more in {file}; ask for a --round, a --problem or a --source")


def _cells(line: SampleRecord, names: dict[str, str], texts: dict[tuple[str, int, int, int], str]) -> Iterator[str]:
    fate = f"refused by {line.layer}: {line.reason}" if line.layer else "taught nothing: its group had no spread"
    if line.advantage is not None:
        fate = f"learned from, advantage {line.advantage:+.2f}"
    yield str(line.round)
    yield str(line.problem)
    yield f"{names.get(line.peer, line.peer[:8])} #{line.index}"
    yield f"{line.reward:g}"
    yield ", ".join(line.passed)
    yield fate
    if texts:
        yield repr(texts.get((line.peer, line.round, line.problem, line.index), ""))
