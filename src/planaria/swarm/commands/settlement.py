"""``python -m planaria.swarm.commands.settlement``: simulate payments along a route with Byzantine members."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Annotated

from planaria.cli.entry import program
from planaria.cli.flags import flag
from planaria.common.errors import UserError
from planaria.report.tables import Table, show
from planaria.swarm.credits.payment_simulation import PaymentScene, SyncScene, simulate, simulate_sync

MAX_SEEDS = 10_000
LATE = 8.0
"""maximum delay in units of Δ where the promise is broken"""


def settle(
    *,
    hops: Annotated[int, flag("N", "channels of the route")] = 4,
    tolerated: Annotated[int, flag("F", "committees of 3F + 1 members tolerate F Byzantine ones", "--faulty")] = 1,
    seeds: Annotated[int, flag("N", "runs of each case")] = 50,
) -> int:
    """Simulate how credits settle along a route; exit code 1 if a payment was partial or credits were lost."""
    if not 1 <= seeds <= MAX_SEEDS:
        raise UserError(f"--seeds {seeds}: use 1 to {MAX_SEEDS}")
    plain = PaymentScene(hops, tolerated)
    scenes = {
        "no Byzantine member": plain,
        "no Byzantine member, one relays": replace(plain, relay=True),
        f"f = {tolerated} of {plain.members} members Byzantine": replace(plain, byzantine=tolerated),
        f"the same, hop {hops // 2} is dry": replace(plain, byzantine=tolerated, dry=hops // 2),
        f"f + 1 = {tolerated + 1} Byzantine: not tolerated": replace(plain, byzantine=tolerated + 1),
    }
    rows, sound = [], True
    for case, scene in scenes.items():
        results = [simulate(scene, seed) for seed in range(seeds)]
        sound = sound and not any(outcome.mixed or not outcome.conserved for outcome in results)
        counts = sorted({outcome.messages for outcome in results})
        rows.append([
            case, _share(outcome.ended for outcome in results), _share(outcome.paid == 1 for outcome in results),
            _share(outcome.mixed for outcome in results), _share(not outcome.conserved for outcome in results),
            str(counts[0]) if len(counts) == 1 else f"{counts[0]} … {counts[-1]}",
        ])  # fmt: skip
    head = ["without clocks", "all settled", "paid", "paid in part", "credits lost", "messages"]
    tables = [Table(f"{hops} hops, {seeds} runs each", head, rows), _in_time(hops, tolerated, seeds)]
    show(tables)
    return 0 if sound else 1


def _in_time(hops: int, tolerated: int, seeds: int) -> Table:
    scenes = {
        "within Δ, no failures": SyncScene(hops, tolerated, faulty=False),
        "within Δ, a party and f members fail": SyncScene(hops, tolerated),
        f"up to {LATE:g} Δ, no failures: not tolerated": SyncScene(hops, tolerated, faulty=False, longest=LATE),
    }
    rows = []
    for case, scene in scenes.items():
        results = [simulate_sync(scene, seed) for seed in range(seeds)]
        rows.append(
            [case, _share(outcome.paid for outcome in results), _share(outcome.losers > 0 for outcome in results)]
        )
    return Table("", ["by deadlines: messages", "paid", "an honest party lost credits"], rows)


def _share(results: Iterable[bool]) -> str:
    items = [*results]
    return f"{sum(items)} of {len(items)}"


if __name__ == "__main__":
    program(settle, "planaria.swarm.commands.settlement")
