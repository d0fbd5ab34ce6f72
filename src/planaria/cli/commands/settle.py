"""``planaria swarm settle``: credits along a route, simulated: what liars, a dry channel and late messages come to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from planaria.common.errors import UserError
from planaria.report.tables import Table, show
from planaria.swarm.credits.simulate import Scene, simulate
from planaria.swarm.credits.simulate_sync import SyncScene, simulate_sync

MOST_SEEDS = 10_000
LATE = 8.0
"""times Δ that messages take at most, where the promise is broken"""


def settle(hops: int, tolerated: int, seeds: int) -> int:
    """Print what came of so many runs of each case; the exit code: 1 if anything was paid in part, or lost.

    :raises UserError: when a number is out of bounds.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds: {seeds}; give 1 to {MOST_SEEDS}")
    plain = Scene(hops, tolerated)
    scenes = {
        "nobody lies": plain,
        "nobody lies, one member relays": replace(plain, relay=True),
        f"f = {tolerated} of {plain.members} members lie": replace(plain, liars=tolerated),
        f"the same, hop {hops // 2} is dry": replace(plain, liars=tolerated, dry=hops // 2),
        f"f + 1 = {tolerated + 1} lie: not borne": replace(plain, liars=tolerated + 1),
    }
    rows, sound = [], True
    for what, scene in scenes.items():
        found = [simulate(scene, seed) for seed in range(seeds)]
        sound = sound and not any(one.mixed or not one.conserved for one in found)
        counts = sorted({one.messages for one in found})
        rows.append([
            what, _share(one.ended for one in found), _share(one.paid == 1 for one in found),
            _share(one.mixed for one in found), _share(not one.conserved for one in found),
            str(counts[0]) if len(counts) == 1 else f"{counts[0]} … {counts[-1]}",
        ])  # fmt: skip
    head = ["without clocks", "all settled", "paid", "paid in part", "credits lost", "messages"]
    tables = [Table(f"{hops} hops, {seeds} runs each", head, rows), _in_time(hops, tolerated, seeds)]
    show(tables)
    return 0 if sound else 1


def _in_time(hops: int, tolerated: int, seeds: int) -> Table:
    scenes = {
        "within Δ, nobody fails": SyncScene(hops, tolerated, faulty=False),
        "within Δ, a party and f members fail": SyncScene(hops, tolerated),
        f"up to {LATE:g} Δ, nobody fails: not borne": SyncScene(hops, tolerated, faulty=False, longest=LATE),
    }
    rows = []
    for what, scene in scenes.items():
        found = [simulate_sync(scene, seed) for seed in range(seeds)]
        rows.append([what, _share(one.paid for one in found), _share(one.losers > 0 for one in found)])
    return Table("", ["by deadlines: messages", "paid", "an honest party lost credits"], rows)


def _share(those: Iterable[bool]) -> str:
    told = [*those]
    return f"{sum(told)} of {len(told)}"
