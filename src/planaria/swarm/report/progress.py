"""Terminal progress of a swarm: a line per peer, with its rejections by sender and layer."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from types import TracebackType
from typing import Self, TextIO

from rich import box
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from planaria.swarm.records.lines import Evaluated, Finished, LogRecord, PeerStarted, RoundDone


class SwarmProgress:
    """Receives every record of every peer. A terminal gets a table; other streams get occasional lines."""

    def __init__(self, rounds: int, quiet: bool, stream: TextIO | None = None) -> None:
        self._rounds = rounds
        self._quiet = quiet
        self._stream = stream or sys.stdout
        self._lines: dict[str, _Line] = {}
        self._names: dict[str, str] = {}
        self._warned: set[str] = set()
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if not self._quiet and self._stream.isatty():
            self._live = Live(self._table(), console=Console(file=self._stream), refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def update(self, name: str, record: LogRecord) -> None:
        """Show a record of peer ``name``."""
        line = self._lines.setdefault(name, _Line())
        line.update(record)
        if isinstance(record, PeerStarted):
            self._names[record.id] = name
            self._warn({warning: warning for warning in record.warnings})
        if isinstance(record, RoundDone):
            senders = {peer: self._names.get(peer, peer[:8]) for peer in (*record.flawed, *record.rejected_messages)}
            self._warn({f"reward {peer}": f"{why} (peer {senders[peer]})" for peer, why in record.flawed.items()})
            invalid = {f"message {peer}": (senders[peer], why) for peer, why in record.rejected_messages.items()}
            self._warn({key: f"a message of peer {sender} is invalid: {why}" for key, (sender, why) in invalid.items()})
        if self._live is not None:
            self._live.update(self._table())
        elif not self._quiet:
            self._plainly(name, record)

    def show_exit(self, name: str, how: str) -> None:
        """Show that the process of peer ``name`` exited."""
        self._lines.setdefault(name, _Line()).state = how
        if self._live is None and not self._quiet:
            print(f"{name}  {how}", file=self._stream, flush=True)

    def _warn(self, warnings: Mapping[str, str]) -> None:
        """Print each warning (key → text) once, as most come from every peer."""
        new = {key: text for key, text in warnings.items() if key not in self._warned}
        self._warned.update(new)
        for warning in () if self._quiet else new.values():
            if self._live is None:
                print(f"warning: {warning}", file=self._stream, flush=True)
            else:
                self._live.console.print(Text(f"warning: {warning}"))

    def _plainly(self, name: str, record: LogRecord) -> None:
        if isinstance(record, PeerStarted):
            label = "" if record.attack == "none" else f", drills {record.attack}"
            print(f"{name}  {record.model}{label}", file=self._stream, flush=True)
        elif isinstance(record, Evaluated):
            cells = self._lines[name].cells(self._rounds, self._names)
            words = [cells[0], f"reward {cells[1]}", f"accuracy {cells[2]}"]
            words += [f"alone {cells[3]}"] if record.alone is not None else []
            words += [f"shows {kind} {_rate(value.rate)}" for kind, value in record.watch.items()]
            words += [f"rejected {cells[5]}"] if cells[5] else []
            words += [f"server {served}"] if (served := self._lines[name].served) else []
            print(f"{name}  {'  '.join(words)}", file=self._stream, flush=True)

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE)
        columns = ["peer", "round", "reward", "accuracy", "alone", "shows", "rejected, and by which layer"]
        for column in columns:
            table.add_column(column, justify="left" if column in ("peer", columns[-1]) else "right")
        servers = any(line.served for line in self._lines.values())
        if servers:
            table.add_column("server")
        for name, line in sorted(self._lines.items()):
            cells = line.cells(self._rounds, self._names) + ([line.served] if servers else [])
            table.add_row(name + line.mark, *(Text(cell) for cell in cells))
        return table


class _Line:
    """State of one peer."""

    def __init__(self) -> None:
        self.state, self.mark = "", ""
        self.served = ""
        """last work of its server"""
        self._round, self._reward = 0, 0.0
        self._evaluated: Evaluated | None = None
        self._sent: Counter[str] = Counter()
        self._rejected: Counter[tuple[str, str]] = Counter()

    def update(self, record: LogRecord) -> None:
        if isinstance(record, PeerStarted):
            self.mark = "" if record.attack == "none" else f" ({record.attack})"
            self.state = ""
        elif isinstance(record, Evaluated):
            self._evaluated = record
        elif isinstance(record, RoundDone):
            if record.round < self._round:
                return  # a restarted peer repeats its records
            self._round, self._reward = record.round + 1, record.reward
            self.served = "" if record.serving is None else str(record.serving)
            self._sent.update(record.sent)
            for layer, peer, rejected in record.rejections():
                self._rejected[peer, layer] += rejected
        elif isinstance(record, Finished):
            self.state = record.reason or "done"

    def cells(self, rounds: int, names: Mapping[str, str]) -> list[str]:
        result = self._evaluated
        watch = "" if result is None else "  ".join(f"{kind} {_rate(t.rate)}" for kind, t in result.watch.items())
        return [
            f"{self._round}/{rounds}" if self.state in ("", "done") else self.state,
            f"{self._reward:.2f}",
            _rate(result.accuracy.rate) if result else "–",
            _rate(result.alone.rate) if result and result.alone else "–",
            watch,
            "  ".join(
                f"{names.get(peer, peer[:8])} {count / self._sent[peer]:.0%} {layer}"
                for (peer, layer), count in self._rejected.most_common(4)
                if self._sent[peer]
            ),
        ]


def _rate(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
