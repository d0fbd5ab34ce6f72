"""What ``/metrics`` answers: the numbers of runs (``report/live/prometheus.py``), and the server's own. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planaria.report.live import prometheus
from planaria.report.live.prometheus import Sample
from planaria.report.live.tally import Tally


def exposition(runs: Sequence[tuple[str, Tally, float]], watchers: int) -> str:
    """All metrics of these runs: name, tally, and seconds since the log was written to. Equal names get numbers."""
    twice = Counter(name for name, _, _ in runs)
    names = [name if twice[name] == 1 else f"{name} ({place})" for place, (name, _, _) in enumerate(runs)]
    ages = [Sample(age, {"run": name}) for name, (_, _, age) in zip(names, runs, strict=True)]
    own = [
        *prometheus.lines("planaria_watchers", "gauge", "Streams that are open.", [Sample(watchers)]),
        *prometheus.lines("planaria_log_age_seconds", "gauge", "Since the run's log was written to.", ages),
    ]
    tallies = {name: tally for name, (_, tally, _) in zip(names, runs, strict=True)}
    return prometheus.exposition(tallies) + "".join(f"{line}\n" for line in own)
