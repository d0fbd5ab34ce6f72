"""``planaria lab codes``: search a code of sparse parity checks, and compare and write it and its product."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from planaria.common import atomic
from planaria.common.errors import UserError
from planaria.recovery import codes
from planaria.recovery.codes import ErasureCode
from planaria.recovery.codes.base import MOST, share
from planaria.recovery.codes.local import needed
from planaria.recovery.codes.product import ClassicalCode
from planaria.recovery.codes.product import file as product_file
from planaria.recovery.codes.search import FoundCode, SearchTarget, anneal, certificate, file
from planaria.report.tables import Table, show

MOST_TRIES = 10_000_000
TRIED = 20_000
"""most sets of losses in a cell of the table"""
GROUP = 4
"""size of the local groups in the comparison"""


@dataclass(frozen=True)
class CodeSearch:
    """The target of a search, its effort, and the files to write."""

    target: SearchTarget
    seed: int
    tries: int
    to: Path | None = None
    product: Path | None = None


def search(request: CodeSearch) -> int:
    """Search and print a code; return 1 if it misses the target, which does not prevent writing it.

    :raises UserError: if a number is out of range, or a file cannot be written.
    """
    if not 1 <= request.tries <= MOST_TRIES:
        raise UserError(f"--tries: {request.tries}; give 1 to {MOST_TRIES}")
    target = request.target
    if (sets := math.comb(target.shards, target.distance)) > MOST:
        raise UserError(
            f"--distance {target.distance}: {sets} sets of {target.distance} of {target.shards} shards, but a "
            f"certificate covers at most {MOST}; lower it, or --shards"
        )
    for path in (request.to, request.product):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: {path.parent} is not a folder; create it, or write elsewhere")
    found = anneal(target, request.seed, request.tries)
    measured = certificate(found)
    show([_description(found, measured), _comparison(found.code)])
    if request.to is not None:
        atomic.write_text(request.to, file(found).model_dump_json(indent=1) + "\n")
    if request.product is not None:
        _write_product(found, request.product)
    short = found.excess or int(str(measured["distance"])) < target.distance
    if short:
        print(f"falls short: distance {measured['distance']} of {target.distance}, {found.excess} edges too many")
    return int(bool(short))


def _description(found: FoundCode, measured: dict[str, object]) -> Table:
    n, k = measured["shards"], measured["data"]
    rows = [
        [
            f"[{n}, {k}, {measured['distance']}]",
            "shards, data, distance: checked with all words, and all losses of that size",
        ],
        [_spread(measured["check weights"]), "shards in a check"],
        [_spread(_degrees(found.code)), "checks of a shard"],
        [str(found.tried), f"candidate matrices, seed {found.seed}"],
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
    tolerated = [tolerate for tolerate in range(1, parities) if needed(tolerate, GROUP) == globals_]
    if tolerated and math.comb(shards, tolerated[-1]) <= TRIED:
        with suppress(UserError):  # no coefficients were found
            rivals.append((f"local, groups of {GROUP}", codes.code("local", shards, tolerated[-1], {"group": GROUP})))
    return rivals


def _degrees(code: ErasureCode) -> list[int]:
    return sorted(sum(shard in check for check in code.checks) for shard in range(code.shards))


def _spread(numbers: object) -> str:
    assert isinstance(numbers, list)
    return f"{min(numbers)} to {max(numbers)}"


def _write_product(found: FoundCode, path: Path) -> None:
    """Write the hypergraph product of the code with itself."""
    rows = tuple(sum(1 << shard for shard in check) for check in found.code.checks)
    made = product_file(ClassicalCode(rows, found.code.shards), ClassicalCode(rows, found.code.shards))
    heaviest = max(map(len, (*made.x, *made.z)))
    print(
        f"hypergraph product: [[{made.qubits}, {made.logical}, {made.distance}]], checks of at most {heaviest} qubits"
    )
    atomic.write_text(path, made.model_dump_json() + "\n")
