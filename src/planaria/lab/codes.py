"""``python -m planaria.lab.codes``: search a code of sparse parity checks, and compare and write it and its product."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Annotated

from planaria.cli.entry import program
from planaria.cli.flags import Seed, flag
from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.recovery import codes
from planaria.recovery.codes import ErasureCode
from planaria.recovery.codes.base import MAX_LOSS_SETS, share
from planaria.recovery.codes.local import required_parities
from planaria.recovery.codes.product import ClassicalCode
from planaria.recovery.codes.product import file as product_file
from planaria.recovery.codes.search import SearchedCode, SearchTarget, anneal, certificate, file
from planaria.report.tables import Table, show

MAX_TRIES = 10_000_000
TRIED = 20_000
"""most sets of losses in a cell of the table"""
GROUP = 4
"""size of the local groups in the comparison"""


def search(
    *,
    shards: Annotated[int, flag("N", "shards of the code")],
    data: Annotated[int, flag("K", "shards of data; the others are parities")],
    distance: Annotated[int, flag("D", "any D - 1 losses can be rebuilt")],
    weight: Annotated[int, flag("W", "most shards in a check")],
    degree: Annotated[int, flag("C", "maximum number of checks of a shard (default: any)", show_default=False)] = 0,
    seed: Seed = 0,
    tries: Annotated[int, flag("N", "number of candidate matrices")] = 20_000,
    to: Annotated[Path | None, flag("FILE", "write the code: recovery.options.code = FILE")] = None,
    product: Annotated[Path | None, flag("FILE", "write its hypergraph product with itself")] = None,
) -> int:
    """Search a code of sparse parity checks, and report the losses it survives; exit code 1 if it misses the target."""
    if not 1 <= tries <= MAX_TRIES:
        raise UserError(f"--tries: {tries}; give 1 to {MAX_TRIES}")
    target = SearchTarget(shards, data, distance, weight, degree)
    if (sets := math.comb(target.shards, target.distance)) > MAX_LOSS_SETS:
        raise UserError(
            f"--distance {target.distance}: {sets} sets of {target.distance} of {target.shards} shards, but a "
            f"certificate covers at most {MAX_LOSS_SETS}; lower it, or --shards"
        )
    for path in (to, product):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: {path.parent} is not a folder; create it, or write elsewhere")
    sparse = anneal(target, seed, tries)
    measured = certificate(sparse)
    show([_description(sparse, measured), _comparison(sparse.code)])
    if to is not None:
        atomic.write_text(to, file(sparse).model_dump_json(indent=1) + "\n")
    if product is not None:
        _write_product(sparse, product)
    short = sparse.excess or int(str(measured["distance"])) < target.distance
    if short:
        print(f"falls short: distance {measured['distance']} of {target.distance}, {sparse.excess} edges too many")
    return int(bool(short))


def _description(code: SearchedCode, measured: dict[str, object]) -> Table:
    n, k = measured["shards"], measured["data"]
    rows = [
        [
            f"[{n}, {k}, {measured['distance']}]",
            "shards, data, distance: checked with all words, and all losses of that size",
        ],
        [_spread(measured["check weights"]), "shards in a check"],
        [_spread(_degrees(code.code)), "checks of a shard"],
        [str(code.tried), f"candidate matrices, seed {code.seed}"],
    ]
    return Table("", ["code", ""], rows)


def _comparison(code: ErasureCode) -> Table:
    """Compare reads for one lost shard, and shares of survived losses, with other codes of as many parities."""
    n, parities = code.shards, len(code.weights)
    lost = [count for count in range(1, parities + 1) if math.comb(n, count) <= TRIED]
    rows = []
    for name, each in (("this code", code), *_rivals(n, parities)):
        reads = sum(len(each.plan([shard])) for shard in range(n)) / n
        rows.append([name, f"{reads:.3g}", *(f"{share(each, count):.4g}" for count in lost)])
    return Table("share of losses survived, over all sets", ["", "reads for one", *map(str, lost)], rows)


def _rivals(shards: int, parities: int) -> list[tuple[str, ErasureCode]]:
    """Return codes with as many shards and parities: Reed–Solomon, and the best one with local groups of four."""
    rivals = [("reed_solomon", codes.code("reed_solomon", shards, parities))]
    globals_ = parities - -(-shards // GROUP)
    tolerated = [tolerate for tolerate in range(1, parities) if required_parities(tolerate, GROUP) == globals_]
    if tolerated and math.comb(shards, tolerated[-1]) <= TRIED:
        with suppress(UserError):  # no coefficients were found
            rivals.append((f"local, groups of {GROUP}", codes.code("local", shards, tolerated[-1], {"group": GROUP})))
    return rivals


def _degrees(code: ErasureCode) -> list[int]:
    return sorted(sum(shard in check for check in code.checks) for shard in range(code.shards))


def _spread(numbers: object) -> str:
    assert isinstance(numbers, list)
    return f"{min(numbers)} to {max(numbers)}"


def _write_product(code: SearchedCode, path: Path) -> None:
    """Write the hypergraph product of the code with itself."""
    rows = tuple(sum(1 << shard for shard in check) for check in code.code.checks)
    made = product_file(ClassicalCode(rows, code.code.shards), ClassicalCode(rows, code.code.shards))
    heaviest = max(map(len, (*made.x, *made.z)))
    print(
        f"hypergraph product: [[{made.qubits}, {made.logical}, {made.distance}]], checks of at most {heaviest} qubits"
    )
    atomic.write_text(path, made.model_dump_json() + "\n")


if __name__ == "__main__":
    program(search, "planaria.lab.codes")
