"""Facts of a run that machines joined and left."""

from __future__ import annotations

from planaria.control.facts import decisions as d
from planaria.control.facts import events as e
from support.report import synthetic_replicas as r

HERE: r.Facts = [
    (10.0, r.started(nodes_by_replica=[[2 * n, 2 * n + 1] for n in range(4)])),
    *((10.1, fact) for fact in r.joined("abcdef")),
    (10.2, r.form(0, "ab")),
    (10.2, r.form(1, "cd")),
    (10.2, r.form(2, "ef")),
    (12.0, e.HostJoined(host="g1", workers=2, detail="lab, pid 7")),
    (12.0, d.Spawn(worker="g", incarnation=1, host="g1")),
    (12.0, d.Spawn(worker="h", incarnation=1, host="g1")),
    *((12.5, fact) for fact in r.joined("gh")),
]
