"""``planaria swarm credits``: whose completions were accepted in certified rounds, and who owes whom."""

from __future__ import annotations

from pathlib import Path

from planaria.common.errors import UserError
from planaria.report import tables
from planaria.swarm.board.agreement import Agreement
from planaria.swarm.board.board import Board
from planaria.swarm.board.receipts import Committee
from planaria.swarm.live import board_of
from planaria.swarm.records.credit import accounts, debts
from planaria.swarm.records.lines import LOG, PEERS, SAMPLES, RoundDone, Started, read_log, read_samples
from planaria.swarm.setting import of_run


def tell(run: Path) -> None:
    """Print the accounts of the swarm in ``run``, with certificates as they lie on its board.

    :raises UserError: when it is no run of a swarm, has no committee, or no records yet.
    """
    config = of_run(run)
    if not config.receipts.committee:
        raise UserError(f"{run}: its recipe names no committee, so nothing is certified; set receipts.committee")
    logs = {path.parent: read_log(path) for path in sorted((run / PEERS).glob(f"*/{LOG}"))}
    names = {place: r for place, log in logs.items() for r in log if isinstance(r, Started)}
    if not names:
        raise UserError(f"{run}: no peer has noted anything yet; wait for its first round")
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
    head = ["peer", "id", "accepted, certified", "not certified", "part of Σ|Â|"]
    title = f"{config.name}: {len(certified)} of {len(rounds)} rounds are certified"
    shown = [tables.Table(title, head, rows, numbers_from=2)]
    if price := config.receipts.price:
        owed = [
            [called.get(a, a[:8]), called.get(b, b[:8]), str(credits)]
            for (a, b), credits in debts(samples, certified, price).items()
        ]
        title = f"owed, at {price} for each"
        shown.append(tables.Table(title, ["owes", "to", "credits"], owed, numbers_from=2))
    tables.show(shown)
