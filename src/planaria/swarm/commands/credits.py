"""``planaria swarm show --credits`` and ``drill --settlement``: a run's accounts, and a simulated route."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from planaria.common.errors import UserError
from planaria.report.tables import Table, show
from planaria.swarm.board.board import Board
from planaria.swarm.board.receipts import Agreement, Committee
from planaria.swarm.credits.simulate import PaymentScene, SyncScene, simulate, simulate_sync
from planaria.swarm.recipe import of_run
from planaria.swarm.records.lines import LOG, PEERS, SAMPLES, RoundDone, Started, read_log, read_samples
from planaria.swarm.records.outcome import accounts, debts
from planaria.swarm.swarm_processes import board_of

MOST_SEEDS = 10_000
LATE = 8.0
"""maximum delay in units of Δ where the promise is broken"""


def show_credits(run: Path) -> None:
    """Print the accounts of the swarm in ``run``, by the certificates on its board.

    :raises UserError: if it is no run of a swarm, has no committee, or no records yet.
    """
    config = of_run(run)
    if not config.receipts.committee:
        raise UserError(f"{run}: its recipe names no committee, so nothing is certified; set receipts.committee")
    logs = {path.parent: read_log(path) for path in sorted((run / PEERS).glob(f"*/{LOG}"))}
    names = {place: r for place, log in logs.items() for r in log if isinstance(r, Started)}
    if not names:
        raise UserError(f"{run}: no peer has recorded anything yet; wait for its first round")
    rounds = {record.round for log in logs.values() for record in log if isinstance(record, RoundDone)}
    board = Board.open(board_of(config, run))
    agreement = Agreement(board, "", Committee.named(board.rules.rules), 0.0)
    certified = {number for number in sorted(rounds) if agreement.certified("round", number) is not None}
    called = {started.id: started.name for started in names.values()}
    samples = {started.id: list(read_samples(place / SAMPLES)) for place, started in names.items()}
    rows = [
        [called.get(peer, peer[:8]), peer, str(found.certified), str(found.other), f"{found.part:.3f}"]
        for peer, found in accounts(samples, certified).items()
    ]
    head = ["peer", "id", "accepted, certified", "not certified", "share of Σ|Â|"]
    title = f"{config.name}: {len(certified)} of {len(rounds)} rounds are certified"
    shown = [Table(title, head, rows, numbers_from=2)]
    if price := config.receipts.price:
        owed = [
            [called.get(a, a[:8]), called.get(b, b[:8]), str(credits)]
            for (a, b), credits in debts(samples, certified, price).items()
        ]
        title = f"owed, at {price} for each"
        shown.append(Table(title, ["owes", "to", "credits"], owed, numbers_from=2))
    show(shown)


def settle(hops: int, tolerated: int, seeds: int) -> int:
    """Print the results of ``seeds`` runs per case; return 1 if a payment was partial or credits were lost, else 0.

    :raises UserError: if a number is out of bounds.
    """
    if not 1 <= seeds <= MOST_SEEDS:
        raise UserError(f"--seeds: {seeds}; give 1 to {MOST_SEEDS}")
    plain = PaymentScene(hops, tolerated)
    scenes = {
        "no Byzantine member": plain,
        "no Byzantine member, one relays": replace(plain, relay=True),
        f"f = {tolerated} of {plain.members} members Byzantine": replace(plain, liars=tolerated),
        f"the same, hop {hops // 2} is dry": replace(plain, liars=tolerated, dry=hops // 2),
        f"f + 1 = {tolerated + 1} Byzantine: not tolerated": replace(plain, liars=tolerated + 1),
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
        "within Δ, no failures": SyncScene(hops, tolerated, faulty=False),
        "within Δ, a party and f members fail": SyncScene(hops, tolerated),
        f"up to {LATE:g} Δ, no failures: not tolerated": SyncScene(hops, tolerated, faulty=False, longest=LATE),
    }
    rows = []
    for what, scene in scenes.items():
        found = [simulate_sync(scene, seed) for seed in range(seeds)]
        rows.append([what, _share(one.paid for one in found), _share(one.losers > 0 for one in found)])
    return Table("", ["by deadlines: messages", "paid", "an honest party lost credits"], rows)


def _share(results: Iterable[bool]) -> str:
    found = [*results]
    return f"{sum(found)} of {len(found)}"
