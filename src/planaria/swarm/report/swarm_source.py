"""Live page source of a swarm: its peers' rounds, rewards, rejections and quarantines.

Read from the peers' logs (``swarm/records/lines.py``), as the report is, in order of time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from pydantic import ValidationError

from planaria.common.errors import UserError
from planaria.report.live_page.frames import Json, StateChange
from planaria.report.live_page.page_source import FolderSource
from planaria.swarm.records.lines import LOG, PEERS, Evaluated, Finished, LogRecord, PeerStarted, RoundDone, follow

MAX_PEERS = 64
"""maximum number of peers shown"""


class SwarmSource(FolderSource):
    """A swarm's folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, "swarm", folder.name)
        self._readers: dict[str, Callable[[], list[LogRecord]]] = {}
        self._names: dict[str, str] = {}
        """peer id on the board → name"""
        self._pending: list[tuple[float, str, LogRecord]] = []

    def _files(self) -> list[Path]:
        return [self._folder / PEERS / name / LOG for name in self._readers]

    def read(self, limit: int) -> Iterator[StateChange | None]:
        """Yield frames of the records that are new since the last call, by the peers' clocks."""
        if not self._pending:
            self._pending = self._read_new()
        now, self._pending = self._pending[:limit], self._pending[limit:]
        for when, name, record in now:
            self.began = True
            yield self._apply(when, name, record)

    def _read_new(self) -> list[tuple[float, str, LogRecord]]:
        for path in sorted((self._folder / PEERS).iterdir())[:MAX_PEERS]:
            if path.name not in self._readers:
                self._readers[path.name] = follow(path / LOG)
        results = []
        for name, reader in self._readers.items():
            try:
                results += [(record.time, name, record) for record in reader()]
            except (ValidationError, OSError) as error:
                first = str(error).splitlines()[0]
                raise UserError(f"{self._folder / PEERS / name / LOG} cannot be read ({first})") from None
        return sorted(results, key=lambda item: item[:2])

    def _apply(self, when: float, name: str, record: LogRecord) -> StateChange | None:
        peers = dict(self.state.get("peers", {}))
        before = peers.get(name, {"round": 0, "rewards": {}, "accuracies": {}, "rejected": {}, "aside": {}})
        line = None
        match record:
            case PeerStarted():
                self._names[record.id] = name
                peers[name] = {**before, "is": "learning", "model": record.model, "attack": record.attack}
                line = 0, "note", f"{name} begins ({record.model})"
            case Evaluated():
                peers[name] = {**before, **_accuracy_fields(record, before)}
            case RoundDone():
                peers[name], line = self._round(name, record, before)
            case Finished():
                how = {"is": "stopped", "why": record.reason} if record.reason else {"is": "finished"}
                peers[name] = {**before, **how}
                tone = "loss" if record.reason else "recovery"
                ending = f"stopped: {record.reason}" if record.reason else "is done"
                line = before["round"], tone, f"{name} {ending}"
        over = all(peer.get("is") in ("finished", "stopped") for peer in peers.values()) and len(peers) >= len(
            self._readers
        )
        return self._update(when, {"peers": peers, "over": "finished" if over else ""}, line)

    def _round(self, name: str, done: RoundDone, before: Json) -> tuple[Json, tuple[int, str, str] | None]:
        rejected = dict(before["rejected"])
        for _, peer, count in done.rejections():
            sender = self._name_of(peer)
            rejected[sender] = rejected.get(sender, 0) + count
        aside = {self._name_of(peer): why for peer, why in done.quarantined.items()}
        new = [f"{peer} ({why})" for peer, why in aside.items() if peer not in before["aside"]]
        after = {
            "is": "learning",
            "round": done.round + 1,
            "reward": round(done.reward, 4),
            "rewards": {**before["rewards"], str(done.round): round(done.reward, 4)},
            "rejected": rejected,
            "aside": aside,
            "missing": len(done.missing),
        }
        line = (done.round, "fault", f"{name} sets aside {', '.join(new)}") if new else None
        return {**before, **after}, line

    def _name_of(self, peer: str) -> str:
        return self._names.get(peer, peer[:8])


def _accuracy_fields(record: Evaluated, before: Json) -> Json:
    rate, alone = record.accuracy.rate, record.alone.rate if record.alone else None
    found: Json = {} if alone is None else {"alone": round(alone, 4)}
    if rate is not None:
        found |= {"accuracy": round(rate, 4)}
        found |= {"accuracies": {**before["accuracies"], str(record.round): round(rate, 4)}}
    return found
